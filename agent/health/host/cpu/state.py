"""CPUs as their rules see them, and what is remembered for that.

A view is of the CPUs of one NUMA node, or of those that a driver declares as a device of its own. What is the
same for all of them is made once per change: agent.health.host.cpu.cores, agent.health.host.cpu.log_facts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.health.host.cpu.cores import Cores, digest
from agent.health.host.cpu.log_facts import CpuLogFacts, listen, locked, often_corrected
from agent.health.host.cpu.throttle import Throttled, Watched, throttled_after, watch
from agent.health.kernel_log.silence import reader_state
from agent.health.kernel_log.values import LogCode, LogPast
from agent.health.rules import Growth
from agent.model.cpuset import CpuSet, format_cpus
from agent.model.declared import Declared, DeclaredCpus
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.settings import HostLimits, Settings
from agent.model.snapshot import NodeSample, Snapshot
from agent.model.source import SourceState
from agent.model.time import Instant


class ExpectedCpus(NamedTuple):
    """CPUs that should be as somebody said, or as they were."""

    cpus: CpuSet
    by: str
    """``online at start``, ``configured``, ``declared``."""


class CpuView(NamedTuple):
    """Some CPUs."""

    cpus: CpuSet
    """Which: what is of all CPUs concerns these alone."""
    node: NodeSample | None
    """The NUMA node that they are all of, unless they are declared."""
    nodes: tuple[NodeSample, ...]
    present: CpuSet | Missing
    online: CpuSet | Missing
    isolated: CpuSet | Missing
    expected: ExpectedCpus
    """To be online."""
    apart: ExpectedCpus
    """To be isolated."""
    throttled_core: Growth
    throttled_package: Growth
    throttle_events: int
    """Throttle events within the window that make a device degraded."""
    throttle_window_s: int
    cores: Cores
    smt: Reading
    """Whether threads share cores: 0 or 1."""
    smt_start: Reading
    machine_checks: CpuSet
    """Of all CPUs, those with an uncorrected one since boot."""
    corrected: CpuSet
    """Of all CPUs, those with too many corrected ones of late."""
    hard_lockups: CpuSet
    """Of all CPUs; so the next."""
    soft_lockups: CpuSet
    log_state: SourceState
    """How the reader of the kernel log is doing."""
    limits: HostLimits
    declared: DeclaredCpus | None


@dataclass(frozen=True, slots=True)
class CpuPast:
    """What the rules of CPUs compare with."""

    members: Mapping[int, CpuSet] = field(default_factory=dict)
    """By NUMA node, the CPUs that it has, as far as anybody could read."""
    expected: Mapping[int, CpuSet] = field(default_factory=dict)
    """Likewise, those that should be online."""
    isolated: CpuSet | Missing = NEVER_READ
    """At start."""
    smt: Reading = NEVER_READ
    """At start."""
    throttled: Mapping[int, Throttled] = field(default_factory=dict)
    """By NUMA node."""
    watched: Mapping[str, Watched] = field(default_factory=dict)
    """Likewise, by the subject of a declared device."""
    cores: Cores = field(default_factory=Cores)
    told: CpuLogFacts = field(default_factory=CpuLogFacts)
    hard_lockups: CpuSet = 0
    """CPUs of which the log told a short while ago; so the next."""
    soft_lockups: CpuSet = 0
    corrected: CpuSet = 0
    """CPUs with as many corrected machine checks in the window as are too many, or more."""
    looked_ns: int = 0
    """When this was made."""


def remember_cpus(
    past: CpuPast, log: LogPast, snapshot: Snapshot, settings: Settings, now: Instant
) -> CpuPast:
    """The past after a snapshot; ``log``: what is remembered of the kernel log after it."""
    machine, limits = snapshot.machine, settings.host
    window_s = settings.throttle_window_s
    told = listen(past.told, log, limits.correctable_window_s, past.looked_ns, now)
    read_ns = next((src.beat_ns for src in snapshot.sources if src.name == "throttle"), now.mono_ns)
    return CpuPast(
        members={**past.members, **_members(snapshot)},
        expected=_expected(past, snapshot, settings),
        isolated=snapshot.cpus.isolated if isinstance(past.isolated, Missing) else past.isolated,
        smt=machine.smt_active if machine and isinstance(past.smt, Missing) else past.smt,
        throttled={
            node.node: throttled_after(
                past.throttled.get(node.node, Throttled()),
                node.throttle_core,
                node.throttle_package,
                read_ns,
                window_s,
            )
            for node in snapshot.nodes
        },
        watched=dict(watch(past.watched, snapshot, read_ns, window_s)),
        cores=digest(past.cores, machine.cores) if machine else past.cores,
        told=told,
        hard_lockups=locked(told, LogCode.HARD_LOCKUP, now),
        soft_lockups=locked(told, LogCode.SOFT_LOCKUP, now),
        corrected=often_corrected(told, limits.correctable_errors, limits.correctable_window_s, now),
        looked_ns=now.mono_ns,
    )


def _members(snapshot: Snapshot) -> dict[int, CpuSet]:
    return {node.node: node.cpus for node in snapshot.nodes if isinstance(node.cpus, int)}


def _expected(past: CpuPast, snapshot: Snapshot, settings: Settings) -> Mapping[int, CpuSet]:
    """Each node's CPUs that should be online.

    A CPU that the configuration names and no NUMA node has is expected of the first node.
    """
    if settings.expect_cpus is None:
        online = snapshot.cpus.online
        if isinstance(online, Missing):
            return past.expected
        new = {node: cpus & online for node, cpus in _members(snapshot).items()}
        return {**new, **past.expected}
    nodes = {**past.members, **_members(snapshot)}
    owned = 0
    for cpus in nodes.values():
        owned |= cpus
    expected = {node: cpus & settings.expect_cpus for node, cpus in nodes.items()}
    if expected:
        expected[min(expected)] |= settings.expect_cpus & ~owned
    return expected


def view_cpus(past: CpuPast, snapshot: Snapshot, settings: Settings, number: int) -> CpuView:
    """The CPUs of a NUMA node."""
    cpus = past.members.get(number, 0)
    isolated = past.isolated if isinstance(past.isolated, int) else 0
    by = "online at start" if settings.expect_cpus is None else "configured"
    return _view(
        past,
        snapshot,
        settings,
        cpus=cpus,
        node=next((node for node in snapshot.nodes if node.node == number), None),
        expected=ExpectedCpus(past.expected.get(number, 0), by),
        apart=ExpectedCpus(isolated & cpus, "isolated at start"),
        throttled=past.throttled.get(number, Throttled()),
        declared=None,
    )


def view_declared_cpus(past: CpuPast, snapshot: Snapshot, settings: Settings, device: Declared) -> CpuView:
    """The CPUs that a driver declares."""
    what = device.what
    assert isinstance(what, DeclaredCpus), "whoever calls knows what it is"
    isolated = past.isolated if isinstance(past.isolated, int) else 0
    present = snapshot.cpus.present
    # of what is not there another rule tells
    there = ExpectedCpus(what.cpus if isinstance(present, Missing) else what.cpus & present, "declared")
    watched = past.watched.get(device.subject)
    return _view(
        past,
        snapshot,
        settings,
        cpus=what.cpus,
        node=None,
        expected=there,
        apart=there if what.isolated else ExpectedCpus(isolated & what.cpus, "isolated at start"),
        throttled=watched.throttled if watched else Throttled(),
        declared=what,
    )


def _view(
    past: CpuPast,
    snapshot: Snapshot,
    settings: Settings,
    *,
    cpus: CpuSet,
    node: NodeSample | None,
    expected: ExpectedCpus,
    apart: ExpectedCpus,
    throttled: Throttled,
    declared: DeclaredCpus | None,
) -> CpuView:
    return CpuView(
        cpus=cpus,
        node=node,
        nodes=snapshot.nodes,
        present=snapshot.cpus.present,
        online=snapshot.cpus.online,
        isolated=snapshot.cpus.isolated,
        expected=expected,
        apart=apart,
        throttled_core=throttled.core.growth,
        throttled_package=throttled.package.growth,
        throttle_events=settings.throttle_events,
        throttle_window_s=settings.throttle_window_s,
        cores=past.cores,
        smt=snapshot.machine.smt_active if snapshot.machine else NEVER_READ,
        smt_start=past.smt,
        machine_checks=past.cores.checked | past.told.checks,
        corrected=past.corrected,
        hard_lockups=past.hard_lockups,
        soft_lockups=past.soft_lockups,
        log_state=reader_state(snapshot.log),
        limits=settings.host,
        declared=declared,
    )


def named(cpus: CpuSet) -> str:
    """A set for people: ``CPU 1``, ``CPUs 0-3,8``."""
    return f"{'CPU' if cpus.bit_count() == 1 else 'CPUs'} {format_cpus(cpus)}"
