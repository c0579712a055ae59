"""The history of a counter: what is kept, what begins anew, and what a growth is worth."""

from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.kernel_log.counts import times_told
from agent.health.kernel_log.values import LogCode, LogFact
from agent.health.rate_window import (
    STEPS,
    Point,
    RateWindow,
    appended,
    grown_since,
    growth,
    growth_of,
    is_flat,
)
from agent.health.rules import Growth
from agent.model.reading import Absence, Missing, Reading
from agent.model.time import NS, Instant

WINDOW_S: Final = 60
EIO: Final = Missing(Absence.UNREADABLE, 5)
ABSENT: Final = Missing(Absence.ABSENT)


def read(*readings: tuple[float, Reading]) -> RateWindow:
    history: RateWindow = ()
    for second, reading in readings:
        history = appended(history, reading, int(second * NS), WINDOW_S * NS)
    return history


def grew(*readings: tuple[float, Reading]) -> Growth:
    return growth(read(*readings), WINDOW_S)


def seconds(history: RateWindow) -> list[float]:
    return [point.t_ns / NS for point in history]


# --- what a growth counts -----------------------------------------------------------------------------------


def test_what_was_counted_before_the_first_reading_is_no_growth() -> None:
    assert grew((100, 5_000)) == Growth(0, 0.0)
    assert grew((100, 5_000), (110, 5_003)) == Growth(3, 10.0)


def test_nothing_has_been_watched_before_the_first_reading() -> None:
    assert growth((), WINDOW_S) == Growth(0, 0.0)
    assert grown_since((), 0) == 0


def test_a_growth_is_of_the_window_and_no_longer() -> None:
    assert grew((100, 0), (130, 4), (160, 4)) == Growth(4, 60.0)
    assert grew((100, 0), (130, 4), (160, 4), (161, 4)) == Growth(0, 60.0)


def test_what_came_over_the_windows_begin_may_be_older_and_is_not_counted() -> None:
    assert grew((100, 0), (140, 100), (190, 107)) == Growth(7, 60.0)
    assert grew((100, 0), (140, 100), (160, 107)) == Growth(107, 60.0), "its begin is in the window"


