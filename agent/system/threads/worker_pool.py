"""Worker threads for blocking work outside an event loop; threads are started when there is work.

:class:`WorkerPool` runs calls of one asyncio loop, :class:`SerialWorker` runs them one after the other,
:class:`LatestJob` runs only the newest job.
"""

import asyncio
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, Generic, ParamSpec, TypeVar

from agent.system.timing import RateLimiter

T = TypeVar("T")
P = ParamSpec("P")

WAITING_MAX: Final = 64
"""Most calls that wait for a thread of one pool."""
SLOW_S: Final = 10.0
"""Time after which a call of a serial worker is logged as slow [s]."""
FINISH_S: Final = 0.8
"""Time that the last calls of a serial worker may take together before they are abandoned [s]."""

_numbers: Final = count(1)  # makes thread names unique in the process

log = logging.getLogger(__name__)


class PoolFull(Exception):
    """Error of a pool with too many waiting calls; its text has their number."""


class WorkerPool:
    """Pool of at most ``threads`` daemon threads with a bounded queue, for one asyncio loop.

    Calls begin in the order of :meth:`call`; with one thread they also end in this order.
    """

    def __init__(self, name: str, threads: int, waiting_max: int = WAITING_MAX) -> None:
        """Create a pool without threads; ``name`` is the prefix of its threads' names."""
        self._name = name
        self._threads_max = threads
        self._waiting_max = waiting_max
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], Callable[[], None]]] = deque()
        self._threads = 0
        self._idle = 0
        self._closed = False
        self._complaints = RateLimiter()

    async def call(self, function: Callable[[], T], *, run_even_if_abandoned: bool = False) -> T:
        """Call a function in a thread and return its result, or raise its exception.

        A caller that is cancelled before the call begins removes it from the queue, unless it is
        ``run_even_if_abandoned``.

        Raises:
            PoolFull: Too many calls wait.
        """
        done: Future[T] = Future()
        work = partial(_run, function, done)
        self._enqueue(work)
        try:
            return await asyncio.wrap_future(done)
        finally:
            if not run_even_if_abandoned:
                with self._changed, suppress(ValueError):  # the call has begun
                    self._waiting.remove(work)

    async def finish(self, timeout_s: float) -> None:
        """Wait until a pool of one thread has run all queued calls, or until the timeout."""
        if self._threads:
            with suppress(TimeoutError, PoolFull):
                async with asyncio.timeout(timeout_s):
                    await self.call(lambda: None)

    def close(self) -> None:
        """End the threads once the queue is empty. Never blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _enqueue(self, work: Callable[[], Callable[[], None]]) -> None:
        with self._changed:
            waiting = len(self._waiting)
            if waiting >= self._waiting_max:
                if times := self._complaints.tick():
                    log.warning(
                        "%s: queue of %d calls is full, refused %d calls; a disk may hang",
                        self._name,
                        waiting,
                        times,
                    )
                raise PoolFull(f"{waiting} calls wait already, limit {self._waiting_max}")
            if waiting >= self._idle and self._threads < self._threads_max:
                name = f"{self._name}-{next(_numbers)}"
                threading.Thread(target=self._run_thread, name=name, daemon=True).start()
                self._threads += 1
            self._waiting.append(work)
            self._changed.notify()

    def _run_thread(self) -> None:
        settle: Callable[[], None] | None = None
        while True:
            with self._changed:
                self._idle += 1  # before the caller has the result and may call again
            if settle is not None:
                settle()
            work = self._next()
            if work is None:
                return
            settle = work()

    def _next(self) -> Callable[[], Callable[[], None]] | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            self._idle -= 1
            if not self._waiting:
                self._threads -= 1
                return None
            return self._waiting.popleft()


def _run(function: Callable[[], T], done: "Future[T]") -> Callable[[], None]:
    """Call a function; returns the function that passes its result or exception to the caller."""
    try:
        return partial(_settle, partial(done.set_result, function()))
    except BaseException as error:
        return partial(_settle, partial(done.set_exception, error))


def _settle(settle: Callable[[], None]) -> None:
    with suppress(InvalidStateError):  # the caller was cancelled
        settle()


class SerialWorker:
    """Worker that runs calls of one asyncio loop one after the other, abandoned ones too.

    So state that only these calls use needs no lock, and the last call takes effect last, even after a call
    that hung for an hour.
    """

    def __init__(self, name: str = "dh-files", slow_s: float = SLOW_S) -> None:
        """Create a worker; a call that takes longer than ``slow_s`` is logged once as slow."""
        self._pool = WorkerPool(name, threads=1, waiting_max=sys.maxsize)
        self._slow_s = slow_s
        self._hangs = False

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the thread and return its result, or raise its exception."""
        slow = asyncio.get_running_loop().call_later(self._slow_s, self._log_slow)
        try:
            return await self._pool.call(function, run_even_if_abandoned=True)
        finally:
            slow.cancel()

    async def finish(self, function: Callable[[], object]) -> None:
        """Call a function at shutdown; once a call has hung, later ones are queued without a wait."""
        try:
            async with asyncio.timeout(0.0 if self._hangs else FINISH_S):
                await self.call(function)
        except TimeoutError:
            self._hangs = True

    def close(self) -> None:
        """End the thread once the queue is empty. Never blocks."""
        self._pool.close()

    def _log_slow(self) -> None:
        log.warning("the driver's sockets are not checked: a disk has not answered for %g s", self._slow_s)


class LatestJob(Generic[P]):
    """Runner of the newest job, one at a time; a newer job replaces one that has not begun.

    A thread exists only while a job runs.
    """

    def __init__(self, run: Callable[P, None]) -> None:
        """Create a runner that passes each job to ``run``, which may block and never runs twice at once."""
        self._run_job = run
        self._lock = threading.Lock()
        self._next: Callable[[], None] | None = None
        self._is_busy = False

    def give(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Set the newest job, which replaces a job that has not begun. Never blocks."""
        with self._lock:
            self._next = partial(self._run_job, *args, **kwargs)
            if not self._is_busy:
                threading.Thread(target=self._run, name="dh-pods-record", daemon=True).start()
                self._is_busy = True  # after start(), which may fail

    def _run(self) -> None:
        while True:
            with self._lock:
                job, self._next = self._next, None
                if job is None:
                    self._is_busy = False
                    return
            try:
                job()
            except Exception:  # a bug in one job must not stop the next
                log.exception("use of devices could not be recorded")
