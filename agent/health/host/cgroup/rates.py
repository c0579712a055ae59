"""What a cgroup counts by its rate: how often it ran out of CPU time, or into its limits of memory.

One such event is nothing. A counter has a history only while it grows, and for a while after: most groups
have none. And a group is looked at only when its sample has changed; until then it had counted nothing.
"""

from typing import Final, NamedTuple

from agent.health.rate_window import RateWindow, appended, is_flat
from agent.model.reading import Missing, Reading, is_absent
from agent.model.snapshot import GroupSample
from agent.model.time import NS

LINGER_NS: Final = 30 * NS  # what is over is looked at until that is believed


class Counts(NamedTuple):
    """The counters at a look."""

    periods: Reading
    """Periods in which it wanted to run; and in which it ran out of CPU time."""
    throttled: Reading
    at_max: Reading
    at_high: Reading


NO_COUNTS: Final = Counts(0, 0, 0, 0)
"""Of a group that has just been made."""


class Rates(NamedTuple):
    """How they grew."""

    periods: RateWindow = ()
    throttled: RateWindow = ()
    at_max: RateWindow = ()
    at_high: RateWindow = ()
    grew_ns: int = 0
    """When one of them, other than the periods, was last seen to have grown."""


QUIET: Final = Rates()


def counts_of(group: GroupSample) -> Counts:
    """What a group counts. cgroup v1 has one counter for all failures to get memory."""
    at_max = group.mem_failcnt if is_absent(group.mem_max) else group.mem_max
    return Counts(group.cpu_periods, group.cpu_throttled, at_max, group.mem_high)


def rates_after(
    before: Rates, old: Counts, new: Counts, looked_ns: int, now_ns: int, window_ns: int
) -> Rates:
    """The rates of a group that has changed.

    Args:
        old: What it counted at the last look, which was at ``looked_ns``.
        new: What it counts now.
        window_ns: The longest that it will be asked for.
    """
    throttled = _grew(old.throttled, new.throttled)
    at_max = _grew(old.at_max, new.at_max)
    at_high = _grew(old.at_high, new.at_high)
    grew = throttled or at_max or at_high
    if before is QUIET and not grew:
        return QUIET

    def after(history: RateWindow, was: Reading, now: Reading, *, begins: bool) -> RateWindow:
        if not history and not begins:
            return ()
        history = is_flat(history, looked_ns, window_ns) or appended((), was, looked_ns, window_ns)
        return appended(history, now, now_ns, window_ns)

    return Rates(
        after(before.periods, old.periods, new.periods, begins=throttled),
        after(before.throttled, old.throttled, new.throttled, begins=throttled),
        after(before.at_max, old.at_max, new.at_max, begins=at_max),
        after(before.at_high, old.at_high, new.at_high, begins=at_high),
        now_ns if grew else before.grew_ns,
    )


def _grew(old: Reading, new: Reading) -> bool:
    """Whether a counter has grown. What was not there before has; what could not be read, nobody knows."""
    if isinstance(new, Missing):
        return False
    return new > old if isinstance(old, int) else is_absent(old) and new > 0


def drop_stale_rates(rates: Rates, now_ns: int, window_ns: int) -> Rates:
    """The rates, unless what they tell of is long over."""
    return rates if now_ns - rates.grew_ns < window_ns + LINGER_NS else QUIET
