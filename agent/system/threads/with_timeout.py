"""Blocking calls with a timeout, for asyncio. Each call runs in its own thread, which is abandoned if it
hangs."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

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


async def run_with_timeout(function: Callable[[], T], timeout_s: float) -> T:
    """Call a function in a new daemon thread and return its result, with a timeout.

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
