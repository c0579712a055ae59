"""How often something may be said that could happen a thousand times a second."""

import time
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 60.0


class RateLimiter:
    """Counts events, and says of one a minute at most that it should be told. Of one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._untold = 0
        self._next = -float("inf")

    def tick(self) -> int:
        """Counts an event.

        Returns:
            How many to tell of now, this one and those before it that nobody was told of; or 0.
        """
        self._untold += 1
        now = self._clock()
        if now < self._next:
            return 0
        told, self._untold = self._untold, 0
        self._next = now + INTERVAL_S
        return told
