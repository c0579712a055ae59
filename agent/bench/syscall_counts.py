"""System calls of an agent between heartbeats and for a publication, counted with strace.

*Heartbeats*: waits in the kernel of each Python thread of an idle agent. The agent has 8 GPUs, 30 cgroups, a
history file, a subscriber of a driver's socket and one of ``agent.sock``. Both only read, so that no answer
wakes the agent. Waits for Python's interpreter lock are not counted, because they depend on the
machine: threads that wake at the same time compete for the lock.

*Publications*: from ``publish()`` to the clients, also their opcodes and times. Publisher and clients are
processes of the suite ``publish``. A client only reads frames, so that all streams are lent to the publishing
thread. Opcodes of Python are those of the call of ``LatestValue.publish()``.
"""

import re
import statistics
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from agent.bench.file_trees import temporary_directory, write_cgroup_files
from agent.bench.idle_counts import count_opcodes, run_python
from agent.bench.processes import (
    AGENT_METHOD,
    C_THREADS,
    DRIVER,
    HEALTH_METHOD,
    ChildProcess,
    ThreadTracer,
    agent_socket,
    driver_socket,
    start_agent,
    start_module,
    trace_threads,
    write_gpu_scenario,
)
from agent.bench.publisher import make_report
from agent.bench.result import MeasurementError
from agent.bench.suites.report_path import BARE_SOCKETS, FRAMES, open_clients, publish_in_turn
from agent.bench.timing import ContenderSamples, MedianInterval, paired_ratio
from agent.model.report import Report
from agent.serve.grpc_servers import GrpcServers
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import AsyncioThread

GPUS: Final = 8
GROUPS: Final = 30
HEARTBEATS: Final = 12
BEGIN_S: Final = 10.0
"""Time that the trace has until the first heartbeat [s]."""
SLOW_HEARTBEAT_S: Final = 5.0
"""Longest time to wait for one heartbeat, since a busy machine delays it; one is due each 250 ms [s]."""
ENDED: Final = "ended"
"""Name for all threads that ended during the count."""
CORE_WAKES: Final = "core_wakes"
"""Name of the number of threads that the core thread wakes through a lock."""
HEARTBEAT_THREADS: Final[Mapping[str, str]] = {
    "core": "",
    "io": "dh-io",
    "history": "dh-history",
    "log": "dh-log",
    "nvml": "dh-nvml",
    "pods": "dh-pods",
    ENDED: "",
}
"""Names of all Python threads in the kernel, by name in the budgets; two are found by their ids."""
WAITS: Final = frozenset(
    {"clock_nanosleep", "epoll_pwait", "epoll_pwait2", "epoll_wait", "futex", "poll", "ppoll"}
    | {"pselect6", "restart_syscall", "select", "wait4", "waitid"}
)
"""System calls in which a thread of Python waits."""
_CALL: Final = re.compile(r"^(\d+\.\d+) (\w+)\((.*)$")
_NO_WAIT: Final = re.compile(r", 0(?:, NULL, 8)?\) +=|, FUTEX_WAKE|= -1 EAGAIN")
"""Pattern of the arguments and result of a call that returns at once."""
_WAKE: Final = re.compile(r", FUTEX_WAKE.* = [1-9]\d*$")
"""Pattern of the arguments and result of a call that wakes a thread."""


class TracedCall(NamedTuple):
    """System call in the output of strace."""

    at_s: float
    name: str
    text: str
    """Arguments and result."""

    def is_wait(self, lock_memory: Sequence[range]) -> bool:
        """Return whether the thread waited, but not for a lock in `lock_memory`."""
        return self.name in WAITS and not _NO_WAIT.search(self.text) and not self._is_on(lock_memory)

    def is_wake(self, lock_memory: Sequence[range]) -> bool:
        """Return whether the call woke a thread that waited for a lock, but not for one in `lock_memory`."""
        return self.name == "futex" and bool(_WAKE.search(self.text)) and not self._is_on(lock_memory)

    @property
    def is_beat(self) -> bool:
        """Return whether the core thread woke the I/O thread: it sent a byte."""
        return self.name == "sendto" and self.text.endswith(" = 1")

    def _is_on(self, lock_memory: Sequence[range]) -> bool:
        if self.name != "futex":
            return False
        address = int(self.text.partition(",")[0], 16)
        return any(address in memory for memory in lock_memory)


