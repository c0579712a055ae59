"""Recognition of recorded evaluations that change no verdict, so that what-if need not repeat them. Pure.

what-if replays a record with other settings. Most evaluations are heartbeats of a healthy node. In a steady
state, the clock alone changes no verdict until a known time. Most changes of a snapshot are of values that no
verdict depends on, or do not cross a limit of a rule. :class:`SteadyState` finds such changes in the recorded
difference, without decoding the snapshot. Counters whose growth rules evaluate must not change. So one
evaluation of the last snapshot gives the engine's state after all of these evaluations, if
:func:`with_counters_read` states that the counters were read in between.

Cgroups change verdicts on devices only if :func:`do_cgroups_matter`; otherwise they change only what a report
states about pods.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, Final, NamedTuple

from agent.devices.inventory import InventoryDevice
from agent.engine.step import EngineState
from agent.health.gpu.faults.checkpoint import RECOVERY_READINGS, resolve_faults
from agent.health.gpu.faults.decide_severity import evaluate_faults
from agent.health.gpu.faults.fault_log import DAY_NS, FaultKey, recurrence_ns
from agent.health.gpu.responsiveness import SLOW_NS
from agent.health.gpu.rule_input import GpuRuleInput
from agent.health.gpu.rule_state import (
    counter_windows_s,
    gpu_devices,
    gpu_rules,
    gpu_sources,
    gpu_views,
    gpu_wakes,
)
from agent.health.gpu.verdicts import FIRST_PASS_WAIT_NS, gpu_catalog_row
from agent.health.gpu.xid.decisions import FaultDecision
from agent.health.host.cgroup.rules import AFFECTED_KINDS
from agent.health.host.cgroup.state import exclusive_cpu_devices
from agent.health.host.cpu.facts import LOCKUP_HELD_S
from agent.health.host.hugepages import ALLOC_FAILED_NS
from agent.health.host.machine.state import LASTING_FAULT_HELD_S
from agent.health.host.nic.state import BOOT_WAIT_S
from agent.health.host.pci.state import ERROR_WINDOW_S
from agent.health.host.pod import PodDeviceLookup
from agent.health.host.verdicts import ALL_HOST_RULES, MACHINE_SUBJECT, HostRuleState
from agent.health.rate_window import POINTS_PER_WINDOW, CounterPoint, RateWindow
from agent.health.rules import (
    CatalogRow,
    Rule,
    RuleChanges,
    RuleInputUnreadable,
    RuleResult,
    evaluate_rule,
    unreadable_row,
)
from agent.health.state_machine import ConditionPhase
from agent.health.verdict import longest_wait_ns, stall_limit_ns
from agent.model.gpu import GpuField, GpuSample, GpuWakeCondition, GpuWakeMode, NvmlReturnCode, NvmlSample
from agent.model.health import Finding
from agent.model.machine_samples import LogSample, MachineSample
from agent.model.pod_findings import PodsSample
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import GpuLimits
from agent.model.snapshot import CgroupSample, Snapshot
from agent.model.time import NS, Instant
from agent.record.events import RecordedInputs
from agent.record.value_codec import add_difference

FieldNames = Callable[[type], tuple[str, ...]]
"""Function that returns the names of a class's fields, in the order of the record."""
_GROUP_SUBJECT: Final = "group:"
"""Prefix of the subject of a cgroup's conditions."""
_NEVER_NS: Final = 1 << 100
THROTTLE, NIC, PCI, EDAC = "throttle", "nic", "pci", "edac"
"""Names of the sources that read counters."""
_HOST_ROWS: Final[Mapping[str, CatalogRow]] = {
    row.code: row for rule in ALL_HOST_RULES for row in (rule, unreadable_row(rule))
}
_FACTS_HELD_S: Final = (LOCKUP_HELD_S, ERROR_WINDOW_S, LASTING_FAULT_HELD_S)
"""Times for which rules of devices report a fact of the kernel log [s]."""
_PASSES: Final = frozenset({"beat_ns", "passes"})
"""Fields of a source that each of its passes changes."""
_LIMIT_MODES: Final = (GpuWakeMode.OVER, GpuWakeMode.BELOW, GpuWakeMode.BITS)
_GPU_COUNTS: Final = frozenset({"passes", "slow_passes", "changes"})
"""Numbers in the sample of a GPU that no rule evaluates."""


