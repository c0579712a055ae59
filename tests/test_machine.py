"""How a finding becomes a cause and how a cause goes away: counts, dwell times, probation, silence."""

from dataclasses import replace
from itertools import product
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.catalog import CLEAN_MIN_NS, CLEAN_NS, CLEAN_PASSES
from agent.health.host.cpu.rules import CPU_RULES
from agent.health.state_machine import (
    HEALTH,
    HELD,
    TRANSITIONS,
    Condition,
    Observation,
    Phase,
    advance,
    due_ns,
    worst_first,
)
from agent.model.health import Finding, Health, Severity
from agent.model.time import NS, Instant

RULE: Final = replace(CPU_RULES[0], raise_after=1, clear_after=3, probation_ns=0)
SLOW: Final = replace(RULE, raise_after=3)
WATCHED: Final = replace(RULE, probation_ns=60 * NS)
BAD: Final = Finding("cpu.offline", Severity.UNHEALTHY, "CPU 1 offline")


def at(second: float) -> Instant:
    return Instant(int(second * NS), 1_700_000_000.0 + second)


def play(looks: str, rule: object = RULE, period_s: float = 1.0, first_pass: int = 1) -> Condition | None:
    """``b`` is a bad look, ``g`` a good one, ``?`` one that could not look, ``-`` a pass without a look."""
    track: Condition | None = None
    for number, look in enumerate(looks, first_pass):
        if look != "-":
            finding = BAD if look == "b" else None
            now = at(number * period_s)
            track = advance(track, finding, rule, number, now, seen=look != "?")  # type: ignore[arg-type]
    return track


def phase(looks: str, rule: object = RULE, period_s: float = 1.0) -> Phase | None:
    track = play(looks, rule, period_s)
    return track.phase if track else None


def test_the_table_is_total() -> None:
    assert set(TRANSITIONS) == set(product(Phase, Observation))


def test_every_severity_has_a_health_and_only_a_proven_fault_is_unhealthy() -> None:
    assert set(HEALTH) == set(Severity)
    assert [s for s in Severity if HEALTH[s] is Health.UNHEALTHY] == [Severity.UNHEALTHY]
    assert [s for s in Severity if HEALTH[s] is Health.UNKNOWN] == [Severity.UNKNOWN]


def test_a_cause_counts_from_when_it_is_raised_until_its_probation_has_ended() -> None:
    assert frozenset({Phase.RAISED, Phase.CLEARING, Phase.PROBATION}) == HELD


@pytest.mark.parametrize(
    ("looks", "rule", "expected"),
    [
        ("g", RULE, None),
        ("?", RULE, None),
        ("b", RULE, Phase.RAISED),
        ("bb", RULE, Phase.RAISED),
        ("b?", RULE, Phase.RAISED),
        ("b????????????", RULE, Phase.RAISED),
        ("bg", RULE, Phase.CLEARING),
        ("bgg", RULE, Phase.CLEARING),
        ("bg?", RULE, Phase.RAISED),
        ("bggb", RULE, Phase.RAISED),
        ("bggbgg", RULE, Phase.CLEARING),
        ("bggg", RULE, None),
        ("bg-g", RULE, None),
        ("bg--------g", RULE, None),
        ("b", SLOW, Phase.PENDING),
        ("bb", SLOW, Phase.PENDING),
        ("b?", SLOW, Phase.PENDING),
        ("bbg", SLOW, None),
        ("bbgb", SLOW, Phase.PENDING),
        ("bbb", SLOW, Phase.RAISED),
        ("b-b", SLOW, Phase.RAISED),
        ("bggg", WATCHED, Phase.PROBATION),
        ("bggg?", WATCHED, Phase.PROBATION),
        ("bggggggg", WATCHED, Phase.PROBATION),
        ("bgggb", WATCHED, Phase.RAISED),
        ("bggg" + "-" * 59 + "g", WATCHED, None),
        ("bggg" + "-" * 58 + "g", WATCHED, Phase.PROBATION),
        ("bg", replace(RULE, clear_after=1), Phase.CLEARING),
        ("bgg", replace(RULE, clear_after=1), None),
        ("bgg", replace(WATCHED, clear_after=1), Phase.PROBATION),
    ],
)  # fmt: skip
def test_after_these_looks_it_stands_there(looks: str, rule: object, expected: Phase | None) -> None:
    assert phase(looks, rule) is expected


