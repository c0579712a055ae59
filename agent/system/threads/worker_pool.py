"""Lanes of threads for what may take long, beside a loop that must not wait: made when there is work.

What waits in one lane waits for nothing in another. In a lane things are begun in the order of the asking;
in one of a single thread whatever comes last stays last.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, TypeVar

from agent.system.rate_limit import RateLimiter

T = TypeVar("T")

WAITING_MAX: Final = 64
"""Calls that may wait in one lane for those before them."""

_numbers: Final = count(1)  # of threads: each has a name of its own in the process

log = logging.getLogger(__name__)


class Full(Exception):
    """Too many calls wait already. Says how many."""


class WorkerPool:
    """So many threads at most, and what waits for one of them. Of one loop.

    They are daemon threads: one that hangs cannot keep the process.
    """

    def __init__(self, name: str, threads: int, waiting_max: int = WAITING_MAX) -> None:
        """``name`` is the beginning of the threads' names."""
        self._name = name
        self._threads_max = threads
        self._waiting_max = waiting_max
        self._news = threading.Condition()
        self._waiting: deque[Callable[[], Callable[[], None]]] = deque()
        self._threads = 0
        self._idle = 0
        self._closed = False
        self._complaints = RateLimiter()

    async def call(self, function: Callable[[], T], *, kept: bool = False) -> T:
        """Calls the function in a thread, and waits for as long as it takes. Raises what it raises.

        Whoever stops waiting before it has begun frees its place. If it is ``kept`` it is done all the same.

        Raises:
            Full: Too many wait.
        """
        done: Future[T] = Future()
        work = partial(_done, function, done)
        self._take(work)
        try:
            return await asyncio.wrap_future(done)
        finally:
            if not kept:
                with self._news, suppress(ValueError):  # it has begun
                    self._waiting.remove(work)

    async def finish(self, timeout_s: float) -> None:
        """Waits until everything that was asked of a lane of one thread is done, or the time is over."""
        if self._threads:
            with suppress(TimeoutError, Full):
                async with asyncio.timeout(timeout_s):
                    await self.call(lambda: None)

    def close(self) -> None:
        """The threads end when nothing waits any more. Returns at once."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _take(self, work: Callable[[], Callable[[], None]]) -> None:
        with self._news:
            waiting = len(self._waiting)
            if waiting >= self._waiting_max:
                if times := self._complaints.tick():
                    words = "%s: %d calls wait already, %d more were refused; does a disk hang?"
                    log.warning(words, self._name, waiting, times)
                raise Full(f"{waiting} calls wait already, limit {self._waiting_max}")
            if waiting >= self._idle and self._threads < self._threads_max:
                threading.Thread(target=self._run, name=f"{self._name}-{next(_numbers)}", daemon=True).start()
                self._threads += 1
            self._waiting.append(work)
            self._news.notify()

    def _run(self) -> None:
        settle: Callable[[], None] | None = None
        while True:
            with self._news:
                self._idle += 1  # before anybody has the answer, and asks again at once
            if settle is not None:
                settle()
            work = self._next()
            if work is None:
                return
            settle = work()

    def _next(self) -> Callable[[], Callable[[], None]] | None:
        with self._news:
            while not self._waiting and not self._closed:
                self._news.wait()
            self._idle -= 1
            if not self._waiting:
                self._threads -= 1
                return None
            return self._waiting.popleft()


def _done(function: Callable[[], T], done: "Future[T]") -> Callable[[], None]:
    """Calls the function; returns what tells whoever waits how that went."""
    try:
        return partial(_settle, partial(done.set_result, function()))
    except BaseException as error:
        return partial(_settle, partial(done.set_exception, error))


def _settle(settle: Callable[[], None]) -> None:
    with suppress(InvalidStateError):  # nobody waits any more
        settle()
