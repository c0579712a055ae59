"""State of the CPU rules, and views, which are the inputs of these rules.

A view covers the CPUs of one NUMA node, or the CPUs that a driver declares as one device. Facts that all
views share are computed once per change, in :mod:`agent.health.host.cpu.facts`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.health.host.cpu.facts import (
    CoreFacts,
    CpuLogFacts,
    core_facts,
    frequently_corrected,
    locked_up,
    next_log_facts,
)
from agent.health.kernel_log.values import LogCode, LogState, reader_state
from agent.health.rate_window import WindowedCounter, next_counter
from agent.health.rules import Growth
from agent.model.cpuset import CpuSet, cpus_of, format_cpus
from agent.model.declared import Declared, DeclaredCpus
from agent.model.reading import NEVER_READ, Absence, Missing, Reading
from agent.model.settings import HostLimits, Settings
from agent.model.snapshot import NodeSample, Snapshot, ThrottleSample
from agent.model.source import SourceState
from agent.model.time import Instant


class ThrottleCounters(NamedTuple):
    """Thermal-throttle counters of a set of CPUs."""

    read_ns: int = -1
    """Time of the last reading; -1: not read yet."""
    core: WindowedCounter = WindowedCounter()
    package: WindowedCounter = WindowedCounter()


class DeclaredThrottle(NamedTuple):
    """Thermal-throttle counters of declared CPUs."""

    cpus: CpuSet
    throttled: ThrottleCounters


def next_throttle_counters(
    before: ThrottleCounters, core: Reading, package: Reading, read_ns: int, window_s: int
) -> ThrottleCounters:
    """Return the throttle counters after a reading; the same object if there was no new reading."""
    if before.read_ns == read_ns:
        return before
    return ThrottleCounters(
        read_ns,
        next_counter(before.core, core, read_ns, window_s),
        next_counter(before.package, package, read_ns, window_s),
    )


def next_declared_throttle(
    before: Mapping[str, DeclaredThrottle], snapshot: Snapshot, read_ns: int, window_s: int
) -> Iterator[tuple[str, DeclaredThrottle]]:
    """Yield the name and throttle counters of each device of declared CPUs. A device redeclared with other
    CPUs restarts its counters."""
    if not snapshot.throttle:
        return
    of_cpu = {sample.cpu: sample for sample in snapshot.throttle}
    for file in snapshot.declared:
        for device in file.devices:
            if not isinstance(device.part, DeclaredCpus):
                continue
            cpus = device.part.cpus
            known = before.get(device.subject)
            if known is None or known.cpus != cpus:
                known = DeclaredThrottle(cpus, ThrottleCounters())
            if known.throttled.read_ns != read_ns:
                core, package = _counts(cpus, of_cpu)
                known = DeclaredThrottle(
                    cpus, next_throttle_counters(known.throttled, core, package, read_ns, window_s)
                )
            yield device.subject, known


def _counts(cpus: CpuSet, of_cpu: Mapping[int, ThrottleSample]) -> tuple[Reading, Reading]:
    """Return the sum of the core throttle counts, and the largest package throttle count, of CPUs."""
    samples = [of_cpu[cpu] for cpu in cpus_of(cpus) if cpu in of_cpu]
    return (
        _combined((sample.core for sample in samples), sum),
        _combined((sample.package for sample in samples), max),
    )


def _combined(counters: Iterable[Reading], combine: Callable[[list[int]], int]) -> Reading:
    """Combine the counters that exist with ``combine``; unreadable if one of them can no longer be read."""
    known: list[int] = []
    for counter in counters:
        if not isinstance(counter, Missing):
            known.append(counter)
        elif counter.absence is Absence.UNREADABLE:
            return counter
    return combine(known) if known else NEVER_READ


class ExpectedCpus(NamedTuple):
    """CPUs that should be in a state (online or isolated), and the source of the expectation."""

    cpus: CpuSet
    basis: str
    """Source of the expectation: ``online at start``, ``configured``, ``declared``."""


class CpuView(NamedTuple):
    """Input of the CPU rules for a set of CPUs."""

    cpus: CpuSet
    """Evaluated CPUs: facts about other CPUs in this view do not count."""
    node: NodeSample | None
    """NUMA node of the CPUs; None for declared CPUs."""
    nodes: tuple[NodeSample, ...]
    present: CpuSet | Missing
    online: CpuSet | Missing
    isolated: CpuSet | Missing
    expected_online: ExpectedCpus
    """CPUs that should be online."""
    expected_isolated: ExpectedCpus
    """CPUs that should be isolated."""
    throttled_core: Growth
    throttled_package: Growth
    throttle_events: int
    """Smallest number of throttle events within the window that makes a device degraded."""
    throttle_window_s: int
    cores: CoreFacts
    smt: Reading
    """State of simultaneous multithreading (SMT): 1: hardware threads share cores; 0: off."""
    smt_start: Reading
    machine_checks: CpuSet
    """CPUs of the machine with an uncorrected machine check since boot."""
    corrected: CpuSet
    """CPUs of the machine with too many corrected machine checks within the window."""
    hard_lockups: CpuSet
    """CPUs of the machine with a recent hard lockup."""
    soft_lockups: CpuSet
    """CPUs of the machine with a recent soft lockup."""
    log_state: SourceState
    """State of the kernel-log reader."""
    limits: HostLimits
    declared: DeclaredCpus | None


@dataclass(frozen=True, slots=True)
class CpuState:
    """State of the CPU rules, which the next evaluation compares with."""

    members: Mapping[int, CpuSet] = field(default_factory=dict)
    """CPUs of each NUMA node at the last reading."""
    expected: Mapping[int, CpuSet] = field(default_factory=dict)
    """CPUs that should be online, by NUMA node."""
    isolated: CpuSet | Missing = NEVER_READ
    """CPUs that were isolated at the agent's start."""
    smt: Reading = NEVER_READ
    """State of simultaneous multithreading at the agent's start: 1: on; 0: off."""
    node_throttle: Mapping[int, ThrottleCounters] = field(default_factory=dict)
    """Throttle counters by NUMA node."""
    declared_throttle: Mapping[str, DeclaredThrottle] = field(default_factory=dict)
    """Throttle counters of declared CPUs, by device name."""
    cores: CoreFacts = field(default_factory=CoreFacts)
    log_facts: CpuLogFacts = field(default_factory=CpuLogFacts)
    hard_lockups: CpuSet = 0
    """CPUs with a recent hard lockup."""
    soft_lockups: CpuSet = 0
    """CPUs with a recent soft lockup."""
    corrected: CpuSet = 0
    """CPUs with too many corrected machine checks within the window."""
    evaluated_ns: int = 0
    """Time of the evaluation that produced this state."""


