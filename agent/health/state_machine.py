"""State machine of a condition: a fault of one device that a rule has found.

A condition is pending until the rule has found the fault often enough. Then the condition is raised, and the
fault is a cause in the device's verdict until it is cleared. A catalog row sets after how many passes of the
source (readings), and after how much time, a fault is raised and cleared. Passes are counted instead of
evaluations, because most passes without a change do not wake the evaluation engine.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from agent.health.rules import CLEAN_MIN_NS, CatalogRow
from agent.model.health import Finding, Health, Severity
from agent.model.time import NS, Instant, instant_at_mono, rfc3339


class ConditionPhase(StrEnum):
    """Phase of a condition (a fault of one finding code) between its first finding and its end."""

    CLEAR = "clear"
    """No fault."""
    PENDING = "rising"
    """The fault is found, but not yet for enough passes or long enough; no cause yet."""
    RAISED = "raised"
    """The fault is found and is a cause."""
    CLEARING = "clearing"
    """The fault is no longer found, but not yet for enough passes or long enough; still a cause."""
    PROBATION = "probation"
    """The fault has ended, but stays a cause for the probation time of its catalog row."""


class PassObservation(StrEnum):
    """Observation of a fault in the newest pass (reading) of a source; an input of the transition table."""

    BAD = "bad"
    """The fault is found, but not yet in enough consecutive passes or long enough to raise it."""
    BAD_DEBOUNCED = "bad-enough"
    """The fault is found in as many consecutive passes, and for as long, as the catalog row requires."""
    GOOD = "good"
    """The fault is not found, but not yet in enough consecutive passes or long enough to clear it."""
    GOOD_ENOUGH = "good-enough"
    """The fault is not found for as many passes, and for as long, as the catalog row requires."""
    UNSEEN = "unseen"
    """The rule could not be evaluated: the pass neither raises nor clears the fault."""


TRANSITIONS: Final[dict[tuple[ConditionPhase, PassObservation], ConditionPhase]] = {
    (ConditionPhase.CLEAR, PassObservation.BAD): ConditionPhase.PENDING,
    (ConditionPhase.CLEAR, PassObservation.BAD_DEBOUNCED): ConditionPhase.RAISED,
    (ConditionPhase.CLEAR, PassObservation.GOOD): ConditionPhase.CLEAR,
    (ConditionPhase.CLEAR, PassObservation.GOOD_ENOUGH): ConditionPhase.CLEAR,
    (ConditionPhase.CLEAR, PassObservation.UNSEEN): ConditionPhase.CLEAR,
    (ConditionPhase.PENDING, PassObservation.BAD): ConditionPhase.PENDING,
    (ConditionPhase.PENDING, PassObservation.BAD_DEBOUNCED): ConditionPhase.RAISED,
    (ConditionPhase.PENDING, PassObservation.GOOD): ConditionPhase.CLEAR,
    (ConditionPhase.PENDING, PassObservation.GOOD_ENOUGH): ConditionPhase.CLEAR,
    (ConditionPhase.PENDING, PassObservation.UNSEEN): ConditionPhase.PENDING,
    (ConditionPhase.RAISED, PassObservation.BAD): ConditionPhase.RAISED,
    (ConditionPhase.RAISED, PassObservation.BAD_DEBOUNCED): ConditionPhase.RAISED,
    (ConditionPhase.RAISED, PassObservation.GOOD): ConditionPhase.CLEARING,
    (
        ConditionPhase.RAISED,
        PassObservation.GOOD_ENOUGH,
    ): ConditionPhase.CLEARING,  # one clean pass never suffices
    (ConditionPhase.RAISED, PassObservation.UNSEEN): ConditionPhase.RAISED,
    (ConditionPhase.CLEARING, PassObservation.BAD): ConditionPhase.RAISED,
    (ConditionPhase.CLEARING, PassObservation.BAD_DEBOUNCED): ConditionPhase.RAISED,
    (ConditionPhase.CLEARING, PassObservation.GOOD): ConditionPhase.CLEARING,
    (
        ConditionPhase.CLEARING,
        PassObservation.GOOD_ENOUGH,
    ): ConditionPhase.PROBATION,  # of zero length by default
    (
        ConditionPhase.CLEARING,
        PassObservation.UNSEEN,
    ): ConditionPhase.RAISED,  # clean passes must be consecutive
    (ConditionPhase.PROBATION, PassObservation.BAD): ConditionPhase.RAISED,
    (ConditionPhase.PROBATION, PassObservation.BAD_DEBOUNCED): ConditionPhase.RAISED,
    (ConditionPhase.PROBATION, PassObservation.GOOD): ConditionPhase.PROBATION,
    (ConditionPhase.PROBATION, PassObservation.GOOD_ENOUGH): ConditionPhase.CLEAR,
    (ConditionPhase.PROBATION, PassObservation.UNSEEN): ConditionPhase.PROBATION,
}
"""Next phase of a condition, by its phase and the newest observation."""
CAUSE_PHASES: Final = frozenset({ConditionPhase.RAISED, ConditionPhase.CLEARING, ConditionPhase.PROBATION})
"""Phases in which a condition is a cause."""

HEALTH_OF_SEVERITY: Final[dict[Severity, Health]] = {
    Severity.OK: Health.HEALTHY,
    Severity.INFO: Health.HEALTHY,
    Severity.DEGRADED: Health.HEALTHY,
    Severity.UNKNOWN: Health.UNKNOWN,  # a device that is not evaluated is not healthy
    Severity.UNHEALTHY: Health.UNHEALTHY,
}
"""Health that the kubelet gets for a device, by the severity of the device's worst cause."""


