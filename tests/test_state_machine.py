"""State machine: how a finding becomes a cause and how the cause clears, with counts, dwell times and
probation.
"""

from dataclasses import replace
from itertools import product
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.host.cpu.rules import CPU_RULES
from agent.health.rules import CLEAN_MIN_NS, CLEAN_NS, CLEAN_PASSES
from agent.health.state_machine import (
    CAUSE_PHASES,
    HEALTH_OF_SEVERITY,
    TRANSITIONS,
    Condition,
    ConditionPhase,
    PassObservation,
    causes_worst_first,
    next_change_ns,
    next_condition,
)
from agent.model.health import Finding, Health, Severity
from agent.model.time import NS, Instant

RULE: Final = replace(CPU_RULES[0], raise_after=1, clear_after=3, probation_ns=0)
SLOW: Final = replace(RULE, raise_after=3)
WATCHED: Final = replace(RULE, probation_ns=60 * NS)
BAD: Final = Finding("cpu.offline", Severity.UNHEALTHY, "CPU 1 offline")


def at(second: float) -> Instant:
    return Instant(int(second * NS), 1_700_000_000.0 + second)


def play(
    observations: str, rule: object = RULE, period_s: float = 1.0, first_pass: int = 1
) -> Condition | None:
    """Apply ``b`` for a bad pass, ``g`` a good one, ``?`` one without readings, ``-`` a pass without
    evaluation.
    """
    condition: Condition | None = None
    for number, observation in enumerate(observations, first_pass):
        if observation != "-":
            finding = BAD if observation == "b" else None
            now = at(number * period_s)
            condition = next_condition(condition, finding, rule, number, now, seen=observation != "?")  # type: ignore[arg-type]
    return condition


def phase(observations: str, rule: object = RULE, period_s: float = 1.0) -> ConditionPhase | None:
    condition = play(observations, rule, period_s)
    return condition.phase if condition else None


def test_transition_table_is_total() -> None:
    assert set(TRANSITIONS) == set(product(ConditionPhase, PassObservation))


def test_every_severity_maps_to_a_health() -> None:
    assert set(HEALTH_OF_SEVERITY) == set(Severity)
    assert [s for s in Severity if HEALTH_OF_SEVERITY[s] is Health.UNHEALTHY] == [Severity.UNHEALTHY]
    assert [s for s in Severity if HEALTH_OF_SEVERITY[s] is Health.UNKNOWN] == [Severity.UNKNOWN]


def test_cause_is_held_from_raised_to_the_end_of_probation() -> None:
    assert (
        frozenset({ConditionPhase.RAISED, ConditionPhase.CLEARING, ConditionPhase.PROBATION}) == CAUSE_PHASES
    )


@pytest.mark.parametrize(
    ("observations", "rule", "expected"),
    [
        ("g", RULE, None),
        ("?", RULE, None),
        ("b", RULE, ConditionPhase.RAISED),
        ("bb", RULE, ConditionPhase.RAISED),
        ("b?", RULE, ConditionPhase.RAISED),
        ("b????????????", RULE, ConditionPhase.RAISED),
        ("bg", RULE, ConditionPhase.CLEARING),
        ("bgg", RULE, ConditionPhase.CLEARING),
        ("bg?", RULE, ConditionPhase.RAISED),
        ("bggb", RULE, ConditionPhase.RAISED),
        ("bggbgg", RULE, ConditionPhase.CLEARING),
        ("bggg", RULE, None),
        ("bg-g", RULE, None),
        ("bg--------g", RULE, None),
        ("b", SLOW, ConditionPhase.PENDING),
        ("bb", SLOW, ConditionPhase.PENDING),
        ("b?", SLOW, ConditionPhase.PENDING),
        ("bbg", SLOW, None),
        ("bbgb", SLOW, ConditionPhase.PENDING),
        ("bbb", SLOW, ConditionPhase.RAISED),
        ("b-b", SLOW, ConditionPhase.RAISED),
        ("bggg", WATCHED, ConditionPhase.PROBATION),
        ("bggg?", WATCHED, ConditionPhase.PROBATION),
        ("bggggggg", WATCHED, ConditionPhase.PROBATION),
        ("bgggb", WATCHED, ConditionPhase.RAISED),
        ("bggg" + "-" * 59 + "g", WATCHED, None),
        ("bggg" + "-" * 58 + "g", WATCHED, ConditionPhase.PROBATION),
        ("bg", replace(RULE, clear_after=1), ConditionPhase.CLEARING),
        ("bgg", replace(RULE, clear_after=1), None),
        ("bgg", replace(WATCHED, clear_after=1), ConditionPhase.PROBATION),
    ],
)  # fmt: skip
def test_sequence_of_observations_ends_in_phase(
    observations: str, rule: object, expected: ConditionPhase | None
) -> None:
    assert phase(observations, rule) is expected


