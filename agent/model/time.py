"""Moments on the monotonic and the wall clock, and their text form."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

NS: Final = 1_000_000_000
"""Number of nanoseconds in a second."""
WALL_MAX_S: Final = 253_402_300_799
"""Largest valid time: the end of the year 9999 [s since 1970]."""
CLOCK_STEP_S: Final = 60.0
"""Smallest step of the wall clock against the monotonic clock that counts as set [s]."""


@dataclass(frozen=True, slots=True, order=True)
class Instant:
    """One moment on the monotonic and the wall clock, ordered by the monotonic clock.

    Durations, dwell times and leases are measured on ``mono_ns`` only, so that a step of the wall
    clock does not change a verdict. ``wall_s`` is for display.
    """

    mono_ns: int
    """Time on the monotonic clock, CLOCK_MONOTONIC [ns]."""
    wall_s: float
    """Time on the wall clock, CLOCK_REALTIME [s since 1970]."""


def instant_at_mono(mono_ns: int, now: Instant) -> Instant:
    """Return the instant with the monotonic time ``mono_ns``, or ``now`` if that time is in the future.

    The wall time of the instant is computed from the distance to ``now``.
    """
    mono_ns = min(mono_ns, now.mono_ns)
    return Instant(mono_ns, now.wall_s - (now.mono_ns - mono_ns) / NS)


def with_present_clock(at: Instant, now: Instant) -> Instant:
    """Return an instant of this boot with the wall time of the present clock, if the clock was set since."""
    present = instant_at_mono(at.mono_ns, now)
    was_set = at.mono_ns >= 0 and abs(present.wall_s - at.wall_s) > CLOCK_STEP_S
    return present if was_set else at  # times of earlier boots are negative, and stay


def rfc3339(wall_s: float) -> str:
    """Format a wall time as RFC 3339 in UTC, to the second: ``2026-11-21T10:04:04Z``."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_age(seconds: float) -> str:
    """Format a duration in its largest unit, rounded down: ``0s``, ``95s``, ``12m``, ``31h``, ``9d``.

    A negative duration is ``0s``.
    """
    s = max(0, int(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if s >= 2 * size:
            return f"{s // size}{unit}"
    return f"{s}s"
