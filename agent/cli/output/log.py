"""The log of ``drahealth run``: plain lines on standard error, with priorities for the journal.

The library part of the agent only speaks to ``logging``; how that is written is decided here.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TextIO

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

HELD: Final = 1000
"""Lines that wait for whoever reads the log. Of more the oldest are lost."""


class LineFormatter(logging.Formatter):
    """One record, one line; what comes in several, such as a traceback, stays in several.

    For people: time, level, text. For the journal, which has its own clock: each line with its priority.
    """

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        lines = message_of(record).splitlines() or [""]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if self._journal:
            return _with_priority(lines, record.levelno)
        lines[0] = f"{rfc3339(record.created)} {record.levelname.lower()} {lines[0]}"
        return "\n".join(lines)

    def last_words(self, text: str) -> str:
        """What a command says when it fails: to people as any command does."""
        return _with_priority(text.splitlines(), logging.ERROR) if self._journal else text


def _with_priority(lines: Iterable[str], levelno: int) -> str:
    priority = next(number for level, number in PRIORITIES if levelno >= level)
    return "\n".join(f"<{priority}>{line}" for line in lines)


def message_of(record: logging.LogRecord) -> str:
    """Its text; of one that has none, where that is: whoever wrote that line of code ends nobody with it."""
    try:
        return record.getMessage()
    except Exception as error:
        where = f"{record.pathname}:{record.lineno}"
        return f"{where}: a line that cannot be logged: {type(error).__name__}"


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


class Backlog(logging.Handler):
    """What is logged, until the one thread that writes it comes: no other waits for whoever reads the log."""

    def __init__(self, formatter: logging.Formatter, wake: Callable[[], None]) -> None:
        """``wake`` is called with every record, in any thread."""
        super().__init__()
        assert self.lock is not None, "as createLock() has made it"
        self.own: threading.RLock = self.lock
        """Held by who logs."""
        self.setFormatter(formatter)
        self._wake = wake
        self._lines: deque[str] = deque(maxlen=HELD)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._put(self.format(record))

    def say(self, text: str) -> None:
        """Writes a text as it is."""
        with self.own:
            self._put(text)

    def _put(self, text: str) -> None:
        self._lost += len(self._lines) == HELD
        self._lines.append(text)
        self._wake()

    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._lines

    def take(self) -> str:
        """All lines that wait, behind one that says how many do not any more."""
        with self.own:
            lines, lost = list(self._lines), self._lost
            self._lines.clear()
            self._lost = 0
        if lost:
            words = f"{lost} lines are lost: whoever reads this log stood still"
            warning = {"levelno": logging.WARNING, "levelname": "WARNING", "msg": words}
            lines.insert(0, self.format(logging.makeLogRecord(warning)))
        return "".join(f"{line}\n" for line in lines)


def log_to(handler: logging.Handler) -> None:
    """Sends what the agent logs to this handler, and of others what is a warning at least."""
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)  # Python's own would wait for standard error, or raise
    logging.getLogger("agent").setLevel(logging.INFO)
