"""Newest-value cell: passes values from any thread to the tasks of one asyncio loop.

There is no queue: a newer value replaces one that was not read, because every value is complete.
"""

import asyncio
import contextlib
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """Newest value with its version: 0 before the first value, then one more with every publication.

    Any thread may publish and peek. Only tasks of one loop may wait: the loop of the first waiter.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition(threading.Lock())
        self._version = 0
        self._value: T | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._wake_pending = False
        self._delivered = 0

    def publish(self, value: T) -> int:
        """Replace the value and wake waiting tasks. Thread-safe. Never blocks.

        Several calls before the loop runs wake it once. A call after the loop has closed has no effect on it.

        Returns:
            Version of the value.
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
        """Return the version and the value; ``(0, None)`` before the first publication. Thread-safe."""
        with self._lock:
            return self._version, self._value

    def is_delivered(self) -> bool:
        """Return True if a waiting task has got the newest value."""
        with self._lock:
            return self._delivered == self._version

    def wait_delivered(self, timeout_s: float) -> bool:
        """Block until a waiting task has got the value that is newest now. For any thread but the loop's.

        Returns:
            Whether a task has got it in time; also True if no task has ever waited or the loop has closed.
        """
        with self._lock:
            version = self._version

            def is_done() -> bool:
                return self._loop is None or self._loop.is_closed() or self._delivered >= version

            if self._loop is not None and _running_loop() is self._loop:
                return is_done()  # the waiting task needs this very thread
            return self._lock.wait_for(is_done, timeout_s)

    async def wait_newer(self, version: int) -> tuple[int, T]:
        """Wait for a value newer than ``version``; returns the newest version and value.

        Always yields to other tasks once, so that a loop around it starves none.

        Raises:
            RuntimeError: A task of another loop has waited before.
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
                    self._delivered = max(self._delivered, newest)
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
    """Return the asyncio loop that runs in the calling thread; None: no loop runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
