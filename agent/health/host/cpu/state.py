"""State that the CPU rules carry between evaluations, and CpuRuleInput, the input of these rules.

An input is for the CPUs of one NUMA node, or for the CPUs that a driver declares as one device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import NamedTuple

from agent.health.host.cpu.facts import (
    CpuFacts,
    CpuLogFacts,
    next_cpu_facts,
    next_cpu_log_facts,
    often_corrected_cpus,
    recently_locked_cpus,
)
from agent.health.kernel_log.facts import KernelLogCode, KernelLogState, log_reader_state
from agent.health.rate_window import WindowedCounter, next_counter, repeated_counter
from agent.health.rules import CounterGrowth
from agent.model.cpuset import CpuSet, cpu_numbers, format_cpus, parse_cpus
from agent.model.declared_devices import DeclaredCpuDevice, DriverDevice
from agent.model.persistent_faults import BootBaseline, CpusBaseline, FrequencyBaseline, NumaCpusBaseline
from agent.model.reading import NEVER_READ, Absence, Missing, Reading, SourceState
from agent.model.settings import EngineSettings, HostLimits
from agent.model.snapshot import CpuThrottleSample, NumaCpuSample, Snapshot
from agent.model.time import Instant


class CpuThrottleCounters(NamedTuple):
    """Thermal-throttle counters of a set of CPUs."""

    read_ns: int = -1
    """CLOCK_MONOTONIC of the last reading of the counters [ns]; -1: not read yet."""
    core: WindowedCounter = WindowedCounter()
    """Throttle events of the physical cores, summed over the CPUs."""
    package: WindowedCounter = WindowedCounter()
    """Throttle events of the CPU package: the largest number of any CPU."""


class DeclaredDeviceThrottleCounters(NamedTuple):
    """Thermal-throttle counters of the CPUs that a driver declares as one device."""

    cpus: CpuSet
    throttled: CpuThrottleCounters


def next_throttle_counters(
    before: CpuThrottleCounters, core: Reading, package: Reading, read_ns: int, window_s: int, unread_ns: int
) -> CpuThrottleCounters:
    """Return the thermal-throttle counters of CPUs after a reading; the same object if the reading is not
    new.

    Args:
        unread_ns: Time of the last earlier reading that is not in `before`, with the same values [ns]; 0:
            there was none.
    """
    if 0 <= before.read_ns < unread_ns:
        before = CpuThrottleCounters(
            unread_ns,
            repeated_counter(before.core, unread_ns, window_s),
            repeated_counter(before.package, unread_ns, window_s),
        )
    if before.read_ns == read_ns:
        return before
    return CpuThrottleCounters(
        read_ns,
        next_counter(before.core, core, read_ns, window_s),
        next_counter(before.package, package, read_ns, window_s),
    )


def next_declared_throttle(
    previous: "CpuRuleState", snapshot: Snapshot, read_ns: int, window_s: int
) -> Iterator[tuple[str, DeclaredDeviceThrottleCounters]]:
    """Yield the name and the thermal-throttle counters of each declared CPU device. The counters restart if
    the driver declares other CPUs for the device."""
    if not snapshot.throttle:
        return
    before, unread_ns = previous.declared_throttle, previous.unread_ns
    of_cpu = {sample.cpu: sample for sample in snapshot.throttle}
    for file in snapshot.declared:
        for device in file.devices:
            if not isinstance(device.part, DeclaredCpuDevice):
                continue
            cpus = device.part.cpus
            known = before.get(device.subject)
            if known is None or known.cpus != cpus:
                known = DeclaredDeviceThrottleCounters(cpus, CpuThrottleCounters())
            if known.throttled.read_ns != read_ns:
                core, package = _throttle_counts(cpus, of_cpu)
                known = DeclaredDeviceThrottleCounters(
                    cpus, next_throttle_counters(known.throttled, core, package, read_ns, window_s, unread_ns)
                )
            yield device.subject, known


def _throttle_counts(cpus: CpuSet, of_cpu: Mapping[int, CpuThrottleSample]) -> tuple[Reading, Reading]:
    """Return how often CPUs were throttled, as two counts. The first is the sum over their physical cores.
    The second is the largest count of a CPU package."""
    samples = [of_cpu[cpu] for cpu in cpu_numbers(cpus) if cpu in of_cpu]
    return (
        _combine_counters((sample.core for sample in samples), sum),
        _combine_counters((sample.package for sample in samples), max),
    )


def _combine_counters(counters: Iterable[Reading], combine: Callable[[list[int]], int]) -> Reading:
    """Combine the throttle counters of several CPUs. CPUs without a counter are left out.

    Returns Missing if one of the counters can no longer be read, or if no CPU has a counter.

    Args:
        combine: Function of all values: ``sum`` or ``max``.
    """
    known: list[int] = []
    for counter in counters:
        if not isinstance(counter, Missing):
            known.append(counter)
        elif counter.absence is Absence.UNREADABLE:
            return counter
    return combine(known) if known else NEVER_READ


class ExpectedCpus(NamedTuple):
    """CPUs that should be online, or should be isolated, and where the expectation comes from."""

    cpus: CpuSet
    origin: str
    """Origin of the expectation, as text: ``online at start``, ``isolated at start``, ``configured``,
    ``declared``."""


class CpuRuleInput(NamedTuple):
    """Input of the CPU rules for the CPUs of one NUMA node or of one declared device."""

    cpus: CpuSet
    """Evaluated CPUs; other fields may hold other CPUs of the machine too, which the rules ignore."""
    node: NumaCpuSample | None
    """NUMA node of the CPUs; None for declared CPUs."""
    nodes: tuple[NumaCpuSample, ...]
    present: CpuSet | Missing
    online: CpuSet | Missing
    isolated: CpuSet | Missing
    expected_online: ExpectedCpus
    expected_isolated: ExpectedCpus
    throttled_core: CounterGrowth
    throttled_package: CounterGrowth
    throttle_events: int
    """Smallest number of throttle events within the window that makes a device degraded."""
    throttle_window_s: int
    cpu_facts: CpuFacts
    smt: Reading
    """State of simultaneous multithreading (SMT): 1: on; 0: off."""
    smt_start: Reading
    """State of simultaneous multithreading (SMT) at the agent's start: 1: on; 0: off."""
    machine_checks: CpuSet
    """CPUs of the machine with an uncorrected machine check since boot."""
    corrected: CpuSet
    """CPUs of the machine with too many corrected machine checks within the window."""
    hard_lockups: CpuSet
    """CPUs of the machine with a recent hard lockup."""
    soft_lockups: CpuSet
    """CPUs of the machine with a recent soft lockup."""
    faults_began: Mapping[tuple[KernelLogCode, int], Instant]
    """Time at which a CPU's fault of one code began, by code and CPU; from the kernel log."""
    log_state: SourceState
    limits: HostLimits
    declared: DeclaredCpuDevice | None

    def fault_since(self, code: KernelLogCode, cpus: CpuSet) -> Instant | None:
        """Return when a fault of one of ``cpus`` began, by the kernel log; None: no fault.

        Args:
            code: Kind of the kernel-log lines that report the fault.
        """
        began = (at for (of, cpu), at in self.faults_began.items() if of is code and cpus >> cpu & 1)
        return min(began, default=None)


