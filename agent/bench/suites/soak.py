"""Growth of an agent under churn: ``python -m agent.bench --suite soak --for 1h``.

Pods come and go, a hugepage pool fails and recovers, GPUs report errors, and subscribers connect and leave,
at a polling period of 100 ms. At times the churn rests and all subscribers leave; then memory, descriptors
and threads of the agent are read. Whatever grows from rest to rest is a leak or a cache.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Final, NamedTuple

from agent.bench.file_trees import (
    CgroupTree,
    make_pod,
    real_or_file_tree,
    remove_pod,
    temporary_directory,
    write_sysfs,
)
from agent.bench.processes import (
    CHECK_S,
    HEALTH_METHOD,
    WAIT_S,
    FakeNvml,
    FakeNvmlUnavailable,
    ProcessError,
    StartedProcess,
    agent_socket,
    driver_socket,
    read_resident_bytes,
    start_agent,
    start_module,
    start_subscriber,
    write_gpu_scenario,
)
from agent.bench.result import ResultRow, ResultTable, RunSize, SuiteOutcome, Unit, row_from_samples
from agent.bench.suites.detect import fixture_pool
from agent.serve.agent_api.client import fetch_status

GROUPS: Final = 200
GPUS: Final = 8
PERIOD_MS: Final = 100
XIDS: Final = (13, 31, 43)
"""XIDs of errors of programs, which end by themselves."""
SUBSCRIBERS: Final = 8
EVENTS_MIN: Final = 200
"""Number of changes that a short run aims at."""
EVENT_EVERY_S: Final = 0.25
"""Time between two changes in a long run [s]."""
RESTS: Final = 80
"""Number of rests in a long run."""
REST_EVERY_S: Final = 1.0
"""Shortest time between two rests [s]."""
REST_S: Final = 3.0
"""Duration of a rest before the agent's resources are read, in a long run [s]."""
WARM_UP: Final = 0.25
"""Part of the run before its readings count."""
LONG_S: Final = 600.0
"""Duration from which growth is stated per hour, and has a budget [s]."""


class Resources(NamedTuple):
    """Resources of an agent's process in one rest."""

    at_s: float
    rss: int
    """Resident memory [bytes]."""
    descriptors: int
    cgroup_descriptors: int
    """Number of the descriptors that are files of cgroups, which the agent holds open within a budget."""
    threads: int
    kernel: int
    """Kernel memory of the open cgroup files and watches, as the agent estimates it [bytes]."""


