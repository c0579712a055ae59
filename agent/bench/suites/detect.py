"""From a cause to a client that knows: a real agent, a real change, a subscriber in a third process.

The clock starts just before the system call that makes the change, and stops when the subscriber's library
hands over the message. Nothing is subtracted.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from agent.bench.effort import Effort
from agent.bench.processes import (
    AGENT_METHOD,
    HEALTH_METHOD,
    Silence,
    agent,
    agent_socket,
    health_socket,
    subscriber,
)
from agent.bench.result import NS_PER_S, Outcome, Table, row_of
from agent.bench.trees import Tree, machine_lock, real_tree, scratch, write_sysfs

REAL_POOL: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
SHRUNK: Final = r"mem\.hugepages\.pool_shrunk"
CONTAINER: Final = r"container ([0-9a-f]{64})"
COALESCE_S: Final = 0.1  # changes that follow one within this time are sent together: causes come later
PAGES: Final = 4
HITS: Final = 4


def run(effort: Effort) -> Outcome:
    """A polled file value, at each period, and an event of a cgroup."""
    outcome = Outcome()
    for period_ms in effort.detect_periods_ms:
        _file_value(effort, outcome, period_ms)
    try:
        _cgroup_event(effort, outcome)
    except OSError as error:
        outcome.skipped.append(f"detect: a cgroup event needs real cgroups with hugetlb: {error}")
    return outcome


def _pause() -> None:
    """Until the next change goes out at once; a random time, so that no phase of the period is preferred."""
    time.sleep(COALESCE_S * (1.2 + random.random()))


# --- a value that is polled -------------------------------------------------------------------------------


def _file_value(effort: Effort, outcome: Outcome, period_ms: int) -> None:
    with scratch() as directory, contextlib.ExitStack() as stack:
        flags = ["--period", f"{period_ms}ms", "--cgroupfs-root", str(directory / "none")]
        try:
            change = stack.enter_context(_real_pool())
            backend = f"real hugepage pool, {REAL_POOL}"
        except OSError as error:
            outcome.skipped.append(f"detect: no real hugepage pool: {error}; measured on a file")
            write_sysfs(directory / "sys")
            flags += ["--sysfs-root", str(directory / "sys")]
            change = _fixture_pool(directory / "sys")
            backend = "a file on tmpfs that looks like a hugepage pool"
        stack.enter_context(agent(directory, flags))
        client = stack.enter_context(subscriber(health_socket(directory), HEALTH_METHOD, SHRUNK))
        client.wait(lambda line: "found" in line and not line["found"])
        latencies = []
        for _ in range(effort.causes):
            _pause()
            client.seen()
            start_ns = time.monotonic_ns()
            change(-1)
            line = client.wait(lambda line: bool(line["found"]))
            latencies.append((line["t_ns"] - start_ns) / NS_PER_S)
            change(0)
            client.wait(lambda line: not line["found"])
        row = row_of(f"detect.file.{period_ms}ms", f"pool shrinks, period {period_ms} ms", latencies, "s")
        notes = (
            f"one subscriber, {client.library}; from before the write",
            f"bounded by the period: 0 to {period_ms} ms of it are waiting for the next pass",
        )
        outcome.tables.append(Table(f"file value to client; {backend}", (row,), notes=notes))


@contextlib.contextmanager
def _real_pool() -> Iterator[Callable[[int], None]]:
    """The machine's 2 MiB pages, a few more than there were; yields what sets them relative to that."""
    with machine_lock():
        yield from _resized()


def _resized() -> Iterator[Callable[[int], None]]:
    before = int(REAL_POOL.read_text())
    try:
        REAL_POOL.write_text(f"{before + PAGES}\n")
        if int(REAL_POOL.read_text()) != before + PAGES:
            raise OSError(f"{REAL_POOL}: the kernel has no {PAGES} pages to spare")
        yield lambda delta: _write(REAL_POOL, before + PAGES + delta)
    finally:
        with contextlib.suppress(PermissionError):
            REAL_POOL.write_text(f"{before}\n")


def _write(path: Path, value: int) -> None:
    path.write_text(f"{value}\n")


def _fixture_pool(sysfs: Path) -> Callable[[int], None]:
    files = [directory / "nr_hugepages" for directory in sysfs.rglob("hugepages-2048kB")]
    before = int(files[0].read_text())

    def change(delta: int) -> None:
        for path in files:
            with path.open("r+b", buffering=0) as file:  # in place: a reader must never see it empty
                file.write(b"%d\n" % (before + delta))

    return change


# --- an event ---------------------------------------------------------------------------------------------


def _cgroup_event(effort: Effort, outcome: Outcome) -> None:
    latencies: list[float] = []
    library = ""
    pods = -(-effort.causes // HITS)
    with real_tree(pods * (HITS + 1), HITS) as tree:
        containers = [group for group in tree.groups if group[1]]
        if "v2" not in tree.hierarchies or not _limit(tree.path("v2", *containers[0])).exists():
            raise OSError("no hugetlb controller in cgroup v2")
        for group in containers:
            _limit(tree.path("v2", *group)).write_text("0\n")
        for first in range(0, len(containers), HITS):
            library = _hits(tree, containers[first : first + HITS], latencies)
    row = row_of("detect.event", "a container hits its hugepage limit", latencies, "s")
    notes = (
        f"one subscriber of agent.sock, {library}; from before mmap(2)",
        "not bounded by the period; the kernel tells of one change per file in 12 to 16 ms (HZ=250), and"
        " these are further apart",
        f"pods of {HITS} containers, each agent is hit {HITS} times: its picture grows by a note with each",
    )
    outcome.tables.append(Table(f"cgroup event to client; {tree.backend}", (row,), notes=notes))


def _hits(tree: Tree, groups: Sequence[tuple[str, str]], latencies: list[float]) -> str:
    """Hit the limits of these containers under a fresh agent. Returns what the subscriber is."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch())
        flags = ["--period", "100ms", "--kubelet-cgroup-root", tree.kubelet_root]
        stack.enter_context(agent(directory, flags))
        client = stack.enter_context(subscriber(agent_socket(directory), AGENT_METHOD, CONTAINER))
        client.wait(lambda line: "found" in line)
        hit = stack.enter_context(_hitter())
        for uid, container in groups:
            _pause()
            start_ns = hit(tree.path("v2", uid, container))
            line = client.wait(partial(_tells_of, container))
            latencies.append((line["t_ns"] - start_ns) / NS_PER_S)
        return client.library


def _tells_of(container: str, line: dict[str, Any]) -> bool:
    return container in line["found"]


def _limit(group: Path) -> Path:
    return group / "hugetlb.2MB.rsvd.max"


@contextlib.contextmanager
def _hitter() -> Iterator[Callable[[Path], int]]:
    command = [sys.executable, "-m", "agent.bench.hitter"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def hit(group: Path) -> int:
            stdin.write(f"{os.fspath(group)}\n")
            stdin.flush()
            answer = stdout.readline().strip()
            if not answer.isdecimal():
                raise Silence(f"{group}: no page should be had beyond the limit, but: {answer or 'it died'}")
            return int(answer)

        try:
            yield hit
        finally:
            process.kill()
            process.wait()
