"""State and input of the rules for the whole machine: faults that the kernel log reports, and wait times.

The wait times are the times for which tasks waited for a resource (pressure stall information, PSI).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from agent.health.host.cpu.facts import has_broadcast_check
from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, KernelLogState, log_reader_state
from agent.health.rate_window import RateWindow, append_reading, repeat_last_value, window_growth
from agent.health.rules import CounterGrowth
from agent.model.machine_samples import LogSample, MachineSample, PressureSample
from agent.model.reading import NEVER_READ, Missing, Reading, SourceState
from agent.model.settings import EngineSettings, HostLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant

PRESSURE_SOURCE: Final = "pressure"
"""Name of the source that reads ``/proc/pressure`` (PSI, pressure stall information)."""
RESOURCES: Final = ("cpu", "memory", "io")
"""Resources for which tasks wait (cpu, io, memory), named as the files in ``/proc/pressure``."""


WaitTotals = Mapping[str, RateWindow]
"""Windows over the total wait time of tasks [us], by resource. They are twice as long as the evaluated
window, because readings may be a whole window apart."""


def next_wait_totals(previous: WaitTotals, machine: MachineSample | None, window_s: int) -> WaitTotals:
    """Return the windows over the times that tasks waited (PSI) after an evaluation. The same object is
    returned until ``/proc/pressure`` has been read again."""
    if machine is None:
        return {}
    t_ns = next((source.beat_ns for source in machine.sources if source.name == PRESSURE_SOURCE), 0)
    if all(points and points[-1].t_ns == t_ns for points in (previous.get(name) for name in RESOURCES)):
        return previous
    return {
        name: append_reading(
            previous.get(name, ()), total_wait_us(machine.pressure, name), t_ns, 2 * window_s * NS
        )
        for name in RESOURCES
    }


def total_wait_us(pressure: PressureSample, resource: str) -> Reading:
    """Return the total wait time for a resource [us].

    For memory and io, it is the time in which all tasks waited ("full"). For cpu, it is the time in which at
    least one task waited ("some"), because the kernel has no "full" for the whole machine.
    """
    totals = {"cpu": pressure.cpu_some, "memory": pressure.memory_full, "io": pressure.io_full}
    return totals[resource]


def waited_in_window(
    totals: WaitTotals, machine: MachineSample | None, resource: str, window_s: int
) -> CounterGrowth:
    """Return how long tasks waited for a resource in the ``window_s`` seconds before the newest reading [us].
    If the window begins between two readings, a proportional part of the growth between the two counts."""
    total_us = total_wait_us(machine.pressure, resource) if machine else NEVER_READ
    window = totals.get(resource, ())
    if isinstance(total_us, Missing):
        return CounterGrowth(total_us, 0.0)
    if not window:
        return CounterGrowth(0, 0.0)
    end_ns, total_us = window[-1]
    span_s = (end_ns - window[0].t_ns) / NS
    before_us = _total_at(window, end_ns - window_s * NS)
    return CounterGrowth(total_us - before_us, min(span_s, float(window_s)))


def _total_at(window: RateWindow, t_ns: int) -> int:
    """Return the total wait time of tasks for a resource at the time ``t_ns`` [us]. Between two readings, the
    value is interpolated. Before the first reading, it is the value of that reading."""
    for left, right in pairwise(window):
        if left.t_ns <= t_ns < right.t_ns:
            share_us = (right.value - left.value) * (t_ns - left.t_ns) // (right.t_ns - left.t_ns)
            return left.value + share_us
    return window[0].value


FAULT_HELD_S: Final = 600
"""Time for which a fault is reported after its last kernel-log line [s]: no line reports the end of a
fault."""
LASTING_FAULT_HELD_S: Final = 86_400
"""Time for which a fault is reported after its last kernel-log line if only a repair ends the fault [s]."""
CORRECTED_WINDOW_S: Final = 3600
"""Window in which corrected PCIe errors are counted [s]."""
FACT_WINDOWS_S: Final = (FAULT_HELD_S, CORRECTED_WINDOW_S, LASTING_FAULT_HELD_S)
_CODES: Final = tuple(KernelLogCode)
RELATED_NS: Final = 10 * NS
"""Largest time between kernel-log lines about the same hardware error [ns]."""

UNNAMED_UNCORRECTED: Final = (KernelLogCode.HARDWARE_ERROR, KernelLogCode.MACHINE_CHECK_DEFERRED)
"""Codes of kernel-log lines about an uncorrected error that do not name the faulty part."""
_UNNAMED_PART: Final = (
    *UNNAMED_UNCORRECTED,
    KernelLogCode.HARDWARE_ERROR_CORRECTED,
    KernelLogCode.MACHINE_CHECK_CORRECTED,
)
"""Codes of kernel-log lines that may not name the faulty part."""
_MACHINE_CHECKED: Final = (
    KernelLogCode.MACHINE_CHECK,
    KernelLogCode.EDAC_UNCORRECTED,
    KernelLogCode.MEMORY_FAILURE,
)
"""Codes of kernel-log lines that name the part of a machine check."""
_NAMED_UNCORRECTED: Final = (
    *_MACHINE_CHECKED,
    KernelLogCode.AER_NONFATAL,
    KernelLogCode.AER_FATAL,
)
"""Codes of kernel-log lines that name the part with an uncorrected error, if only as "memory"."""
_NAMED_PART: Final = (
    *_NAMED_UNCORRECTED,
    KernelLogCode.MACHINE_CHECK_CORRECTED,
    KernelLogCode.EDAC_CORRECTED,
    KernelLogCode.AER_CORRECTED,
)
"""Codes of kernel-log lines that name the faulty part, if only as "memory"."""
_NONE_CORRECTED: Final = CounterGrowth(0, float(CORRECTED_WINDOW_S))


class MachineRuleInput(NamedTuple):
    """Input of the rules for the whole machine: faults in the kernel log, and wait times of tasks."""

    log_state: SourceState
    lost_log_records: int
    """Kernel-log records lost since the agent's start; 0 if none was lost within ``LASTING_FAULT_HELD_S``."""
    recent_by_window: Mapping[int, tuple[KernelLogFact, ...]]
    """Facts with a line within the window, oldest first, by window length (one of ``FACT_WINDOWS_S``) [s]."""
    corrected_pci_errors: CounterGrowth
    """Growth of the number of lines about corrected PCIe errors within ``CORRECTED_WINDOW_S``."""
    unlocated_errors: tuple[KernelLogFact, ...]
    """Hardware errors within ``LASTING_FAULT_HELD_S`` for which no line of that time names the faulty
    part."""
    is_check_unlocated: bool
    """True: all CPUs counted a machine check, and no line of the kernel log names the faulty part."""
    waited: Mapping[str, CounterGrowth]
    """Time that tasks waited within the configured window, by resource [us]."""
    limits: HostLimits
    unlisted_gpus: tuple[str, ...] = ()
    """PCI addresses of GPUs with faults that NVML does not list, each with the codes of the faults."""

    def recent(self, seconds: int, *codes: KernelLogCode) -> tuple[KernelLogFact, ...]:
        """Return the faults with one of ``codes`` that a kernel-log line of the last ``seconds`` reports, by
        age."""
        return tuple(fact for fact in self.recent_by_window[seconds] if fact.code in codes)


