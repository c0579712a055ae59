"""The node as the rules see it that are about no device, and what is remembered for that."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.health.host.node.pressure_state import RESOURCES, Stalls, remember_stalls, stalled
from agent.health.host.node.words import HELD_S, LASTING_HELD_S
from agent.health.kernel_log.silence import reader_state
from agent.health.kernel_log.values import LogCode, LogFact, LogPast
from agent.health.rate_window import RateWindow, appended, growth
from agent.health.rules import Growth
from agent.model.log import LogSample
from agent.model.settings import HostLimits, Settings
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant

CORRECTED_WINDOW_S: Final = 3600
WINDOWS_S: Final = (HELD_S, CORRECTED_WINDOW_S, LASTING_HELD_S)
_CODES: Final = tuple(LogCode)
RELATED_NS: Final = 10 * NS
"""The lines of one error come together, but from several places in the kernel."""

_OF_SOME_PART: Final = (
    LogCode.HARDWARE_ERROR,
    LogCode.HARDWARE_ERROR_CORRECTED,
    LogCode.MACHINE_CHECK_CORRECTED,
)
"""Lines that need not name a part."""
_PARTS: Final = (
    LogCode.MACHINE_CHECK,
    LogCode.MACHINE_CHECK_CORRECTED,
    LogCode.EDAC_CORRECTED,
    LogCode.EDAC_UNCORRECTED,
    LogCode.MEMORY_FAILURE,
    LogCode.AER_CORRECTED,
    LogCode.AER_NONFATAL,
    LogCode.AER_FATAL,
)
"""Lines that say which part has an error, if only that it is memory."""
_NONE_CORRECTED: Final = Growth(0, float(CORRECTED_WINDOW_S))


class NodeView(NamedTuple):
    """What the kernel log says, and how tasks fare."""

    log_state: SourceState
    lost: int
    """Records that nobody could read since the start, if some of them within ``LASTING_HELD_S``; else 0."""
    young: Mapping[int, tuple[LogFact, ...]]
    """By each of ``WINDOWS_S``, facts of which a line came so lately, oldest first."""
    corrected: Growth
    """Lines about PCIe errors that were corrected, within ``CORRECTED_WINDOW_S``. Of none nothing is awaited:
    0 in all of it."""
    unexplained: tuple[LogFact, ...]
    """Hardware errors of the last ``LASTING_HELD_S`` of which no line of that time says in which part."""
    stalls: Mapping[str, Growth]
    """By resource, ``cpu``, ``memory`` and ``io``: how long tasks waited within the window [us]."""
    limits: HostLimits

    def recent(self, seconds: int, *codes: LogCode) -> tuple[LogFact, ...]:
        """Facts of some codes of which a line came so lately, oldest first."""
        return tuple(fact for fact in self.young[seconds] if fact.code in codes)


class Lost(NamedTuple):
    """Records of the log that were overwritten before they could be read."""

    records: int = 0
    seen_ns: int = 0
    """CLOCK_MONOTONIC of the look that found the last of them."""


@dataclass(frozen=True, slots=True)
class NodePast:
    """What the rules of the node compare with."""

    lost: Lost = field(default_factory=Lost)
    stalls: Stalls = field(default_factory=dict)
    corrected: RateWindow = ()
    """How many lines had come about PCIe errors that were corrected."""


def remember_node(
    past: NodePast, log: LogPast, snapshot: Snapshot, settings: Settings, now: Instant
) -> NodePast:
    """The past after a look; ``log`` is that after the same look."""
    return NodePast(
        lost=_lost(past.lost, snapshot.log, now),
        stalls=remember_stalls(past.stalls, snapshot.machine, settings.host.pressure_window_s),
        corrected=_corrected(past.corrected, log, now),
    )


def _lost(before: Lost, log: LogSample | None, now: Instant) -> Lost:
    """The reader counts from its start. There is no telling when between two looks it lost one."""
    if log is None or log.lost == before.records:
        return before
    return Lost(log.lost, now.mono_ns)


def _corrected(before: RateWindow, log: LogPast, now: Instant) -> RateWindow:
    """What the log held at the start is no rate. A sum may fall, for facts are dropped: it begins anew."""
    if not log.looked_ns:
        return ()
    times = sum(fact.times for fact in log.of(LogCode.AER_CORRECTED))
    return appended(before, times, now.mono_ns, CORRECTED_WINDOW_S * NS)


def view_node(past: NodePast, log: LogPast, snapshot: Snapshot, settings: Settings, now: Instant) -> NodeView:
    """What the rules are shown; ``past`` and ``log`` are those after this look."""
    limits, facts = settings.host, log.of(*_CODES)
    has_corrected = any(fact.code is LogCode.AER_CORRECTED for fact in facts)
    young = {
        seconds: tuple(fact for fact in facts if fact.last.mono_ns > now.mono_ns - seconds * NS)
        for seconds in WINDOWS_S
    }
    return NodeView(
        log_state=reader_state(snapshot.log),
        lost=past.lost.records if past.lost.seen_ns > now.mono_ns - LASTING_HELD_S * NS else 0,
        young=young,
        corrected=growth(past.corrected, CORRECTED_WINDOW_S) if has_corrected else _NONE_CORRECTED,
        unexplained=tuple(_unexplained(young[LASTING_HELD_S], facts)),
        stalls={
            name: stalled(past.stalls, snapshot.machine, name, limits.pressure_window_s) for name in RESOURCES
        },
        limits=limits,
    )


def _unexplained(young: Iterable[LogFact], facts: Iterable[LogFact]) -> Iterator[LogFact]:
    named = [fact for fact in facts if fact.code in _PARTS and _names_part(fact)]
    for fact in young:
        is_open = fact.code in _OF_SOME_PART and not fact.place
        if is_open and not any(_together(fact, part) for part in named):
            yield fact


def _names_part(fact: LogFact) -> bool:
    return bool(fact.place) or fact.code is LogCode.MEMORY_FAILURE


def _together(one: LogFact, other: LogFact) -> bool:
    last_ns = one.last.mono_ns
    return other.first.mono_ns - RELATED_NS <= last_ns <= other.last.mono_ns + RELATED_NS
