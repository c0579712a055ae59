"""Sliding window over a counter: which points are kept, what restarts it, and what a growth counts."""

from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact
from agent.health.kernel_log.latch import next_line_window
from agent.health.rate_window import (
    POINTS_PER_WINDOW,
    CounterPoint,
    RateWindow,
    append_reading,
    counter_growth,
    grown_since,
    repeat_last_value,
    window_growth,
)
from agent.health.rules import CounterGrowth
from agent.model.reading import Absence, Missing, Reading
from agent.model.time import NS, Instant

WINDOW_S: Final = 60
EIO: Final = Missing(Absence.UNREADABLE, 5)
ABSENT: Final = Missing(Absence.ABSENT)


def read(*readings: tuple[float, Reading], reset_ends: bool = False) -> RateWindow:
    window: RateWindow = ()
    for second, reading in readings:
        window = append_reading(window, reading, int(second * NS), WINDOW_S * NS, reset_ends=reset_ends)
    return window


def grew(*readings: tuple[float, Reading], reset_ends: bool = False) -> CounterGrowth:
    return window_growth(read(*readings, reset_ends=reset_ends), WINDOW_S)


def seconds(window: RateWindow) -> list[float]:
    return [point.t_ns / NS for point in window]


# --- growth of a counter ----------------------------------------------------------------------------------


def test_events_before_the_first_reading_are_no_growth() -> None:
    assert grew((100, 5_000)) == CounterGrowth(0, 0.0)
    assert grew((100, 5_000), (110, 5_003)) == CounterGrowth(3, 10.0)


def test_growth_without_readings_has_no_span() -> None:
    assert window_growth((), WINDOW_S) == CounterGrowth(0, 0.0)
    assert grown_since((), 0) == 0


def test_growth_covers_at_most_the_window() -> None:
    assert grew((100, 0), (130, 4), (160, 4)) == CounterGrowth(4, 60.0)
    assert grew((100, 0), (130, 4), (160, 4), (161, 4)) == CounterGrowth(0, 60.0)


def test_growth_across_the_window_start_is_not_counted() -> None:
    assert grew((100, 0), (140, 100), (190, 107)) == CounterGrowth(7, 60.0)
    assert grew((100, 0), (140, 100), (160, 107)) == CounterGrowth(107, 60.0), "its begin is in the window"


