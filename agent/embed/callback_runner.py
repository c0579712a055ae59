"""Runner of a DRA driver's functions: async ones in the driver's loop, plain ones in the calling thread.

The driver may be an asyncio program, a Trio program, or neither. If a function of the driver hangs, the
thread that called it can be abandoned, so nothing else is delayed.
"""

import asyncio
import concurrent.futures
import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import trio

from agent.prepare.errors import DriverError, TransientError
from agent.system.threads import trio_calls, worker_threads

T = TypeVar("T")

LOOP_ENDED: Final = "the driver's event loop has ended"
POLL_S: Final = 1.0
"""Interval at which a waiting caller checks whether the driver's asyncio loop is closed [s]."""


class DriverCallbackRunner:
    """Runner of the DRA driver's functions; created in the driver's event loop, if it has one."""

    def __init__(self) -> None:
        self._trio = trio.lowlevel.current_trio_token() if trio.lowlevel.in_trio_task() else None
        self._loop: asyncio.AbstractEventLoop | None = None
        if self._trio is None:
            with suppress(RuntimeError):  # no asyncio loop runs either
                self._loop = asyncio.get_running_loop()

    @property
    def runs_in_driver_loop(self) -> bool:
        """Whether the caller runs in the driver's event loop."""
        current = DriverCallbackRunner()
        return (current._trio, current._loop) == (self._trio, self._loop) != (None, None)

    @property
    def has_loop_ended(self) -> bool:
        """Whether the driver's event loop has ended, so that its async functions can never run again."""
        if self._trio is not None:
            try:
                self._trio.run_sync_soon(bool, idempotent=True)  # does nothing; refused if the loop has ended
            except trio.RunFinishedError:
                return True
        return self._loop is not None and not self._loop.is_running()

    def call(self, function: Callable[..., T | Awaitable[T]], *args: object) -> T:
        """Call a plain or async function of the driver and wait for its result. May block forever.

        An async function runs in the driver's loop; without a loop, in a new one in this thread.

        Raises:
            TransientError: The driver's loop has ended (code ``driver.shutting_down``) or has cancelled the
                function (``driver.cancelled``).
            DriverError: The function raised SystemExit or the like.
            Exception: Any other exception of the function.
        """
        try:
            return cast(T, self._call(function, *args))
        except (asyncio.CancelledError, concurrent.futures.CancelledError, trio.Cancelled):
            raise TransientError(
                "the driver's event loop cancelled the call", code="driver.cancelled"
            ) from None
        except Exception:
            raise
        except BaseException as error:
            raise _exit_error(error) from None

    async def run_blocking(self, function: Callable[[], T]) -> T:
        """Run a blocking function in a thread, and return its result to a task of the driver's loop.

        The task waits for the end of the function even if the task is cancelled meanwhile.
        """
        if self._trio is not None:
            with trio.CancelScope(shield=True):
                return await trio_calls.call_in_thread(function, "dh-wait")
        calling = asyncio.ensure_future(worker_threads.call_in_thread(function, "dh-wait"))
        cancelled: asyncio.CancelledError | None = None
        while not calling.done():
            try:
                await asyncio.wait({calling})
            except asyncio.CancelledError as error:  # may come several times
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return calling.result()

    def _call(self, function: Callable[..., Any], *args: object) -> Any:
        if inspect.iscoroutinefunction(function):
            return self._run(functools.partial(function, *args))
        result = function(*args)
        if inspect.isawaitable(result):
            return self._run(functools.partial(_await, result))
        return result

    def _run(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Run an async function in the driver's loop and wait for its result."""
        if self._trio is not None:
            try:
                return trio.from_thread.run(function, trio_token=self._trio)
            except trio.RunFinishedError as error:
                raise TransientError(LOOP_ENDED, code="driver.shutting_down") from error
        if self._loop is None:
            return asyncio.run(_coroutine(function))
        if not self._loop.is_running():
            raise TransientError(LOOP_ENDED, code="driver.shutting_down")
        coroutine = _coroutine(function)
        try:
            done = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # the loop was closed meanwhile
            coroutine.close()
            raise TransientError(LOOP_ENDED, code="driver.shutting_down") from error
        while not concurrent.futures.wait({done}, POLL_S).done:
            if self._loop.is_closed():  # a closed loop drops its tasks without a result
                raise TransientError(LOOP_ENDED, code="driver.shutting_down")
        return done.result()


async def _coroutine(function: Callable[[], Awaitable[T]]) -> T:
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as error:  # asyncio would end the driver's loop with them
        raise _exit_error(error) from None


def _exit_error(error: BaseException) -> DriverError:
    text = f"the driver's function raised {type(error).__name__}, which ends a process"
    return DriverError(text, code="driver.bug.exit")


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable
