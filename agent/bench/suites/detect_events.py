"""From an event of the kernel to a client that knows: a cgroup's, a CPU's, a line of its log.

Beside a cgroup's and a CPU's event stands the floor: a C program that waits for the same event at the same
time, and for nothing else. The period of each agent is long enough that what was polled would be seen to be.
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
from agent.bench.latency import batches, caused, paired_rows, seconds
from agent.bench.lower_bound import NoFloor, floor
from agent.bench.processes import (
    AGENT_METHOD,
    HEALTH_METHOD,
    Child,
    Line,
    Silence,
    agent,
    agent_socket,
    child,
    health_socket,
    subscriber,
)
from agent.bench.result import Outcome, Table, quantity, row_of
from agent.bench.trees import Tree, machine_lock, real_tree, scratch

CONTAINER: Final = r"container ([0-9a-f]{64})"
BATCH: Final = 4
"""Containers of a pod, and hits under one agent, whose picture grows with each."""
LINES: Final = 3
"""Under one agent: a note names as many filesystems."""
GROWS: Final = "a fresh agent for every {} of them: its picture grows with each"


def run(effort: Effort, outcome: Outcome) -> None:
    """Each kind that this machine lets us cause."""
    try:
        _cgroup(effort, outcome)
    except OSError as error:
        outcome.skipped.append(f"detect: a cgroup event needs real cgroups with hugetlb: {error}")
    if not effort.hotplugs:
        outcome.skipped.append("detect: device events and the kernel log, left to a run without --quick")
        return
    try:
        _hotplug(effort, outcome)
    except OSError as error:
        outcome.skipped.append(f"detect: a device event needs a CPU that can be taken offline: {error}")
    _kernel_log(effort, outcome)


def _table(
    outcome: Outcome, title: str, key: str, label: str, ours: list[int], bare: list[int], *notes: str
) -> None:
    """One row, or two where there is a floor."""
    if not bare:
        row = row_of(key, label, seconds(ours), "s")
        outcome.tables.append(Table(title, (row,), notes=notes))
        return
    labels = {"agent": label, "floor": "floor: the same event in a C program that does nothing else"}
    agents, floors = paired_rows(key, labels, {"agent": ours, "floor": bare})
    outcome.tables.append(Table(title, (replace(agents, key=key), floors), labels["floor"], notes))


@contextlib.contextmanager
def _floor(outcome: Outcome, *arguments: object) -> Iterator[Child | None]:
    """The floor, or None and why."""
    with contextlib.ExitStack() as stack:
        try:
            child = stack.enter_context(floor(*arguments))
        except NoFloor as why:
            outcome.skipped.append(f"detect: {why}")
            child = None
        yield child


# --- a cgroup ---------------------------------------------------------------------------------------------


def _cgroup(effort: Effort, outcome: Outcome) -> None:
    ours: list[int] = []
    bare: list[int] = []
    library = ""
    pods = -(-effort.events // BATCH)
    with real_tree(pods * (BATCH + 1), BATCH) as tree:
        containers = [group for group in tree.groups if group[1]]
        if "v2" not in tree.hierarchies or not _limit(tree.path("v2", *containers[0])).exists():
            raise OSError("no hugetlb controller in cgroup v2")
        for group in containers:
            _limit(tree.path("v2", *group)).write_text("0\n")
        events = [tree.path("v2", uid, "") / "hugetlb.2MB.events" for uid, name in tree.groups if not name]
        with _floor(outcome, "inotify", *events) as beside, child("agent.bench.hitter") as hitter:
            for batch in batches(effort.events, BATCH):
                library = _hits(tree, [containers[one] for one in batch], hitter, beside, ours, bare)
    _table(
        outcome,
        f"cgroup event to client; {tree.backend}",
        "detect.event",
        "agent: a container hits its hugepage limit",
        ours,
        bare,
        f"one subscriber of agent.sock, {library}; from before mmap(2)",
        "not bounded by the period; the kernel tells of one change per file in 12 to 16 ms (HZ=250), and"
        " these are further apart",
        GROWS.format(BATCH),
    )


def _hits(
    tree: Tree,
    groups: Sequence[tuple[str, str]],
    hitter: Child,
    beside: Child | None,
    ours: list[int],
    bare: list[int],
) -> str:
    """Hit the limits of these containers under a fresh agent. Returns what the subscriber is."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch())
        flags = ["--period", "100ms", "--kubelet-cgroup-root", tree.kubelet_root]
        stack.enter_context(agent(directory, flags))
        client = stack.enter_context(subscriber(agent_socket(directory), AGENT_METHOD, CONTAINER))
        client.wait(lambda line: "found" in line)
        for uid, container in groups:
            if beside:
                beside.seen()
            cause = partial(_hit, hitter, tree.path("v2", uid, container))
            told = caused(client, cause, partial(_tells_of, container))
            ours.append(told.took_ns)
            if beside:
                bare.append(beside.wait()["t_ns"] - told.start_ns)
        return client.library