def test_a_slow_drip_never_adds_up() -> None:
    drip = read(*((second, second // 7) for second in range(1000)))
    assert growth(drip, WINDOW_S).events in (60 // 7, 60 // 7 - 1)


def test_a_step_between_rare_readings_is_counted_until_it_leaves_the_window() -> None:
    """The second point is near the first, and yet it is all that says that the step came after it."""
    burst = ((0, 0), (1, 0), (2, 1), (40, 100))
    assert grew(*burst, (61, 100)) == Growth(99, 60.0)
    assert grew(*burst, (63, 100)) == Growth(0, 60.0)


def test_a_missing_counter_has_grown_by_nothing_that_anybody_knows() -> None:
    history = read((100, 5), (130, 9))
    assert growth_of(EIO, history, WINDOW_S) == Growth(EIO, 0.0)
    assert growth_of(9, history, WINDOW_S) == Growth(4, 30.0)


def test_a_window_may_end_after_the_newest_point() -> None:
    history = read((100, 0), (130, 4))
    assert grown_since(history, 100 * NS) == 4
    assert grown_since(history, 101 * NS) == 0
    assert grown_since(history, 131 * NS) == 0


# --- what begins anew ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [0, 3, 99])
def test_a_counter_that_fell_was_reset_and_has_not_grown(reset: int) -> None:
    assert grew((100, 0), (110, 100), (120, reset)) == Growth(0, 0.0)
    assert grew((100, 0), (110, 100), (120, reset), (130, reset + 2)) == Growth(2, 10.0)


@pytest.mark.parametrize("missing", [EIO, ABSENT])
def test_a_gap_is_not_bridged(missing: Missing) -> None:
    assert grew((100, 5), (110, missing), (120, 500)) == Growth(0, 0.0)


def test_a_counter_that_nobody_read_for_longer_than_the_window_begins_anew() -> None:
    assert grew((100, 5), (160, 500)) == Growth(495, 60.0)
    assert grew((100, 5), (161, 500)) == Growth(0, 0.0), "nobody knows when that was"


def test_one_that_did_not_move_is_read_only_when_it_moves() -> None:
    """Of a counter that stood still for long, what it counts now is new."""
    history = read((100, 0), (101, 10))
    for since_s, now_s in ((165, 166), (1000, 1001)):
        still = is_flat(history, since_s * NS, WINDOW_S * NS)
        moved = appended(still, 60, now_s * NS, WINDOW_S * NS)
        assert grown_since(moved, (now_s - WINDOW_S) * NS) == 50
    assert is_flat((), 100 * NS, WINDOW_S * NS) == ()


# --- lines of the kernel log --------------------------------------------------------------------------------


def fact(times: int, first_s: float) -> LogFact:
    first = Instant(int(first_s * NS), 0.0)
    return LogFact(LogCode.EDAC_CORRECTED, "mc0", times, first, first, "a line")


def told(*looks: tuple[float, int], first_s: float) -> RateWindow:
    history: RateWindow = ()
    for second, times in looks:
        history = times_told(history, fact(times, first_s), int(second * NS), WINDOW_S * NS)
    return history


def test_lines_of_before_the_first_look_count_while_the_first_of_them_is_in_the_window() -> None:
    history = told((100, 24), first_s=80)
    assert grown_since(history, 80 * NS - 1) == 24
    assert grown_since(history, 80 * NS) == 0


def test_a_single_line_counts_at_once() -> None:
    assert grown_since(told((100, 1), first_s=100), 40 * NS) == 1


def test_old_lines_whose_times_nobody_knows_do_not_count_but_new_ones_do() -> None:
    assert grown_since(told((100, 5_000), first_s=10), 40 * NS) == 0
    assert grown_since(told((100, 5_000), (110, 5_024), first_s=10), 50 * NS) == 24


def test_a_fact_that_was_dropped_and_told_anew_counts_from_its_first_line() -> None:
    before = told((100, 5_000), first_s=10)
    assert grown_since(times_told(before, fact(20, 105), 110 * NS, WINDOW_S * NS), 50 * NS) == 20


# --- what is kept -------------------------------------------------------------------------------------------


def test_the_same_reading_given_twice_is_one_point() -> None:
    once = read((100, 5))
    assert read((100, 5), (100, 5)) == once == (Point(100 * NS, 5),)


def test_readings_that_come_seldom_are_all_kept() -> None:
    every = [(10 * n, n) for n in range(6)]
    assert seconds(read(*every)) == [0, 10, 20, 30, 40, 50]


def test_readings_that_come_often_are_thinned_to_a_twelfth_of_the_window() -> None:
    assert seconds(read(*((n, n) for n in range(13)))) == [0, 5, 10, 12]


def test_a_counter_that_does_not_move_needs_two_points() -> None:
    assert seconds(read(*((n, 7) for n in range(0, 200, 10)))) == [0, 190]


def test_what_is_older_than_the_window_goes_but_for_one() -> None:
    assert seconds(read(*((10 * n, n) for n in range(20)))) == [130, 140, 150, 160, 170, 180, 190]


@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([0, 0, 0, 1, 2, 50, -3])), min_size=1, max_size=90)
)
def test_a_growth_is_never_too_large_and_short_by_one_step_at_most(steps: list[tuple[int, int]]) -> None:
    history: RateWindow = ()
    readings: list[tuple[int, int]] = []
    second, count = 1_000, 100
    for wait_s, more in steps:
        second, count = second + wait_s, max(0, count + more)
        if readings and (readings[-1][1] > count or wait_s > WINDOW_S):
            readings.clear()
        readings.append((second, count))
        history = appended(history, count, second * NS, WINDOW_S * NS)
        events, span_s = growth(history, WINDOW_S)
        within = [(t, before) for t, before in readings if second - t <= WINDOW_S]
        later = [before for t, before in within if t - within[0][0] >= WINDOW_S / STEPS]
        assert isinstance(events, int)
        assert count - (later[0] if later else count) <= events <= count - within[0][1]
        assert span_s == min(second - readings[0][0], WINDOW_S)
        assert len(history) <= 2 * STEPS + 2
        assert all(a.t_ns < b.t_ns and a.value <= b.value for a, b in pairwise(history))
