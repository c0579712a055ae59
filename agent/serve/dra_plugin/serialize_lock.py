"""Lock that serializes a driver's prepares and unprepares across all its instances on the Kubernetes node.

Threads of one process acquire it in their order. Between processes it is a lock on a file, which the kernel
releases when the process ends.
"""

import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agent.prepare.errors import TransientError
from agent.system.files import unlock_and_close

FILE: Final = "serialize.lock"
"""Name of the locked file in the driver's directory, as in Kubernetes' own drivers."""
POLL_S: Final = 0.05
"""Time between two attempts to lock a file that another instance holds [s]."""


class SerializeLock:
    """Lock that all threads of all instances of a driver share. Thread-safe, not reentrant."""

    def __init__(self, directory: Path) -> None:
        """Create the lock of a driver's directory, which must exist when the lock is acquired."""
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._waiters: deque[threading.Event] = deque()
        """Event of each thread that holds the lock or waits. The first holds it, and its event is set."""

    @contextmanager
    def hold(self, until_s: float) -> Iterator[None]:
        """Hold the lock in a ``with`` block; blocks until it is acquired.

        Args:
            until_s: Time at which the wait ends, on the clock of :func:`time.monotonic`.

        Raises:
            TransientError: The lock was not acquired: code ``deadline`` if other threads of this instance
                hold it, ``lock.timeout`` if another instance does.
            OSError: The lock's file cannot be created or locked.
        """
        self._enqueue(until_s)
        try:
            fd = self._lock_file(until_s)
            try:
                yield
            finally:
                unlock_and_close(fd)
        finally:
            self._release()

    def _enqueue(self, until_s: float) -> None:
        turn = threading.Event()
        with self._lock:
            self._waiters.append(turn)
            self._waiters[0].set()
        if turn.wait(min(max(0.0, until_s - time.monotonic()), threading.TIMEOUT_MAX)):
            return
        with self._lock:
            if turn.is_set():  # acquired at this moment
                return
            self._waiters.remove(turn)
        raise TransientError(
            "earlier prepares or unprepares of this driver still hang, so this claim was not begun; "
            "restart the driver if they never end",
            code="deadline",
        )

    def _release(self) -> None:
        with self._lock:
            self._waiters.popleft()
            if self._waiters:
                self._waiters[0].set()

    def _lock_file(self, until_s: float) -> int:
        while (fd := self._try_lock()) is None:
            if time.monotonic() >= until_s:
                raise TransientError(
                    f"{FILE}: another instance of the driver did not release this lock in time",
                    code="lock.timeout",
                )
            time.sleep(POLL_S)
        return fd

    def _try_lock(self) -> int | None:
        """Try to lock the file once; return its descriptor, or None if another instance holds the lock."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(self._path), os.fstat(fd)):  # else it was removed meanwhile
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None
