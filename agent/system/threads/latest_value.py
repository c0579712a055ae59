"""Cell with the newest of several values, which any thread sets and tasks of one asyncio loop wait for.

There is no queue: a newer value replaces a value that no task has received.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class LatestValue(Generic[T]):
    """Newest published value with its version: 0 before the first value, then increased by every publication.

    Any thread may call publish() and peek(). Only tasks of one asyncio loop may wait: the loop that waits
    first.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition(threading.Lock())
        self._version = 0
        self._value: T | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._wake_pending = False
        self._delivered = 0
        self._observers: tuple[Callable[[int, T], None], ...] = ()

    @contextlib.contextmanager
    def observed_by(self, observer: Callable[[int, T], None]) -> Iterator[None]:
        """Call ``observer`` with the version and value of each publication in a ``with`` block.

        It is called in the publishing thread, before tasks wake. It must not block, and raises nothing.
        """
        with self._lock:
            self._observers = (*self._observers, observer)
        try:
            yield
        finally:
            with self._lock:
                self._observers = tuple(known for known in self._observers if known != observer)

    def publish(self, value: T) -> int:
        """Replace the value, wake waiting tasks and return the value's version. Thread-safe. Never blocks."""
        with self._lock:
            self._version += 1
            self._value = value
            version, observers = self._version, self._observers
        for observer in observers:
            observer(version, value)
        with self._lock:
            loop = None if self._wake_pending else self._loop
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
        """Return True if a waiting task has received the newest value."""
        with self._lock:
            return self._delivered == self._version

    def wait_delivered(self, timeout_s: float) -> bool:
        """Block until a waiting task has received the value that is newest now.

        In the loop's own thread, never blocks. Returns False after the timeout; True at once if no task has
        ever waited or the loop has closed.
        """
        with self._lock:
            version = self._version

            def is_done() -> bool:
                return self._loop is None or self._loop.is_closed() or self._delivered >= version

            if self._loop is not None and _running_loop() is self._loop:
                return is_done()  # the waiting task needs this very thread
            return self._lock.wait_for(is_done, timeout_s)

    async def wait_newer(self, version: int) -> tuple[int, T]:
        """Wait until the value is newer than ``version``; return the newest version and value.

        Other tasks of the loop run at least once during the call.

        Raises RuntimeError: a task of another loop has waited before.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._loop is None:
                self._loop = loop
            elif self._loop is not loop:
                raise RuntimeError(
                    "LatestValue: tasks of two event loops wait; use one LatestValue for each loop"
                )
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
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