class Condition(NamedTuple):
    """Raised or pending fault of one device, one cgroup or the machine, for one finding code. A pending fault
    was found, but not in enough readings yet."""

    phase: ConditionPhase
    finding: Finding
    """Newest finding of the rule; it is reported while the condition is a cause."""
    since: Instant
    """Time of the first finding since the condition was last clear."""
    run_start_pass: int
    """Pass number of the source at which the current run of passes with (or without) a finding began."""
    run_start_ns: int
    """CLOCK_MONOTONIC at which the run of ``run_start_pass``, or the probation, began [ns]."""
    last_pass: int
    """Pass number of the source at the last evaluation."""
    unseen_ns: int = 0
    """CLOCK_MONOTONIC of the last evaluation, if the fault is pending and the rule could not be evaluated
    then [ns]; else 0."""

    @property
    def is_cause(self) -> bool:
        """True if the fault is raised and counts in the verdict; False: it was not found often or long enough
        yet."""
        return self.phase in CAUSE_PHASES


def next_condition(
    condition: Condition | None,
    finding: Finding | None,
    row: CatalogRow,
    pass_number: int,
    now: Instant,
    *,
    seen: bool = True,
    equal_passes: int = 0,
    read_ns: int | None = None,
) -> Condition | None:
    """Return the condition (raised or pending fault) after one evaluation; None if there is no fault.

    Passes without an evaluation have the result of the evaluation before them, unless ``equal_passes`` shows
    that they had another one. The passes and the time from an evaluation in which the rule could not be
    evaluated to the next evaluation do not count for a pending fault. Those before them still count: readings
    that fail again and again delay a lasting fault, and do not keep it pending for ever.

    Args:
        condition: Condition before the evaluation; None if there was no fault.
        finding: Finding of this evaluation; None if no fault was found.
        row: Catalog row with the passes and times that raise and clear the cause.
        pass_number: Number of the source's pass (reading) that was evaluated. The same pass counts once.
        now: Time of this evaluation.
        seen: False if the rule could not be evaluated.
        equal_passes: Number of consecutive passes, up to this one, with this result; 0: not known.
        read_ns: Time up to which the source's passes confirm a finding [ns]; None: until now.
    """
    if condition is None:
        if finding is None or not seen:
            return None
        condition = Condition(ConditionPhase.CLEAR, finding, now, pass_number, now.mono_ns, pass_number)
    if pass_number < condition.last_pass:  # the source restarted its count: keep the run
        condition = condition._replace(
            run_start_pass=condition.run_start_pass - condition.last_pass, last_pass=0
        )
    if finding is not None and condition.is_cause and finding.severity < condition.finding.severity:
        # a less severe finding is good for the held one; its own condition begins when that has cleared
        clearing = next_condition(condition, None, row, pass_number, now, seen=seen)
        return clearing or next_condition(None, finding, row, pass_number, now, seen=seen)
    if condition.unseen_ns:
        condition = condition._replace(
            run_start_pass=condition.run_start_pass + pass_number - condition.last_pass,
            run_start_ns=condition.run_start_ns + now.mono_ns - condition.unseen_ns,
            unseen_ns=0,
        )
    if not seen:
        phase = TRANSITIONS[condition.phase, PassObservation.UNSEEN]
        unseen_ns = now.mono_ns if phase is ConditionPhase.PENDING else 0
        return condition._replace(phase=phase, last_pass=pass_number, unseen_ns=unseen_ns)
    bad = finding is not None
    was_bad = condition.phase in (ConditionPhase.CLEAR, ConditionPhase.PENDING, ConditionPhase.RAISED)
    if bad != was_bad:
        condition = condition._replace(run_start_pass=pass_number, run_start_ns=now.mono_ns)
    if equal_passes and condition.run_start_pass <= pass_number - equal_passes:
        condition = condition._replace(
            run_start_pass=pass_number - equal_passes + 1, run_start_ns=now.mono_ns
        )
    until_ns = now.mono_ns
    if bad and read_ns is not None:
        until_ns = max(condition.run_start_ns, min(until_ns, read_ns))
    observation = _observe(condition, bad, row, pass_number, until_ns)
    phase = TRANSITIONS[condition.phase, observation]
    if phase is ConditionPhase.PROBATION and condition.phase is not ConditionPhase.PROBATION:
        if not row.probation_ns or condition.finding.severity is Severity.UNKNOWN:
            return None  # an Unknown cause needs no probation once the readings are back
        held = _with_end_of_probation(condition.finding, row.probation_ns, now)
        condition = condition._replace(run_start_ns=now.mono_ns, finding=held)
    if phase is ConditionPhase.CLEAR:
        return None
    return condition._replace(phase=phase, finding=finding or condition.finding, last_pass=pass_number)


