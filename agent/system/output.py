"""Unbuffered standard output and standard error: every write succeeds completely, or raises OutputError.

The module also has the text that states how a process ended.

Python's own streams keep unwritten data and retry at interpreter exit, where an error cannot be reported, and
they ignore writes to a closed descriptor.
"""

import io
import logging
import os
import select
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TextIO

from agent.errors import OutputError, OutputPipeClosed

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STANDARD_STREAM_NAMES: Final = ("standard input", "standard output", "standard error")


def unbuffer_outputs() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by unbuffered streams."""
    _open_closed_descriptors()
    logging.raiseExceptions = False  # a log line that cannot be written is dropped
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)


def write_all(fd: int, name: str, data: "ReadableBuffer") -> None:
    """Write all of `data` to a file descriptor. Blocks until the reader or the disk has accepted it.

    Args:
        fd: File descriptor.
        name: Name of the descriptor in error messages.

    Raises:
        OutputPipeClosed: `fd` is a pipe whose reader has closed it.
        OutputError: The write failed, for example on a full disk.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # another process that shares the pipe made it non-blocking
            select.select([], [fd], [])
        except OSError as error:
            kind = OutputPipeClosed if isinstance(error, BrokenPipeError) else OutputError
            raise kind(f"{name}: {error.strerror}") from error


def print_last_error(text: str) -> None:
    """Print a line on standard error; a failure to write is ignored."""
    with suppress(OutputError):
        sys.stderr.write(f"{text}\n")


def describe_exit(wait_status: int) -> str:
    """Return how a process ended, such as ``was killed by SIGSEGV``, from its status of waitpid(2)."""
    return describe_exit_code(os.waitstatus_to_exitcode(wait_status))


def describe_exit_code(code: int) -> str:
    """Return how a process ended from its exit code, or the negative number of the signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


class DescriptorStream(io.BufferedIOBase):
    """Binary stream that writes to a file descriptor without a buffer."""

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
        DescriptorStream(fd, STANDARD_STREAM_NAMES[fd]),
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace",  # a message must not fail on a character
        line_buffering=True,
    )


def _open_closed_descriptors() -> None:
    """Open ``/dev/null`` as standard input, output or error if that descriptor is closed.

    Otherwise the next opened file would get the descriptor's number, and receive the output.
    """
    for fd in range(len(STANDARD_STREAM_NAMES)):
        try:
            os.fstat(fd)
        except OSError:
            # open() returns the lowest free number, which is fd
            os.open(os.devnull, os.O_RDONLY if fd else os.O_WRONLY)


def has_terminal() -> bool:
    """Return True if standard output or error is a terminal, whose closing sends SIGHUP."""
    return any(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
