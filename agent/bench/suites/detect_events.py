"""Detection latency of kernel events: a cgroup event, a CPU event, a line of the kernel log.

The lower bound of a cgroup event and a CPU event is a C program that waits only for the same event at the
same time. The period of each agent is long, so that a polled value would stand out.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from agent.bench.effort import Effort
from agent.bench.processes import (
    AGENT_METHOD,
    HEALTH_METHOD,
    Child,
    JsonLine,
    LowerBoundUnavailable,
    ProcessError,
    agent_socket,
    batches,
    driver_socket,
    measure_latency,
    start_agent,
    start_lower_bound,
    start_module,
    start_subscriber,
)
from agent.bench.result import (
    SuiteOutcome,
    Table,
    format_value,
    row_from_samples,
    rows_from_latencies,
    seconds,
)
from agent.bench.trees import CgroupTree, machine_lock, real_tree, scratch

CONTAINER: Final = r"container ([0-9a-f]{64})"
BATCH: Final = 4
"""Containers of a pod, and limit hits per agent; the agent's report grows with each hit."""
LOG_BATCH: Final = 3
"""Log lines per agent; a note lists as many filesystems."""
FRESH_AGENT_NOTE: Final = "a new agent for every {} of them, because its report grows with each"


def run(effort: Effort, outcome: SuiteOutcome) -> None:
    """Measure each kind of event that this process may cause."""
    try:
        _cgroup(effort, outcome)
    except OSError as error:
        outcome.skipped.append(f"detect: a cgroup event needs real cgroups with hugetlb: {error}")
    if not effort.hotplugs:
        outcome.skipped.append("detect: device events and the kernel log: skipped by --quick")
        return
    try:
        _hotplug(effort, outcome)
    except OSError as error:
        outcome.skipped.append(f"detect: a device event needs a CPU that can be taken offline: {error}")
    _kernel_log(effort, outcome)


def _table(
    outcome: SuiteOutcome,
    title: str,
    key: str,
    label: str,
    agent_ns: list[int],
    bound_ns: list[int],
    *notes: str,
) -> None:
    """Add a table with a result row of the agent, and one of the lower bound if it was measured."""
    if not bound_ns:
        row = row_from_samples(key, label, seconds(agent_ns), "s")
        outcome.tables.append(Table(title, (row,), notes=notes))
        return
    labels = {"agent": label, "floor": "lower bound: the same event in a C program that does nothing else"}
    agent_row, bound_row = rows_from_latencies(key, labels, {"agent": agent_ns, "floor": bound_ns})
    outcome.tables.append(Table(title, (replace(agent_row, key=key), bound_row), labels["floor"], notes))


@contextlib.contextmanager
def _lower_bound_or_none(outcome: SuiteOutcome, *arguments: object) -> Iterator[Child | None]:
    """Start the lower bound; yield None and record the reason if it is unavailable."""
    with contextlib.ExitStack() as stack:
        try:
            program = stack.enter_context(start_lower_bound(*arguments))
        except LowerBoundUnavailable as reason:
            outcome.skipped.append(f"detect: {reason}")
            program = None
        yield program


# --- a cgroup ---------------------------------------------------------------------------------------------


