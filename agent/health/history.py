"""The history of a counter: as many points as its window needs, and no more."""

from typing import Final, Protocol, TypeVar

POINTS: Final = 12  # within a window: 5 s apart in a minute


class Timed(Protocol):
    """What was read at a moment."""

    @property
    def t_ns(self) -> int:
        """CLOCK_MONOTONIC [ns]."""


P = TypeVar("P", bound=Timed)


def lengthened(before: tuple[P, ...], newest: P, window_ns: int) -> tuple[P, ...]:
    """The history with the newest point in it: not more than a window, and no denser than needed.

    Oldest first; the first is at or before the window's begin, if old enough.
    """
    points = [*before]
    if len(points) > 1 and points[-1].t_ns - points[-2].t_ns < window_ns // POINTS:
        points.pop()  # the newest one only stood for "now"
    points.append(newest)
    while len(points) > 1 and newest.t_ns - points[1].t_ns >= window_ns:
        points.pop(0)
    return tuple(points)
