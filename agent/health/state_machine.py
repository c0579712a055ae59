"""State machine of a condition (a raised or pending fault): how a finding becomes a cause, and how the cause
clears.

All code that can raise or clear a cause is in this file: the transition table, the use of the counts and
dwell times of a catalog row, and the order of severities. Only a stalled source outranks all causes; see
agent.health.stalls. The caller passes the time and the number of the source's pass. Passes are counted
instead of evaluations, because most passes without a change do not wake the engine.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from agent.health.rules import CLEAN_MIN_NS, CatalogRow
from agent.model.health import Finding, Health, Severity
from agent.model.time import Instant


class Phase(StrEnum):
    """Phase of a condition (a raised or pending fault)."""

    CLEAR = "clear"
    PENDING = "rising"
    """Found, but not yet for enough passes or long enough; no cause yet."""
    RAISED = "raised"
    CLEARING = "clearing"
    """No longer found, but not yet for enough passes or long enough; still a cause."""
    PROBATION = "probation"
    """No longer found for long enough, but still a cause for the catalog row's probation time."""


class Observation(StrEnum):
    """Result of the newest pass of a source for one condition."""

    BAD = "bad"
    BAD_DEBOUNCED = "bad-enough"
    """Fault found in as many consecutive passes as the catalog row requires."""
    GOOD = "good"
    GOOD_ENOUGH = "good-enough"
    """Fault not found for as many passes, and for as long, as the phase requires."""
    UNSEEN = "unseen"
    """Rule that was not evaluated: the condition is neither raised nor cleared."""


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
    (Phase.RAISED, Observation.GOOD_ENOUGH): Phase.CLEARING,  # one clean pass never suffices
    (Phase.RAISED, Observation.UNSEEN): Phase.RAISED,
    (Phase.CLEARING, Observation.BAD): Phase.RAISED,
    (Phase.CLEARING, Observation.BAD_DEBOUNCED): Phase.RAISED,
    (Phase.CLEARING, Observation.GOOD): Phase.CLEARING,
    (Phase.CLEARING, Observation.GOOD_ENOUGH): Phase.PROBATION,  # of zero length by default
    (Phase.CLEARING, Observation.UNSEEN): Phase.RAISED,  # clean passes must be consecutive
    (Phase.PROBATION, Observation.BAD): Phase.RAISED,
    (Phase.PROBATION, Observation.BAD_DEBOUNCED): Phase.RAISED,
    (Phase.PROBATION, Observation.GOOD): Phase.PROBATION,
    (Phase.PROBATION, Observation.GOOD_ENOUGH): Phase.CLEAR,
    (Phase.PROBATION, Observation.UNSEEN): Phase.PROBATION,
}

HELD: Final = frozenset({Phase.RAISED, Phase.CLEARING, Phase.PROBATION})
"""Phases in which a condition is a cause."""

HEALTH: Final[dict[Severity, Health]] = {
    Severity.OK: Health.HEALTHY,
    Severity.INFO: Health.HEALTHY,
    Severity.DEGRADED: Health.HEALTHY,
    Severity.UNKNOWN: Health.UNKNOWN,  # a device that is not evaluated is not healthy
    Severity.UNHEALTHY: Health.UNHEALTHY,
}
"""Health that is reported for a device, by the severity of its worst cause."""


class Condition(NamedTuple):
    """Raised or pending fault of one device, pod or node."""

    phase: Phase
    finding: Finding
    """Newest finding; it is reported while the condition is a cause."""
    since: Instant
    """Time of the first finding since the condition was last clear."""
    run_start_pass: int
    """Number of the source's pass at which the current run of results with, or without, a finding began."""
    run_start_ns: int
    """Time at which the current run of equal results, or the probation, began."""
    last_pass: int
    """Number of the source's last pass that was evaluated."""

    @property
    def held(self) -> bool:
        """Whether the condition counts as a cause."""
        return self.phase in HELD