class CpuRuleState(NamedTuple):
    """Values that the CPU rules carry from one evaluation to the next."""

    numa_cpus: Mapping[int, CpuSet] = {}
    """CPUs of each NUMA node since boot, those that went offline included."""
    expected: Mapping[int, CpuSet] = {}
    """CPUs that should be online, by NUMA node."""
    isolated_start: CpuSet | Missing = NEVER_READ
    """CPUs that were isolated at the agent's start."""
    smt_start: Reading = NEVER_READ
    """State of simultaneous multithreading at the agent's start: 1: on; 0: off."""
    node_throttle: Mapping[int, CpuThrottleCounters] = {}
    declared_throttle: Mapping[str, DeclaredDeviceThrottleCounters] = {}
    """Throttle counters of declared CPUs, by device name."""
    cpu_facts: CpuFacts = CpuFacts()
    log_facts: CpuLogFacts = CpuLogFacts()
    hard_lockups: CpuSet = 0
    soft_lockups: CpuSet = 0
    corrected: CpuSet = 0
    """CPUs with too many corrected machine checks within the window."""
    evaluated_ns: int = 0
    """CLOCK_MONOTONIC of the evaluation that produced this state [ns]."""
    unread_ns: int = 0
    """CLOCK_MONOTONIC of the last reading of throttle counters that had not changed and is not in the state's
    counters [ns]; 0: none is missing."""


