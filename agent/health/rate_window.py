"""Sliding window over the readings of a counter, from which the growth within the last minutes is computed.

A window restarts with one point when the growth between two readings is unknown. This happens if the counter
was reset, could not be read, or was not read for longer than the window. With ``reset_ends``, a reset also
ends the events that were counted. Then the window restarts as if the counter had had the new value for a
whole window.

A window keeps about twelve points. A point is dropped if its neighbours have the same value or are at most a
twelfth of the window apart. The growth is the difference between the newest point and the first point inside
the window. So the growth is never too large, but can miss the events in a twelfth of the window.
"""

from typing import Final, NamedTuple

from agent.health.rules import CounterGrowth
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.time import NS

POINTS_PER_WINDOW: Final = 12
"""Approximate number of points in a window; a window of one minute has one every 5 s."""


class CounterPoint(NamedTuple):
    """Value of a counter at one point in time."""

    t_ns: int
    """CLOCK_MONOTONIC [ns]."""
    value: int


RateWindow = tuple[CounterPoint, ...]
"""Points of one counter, oldest first, with non-decreasing values. If the counter has been read for long
enough, the first point is at or before the beginning of the window."""


def append_reading(
    window: RateWindow, reading: Reading, t_ns: int, window_ns: int, *, reset_ends: bool = False
) -> RateWindow:
    """Return the window with the newest reading appended; empty if the reading is missing.

    A reading that was appended before is not appended again.

    Args:
        window: Return value of the last call; empty in the first call.
        reading: Value of the counter.
        t_ns: CLOCK_MONOTONIC of the reading, not before the last point [ns].
        window_ns: Longest window over which a growth will be computed [ns].
        reset_ends: True: a reset of the counter also ends the events that it counted, as a reset of a GPU
            does. False: after a reset, the growth is unknown until the window is full again.
    """
    if isinstance(reading, Missing):
        return ()
    if not window:
        return (CounterPoint(t_ns, reading),)
    last_ns, last = window[-1]
    if t_ns == last_ns and reading == last:
        return window
    is_gap = t_ns - last_ns > window_ns
    if reset_ends and (reading < last or (is_gap and reading == last)):  # no event since the reset
        return (CounterPoint(t_ns - window_ns, reading), CounterPoint(t_ns, reading))
    if reading < last or is_gap:
        return (CounterPoint(t_ns, reading),)
    first, end = 0, len(window)
    if end > 1 and (reading == window[-2].value or t_ns - window[-2].t_ns <= window_ns // POINTS_PER_WINDOW):
        end -= 1
    while first + 1 < end and t_ns - window[first + 1].t_ns >= window_ns:
        first += 1
    return (*window[first:end], CounterPoint(t_ns, reading))


def repeat_last_value(window: RateWindow, until_ns: int, window_ns: int) -> RateWindow:
    """Return the window with its last value repeated at the time ``until_ns``. This is needed before a new
    reading is appended, if a counter's readings are appended only when they change."""
    if not window or window[-1].t_ns == until_ns:
        return window
    return append_reading(window, window[-1].value, until_ns, window_ns)


def grown_since(window: RateWindow, since_ns: int) -> int:
    """Return the growth of the counter from the first point at or after ``since_ns`` to the newest point."""
    if not window or window[0].value == window[-1].value:
        return 0  # the usual case, at little cost
    newest = window[-1].value
    return newest - next((point.value for point in window if point.t_ns >= since_ns), newest)


def window_growth(window: RateWindow, window_s: int) -> CounterGrowth:
    """Return the growth of the counter within the ``window_s`` seconds before the newest point."""
    if not window:
        return CounterGrowth(0, 0.0)
    end_ns = window[-1].t_ns
    span_s = (end_ns - window[0].t_ns) / NS
    return CounterGrowth(grown_since(window, end_ns - window_s * NS), min(span_s, float(window_s)))


def counter_growth(reading: Reading, window: RateWindow, window_s: int) -> CounterGrowth:
    """Return the growth of a counter within ``window_s`` seconds; Missing if ``reading`` is missing.

    Args:
        reading: Newest reading of the counter.
        window: Window of the counter's readings.
    """
    return CounterGrowth(reading, 0.0) if isinstance(reading, Missing) else window_growth(window, window_s)


class WindowedCounter(NamedTuple):
    """Counter with its recent readings, and its growth within the window of these readings."""

    window: RateWindow = ()
    growth: CounterGrowth = CounterGrowth(NEVER_READ, 0.0)


def next_counter(before: WindowedCounter, reading: Reading, t_ns: int, window_s: int) -> WindowedCounter:
    """Return the counter after ``reading`` at ``t_ns``, with its growth within ``window_s`` seconds."""
    window = append_reading(before.window, reading, t_ns, window_s * NS)
    return WindowedCounter(window, counter_growth(reading, window, window_s))


def repeated_counter(before: WindowedCounter, until_ns: int, window_s: int) -> WindowedCounter:
    """Return ``before`` as if its last value had been read until ``until_ns``, with its growth within
    ``window_s``.

    For readings that were left out because they did not change.
    """
    if not before.window:
        return before  # it could not be read, and still cannot
    window = repeat_last_value(before.window, until_ns, window_s * NS)
    return WindowedCounter(window, window_growth(window, window_s))