def _cgroup(effort: Effort, outcome: SuiteOutcome) -> None:
    agent_ns: list[int] = []
    bound_ns: list[int] = []
    library = ""
    pods = -(-effort.events // BATCH)
    with real_tree(pods * (BATCH + 1), BATCH) as tree:
        containers = [group for group in tree.groups if group[1]]
        if "v2" not in tree.hierarchies or not _limit(tree.path("v2", *containers[0])).exists():
            raise OSError("no hugetlb controller in cgroup v2")
        for group in containers:
            _limit(tree.path("v2", *group)).write_text("0\n")
        events = [tree.path("v2", uid, "") / "hugetlb.2MB.events" for uid, name in tree.groups if not name]
        with (
            _lower_bound_or_none(outcome, "inotify", *events) as lower_bound,
            start_module("agent.bench.hitter") as hitter,
        ):
            for batch in batches(effort.events, BATCH):
                library = _hits(
                    tree, [containers[index] for index in batch], hitter, lower_bound, agent_ns, bound_ns
                )
    _table(
        outcome,
        f"cgroup event to client; {tree.backend}",
        "detect.event",
        "agent: a container hits its hugepage limit",
        agent_ns,
        bound_ns,
        f"one subscriber of agent.sock, {library}; from before mmap(2)",
        "not bounded by the period; the kernel notifies of one change per file in 12 to 16 ms (HZ=250), and"
        " these events are further apart",
        FRESH_AGENT_NOTE.format(BATCH),
    )


def _hits(
    tree: CgroupTree,
    groups: Sequence[tuple[str, str]],
    hitter: Child,
    lower_bound: Child | None,
    agent_ns: list[int],
    bound_ns: list[int],
) -> str:
    """Hit the hugepage limits of containers while a new agent runs. Returns the subscriber's library."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch())
        flags = ["--period", "100ms", "--kubelet-cgroup-root", tree.kubelet_root]
        stack.enter_context(start_agent(directory, flags))
        client = stack.enter_context(start_subscriber(agent_socket(directory), AGENT_METHOD, CONTAINER))
        client.wait(lambda line: "found" in line)
        for uid, container in groups:
            if lower_bound:
                lower_bound.discard_lines()
            cause = partial(_hit, hitter, tree.path("v2", uid, container))
            latency = measure_latency(client, cause, partial(_mentions, container))
            agent_ns.append(latency.took_ns)
            if lower_bound:
                bound_ns.append(lower_bound.wait()["t_ns"] - latency.start_ns)
        return client.library


def _hit(hitter: Child, group: Path) -> int:
    hitter.send_line(os.fspath(group))
    line = hitter.wait()
    if not line["refused"]:
        raise ProcessError(f"{group}: the cgroup allowed a page beyond its limit")
    return int(line["t_ns"])


def _mentions(name: str, line: JsonLine) -> bool:
    return name in line["found"]


def _limit(group: Path) -> Path:
    return group / "hugetlb.2MB.rsvd.max"


# --- a CPU ------------------------------------------------------------------------------------------------

PERIOD_MS: Final = 500
CLEARED_S: Final = 20.0


def _hotplug(effort: Effort, outcome: SuiteOutcome) -> None:
    agent_ns: list[int] = []
    bound_ns: list[int] = []
    writes: list[int] = []
    with machine_lock(), _offline_cpu() as switch, scratch() as directory, contextlib.ExitStack() as stack:
        flags = ["--period", f"{PERIOD_MS}ms", "--cgroupfs-root", str(directory / "none")]
        stack.enter_context(start_agent(directory, flags))
        client = stack.enter_context(
            start_subscriber(driver_socket(directory), HEALTH_METHOD, r"cpu\.offline")
        )
        client.wait(lambda line: "found" in line and not line["found"])
        lower_bound = stack.enter_context(_lower_bound_or_none(outcome, "uevents"))
        for round_index in range(effort.hotplugs):
            if round_index:
                switch(True)
                client.wait(lambda line: not line["found"], CLEARED_S)
            if lower_bound:
                lower_bound.discard_lines()
            latency = measure_latency(
                client, partial(_offline, switch, writes), lambda line: bool(line["found"])
            )
            agent_ns.append(latency.took_ns)
            if lower_bound:
                offline_event = lower_bound.wait(lambda line: line["action"] == "offline")
                bound_ns.append(offline_event["t_ns"] - latency.start_ns)
        library = client.library
    kernel = format_value(statistics.median(seconds(writes)), "s")
    _table(
        outcome,
        "device event to client; a real CPU goes offline",
        "detect.uevent",
        "agent: a CPU goes offline",
        agent_ns,
        bound_ns,
        f"one subscriber, {library}; from before the write, which takes the kernel {kernel}",
        f"not bounded by the period of {PERIOD_MS} ms: the event wakes the sampler",
    )


@contextlib.contextmanager
def _offline_cpu() -> Iterator[Callable[[bool], None]]:
    """Yield a function that switches the last CPU of this machine; set it online afterwards.

    Raises:
        OSError: The CPU has no such file, is offline, or may not be switched.
    """
    file = Path(f"/sys/devices/system/cpu/cpu{(os.cpu_count() or 1) - 1}/online")
    if file.read_text() != "1\n":
        raise OSError(f"{file}: the CPU is offline")
    file.write_text("1\n")  # no change: checks the permission
    try:
        yield lambda online: _write(file, f"{online:d}\n")
    finally:
        file.write_text("1\n")


def _offline(switch: Callable[[bool], None], writes: list[int]) -> int:
    start_ns = time.monotonic_ns()
    switch(False)
    writes.append(time.monotonic_ns() - start_ns)
    return start_ns


def _write(file: Path, text: str) -> None:
    file.write_text(text)


# --- the kernel log ---------------------------------------------------------------------------------------


def _kernel_log(effort: Effort, outcome: SuiteOutcome) -> None:
    agent_ns: list[int] = []
    library = ""
    for batch in batches(effort.causes, LOG_BATCH):
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(scratch())
            log = directory / "kmsg"
            os.mkfifo(log)
            fd = os.open(log, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            flags = ["--kmsg", str(log), "--cgroupfs-root", str(directory / "none")]
            stack.enter_context(start_agent(directory, [*flags, "--period", "1s"]))
            client = stack.enter_context(start_subscriber(agent_socket(directory), AGENT_METHOD, r"bench\d+"))
            client.wait(lambda line: "found" in line)
            agent_ns += [
                measure_latency(client, partial(_log, fd, index), partial(_mentions, f"bench{index}")).took_ns
                for index in batch
            ]
            library = client.library
    row = row_from_samples("detect.kmsg", "log line: a filesystem becomes read-only", seconds(agent_ns), "s")
    notes = (
        f"one subscriber of agent.sock, {library}; from before the line is written to a FIFO, which the agent"
        " reads with --kmsg as it does /dev/kmsg",
        FRESH_AGENT_NOTE.format(LOG_BATCH),
    )
    outcome.tables.append(Table("line of the kernel log to client; a FIFO", (row,), notes=notes))


def _log(fd: int, number: int) -> int:
    start_ns = time.monotonic_ns()
    record = f"3,{number},{start_ns // 1000},-;EXT4-fs (bench{number}): Remounting filesystem read-only\n"
    os.write(fd, record.encode())
    return start_ns
