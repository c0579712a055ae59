"""Detection latency of kernel events: a cgroup event, a CPU event, a line of the kernel log.

The lower bound of a cgroup event and a CPU event is a C program that waits only for the same event at the
same time. The polling period of each agent is long, so that a polled value would stand out.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from agent.bench.file_trees import CgroupTree, machine_lock, real_cgroup_tree, temporary_directory
from agent.bench.processes import (
    AGENT_METHOD,
    HEALTH_METHOD,
    ChildProcess,
    JsonLine,
    ProcessError,
    agent_socket,
    driver_socket,
    lower_bound_or_none,
    measure_latency,
    split_into_batches,
    start_agent,
    start_hugepage_limit_hitter,
    start_memory_limit_hitter,
    start_subscriber,
)
from agent.bench.result import (
    ResultTable,
    RunSize,
    SuiteOutcome,
    format_value,
    row_from_samples,
    rows_from_latencies,
    seconds_from_ns,
)

CONTAINER: Final = r"container ([0-9a-f]{64})"
BATCH: Final = 4
"""Number of containers of a pod, and of limit hits per agent; the agent's report grows with each hit."""
LOG_BATCH: Final = 3
"""Number of log lines per agent, each about another filesystem; the agent's note lists as many."""
SAME_EVENT: Final = "lower bound: the same event in a C program that does nothing else"
FRESH_AGENT_NOTE: Final = "a new agent for every {} of them, because its report grows with each"


def run(run_size: RunSize, outcome: SuiteOutcome) -> None:
    """Measure the time from event to client, for each kind of event that this process can cause."""
    for limit, count in ((HUGEPAGE_LIMIT, run_size.events), (MEMORY_LIMIT, run_size.oom_kills)):
        if not count:
            outcome.skipped.append(f"detect: {limit.label}: skipped by --quick")
            continue
        try:
            _measure_cgroup_events(count, outcome, limit)
        except OSError as error:
            outcome.skipped.append(f"detect: {limit.label}: needs real cgroups with {limit.needs}: {error}")
    if not run_size.hotplugs:
        outcome.skipped.append("detect: device events and the kernel log: skipped by --quick")
        return
    try:
        _measure_cpu_hotplug(run_size, outcome)
    except OSError as error:
        outcome.skipped.append(f"detect: a device event needs a CPU that can be taken offline: {error}")
    _measure_kernel_log(run_size, outcome)


def _add_table(
    outcome: SuiteOutcome,
    title: str,
    key: str,
    label: str,
    agent_ns: list[int],
    bound_ns: list[int],
    *notes: str,
    bound_label: str = SAME_EVENT,
) -> None:
    """Add a table with a result row of the agent, and one of the lower bound if it was measured."""
    if not bound_ns:
        row = row_from_samples(key, label, seconds_from_ns(agent_ns), "s")
        outcome.tables.append(ResultTable(title, (row,), notes=notes))
        return
    labels = {"agent": label, "floor": bound_label}
    agent_row, bound_row = rows_from_latencies(key, labels, {"agent": agent_ns, "floor": bound_ns})
    outcome.tables.append(
        ResultTable(title, (replace(agent_row, key=key), bound_row), labels["floor"], notes)
    )


# --- a cgroup ---------------------------------------------------------------------------------------------


class CgroupLimit(NamedTuple):
    """Limit of a container's cgroup that a process hits, which is an event of the cgroup."""

    key: str
    label: str
    needs: str
    """Controller of the cgroups."""
    note: str
    start: Callable[[], contextlib.AbstractContextManager[ChildProcess]]
    """Starts the process that hits the limits of cgroups."""
    set_limit: Callable[[CgroupTree, str, str], Path]
    """Sets the limit of a container and returns the cgroup that the process joins; raises OSError."""
    bound_label: str
    """Printed name of what the agent is compared with."""
    event_file: Callable[[CgroupTree, str], Path] | None
    """Returns the file of a pod that changes with the event; None: compare with the end of the process."""


def _set_hugepage_limit(tree: CgroupTree, uid: str, container: str) -> Path:
    if "v2" not in tree.hierarchies:
        raise OSError("cgroup v2 is not mounted")
    group = tree.path("v2", uid, container)
    _write_existing(group / "hugetlb.2MB.rsvd.max", "0\n")
    return group


def _set_memory_limit(tree: CgroupTree, uid: str, container: str) -> Path:
    if "memory" in tree.hierarchies:
        group = tree.path("memory", uid, container)
        _write_existing(group / "memory.limit_in_bytes", f"{MEMORY_BYTES}\n")
        _write_existing(group / "memory.swappiness", "0\n")
    else:
        group = tree.path("v2", uid, container)
        _write_existing(group / "memory.max", f"{MEMORY_BYTES}\n")
        _write_existing(group / "memory.swap.max", "0\n")
    return group