def next_cpu_state(
    previous: CpuState, log: LogState, snapshot: Snapshot, settings: Settings, now: Instant
) -> CpuState:
    """Return the state of the CPU rules after a snapshot; ``log`` holds the kernel-log facts after the
    snapshot."""
    machine, limits = snapshot.machine, settings.host
    window_s = settings.throttle_window_s
    log_facts = next_log_facts(
        previous.log_facts, log, limits.correctable_window_s, previous.evaluated_ns, now
    )
    read_ns = next((src.beat_ns for src in snapshot.sources if src.name == "throttle"), now.mono_ns)
    return CpuState(
        members={**previous.members, **_members(snapshot)},
        expected=_expected(previous, snapshot, settings),
        isolated=snapshot.cpus.isolated if isinstance(previous.isolated, Missing) else previous.isolated,
        smt=machine.smt_active if machine and isinstance(previous.smt, Missing) else previous.smt,
        node_throttle={
            node.node: next_throttle_counters(
                previous.node_throttle.get(node.node, ThrottleCounters()),
                node.throttle_core,
                node.throttle_package,
                read_ns,
                window_s,
            )
            for node in snapshot.nodes
        },
        declared_throttle=dict(
            next_declared_throttle(previous.declared_throttle, snapshot, read_ns, window_s)
        ),
        cores=core_facts(previous.cores, machine.cores) if machine else previous.cores,
        log_facts=log_facts,
        hard_lockups=locked_up(log_facts, LogCode.HARD_LOCKUP, now),
        soft_lockups=locked_up(log_facts, LogCode.SOFT_LOCKUP, now),
        corrected=frequently_corrected(
            log_facts, limits.correctable_errors, limits.correctable_window_s, now
        ),
        evaluated_ns=now.mono_ns,
    )