def count_heartbeat_waits() -> Mapping[str, float]:
    """Count how often each Python thread of an idle agent waits per heartbeat.

    Returns the counts by name in HEARTBEAT_THREADS, and the number of threads that the core thread wakes
    through a lock as CORE_WAKES. They are medians over the intervals between heartbeats: a delayed agent
    reads again, which adds waits.

    Raises:
        FakeNvmlUnavailable: The fake NVML cannot be built.
        MeasurementError: The agent has too few heartbeats, or a thread that HEARTBEAT_THREADS lacks.
    """
    with temporary_directory() as root, ExitStack() as stack:
        tree, fake = write_cgroup_files(root / "cgroup", GROUPS), write_gpu_scenario(root, GPUS)
        paths = {
            "--cgroupfs-root": tree.cgroupfs,
            "--kubelet-dir": root / "kubelet",
            "--nvml-library": fake.library,
            "--state-dir": root / "state",
        }
        flags = [str(part) for part in chain.from_iterable(paths.items())]
        heartbeat = '[stream]\nheartbeat = "250ms"\n'
        agent = stack.enter_context(start_agent(root, flags, heartbeat, fake.environment))
        sockets = {driver_socket(root): HEALTH_METHOD, agent_socket(root): AGENT_METHOD}
        for socket, method in sockets.items():
            client = stack.enter_context(start_module("agent.bench.subscribers", socket, "frames", method))
            client.server = agent
            client.send_line("1")
            client.wait(lambda line: "subscribers" in line)
        tracer = stack.enter_context(trace_threads(agent.pid, "-ttt"))
        return _read_counts(agent.pid, tracer)


def _read_counts(pid: int, tracer: ThreadTracer) -> Mapping[str, float]:
    """Return the counts of the process `pid`, which `tracer` traces."""
    limit_s = BEGIN_S + SLOW_HEARTBEAT_S * HEARTBEATS
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        time.sleep(0.25)
        tracer.require_running()
        by_thread = {tid: list(parse_calls(text)) for tid, text in tracer.read().items()}
        if sum(call.is_beat for call in by_thread.get(pid, ())) > HEARTBEATS:
            return count_waits(pid, by_thread, _thread_names(pid), interpreter_memory(pid))
    raise MeasurementError(f"agent: {HEARTBEATS} heartbeats took longer than {limit_s:g} s")


def parse_calls(text: str) -> Iterator[TracedCall]:
    """Yield the system calls in the output of ``strace -ttt`` for one thread."""
    for line in text.splitlines():
        if call := _CALL.match(line):
            yield TracedCall(float(call[1]), call[2], call[3])


def _thread_names(pid: int) -> Mapping[int, str]:
    """Return the name of each thread of a process in HEARTBEAT_THREADS; otherwise its name in the kernel."""
    keys = {name: key for key, name in HEARTBEAT_THREADS.items() if name}
    names = {pid: "core"}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            name = (task / "comm").read_text().rstrip("\n")
            names.setdefault(int(task.name), keys.get(name, name))
    return names


def count_waits(
    core: int,
    by_thread: Mapping[int, Sequence[TracedCall]],
    names: Mapping[int, str],
    lock_memory: Sequence[range],
) -> Mapping[str, float]:
    """Return the median counts between two heartbeats, as :func:`count_heartbeat_waits` does.

    Args:
        core: Id of the core thread.
        by_thread: System calls by thread id.
        names: Names of the threads that have not ended.
        lock_memory: Memory of the interpreter's own locks.

    Raises:
        MeasurementError: A thread has another name, and is not one of the C core.
    """
    beats = [call.at_s for call in by_thread[core] if call.is_beat]
    times: dict[str, list[float]] = {name: [] for name in HEARTBEAT_THREADS}
    times[CORE_WAKES] = [call.at_s for call in by_thread[core] if call.is_wake(lock_memory)]
    for tid, calls in by_thread.items():
        name = names.get(tid, ENDED)
        if name in C_THREADS:
            continue
        if name not in times:
            raise MeasurementError(f"agent: thread {name!r} is not in HEARTBEAT_THREADS, so it has no budget")
        times[name] += [call.at_s for call in calls if call.is_wait(lock_memory)]
    return {name: statistics.median(_count_between(beats, found)) for name, found in times.items()}


def _count_between(beats: Sequence[float], times: Iterable[float]) -> Sequence[int]:
    """Return how many of the times are in each interval between two heartbeats."""
    counts = [0] * (len(beats) + 1)
    for at_s in times:
        counts[bisect_right(beats, at_s)] += 1
    return counts[1:-1]


def interpreter_memory(pid: int) -> Sequence[range]:
    """Return the memory of the variables of the interpreter, and so of its lock, in a Python process."""
    program = str(Path(sys.executable).resolve())
    found, is_own = list[range](), False
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, *_, path = f"{line} ".split(" ", 5)
        path = path.strip()
        is_own = path == program or "/libpython" in path or (is_own and not path)
        if is_own:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            found.append(range(begin, end))
    return found


# --- publications ------------------------------------------------------------------------------------------

