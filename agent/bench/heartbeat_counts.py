"""Waits in the kernel of each Python thread of an idle agent per heartbeat, counted with strace.

The agent has 8 GPUs, 30 cgroups, a history file, a subscriber of a driver's socket and one of ``agent.sock``.
Both only read, so that no answer of theirs wakes the agent.

Waits for Python's interpreter lock are not counted, because they depend on the machine: threads that wake at
the same time compete for the lock.
"""

import re
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from agent.bench.file_trees import temporary_directory, write_cgroup_files
from agent.bench.processes import (
    AGENT_METHOD,
    C_THREADS,
    HEALTH_METHOD,
    ThreadTracer,
    agent_socket,
    driver_socket,
    start_agent,
    start_module,
    trace_threads,
    write_gpu_scenario,
)
from agent.bench.result import MeasurementError

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
    return {name: median(_count_between(beats, found)) for name, found in times.items()}


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
