"""Standard output and standard error of our commands: what was written has arrived, or OutputError says why.

Python's own hold back what they could not write, and try again where nobody can tell of it, at the
interpreter's end; and of a descriptor that was closed they say nothing at all.
"""

import io
import logging
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TextIO

from agent.errors import OutputError, ReaderGone

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STANDARD: Final = ("standard input", "standard output", "standard error")


def open_outputs() -> None:
    """Puts an unbuffered stream of ours in the place of ``sys.stdout`` and of ``sys.stderr``."""
    _hold_closed()
    logging.raiseExceptions = False  # whoever logs a line is not told that it was not written
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)


def write_all(fd: int, name: str, data: "ReadableBuffer") -> None:
    """Writes all of it, however long that takes.

    Args:
        fd: Where to.
        name: What that is, for who reads the error.
        data: What.

    Raises:
        ReaderGone: It is a pipe, and whoever read it has closed it.
        OutputError: The kernel takes no more, such as on a full disk.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # whoever shares the pipe with us made it so
            select.select([], [fd], [])
        except OSError as error:
            kind = ReaderGone if isinstance(error, BrokenPipeError) else OutputError
            raise kind(f"{name}: {error.strerror}") from error


def say_last(text: str) -> None:
    """A line on standard error, if that takes it: the exit code says the rest."""
    with suppress(OutputError):
        sys.stderr.write(f"{text}\n")


class Descriptor(io.BufferedIOBase):
    """A descriptor to write to. In spite of its base it holds nothing back."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: "ReadableBuffer") -> int:
        write_all(self._fd, self.name, data)
        return memoryview(data).nbytes


def _stream(fd: int, before: TextIO | None) -> TextIO:
    return io.TextIOWrapper(
        Descriptor(fd, STANDARD[fd]),
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace",  # a message is worth more than its odd characters
        line_buffering=True,
    )


def _hold_closed() -> None:
    """A standard descriptor that is closed gets a file that takes nothing: the next file that is opened would
    have its number, and be written to by whoever speaks to a standard descriptor.
    """
    for fd in range(len(STANDARD)):
        try:
            os.fstat(fd)
        except OSError:
            # it has the lowest number that is free, which is this one
            os.open(os.devnull, os.O_RDONLY if fd else os.O_WRONLY)