def advance(
    condition: Condition | None,
    finding: Finding | None,
    rule: CatalogRow,
    pass_number: int,
    now: Instant,
    *,
    seen: bool = True,
) -> Condition | None:
    """Return the condition after one evaluation.

    Args:
        condition: Condition before; None if there was no raised or pending fault.
        finding: Finding of this evaluation; None if no fault was found.
        rule: Catalog row with counts and dwell times.
        pass_number: Number of the source's pass that was evaluated. The same pass counts once.
        now: Time of this evaluation.
        seen: False if the rule could not be evaluated.

    Returns:
        The condition; None if there is no raised or pending fault.
    """
    if condition is None:
        if finding is None or not seen:
            return None
        condition = Condition(Phase.CLEAR, finding, now, pass_number, now.mono_ns, pass_number)
    if pass_number < condition.last_pass:  # the source restarted its count: keep the run
        condition = condition._replace(
            run_start_pass=condition.run_start_pass - condition.last_pass, last_pass=0
        )
    if finding is not None and condition.held and finding.severity < condition.finding.severity:
        # a less severe finding is good for the held one; its own condition begins when that has cleared
        clearing = advance(condition, None, rule, pass_number, now, seen=seen)
        return clearing or advance(None, finding, rule, pass_number, now, seen=seen)
    if not seen:
        unseen = pass_number - condition.last_pass  # passes that neither raise nor clear
        phase = TRANSITIONS[condition.phase, Observation.UNSEEN]
        return condition._replace(
            phase=phase, run_start_pass=condition.run_start_pass + unseen, last_pass=pass_number
        )
    bad = finding is not None
    was_bad = condition.phase in (Phase.CLEAR, Phase.PENDING, Phase.RAISED)
    if bad != was_bad:
        condition = condition._replace(run_start_pass=pass_number, run_start_ns=now.mono_ns)
    observation = _observe(condition, bad, rule, pass_number, now.mono_ns)
    phase = TRANSITIONS[condition.phase, observation]
    if phase is Phase.PROBATION and condition.phase is not Phase.PROBATION:
        if not rule.probation_ns or condition.finding.severity is Severity.UNKNOWN:
            return None  # an Unknown cause needs no probation once the readings are back
        condition = condition._replace(run_start_ns=now.mono_ns)
    if phase is Phase.CLEAR:
        return None
    return condition._replace(phase=phase, finding=finding or condition.finding, last_pass=pass_number)


def _observe(condition: Condition, bad: bool, rule: CatalogRow, pass_number: int, now_ns: int) -> Observation:
    passes = pass_number - condition.run_start_pass + 1
    run_ns = now_ns - condition.run_start_ns
    if bad:
        return (
            Observation.BAD_DEBOUNCED
            if passes >= rule.raise_after and run_ns >= rule.raise_ns
            else Observation.BAD
        )
    if condition.phase is Phase.PROBATION:
        return Observation.GOOD_ENOUGH if run_ns >= rule.probation_ns else Observation.GOOD
    if (passes >= rule.clear_after and run_ns >= CLEAN_MIN_NS) or (passes > 1 and run_ns >= rule.clear_ns):
        return Observation.GOOD_ENOUGH
    return Observation.GOOD


def due_ns(condition: Condition, rule: CatalogRow, period_ns: int, now_ns: int) -> int | None:
    """Return the time at which a count or a dwell time of the condition can complete without a wake; None if
    neither can.

    Args:
        condition: Return value of :func:`advance` for an evaluated pass.
        rule: Catalog row of the condition.
        period_ns: Period of the source.
        now_ns: Time of this evaluation.
    """
    # a little more than a period, so that the next pass has finished
    next_ns = now_ns + period_ns + min(period_ns // 10, 10_000_000)
    if condition.phase is Phase.PROBATION:
        end_ns = condition.run_start_ns + rule.probation_ns
        return end_ns if end_ns > now_ns else next_ns
    if condition.phase is Phase.PENDING:
        return max(next_ns, condition.run_start_ns + rule.raise_ns)
    if condition.phase is Phase.CLEARING:
        left = rule.clear_after - (condition.last_pass - condition.run_start_pass + 1)
        counted_ns = next_ns + (left - 1) * period_ns if left > 0 else now_ns
        end_ns = min(
            max(counted_ns, condition.run_start_ns + CLEAN_MIN_NS),
            max(next_ns, condition.run_start_ns + rule.clear_ns),
        )
        return end_ns if end_ns > now_ns else next_ns
    return None


def worst_first(conditions: Iterable[tuple[str, Condition]]) -> list[tuple[str, Condition]]:
    """Return the codes and conditions that are causes, by severity, then age, then code."""
    held = [(code, condition) for code, condition in conditions if condition.held]
    return sorted(held, key=lambda item: (-item[1].finding.severity, item[1].since.mono_ns, item[0]))
