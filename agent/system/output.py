"""Loggers of all modules, and unbuffered standard output and standard error.

Every write to the two outputs succeeds completely, or raises OutputError.

Python's own streams keep unwritten data and retry at interpreter exit, where an error cannot be reported, and
they ignore writes to a closed descriptor.
"""

import io
import logging
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TextIO

from agent.errors import OutputError, OutputPipeClosed

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# --- loggers -----------------------------------------------------------------------------------------------


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module that also runs inside a driver; its calls raise no exception.

    An exception of the driver's handlers, filters or record factory is printed, as logging prints that of a
    handler of its own: it would end the thread that logs, or replace the result of a prepare.
    """
    logger = logging.getLogger(name)
    write = logger._log

    def write_safely(level: int, msg: object, args: Any, stacklevel: int = 1, **options: Any) -> None:
        try:
            write(level, msg, args, stacklevel=stacklevel + 1, **options)
        except Exception:
            logging.Handler().handleError(logging.LogRecord(name, level, "", 0, msg, args, None))

    logger._log = write_safely  # type: ignore[assignment, method-assign]
    return logger


LOG_INTERVAL_S: Final = 60.0
"""Shortest time between two log lines of one LogRateLimiter [s]."""


class LogRateLimiter:
    """Rate limiter of a repeated log line: at most one line a minute. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unreported = 0
        self._next = -float("inf")

    def tick(self) -> int:
        """Count an event; return the number of events to log now, or 0 if the line must not be logged yet.

        The number includes this event and all events since the last log line.
        """
        self._unreported += 1
        now = self._clock()
        if now < self._next:
            return 0
        count, self._unreported = self._unreported, 0
        self._next = now + LOG_INTERVAL_S
        return count


# --- standard output and standard error ------------------------------------------------------------------

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