@pytest.mark.parametrize(("before", "observation"), TRANSITIONS)
def test_every_transition_occurs_as_in_the_table(
    before: ConditionPhase, observation: PassObservation
) -> None:
    enough = observation in {PassObservation.BAD_DEBOUNCED, PassObservation.GOOD_ENOUGH}
    rule = replace(RULE, raise_after=1 if enough else 9, clear_after=1 if enough else 9, probation_ns=50 * NS)
    marked = at(0 if enough else 100)
    condition = Condition(before, BAD, at(0), 5, marked.mono_ns, 5)
    finding = BAD if observation in {PassObservation.BAD, PassObservation.BAD_DEBOUNCED} else None
    after = next_condition(
        condition, finding, rule, 5, at(100), seen=observation is not PassObservation.UNSEEN
    )
    assert (after.phase if after else ConditionPhase.CLEAR) is TRANSITIONS[before, observation]


def test_pass_evaluated_twice_counts_once() -> None:
    condition = next_condition(None, BAD, SLOW, 1, at(1))
    for _ in range(5):
        condition = next_condition(condition, BAD, SLOW, 1, at(1))
    assert condition is not None
    assert condition.phase is ConditionPhase.PENDING
    condition = play("b")
    for _ in range(5):
        condition = next_condition(condition, None, RULE, 2, at(2))
    assert condition is not None
    assert condition.phase is ConditionPhase.CLEARING


def test_rare_passes_clear_after_ten_seconds_and_two_passes() -> None:
    assert phase("bg", period_s=3600) is ConditionPhase.CLEARING
    assert phase("bgg", period_s=3600) is None
    assert phase("bgg", period_s=9.9) is ConditionPhase.CLEARING
    assert phase("bgg", period_s=10) is None
    one_clean = next_condition(play("b"), None, RULE, 2, at(2))
    assert next_condition(one_clean, None, RULE, 2, at(2 + 3600)) is not None


def test_fast_passes_clear_after_a_second() -> None:
    assert phase("b" + "g" * 100, period_s=0.01) is ConditionPhase.CLEARING
    assert phase("b" + "g" * 101, period_s=0.01) is None
    assert phase("b" + "g" * 99 + "bg", period_s=0.01) is ConditionPhase.CLEARING


def test_since_is_the_first_bad_pass_not_the_raise() -> None:
    condition = play("gbbb", SLOW)
    assert condition is not None
    assert condition.since == at(2)


def test_relapse_keeps_since() -> None:
    for observations in ("bggb", "bgggb"):
        condition = play(observations, WATCHED)
        assert condition is not None
        assert (condition.phase, condition.since) == (ConditionPhase.RAISED, at(1))


def test_unhealthy_cause_in_probation_states_its_end_and_the_report_end() -> None:
    for observations in ("bggg", "bgggggg", "bggg?g"):
        condition = play(observations, WATCHED)
        assert condition is not None
        assert condition.finding.evidence == "CPU 1 offline (over; reported until 2023-11-14T22:14:24Z)"
    for observations in ("bgg", "bgggb", "bgggbgg"):
        condition = play(observations, WATCHED)
        assert condition is not None
        assert condition.finding == BAD