def _hit(hitter: Child, group: Path) -> int:
    hitter.tell(os.fspath(group))
    line = hitter.wait()
    if not line["refused"]:
        raise Silence(f"{group}: a page was had beyond the limit")
    return int(line["t_ns"])


def _tells_of(name: str, line: Line) -> bool:
    return name in line["found"]


def _limit(group: Path) -> Path:
    return group / "hugetlb.2MB.rsvd.max"


# --- a CPU ------------------------------------------------------------------------------------------------

PERIOD_MS: Final = 500
CLEARED_S: Final = 20.0


def _hotplug(effort: Effort, outcome: Outcome) -> None:
    ours: list[int] = []
    bare: list[int] = []
    writes: list[int] = []
    with machine_lock(), _offline_cpu() as switch, scratch() as directory, contextlib.ExitStack() as stack:
        flags = ["--period", f"{PERIOD_MS}ms", "--cgroupfs-root", str(directory / "none")]
        stack.enter_context(agent(directory, flags))
        client = stack.enter_context(subscriber(health_socket(directory), HEALTH_METHOD, r"cpu\.offline"))
        client.wait(lambda line: "found" in line and not line["found"])
        beside = stack.enter_context(_floor(outcome, "uevents"))
        for place in range(effort.hotplugs):
            if place:
                switch(True)
                client.wait(lambda line: not line["found"], CLEARED_S)
            if beside:
                beside.seen()
            told = caused(client, partial(_offline, switch, writes), lambda line: bool(line["found"]))
            ours.append(told.took_ns)
            if beside:
                gone = beside.wait(lambda line: line["action"] == "offline")
                bare.append(gone["t_ns"] - told.start_ns)
        library = client.library
    kernel = quantity(statistics.median(seconds(writes)), "s")
    _table(
        outcome,
        "device event to client; a real CPU goes offline",
        "detect.uevent",
        "agent: a CPU goes offline",
        ours,
        bare,
        f"one subscriber, {library}; from before the write, which takes the kernel {kernel}",
        f"not bounded by the period of {PERIOD_MS} ms: the event pokes who reads",
    )


@contextlib.contextmanager
def _offline_cpu() -> Iterator[Callable[[bool], None]]:
    """The last CPU of this machine; yields what switches it. It is online afterwards.

    Raises:
        OSError: There is none, or it may not be switched.
    """
    file = Path(f"/sys/devices/system/cpu/cpu{(os.cpu_count() or 1) - 1}/online")
    if file.read_text() != "1\n":
        raise OSError(f"{file}: it is not online now")
    file.write_text("1\n")  # it is: the kernel only says whether we may
    try:
        yield lambda online: _put(file, f"{online:d}\n")
    finally:
        file.write_text("1\n")


def _offline(switch: Callable[[bool], None], writes: list[int]) -> int:
    start_ns = time.monotonic_ns()
    switch(False)
    writes.append(time.monotonic_ns() - start_ns)
    return start_ns


def _put(file: Path, text: str) -> None:
    file.write_text(text)


# --- the kernel log ---------------------------------------------------------------------------------------


def _kernel_log(effort: Effort, outcome: Outcome) -> None:
    ours: list[int] = []
    library = ""
    for batch in batches(effort.causes, LINES):
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(scratch())
            log = directory / "kmsg"
            os.mkfifo(log)
            fd = os.open(log, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            flags = ["--kmsg", str(log), "--cgroupfs-root", str(directory / "none")]
            stack.enter_context(agent(directory, [*flags, "--period", "1s"]))
            client = stack.enter_context(subscriber(agent_socket(directory), AGENT_METHOD, r"bench\d+"))
            client.wait(lambda line: "found" in line)
            ours += [
                caused(client, partial(_log, fd, one), partial(_tells_of, f"bench{one}")).took_ns
                for one in batch
            ]
            library = client.library
    row = row_of("detect.kmsg", "a filesystem becomes read-only, says the log", seconds(ours), "s")
    notes = (
        f"one subscriber of agent.sock, {library}; from before the line is written to a FIFO, which the agent"
        " reads with --kmsg as it does /dev/kmsg",
        GROWS.format(LINES),
    )
    outcome.tables.append(Table("line of the kernel log to client; a FIFO", (row,), notes=notes))


def _log(fd: int, number: int) -> int:
    start_ns = time.monotonic_ns()
    record = f"3,{number},{start_ns // 1000},-;EXT4-fs (bench{number}): Remounting filesystem read-only\n"
    os.write(fd, record.encode())
    return start_ns