class UnnamedPartError(NamedTuple):
    """Error of an unnamed part, and whether other kernel-log lines name the part."""

    last: Instant
    """Time of the newest line about the error."""
    is_located: bool
    """True: a line within RELATED_NS of ``last`` names the part."""
    unlocated: Instant | None
    """Time of the newest earlier line for which no line names the part; None: there is none."""

    @property
    def newest_unlocated(self) -> Instant | None:
        """Time of the newest line for which no line names the part; None: there is none."""
        return self.unlocated if self.is_located else self.last


class LostLogRecords(NamedTuple):
    """Number of kernel-log records that were overwritten before the agent read them."""

    records: int = 0
    seen_ns: int = 0
    """CLOCK_MONOTONIC of the evaluation that detected the last lost record [ns]; 0: none was lost."""


@dataclass(frozen=True, slots=True)
class MachineRuleState:
    """Values that the rules for the whole machine carry from one evaluation to the next."""

    lost_log_records: LostLogRecords = field(default_factory=LostLogRecords)
    wait_totals: WaitTotals = field(default_factory=dict)
    corrected_pci_errors: RateWindow = ()
    """Window over the number of lines about corrected PCIe errors."""
    unnamed: Mapping[KernelLogCode, UnnamedPartError] = field(default_factory=dict)
    """Errors whose lines do not name the faulty part, by code."""


def next_machine_state(
    previous: MachineRuleState,
    log: KernelLogState,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
    evaluated_ns: int,
) -> MachineRuleState:
    """Return the state of the rules for the machine after a snapshot (the newest readings).

    Args:
        log: Faults that the kernel log has reported up to the snapshot.
        evaluated_ns: CLOCK_MONOTONIC of the last evaluation [ns].
    """
    return MachineRuleState(
        lost_log_records=_next_lost(previous.lost_log_records, snapshot.log, now),
        wait_totals=next_wait_totals(previous.wait_totals, snapshot.machine, settings.host.pressure_window_s),
        corrected_pci_errors=_next_corrected(previous.corrected_pci_errors, log, now, evaluated_ns),
        unnamed=_next_unnamed(previous.unnamed, log, now),
    )


