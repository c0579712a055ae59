"""Asks those who may hang: each in a thread of its own, and nobody for long.

For a loop of asyncio's. What is asked, and what is made of the answer, is the caller's business.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

SOCKET_S: Final = 2.0
"""How long whoever serves a socket may take [s]."""
DISK_S: Final = 5.0
"""How long a file may take [s]."""


async def run_with_timeout(work: Callable[[], T], limit_s: float) -> T:
    """What a function returns that blocks on a disk. One that hangs is left behind: its thread keeps nobody.

    Raises:
        TimeoutError: It did not return in time.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # it is raised again where it is waited for
            failure = error
        with suppress(RuntimeError):  # nobody waits any more, the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="dh-pods-file", daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await done


def late(place: object, limit_s: float) -> str:
    """Why there is nothing: it took too long."""
    return f"{place}: no answer within {limit_s:g} s"


class HungGuard:
    """For those who ask again and again: whoever still hangs is not asked a second time."""

    def __init__(self) -> None:
        self._hanging: set[object] = set()

    async def in_time(self, place: object, work: Callable[[], T], limit_s: float) -> T:
        """As :func:`in_time`; late at once while the last that was asked of this place has not returned."""
        if place in self._hanging:
            raise TimeoutError
        self._hanging.add(place)

        def run() -> T:
            try:
                return work()
            finally:
                self._hanging.discard(place)

        try:
            return await run_with_timeout(run, limit_s)
        except RuntimeError:  # there was no thread to be had: nobody hangs
            self._hanging.discard(place)
            raise