def test_held_cause_that_is_not_unhealthy_keeps_its_text() -> None:
    slow = BAD._replace(severity=Severity.DEGRADED)
    condition = next_condition(None, slow, WATCHED, 1, at(1))
    for second in (2, 3, 4):
        condition = next_condition(condition, None, WATCHED, second, at(second))
    assert condition is not None
    assert (condition.phase, condition.finding) == (ConditionPhase.PROBATION, slow)


def test_fault_during_probation_raises_at_once_and_restarts_clearing() -> None:
    rule = replace(WATCHED, raise_after=3)
    assert phase("bbbgggb", rule) is ConditionPhase.RAISED
    assert phase("bbbgggbggg", rule) is ConditionPhase.PROBATION
    condition = play("bbbgggbggg", rule)
    assert condition is not None
    assert condition.run_start_ns == at(10).mono_ns, "the probation restarts"


def test_condition_keeps_the_newest_bad_finding() -> None:
    worse = BAD._replace(evidence="CPUs 1-3 offline")
    condition = next_condition(play("b"), worse, RULE, 2, at(2))
    assert condition is not None
    assert next_condition(condition, None, RULE, 3, at(3)).finding == worse  # type: ignore[union-attr]


def test_no_due_time_while_no_dwell_time_runs() -> None:
    condition = play("b")
    assert condition is not None
    assert next_change_ns(condition, RULE, NS, at(1).mono_ns) is None


def test_due_time_is_when_the_pass_count_may_be_full() -> None:
    rising, clearing, nearly = play("b", SLOW), play("bg"), play("bgg")
    assert rising is not None
    assert clearing is not None
    due = next_change_ns(rising, SLOW, NS, at(1).mono_ns)
    assert due is not None
    assert at(2).mono_ns < due < at(2.1).mono_ns
    due = next_change_ns(clearing, RULE, NS, at(2).mono_ns)
    assert due is not None
    assert at(4).mono_ns < due < at(4.1).mono_ns
    assert nearly is not None
    due = next_change_ns(nearly, RULE, NS, at(3).mono_ns)
    assert due is not None
    assert at(4).mono_ns < due < at(4.1).mono_ns