def _members(snapshot: Snapshot) -> dict[int, CpuSet]:
    return {node.node: node.cpus for node in snapshot.nodes if isinstance(node.cpus, int)}


def _expected(previous: CpuState, snapshot: Snapshot, settings: Settings) -> Mapping[int, CpuSet]:
    """Return the CPUs that should be online, by NUMA node.

    A configured CPU that belongs to no NUMA node is expected on the first NUMA node.
    """
    if settings.expect_cpus is None:
        online = snapshot.cpus.online
        if isinstance(online, Missing):
            return previous.expected
        new = {node: cpus & online for node, cpus in _members(snapshot).items()}
        return {**new, **previous.expected}
    nodes = {**previous.members, **_members(snapshot)}
    owned = 0
    for cpus in nodes.values():
        owned |= cpus
    expected = {node: cpus & settings.expect_cpus for node, cpus in nodes.items()}
    if expected:
        expected[min(expected)] |= settings.expect_cpus & ~owned
    return expected


def view_cpus(state: CpuState, snapshot: Snapshot, settings: Settings, number: int) -> CpuView:
    """Return the CPU rules' input for the CPUs of a NUMA node."""
    cpus = state.members.get(number, 0)
    isolated = state.isolated if isinstance(state.isolated, int) else 0
    basis = "online at start" if settings.expect_cpus is None else "configured"
    return _view(
        state,
        snapshot,
        settings,
        cpus=cpus,
        node=next((node for node in snapshot.nodes if node.node == number), None),
        expected_online=ExpectedCpus(state.expected.get(number, 0), basis),
        expected_isolated=ExpectedCpus(isolated & cpus, "isolated at start"),
        throttled=state.node_throttle.get(number, ThrottleCounters()),
        declared=None,
    )


def view_declared_cpus(state: CpuState, snapshot: Snapshot, settings: Settings, device: Declared) -> CpuView:
    """Return the CPU rules' input for the CPUs that a driver declares."""
    what = device.part
    assert isinstance(what, DeclaredCpus), "the device is not a set of CPUs"
    isolated = state.isolated if isinstance(state.isolated, int) else 0
    present = snapshot.cpus.present
    # CPUs that do not exist are the subject of cpu.missing
    expected = ExpectedCpus(what.cpus if isinstance(present, Missing) else what.cpus & present, "declared")
    watched = state.declared_throttle.get(device.subject)
    return _view(
        state,
        snapshot,
        settings,
        cpus=what.cpus,
        node=None,
        expected_online=expected,
        expected_isolated=expected
        if what.isolated
        else ExpectedCpus(isolated & what.cpus, "isolated at start"),
        throttled=watched.throttled if watched else ThrottleCounters(),
        declared=what,
    )


def _view(
    state: CpuState,
    snapshot: Snapshot,
    settings: Settings,
    *,
    cpus: CpuSet,
    node: NodeSample | None,
    expected_online: ExpectedCpus,
    expected_isolated: ExpectedCpus,
    throttled: ThrottleCounters,
    declared: DeclaredCpus | None,
) -> CpuView:
    return CpuView(
        cpus=cpus,
        node=node,
        nodes=snapshot.nodes,
        present=snapshot.cpus.present,
        online=snapshot.cpus.online,
        isolated=snapshot.cpus.isolated,
        expected_online=expected_online,
        expected_isolated=expected_isolated,
        throttled_core=throttled.core.growth,
        throttled_package=throttled.package.growth,
        throttle_events=settings.throttle_events,
        throttle_window_s=settings.throttle_window_s,
        cores=state.cores,
        smt=snapshot.machine.smt_active if snapshot.machine else NEVER_READ,
        smt_start=state.smt,
        machine_checks=state.cores.machine_checked | state.log_facts.machine_checks,
        corrected=state.corrected,
        hard_lockups=state.hard_lockups,
        soft_lockups=state.soft_lockups,
        log_state=reader_state(snapshot.log),
        limits=settings.host,
        declared=declared,
    )


def cpus_text(cpus: CpuSet) -> str:
    """Format a set of CPUs for a message: ``CPU 1``, ``CPUs 0-3,8``."""
    return f"{'CPU' if cpus.bit_count() == 1 else 'CPUs'} {format_cpus(cpus)}"