def with_probation_time(condition: Condition, probation_ns: int, now: Instant) -> Condition:
    """Return a condition whose fault has ended, with another probation time. The probation time is the time
    for which an ended fault is still reported. The text of the fault states when this time ends."""
    finding = condition.finding
    finding = finding._replace(evidence=finding.evidence.partition(_OVER)[0])
    ended = instant_at_mono(condition.run_start_ns, now)
    return condition._replace(finding=_with_end_of_probation(finding, probation_ns, ended))


_OVER: Final = " (over; reported until "


def _with_end_of_probation(finding: Finding, probation_ns: int, now: Instant) -> Finding:
    """Return the finding of a fault that ended at ``now``.

    An Unhealthy finding states until when it is reported. Findings of other severities come from readings
    that oscillate around a limit. A time in their text would change with each oscillation.
    """
    if finding.severity is not Severity.UNHEALTHY:
        return finding
    until = rfc3339(now.wall_s + probation_ns / NS)
    return finding._replace(evidence=f"{finding.evidence}{_OVER}{until})")


def _observe(
    condition: Condition, bad: bool, rule: CatalogRow, pass_number: int, now_ns: int
) -> PassObservation:
    passes = pass_number - condition.run_start_pass + 1
    run_ns = now_ns - condition.run_start_ns
    if bad:
        return (
            PassObservation.BAD_DEBOUNCED
            if passes >= rule.raise_after and run_ns >= rule.raise_ns
            else PassObservation.BAD
        )
    if condition.phase is ConditionPhase.PROBATION:
        is_over = run_ns >= rule.probation_ns and passes >= 1  # after a restart: read in this run
        return PassObservation.GOOD_ENOUGH if is_over else PassObservation.GOOD
    if (passes >= rule.clear_after and run_ns >= CLEAN_MIN_NS) or (passes > 1 and run_ns >= rule.clear_ns):
        return PassObservation.GOOD_ENOUGH
    return PassObservation.GOOD


def next_change_ns(condition: Condition, row: CatalogRow, period_ns: int, now_ns: int) -> int | None:
    """Return when a fault can be raised or cleared although no reading changes [ns]; None: never.

    The next evaluation is needed at this time.

    Args:
        condition: Return value of :func:`next_condition` for an evaluated pass.
        row: Catalog row of the condition.
        period_ns: Time between two passes (readings) of the source [ns].
        now_ns: Time of this evaluation [ns].
    """
    # a little more than a period, so that the next pass has finished
    next_ns = now_ns + period_ns + min(period_ns // 10, 10_000_000)
    if condition.phase is ConditionPhase.PROBATION:
        end_ns = condition.run_start_ns + row.probation_ns
        return end_ns if end_ns > now_ns else next_ns
    if condition.phase is ConditionPhase.PENDING:
        return max(next_ns, condition.run_start_ns + row.raise_ns)
    if condition.phase is ConditionPhase.CLEARING:
        left = row.clear_after - (condition.last_pass - condition.run_start_pass + 1)
        counted_ns = next_ns + (left - 1) * period_ns if left > 0 else now_ns
        end_ns = min(
            max(counted_ns, condition.run_start_ns + CLEAN_MIN_NS),
            max(next_ns, condition.run_start_ns + row.clear_ns),
        )
        return end_ns if end_ns > now_ns else next_ns
    return None


def causes_worst_first(conditions: Iterable[tuple[str, Condition]]) -> list[tuple[str, Condition]]:
    """Return the (code, condition) pairs whose fault is raised, ordered by severity, then oldest first."""
    held = [(code, condition) for code, condition in conditions if condition.is_cause]
    return sorted(held, key=lambda item: (-item[1].finding.severity, item[1].since.mono_ns, item[0]))
