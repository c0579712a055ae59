"""A thread with a Trio loop of its own, inside somebody else's program, and what becomes of its exception."""

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from agent.errors import root_of

log = logging.getLogger(__name__)

Task = Callable[[], Awaitable[None]]
"""It runs until cancelled."""


class TrioThread:
    """Runs tasks until it is stopped, or one of them raises.

    It is a daemon thread: one that does not end cannot keep the process.
    """

    def __init__(
        self, begin: Callable[[], Sequence[Task]], on_failure: Callable[[BaseException], None], name: str
    ) -> None:
        """
        Args:
            begin: Called in the thread, before there is a loop: it may block. Gives the tasks; if one of
                them raises, all are cancelled.
            on_failure: Called in the thread with what was raised, when all of them have ended.
            name: Of the thread.
        """
        self._begin = begin
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._stopping = False
        self._stop: Callable[[], None] | None = None

    def start(self) -> None:
        """Starts the thread, and waits for nothing."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it has still to end."""
        return self._thread.is_alive()

    @property
    def is_ours(self) -> bool:
        """Whether it is this very thread that asks."""
        return threading.current_thread() is self._thread

    def stop(self, timeout_s: float) -> bool:
        """Cancels the tasks. From any other thread, any number of times.

        Returns:
            Whether the thread has ended; if not, it hangs, and is left behind.
        """
        with self._lock:
            self._stopping = True
            if self._stop is not None:
                self._stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            trio.run(self._main, self._begin())
        except BaseException as raised:  # handed on, whatever it is
            error = root_of(raised)
            if self._stopping:
                log.warning("%s failed while it ended", self._thread.name, exc_info=error)
            else:
                self._on_failure(error)

    async def _main(self, tasks: Sequence[Task]) -> None:
        token, stop = trio.lowlevel.current_trio_token(), trio.Event()

        def from_outside() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(stop.set)

        with self._lock:
            self._stop = from_outside
            if self._stopping:
                return
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)
            await stop.wait()
            nursery.cancel_scope.cancel()