def do_cgroups_matter(state: EngineState, snapshot: Snapshot, report: Report) -> bool:
    """Return whether readings of cgroups may change verdicts on devices.

    If not, cgroups change only what a report states about pods.
    """
    settings, pods = state.settings, state.pods.trusted
    if settings.checks or exclusive_cpu_devices(snapshot):
        return True
    if pods is None or not pods.uses:
        return False
    own: list[InventoryDevice] = [*state.host.devices, *gpu_devices(state.gpus.rule_state)]
    devices = {device.subject: device for device in own} | dict(state.declared.known)
    lookup = PodDeviceLookup(pods, devices, report.declaring, settings)
    kinds = set(AFFECTED_KINDS.values())
    return any(
        entry.device is not None and entry.device.kind in kinds
        for uid in pods.uses
        for entry in lookup.prepared_for(uid)
    )


def find_unread(before: Snapshot | None, after: Snapshot, unread: Set[str]) -> Set[str]:
    """Return the sources and GPUs whose newest counters may not be in the engine's state yet.

    The engine takes counters over only after another pass (complete reading) of the source.

    Args:
        before: Snapshot of the evaluation before; None: not known.
        unread: Result of this function for the evaluation before.
    """
    known = _read_values(before) if before else {}
    found = set()
    for name, (beat_ns, values) in _read_values(after).items():
        beat_before_ns, before_values = known.get(name, (beat_ns, None))
        if beat_ns == beat_before_ns and (name in unread or values != before_values):
            found.add(name)
    return found


def _read_values(snapshot: Snapshot) -> dict[str, tuple[int, tuple[object, ...]]]:
    """Return, for each source and GPU with counters, the time of its last reading and its values."""
    machine = snapshot.machine
    dimms = (machine.dimms, machine.numa, machine.nodes_memory) if machine else ()
    values: dict[str, tuple[object, ...]] = {
        THROTTLE: (snapshot.nodes, snapshot.throttle, snapshot.declared),
        NIC: (snapshot.nics, snapshot.declared),
        PCI: (snapshot.pci, snapshot.declared),
        EDAC: (dimms, snapshot.nodes),
    }
    found = {src.name: (src.beat_ns, values[src.name]) for src in snapshot.sources if src.name in values}
    for gpu in snapshot.gpus.gpus if snapshot.gpus else ():
        found[f"gpu-{gpu.index}"] = (gpu.beat_ns, (gpu.readings, gpu.migs))
    return found


def find_steady_state(
    state: EngineState, snapshot: Snapshot, report: Report, names: FieldNames, *, with_cgroups: bool
) -> "SteadyState | None":
    """Return the steady state after an evaluation, in which equal readings change no verdict.

    None: the state is not steady, because a verdict may change although the readings do not.

    Args:
        state: State after the evaluation of ``snapshot``.
        report: Report of the evaluation.
        names: Function that returns the names of the recorded fields of a class.
        with_cgroups: True: cgroups matter.
    """
    now, now_ns, host = report.at, report.at.mono_ns, state.host
    settings = state.settings
    is_changing = (
        report.starting
        or state.stalled
        or snapshot.clear_requests
        or snapshot.checks
        or snapshot.custom_checks
        or settings.checks
        or snapshot.driver_faults
        or state.driver_faults
        or state.declared.removed
        or state.declared.checked
        or not state.declared.devices.keys() <= state.devices.keys()
        or state.pods.unread_since
        or state.gpus.fault_log.waiting
        or host.memory.errors.lines
        or host.cpus.log_facts.corrected
        or host.kernel_log.ends
        or state.started is None
        or now_ns - state.started.mono_ns < FIRST_PASS_WAIT_NS
        or any(source.state is SourceState.STARTING for source in report.sources)
        or (with_cgroups and host.groups.active)
        or not _are_gpus_read(state, snapshot.gpus)
    )
    if is_changing:
        return None
    decisions = evaluate_faults(state.gpus.fault_log, state.gpus.rule_state, settings.gpu, now)
    with_growth = bool(decisions) or any(
        condition.phase is ConditionPhase.RAISED for condition in state.conditions.values()
    )
    ends = (
        *_condition_ends(state, with_cgroups=with_cgroups),
        *_fault_ends(state, decisions, now),
        *_host_ends(host, now_ns),
        *_counter_ends(state, with_growth=with_growth),
    )
    until_ns = min(ends, default=_NEVER_NS)
    if until_ns <= now_ns:
        return None
    return SteadyState(state, snapshot, now, names, until_ns, with_cgroups=with_cgroups)


