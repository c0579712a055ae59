"""Clocks, detection of wall-clock steps, random delays, durations of readings."""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from random import SystemRandom
from typing import Final

from agent.model.reading import DURATION_BOUNDS_S, PassDurations
from agent.model.time import CLOCK_STEP_S, NS, Instant


def read_clocks() -> Instant:
    """Return the current time on the monotonic and the wall clock."""
    return Instant(time.monotonic_ns(), time.time())


def read_boot_clock() -> float:
    """Return the time since boot [s], including the time in which the machine slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


CLOCK_TRUST_S: Final = 3600.0
"""Time since the wall clock was set after which old records may be deleted [s]."""


class WallClockStepDetector:
    """Detector of steps of the wall clock, which knows when the clock was last set. Not thread-safe."""

    def __init__(self) -> None:
        self._offset_s, self._step_ns = 0.0, 0

    def observe(self, now: Instant) -> None:
        """Compare the wall clock with the monotonic clock at the time ``now``, to notice that it was set."""
        offset_s = now.wall_s - now.mono_ns / NS
        if abs(offset_s - self._offset_s) > CLOCK_STEP_S:
            self._offset_s, self._step_ns = offset_s, now.mono_ns

    def is_trusted(self, now: Instant) -> bool:
        """Return whether the wall clock was not set in the last CLOCK_TRUST_S seconds before ``now``."""
        return now.mono_ns - self._step_ns >= CLOCK_TRUST_S * NS


random_fraction: Final = SystemRandom().random
"""Function that returns a random number from 0 to 1.

It does not use Python's global generator, which an embedding driver may have seeded.
"""


class PassTimer:
    """Timer of one source's readings (passes), with a histogram. One thread measures, any thread reads."""

    def __init__(self, source: str) -> None:
        self.source: Final = source
        self._durations = PassDurations((0,) * len(DURATION_BOUNDS_S), 0.0)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the ``with`` block as one pass (reading), unless the block raises an exception."""
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        counts = list(self._durations.counts)
        counts[bisect_left(DURATION_BOUNDS_S, took_s)] += 1
        self._durations = PassDurations(tuple(counts), self._durations.sum_s + took_s)

    def read(self) -> PassDurations:
        """Return the durations of all measured passes (readings) of the source."""
        return self._durations
