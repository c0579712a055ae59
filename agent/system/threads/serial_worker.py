"""A thread for what a disk may hold up, beside a loop that must wait for none.

What is asked of it is done one after the other, in the order of the asking. So whatever is looked after here
needs no lock, and what comes last stays last, even behind a look that hung for an hour.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeVar

T = TypeVar("T")

SLOW_S: Final = 10.0
"""When somebody should know that a disk hangs [s]."""
END_S: Final = 0.8
"""How long the end waits for it, once [s]."""

log = logging.getLogger(__name__)


class SerialWorker:
    """The thread, and the loop's side of it. Of one loop.

    It is a daemon thread: one that hangs cannot keep the process.
    """

    def __init__(self, slow_s: float = SLOW_S) -> None:
        """``slow_s``: how long a function may take before it is told of, once."""
        self._slow_s = slow_s
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._hangs = False
        threading.Thread(target=self._run, name="dh-files", daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """Calls the function there, and waits for as long as it takes. Raises what it raises.

        Whoever does not wait to the end has it done all the same.
        """
        done: Future[T] = Future()
        self._asked.put(partial(_settle, function, done))
        slow = asyncio.get_running_loop().call_later(self._slow_s, self._complain)
        try:
            return await asyncio.wrap_future(done)
        finally:
            slow.cancel()

    async def finish(self, function: Callable[[], object]) -> None:
        """The same for what is done at the end: if the thread hangs it is left to it, for when it can."""
        try:
            async with asyncio.timeout(0.0 if self._hangs else END_S):
                await self.call(function)
        except TimeoutError:
            self._hangs = True

    def close(self) -> None:
        """Ends the thread when everything is done that was asked of it. Returns at once."""
        self._asked.put(None)

    def _complain(self) -> None:
        log.warning(
            "the driver's sockets cannot be looked after: a disk has not answered for %g s", self._slow_s
        )

    def _run(self) -> None:
        while (function := self._asked.get()) is not None:
            function()


def _settle(function: Callable[[], T], done: "Future[T]") -> None:
    try:
        settle = partial(done.set_result, function())
    except BaseException as error:
        settle = partial(done.set_exception, error)
    with suppress(InvalidStateError):  # nobody waits any more
        settle()