def _are_gpus_read(state: EngineState, gpus: NvmlSample | None) -> bool:
    """Return whether all known GPUs answer, no call is running, and no MIG instance was removed lately."""
    if gpus is None:
        return True
    known = state.gpus.rule_state
    return (
        gpus.nvml.state is SourceState.OK
        and not gpus.call
        and len(known.samples) == len(known.registry) == len(gpus.gpus)
        and all(
            sample.passes and sample.status == NvmlReturnCode.OK and not sample.call for sample in gpus.gpus
        )
        and not any(mig.removed_at for of_gpu in known.per_gpu.values() for mig in of_gpu.instances)
    )


def _condition_ends(state: EngineState, *, with_cgroups: bool) -> Iterator[int]:
    """Yield the times at which conditions may change although no reading changes [ns]; 0: not known.

    A condition is the state of one rule for one device.
    """
    limits, rule_changes = state.settings.gpu, RuleChanges(state.settings.rules)
    rules = gpu_rules(limits)
    gpus = {device.name for device in gpu_devices(state.gpus.rule_state)}
    for (subject, code), condition in state.conditions.items():
        if subject == MACHINE_SUBJECT or (subject.startswith(_GROUP_SUBJECT) and not with_cgroups):
            continue
        row = gpu_catalog_row(rules, limits, code) if subject in gpus else _HOST_ROWS.get(code)
        if condition.phase is ConditionPhase.PROBATION and row is not None:
            changed_ns = rule_changes.of(subject, code).probation_ns
            yield condition.run_start_ns + (row.probation_ns if changed_ns is None else changed_ns)
        elif condition.phase is not ConditionPhase.RAISED:
            yield 0


def _fault_ends(
    state: EngineState, decisions: Mapping[FaultKey, FaultDecision], now: Instant
) -> Iterator[int]:
    """Yield the times at which a latched fault may end, or get another severity [ns]."""
    log = state.gpus.fault_log
    next_log, due_ns = resolve_faults(log, decisions, state.gpus.recovery_signs, log.faults, now)
    if next_log.faults != log.faults:  # a fault has ended that was reported first
        yield now.mono_ns
    if due_ns is not None:
        yield due_ns
    for key, fault in log.faults.items():
        recurs_ns = recurrence_ns(key.code)
        times_ns = [fault.last.mono_ns + DAY_NS, *(burst.start.mono_ns + recurs_ns for burst in fault.bursts)]
        yield from (at_ns for at_ns in times_ns if at_ns > now.mono_ns)


def _host_ends(host: HostRuleState, now_ns: int) -> Iterator[int]:
    """Yield the times at which the clock alone may change the result of a rule about the host [ns]."""
    for fact in host.kernel_log.facts.values():
        ends = [fact.last.mono_ns + held_s * NS for held_s in _FACTS_HELD_S]
        yield from (end_ns for end_ns in ends if end_ns > now_ns)
    for nic in host.nics.states.values():
        ends = [port.first_ns + BOOT_WAIT_S * NS for port in nic.ports.values()]
        yield from (end_ns for end_ns in ends if end_ns > host.nics.read_ns)  # later readings end the wait
    if host.pools.alloc_failed_ns is not None and now_ns - host.pools.alloc_failed_ns < ALLOC_FAILED_NS:
        yield host.pools.alloc_failed_ns + ALLOC_FAILED_NS


# --- counters -----------------------------------------------------------------------------------------------


