"""Reads of whole files within a size limit, and helpers for files locked with flock(2).

A file that is read may be replaced meanwhile, be a pipe without a writer, or belong to root.
"""

import fcntl
import os
import stat
from contextlib import suppress
from errno import EACCES, EPERM
from pathlib import Path
from typing import NamedTuple

from agent.model.reading import Absence


class FileContent(NamedTuple):
    """Content of a file and the time of its last change."""

    data: bytes
    written_s: float
    """Time of the last write [s since 1970]."""


class ReadError(Exception):
    """Reason why a file could not be read; the text starts with the path."""

    def __init__(
        self, path: Path, reason: str, absence: Absence = Absence.UNREADABLE, errno: int = 0
    ) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason
        """Reason without the path."""
        self.absence = absence
        self.errno = errno
        """Error number of the failed system call; 0 if no system call failed."""

    @property
    def is_forbidden(self) -> bool:
        """True if the file exists but this user may not read it."""
        return self.errno in {EACCES, EPERM}


def read_bounded(path: Path, limit: int) -> FileContent:
    """Read the whole file. Blocks on the disk only.

    Args:
        path: A regular file, or a link to one.
        limit: Largest size that is read [bytes].

    Raises:
        ReadError: ABSENT if there is no such file, UNREADABLE for any other reason.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ReadError(path, "is not a regular file")
            data = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _read_error(path, error, Absence.ABSENT) from None
    except OSError as error:
        raise _read_error(path, error, Absence.UNREADABLE) from None
    if len(data) > limit:
        raise ReadError(path, f"is {max(found.st_size, len(data))} bytes, limit {limit}")
    return FileContent(data, found.st_mtime)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block


def _read_error(path: Path, error: OSError, absence: Absence) -> ReadError:
    return ReadError(path, error.strerror or str(error), absence, error.errno or 0)


def is_open_file(fd: int, path: Path) -> bool:
    """Return whether `fd` is open on the file that is at `path` now, and not on one that was replaced."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def unlock(fd: int) -> None:
    """Release the lock of `fd` and close it. Closing is not enough: a child forked meanwhile shares the
    lock."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
