"""One at a time: a driver's prepares and unprepares, across all of its instances on the node.

The turn is held for a call of the driver's, and for nothing around it. Within the process the order is that
of the asking. Between processes it is a lock on a file, which the kernel opens when its holder ends, however
that happens.
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
from agent.system.flock import unlock

FILE: Final = "serialize.lock"
"""In the driver's directory; Kubernetes' own drivers use the same."""
POLL_S: Final = 0.05
"""How often a lock that another instance holds is tried again: a thread that waits in the kernel cannot be
called back."""


class SerializeLock:
    """The turns of one instance. A thread has one at a time."""

    def __init__(self, directory: Path) -> None:
        """The directory must be there when somebody asks for a turn."""
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._line: deque[threading.Event] = deque()
        """The first has the turn, and is set; the others wait."""

    @contextmanager
    def hold(self, until_s: float) -> Iterator[None]:
        """Holds the turn, once it has come; blocks until then.

        Args:
            until_s: How long to wait, as :func:`time.monotonic` has it; one that is free comes even later.

        Raises:
            TransientError: it did not come: ``deadline`` behind others of this instance, ``lock.timeout``
                behind another instance.
            OSError: the lock's file cannot be made or locked.
        """
        self._queue(until_s)
        try:
            fd = self._hold(until_s)
            try:
                yield
            finally:
                unlock(fd)
        finally:
            self._leave()

    def _queue(self, until_s: float) -> None:
        place = threading.Event()
        with self._lock:
            self._line.append(place)
            self._line[0].set()
        if place.wait(min(max(0.0, until_s - time.monotonic()), threading.TIMEOUT_MAX)):
            return
        with self._lock:
            if place.is_set():  # it came in this moment
                return
            self._line.remove(place)
        raise TransientError("what came before it was not done in time", code="deadline")

    def _leave(self) -> None:
        with self._lock:
            self._line.popleft()
            if self._line:
                self._line[0].set()

    def _hold(self, until_s: float) -> int:
        while (fd := self._try()) is None:
            if time.monotonic() >= until_s:
                raise TransientError(
                    f"another instance of the driver holds {FILE}; it was not let go in time",
                    code="lock.timeout",
                )
            time.sleep(POLL_S)
        return fd

    def _try(self) -> int | None:
        """The locked file's descriptor; None if another instance holds it."""
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
