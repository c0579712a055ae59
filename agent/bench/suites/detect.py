"""Detection latency, from a cause to a client: a real agent, a real change, and a subscriber process.

The clock starts just before the system call that makes the change, and stops when the subscriber's library
delivers the message. Nothing is subtracted unless the label of the row states it. GPU faults (an NVML event,
a hanging call) are those of the fake NVML.

Suite ``trace``: the latency of a change for each hop on its path: cause, C core, eventfd, Trio, step(),
encoding, asyncio, socket, client.

agent.bench.traced_agent reads the clock six times along the path of a change. The first hop begins before
the system call that is the cause; the last ends when the client's library delivers the message. Bare wakes
of a Trio task and of a receiver show what two of the hops cost if nothing else is done; that of an asyncio
loop is the least that a client waits longer if the publishing thread cannot send to it.
"""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import trio

from agent.bench.file_trees import machine_lock, temporary_directory, write_sysfs
from agent.bench.processes import (
    DRIVER,
    HEALTH_METHOD,
    ChildProcess,
    FakeNvmlControl,
    FakeNvmlUnavailable,
    JsonLine,
    Subscriber,
    driver_socket,
    measure_latency,
    sleep_past_coalescing,
    split_into_batches,
    start_agent,
    start_module,
    start_subscriber,
    write_gpu_scenario,
)
from agent.bench.result import ResultTable, RunSize, SuiteOutcome, row_from_samples, seconds_from_ns
from agent.bench.suites import detect_events

GPUS: Final = 16
"""GPUs of each agent: half of them for events, half of them for hangs."""
XID: Final = 62
"""XID of a halted micro-controller, which always makes the GPU Unhealthy."""
GPU_PERIOD_MS: Final = 10
DEADLINE_MS: Final = 100
GPU_CONFIG: Final = f'[gpu]\ndeadline = "{DEADLINE_MS}ms"\ndead = "1m"\n'
FAULT_PATTERN: Final = r"(gpu-\d+).{1,24}?gpu\.(?:xid|not_answering)"
"""Device name in the kubelet's message, followed by a finding code."""