def next_cpu_state(
    previous: CpuRuleState, log: KernelLogState, snapshot: Snapshot, settings: EngineSettings, now: Instant
) -> CpuRuleState:
    """Return the state of the CPU rules after a snapshot (the newest readings).

    Args:
        log: Faults that the kernel log has reported up to the snapshot.
    """
    machine, limits = snapshot.machine, settings.host
    window_s = settings.throttle_window_s
    log_facts = next_cpu_log_facts(
        previous.log_facts, log, limits.correctable_window_s, previous.evaluated_ns, now
    )
    read_ns = _throttle_read_ns(snapshot, now)
    numa_cpus = _next_numa_cpus(previous.numa_cpus, snapshot)
    return CpuRuleState(
        numa_cpus=numa_cpus,
        expected=_expected_online(previous, numa_cpus, snapshot, settings),
        isolated_start=snapshot.cpus.isolated
        if isinstance(previous.isolated_start, Missing)
        else previous.isolated_start,
        smt_start=machine.smt_active
        if machine and isinstance(previous.smt_start, Missing)
        else previous.smt_start,
        node_throttle={
            node.numa_node: next_throttle_counters(
                previous.node_throttle.get(node.numa_node, CpuThrottleCounters()),
                node.throttle_core,
                node.throttle_package,
                read_ns,
                window_s,
                previous.unread_ns,
            )
            for node in snapshot.nodes
        },
        declared_throttle=dict(next_declared_throttle(previous, snapshot, read_ns, window_s)),
        cpu_facts=next_cpu_facts(previous.cpu_facts, machine.cores) if machine else previous.cpu_facts,
        log_facts=log_facts,
        hard_lockups=recently_locked_cpus(log_facts, KernelLogCode.HARD_LOCKUP, now),
        soft_lockups=recently_locked_cpus(log_facts, KernelLogCode.SOFT_LOCKUP, now),
        corrected=often_corrected_cpus(
            log_facts, limits.correctable_errors, limits.correctable_window_s, now
        ),
        evaluated_ns=now.mono_ns,
    )


def unchanged_cpu_state(previous: CpuRuleState, snapshot: Snapshot, now: Instant) -> CpuRuleState:
    """Return the state of the CPU rules after a snapshot with the same readings as in the last evaluation."""
    return previous._replace(evaluated_ns=now.mono_ns, unread_ns=_throttle_read_ns(snapshot, now))


def _throttle_read_ns(snapshot: Snapshot, now: Instant) -> int:
    return next((source.beat_ns for source in snapshot.sources if source.name == "throttle"), now.mono_ns)


def _cpus_by_numa_node(snapshot: Snapshot) -> dict[int, CpuSet]:
    return {node.numa_node: node.cpus for node in snapshot.nodes if isinstance(node.cpus, int)}


def _next_numa_cpus(before: Mapping[int, CpuSet], snapshot: Snapshot) -> Mapping[int, CpuSet]:
    """Return the CPUs of each NUMA node after a snapshot. The kernel lists only the online CPUs of a node.
    The C core keeps a CPU that goes offline, but not over a restart of the agent."""
    read = _cpus_by_numa_node(snapshot)
    return {node: before.get(node, 0) | read.get(node, 0) for node in {**before, **read}}


def _expected_online(
    previous: CpuRuleState, numa_cpus: Mapping[int, CpuSet], snapshot: Snapshot, settings: EngineSettings
) -> Mapping[int, CpuSet]:
    """Return the CPUs that should be online, by NUMA node. Configured CPUs that belong to no NUMA node are
    listed for the first NUMA node."""
    if settings.expect_cpus is None:
        online = snapshot.cpus.online
        if isinstance(online, Missing):
            return previous.expected
        new = {node: cpus & online for node, cpus in _cpus_by_numa_node(snapshot).items()}
        return {**new, **previous.expected}
    expected = {node: cpus & settings.expect_cpus for node, cpus in numa_cpus.items()}
    if expected:
        expected[min(expected)] |= settings.expect_cpus & ~reduce(or_, numa_cpus.values())
    return expected


