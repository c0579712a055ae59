"""Newest wins: how a value gets from any thread to the tasks of one asyncio loop.

There is no queue. A value that is replaced before anybody looked is gone, and that is the point:
every value is a whole picture.
"""

import asyncio
import contextlib
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """One value and its version: 0 before the first, then one more with every publication.

    Any thread may publish and peek. Only tasks of one loop may wait: that of the first that did.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition(threading.Lock())
        self._version = 0
        self._value: T | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._wake_pending = False
        self._taken = 0

    def publish(self, value: T) -> int:
        """Replaces the value and wakes whoever waits. Never blocks for longer than a peek.

        However often it is called before the loop runs, the loop is woken once. Publishing after
        the loop has closed is no error; nobody listens any more.

        Returns:
            The value's version.
        """
        with self._lock:
            self._version += 1
            self._value = value
            version, loop = self._version, None if self._wake_pending else self._loop
            self._wake_pending = self._wake_pending or loop is not None
        if loop is not None:  # the lock is free: the loop's thread wants it as soon as it wakes
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._wake)
        return version

    def peek(self) -> tuple[int, T | None]:
        """The version and the value as they are now; ``(0, None)`` before the first publication."""
        with self._lock:
            return self._version, self._value

    def is_taken(self) -> bool:
        """Whether somebody who waited has got the newest value."""
        with self._lock:
            return self._taken == self._version

    def wait_taken(self, timeout_s: float) -> bool:
        """Blocks until somebody who waits has got the value that is the newest now; for any other thread.

        Returns:
            Whether that is so. Nobody has to be waited for if nobody has ever waited, or the loop has closed.
        """
        with self._lock:
            version = self._version

            def is_over() -> bool:
                return self._loop is None or self._loop.is_closed() or self._taken >= version

            if self._loop is not None and _running_loop() is self._loop:
                return is_over()  # whoever would take it runs in the thread that would block here
            return self._lock.wait_for(is_over, timeout_s)

    async def wait_newer(self, version: int) -> tuple[int, T]:
        """Waits for a value newer than ``version``; returns the newest with its own version.

        Always lets other tasks run once, so that a loop around it starves nobody.

        Raises:
            RuntimeError: another loop has waited on this before.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._loop is None:
                self._loop = loop
            elif self._loop is not loop:
                raise RuntimeError("a Latest can be waited for in one event loop only")
        await asyncio.sleep(0)
        while True:
            with self._lock:
                newest, value = self._version, self._value
                if newest > version and value is not None:
                    self._taken = max(self._taken, newest)
                    self._lock.notify_all()
                    return newest, value
                waiter = loop.create_future()
                self._waiting.add(waiter)
            try:
                await waiter
            finally:
                self._waiting.discard(waiter)

    def _wake(self) -> None:
        with self._lock:
            self._wake_pending = False
            waiting, self._waiting = self._waiting, set()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that the calling thread runs, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
