"""State and input of the rules for the machine: facts of the kernel log, and time that tasks waited (PSI).

For memory and disks, the time in which all tasks waited counts ("full"). For CPUs the kernel has no such
total for the whole machine, so the time in which at least one task waited counts ("some").
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from agent.health.kernel_log.values import LogCode, LogFact, LogState, reader_state
from agent.health.rate_window import RateWindow, appended, growth
from agent.health.rules import Growth
from agent.model.kernel_messages import LogSample
from agent.model.machine import MachineSample, PressureSample
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.settings import HostLimits, Settings
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant

SOURCE: Final = "pressure"
RESOURCES: Final = ("cpu", "memory", "io")
"""Resources, named as the files in ``/proc/pressure``."""


WaitTotals = Mapping[str, RateWindow]
"""Windows over the total wait time [us], by resource. They are twice as long as the evaluated window, because
readings may be a whole window apart.
"""


def next_wait_totals(previous: WaitTotals, machine: MachineSample | None, window_s: int) -> WaitTotals:
    """Return the windows over the wait times after an evaluation; unchanged until the PSI files have been
    read again."""
    if machine is None:
        return {}
    t_ns = next((source.beat_ns for source in machine.sources if source.name == SOURCE), 0)
    if all(points and points[-1].t_ns == t_ns for points in (previous.get(name) for name in RESOURCES)):
        return previous
    return {
        name: appended(previous.get(name, ()), wait_total(machine.pressure, name), t_ns, 2 * window_s * NS)
        for name in RESOURCES
    }


def wait_total(pressure: PressureSample, resource: str) -> Reading:
    """Return the total wait time that is evaluated [us]: "full" for memory and disks, "some" for CPUs."""
    totals = {"cpu": pressure.cpu_some, "memory": pressure.memory_full, "io": pressure.io_full}
    return totals[resource]


def waited_in_window(
    totals: WaitTotals, machine: MachineSample | None, resource: str, window_s: int
) -> Growth:
    """Return how long tasks waited in the window before the last reading [us].

    Unlike events, wait time is spread over the time between two readings. So a proportional part counts of
    the growth between the two readings around the window's beginning.
    """
    total_us = wait_total(machine.pressure, resource) if machine else NEVER_READ
    window = totals.get(resource, ())
    if isinstance(total_us, Missing):
        return Growth(total_us, 0.0)
    if not window:
        return Growth(0, 0.0)
    end_ns, total_us = window[-1]
    span_s = (end_ns - window[0].t_ns) / NS
    before_us = _total_at(window, end_ns - window_s * NS)
    return Growth(total_us - before_us, min(span_s, float(window_s)))


def _total_at(window: RateWindow, t_ns: int) -> int:
    """Return the total wait time at ``t_ns``: interpolated between readings; before the first reading, its
    value."""
    for left, right in pairwise(window):
        if left.t_ns <= t_ns < right.t_ns:
            share_us = (right.value - left.value) * (t_ns - left.t_ns) // (right.t_ns - left.t_ns)
            return left.value + share_us
    return window[0].value


HELD_S: Final = 600
"""Time for which a fact is reported after its last line, because no line reports an end [s]."""
LASTING_HELD_S: Final = 86_400
"""Time for which a fact that lasts until a repair is reported [s]."""
CORRECTED_WINDOW_S: Final = 3600
WINDOWS_S: Final = (HELD_S, CORRECTED_WINDOW_S, LASTING_HELD_S)
_CODES: Final = tuple(LogCode)
RELATED_NS: Final = 10 * NS
"""Largest time between lines about the same error: they come from several places in the kernel."""

_UNNAMED_PART: Final = (
    LogCode.HARDWARE_ERROR,
    LogCode.HARDWARE_ERROR_CORRECTED,
    LogCode.MACHINE_CHECK_CORRECTED,
)
"""Codes of kernel-log lines that may not name the part with the error."""
_NAMED_PART: Final = (
    LogCode.MACHINE_CHECK,
    LogCode.MACHINE_CHECK_CORRECTED,
    LogCode.EDAC_CORRECTED,
    LogCode.EDAC_UNCORRECTED,
    LogCode.MEMORY_FAILURE,
    LogCode.AER_CORRECTED,
    LogCode.AER_NONFATAL,
    LogCode.AER_FATAL,
)
"""Codes of kernel-log lines that name the part with the error, if only as "memory"."""
_NONE_CORRECTED: Final = Growth(0, float(CORRECTED_WINDOW_S))


class NodeView(NamedTuple):
    """Input of the rules for the machine: facts of the kernel log and wait times."""

    log_state: SourceState
    lost: int
    """Number of log records lost since the agent's start, if one was lost within ``LASTING_HELD_S``; else
    0."""
    recent_by_window: Mapping[int, tuple[LogFact, ...]]
    """Facts with a line within the window, oldest first, by window length (one of ``WINDOWS_S``) [s]."""
    corrected: Growth
    """Lines about corrected PCIe errors within ``CORRECTED_WINDOW_S``; 0 over a complete window if there was
    no line.
    """
    unexplained: tuple[LogFact, ...]
    """Hardware errors within ``LASTING_HELD_S`` for which no line of that time names the part."""
    waited: Mapping[str, Growth]
    """Time that tasks waited within the window, by resource [us]."""
    limits: HostLimits

    def recent(self, seconds: int, *codes: LogCode) -> tuple[LogFact, ...]:
        """Return the facts with one of ``codes`` and a line within ``seconds``, oldest first."""
        return tuple(fact for fact in self.recent_by_window[seconds] if fact.code in codes)


class LostRecords(NamedTuple):
    """Log records that were overwritten before the reader read them."""

    records: int = 0
    seen_ns: int = 0
    """CLOCK_MONOTONIC of the evaluation that detected the last lost record; 0: none was lost."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """State of the rules for the machine, which the next evaluation compares with."""

    lost: LostRecords = field(default_factory=LostRecords)
    wait_totals: WaitTotals = field(default_factory=dict)
    corrected: RateWindow = ()
    """Window over the number of lines about corrected PCIe errors."""


def next_node_state(
    previous: NodeState, log: LogState, snapshot: Snapshot, settings: Settings, now: Instant
) -> NodeState:
    """Return the state of the rules for the machine after an evaluation; ``log`` holds the kernel-log facts
    after it."""
    return NodeState(
        lost=_lost(previous.lost, snapshot.log, now),
        wait_totals=next_wait_totals(previous.wait_totals, snapshot.machine, settings.host.pressure_window_s),
        corrected=_corrected(previous.corrected, log, now),
    )


def _lost(before: LostRecords, log: LogSample | None, now: Instant) -> LostRecords:
    """Return the lost log records after an evaluation; the exact time of a loss between two evaluations is
    unknown."""
    if log is None or log.lost == before.records:
        return before
    return LostRecords(log.lost, now.mono_ns)


def _corrected(before: RateWindow, log: LogState, now: Instant) -> RateWindow:
    """Return the window over corrected PCIe errors; empty while lines from before the start are still being
    read.

    The number of lines falls when facts are dropped; then the window restarts.
    """
    if not log.caught_up_ns:
        return ()
    times = sum(fact.times for fact in log.select(LogCode.AER_CORRECTED))
    return appended(before, times, now.mono_ns, CORRECTED_WINDOW_S * NS)


def view_node(
    state: NodeState, log: LogState, snapshot: Snapshot, settings: Settings, now: Instant
) -> NodeView:
    """Return the input of the rules for the machine; ``state`` and ``log`` are the states after this
    evaluation."""
    limits, facts = settings.host, log.select(*_CODES)
    has_corrected = any(fact.code is LogCode.AER_CORRECTED for fact in facts)
    young = {
        seconds: tuple(fact for fact in facts if fact.last.mono_ns > now.mono_ns - seconds * NS)
        for seconds in WINDOWS_S
    }
    return NodeView(
        log_state=reader_state(snapshot.log),
        lost=state.lost.records if state.lost.seen_ns > now.mono_ns - LASTING_HELD_S * NS else 0,
        recent_by_window=young,
        corrected=growth(state.corrected, CORRECTED_WINDOW_S) if has_corrected else _NONE_CORRECTED,
        unexplained=tuple(_unexplained(young[LASTING_HELD_S], facts)),
        waited={
            name: waited_in_window(state.wait_totals, snapshot.machine, name, limits.pressure_window_s)
            for name in RESOURCES
        },
        limits=limits,
    )


def _unexplained(young: Iterable[LogFact], facts: Iterable[LogFact]) -> Iterator[LogFact]:
    named = [fact for fact in facts if fact.code in _NAMED_PART and _names_part(fact)]
    for fact in young:
        is_open = fact.code in _UNNAMED_PART and not fact.location
        if is_open and not any(_coincide(fact, part) for part in named):
            yield fact


def _names_part(fact: LogFact) -> bool:
    return bool(fact.location) or fact.code is LogCode.MEMORY_FAILURE


def _coincide(fact: LogFact, part: LogFact) -> bool:
    last_ns = fact.last.mono_ns
    return part.first.mono_ns - RELATED_NS <= last_ns <= part.last.mono_ns + RELATED_NS