@pytest.mark.parametrize(("before", "sight"), TRANSITIONS)
def test_every_row_of_the_table_is_what_happens(before: Phase, sight: Observation) -> None:
    enough = sight in {Observation.BAD_DEBOUNCED, Observation.GOOD_ENOUGH}
    rule = replace(RULE, raise_after=1 if enough else 9, clear_after=1 if enough else 9, probation_ns=50 * NS)
    marked = at(0 if enough else 100)
    track = Condition(before, BAD, at(0), 5, marked.mono_ns, 5)
    finding = BAD if sight in {Observation.BAD, Observation.BAD_DEBOUNCED} else None
    after = advance(track, finding, rule, 5, at(100), seen=sight is not Observation.UNSEEN)
    assert (after.phase if after else Phase.CLEAR) is TRANSITIONS[before, sight]


def test_the_same_pass_seen_twice_counts_once() -> None:
    track = advance(None, BAD, SLOW, 1, at(1))
    for _ in range(5):
        track = advance(track, BAD, SLOW, 1, at(1))
    assert track is not None
    assert track.phase is Phase.PENDING
    track = play("b")
    for _ in range(5):
        track = advance(track, None, RULE, 2, at(2))
    assert track is not None
    assert track.phase is Phase.CLEARING


def test_with_rare_passes_ten_seconds_without_a_bad_one_are_enough_but_one_clean_pass_is_not() -> None:
    assert phase("bg", period_s=3600) is Phase.CLEARING
    assert phase("bgg", period_s=3600) is None
    assert phase("bgg", period_s=9.9) is Phase.CLEARING
    assert phase("bgg", period_s=10) is None
    one_clean = advance(play("b"), None, RULE, 2, at(2))
    assert advance(one_clean, None, RULE, 2, at(2 + 3600)) is not None


def test_with_fast_passes_three_clean_ones_are_not_enough_but_a_second_of_them_is() -> None:
    assert phase("b" + "g" * 100, period_s=0.01) is Phase.CLEARING
    assert phase("b" + "g" * 101, period_s=0.01) is None
    assert phase("b" + "g" * 99 + "bg", period_s=0.01) is Phase.CLEARING


def test_it_began_when_it_was_first_seen_even_if_it_was_raised_later() -> None:
    track = play("gbbb", SLOW)
    assert track is not None
    assert track.since == at(2)


def test_a_relapse_continues_the_spell() -> None:
    for looks in ("bggb", "bgggb"):
        track = play(looks, WATCHED)
        assert track is not None
        assert (track.phase, track.since) == (Phase.RAISED, at(1))


def test_a_fault_during_probation_is_raised_at_once_and_clears_from_the_beginning() -> None:
    rule = replace(WATCHED, raise_after=3)
    assert phase("bbbgggb", rule) is Phase.RAISED
    assert phase("bbbgggbggg", rule) is Phase.PROBATION
    track = play("bbbgggbggg", rule)
    assert track is not None
    assert track.mark_ns == at(10).mono_ns, "the probation begins anew"


def test_what_is_said_is_the_newest_bad_finding() -> None:
    worse = BAD._replace(evidence="CPUs 1-3 offline")
    track = advance(play("b"), worse, RULE, 2, at(2))
    assert track is not None
    assert advance(track, None, RULE, 3, at(3)).finding == worse  # type: ignore[union-attr]


def test_nothing_is_due_while_nothing_can_end() -> None:
    track = play("b")
    assert track is not None
    assert due_ns(track, RULE, NS, at(1).mono_ns) is None


def test_a_count_is_looked_at_again_when_it_may_be_full() -> None:
    rising, clearing, nearly = play("b", SLOW), play("bg"), play("bgg")
    assert rising is not None
    assert clearing is not None
    due = due_ns(rising, SLOW, NS, at(1).mono_ns)
    assert due is not None
    assert at(2).mono_ns < due < at(2.1).mono_ns
    due = due_ns(clearing, RULE, NS, at(2).mono_ns)
    assert due is not None
    assert at(4).mono_ns < due < at(4.1).mono_ns
    assert nearly is not None
    due = due_ns(nearly, RULE, NS, at(3).mono_ns)
    assert due is not None
    assert at(4).mono_ns < due < at(4.1).mono_ns


