"""A file, read as a whole and within a limit, or why it cannot be.

It may be replaced while it is read, be a pipe that nobody writes to, or belong to root. What stands in it is
the business of those who ask.
"""

import os
import stat
from errno import EACCES, EPERM
from pathlib import Path
from typing import NamedTuple

from agent.model.reading import Absence


class WholeFile(NamedTuple):
    """All that was in a file."""

    data: bytes
    written_s: float
    """When it was last written [s since 1970]."""


class ReadError(Exception):
    """Why there is nothing; the path first."""

    def __init__(
        self, path: Path, reason: str, absence: Absence = Absence.UNREADABLE, errno: int = 0
    ) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason
        """Without the path."""
        self.absence = absence
        self.errno = errno
        """Of the system call that failed; 0 if none did."""

    @property
    def is_forbidden(self) -> bool:
        """Another user might read it."""
        return self.errno in {EACCES, EPERM}


def read_bounded(path: Path, limit: int) -> WholeFile:
    """All that is in the file. Blocks on the disk alone.

    Args:
        path: A regular file, or a link to one.
        limit: The most that it may hold [bytes].

    Raises:
        Unread: absent if there is nothing of that name, unreadable for any other reason.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ReadError(path, "is no regular file")
            data = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _unread(path, error, Absence.ABSENT) from None
    except OSError as error:
        raise _unread(path, error, Absence.UNREADABLE) from None
    if len(data) > limit:
        raise ReadError(path, f"is {max(found.st_size, len(data))} bytes, limit {limit}")
    return WholeFile(data, found.st_mtime)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block


def _unread(path: Path, error: OSError, absence: Absence) -> ReadError:
    return ReadError(path, error.strerror or str(error), absence, error.errno or 0)
