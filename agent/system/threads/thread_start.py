"""Daemon threads whose start raises an error where ``threading.Thread.start()`` would wait without end."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

POLL_S: Final = 0.05
"""Interval at which start() checks whether a thread that has not begun still exists [s]."""


class ThreadStartError(RuntimeError):
    """A thread could not be started: a limit of tasks or of memory is reached."""


class DaemonThread(threading.Thread):
    """Daemon thread: the process can end even if the thread hangs. The kernel knows it by its name, too.

    ``threading.Thread.start()`` waits until the new thread sets an event. If the new thread has no memory for
    its first call, it ends without setting the event, and the caller would wait without end. Here the kernel
    thread holds the only reference to its first function, which is therefore gone when the thread has ended.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        """Create a daemon thread; :meth:`start` starts it."""
        super().__init__(target=target, name=name, daemon=True)
        self._first_call: Callable[[], object | None] = lambda: None
        self._started = _StartedEvent(lambda: self._first_call() is None)

    @property
    def _bootstrap(self) -> Callable[[], Any]:
        """Function that the new kernel thread runs first; start() reads this property once."""
        first_call = partial(super()._bootstrap)  # type: ignore[misc]
        self._first_call = weakref.ref(first_call)
        return first_call

    def run(self) -> None:
        """Set the thread's name in the kernel, which keeps 15 bytes of it, and call the target."""
        with contextlib.suppress(OSError, MemoryError):
            Path("/proc/thread-self/comm").write_text(self.name)
        super().run()

    def start(self) -> None:
        """Start the thread.

        Raises:
            ThreadStartError: The kernel started no further thread, or the new thread ended before it began.
            RuntimeError: This thread was started before.
        """
        try:
            super().start()
        except RuntimeError as error:
            if self.ident is not None:
                raise
            raise ThreadStartError(f"{error}: {self.name}") from None
        if not self._started.is_set():
            with threading._active_limbo_lock:  # type: ignore[attr-defined]
                threading._limbo.pop(self, None)  # type: ignore[attr-defined]
            raise ThreadStartError(f"can't start new thread: {self.name} had no memory for its first call")


class _StartedEvent(threading.Event):
    """Event that a new thread sets when it has begun; its wait() also ends when the thread is gone."""

    def __init__(self, is_gone: Callable[[], bool]) -> None:
        super().__init__()
        self._is_gone = is_gone

    def wait(self, timeout: float | None = None) -> bool:
        while not super().wait(POLL_S if timeout is None else timeout):
            if timeout is not None or self._is_gone():
                break
        return self.is_set()


def end_with_parent() -> None:
    """Let this process of a process pool end when its parent ends, even by SIGKILL."""
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    if parent := parent_process():
        DaemonThread(lambda: wait([parent.sentinel]) and os._exit(1), "dh-parent").start()
