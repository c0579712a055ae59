"""Reading of whole files up to a size limit, and helpers for files locked with flock(2)."""

import fcntl
import os
import stat
from contextlib import suppress
from errno import EACCES, EPERM
from pathlib import Path
from typing import NamedTuple

from agent.model.reading import Absence


class FileContent(NamedTuple):
    """Content of a file, and the time of its last write."""

    data: bytes
    written_s: float
    """Time of the last write to the file [s since 1970]."""


class ReadError(Exception):
    """A file could not be read; the message is the path and the reason."""

    def __init__(
        self, path: Path, reason: str, absence: Absence = Absence.UNREADABLE, errno: int = 0
    ) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason
        """Reason why the file could not be read, without its path."""
        self.absence = absence
        self.errno = errno
        """errno of the failed system call; 0: no system call failed."""

    @property
    def is_forbidden(self) -> bool:
        """True: the file exists, but the process may not read it."""
        return self.errno in {EACCES, EPERM}


def read_bounded(path: Path, limit: int) -> FileContent:
    """Read a whole file. Blocks on the disk, but not on a pipe without a writer.

    Args:
        path: A regular file, or a link to one.
        limit: Largest accepted size of the file [bytes].

    Raises:
        ReadError: With absence ABSENT if the file does not exist, else UNREADABLE, also if it is too large.
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
        raise ReadError(path, f"file is {max(found.st_size, len(data))} bytes, limit {limit}")
    return FileContent(data, found.st_mtime)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block


def _read_error(path: Path, error: OSError, absence: Absence) -> ReadError:
    return ReadError(path, error.strerror or str(error), absence, error.errno or 0)


def is_current_file(fd: int, path: Path) -> bool:
    """Return True if descriptor `fd` is open on the file that now has the path `path`; False: it was
    replaced."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def unlock_and_close(fd: int) -> None:
    """Release the flock(2) lock of descriptor `fd` and close it. Closing alone keeps the lock if a forked
    child process has the descriptor too."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
