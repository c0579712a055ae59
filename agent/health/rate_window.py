"""Sliding window over a counter, from which the growth within the last minutes is computed.

A window restarts where the growth between two readings is unknown: the counter fell because it was reset,
could not be read, or was not read for longer than the window. Its span then shows that it is short.

A window keeps no more points than it needs. A point is dropped if its neighbours have the same value or are
at most a twelfth of the window apart. So growth is dated to a twelfth of the window, or to the interval
between two readings if that is longer.

A growth counts the events between the points within a window. Events between the last point before the window
and the first point in it may be older and are not counted. So a growth never exceeds the number of events in
the window, and rare single events have no rate; a growth can miss the events of a twelfth of the window, or
between two distant readings.
"""

from typing import Final, NamedTuple

from agent.health.rules import Growth
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.time import NS

STEPS: Final = 12
"""Approximate number of points in a window: for a window of one minute, one every 5 s."""


class CounterPoint(NamedTuple):
    """Value of a counter at one time."""

    t_ns: int
    """CLOCK_MONOTONIC [ns]."""
    value: int


RateWindow = tuple[CounterPoint, ...]
"""Points of one counter, oldest first, with non-decreasing values. The first one is at or before the
beginning of the window if the counter has been read for that long.
"""


def appended(window: RateWindow, reading: Reading, t_ns: int, window_ns: int) -> RateWindow:
    """Return the window with the newest reading appended.

    Args:
        window: Return value of the last call; empty in the first call.
        reading: Value of the counter as read at ``t_ns``.
        t_ns: Time of the reading, not before the last point. Appending the same reading twice adds one point.
        window_ns: Longest window over which a growth will be computed.
    """
    if isinstance(reading, Missing):
        return ()
    if not window:
        return (CounterPoint(t_ns, reading),)
    last_ns, last = window[-1]
    if t_ns == last_ns and reading == last:
        return window
    if reading < last or t_ns - last_ns > window_ns:
        return (CounterPoint(t_ns, reading),)
    first, end = 0, len(window)
    if end > 1 and (reading == window[-2].value or t_ns - window[-2].t_ns <= window_ns // STEPS):
        end -= 1
    while first + 1 < end and t_ns - window[first + 1].t_ns >= window_ns:
        first += 1
    return (*window[first:end], CounterPoint(t_ns, reading))


def extended(window: RateWindow, until_ns: int, window_ns: int) -> RateWindow:
    """Return the window with its last value repeated at ``until_ns``, for counters that are appended only on
    change.
    """
    if not window or window[-1].t_ns == until_ns:
        return window
    return appended(window, window[-1].value, until_ns, window_ns)


def grown_since(window: RateWindow, since_ns: int) -> int:
    """Return how far the counter has grown between the first point at or after ``since_ns`` and the newest
    point."""
    if not window or window[0].value == window[-1].value:
        return 0  # the usual case, at little cost
    newest = window[-1].value
    return newest - next((point.value for point in window if point.t_ns >= since_ns), newest)


def growth(window: RateWindow, window_s: int) -> Growth:
    """Return how far the counter has grown in the window that ends with the newest point."""
    if not window:
        return Growth(0, 0.0)
    end_ns = window[-1].t_ns
    span_s = (end_ns - window[0].t_ns) / NS
    return Growth(grown_since(window, end_ns - window_s * NS), min(span_s, float(window_s)))


def growth_of(reading: Reading, window: RateWindow, window_s: int) -> Growth:
    """Return the growth of a counter; missing if the newest reading is missing."""
    return Growth(reading, 0.0) if isinstance(reading, Missing) else growth(window, window_s)


class WindowedCounter(NamedTuple):
    """Newest reading of a counter, with the window of its readings."""

    window: RateWindow = ()
    growth: Growth = Growth(NEVER_READ, 0.0)


def next_counter(before: WindowedCounter, reading: Reading, t_ns: int, window_s: int) -> WindowedCounter:
    """Return the counter with a reading appended; arguments as of :func:`appended`."""
    window = appended(before.window, reading, t_ns, window_s * NS)
    return WindowedCounter(window, growth_of(reading, window, window_s))