PUBLICATION_CLIENTS: Final[Mapping[str, int]] = {"publish_1": 1, "publish_64": 64}
"""Number of clients in each workload."""
DEVICES: Final = 8
"""Number of devices of each report whose publication is counted."""
PUBLICATIONS: Final = 9
"""Number of publications; the counts are their medians."""
RATIO_PUBLICATIONS: Final = 200
"""Number of publications whose times are compared with those of sends to bare sockets."""
ATTACH_S: Final = 10.0
"""Longest time that strace has to attach to the publisher [s]."""
PAUSE_S: Final = 0.05
"""Pause before a publication, in which the event loop lends all streams [s]."""
_PUBLICATION_CALL: Final = re.compile(r"^(sendmsg|sendto|epoll_wait|recvfrom)\(")
_BEGIN, _END = 'read(0, "publish', "write(1, "
"""Begin of the first, and of the last system call of a publication in the publishing thread."""


def count_publication_calls(name: str) -> Mapping[str, float]:
    """Count the system calls of both threads for one publication, by thread and call.

    The publishing thread (core) sends with ``sendmsg`` to each client, and wakes the I/O thread with
    ``sendto``. The clients answer nothing, so that the I/O thread (io) only wakes.

    Raises:
        MeasurementError: strace ended, or the clients did not receive the reports.
    """
    with ExitStack() as stack:
        clients = open_clients(stack, FRAMES, DEVICES)
        clients.subscribe(PUBLICATION_CLIENTS[name])
        pid = clients.publisher.pid
        tracer = stack.enter_context(trace_threads(pid))
        deadline = time.monotonic() + ATTACH_S
        while pid not in tracer.read() and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        for _ in range(PUBLICATIONS):
            time.sleep(PAUSE_S)
            tracer.require_running()
            clients.publish()
        time.sleep(PAUSE_S)
        by_thread = tracer.read()
    core = _calls_of_publications(by_thread.pop(pid, ""))
    counts = {f"core_{call}": statistics.median(run[call] for run in core) for call in ("sendmsg", "sendto")}
    io = Counter(_calls(next((text for text in by_thread.values() if "recvfrom(" in text), "")))
    return counts | {f"io_{call}": round(io[call] / len(core)) for call in sorted(io)}


def _calls(text: str) -> list[str]:
    return [match[1] for line in text.splitlines() if (match := _PUBLICATION_CALL.match(line))]


def _calls_of_publications(text: str) -> list[Counter[str]]:
    """Return the system calls of each publication in the strace output of the publishing thread."""
    counts: list[Counter[str]] = []
    current: list[str] | None = None
    for line in text.splitlines():
        if line.startswith(_BEGIN):
            current = []
        elif current is not None and line.startswith(_END):
            counts.append(Counter(_calls("\n".join(current))))
            current = None
        elif current is not None:
            current.append(line)
    if not counts:
        raise MeasurementError("strace: shows no publication")
    return counts


def count_publication_opcodes(name: str) -> int:
    """Return the number of Python opcodes that the publishing thread executes for one publication."""
    clients = PUBLICATION_CLIENTS[name]
    program = f"from agent.bench.syscall_counts import print_publication_opcodes as p; p({clients})"
    return int(run_python(["-c", program]))


def print_publication_opcodes(subscribers: int) -> None:
    """Count the opcodes of publications to ``subscribers`` clients in this process; print their median."""
    with temporary_directory() as directory, ExitStack() as stack:
        latest = LatestValue[Report]()
        servers = GrpcServers(latest, runtime_dir=directory, drivers=[DRIVER], version="")
        io = AsyncioThread(servers.run, on_failure=lambda error: print(error, file=sys.stderr))
        io.start()
        stack.callback(io.stop)
        latest.publish(make_report(DEVICES, 0))
        socket = directory / f"drivers/{DRIVER}.sock"
        crowd: ChildProcess = stack.enter_context(
            start_module("agent.bench.subscribers", socket, FRAMES.crowd, HEALTH_METHOD)
        )
        crowd.send_line(f"{subscribers}")
        crowd.wait(lambda line: "subscribers" in line)
        counts: list[int] = []
        for number in range(1, PUBLICATIONS + 1):
            time.sleep(PAUSE_S)
            report = make_report(DEVICES, number)
            counts.append(count_opcodes(partial(latest.publish, report)))
            crowd.wait()
        print(round(statistics.median(counts)))


def measure_publication_ratio(clients: int) -> MedianInterval:
    """Return how many times as long a publication to clients takes as the same writes to bare sockets."""
    with ExitStack() as stack:
        groups = [open_clients(stack, kind) for kind in (FRAMES, BARE_SOCKETS)]
        for group in groups:
            group.subscribe(clients)
        latencies = publish_in_turn(groups, RATIO_PUBLICATIONS)
    frames, bare = (
        ContenderSamples(tuple((float(value),) for value in latencies[group.kind.key]), 1) for group in groups
    )
    return paired_ratio(frames, bare)