def cpu_baselines(state: CpuRuleState) -> Iterator[CpusBaseline]:
    """Yield the CPUs of each NUMA node that should be online, to be stored for a restart of the agent."""
    for node, cpus in sorted(state.expected.items()):
        yield CpusBaseline(node, _cpu_list(cpus))


def numa_cpu_baselines(state: CpuRuleState) -> Iterator[NumaCpusBaseline]:
    """Yield the CPUs of each NUMA node, to be stored for a restart of the agent."""
    for node, cpus in sorted(state.numa_cpus.items()):
        yield NumaCpusBaseline(node, _cpu_list(cpus))


def frequency_baselines(state: CpuRuleState) -> Iterator[FrequencyBaseline]:
    """Yield the maximum frequencies of CPUs at the agent's start, to be stored for its restart."""
    cpus_of: dict[int, CpuSet] = {}
    for cpu, khz in state.cpu_facts.start_khz.items():
        cpus_of[khz] = cpus_of.get(khz, 0) | 1 << cpu
    for khz, cpus in sorted(cpus_of.items()):
        yield FrequencyBaseline(khz, _cpu_list(cpus))


def _cpu_list(cpus: CpuSet) -> str:
    return format_cpus(cpus) if cpus else ""


def restored_cpu_state(start: BootBaseline) -> CpuRuleState:
    """Return the state of the CPU rules with the values at start that the agent stored before a restart. If
    an earlier version stored them, the CPUs of a NUMA node are those that were online at start."""
    start_khz = {cpu: khz for khz, cpus in start.frequencies for cpu in cpu_numbers(parse_cpus(cpus))}
    return CpuRuleState(
        numa_cpus={node: parse_cpus(cpus) for node, cpus in start.numa_cpus or start.cpus},
        expected={node: parse_cpus(online) for node, online in start.cpus},
        isolated_start=NEVER_READ if start.isolated is None else parse_cpus(start.isolated),
        smt_start=NEVER_READ if start.smt is None else start.smt,
        cpu_facts=CpuFacts(start_khz=start_khz),
    )


def with_gained_cpus(state: CpuRuleState, snapshot: Snapshot) -> CpuRuleState:
    """Return the state at the first snapshot of an agent, with the CPUs gained since the last agent ended.
    CPUs that were set online or isolated while no agent ran count as online or isolated at start."""
    online, isolated = snapshot.cpus.online, snapshot.cpus.isolated
    expected = state.expected
    if expected and isinstance(online, int):
        of_node = _cpus_by_numa_node(snapshot)
        expected = {node: cpus | of_node.get(node, 0) & online for node, cpus in expected.items()}
    at_start = state.isolated_start
    if isinstance(isolated, int):
        at_start = isolated | at_start if isinstance(at_start, int) else isolated
    return state._replace(expected=expected, isolated_start=at_start)


def rebaseline_cpus(
    state: CpuRuleState, snapshot: Snapshot, cpus: CpuSet, numa_node: int | None = None, code: str = ""
) -> CpuRuleState:
    """Return the CPU rules' state in which the present values of CPUs replace their values at start.

    Args:
        numa_node: NUMA node whose online CPUs also replace those at start; None: no node.
        code: Finding code of the rule whose values are replaced; empty: the values of all rules.
    """
    expected, isolated, machine = state.expected, snapshot.cpus.isolated, snapshot.machine
    online = snapshot.cpus.online
    if code not in ("", "cpu.offline"):
        numa_node = None
    if numa_node is not None and numa_node in expected and isinstance(online, int):
        expected = {**expected, numa_node: expected[numa_node] & online}
    if code not in ("", "cpu.isolation"):
        isolated = state.isolated_start
    elif isinstance(isolated, int) and isinstance(state.isolated_start, int):
        isolated = state.isolated_start & ~cpus | isolated & cpus
    caps = {core.cpu: core.cap_khz for core in (machine.cores if machine else ())}
    start_khz = state.cpu_facts.start_khz
    changed = cpus if code in ("", "cpu.capped") else 0
    now_khz = {cpu: khz for cpu in cpu_numbers(changed) if isinstance(khz := caps.get(cpu), int)}
    facts = replace(state.cpu_facts, samples=(), start_khz={**start_khz, **now_khz})
    return state._replace(
        expected=expected,
        isolated_start=isolated if isinstance(isolated, int) else state.isolated_start,
        smt_start=machine.smt_active if machine and code in ("", "cpu.smt") else state.smt_start,
        cpu_facts=next_cpu_facts(facts, machine.cores) if machine else state.cpu_facts,
    )


