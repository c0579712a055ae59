"""State and views of the node rules: facts of the kernel log, and time that tasks waited (PSI).

For memory and disks the time counts in which all tasks waited. For CPUs a node has no such total; there the
time counts in which at least one task waited.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from agent.health.kernel_log.values import LogCode, LogFact, LogState, reader_state
from agent.health.rate_window import RateWindow, appended, growth
from agent.health.rules import Growth
from agent.model.log import LogSample
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
"""Windows over the total wait time [us], by resource. They span two windows, because readings may be a whole
window apart.
"""


def next_wait_totals(previous: WaitTotals, machine: MachineSample | None, window_s: int) -> WaitTotals:
    """Return the windows after an evaluation; costs nothing until the files have been read again."""
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
    """Return the evaluated total: for memory and disks "full", for CPUs "some" [us]."""
    totals = {"cpu": pressure.cpu_some, "memory": pressure.memory_full, "io": pressure.io_full}
    return totals[resource]


def waited_in_window(
    totals: WaitTotals, machine: MachineSample | None, resource: str, window_s: int
) -> Growth:
    """Return how long tasks waited in the window before the last reading [us].

    Unlike events, wait time is spread over the time between two readings. So of two readings around the
    window's beginning a proportional part counts.
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
    """Return the total at a time: interpolated between readings, before the first one its value."""
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
"""Codes of lines that may name no part."""
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
"""Codes of lines that name the part with an error, if only as "memory"."""
_NONE_CORRECTED: Final = Growth(0, float(CORRECTED_WINDOW_S))


class NodeView(NamedTuple):
    """View of the node: facts of the kernel log and wait times."""

    log_state: SourceState
    lost: int
    """Log records lost since the start, if one was within ``LASTING_HELD_S``; else 0."""
    recent_by_window: Mapping[int, tuple[LogFact, ...]]
    """Facts with a line in the window, oldest first, by each of ``WINDOWS_S``."""
    corrected: Growth
    """Lines about corrected PCIe errors within ``CORRECTED_WINDOW_S``; without any line a complete window of
    0.
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
    """CLOCK_MONOTONIC of the evaluation that found the last of them."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """Values that the node rules compare with."""

    lost: LostRecords = field(default_factory=LostRecords)
    wait_totals: WaitTotals = field(default_factory=dict)
    corrected: RateWindow = ()
    """Window over the number of lines about corrected PCIe errors."""


def next_node_state(
    previous: NodeState, log: LogState, snapshot: Snapshot, settings: Settings, now: Instant
) -> NodeState:
    """Return the state after an evaluation; ``log`` is the state of the kernel log after it."""
    return NodeState(
        lost=_lost(previous.lost, snapshot.log, now),
        wait_totals=next_wait_totals(previous.wait_totals, snapshot.machine, settings.host.pressure_window_s),
        corrected=_corrected(previous.corrected, log, now),
    )


def _lost(before: LostRecords, log: LogSample | None, now: Instant) -> LostRecords:
    """Return the lost records; the time of a loss between two evaluations is unknown."""
    if log is None or log.lost == before.records:
        return before
    return LostRecords(log.lost, now.mono_ns)


def _corrected(before: RateWindow, log: LogState, now: Instant) -> RateWindow:
    """Return the window over corrected PCIe errors; empty while lines from before the start are still being
    read.

    The sum falls when facts are dropped; then the window restarts.
    """
    if not log.caught_up_ns:
        return ()
    times = sum(fact.times for fact in log.select(LogCode.AER_CORRECTED))
    return appended(before, times, now.mono_ns, CORRECTED_WINDOW_S * NS)


def view_node(
    state: NodeState, log: LogState, snapshot: Snapshot, settings: Settings, now: Instant
) -> NodeView:
    """Return the view of the node; ``state`` and ``log`` are those after this evaluation."""
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
