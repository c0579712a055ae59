"""Threads for blocking calls of asyncio programs: a call with a timeout, and a pool of worker threads.

A call with a timeout runs in its own thread, which is abandoned if it hangs. A pool starts threads only when
there are calls to run.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final, Generic, ParamSpec, TypeVar

from agent.system.output import LogRateLimiter, get_logger
from agent.system.threads.thread_start import DaemonThread, ThreadStartError

T = TypeVar("T")

SOCKET_TIMEOUT_S: Final = 2.0
"""Timeout for an answer of the server behind a socket [s]."""
DISK_TIMEOUT_S: Final = 5.0
"""Timeout for reading or writing a file on a disk [s]."""


async def call_in_thread(function: Callable[[], T], name: str) -> T:
    """Call a function in a new daemon thread and return its result, or raise its exception. For asyncio.

    If the caller is cancelled, the thread continues.

    Raises:
        RuntimeError: The function raised StopIteration, which no future accepts, or an exception that is not
            an Exception.
        ThreadStartError: The thread could not be started.
        Exception: The function raised it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        elif isinstance(error, StopIteration):
            done.set_exception(RuntimeError(f"StopIteration in thread {name}"))
        else:
            done.set_exception(error)

    def run() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = function()
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = RuntimeError(f"{type(error).__name__} in thread {name}")
        with suppress(RuntimeError):  # the loop is closed: there is no waiter left
            loop.call_soon_threadsafe(settle, result, failure)

    DaemonThread(run, name).start()
    return await done


async def run_with_timeout(function: Callable[[], T], timeout_s: float | None) -> T:
    """Call a function in a new daemon thread and return its result, with a timeout unless it is None.

    Raises TimeoutError: the function did not return in time; its thread is abandoned.
    """
    async with asyncio.timeout(timeout_s):
        return await call_in_thread(function, "dh-pods-file")


async def wait_at_shutdown(call: Coroutine[Any, Any, object], timeout_s: float) -> bool:
    """Wait until a coroutine ends, in a task that may have been cancelled; return False at the timeout.

    The coroutine begins even with a timeout of zero, and is cancelled at the timeout. In a cancelled task,
    ``asyncio.timeout`` of Python 3.11.0 to 3.11.2 raises CancelledError in place of TimeoutError, which would
    end the rest of a shutdown.

    Raises:
        Exception: The coroutine raised it.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s)
    finally:
        task.cancel()  # no effect if it is done
    if done:
        task.result()
    return bool(done)


def timeout_text(path: object, timeout_s: float) -> str:
    """Return the error text for a file or socket that did not answer in time."""
    return f"{path}: no answer within {timeout_s:g} s"


class HungGuard:
    """Runner of blocking calls with a timeout, at most one at a time for each key (a path or socket).

    While a call for a key hangs, further calls for the key fail at once instead of starting threads.
    """

    def __init__(self) -> None:
        self._hanging: set[object] = set()

    async def run(self, key: object, function: Callable[[], T], timeout_s: float) -> T:
        """Call a function in a new daemon thread and return its result.

        Raises TimeoutError: the function did not return in time, or an earlier call for ``key`` still hangs.
        """
        if key in self._hanging:
            raise TimeoutError
        self._hanging.add(key)

        def call() -> T:
            try:
                return function()
            finally:
                self._hanging.discard(key)

        try:
            return await run_with_timeout(call, timeout_s)
        except ThreadStartError:
            self._hanging.discard(key)
            raise


# --- worker pool -------------------------------------------------------------------------------------------

P = ParamSpec("P")

QUEUE_MAX: Final = 64
"""Largest number of calls that wait in the queue of a pool."""
SLOW_CALL_S: Final = 10.0
"""Duration after which a call of a SerialWorker is logged as slow [s]."""
SHUTDOWN_S: Final = 0.8
"""Time that SerialWorker.finish() waits at shutdown [s]."""

_numbers: Final = count(1)  # makes thread names unique in the process

log = get_logger(__name__)


class PoolFull(Exception):
    """A call was refused because the queue of its pool is full."""


class WorkerPool:
    """Pool of at most ``threads`` daemon threads that run calls of one asyncio loop, with a bounded queue.

    Calls begin in the order in which they were queued.
    """

    def __init__(self, name: str, threads: int, waiting_max: int = QUEUE_MAX) -> None:
        """Create a pool that has no threads yet; ``name`` is the prefix of its threads' names."""
        self._name = name
        self._threads_max = threads
        self._waiting_max = waiting_max
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], Callable[[], None]]] = deque()
        self._threads = 0
        self._idle = 0
        self._closed = False
        self._complaints = LogRateLimiter()

    async def call(self, function: Callable[[], T], *, run_even_if_abandoned: bool = False) -> T:
        """Call a function in a thread of the pool and return its result, or raise its exception.

        If the caller is cancelled before the function begins, the function is called only with
        ``run_even_if_abandoned``.

        Raises:
            PoolFull: The queue is full.
            ThreadStartError: The pool has no thread, and none could be started.
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
        """Wait until all calls that are queued now have ended, at most `timeout_s` seconds.

        Only for a pool with one thread, which runs the calls in their order.
        """
        if self._threads:
            with suppress(PoolFull):
                await wait_at_shutdown(self.call(lambda: None), timeout_s)

    def close(self) -> None:
        """End the pool's threads once they have run all queued calls. Never blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _enqueue(self, work: Callable[[], Callable[[], None]]) -> None:
        with self._changed:
            waiting = len(self._waiting)
            if waiting >= self._waiting_max:
                if times := self._complaints.tick():
                    log.warning(
                        "worker pool %s: queue of %d calls is full: a disk may hang; refused %d calls",
                        self._name,
                        waiting,
                        times,
                    )
                raise PoolFull(
                    f"worker pool {self._name}: {waiting} calls wait already, limit {self._waiting_max}"
                )
            if waiting >= self._idle and self._threads < self._threads_max:
                name = f"{self._name}-{next(_numbers)}"
                try:
                    DaemonThread(self._run_thread, name).start()
                    self._threads += 1
                except ThreadStartError:
                    if not self._threads:  # otherwise the call waits for one of these
                        raise
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
    """Call a function in a pool's thread.

    Returns a function that passes the result or exception to the caller, for the caller's event loop.
    """
    try:
        return partial(_settle, partial(done.set_result, function()))
    except BaseException as error:
        return partial(_settle, partial(done.set_exception, error))


