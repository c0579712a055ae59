"""Lock that serializes a driver's prepares and unprepares across all its instances on the Kubernetes node.

The lock is held for a call of the driver, and for nothing else. Within the process the order is first come,
first served. Between processes it is a lock on a file, which the kernel releases when its holder ends,
however it ends.
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
from agent.system.files import unlock

FILE: Final = "serialize.lock"
"""Name of the file in the driver's directory; Kubernetes' own drivers use the same."""
POLL_S: Final = 0.05
"""Interval of attempts for a lock that another instance holds: a thread that waits in the kernel cannot be
cancelled."""


class SerializeLock:
    """Lock as one instance of the driver uses it. Thread-safe; not reentrant."""

    def __init__(self, directory: Path) -> None:
        """Create the lock. The directory must exist when the lock is acquired."""
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._waiters: deque[threading.Event] = deque()
        """Waiting threads; the first holds the lock, and its event is set."""

    @contextmanager
    def hold(self, until_s: float) -> Iterator[None]:
        """Hold the lock; blocks until it is acquired.

        Args:
            until_s: Time of :func:`time.monotonic` at which waiting ends; a free lock is acquired even later.

        Raises:
            TransientError: The lock was not acquired: ``deadline`` behind other threads of this instance,
                ``lock.timeout`` behind another instance.
            OSError: The lock's file cannot be created or locked.
        """
        self._enqueue(until_s)
        try:
            fd = self._lock_file(until_s)
            try:
                yield
            finally:
                unlock(fd)
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
        raise TransientError("earlier calls of the driver were not done in time", code="deadline")

    def _release(self) -> None:
        with self._lock:
            self._waiters.popleft()
            if self._waiters:
                self._waiters[0].set()

    def _lock_file(self, until_s: float) -> int:
        while (fd := self._try_lock()) is None:
            if time.monotonic() >= until_s:
                raise TransientError(
                    f"another instance of the driver holds {FILE}; not released in time",
                    code="lock.timeout",
                )
            time.sleep(POLL_S)
        return fd

    def _try_lock(self) -> int | None:
        """Return the descriptor of the locked file; None: another instance holds the lock."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
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