def _with_windows(value: Any, change: Callable[[RateWindow], RateWindow]) -> Any:
    """Return a copy of a value in which ``change`` replaces each window (recent readings of one counter)."""
    if isinstance(value, tuple):
        if value and isinstance(value[0], CounterPoint):
            return change(value)
        parts = [_with_windows(part, change) for part in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    if isinstance(value, Mapping):
        return {key: _with_windows(part, change) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{key.name: _with_windows(getattr(value, key.name), change) for key in fields(value)}
        )
    return value


def _counters(state: EngineState) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield the counters that the engine's state keeps for each source.

    Each item has the name of the source, its counters, and the lengths of their windows (recent readings)
    [s]. The name of the source of all GPUs is empty.
    """
    host, limits = state.host, state.settings.host
    for gpu in state.gpus.rule_state.per_gpu.values():
        for field, window_s in counter_windows_s(state.settings.gpu).items():
            yield "", gpu.windows.get(field, ()), (window_s,)
    yield THROTTLE, host.cpus.node_throttle, (state.settings.throttle_window_s,)
    yield THROTTLE, host.cpus.declared_throttle, (state.settings.throttle_window_s,)
    yield NIC, host.nics.states, (limits.nic_error_window_s, limits.nic_link_window_s)
    yield PCI, host.pci.states, (ERROR_WINDOW_S,)
    yield EDAC, host.memory.errors.counters, (limits.correctable_window_s,)


def _counter_ends(state: EngineState, *, with_growth: bool) -> Iterator[int]:
    """Yield, per counter, the time until which its window does not change if the counter is constant [ns].

    A window has the recent readings of a counter. 0: not known.

    Args:
        with_growth: True: yield also the times at which the growth in a window changes because a reading
            becomes too old.
    """
    found: list[RateWindow] = []

    def collect(window: RateWindow) -> RateWindow:
        found.append(window)
        return window

    for _, counters, lengths_s in _counters(state):
        found.clear()
        _with_windows(counters, collect)
        for window in found:
            if len(window) < 2:
                yield 0
            elif window[-1].value != window[-2].value:
                yield window[-2].t_ns + min(lengths_s) * NS // POINTS_PER_WINDOW
            if with_growth:
                ends = (point.t_ns + window_s * NS for point in window[:-1] for window_s in lengths_s)
                yield from (end_ns for end_ns in ends if end_ns >= window[-1].t_ns)


def with_counters_read(state: EngineState, snapshot: Snapshot, now: Instant) -> EngineState:
    """Return the engine's state as if its counters had been read until just before ``snapshot``.

    The assumed readings have the same values as the last ones. The evaluation of ``snapshot`` replaces them,
    and finds no gap between the readings.

    Args:
        now: Time of the evaluation of ``snapshot``.
    """
    host, gpus = state.host, state.gpus.rule_state
    beats = {source.name: source.beat_ns for source in snapshot.sources}

    def read(value: Any, source: str, was_ns: int | None = None) -> Any:
        return _read_before(value, was_ns, beats.get(source, now.mono_ns))

    cpus = host.cpus._replace(
        node_throttle=read(host.cpus.node_throttle, THROTTLE),
        declared_throttle=read(host.cpus.declared_throttle, THROTTLE),
    )
    errors = host.memory.errors
    was_ns, beat_ns = (
        next((source.beat_ns for source in sources if source.name == EDAC), 0)
        for sources in (errors.sources, snapshot.machine.sources if snapshot.machine else ())
    )
    errors = errors._replace(counters=_read_before(errors.counters, was_ns, beat_ns))
    nics, pci = host.nics, host.pci
    if isinstance(snapshot.nics, tuple):
        nics = replace(nics, states=read(nics.states, NIC, nics.read_ns))
    if isinstance(snapshot.pci, tuple):
        pci = replace(pci, states=read(pci.states, PCI, pci.read_ns))
    samples = {sample.index: sample for sample in snapshot.gpus.gpus} if snapshot.gpus else {}
    per_gpu = dict(gpus.per_gpu)
    for number, before in gpus.samples.items():
        of_gpu, beat_ns = per_gpu[number], samples[before.index].beat_ns
        per_gpu[number] = replace(of_gpu, windows=_read_before(of_gpu.windows, of_gpu.read_ns, beat_ns))
    return replace(
        state,
        host=host._replace(
            cpus=cpus,
            nics=nics,
            pci=pci,
            memory=host.memory._replace(errors=errors),
        ),
        gpus=state.gpus._replace(rule_state=replace(gpus, per_gpu=per_gpu)),
        evaluated=now,
    )


def _read_before(value: Any, was_ns: int | None, beat_ns: int) -> Any:
    """Return counters with the time of their last reading moved to just before a new reading.

    The time stays if it is not earlier than the new reading.

    Args:
        was_ns: Time of the last reading of the counters to change [ns]; counters with another time are of
            removed hardware. None: change all counters.
        beat_ns: Time of the new reading [ns].
    """

    def read(window: RateWindow) -> RateWindow:
        last = window[-1]
        if was_ns not in (None, last.t_ns):
            return window
        return (*window[:-1], last._replace(t_ns=max(last.t_ns, beat_ns - 1)))

    return _with_windows(value, read)


# --- differences --------------------------------------------------------------------------------------------


class _ReadingChecks(NamedTuple):
    """Checks of whether changed readings of GPUs leave the results of all rules as they are."""

    watched: Mapping[GpuField, GpuWakeCondition]
    """Limit of each reading that may change: on the same side of its limit, no result of a rule changes."""
    fixed: frozenset[GpuField]
    """Readings that may not change: the engine's state depends on them, or they rarely change."""
    rules: Mapping[GpuField, tuple[Rule, ...]]
    """Rules that evaluate each reading."""


@cache
def _reading_checks(limits: GpuLimits) -> _ReadingChecks:
    rules: dict[GpuField, list[Rule]] = {}
    for rule in gpu_rules(limits):
        for field in dict.fromkeys(wake.field for wake in rule.gpu_reads):
            rules.setdefault(field, []).append(rule)
    watched = {wake.field: wake for wake in gpu_wakes(limits) if wake.mode in _LIMIT_MODES}
    fixed = {*(rules.keys() - watched.keys()), *RECOVERY_READINGS}
    return _ReadingChecks(watched, frozenset(fixed), {field: tuple(found) for field, found in rules.items()})


class _LastPass:
    """Last pass (complete reading) of a source, and its time limits [ns].

    The attributes are the time of the last pass, the time of the last pass that was surely evaluated, the
    time without a pass after which the source is stalled, and the time after which its counters have a gap.
    """

    __slots__ = ("beat_ns", "full_beat_ns", "gap_ns", "limit_ns")

    def __init__(self, source: SourceSample, gap_ns: int) -> None:
        self.beat_ns = self.full_beat_ns = source.beat_ns
        self.gap_ns = gap_ns
        self.limit_ns = _NEVER_NS if source.state is SourceState.ABSENT else stall_limit_ns(source)

    @property
    def fresh_until_ns(self) -> int:
        """Time until which the source does not count as stalled, even without another pass [ns]."""
        return self.beat_ns + self.limit_ns


class _SteadyGpu:
    """Readings of one GPU since a steady state began, in which equal readings change no verdict."""

    def __init__(
        self, sample: GpuSample, last: _LastPass, view: GpuRuleInput, state: EngineState, names: FieldNames
    ) -> None:
        self._sample, self._view, self._last, self._names = sample, view, last, names(GpuSample)
        self._fields, self._values = tuple(sample.readings), list(sample.readings.values())
        self._answer_ns = sample.probe_p50_ns
        self._checks = _reading_checks(state.settings.gpu)
        self._changes = RuleChanges(state.settings.rules)
        self._codes = {code for subject, code in state.conditions if subject == view.name}
        self._sides: dict[GpuField, object] = {}
        """Side of its limit of each watched reading."""
        self._ranges: list[tuple[int, int, int]] = []
        """Lowest and highest value of each reading on its side of its limit, and bits that may not change."""
        self._results: dict[str, tuple[object, ...]] = {}
        """Results of rules in the steady state, by code."""
        self._equal: set[tuple[object, ...]] = set()
        """Codes of rules with sides of their readings that give the same result."""

    def accept(self, change: dict[int, Any]) -> bool:
        """Return whether a change of the GPU's sample leaves the results of all rules as they are."""
        for at, by in change.items():
            name = self._names[at]
            if name == "readings":
                if not self._accept_readings(by):
                    return False
            elif type(by) is not int:
                return False
            elif name == "beat_ns":
                self._last.beat_ns += by
                if self._last.beat_ns - self._last.full_beat_ns > self._last.gap_ns:
                    return False
            elif name == "probe_p50_ns":
                was_ns, self._answer_ns = self._answer_ns, self._answer_ns + by
                if not (0 < was_ns < SLOW_NS and 0 < self._answer_ns < SLOW_NS):
                    return False
            elif name not in _GPU_COUNTS or by < 0:
                return False
        return True

    def _accept_readings(self, change: dict[int, Any]) -> bool:
        values, ranges = self._values, self._ranges
        if not ranges:
            watched = self._checks.watched
            self._sides = {field: self._side(watched[field], self._sample[field]) for field in watched}
            ranges += [self._range(at) for at in range(len(values))]
        for at, by in change.items():
            before = values[at]
            if type(by) is not int or type(before) is not int:
                return False
            value = values[at] = before + by
            low, high, bits = ranges[at]
            if (value < low or value > high or (value ^ before) & bits) and not self._accept_crossing(at):
                return False
        return True

    def _accept_crossing(self, at: int) -> bool:
        """Return whether the results of all rules are the same after a reading crossed its limit."""
        field = self._fields[at]
        if field in self._checks.fixed:
            return False
        self._sides[field] = self._side(self._checks.watched[field], self._values[at])
        self._ranges[at] = self._range(at)
        return all(map(self._is_equal, self._checks.rules[field]))

    def _range(self, at: int) -> tuple[int, int, int]:
        field, value = self._fields[at], self._values[at]
        wake = self._checks.watched.get(field)
        limit = self._limit(wake) if wake is not None else None
        if field in self._checks.fixed:
            return _NEVER_NS, -_NEVER_NS, 0
        if wake is not None and wake.mode is GpuWakeMode.BITS:
            return -_NEVER_NS, _NEVER_NS, wake.threshold
        if limit is None or not isinstance(value, int):
            return -_NEVER_NS, _NEVER_NS, 0
        return (limit, _NEVER_NS, 0) if value >= limit else (-_NEVER_NS, limit - 1, 0)

    def _limit(self, wake: GpuWakeCondition) -> int | None:
        """Return the limit of a reading; None: the reading has no limit."""
        if wake.mode is GpuWakeMode.BELOW:
            return wake.threshold
        limit = self._sample[wake.limit] if wake.limit is not None else None
        return limit if isinstance(limit, int) else None

    def _side(self, wake: GpuWakeCondition, value: object) -> object:
        """Return on which side of its limit a reading is.

        Readings on the same side of their limits give equal results of all rules.
        """
        if not isinstance(value, int):
            return value
        if wake.mode is GpuWakeMode.BITS:
            return value & wake.threshold
        limit = self._limit(wake)
        return limit is not None and value >= limit

    def _is_equal(self, rule: Rule) -> bool:
        """Return whether a rule has the same result as in the steady state."""
        key = (rule.code, *(self._sides.get(wake.field) for wake in rule.gpu_reads))
        if key not in self._equal:
            if rule.code not in self._results:
                self._results[rule.code] = self._result(rule, self._view)
            readings = dict(zip(self._fields, self._values, strict=True))
            view = self._view._replace(sample=replace(self._sample, readings=readings))
            if self._result(rule, view) != self._results[rule.code]:
                return False
            self._equal.add(key)
        return True

    def _result(self, rule: Rule, view: GpuRuleInput) -> tuple[object, ...]:
        """Return the part of a rule's result that verdicts depend on."""
        change = self._changes.of(view.name, rule.code)
        if change.is_off:
            return ()
        result: RuleResult = evaluate_rule(rule, view, change.limit)
        if isinstance(result, Finding):
            return (Finding, result.severity)
        has_condition = not self._codes.isdisjoint((rule.code, unreadable_row(rule).code))
        return (type(result),) if has_condition or isinstance(result, RuleInputUnreadable) else ()


_DifferenceCheck = Callable[[Any], bool]
"""Function that returns whether the difference of a part of the snapshot changes no verdict."""


class SteadyState:
    """Engine state in which equal readings change no verdict, and the later snapshots that change none.

    The later snapshots are kept as differences.
    """

    def __init__(
        self,
        state: EngineState,
        snapshot: Snapshot,
        now: Instant,
        names: FieldNames,
        until_ns: int,
        *,
        with_cgroups: bool,
    ) -> None:
        """Create the steady state; the arguments are those of :func:`find_steady_state`.

        Args:
            now: Time of the evaluation of ``snapshot``.
            until_ns: Time after which a verdict may change although no reading changes [ns].
        """
        self.difference: dict[Any, Any] = {}
        """Difference between the newest snapshot of which all GPUs were evaluated and that of the steady
        state."""
        self.later: list[RecordedInputs] = []
        """Evaluations after that, each without the GPUs that had not changed."""
        self.at = now
        """Time of the newest evaluation of all GPUs."""
        self._evaluated_ns = now.mono_ns
        self._until_ns, self._fresh_until_ns = until_ns, 0
        self._source_fields = names(SourceSample)
        gaps_ns: dict[str, int] = {}
        for name, _, lengths_s in _counters(state):
            gaps_ns[name] = min(gaps_ns.get(name, _NEVER_NS), *(length_s * NS for length_s in lengths_s))
        self._sources = [
            _LastPass(source, gaps_ns.pop(source.name, _NEVER_NS)) for source in snapshot.sources
        ]
        gpu_gap_ns = gaps_ns.pop("", _NEVER_NS)
        self._gap_ns = min([longest_wait_ns(state.settings.lease_s), *gaps_ns.values()])
        """Time between two evaluations after which counters without a source have a gap, or the agent was
        stopped [ns]."""
        self._last_passes = list(self._sources)
        self._gpus: list[_SteadyGpu] = []
        if snapshot.gpus is not None:
            known, limits = state.gpus.rule_state, state.settings.gpu
            views = gpu_views(known, snapshot, limits, now)
            numbers = {sample.index: number for number, sample in known.samples.items()}
            sources = {source.name: source for source in gpu_sources(known, snapshot.gpus, limits)}
            for sample in snapshot.gpus.gpus:
                view = views[numbers[sample.index]]
                last = _LastPass(sources[view.name], gpu_gap_ns)
                self._last_passes.append(last)
                self._gpus.append(_SteadyGpu(sample, last, view, state, names))
        source: _DifferenceCheck = self._accept_source
        group = _parts(names(CgroupSample), cpu_periods=_is_count)
        self._accept = _parts(
            names(Snapshot),
            seq=_is_count,
            core=_are_counts,
            groups=partial(_is_each, group) if with_cgroups else _are_counts,
            sources=self._accept_sources,
            gpus=_parts(names(NvmlSample), gpus=self._accept_gpus, nvml=source, events=source),
            log=_parts(names(LogSample), source=source),
            machine=_parts(names(MachineSample), pressure=_are_counts, sources=partial(_is_each, source)),
            pods=_parts(names(PodsSample), source=source),
        )

    def accept(self, inputs: RecordedInputs) -> bool:
        """Return whether an evaluation changes no verdict; if so, keep its difference.

        After a result of False, the steady state is not valid any more.
        """
        difference, now_ns = inputs.difference, inputs.now.mono_ns
        try:
            if now_ns >= self._until_ns or now_ns - self._evaluated_ns > self._gap_ns:
                return False
            if not self._accept(difference):
                return False
        except (AttributeError, LookupError):  # damaged: the decoder names the reason
            return False
        if now_ns > self._fresh_until_ns:
            self._fresh_until_ns = min((last.fresh_until_ns for last in self._last_passes), default=_NEVER_NS)
            if now_ns > self._fresh_until_ns:
                return False
        self._evaluated_ns = now_ns
        if not inputs.is_full:
            self.later.append(inputs)
            return True
        for step in self.later:
            add_difference(self.difference, step.difference)
        add_difference(self.difference, difference)
        self.later.clear()
        self.at = inputs.now
        for last in self._last_passes:
            last.full_beat_ns = last.beat_ns
        return True

    def _accept_source(self, change: dict[int, Any], last: _LastPass | None = None) -> bool:
        for at, by in change.items():
            name = self._source_fields[at]
            if name not in _PASSES or type(by) is not int or by < 0:
                return False
            if last is not None and name == "beat_ns":
                if by > last.gap_ns:
                    return False
                last.beat_ns += by
        return True

    def _accept_sources(self, change: dict[int, Any]) -> bool:
        return all(self._accept_source(of_source, self._sources[at]) for at, of_source in change.items())

    def _accept_gpus(self, change: dict[int, Any]) -> bool:
        return all(self._gpus[at].accept(of_gpu) for at, of_gpu in change.items())


def _parts(names: tuple[str, ...], **checks: _DifferenceCheck) -> _DifferenceCheck:
    """Return a check of the difference of a value that has the fields ``names``.

    The check passes if only fields in ``checks`` change, and their changes pass their own checks.
    """
    by_position = {at: checks[name] for at, name in enumerate(names) if name in checks}

    def accept(change: dict[int, Any]) -> bool:
        for at, part in change.items():
            check = by_position.get(at)
            if check is None or not check(part):
                return False
        return True

    return accept


def _is_each(check: _DifferenceCheck, change: dict[int, Any]) -> bool:
    return all(map(check, change.values()))


def _is_count(change: object) -> bool:
    return type(change) is int


def _are_counts(change: object) -> bool:
    """Return whether only integers change in a part of the snapshot that no verdict depends on."""
    return type(change) is dict and all(type(part) is int or _are_counts(part) for part in change.values())
