"""The asyncio thread: a loop of its own, one coroutine in it, and supervision.

What runs in the loop is the caller's. Inside somebody else's asyncio program the same coroutine
runs as a task of their loop, and this file is not needed.
"""

import asyncio
import contextlib
import errno
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Final

from agent.system.rate_limit import RateLimiter

OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Why asyncio cannot accept a connection. It tries again a second later, and complains each time with a
hundred tracebacks."""

log = logging.getLogger(__name__)

Main = Callable[[Callable[[], None]], Awaitable[None]]
"""Called in the thread with ``ready``, which it calls once when it is up. Runs until cancelled."""


class IoThread:
    """Runs a coroutine in a thread of its own, and never loses its exception.

    Before ``ready``, an exception of ``main`` is raised by :meth:`start`. After it, ``on_failure``
    is called with it, in the thread; so is it with a RuntimeError if ``main`` returns unasked. What
    ``main`` raises while it is being stopped is raised by :meth:`stop`.

    The thread is a daemon thread: one that does not end cannot keep the process.
    """

    def __init__(
        self, main: Main, *, on_failure: Callable[[BaseException], None], name: str = "dh-io"
    ) -> None:
        self._main = main
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready: Future[None] = Future()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # between who starts and who stops it meanwhile
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._complaints = RateLimiter()

    def start(self, timeout_s: float = 5.0) -> None:
        """Starts the thread and returns when ``main`` is ready.

        Raises:
            RuntimeError: it was stopped before it was ready.
            TimeoutError: it was not ready in time; it keeps running until :meth:`stop`.
            BaseException: what ``main`` raised before it was ready.
        """
        with self._lock:
            if self._stopping:
                raise self._stopped()
            self._thread.start()
        self._ready.result(timeout_s)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Cancels ``main`` and waits for the thread. Any thread but this one may call it, repeatedly.

        Returns:
            Whether the thread has ended; if not, it is stuck, and left behind.

        Raises:
            BaseException: what ``main`` raised on its way out.
        """
        with self._lock:
            self._stopping = True
            loop, task = self._loop, self._task
        if self._thread.is_alive() and loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed by itself in this moment
                loop.call_soon_threadsafe(task.cancel)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner() as runner:
                runner.run(self._supervised())
        except asyncio.CancelledError:
            pass
        except BaseException as raised:  # handed on, whatever it is
            error = raised
        if self._stopping:
            self._failure = error
            if not self._ready.done():
                self._ready.set_exception(self._stopped())
            return
        error = error or RuntimeError(f"thread {self._thread.name} ended, and nobody had asked it to")
        if self._ready.done():
            self._on_failure(error)
        else:
            self._ready.set_exception(error)

    async def _supervised(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._complain)
        with self._lock:
            self._loop, self._task = loop, asyncio.current_task()
            if self._stopping:
                return
        await self._main(self._set_ready)

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Tells what happened where nobody could catch it; what would fill the log, once a minute."""
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
