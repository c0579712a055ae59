"""Threads that run an asyncio or a Trio event loop, and report the exception that ends the loop."""

import asyncio
import contextlib
import errno
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import trio

from agent.errors import LACK_ERRNOS, ProbeError, unwrap_error
from agent.system.output import LogRateLimiter, get_logger
from agent.system.threads.thread_start import DaemonThread, ThreadStartError

_LACK_ERRNOS: Final = LACK_ERRNOS | {errno.ENOSPC}
"""Errnos of accept() and epoll_ctl() when descriptors, memory or the watches of a user are used up.

asyncio retries accept() every second and would log a hundred tracebacks each time.
"""

START_RETRY_S: Final = 1.0
"""Time until a Trio thread that lacked descriptors or memory begins again [s]."""
START_LIMIT_S: Final = 60.0
"""Default of the longest wait until an asyncio thread is ready [s].

Only a thread that hangs takes so long. systemd waits 90 s for the agent, and the manifests' startup probes
wait 120 s: a busy node must not end the agent earlier.
"""

log = get_logger(__name__)

AsyncioMain = Callable[[Callable[[], None]], Awaitable[None]]
"""Coroutine function that an AsyncioThread runs until it is cancelled.

Its argument is a function that it calls once it is ready.
"""
TrioTask = Callable[[], Awaitable[None]]
"""Coroutine function that a TrioThread runs until it is cancelled."""