def _settle(settle: Callable[[], None]) -> None:
    with suppress(InvalidStateError):  # the caller was cancelled
        settle()


class SerialWorker:
    """Thread that runs calls of one asyncio loop one after the other, also calls whose caller was cancelled.

    State that only these calls use therefore needs no lock.
    """

    def __init__(self, name: str = "dh-files", slow_s: float = SLOW_CALL_S) -> None:
        """Create a worker; a call that takes longer than ``slow_s`` is logged once as slow."""
        self._pool = WorkerPool(name, threads=1, waiting_max=sys.maxsize)
        self._slow_s = slow_s
        self._hangs = False

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the worker's thread and return its result, or raise its exception."""
        slow = asyncio.get_running_loop().call_later(self._slow_s, self._log_slow)
        try:
            return await self._pool.call(function, run_even_if_abandoned=True)
        finally:
            slow.cancel()

    async def finish(self, function: Callable[[], object]) -> None:
        """Queue a last call at shutdown and wait for it up to SHUTDOWN_S.

        After one such wait timed out, further calls are not waited for.
        """
        if not await wait_at_shutdown(self.call(function), 0.0 if self._hangs else SHUTDOWN_S):
            self._hangs = True

    def close(self) -> None:
        """End the worker's thread once its queue is empty. Never blocks."""
        self._pool.close()

    def _log_slow(self) -> None:
        log.warning(
            "driver sockets: existence not checked: a file operation takes longer than %g s; the disk may "
            "hang",
            self._slow_s,
        )


class LatestJob(Generic[P]):
    """Runner of one job at a time in a thread; a newer job replaces the job that waits.

    A thread exists only while a job runs.
    """

    def __init__(self, run: Callable[P, None]) -> None:
        """Create a runner without a thread; a job is a call of ``run`` with the arguments of submit()."""
        self._run_job = run
        self._lock = threading.Lock()
        self._next: Callable[[], None] | None = None
        self._is_busy = False

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run ``run`` with these arguments after the current job; replaces a waiting job. Never blocks."""
        with self._lock:
            self._next = partial(self._run_job, *args, **kwargs)
            if not self._is_busy:
                DaemonThread(self._run, "dh-pods-record").start()
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
                log.exception(
                    "history: uses of devices not recorded: internal error; next attempt at the next poll"
                )
