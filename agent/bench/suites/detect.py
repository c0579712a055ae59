"""From a cause to a client that knows: a real agent, a real change, a subscriber in a third process.

The clock starts just before the system call that makes the change, and stops when the subscriber's library
hands over the message. Nothing is subtracted, unless the row says so.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from agent.bench.effort import Effort
from agent.bench.latency import caused, seconds
from agent.bench.processes import HEALTH_METHOD, agent, health_socket, subscriber
from agent.bench.result import Outcome, Table, row_of
from agent.bench.suites import detect_events, detect_gpus
from agent.bench.trees import machine_lock, scratch, write_sysfs

REAL_POOL: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
SHRUNK: Final = r"mem\.hugepages\.pool_shrunk"
PAGES: Final = 4


def run(effort: Effort) -> Outcome:
    """A file that is polled; events of a cgroup, a CPU, the kernel log and a GPU; a GPU that hangs."""
    outcome = Outcome()
    for period_ms in effort.detect_periods_ms:
        _file_value(effort, outcome, period_ms)
    detect_events.run(effort, outcome)
    detect_gpus.run(effort, outcome)
    return outcome


# --- a value that is polled -------------------------------------------------------------------------------


def _file_value(effort: Effort, outcome: Outcome, period_ms: int) -> None:
    with scratch() as directory, contextlib.ExitStack() as stack:
        flags = ["--period", f"{period_ms}ms", "--cgroupfs-root", str(directory / "none")]
        try:
            change = stack.enter_context(_real_pool())
            backend = "the machine's own"
        except OSError as error:
            outcome.skipped.append(f"detect: no real hugepage pool: {error}; measured on a file")
            write_sysfs(directory / "sys")
            flags += ["--sysfs-root", str(directory / "sys")]
            change = fixture_pool(directory / "sys")
            backend = "a file on tmpfs that looks like one"
        stack.enter_context(agent(directory, flags))
        client = stack.enter_context(subscriber(health_socket(directory), HEALTH_METHOD, SHRUNK))
        client.wait(lambda line: "found" in line and not line["found"])
        latencies = []
        for place in range(effort.causes):
            if place:
                change(0)
                client.wait(lambda line: not line["found"])
            latencies.append(caused(client, lambda: change(-1), lambda line: bool(line["found"])).took_ns)
        row = row_of(f"detect.file.{period_ms}ms", "pool shrinks", seconds(latencies), "s")
        notes = (
            f"bounded by the period: 0 to {period_ms} ms of it are waiting for the next pass",
            f"one subscriber, {client.library}; from before the write",
        )
        section = f"file value to client; a hugepage pool, {backend}"
        outcome.tables.append(Table(f"period {period_ms} ms", (row,), notes=notes, section=section))


@contextlib.contextmanager
def _real_pool() -> Iterator[Callable[[int], int]]:
    """The machine's 2 MiB pages, a few more than there were; yields what sets them relative to that."""
    with machine_lock():
        yield from _resized()


def _resized() -> Iterator[Callable[[int], int]]:
    before = int(REAL_POOL.read_text())
    try:
        REAL_POOL.write_text(f"{before + PAGES}\n")
        if int(REAL_POOL.read_text()) != before + PAGES:
            raise OSError(f"{REAL_POOL}: the kernel has no {PAGES} pages to spare")
        yield lambda delta: _write(REAL_POOL, before + PAGES + delta)
    finally:
        with contextlib.suppress(PermissionError):
            REAL_POOL.write_text(f"{before}\n")


def _write(path: Path, value: int) -> int:
    start_ns = time.monotonic_ns()
    path.write_text(f"{value}\n")
    return start_ns


def fixture_pool(sysfs: Path) -> Callable[[int], int]:
    """What sets the pool of a tree of files to so many pages more than it has; says when it began [ns]."""
    files = [directory / "nr_hugepages" for directory in sysfs.rglob("hugepages-2048kB")]
    before = int(files[0].read_text())

    def change(delta: int) -> int:
        start_ns = time.monotonic_ns()
        for path in files:
            with path.open("r+b", buffering=0) as file:  # in place: a reader must never see it empty
                file.write(b"%d\n" % (before + delta))
        return start_ns

    return change