class LoopThread(ABC):
    """Daemon thread that runs an event loop; the process can end even if the loop hangs."""

    def __init__(self, on_failure: Callable[[BaseException], None], name: str) -> None:
        """Create a thread that is not started.

        Args:
            on_failure: Called with the exception that ended the event loop.
            name: Name of the thread.
        """
        self._on_failure = on_failure
        self._thread = DaemonThread(self._run, name)
        self._lock = threading.Lock()  # guards the state shared by start, stop and the thread
        self._stopping = threading.Event()

    @property
    def is_alive(self) -> bool:
        """True while the thread of the event loop runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """True if the caller runs in the event loop's thread."""
        return threading.current_thread() is self._thread

    @abstractmethod
    def _run(self) -> None:
        """Run the event loop, in the new thread, until it ends."""

    def _start_thread(self) -> None:
        """Start a new thread object, because this process may be a fork of the one that created the first.

        Python 3.13 and later regard threads that were created before a fork as ended in the child.
        """
        if self._thread.ident is None:
            self._thread = DaemonThread(self._run, self._thread.name)
        self._thread.start()

    def _join(self, timeout_s: float) -> bool:
        """Wait for the end of the event loop's thread.

        Returns True if it has ended or was never started, False after the timeout.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


class AsyncioThread(LoopThread):
    """Thread that runs one coroutine function, ``main``, in asyncio's own loop, even if a driver uses uvloop.

    An exception of ``main`` is raised by :meth:`start` if ``main`` is not ready yet, and by :meth:`stop` if
    ``main`` is being stopped. In between, ``on_failure`` gets the exception; a RuntimeError if ``main``
    returns by itself.
    """

    def __init__(
        self, main: AsyncioMain, *, on_failure: Callable[[BaseException], None], name: str = "dh-io"
    ) -> None:
        super().__init__(on_failure, name)
        self._main = main
        self._ready: Future[None] = Future()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._complaints = LogRateLimiter()

    def start(self, timeout_s: float = START_LIMIT_S) -> None:
        """Start the thread and block until ``main`` is ready.

        Raises:
            RuntimeError: The thread was stopped before ``main`` was ready.
            TimeoutError: ``main`` was not ready in time; it keeps running until :meth:`stop`.
            BaseException: ``main`` raised it before it was ready.
        """
        with self._lock:
            if self._stopping.is_set():
                raise self._stopped_error()
            self._start_thread()
        self._ready.result(timeout_s)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Cancel ``main`` and wait for the end of the thread. Must not be called in the thread itself.

        Returns:
            True if the thread has ended; False after the timeout: the thread hangs and is abandoned.

        Raises BaseException: ``main`` raised it while it was cancelled.
        """
        with self._lock:
            self._stopping.set()
            loop, task = self._loop, self._task
        if self._thread.is_alive() and loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just closed by itself
                loop.call_soon_threadsafe(task.cancel)
        has_ended = self._join(timeout_s)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return has_ended

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._supervise())
        except asyncio.CancelledError:
            pass
        except BaseException as raised:  # whatever main raises goes to start, stop or on_failure
            error = raised
        if self._stopping.is_set():
            self._failure = error
            if not self._ready.done():
                self._ready.set_exception(self._stopped_error())
            return
        error = error or RuntimeError(
            f"thread {self._thread.name}: its coroutine ended before stop() was called"
        )
        if self._ready.done():
            self._on_failure(error)
        else:
            self._ready.set_exception(error)

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle_exception)
        with self._lock:
            self._loop, self._task = loop, asyncio.current_task()
            if self._stopping.is_set():
                return
        await self._main(self._set_ready)

    def _handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception that no task of the loop caught; a lack of a resource at most once a minute.

        A connection that the kernel does not watch for data is closed: its client would wait without end.
        """
        error, sock = context.get("exception"), context.get("socket")
        transport = getattr(getattr(context.get("handle"), "_callback", None), "__self__", None)
        if isinstance(transport, asyncio.Transport):
            sock = transport.get_extra_info("socket")
            if sock.fileno() >= 0:  # abort() of an ended connection may raise AttributeError
                transport.abort()
        if sock is None or not (isinstance(error, OSError) and error.errno in _LACK_ERRNOS):
            loop.default_exception_handler(context)
        elif count := self._complaints.tick():
            facts = (sock.getsockname(), error.strerror, count)
            log.error("socket %s: cannot accept connections: %s; %d attempts failed; will retry", *facts)

    def _stopped_error(self) -> RuntimeError:
        return RuntimeError(f"thread {self._thread.name}: stopped before its event loop was ready")

    def _set_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)


class TrioThread(LoopThread):
    """Thread that runs tasks in a Trio loop until it is stopped or a task raises."""

    def __init__(
        self,
        open_tasks: Callable[[], Sequence[TrioTask]],
        on_failure: Callable[[BaseException], None],
        name: str,
    ) -> None:
        """Create a thread that is not started.

        Args:
            open_tasks: Called in the thread before the loop starts, so it may block. Returns the tasks. It is
                called again after a ProbeError, a ThreadStartError, or an OSError with one of _LACK_ERRNOS.
            on_failure: Called in the thread with a task's exception, after all tasks were cancelled.
            name: Name of the thread.
        """
        super().__init__(on_failure, name)
        self._open_tasks = open_tasks
        self._runs_tasks = False
        self._complaints = LogRateLimiter()
        self._stop: Callable[[], None] | None = None

    def start(self) -> None:
        """Start the thread of the Trio loop. Never blocks."""
        self._start_thread()

    def stop(self, timeout_s: float) -> bool:
        """Cancel the tasks and wait for the end of the thread. Must not be called in the thread itself.

        Returns:
            True if the thread has ended; False after the timeout: the thread hangs and is abandoned.
        """
        with self._lock:
            self._stopping.set()
            if self._stop is not None:
                self._stop()
        return self._join(timeout_s)

    def _run(self) -> None:
        try:
            tasks: Sequence[TrioTask] | None = None
            while not self._stopping.is_set():
                try:
                    if tasks is None:
                        tasks = self._open_tasks()
                    return trio.run(self._supervise, tasks)
                except (OSError, ProbeError, ThreadStartError) as lack:
                    is_passing = not isinstance(lack, OSError) or lack.errno in _LACK_ERRNOS
                    if self._runs_tasks or not is_passing:
                        raise
                    if count := self._complaints.tick():
                        facts = (self._thread.name, lack, count)
                        log.warning("thread %s: cannot begin: %s; %d attempts failed; will retry", *facts)
                    self._stopping.wait(START_RETRY_S)
        except BaseException as raised:  # whatever a task raises goes to on_failure
            error = unwrap_error(raised)
            if self._stopping.is_set():
                log.warning(
                    "thread %s: a task failed during shutdown; ignored", self._thread.name, exc_info=error
                )
            else:
                self._on_failure(error)

    async def _supervise(self, tasks: Sequence[TrioTask]) -> None:
        self._runs_tasks = True
        token, stop = trio.lowlevel.current_trio_token(), trio.Event()

        def stop_from_thread() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(stop.set)

        with self._lock:
            self._stop = stop_from_thread
            if self._stopping.is_set():
                return
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)
            await stop.wait()
            nursery.cancel_scope.cancel()