def test_slow_events_never_reach_the_limit() -> None:
    drip = read(*((second, second // 7) for second in range(1000)))
    assert window_growth(drip, WINDOW_S).events in (60 // 7, 60 // 7 - 1)


def test_step_between_rare_readings_counts_within_the_window() -> None:
    """The second point is near the first, and only it shows that the step came later."""
    burst = ((0, 0), (1, 0), (2, 1), (40, 100))
    assert grew(*burst, (61, 100)) == CounterGrowth(99, 60.0)
    assert grew(*burst, (63, 100)) == CounterGrowth(0, 60.0)


def test_missing_counter_has_a_missing_growth() -> None:
    window = read((100, 5), (130, 9))
    assert counter_growth(EIO, window, WINDOW_S) == CounterGrowth(EIO, 0.0)
    assert counter_growth(9, window, WINDOW_S) == CounterGrowth(4, 30.0)


def test_window_may_end_after_the_newest_point() -> None:
    window = read((100, 0), (130, 4))
    assert grown_since(window, 100 * NS) == 4
    assert grown_since(window, 101 * NS) == 0
    assert grown_since(window, 131 * NS) == 0


# --- restart of the window --------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [0, 3, 99])
def test_fallen_counter_restarts_the_window(reset: int) -> None:
    assert grew((100, 0), (110, 100), (120, reset)) == CounterGrowth(0, 0.0)
    assert grew((100, 0), (110, 100), (120, reset), (130, reset + 2)) == CounterGrowth(2, 10.0)


@pytest.mark.parametrize("reset", [0, 3, 99])
def test_reset_that_ends_the_events_fills_the_window(reset: int) -> None:
    readings = ((100, 0), (110, 100), (120, reset))
    assert grew(*readings, reset_ends=True) == CounterGrowth(0, 60.0)
    assert grew(*readings, (130, reset + 2), reset_ends=True) == CounterGrowth(2, 60.0)
    assert grew((100, 0), (110, 100), (500, reset), reset_ends=True) == CounterGrowth(0, 60.0)
    assert grew((100, 5), (161, 5), reset_ends=True) == CounterGrowth(0, 60.0), "there was none in the gap"
    assert grew((100, 5), (161, 500), reset_ends=True) == CounterGrowth(0, 0.0)


@pytest.mark.parametrize("missing", [EIO, ABSENT])
def test_missing_reading_restarts_the_window(missing: Missing) -> None:
    assert grew((100, 5), (110, missing), (120, 500)) == CounterGrowth(0, 0.0)


def test_gap_longer_than_the_window_restarts_it() -> None:
    assert grew((100, 5), (160, 500)) == CounterGrowth(495, 60.0)
    assert grew((100, 5), (161, 500)) == CounterGrowth(0, 0.0), "its time is unknown"


def test_extended_window_counts_growth_after_a_flat_time() -> None:
    """After a long flat time, new counts are new."""
    window = read((100, 0), (101, 10))
    for since_s, now_s in ((165, 166), (1000, 1001)):
        still = repeat_last_value(window, since_s * NS, WINDOW_S * NS)
        moved = append_reading(still, 60, now_s * NS, WINDOW_S * NS)
        assert grown_since(moved, (now_s - WINDOW_S) * NS) == 50
    assert repeat_last_value((), 100 * NS, WINDOW_S * NS) == ()


# --- lines of the kernel log ------------------------------------------------------------------------------


def fact(times: int, first_s: float) -> KernelLogFact:
    first = Instant(int(first_s * NS), 0.0)
    return KernelLogFact(KernelLogCode.EDAC_CORRECTED, "mc0", times, first, first, "a line")


def window_of(*evaluations: tuple[float, int], first_s: float) -> RateWindow:
    window: RateWindow = ()
    for second, times in evaluations:
        window = next_line_window(window, fact(times, first_s), int(second * NS), WINDOW_S * NS)
    return window


def test_lines_before_the_start_count_while_the_first_is_in_window() -> None:
    window = window_of((100, 24), first_s=80)
    assert grown_since(window, 80 * NS - 1) == 24
    assert grown_since(window, 80 * NS) == 0


def test_single_line_counts_at_once() -> None:
    assert grown_since(window_of((100, 1), first_s=100), 40 * NS) == 1


def test_old_lines_without_times_do_not_count_but_new_ones_do() -> None:
    assert grown_since(window_of((100, 5_000), first_s=10), 40 * NS) == 0
    assert grown_since(window_of((100, 5_000), (110, 5_024), first_s=10), 50 * NS) == 24


def test_fact_dropped_and_returned_counts_from_its_first_line() -> None:
    before = window_of((100, 5_000), first_s=10)
    assert grown_since(next_line_window(before, fact(20, 105), 110 * NS, WINDOW_S * NS), 50 * NS) == 20


# --- readings in the window -------------------------------------------------------------------------------


def test_repeated_reading_is_one_point() -> None:
    once = read((100, 5))
    assert read((100, 5), (100, 5)) == once == (CounterPoint(100 * NS, 5),)


def test_rare_readings_are_all_kept() -> None:
    every = [(10 * n, n) for n in range(6)]
    assert seconds(read(*every)) == [0, 10, 20, 30, 40, 50]


def test_frequent_readings_are_thinned_to_a_twelfth_of_the_window() -> None:
    assert seconds(read(*((n, n) for n in range(13)))) == [0, 5, 10, 12]


def test_flat_counter_keeps_two_points() -> None:
    assert seconds(read(*((n, 7) for n in range(0, 200, 10)))) == [0, 190]


def test_points_older_than_the_window_are_dropped_but_one() -> None:
    assert seconds(read(*((10 * n, n) for n in range(20)))) == [130, 140, 150, 160, 170, 180, 190]


@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([0, 0, 0, 1, 2, 50, -3])), min_size=1, max_size=90)
)
def test_growth_is_never_too_large_and_at_most_a_step_too_small(steps: list[tuple[int, int]]) -> None:
    window: RateWindow = ()
    readings: list[tuple[int, int]] = []
    second, count = 1_000, 100
    for wait_s, more in steps:
        second, count = second + wait_s, max(0, count + more)
        if readings and (readings[-1][1] > count or wait_s > WINDOW_S):
            readings.clear()
        readings.append((second, count))
        window = append_reading(window, count, second * NS, WINDOW_S * NS)
        events, span_s = window_growth(window, WINDOW_S)
        within = [(t, before) for t, before in readings if second - t <= WINDOW_S]
        later = [before for t, before in within if t - within[0][0] >= WINDOW_S / POINTS_PER_WINDOW]
        assert isinstance(events, int)
        assert count - (later[0] if later else count) <= events <= count - within[0][1]
        assert span_s == min(second - readings[0][0], WINDOW_S)
        assert len(window) <= 2 * POINTS_PER_WINDOW + 2
        assert all(a.t_ns < b.t_ns and a.value <= b.value for a, b in pairwise(window))