def _write_existing(file: Path, text: str) -> None:
    """Write to a file of a cgroup; raises OSError if the kernel has no such file."""
    with file.open("r+") as opened:
        opened.write(text)


MEMORY_BYTES: Final = 16 << 20
HUGEPAGE_LIMIT: Final = CgroupLimit(
    key="detect.event",
    label="a container hits its hugepage limit",
    needs="hugetlb in v2",
    note="from before mmap(2); not bounded by the period; the kernel notifies of one change per file in 12"
    " to 16 ms (HZ=250), and these events are further apart",
    start=start_hugepage_limit_hitter,
    set_limit=_set_hugepage_limit,
    bound_label=SAME_EVENT,
    event_file=lambda tree, uid: tree.path("v2", uid, "") / "hugetlb.2MB.events",
)
MEMORY_LIMIT: Final = CgroupLimit(
    key="detect.oom",
    label="the kernel kills a process of a container that is out of memory",
    needs="memory",
    note="from before the write to the page that was too much, with the kernel's search for memory; v1"
    " notifies before the kernel kills, and the agent reads the count again after 0.25 to 24 ms",
    start=start_memory_limit_hitter,
    set_limit=_set_memory_limit,
    bound_label="the end of the killed process, as its parent sees it",
    event_file=None,
)


