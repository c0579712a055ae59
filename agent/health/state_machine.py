"""The state machine: how a finding becomes a cause, and how a cause goes away.

Everything that can raise or clear a cause is in this file: one table, the counts and dwell times of a rule,
and the order of severities. One thing outranks all causes, a source that stands still; that is the
pipeline's. Nothing here reads a clock; the caller passes the time and the number of the source's pass.
Passes are counted, not calls: in quiet times most passes wake nobody.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from agent.health.catalog import CLEAN_MIN_NS, Row
from agent.model.health import Finding, Health, Severity
from agent.model.time import Instant


class Phase(StrEnum):
    """Where a possible cause stands."""

    CLEAR = "clear"
    PENDING = "rising"
    """Seen, not yet often enough."""
    RAISED = "raised"
    CLEARING = "clearing"
    """No longer seen, not yet for long enough; still held."""
    PROBATION = "probation"
    """Cleared, and watched for a while; still held."""


class Observation(StrEnum):
    """What the newest pass says of it."""

    BAD = "bad"
    BAD_DEBOUNCED = "bad-enough"
    """Bad for as many passes in a row as the rule asks."""
    GOOD = "good"
    GOOD_ENOUGH = "good-enough"
    """Good for as many passes, and as long, as the phase asks."""
    UNSEEN = "unseen"
    """Nobody could look. Silence neither raises nor clears."""


TRANSITIONS: Final[dict[tuple[Phase, Observation], Phase]] = {
    (Phase.CLEAR, Observation.BAD): Phase.PENDING,
    (Phase.CLEAR, Observation.BAD_DEBOUNCED): Phase.RAISED,
    (Phase.CLEAR, Observation.GOOD): Phase.CLEAR,
    (Phase.CLEAR, Observation.GOOD_ENOUGH): Phase.CLEAR,
    (Phase.CLEAR, Observation.UNSEEN): Phase.CLEAR,
    (Phase.PENDING, Observation.BAD): Phase.PENDING,
    (Phase.PENDING, Observation.BAD_DEBOUNCED): Phase.RAISED,
    (Phase.PENDING, Observation.GOOD): Phase.CLEAR,
    (Phase.PENDING, Observation.GOOD_ENOUGH): Phase.CLEAR,
    (Phase.PENDING, Observation.UNSEEN): Phase.PENDING,
    (Phase.RAISED, Observation.BAD): Phase.RAISED,
    (Phase.RAISED, Observation.BAD_DEBOUNCED): Phase.RAISED,
    (Phase.RAISED, Observation.GOOD): Phase.CLEARING,
    (Phase.RAISED, Observation.GOOD_ENOUGH): Phase.CLEARING,  # one clean look is never enough
    (Phase.RAISED, Observation.UNSEEN): Phase.RAISED,
    (Phase.CLEARING, Observation.BAD): Phase.RAISED,
    (Phase.CLEARING, Observation.BAD_DEBOUNCED): Phase.RAISED,
    (Phase.CLEARING, Observation.GOOD): Phase.CLEARING,
    (Phase.CLEARING, Observation.GOOD_ENOUGH): Phase.PROBATION,  # of no length, unless the rule asks for one
    (Phase.CLEARING, Observation.UNSEEN): Phase.RAISED,  # its clean passes must follow each other
    (Phase.PROBATION, Observation.BAD): Phase.RAISED,
    (Phase.PROBATION, Observation.BAD_DEBOUNCED): Phase.RAISED,
    (Phase.PROBATION, Observation.GOOD): Phase.PROBATION,
    (Phase.PROBATION, Observation.GOOD_ENOUGH): Phase.CLEAR,
    (Phase.PROBATION, Observation.UNSEEN): Phase.PROBATION,
}

HELD: Final = frozenset({Phase.RAISED, Phase.CLEARING, Phase.PROBATION})
"""Phases in which the cause counts."""

HEALTH: Final[dict[Severity, Health]] = {
    Severity.OK: Health.HEALTHY,
    Severity.INFO: Health.HEALTHY,
    Severity.DEGRADED: Health.HEALTHY,
    Severity.UNKNOWN: Health.UNKNOWN,  # silence is not health
    Severity.UNHEALTHY: Health.UNHEALTHY,
}
"""What the wire says of a device whose worst cause is this severe."""


class Condition(NamedTuple):
    """One possible cause of one subject, through time."""

    phase: Phase
    finding: Finding
    """The newest bad finding: what is said while it is held."""
    since: Instant
    """When it was first seen in this spell."""
    mark_pass: int
    """Pass of the source at which the present run of bad, or of good, looks began."""
    mark_ns: int
    """When that was; in probation, when the probation began."""
    seen_pass: int
    """The last pass that was looked at."""

    @property
    def held(self) -> bool:
        """Whether it counts as a cause."""
        return self.phase in HELD


def advance(
    track: Condition | None,
    finding: Finding | None,
    rule: Row,
    pass_number: int,
    now: Instant,
    *,
    seen: bool = True,
) -> Condition | None:
    """The track after one look.

    Args:
        track: As it was; None if nothing was wrong.
        finding: The bad finding of this look; None if the look was good.
        rule: Its counts and dwell times.
        pass_number: The source's pass that was looked at. The same pass twice counts once.
        now: Of this look.
        seen: False if nobody could look.

    Returns:
        The track as it is now; None when nothing is wrong, and nothing is remembered.
    """
    if track is None:
        if finding is None or not seen:
            return None
        track = Condition(Phase.CLEAR, finding, now, pass_number, now.mono_ns, pass_number)
    if pass_number < track.seen_pass:  # the source began anew: what was counted before stays counted
        track = track._replace(mark_pass=track.mark_pass - track.seen_pass, seen_pass=0)
    if finding is not None and track.held and finding.severity < track.finding.severity:
        # less bad is a good look at what is held: it goes its way, and the lesser begins when it is gone
        rest = advance(track, None, rule, pass_number, now, seen=seen)
        return rest or advance(None, finding, rule, pass_number, now, seen=seen)
    if not seen:
        unseen = pass_number - track.seen_pass  # passes that count for nothing
        phase = TRANSITIONS[track.phase, Observation.UNSEEN]
        return track._replace(phase=phase, mark_pass=track.mark_pass + unseen, seen_pass=pass_number)
    bad = finding is not None
    was_bad = track.phase in (Phase.CLEAR, Phase.PENDING, Phase.RAISED)
    if bad != was_bad:
        track = track._replace(mark_pass=pass_number, mark_ns=now.mono_ns)
    sight = _sight(track, bad, rule, pass_number, now.mono_ns)
    phase = TRANSITIONS[track.phase, sight]
    if phase is Phase.PROBATION and track.phase is not Phase.PROBATION:
        if not rule.probation_ns or track.finding.severity is Severity.UNKNOWN:
            return None  # what nobody knew of needs no watching once it is known
        track = track._replace(mark_ns=now.mono_ns)
    if phase is Phase.CLEAR:
        return None
    return track._replace(phase=phase, finding=finding or track.finding, seen_pass=pass_number)


def _sight(track: Condition, bad: bool, rule: Row, pass_number: int, now_ns: int) -> Observation:
    passes = pass_number - track.mark_pass + 1
    run_ns = now_ns - track.mark_ns
    if bad:
        return (
            Observation.BAD_DEBOUNCED
            if passes >= rule.raise_after and run_ns >= rule.raise_ns
            else Observation.BAD
        )
    if track.phase is Phase.PROBATION:
        return Observation.GOOD_ENOUGH if run_ns >= rule.probation_ns else Observation.GOOD
    if (passes >= rule.clear_after and run_ns >= CLEAN_MIN_NS) or (passes > 1 and run_ns >= rule.clear_ns):
        return Observation.GOOD_ENOUGH
    return Observation.GOOD


def due_ns(track: Condition, rule: Row, period_ns: int, now_ns: int) -> int | None:
    """When to look again though nothing wakes us, because a count or a dwell time will be full.

    Args:
        track: A track as :func:`advance` returned it from a look that could see.
        rule: Its rule.
        period_ns: Of the source.
        now_ns: Of this look.
    """
    # a little more than a period, lest the pass is not over yet
    next_ns = now_ns + period_ns + min(period_ns // 10, 10_000_000)
    if track.phase is Phase.PROBATION:
        end_ns = track.mark_ns + rule.probation_ns
        return end_ns if end_ns > now_ns else next_ns
    if track.phase is Phase.PENDING:
        return max(next_ns, track.mark_ns + rule.raise_ns)
    if track.phase is Phase.CLEARING:
        left = rule.clear_after - (track.seen_pass - track.mark_pass + 1)
        counted_ns = next_ns + (left - 1) * period_ns if left > 0 else now_ns
        end_ns = min(
            max(counted_ns, track.mark_ns + CLEAN_MIN_NS), max(next_ns, track.mark_ns + rule.clear_ns)
        )
        return end_ns if end_ns > now_ns else next_ns
    return None


def worst_first(tracks: Iterable[tuple[str, Condition]]) -> list[tuple[str, Condition]]:
    """Held tracks, the most severe first, then the oldest, then by code."""
    held = [(code, track) for code, track in tracks if track.held]
    return sorted(held, key=lambda item: (-item[1].finding.severity, item[1].since.mono_ns, item[0]))
