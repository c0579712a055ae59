"""Runs the steps of a prepare for callers of three kinds: plain ones, asyncio's and Trio's.

The only part of this package that waits. Nothing is decided here.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from agent.prepare.steps import Call, Pause, Step

T = TypeVar("T")

Steps = Generator[Step, Any, T]


def run_plain(steps: Steps[T], handler: Callable[[], object]) -> T:
    """Blocks its thread: in the handler, between two tries, and while a failure is told."""
    try:
        step = next(steps)
        while True:
            match step:
                case Call():
                    try:
                        result = handler()
                    except Exception as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(result)
                case Pause(seconds):
                    time.sleep(seconds)
                    step = steps.send(None)
                case _:
                    step = steps.send(step.function())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # of the generator's own type


async def run_asyncio(steps: Steps[T], handler: Callable[[], Awaitable[object]]) -> T:
    """In a task of asyncio's."""
    return await _run(steps, handler, asyncio.sleep, _in_thread)


async def run_trio(steps: Steps[T], handler: Callable[[], Awaitable[object]]) -> T:
    """In a task of Trio's."""
    import trio

    async def in_thread(function: Callable[[], object]) -> object:
        # a place of its own: those of the host may all be taken by handlers that hang
        limiter = trio.CapacityLimiter(1)
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)

    return await _run(steps, handler, trio.sleep, in_thread)


async def run_async(steps: Steps[T], handler: Callable[[], Awaitable[object]]) -> T:
    """In the loop that it is called in, asyncio's or Trio's."""
    return await (run_trio(steps, handler) if _in_trio() else run_asyncio(steps, handler))


async def _run(
    steps: Steps[T],
    handler: Callable[[], Awaitable[object]],
    sleep: Callable[[float], Awaitable[object]],
    in_thread: Callable[[Callable[[], object]], Awaitable[object]],
) -> T:
    try:
        step = next(steps)
        while True:
            match step:
                case Call():
                    try:
                        result = await handler()
                    except Exception as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(result)
                case Pause(seconds):
                    step = steps.send(await sleep(seconds))
                case _:
                    step = steps.send(await in_thread(step.function))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # of the generator's own type


def _in_trio() -> bool:
    """Whether the caller is a task of Trio's. Either loop can run inside the other."""
    if "trio" not in sys.modules:
        return False
    import trio

    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop of asyncio's runs here
        task = None
    return task is None and trio.lowlevel.in_trio_task()


async def _in_thread(function: Callable[[], object]) -> object:
    """Calls it in a thread of its own: those of the loop may all be taken by handlers that hang."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="dh-prepare", daemon=True).start()
    return await done
