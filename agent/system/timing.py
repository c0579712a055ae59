"""Clocks, random numbers for delays, and a rate limit for log lines."""

import time
from collections.abc import Callable
from random import SystemRandom
from typing import Final

from agent.model.time import Instant


def read_clocks() -> Instant:
    """Return the current time on the monotonic and the wall clock."""
    return Instant(time.monotonic_ns(), time.time())


random_fraction: Final = SystemRandom().random
"""Function that returns a random number from 0 to 1. It does not use the global generator, which an embedding
driver may have seeded."""

LOG_INTERVAL_S: Final = 60.0
"""Shortest time between two log lines of one LogRateLimiter [s]."""


class LogRateLimiter:
    """Rate limiter of a repeated log line: at most one line a minute. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unreported = 0
        self._next = -float("inf")

    def tick(self) -> int:
        """Count an event; return the number of events to log now, or 0 if the line must not be logged yet.

        The number includes this event and all events since the last log line.
        """
        self._unreported += 1
        now = self._clock()
        if now < self._next:
            return 0
        count, self._unreported = self._unreported, 0
        self._next = now + LOG_INTERVAL_S
        return count
