"""The log of ``drahealth run``: plain lines on standard error, with priorities for the journal.

The library part of the agent only speaks to ``logging``; how that is written is decided here.
"""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Final, TextIO

from agent.errors import OutputError
from agent.model.health import Severity
from agent.model.time import rfc3339

PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
    (logging.NOTSET, 7),
)
"""From which level on a record has which syslog priority, see sd-daemon(3)."""

LEVEL_OF_SEVERITY: Final = {
    Severity.OK: logging.INFO,
    Severity.INFO: logging.INFO,
    Severity.DEGRADED: logging.WARNING,
    Severity.UNKNOWN: logging.WARNING,
    Severity.UNHEALTHY: logging.ERROR,
}


class LineFormatter(logging.Formatter):
    """One record, one line; a traceback follows on lines of its own.

    For people: time, level, text. For the journal, which has its own clock: each line with its priority.
    """

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        lines = [record.getMessage()]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if self._journal:
            priority = next(number for level, number in PRIORITIES if record.levelno >= level)
            return "\n".join(f"<{priority}>{line}" for line in lines)
        lines[0] = f"{rfc3339(record.created)} {record.levelname.lower()} {lines[0]}"
        return "\n".join(lines)


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether the stream is the journal's: JOURNAL_STREAM names its device and inode.

    The variable alone says nothing, children that write elsewhere inherit it.
    """
    named = environ.get("JOURNAL_STREAM")
    if not named:
        return False
    try:
        stat = os.fstat(stream.fileno())
    except OSError:
        return False
    return named == f"{stat.st_dev}:{stat.st_ino}"


class LogStream(logging.StreamHandler[TextIO]):
    """A stream to log to. A full disk behind it, or a reader that has gone, costs lines and stops nobody."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OutputError):
            super().handleError(record)


def log_to(handler: logging.Handler) -> None:
    """Sends what the agent logs to this handler, and of others what is a warning at least."""
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)  # Python's own would raise where standard error takes nothing
    logging.getLogger("agent").setLevel(logging.INFO)


def stderr_handler() -> logging.Handler:
    """Standard error, in the form that whoever reads it wants."""
    handler = LogStream(sys.stderr)
    handler.setFormatter(LineFormatter(journal=is_journal(sys.stderr, os.environ)))
    return handler