def test_a_fast_source_is_looked_at_again_a_tenth_of_its_period_after_the_pass() -> None:
    track = play("b", SLOW, period_s=0.01)
    assert track is not None
    assert due_ns(track, SLOW, NS // 100, at(0.01).mono_ns) == at(0.021).mono_ns


def test_whoever_is_clean_by_count_is_looked_at_when_the_second_is_over() -> None:
    track = play("bggg", period_s=0.01)
    assert track is not None
    assert due_ns(track, RULE, NS // 100, at(0.04).mono_ns) == at(0.02).mono_ns + CLEAN_MIN_NS


def test_a_probation_is_looked_at_when_it_ends() -> None:
    track = play("bggg", WATCHED)
    assert track is not None
    assert due_ns(track, WATCHED, NS, at(4).mono_ns) == at(64).mono_ns
    late = due_ns(track, WATCHED, NS, at(64).mono_ns)
    assert late is not None
    assert at(65).mono_ns < late < at(65.1).mono_ns, "nobody could look, and there is no hurry"


def test_with_rare_passes_the_next_look_is_not_later_than_ten_seconds_or_a_pass() -> None:
    track = play("bg", period_s=8)
    assert track is not None
    due = due_ns(track, RULE, 8 * NS, at(16).mono_ns)
    assert due is not None
    assert due <= at(16).mono_ns + CLEAN_NS


looks = st.text("bg?-", min_size=1, max_size=60)
some_rule = st.builds(
    lambda raise_after, clear_after, probation: replace(
        RULE, raise_after=raise_after, clear_after=clear_after, probation_ns=probation * NS
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 5),
)


@given(looks, some_rule)
def test_silence_neither_raises_nor_clears(text: str, rule: object) -> None:
    track = play(text, rule)
    later = advance(track, None, rule, len(text) + 1, at(10**6), seen=False)  # type: ignore[arg-type]
    assert (later and later.held, later and later.finding) == (track and track.held, track and track.finding)
    assert advance(None, BAD, rule, 1, at(1), seen=False) is None  # type: ignore[arg-type]


@given(looks, some_rule)
def test_whoever_is_to_look_again_is_told_a_time_that_is_still_to_come(text: str, rule: object) -> None:
    track = play(text, rule)
    now = at(len(text) + 1000).mono_ns
    if track is not None:
        due = due_ns(track, rule, NS, now)  # type: ignore[arg-type]
        assert due is None or due > now


@given(looks)
def test_a_held_cause_goes_only_after_three_clean_passes(text: str) -> None:
    track: Condition | None = None
    clean: list[int] = []
    for number, look in enumerate(text, 1):
        if look == "-":
            continue
        before = track
        finding = BAD if look == "b" else None
        track = advance(track, finding, RULE, number, at(number), seen=look != "?")
        clean = [] if look == "b" else [*clean, number] if look == "g" else clean
        if before is not None and before.held and track is None:
            assert clean[-1] - clean[0] + 1 >= CLEAN_PASSES
        if look == "b":
            assert track is not None
            assert track.held


def test_the_worst_comes_first_then_the_oldest_then_by_name() -> None:
    def track(severity: Severity, second: int, phase: Phase = Phase.RAISED) -> Condition:
        return Condition(phase, Finding("", severity), at(second), 1, 0, 1)

    tracks = [
        ("d", track(Severity.DEGRADED, 1)),
        ("c", track(Severity.UNHEALTHY, 9)),
        ("b", track(Severity.UNHEALTHY, 9)),
        ("a", track(Severity.UNHEALTHY, 3, Phase.PENDING)),
        ("e", track(Severity.UNKNOWN, 2)),
        ("f", track(Severity.UNHEALTHY, 5, Phase.PROBATION)),
    ]
    assert [code for code, _ in worst_first(tracks)] == ["f", "b", "c", "e", "d"]


def test_passes_that_nobody_saw_do_not_count() -> None:
    rule = replace(RULE, raise_after=3)
    assert phase("b????b", rule) is Phase.PENDING
    assert phase("b????bb", rule) is Phase.RAISED
    assert phase("bg????g") is Phase.CLEARING
    assert phase("bg????gg") is Phase.CLEARING
    assert phase("bg????ggg") is None


def test_a_cause_that_must_last_is_raised_when_it_has_lasted() -> None:
    lasting = replace(RULE, raise_ns=3 * NS)
    assert phase("bbb", lasting) is Phase.PENDING
    assert phase("bbbb", lasting) is Phase.RAISED
    assert phase("bbgb", lasting) is Phase.PENDING  # it begins anew
    rising = play("b", lasting)
    assert rising is not None
    assert due_ns(rising, lasting, NS, at(1).mono_ns) == at(4).mono_ns


def test_what_nobody_knew_of_has_no_probation_when_it_is_known() -> None:
    unknown = BAD._replace(severity=Severity.UNKNOWN)
    track = advance(None, unknown, WATCHED, 1, at(1))
    for number in range(2, 6):
        track = advance(track, None, WATCHED, number, at(number))
    assert track is None
    assert phase("bgggg", WATCHED) is Phase.PROBATION
