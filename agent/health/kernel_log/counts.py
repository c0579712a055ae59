"""How often the kernel log has said a thing of late: the history of a fact's lines."""

from agent.health.kernel_log.values import LogFact
from agent.health.rate_window import Point, RateWindow, appended


def times_told(before: RateWindow, fact: LogFact, t_ns: int, window_ns: int) -> RateWindow:
    """The history of a fact's lines after a look.

    When each of them was written only the first and the last know. So a fact that was told before anybody
    looked has all its lines since the first; if that is longer ago than the window, nobody knows when, and
    what it counts from then on is new.

    Args:
        before: The history after the last look; empty at first.
        fact: As it is now. One that counts less was dropped, and told anew.
        t_ns: When it was looked at.
        window_ns: The longest that a growth will be asked over.
    """
    if not before or fact.times < before[-1].value:
        before = (Point(fact.first.mono_ns - 1, 0),)  # just before the first there was none
    return appended(before, fact.times, t_ns, window_ns)