def _next_lost(before: LostLogRecords, log: LogSample | None, now: Instant) -> LostLogRecords:
    if log is None or log.lost == before.records:
        return before
    return LostLogRecords(log.lost, now.mono_ns)


def _next_corrected(before: RateWindow, log: KernelLogState, now: Instant, evaluated_ns: int) -> RateWindow:
    """Return the window over the number of kernel-log lines about corrected PCIe errors. The window is empty
    while lines from before the agent's start are still being read."""
    if not log.caught_up_ns:
        return ()
    window_ns = CORRECTED_WINDOW_S * NS
    before = repeat_last_value(before, evaluated_ns, window_ns)  # evaluations that reused the results
    times = sum(fact.times for fact in log.select(KernelLogCode.AER_CORRECTED))
    return append_reading(before, times, now.mono_ns, window_ns)


def machine_rule_input(
    state: MachineRuleState, log: KernelLogState, snapshot: Snapshot, settings: EngineSettings, now: Instant
) -> MachineRuleInput:
    """Return the input of the rules for the machine.

    Args:
        state: State of the rules after the snapshot.
        log: Faults that the kernel log has reported up to the snapshot.
    """
    limits, facts, lost = settings.host, log.select(*_CODES), state.lost_log_records
    has_corrected = any(fact.code is KernelLogCode.AER_CORRECTED for fact in facts)
    recent = {
        seconds: tuple(fact for fact in facts if fact.last.mono_ns > now.mono_ns - seconds * NS)
        for seconds in FACT_WINDOWS_S
    }
    return MachineRuleInput(
        log_state=log_reader_state(snapshot.log),
        lost_log_records=lost.records if lost.seen_ns > now.mono_ns - LASTING_FAULT_HELD_S * NS else 0,
        recent_by_window=recent,
        corrected_pci_errors=window_growth(state.corrected_pci_errors, CORRECTED_WINDOW_S)
        if has_corrected
        else _NONE_CORRECTED,
        unlocated_errors=tuple(_unlocated_errors(state.unnamed, log, now)),
        is_check_unlocated=snapshot.machine is not None
        and has_broadcast_check(snapshot.machine.cores)
        and not log.select(*_MACHINE_CHECKED),
        waited={
            name: waited_in_window(state.wait_totals, snapshot.machine, name, limits.pressure_window_s)
            for name in RESOURCES
        },
        limits=limits,
    )


def _next_unnamed(
    before: Mapping[KernelLogCode, UnnamedPartError], log: KernelLogState, now: Instant
) -> Mapping[KernelLogCode, UnnamedPartError]:
    """Return the errors of unnamed parts after an evaluation; none while lines from before the agent's start
    are still being read.

    The log state has only the first and the newest time of lines about a named part. So it is decided when
    the line about the unnamed part is new, and until RELATED_NS later, whether a line names the part.
    """
    unnamed: dict[KernelLogCode, UnnamedPartError] = {}
    for code in _UNNAMED_PART if log.caught_up_ns else ():
        fact, known = log.facts.get((code, "")), before.get(code)
        if fact is None:
            continue
        last, earlier = fact.last, known.unlocated if known else None
        if known and known.last == last:
            if known.is_located or now.mono_ns > last.mono_ns + RELATED_NS:
                unnamed[code] = known
                continue
        elif known:
            earlier = known.newest_unlocated
        unnamed[code] = UnnamedPartError(last, _is_part_named(code, last, log), earlier)
    return unnamed


def _is_part_named(code: KernelLogCode, at: Instant, log: KernelLogState) -> bool:
    """Return whether a kernel-log line about the time ``at`` may name the part that had an error. A corrected
    error does not explain an uncorrected one."""
    naming = _NAMED_UNCORRECTED if code in UNNAMED_UNCORRECTED else _NAMED_PART
    return any(
        fact.first.mono_ns - RELATED_NS <= at.mono_ns <= fact.last.mono_ns + RELATED_NS
        for fact in log.facts.values()
        if fact.code in naming and (fact.location or fact.code is KernelLogCode.MEMORY_FAILURE)
    )


def _unlocated_errors(
    unnamed: Mapping[KernelLogCode, UnnamedPartError], log: KernelLogState, now: Instant
) -> Iterator[KernelLogFact]:
    """Yield the errors of the last day for which no kernel-log line of their time names the part, with the
    time of the newest such line as that of the last."""
    for code, error in unnamed.items():
        at = error.newest_unlocated
        if at is not None and at.mono_ns > now.mono_ns - LASTING_FAULT_HELD_S * NS:
            yield log.facts[code, ""]._replace(last=at)