def test_due_time_is_a_tenth_of_a_period_after_the_pass() -> None:
    condition = play("b", SLOW, period_s=0.01)
    assert condition is not None
    assert next_change_ns(condition, SLOW, NS // 100, at(0.01).mono_ns) == at(0.021).mono_ns


def test_due_time_after_enough_clean_passes_is_one_second() -> None:
    condition = play("bggg", period_s=0.01)
    assert condition is not None
    assert next_change_ns(condition, RULE, NS // 100, at(0.04).mono_ns) == at(0.02).mono_ns + CLEAN_MIN_NS


def test_due_time_in_probation_is_its_end() -> None:
    condition = play("bggg", WATCHED)
    assert condition is not None
    assert next_change_ns(condition, WATCHED, NS, at(4).mono_ns) == at(64).mono_ns
    late = next_change_ns(condition, WATCHED, NS, at(64).mono_ns)
    assert late is not None
    assert at(65).mono_ns < late < at(65.1).mono_ns, "without readings a late evaluation suffices"


def test_due_time_with_rare_passes_is_ten_seconds_or_a_pass() -> None:
    condition = play("bg", period_s=8)
    assert condition is not None
    due = next_change_ns(condition, RULE, 8 * NS, at(16).mono_ns)
    assert due is not None
    assert due <= at(16).mono_ns + CLEAN_NS


observations = st.text("bg?-", min_size=1, max_size=60)
some_rule = st.builds(
    lambda raise_after, clear_after, probation: replace(
        RULE, raise_after=raise_after, clear_after=clear_after, probation_ns=probation * NS
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 5),
)


@given(observations, some_rule)
def test_unseen_pass_neither_raises_nor_clears(text: str, rule: object) -> None:
    condition = play(text, rule)
    later = next_condition(condition, None, rule, len(text) + 1, at(10**6), seen=False)  # type: ignore[arg-type]
    assert (later and later.is_cause, later and later.finding) == (
        condition and condition.is_cause,
        condition and condition.finding,
    )
    assert next_condition(None, BAD, rule, 1, at(1), seen=False) is None  # type: ignore[arg-type]


@given(observations, some_rule)
def test_due_time_is_later_than_now(text: str, rule: object) -> None:
    condition = play(text, rule)
    now = at(len(text) + 1000).mono_ns
    if condition is not None:
        due = next_change_ns(condition, rule, NS, now)  # type: ignore[arg-type]
        assert due is None or due > now


@given(observations)
def test_held_cause_clears_only_after_three_clean_passes(text: str) -> None:
    condition: Condition | None = None
    clean: list[int] = []
    for number, observation in enumerate(text, 1):
        if observation == "-":
            continue
        before = condition
        finding = BAD if observation == "b" else None
        condition = next_condition(condition, finding, RULE, number, at(number), seen=observation != "?")
        clean = [] if observation == "b" else [*clean, number] if observation == "g" else clean
        if before is not None and before.is_cause and condition is None:
            assert clean[-1] - clean[0] + 1 >= CLEAN_PASSES
        if observation == "b":
            assert condition is not None
            assert condition.is_cause


def test_worst_first_sorts_by_severity_age_and_code() -> None:
    def condition(
        severity: Severity, second: int, phase: ConditionPhase = ConditionPhase.RAISED
    ) -> Condition:
        return Condition(phase, Finding("", severity), at(second), 1, 0, 1)

    tracks = [
        ("d", condition(Severity.DEGRADED, 1)),
        ("c", condition(Severity.UNHEALTHY, 9)),
        ("b", condition(Severity.UNHEALTHY, 9)),
        ("a", condition(Severity.UNHEALTHY, 3, ConditionPhase.PENDING)),
        ("e", condition(Severity.UNKNOWN, 2)),
        ("f", condition(Severity.UNHEALTHY, 5, ConditionPhase.PROBATION)),
    ]
    assert [code for code, _ in causes_worst_first(tracks)] == ["f", "b", "c", "e", "d"]


def test_unseen_passes_do_not_count() -> None:
    rule = replace(RULE, raise_after=3)
    assert phase("b????b", rule) is ConditionPhase.PENDING
    assert phase("b????bb", rule) is ConditionPhase.RAISED
    assert phase("bg????g") is ConditionPhase.CLEARING
    assert phase("bg????gg") is ConditionPhase.CLEARING
    assert phase("bg????ggg") is None


def test_cause_with_raise_ns_is_raised_after_that_time() -> None:
    lasting = replace(RULE, raise_ns=3 * NS)
    assert phase("bbb", lasting) is ConditionPhase.PENDING
    assert phase("bbbb", lasting) is ConditionPhase.RAISED
    assert phase("bbgb", lasting) is ConditionPhase.PENDING  # the run restarts
    rising = play("b", lasting)
    assert rising is not None
    assert next_change_ns(rising, lasting, NS, at(1).mono_ns) == at(4).mono_ns


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        ("b??????????b", ConditionPhase.PENDING),
        ("b-----?", ConditionPhase.PENDING),
        ("b??????????bbb", ConditionPhase.RAISED),
        ("bb?-----?--b", ConditionPhase.PENDING),  # 2 s before the first pass without a reading
        ("bb?-----?--bb", ConditionPhase.RAISED),
        ("b?b?b", ConditionPhase.PENDING),
        ("b?b?b?b", ConditionPhase.RAISED),
        ("b--?b", ConditionPhase.RAISED),  # passes that change nothing cause no evaluation
    ],
)
def test_time_without_readings_does_not_raise_a_fault(observations: str, expected: ConditionPhase) -> None:
    assert phase(observations, replace(RULE, raise_ns=3 * NS)) is expected


def test_unknown_cause_has_no_probation() -> None:
    unknown = BAD._replace(severity=Severity.UNKNOWN)
    condition = next_condition(None, unknown, WATCHED, 1, at(1))
    for number in range(2, 6):
        condition = next_condition(condition, None, WATCHED, number, at(number))
    assert condition is None
    assert phase("bgggg", WATCHED) is ConditionPhase.PROBATION
