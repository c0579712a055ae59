"""The history of a counter, and how far it has grown within a window: the same for all that are judged so.

A history begins anew where nobody knows what came in between: the counter fell, for it was reset; it could
not be read; or it was not read for longer than the window. One that began anew says so by its span.

It holds no more points than it needs. A point is left out when those beside it count the same, or are no
further apart than a twelfth of the window. So a history tells when a counter grew to a twelfth of the window,
or as exactly as it was read, if that was more seldom.

A growth is what came between the points within a window. What came between the last point before the window
and the first one in it is not counted, because it may be older. So a growth is never more than what came in
the window, and a slow drip is no rate; it is less by what came in a twelfth of the window at most, or between
two readings that are further apart.
"""

from typing import Final, NamedTuple

from agent.health.rules import Growth
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.time import NS

STEPS: Final = 12
"""That a window is kept in, or thereabouts: 5 s of a minute."""


class Point(NamedTuple):
    """A counter at a moment."""

    t_ns: int
    """CLOCK_MONOTONIC [ns]."""
    value: int


RateWindow = tuple[Point, ...]
"""Oldest first, and never falling; the first is at or before the window's begin, if old enough."""


def appended(before: RateWindow, reading: Reading, t_ns: int, window_ns: int) -> RateWindow:
    """The history with the newest reading in it.

    Args:
        before: As the last call returned it; empty at first.
        reading: The counter as it was read at ``t_ns``.
        t_ns: Not before the last point. The same reading given twice is one point.
        window_ns: The longest that a growth will be asked over.
    """
    if isinstance(reading, Missing):
        return ()
    if not before:
        return (Point(t_ns, reading),)
    last_ns, last = before[-1]
    if t_ns == last_ns and reading == last:
        return before
    if reading < last or t_ns - last_ns > window_ns:
        return (Point(t_ns, reading),)
    first, end = 0, len(before)
    if end > 1 and (reading == before[-2].value or t_ns - before[-2].t_ns <= window_ns // STEPS):
        end -= 1
    while first + 1 < end and t_ns - before[first + 1].t_ns >= window_ns:
        first += 1
    return (*before[first:end], Point(t_ns, reading))


def is_flat(before: RateWindow, until_ns: int, window_ns: int) -> RateWindow:
    """The history of a counter that is looked at only when it changes: until then it has not."""
    if not before or before[-1].t_ns == until_ns:
        return before
    return appended(before, before[-1].value, until_ns, window_ns)


def grown_since(history: RateWindow, since_ns: int) -> int:
    """What came between the points from a moment on."""
    if not history or history[0].value == history[-1].value:
        return 0  # most do not grow
    newest = history[-1].value
    return newest - next((point.value for point in history if point.t_ns >= since_ns), newest)


def growth(history: RateWindow, window_s: int) -> Growth:
    """How far the counter has grown in the window that ends with the newest point."""
    if not history:
        return Growth(0, 0.0)
    end_ns = history[-1].t_ns
    span_s = (end_ns - history[0].t_ns) / NS
    return Growth(grown_since(history, end_ns - window_s * NS), min(span_s, float(window_s)))


def growth_of(reading: Reading, history: RateWindow, window_s: int) -> Growth:
    """The same of a counter that may be missing now: by how much it has grown, nobody knows then."""
    return Growth(reading, 0.0) if isinstance(reading, Missing) else growth(history, window_s)


class Counter(NamedTuple):
    """A counter that is read again and again."""

    history: RateWindow = ()
    growth: Growth = Growth(NEVER_READ, 0.0)


def read_again(before: Counter, reading: Reading, t_ns: int, window_s: int) -> Counter:
    """The counter after a reading; arguments as of :func:`lengthened`."""
    history = appended(before.history, reading, t_ns, window_s * NS)
    return Counter(history, growth_of(reading, history, window_s))