def measure_gpu_faults(run_size: RunSize, outcome: SuiteOutcome) -> None:
    """Measure how fast agents detect NVML events and hanging NVML calls, each on a GPU without a fault.

    The agents call NVML in a process of its own and, for comparison of the events, in their own process.
    """
    events: list[int] = []
    events_inside: list[int] = []
    hangs: list[int] = []
    library = ""
    try:
        for batch in split_into_batches(run_size.causes, GPUS // 2):
            library = _measure_agent(GPU_CONFIG, len(batch), events, hangs)
            if run_size.nvml_inside:
                _measure_agent(f"{GPU_CONFIG}process = false\n", len(batch), events_inside, None)
    except FakeNvmlUnavailable as reason:
        outcome.skipped.append(f"detect: GPUs: {reason}")
        return
    measured = {
        "nvml": (f"XID {XID} as an event of NVML", events),
        "nvml.inside": ("the same with NVML inside the agent (gpu.process = false)", events_inside),
        "hang": ("NVML call that hangs: minus its deadline", hangs),
    }
    if not run_size.nvml_inside:
        del measured["nvml.inside"]
        outcome.skipped.append("detect: NVML inside the agent: skipped by --quick")
    rows = tuple(
        row_from_samples(f"detect.{key}", label, seconds_from_ns(latencies), "s")
        for key, (label, latencies) in measured.items()
    )
    notes = (
        f"one subscriber, {library}; from before the command to the fake NVML",
        f"{GPUS} GPUs, each with one fault at most",
        f"the deadline is {DEADLINE_MS} ms; a hang includes 0 to {GPU_PERIOD_MS} ms until the next pass",
    )
    outcome.tables.append(ResultTable("GPU to client; fake NVML", rows, notes=notes))


def _measure_agent(config: str, gpus: int, events: list[int], hangs: list[int] | None) -> str:
    """Cause NVML events and hanging NVML calls for a new agent, and append their detection latencies.

    An event happens on each of ``gpus`` GPUs. Unless ``hangs`` is None, a call hangs on as many other GPUs.
    Returns the name of the subscriber's gRPC library.

    Raises:
        FakeNvmlUnavailable: The fake library cannot be built.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(temporary_directory())
        fake = write_gpu_scenario(directory, GPUS)
        flags = ["--period", f"{GPU_PERIOD_MS}ms", "--nvml-library", str(fake.library)]
        flags += ["--cgroupfs-root", str(directory / "none")]
        agent = stack.enter_context(start_agent(directory, flags, config, fake.environment))
        client = stack.enter_context(
            start_subscriber(driver_socket(directory), HEALTH_METHOD, FAULT_PATTERN, agent)
        )
        client.wait(lambda line: "found" in line)
        control = stack.enter_context(fake.connect(agent))
        for gpu in range(gpus):
            event = partial(control.send, f"gpu {gpu} xid {XID}")
            events.append(measure_latency(client, event, partial(_names_gpu, gpu)).took_ns)
        if hangs is None:
            return client.library
        for gpu in range(GPUS // 2, GPUS // 2 + gpus):
            hang = partial(_hang_call, control, gpu)
            hangs.append(measure_latency(client, hang, partial(_names_gpu, gpu)).took_ns)
            control.send(f"gpu {gpu} release")
        return client.library


def _hang_call(control: FakeNvmlControl, gpu: int) -> int:
    return control.send(f"gpu {gpu} hang nvmlDeviceGetFieldValues") + DEADLINE_MS * 1_000_000


def _names_gpu(gpu: int, line: JsonLine) -> bool:
    return f"gpu-{gpu}" in line["found"]


REAL_POOL: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
SHRUNK: Final = r"mem\.hugepages\.pool_shrunk"
PAGES: Final = 4


def run(run_size: RunSize) -> SuiteOutcome:
    """Measure how fast an agent detects each kind of change.

    The changes are those of a polled file; events of a cgroup, a CPU, the kernel log and a GPU; and a hanging
    GPU.
    """
    outcome = SuiteOutcome()
    for period_ms in run_size.detect_periods_ms:
        _measure_file_value(run_size, outcome, period_ms)
    detect_events.run(run_size, outcome)
    measure_gpu_faults(run_size, outcome)
    return outcome


# --- a value that is polled -------------------------------------------------------------------------------


def _measure_file_value(run_size: RunSize, outcome: SuiteOutcome, period_ms: int) -> None:
    with temporary_directory() as directory, contextlib.ExitStack() as stack:
        flags = ["--period", f"{period_ms}ms", "--cgroupfs-root", str(directory / "none")]
        try:
            change = stack.enter_context(_resizable_real_pool())
            backend = "of this machine"
        except OSError as error:
            outcome.skipped.append(f"detect: no real hugepage pool: {error}; measured on a file")
            write_sysfs(directory / "sys")
            flags += ["--sysfs-root", str(directory / "sys")]
            change = fixture_pool(directory / "sys")
            backend = "imitated by a file on tmpfs"
        agent = stack.enter_context(start_agent(directory, flags))
        client = stack.enter_context(start_subscriber(driver_socket(directory), HEALTH_METHOD, SHRUNK, agent))
        client.wait(lambda line: "found" in line and not line["found"])
        latencies = []
        for round_index in range(run_size.causes):
            if round_index:
                change(0)
                client.wait(lambda line: not line["found"])
            latencies.append(
                measure_latency(client, lambda: change(-1), lambda line: bool(line["found"])).took_ns
            )
        row = row_from_samples(f"detect.file.{period_ms}ms", "pool shrinks", seconds_from_ns(latencies), "s")
        notes = (
            f"bounded by the period: includes 0 to {period_ms} ms of waiting for the next pass",
            f"one subscriber, {client.library}; from before the write",
        )
        section = f"file value to client; a hugepage pool, {backend}"
        outcome.tables.append(ResultTable(f"period {period_ms} ms", (row,), notes=notes, section=section))


@contextlib.contextmanager
def _resizable_real_pool() -> Iterator[Callable[[int], int]]:
    """Add a few 2 MiB pages to the machine's hugepage pool, and yield a function that resizes the pool.

    The function changes the number of pages by its argument and returns its start time [ns].
    """
    with machine_lock():
        yield from _pool_resizer()


def _pool_resizer() -> Iterator[Callable[[int], int]]:
    before = int(REAL_POOL.read_text())
    try:
        REAL_POOL.write_text(f"{before + PAGES}\n")
        if int(REAL_POOL.read_text()) != before + PAGES:
            raise OSError(f"hugepage pool {REAL_POOL}: the kernel cannot allocate {PAGES} more pages")
        yield lambda delta: _write_number(REAL_POOL, before + PAGES + delta)
    finally:
        with contextlib.suppress(PermissionError):
            REAL_POOL.write_text(f"{before}\n")


def _write_number(path: Path, value: int) -> int:
    start_ns = time.monotonic_ns()
    path.write_text(f"{value}\n")
    return start_ns


def fixture_pool(sysfs: Path) -> Callable[[int], int]:
    """Return a function that changes the number of hugepages in a made-up sysfs tree.

    The function adds its argument to the original number and returns its start time [ns].
    """
    files = [directory / "nr_hugepages" for directory in sysfs.rglob("hugepages-2048kB")]
    before = int(files[0].read_text())

    def change(delta: int) -> int:
        start_ns = time.monotonic_ns()
        for path in files:
            with path.open("r+b", buffering=0) as file:  # in place, so that no reader sees an empty file
                file.write(b"%d\n" % (before + delta))
        return start_ns

    return change


# --- suite trace -------------------------------------------------------------------------------------------

PERIOD_MS: Final = 10
HOPS: Final = (
    ("rung", "cause to eventfd: the next pass, reading, comparing"),
    ("woken", "eventfd to Trio: a thread wakes"),
    ("read", "snapshot copied and decoded"),
    ("decided", "step(), and the check for changes"),
    ("taken", "report to encoder: the devices that changed; no wake unless a client reads slowly"),
    ("encoded", "encoding in C"),
    ("client", "socket to client: two processes, grpcio's threads"),
)


TRACED_NODES: Final = 6
"""NUMA nodes of the traced agent: with the memory and the pool of node 0, it has 8 devices."""


def run_trace(run_size: RunSize) -> SuiteOutcome:
    """Measure the hops from a changed file (a hugepage pool on tmpfs) to a subscriber."""
    outcome = SuiteOutcome()
    with temporary_directory() as directory, contextlib.ExitStack() as stack:
        write_sysfs(directory / "sys", TRACED_NODES)
        flags = {
            "--period": f"{PERIOD_MS}ms",
            "--sysfs-root": str(directory / "sys"),
            "--cgroupfs-root": str(directory / "none"),
            "--runtime-dir": str(directory / "run"),
            "--driver": [DRIVER],
        }
        agent = stack.enter_context(start_module("agent.bench.traced_agent", json.dumps(flags)))
        client = stack.enter_context(start_subscriber(driver_socket(directory), HEALTH_METHOD, SHRUNK, agent))
        client.wait(lambda line: "found" in line and not line["found"])
        outcome.tables.append(_measure(run_size, directory, agent, client))
    outcome.tables.append(_measure_bare_wakes(run_size.publications))
    return outcome


def _measure(run_size: RunSize, directory: Path, agent: ChildProcess, client: Subscriber) -> ResultTable:
    change = fixture_pool(directory / "sys")
    hops: dict[str, list[int]] = {key: [] for key, _ in HOPS}
    totals: list[int] = []
    for round_index in range(run_size.events):  # each takes a second to clear
        if round_index:
            change(0)
            client.wait(lambda line: not line["found"])
        sleep_past_coalescing()
        agent.discard_lines()
        start_ns = change(-1)
        end_ns = int(client.wait(lambda line: bool(line["found"]))["t_ns"])
        stamps = agent.wait() | {"client": end_ns}
        for key, duration_ns in hop_times(stamps, start_ns).items():
            hops[key].append(duration_ns)
        totals.append(end_ns - start_ns)
    rows = [row_from_samples(f"trace.{key}", label, seconds_from_ns(hops[key]), "s") for key, label in HOPS]
    from_wake = [total - first for total, first in zip(totals, hops[HOPS[0][0]], strict=True)]
    rows.append(row_from_samples("trace.wake", "eventfd to client", seconds_from_ns(from_wake), "s"))
    rows.append(row_from_samples("trace.all", "total", seconds_from_ns(totals), "s"))
    notes = (
        f"the first hop includes 0 to {PERIOD_MS} ms of waiting for the next pass",
        f"one subscriber, {client.library}; {TRACED_NODES + 2} devices",
    )
    return ResultTable("a pool shrinks, files on tmpfs", tuple(rows), notes=notes)


def hop_times(stamps: JsonLine, start_ns: int) -> dict[str, int]:
    """Return the duration of each hop [ns] from the times when hops ended and when the change began."""
    duration_ns = {}
    before = start_ns
    for key, _ in HOPS:
        duration_ns[key] = stamps[key] - before
        before = stamps[key]
    return duration_ns


# --- the lower bounds of the hops --------------------------------------------------------------------------

WAKE_PAUSE_S: Final = 0.02
"""Time between two bare wakes, in which all threads sleep [s]."""


def _measure_bare_wakes(count: int) -> ResultTable:
    """Measure what a hop from thread to thread or to a client costs if nothing else is done."""
    durations_ns = {
        "trio": ("a Trio task waits for an eventfd: bound of eventfd to Trio", time_trio_wakes(count)),
        "asyncio": ("call_soon_threadsafe(): on the way to slow clients", time_asyncio_wakes(count)),
        "socket": ("send(2) to a thread that only receives: bound of socket to client", time_receipts(count)),
    }
    rows = tuple(
        row_from_samples(f"trace.bare.{key}", label, seconds_from_ns(taken_ns), "s")
        for key, (label, taken_ns) in durations_ns.items()
    )
    notes = (f"another thread or process wakes the receiver, {WAKE_PAUSE_S * 1000:g} ms apart",)
    return ResultTable("bare wakes of the interpreter", rows, notes=notes)


def time_trio_wakes(count: int) -> list[int]:
    """Return the durations from writes of an eventfd, by another thread, until a Trio task runs [ns]."""
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)  # a read takes one write only
    woken_ns: list[int] = []

    async def receive() -> None:
        for _ in range(count):
            await trio.lowlevel.wait_readable(fd)
            woken_ns.append(time.monotonic_ns())
            os.eventfd_read(fd)

    try:
        with _repeat_in_thread(count, lambda: os.eventfd_write(fd, 1)) as sent_ns:
            trio.run(receive)
    finally:
        os.close(fd)
    return [woken - sent for woken, sent in zip(woken_ns, sent_ns, strict=True)]


def time_asyncio_wakes(count: int) -> list[int]:
    """Return the durations from calls of call_soon_threadsafe() until an asyncio loop runs the call [ns]."""
    woken_ns: list[int] = []

    async def receive() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def note() -> None:
            woken_ns.append(time.monotonic_ns())
            if len(woken_ns) == count:
                done.set()

        with _repeat_in_thread(count, lambda: loop.call_soon_threadsafe(note)) as sent:
            await done.wait()
        sent_ns.extend(sent)

    sent_ns: list[int] = []
    asyncio.run(receive())
    return [woken - sent for woken, sent in zip(woken_ns, sent_ns, strict=True)]


def time_receipts(count: int) -> list[int]:
    """Return the durations from sends to a unix socket until a process has received the byte [ns]."""
    durations_ns: list[int] = []
    with temporary_directory() as directory, socket.socket(socket.AF_UNIX) as server:
        path = directory / "bare.sock"
        server.bind(str(path))
        server.listen()
        with start_module("agent.bench.subscribers", path, "bare", 1) as client:
            client.send_line("1")
            with server.accept()[0] as connection:
                client.wait(lambda line: "subscribers" in line)
                for _ in range(count):
                    time.sleep(WAKE_PAUSE_S)
                    start_ns = time.monotonic_ns()
                    connection.send(b"-")
                    durations_ns.append(int(client.wait()["t_ns"]) - start_ns)
    return durations_ns


@contextlib.contextmanager
def _repeat_in_thread(count: int, wake: Callable[[], object]) -> Iterator[list[int]]:
    """Call a function several times in a thread, and yield the list of the times of these calls [ns]."""
    times_ns: list[int] = []

    def call() -> None:
        for _ in range(count):
            time.sleep(WAKE_PAUSE_S)
            times_ns.append(time.monotonic_ns())
            wake()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield times_ns
    finally:
        thread.join()