def _measure_cgroup_events(count: int, outcome: SuiteOutcome, limit: CgroupLimit) -> None:
    agent_ns: list[int] = []
    bound_ns: list[int] = []
    library = ""
    pods = -(-count // BATCH)
    with real_cgroup_tree(pods * (BATCH + 1), BATCH) as tree, contextlib.ExitStack() as stack:
        containers = [group for group in tree.groups if group[1]]
        groups = {container: limit.set_limit(tree, uid, container) for uid, container in containers}
        lower_bound = None
        if limit.event_file:
            files = [limit.event_file(tree, uid) for uid, name in tree.groups if not name]
            lower_bound = stack.enter_context(lower_bound_or_none(outcome, "detect", "inotify", *files))
        hitter = stack.enter_context(limit.start())
        for batch in split_into_batches(count, BATCH):
            hit_groups = {containers[index][1]: groups[containers[index][1]] for index in batch}
            library = _hit_limits(tree, hit_groups, hitter, lower_bound, agent_ns, bound_ns)
    _add_table(
        outcome,
        f"cgroup event to client; {tree.backend}",
        limit.key,
        f"agent: {limit.label}",
        agent_ns,
        bound_ns,
        f"one subscriber of agent.sock, {library}",
        limit.note,
        FRESH_AGENT_NOTE.format(BATCH),
        bound_label=limit.bound_label,
    )


def _hit_limits(
    tree: CgroupTree,
    groups: Mapping[str, Path],
    hitter: ChildProcess,
    lower_bound: ChildProcess | None,
    agent_ns: list[int],
    bound_ns: list[int],
) -> str:
    """Hit the limits of containers while a new agent runs.

    ``groups`` has the cgroups of the containers. The detection latencies are appended to ``agent_ns`` (agent)
    and ``bound_ns`` (lower bound, or the end of a killed process). Returns the name of the subscriber's gRPC
    library.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(temporary_directory())
        flags = ["--period", "100ms", "--kubelet-cgroup-root", tree.kubelet_root]
        agent = stack.enter_context(start_agent(directory, flags))
        client = stack.enter_context(
            start_subscriber(agent_socket(directory), AGENT_METHOD, CONTAINER, agent)
        )
        client.wait(lambda line: "found" in line)
        for container, group in groups.items():
            ends_ns: list[int] = []
            if lower_bound:
                lower_bound.discard_lines()
            cause = partial(_hit_limit, hitter, group, ends_ns)
            latency = measure_latency(client, cause, partial(_found_contains, container))
            agent_ns.append(latency.took_ns)
            if lower_bound:
                ends_ns.append(lower_bound.wait()["t_ns"])
            bound_ns += [end_ns - latency.start_ns for end_ns in ends_ns]
        return client.library


def _hit_limit(hitter: ChildProcess, group: Path, ends_ns: list[int]) -> int:
    """Return the time before the hit; append the end of a process that the kernel killed to ``ends_ns``."""
    hitter.send_line(os.fspath(group))
    line = hitter.wait()
    if not line["is_hit"]:
        raise ProcessError(f"cgroup {group}: the kernel did not enforce its limit")
    if "ended_ns" in line:
        ends_ns.append(int(line["ended_ns"]))
    return int(line["t_ns"])


def _found_contains(name: str, line: JsonLine) -> bool:
    return name in line["found"]


# --- a CPU ------------------------------------------------------------------------------------------------

PERIOD_MS: Final = 500
CLEARED_S: Final = 20.0


def _measure_cpu_hotplug(run_size: RunSize, outcome: SuiteOutcome) -> None:
    agent_ns: list[int] = []
    bound_ns: list[int] = []
    writes: list[int] = []
    with (
        machine_lock(),
        _cpu_switch() as switch,
        temporary_directory() as directory,
        contextlib.ExitStack() as stack,
    ):
        flags = ["--period", f"{PERIOD_MS}ms", "--cgroupfs-root", str(directory / "none")]
        agent = stack.enter_context(start_agent(directory, flags))
        client = stack.enter_context(
            start_subscriber(driver_socket(directory), HEALTH_METHOD, r"cpu\.offline", agent)
        )
        client.wait(lambda line: "found" in line and not line["found"])
        lower_bound = stack.enter_context(lower_bound_or_none(outcome, "detect", "uevents"))
        for round_index in range(run_size.hotplugs):
            if round_index:
                switch(True)
                client.wait(lambda line: not line["found"], CLEARED_S)
            if lower_bound:
                lower_bound.discard_lines()
            latency = measure_latency(
                client, partial(_set_offline, switch, writes), lambda line: bool(line["found"])
            )
            agent_ns.append(latency.took_ns)
            if lower_bound:
                offline_event = lower_bound.wait(lambda line: line["action"] == "offline")
                bound_ns.append(offline_event["t_ns"] - latency.start_ns)
        library = client.library
    kernel = format_value(statistics.median(seconds_from_ns(writes)), "s")
    _add_table(
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
def _cpu_switch() -> Iterator[Callable[[bool], None]]:
    """Yield a function that sets the last CPU of this machine online or offline; set it online afterwards.

    Raises:
        OSError: The CPU has no file ``online``, is offline, or may not be switched.
    """
    file = Path(f"/sys/devices/system/cpu/cpu{(os.cpu_count() or 1) - 1}/online")
    if file.read_text() != "1\n":
        raise OSError(f"file {file}: the CPU is offline already")
    file.write_text("1\n")  # no change: checks the permission
    try:
        yield lambda online: _write(file, f"{online:d}\n")
    finally:
        file.write_text("1\n")


def _set_offline(switch: Callable[[bool], None], writes: list[int]) -> int:
    start_ns = time.monotonic_ns()
    switch(False)
    writes.append(time.monotonic_ns() - start_ns)
    return start_ns


def _write(file: Path, text: str) -> None:
    file.write_text(text)


# --- the kernel log ---------------------------------------------------------------------------------------


def _measure_kernel_log(run_size: RunSize, outcome: SuiteOutcome) -> None:
    agent_ns: list[int] = []
    library = ""
    for batch in split_into_batches(run_size.causes, LOG_BATCH):
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(temporary_directory())
            log = directory / "kmsg"
            os.mkfifo(log)
            fd = os.open(log, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            flags = ["--kmsg", str(log), "--cgroupfs-root", str(directory / "none")]
            agent = stack.enter_context(start_agent(directory, [*flags, "--period", "1s"]))
            client = stack.enter_context(
                start_subscriber(agent_socket(directory), AGENT_METHOD, r"bench\d+", agent)
            )
            client.wait(lambda line: "found" in line)
            agent_ns += [
                measure_latency(
                    client, partial(_write_log_line, fd, index), partial(_found_contains, f"bench{index}")
                ).took_ns
                for index in batch
            ]
            library = client.library
    row = row_from_samples(
        "detect.kmsg", "log line: a filesystem becomes read-only", seconds_from_ns(agent_ns), "s"
    )
    notes = (
        f"one subscriber of agent.sock, {library}; from before the line is written to a FIFO, which the agent"
        " reads with --kmsg as it does /dev/kmsg",
        FRESH_AGENT_NOTE.format(LOG_BATCH),
    )
    outcome.tables.append(ResultTable("line of the kernel log to client; a FIFO", (row,), notes=notes))


def _write_log_line(fd: int, number: int) -> int:
    start_ns = time.monotonic_ns()
    record = f"3,{number},{start_ns // 1000},-;EXT4-fs (bench{number}): Remounting filesystem read-only\n"
    os.write(fd, record.encode())
    return start_ns
