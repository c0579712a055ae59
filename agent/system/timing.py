"""Clocks, random delays and rate limits. Pure packages get times as arguments instead."""

import time
from collections.abc import Callable
from random import SystemRandom
from typing import Final

from agent.model.time import Instant


def read_clocks() -> Instant:
    """Return the time on the monotonic and on the wall clock."""
    return Instant(time.monotonic_ns(), time.time())


random_fraction: Final = SystemRandom().random
"""Return a random number from 0 to 1. Independent of the global generator, which a driver may have seeded."""

INTERVAL_S: Final = 60.0
"""Shortest time between two log lines of one limiter [s]."""


class RateLimiter:
    """Rate limiter for a repeated log line: at most one line a minute. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unreported = 0
        self._next = -float("inf")

    def tick(self) -> int:
        """Count an event, and return how many events the log line covers if it should be written now.

        Returns:
            Number of events since the last log line, this one included; 0: do not log now.
        """
        self._unreported += 1
        now = self._clock()
        if now < self._next:
            return 0
        count, self._unreported = self._unreported, 0
        self._next = now + INTERVAL_S
        return count