def growth_per_hour(at_s: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through values at times in seconds [1/h]."""
    return linear_regression(at_s, values).slope * 3600


def growth_of_medians(values: Sequence[float]) -> float:
    """Return the difference of the medians of the last and the first third of the values."""
    third = max(1, len(values) // 3)
    return median(values[-third:]) - median(values[:third])


def run(run_size: RunSize) -> SuiteOutcome:
    """Run an agent under churn for ``run_size.soak_s`` and measure the growth of its resources."""
    outcome = SuiteOutcome()
    with temporary_directory() as directory, real_or_file_tree(GROUPS) as (tree, reason):
        if reason:
            outcome.skipped.append(f"soak: {reason}; measured on {tree.backend}")
        write_sysfs(directory / "sys")
        flags = ["--period", f"{PERIOD_MS}ms", "--cgroupfs-root", str(tree.cgroupfs)]
        flags += ["--kubelet-cgroup-root", tree.kubelet_root, "--sysfs-root", str(directory / "sys")]
        environment: Mapping[str, str] = {}
        fake: FakeNvml | None = None
        with contextlib.ExitStack() as stack:
            try:
                fake = write_gpu_scenario(directory, GPUS)
            except FakeNvmlUnavailable as unavailable:
                outcome.skipped.append(f"soak: without GPUs: {unavailable}")
            else:
                flags += ["--nvml-library", str(fake.library)]
                environment = fake.environment
            agent = stack.enter_context(start_agent(directory, flags, environment=environment))
            with start_subscriber(driver_socket(directory), HEALTH_METHOD, "$^", agent) as client:
                client.wait(lambda line: "found" in line)
            send_to_gpus = stack.enter_context(fake.connect(agent)).send if fake else None
            change_pool, socket = fixture_pool(directory / "sys"), driver_socket(directory)
            churn = _Churn(tree, change_pool, send_to_gpus, agent, socket)
            stack.callback(churn.disconnect_subscribers)
            readings = list(
                _read_in_rests(agent, tree.cgroupfs, agent_socket(directory), churn, run_size.soak_s)
            )
    outcome.tables.append(summarize(readings, churn.events, run_size.soak_s, tree.backend))
    return outcome


class _Churn:
    """Changes to the node of an agent and to its subscribers, one at a time, in a repeatable order."""

    def __init__(
        self,
        tree: CgroupTree,
        change_pool: Callable[[int], int],
        send_to_gpus: Callable[[str], int] | None,
        agent: StartedProcess,
        socket: Path,
    ) -> None:
        self.events = 0
        self._tree = tree
        self._pods = sorted({uid for uid, _ in tree.groups})
        self._change_pool = change_pool
        self._send_to_gpus = send_to_gpus
        self._agent = agent
        self._socket = socket
        self._random = random.Random(1)
        self._subscribers = contextlib.ExitStack()

    def make_change(self) -> None:
        """Make one change: usually a new pod in place of another, sometimes a fault or new subscribers."""
        self.events += 1
        kind = self._random.randrange(20)
        if kind == 0:
            self.disconnect_subscribers()
            module = start_module("agent.bench.subscribers", self._socket, "frames", HEALTH_METHOD)
            crowd = self._subscribers.enter_context(module)
            crowd.server = self._agent
            crowd.send_line(f"{SUBSCRIBERS}")
            crowd.wait(lambda line: "subscribers" in line)
        elif kind <= 3:
            self._change_pool(-self._random.randrange(2))
        elif kind <= 6 and self._send_to_gpus is not None:
            self._send_to_gpus(f"gpu {self._random.randrange(GPUS)} xid {self._random.choice(XIDS)}")
        else:
            self._replace_pod()

    def disconnect_subscribers(self) -> None:
        """End all subscribers."""
        self._subscribers.close()

    def _replace_pod(self) -> None:
        place = self._random.randrange(len(self._pods))
        remove_pod(self._tree, self._pods[place])
        self._pods[place] = f"{self.events:08x}-50ac-4000-8000-000000000000"
        make_pod(self._tree, self._pods[place], f"{self.events:064x}")


def _read_in_rests(
    agent: StartedProcess, cgroupfs: Path, socket: Path, churn: _Churn, duration_s: float
) -> Iterator[Resources]:
    """Make changes for some time; yield the agent's resources at each rest."""
    began_s = time.monotonic()
    interval_s = max(duration_s / RESTS, REST_EVERY_S)
    pause_s = min(EVENT_EVERY_S, duration_s / EVENTS_MIN)
    while (rest_s := time.monotonic() + interval_s) <= began_s + duration_s + interval_s:
        while time.monotonic() < rest_s:
            churn.make_change()
            time.sleep(pause_s)
        churn.disconnect_subscribers()
        _wait_for_no_subscribers(agent, socket)
        time.sleep(min(REST_S, interval_s / 4))
        agent.require_running()
        targets = _descriptor_targets(agent.pid)
        yield Resources(
            at_s=time.monotonic() - began_s,
            rss=read_resident_bytes(agent.pid),
            descriptors=len(targets),
            cgroup_descriptors=sum(target.is_relative_to(cgroupfs) for target in targets),
            threads=len(os.listdir(f"/proc/{agent.pid}/task")),
            kernel=asyncio.run(fetch_status(socket)).core.kernel_bytes,
        )


def _wait_for_no_subscribers(agent: StartedProcess, socket: Path) -> None:
    """Wait until the agent has noticed that its subscribers have left.

    Raises:
        ProcessError: The agent keeps connections, or has ended.
    """
    deadline = time.monotonic() + WAIT_S
    while counts := [sub for sub in asyncio.run(fetch_status(socket)).subscribers if sub.connections]:
        agent.require_running()
        if all(count.socket == socket.name for count in counts):  # the connection that asked
            return
        if time.monotonic() > deadline:
            raise ProcessError(f"agent: connections {WAIT_S:g} s after all subscribers left: {counts}")
        time.sleep(CHECK_S)


def _descriptor_targets(pid: int) -> list[Path]:
    """Return what the open descriptors of a process refer to."""
    targets = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process closed it
            targets.append(descriptor.readlink())
    return targets


def summarize(readings: Sequence[Resources], events: int, duration_s: float, backend: str) -> ResultTable:
    """Return the table of the readings after the warm-up, with the growth of each resource.

    Args:
        readings: The agent's resources, in the order of time.
        events: Number of changes.
        duration_s: Duration of the churn, of which the first quarter is the warm-up [s].
        backend: What the cgroups were.
    """
    steady = [reading for reading in readings if reading.at_s > duration_s * WARM_UP]
    is_long = duration_s >= LONG_S
    rows: list[ResultRow] = []

    def add(key: str, label: str, unit: Unit, values: Sequence[float]) -> None:
        rows.append(row_from_samples(f"soak.{key}", label, values, unit))
        if unit == "B" and is_long:
            slope = growth_per_hour([reading.at_s for reading in steady], values)
            rows.append(row_from_samples(f"soak.{key}.hour", "  growth per hour", (slope,), unit))
        growth = growth_of_medians(values)
        rows.append(row_from_samples(f"soak.{key}.growth", "  growth in this time", (growth,), unit))

    add("rss", "RSS", "B", [reading.rss for reading in steady])
    add("descriptors", "open descriptors", "1", [reading.descriptors for reading in steady])
    others = [reading.descriptors - reading.cgroup_descriptors for reading in steady]
    add("descriptors.others", "of these, all but files of cgroups", "1", others)
    add("threads", "threads", "1", [reading.threads for reading in steady])
    add("kernel", "kernel memory, estimated by the agent", "B", [reading.kernel for reading in steady])
    rows.append(row_from_samples("soak.events", "changes", (events,), "1"))
    notes = (
        f"{len(steady)} readings in rests of the churn, without those of the first quarter",
        "growth in this time: from the median of the first third to that of the last",
        *(("growth per hour: by least squares",) if is_long else ()),
    )
    title = f"{duration_s:.0f} s of churn; period {PERIOD_MS} ms, {GROUPS} cgroups, {backend}"
    return ResultTable(title, tuple(rows), notes=notes)
