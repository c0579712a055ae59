"""Event loops in a thread of their own, asyncio or Trio, with supervision of what runs in them."""

import asyncio
import contextlib
import errno
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import trio

from agent.errors import root_of
from agent.system.timing import RateLimiter

OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of asyncio's accept(), which it retries every second and logs with a hundred tracebacks each
time."""

log = logging.getLogger(__name__)

Main = Callable[[Callable[[], None]], Awaitable[None]]
"""Coroutine function of an asyncio thread. It calls its argument ``ready`` once, and runs until cancelled."""
Task = Callable[[], Awaitable[None]]
"""Coroutine function of a Trio thread; it runs until cancelled."""


class LoopThread(ABC):
    """Daemon thread that runs an event loop; a loop that hangs cannot keep the process from ending."""

    def __init__(self, on_failure: Callable[[BaseException], None], name: str) -> None:
        """Create a thread; ``on_failure`` is called in it with the exception that ended the loop."""
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()  # guards the state shared by start, stop and the thread
        self._stopping = False

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    @abstractmethod
    def _run(self) -> None:
        """Run the loop. Called in the thread."""

    def _join(self, timeout_s: float) -> bool:
        """Wait for the thread. Returns True if it has ended or was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


class AsyncioThread(LoopThread):
    """Thread with an asyncio loop that runs one coroutine.

    Before ``ready``, an exception of ``main`` is raised by :meth:`start`. After it, ``on_failure`` is called
    with the exception, or with a RuntimeError if ``main`` returns by itself. An exception of ``main`` during
    :meth:`stop` is raised by :meth:`stop`.
    """

    def __init__(
        self, main: Main, *, on_failure: Callable[[BaseException], None], name: str = "dh-io"
    ) -> None:
        super().__init__(on_failure, name)
        self._main = main
        self._ready: Future[None] = Future()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._complaints = RateLimiter()

    def start(self, timeout_s: float = 5.0) -> None:
        """Start the thread and block until ``main`` is ready.

        Raises:
            RuntimeError: The thread was stopped before ``main`` was ready.
            TimeoutError: ``main`` was not ready in time; it keeps running until :meth:`stop`.
            BaseException: ``main`` raised it before it was ready.
        """
        with self._lock:
            if self._stopping:
                raise self._stopped()
            self._thread.start()
        self._ready.result(timeout_s)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Cancel ``main`` and wait for the thread. For any other thread; may be called repeatedly.

        Returns:
            True if the thread has ended; False: it hangs and is abandoned.

        Raises:
            BaseException: ``main`` raised it while it was cancelled.
        """
        with self._lock:
            self._stopping = True
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
            with asyncio.Runner() as runner:
                runner.run(self._supervised())
        except asyncio.CancelledError:
            pass
        except BaseException as raised:  # whatever main raises goes to start, stop or on_failure
            error = raised
        if self._stopping:
            self._failure = error
            if not self._ready.done():
                self._ready.set_exception(self._stopped())
            return
        error = error or RuntimeError(f"thread {self._thread.name} ended without a stop")
        if self._ready.done():
            self._on_failure(error)
        else:
            self._ready.set_exception(error)

    async def _supervised(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle_exception)
        with self._lock:
            self._loop, self._task = loop, asyncio.current_task()
            if self._stopping:
                return
        await self._main(self._set_ready)

    def _handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log exceptions that no task catches; repeated failures of accept() at most once a minute."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES and "socket" in context):
            loop.default_exception_handler(context)
        elif count := self._complaints.tick():
            where = context["socket"].getsockname()
            log.error("%s: cannot accept connections (%s); %d attempts", where, error.strerror, count)

    def _stopped(self) -> RuntimeError:
        return RuntimeError(f"thread {self._thread.name} was stopped before it was ready")

    def _set_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)


class TrioThread(LoopThread):
    """Thread with a Trio loop that runs tasks until it is stopped or one of them raises."""

    def __init__(
        self, open_tasks: Callable[[], Sequence[Task]], on_failure: Callable[[BaseException], None], name: str
    ) -> None:
        """Create a thread that is not started.

        Args:
            open_tasks: Called in the thread before the loop starts, so it may block. Returns the tasks; if
            one
                of them raises, all are cancelled.
            on_failure: Called in the thread with the exception, after all tasks have ended.
            name: Name of the thread.
        """
        super().__init__(on_failure, name)
        self._open_tasks = open_tasks
        self._stop: Callable[[], None] | None = None

    def start(self) -> None:
        """Start the thread. Never blocks."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Cancel the tasks and wait for the thread. For any other thread; may be called repeatedly.

        Returns:
            True if the thread has ended; False: it hangs and is abandoned.
        """
        with self._lock:
            self._stopping = True
            if self._stop is not None:
                self._stop()
        return self._join(timeout_s)

    def _run(self) -> None:
        try:
            trio.run(self._supervised, self._open_tasks())
        except BaseException as raised:  # whatever a task raises goes to on_failure
            error = root_of(raised)
            if self._stopping:
                log.warning("%s: failed during shutdown", self._thread.name, exc_info=error)
            else:
                self._on_failure(error)

    async def _supervised(self, tasks: Sequence[Task]) -> None:
        token, stop = trio.lowlevel.current_trio_token(), trio.Event()

        def stop_from_thread() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(stop.set)

        with self._lock:
            self._stop = stop_from_thread
            if self._stopping:
                return
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)
            await stop.wait()
            nursery.cancel_scope.cancel()