def numa_cpu_rule_input(
    state: CpuRuleState, snapshot: Snapshot, settings: EngineSettings, numa_node: int
) -> CpuRuleInput:
    """Return the CPU rules' input for the CPUs of the NUMA node with this number."""
    origin = "online at start" if settings.expect_cpus is None else "configured"
    expected = ExpectedCpus(state.expected.get(numa_node, 0), origin)
    throttled = state.node_throttle.get(numa_node, CpuThrottleCounters())
    cpus = state.numa_cpus.get(numa_node, 0)
    node = next((node for node in snapshot.nodes if node.numa_node == numa_node), None)
    return _cpu_rule_input(state, snapshot, settings, cpus, expected, throttled)._replace(node=node)


def declared_cpu_rule_input(
    state: CpuRuleState, snapshot: Snapshot, settings: EngineSettings, device: DriverDevice
) -> CpuRuleInput:
    """Return the CPU rules' input for the CPUs that a driver declares as one device."""
    part = device.part
    assert isinstance(part, DeclaredCpuDevice), "the device is not a set of CPUs"
    present = snapshot.cpus.present
    # CPUs that do not exist are the subject of cpu.missing
    expected = ExpectedCpus(part.cpus if isinstance(present, Missing) else part.cpus & present, "declared")
    known = state.declared_throttle.get(device.subject)
    throttled = known.throttled if known else CpuThrottleCounters()
    found = _cpu_rule_input(state, snapshot, settings, part.cpus, expected, throttled)
    return found._replace(
        expected_isolated=expected if part.isolated else found.expected_isolated, declared=part
    )


def _cpu_rule_input(
    state: CpuRuleState,
    snapshot: Snapshot,
    settings: EngineSettings,
    cpus: CpuSet,
    expected_online: ExpectedCpus,
    throttled: CpuThrottleCounters,
) -> CpuRuleInput:
    isolated = state.isolated_start if isinstance(state.isolated_start, int) else 0
    return CpuRuleInput(
        cpus=cpus,
        node=None,
        nodes=snapshot.nodes,
        present=snapshot.cpus.present,
        online=snapshot.cpus.online,
        isolated=snapshot.cpus.isolated,
        expected_online=expected_online,
        expected_isolated=ExpectedCpus(isolated & cpus, "isolated at start"),
        throttled_core=throttled.core.growth,
        throttled_package=throttled.package.growth,
        throttle_events=settings.throttle_events,
        throttle_window_s=settings.throttle_window_s,
        cpu_facts=state.cpu_facts,
        smt=snapshot.machine.smt_active if snapshot.machine else NEVER_READ,
        smt_start=state.smt_start,
        machine_checks=state.cpu_facts.machine_checked | state.log_facts.machine_checks,
        corrected=state.corrected,
        hard_lockups=state.hard_lockups,
        soft_lockups=state.soft_lockups,
        faults_began=state.log_facts.began,
        log_state=log_reader_state(snapshot.log),
        limits=settings.host,
        declared=None,
    )


def format_cpu_set(cpus: CpuSet) -> str:
    """Format a set of CPUs for a message, for example as ``CPU 1`` or ``CPUs 0-3,8``."""
    return f"{'CPU' if cpus.bit_count() == 1 else 'CPUs'} {format_cpus(cpus)}"
