"""Where a driver's own functions run: async ones in the loop they belong to, plain ones right here.

The driver may be an asyncio program, a Trio program, or neither. What it does in its own loop or thread holds
up nobody else; whoever waits for it here is a thread that can be left behind.
"""

import asyncio
import concurrent.futures
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import trio

from agent.prepare.errors import DriverError, TransientError

T = TypeVar("T")

ENDED: Final = "the driver's event loop has ended"
LOOK_S: Final = 1.0
"""How often whoever waits for a function in a loop of asyncio's looks whether the loop is closed [s]."""


class CallbackRunner:
    """The loop that was running when this was made, asyncio's or Trio's, if any."""

    def __init__(self) -> None:
        self._trio = trio.lowlevel.current_trio_token() if trio.lowlevel.in_trio_task() else None
        self._loop: asyncio.AbstractEventLoop | None = None
        if self._trio is None:
            with suppress(RuntimeError):  # there is none of asyncio's either
                self._loop = asyncio.get_running_loop()

    @property
    def is_here(self) -> bool:
        """The caller runs in that very loop."""
        here = CallbackRunner()
        return (here._trio, here._loop) == (self._trio, self._loop) != (None, None)

    @property
    def has_ended(self) -> bool:
        """There was a loop, and there is none any more: its async functions can never run again."""
        if self._trio is not None:
            try:
                self._trio.run_sync_soon(_nothing, idempotent=True)
            except trio.RunFinishedError:
                return True
        return self._loop is not None and not self._loop.is_running()

    def call(self, function: Callable[..., T | Awaitable[T]], *args: object) -> T:
        """Calls the function and waits for what comes of it. In a thread that may wait for ever.

        An async function runs in the host's loop; without one, in a loop of its own, right here.

        Raises:
            TransientError: ``driver.shutting_down``: the host's loop has ended. ``driver.cancelled``: it is
                about to, or has cancelled the function for a reason of its own.
            DriverError: the function tried to end the thread.
            Exception: what the function raised.
        """
        try:
            return cast(T, self._call(function, *args))
        except (asyncio.CancelledError, concurrent.futures.CancelledError, trio.Cancelled):
            raise TransientError("the driver's event loop cancelled it", code="driver.cancelled") from None
        except Exception:
            raise
        except BaseException as error:
            raise DriverError(f"the driver raised {type(error).__name__}", code="driver.bug.exit") from None

    async def finish(self, function: Callable[[], T]) -> T:
        """Calls a plain function that blocks for a while, in another thread; from a task of the host's.

        It is waited for even if the task is cancelled meanwhile.
        """
        if self._trio is not None:
            limiter = trio.CapacityLimiter(1)  # those of the host may all be taken by what hangs
            with trio.CancelScope(shield=True):
                return await trio.to_thread.run_sync(function, limiter=limiter)
        calling = asyncio.ensure_future(call_in_thread(function, name="dh-wait"))
        cancelled: asyncio.CancelledError | None = None
        while not calling.done():
            try:
                await asyncio.wait({calling})
            except asyncio.CancelledError as error:  # as often as it comes
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return calling.result()

    def _call(self, function: Callable[..., Any], *args: object) -> Any:
        if inspect.iscoroutinefunction(function):
            return self._wait(functools.partial(function, *args))
        result = function(*args)
        if inspect.isawaitable(result):
            return self._wait(functools.partial(_await, result))
        return result

    def _wait(self, function: Callable[[], Awaitable[Any]]) -> Any:
        if self._trio is not None:
            try:
                return trio.from_thread.run(function, trio_token=self._trio)
            except trio.RunFinishedError as error:
                raise TransientError(ENDED, code="driver.shutting_down") from error
        if self._loop is None:
            return asyncio.run(_coroutine(function))
        if not self._loop.is_running():
            raise TransientError(ENDED, code="driver.shutting_down")
        done = asyncio.run_coroutine_threadsafe(_coroutine(function), self._loop)
        while not concurrent.futures.wait({done}, LOOK_S).done:
            if self._loop.is_closed():  # and forgot what ran in it
                raise TransientError(ENDED, code="driver.shutting_down")
        return done.result()


async def call_in_thread(function: Callable[[], T], name: str) -> T:
    """Calls it in a daemon thread of its own: one that hangs can be left behind, and takes nobody's place."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        elif isinstance(error, StopIteration):  # which no future takes
            done.set_exception(RuntimeError("StopIteration in a handler of a claim"))
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
            failure = RuntimeError(f"{type(error).__name__} in a handler of a claim")
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


async def _coroutine(function: Callable[[], Awaitable[T]]) -> T:
    return await function()


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _nothing() -> None:
    """Only to see whether it can be called."""
