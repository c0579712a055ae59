"""The log of ``drahealth run``: plain lines on standard error, with priorities for the journal.

The rest of the agent only calls ``logging``. No thread of the agent waits for a slow reader of the log.
"""

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple, TextIO

from agent.cli.output.changes import ReportChange, changes
from agent.cli.output.text import format_count
from agent.errors import OutputError
from agent.model.health import Severity
from agent.model.report import Report
from agent.model.time import rfc3339

PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
    (logging.NOTSET, 7),
)
"""Lowest level of each syslog priority, see sd-daemon(3)."""

LEVEL_OF_SEVERITY: Final = {
    Severity.OK: logging.INFO,
    Severity.INFO: logging.INFO,
    Severity.DEGRADED: logging.WARNING,
    Severity.UNKNOWN: logging.WARNING,
    Severity.UNHEALTHY: logging.ERROR,
}

MAX_QUEUED: Final = 1000
"""Limit of lines that wait to be written; beyond it the oldest are dropped."""

MAX_LINES: Final = 4
WINDOW_S: Final = 10.0
"""Window of the rate limit [s]: a topic gets MAX_LINES lines in it; further changes become one later line."""

CLOSE_TIMEOUT_S: Final = 0.5
"""Longest time that closing waits for output [s]: the agent must end within 2 s of its signal."""

LOG: Final = logging.getLogger(__name__)


def log_to(handler: logging.Handler) -> None:
    """Send the agent's log to `handler`, and warnings and errors of other libraries."""
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)  # Python's own output of warnings would wait for standard error, or raise
    logging.getLogger("agent").setLevel(logging.INFO)


# --- lines -------------------------------------------------------------------------------------------------


class LineFormatter(logging.Formatter):
    """Formatter of one line for each record; tracebacks keep their lines.

    A terminal gets time, level and text. The journal has its own clock and gets a priority on each line.
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

    def format_failure(self, text: str) -> str:
        """Return the error text that ends the command; for the journal with a priority, else unchanged."""
        return _with_priority(text.splitlines(), logging.ERROR) if self._journal else text


def _with_priority(lines: Iterable[str], levelno: int) -> str:
    priority = next(number for level, number in PRIORITIES if levelno >= level)
    return "\n".join(f"<{priority}>{line}" for line in lines)


def message_of(record: logging.LogRecord) -> str:
    """Return the text of a record; if it cannot be formatted, the place in the code that logged it."""
    try:
        return record.getMessage()
    except Exception as error:
        return f"{record.pathname}:{record.lineno}: log line cannot be formatted: {type(error).__name__}"


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether the stream is the journal's: JOURNAL_STREAM names its device and inode.

    The variable alone proves nothing: child processes that write elsewhere inherit it.
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
    """Queue of log lines until one thread writes them. Thread-safe. Never blocks on the output."""

    def __init__(self, formatter: logging.Formatter, wake: Callable[[], None]) -> None:
        """Queue the lines of `formatter`, and call `wake` after each, in any thread."""
        super().__init__()
        assert self.lock is not None, "createLock() has made the lock"
        self.shared_lock: threading.RLock = self.lock
        """Lock that logging holds while it calls this handler."""
        self.setFormatter(formatter)
        self._wake = wake
        self._lines: deque[str] = deque(maxlen=MAX_QUEUED)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._put(self.format(record))

    def write(self, text: str) -> None:
        """Queue a text that is already formatted."""
        with self.shared_lock:
            self._put(text)

    def _put(self, text: str) -> None:
        self._lost += len(self._lines) == MAX_QUEUED
        self._lines.append(text)
        self._wake()

    def is_empty(self) -> bool:
        """Return whether no log line waits to be written."""
        return not self._lines

    def take(self) -> str:
        """Remove and return all lines; if lines were dropped, a first line has their number."""
        with self.shared_lock:
            lines, lost = list(self._lines), self._lost
            self._lines.clear()
            self._lost = 0
        if lost:
            text = f"log: {lost} lines were dropped: the reader of this log was stalled"
            warning = {"levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
            lines.insert(0, self.format(logging.makeLogRecord(warning)))
        return "".join(f"{line}\n" for line in lines)


# --- reports -----------------------------------------------------------------------------------------------


class ReportPrinter(ABC):
    """Base class of a thread that prints the newest report.

    The agent's threads wait neither for a terminal, which Ctrl-S stops, nor for the reader of a log.
    """

    def __init__(self, name: str, lock: "threading.RLock | None" = None) -> None:
        """Start the thread `name`. Attributes that ``_run`` needs must be set before.

        Threads that wake this one hold `lock`; None creates a lock.
        """
        self._report: Report | None = None
        self._is_closed = False
        self._changed = threading.Condition(lock)
        # A daemon thread: one that hangs in its output must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def show(self, report: Report) -> None:
        """Print a report soon, unless a newer one comes. Thread-safe. Never blocks on the output."""
        with self._changed:
            self._report = report
            self._changed.notify()

    def close(self) -> bool:
        """Print what is left and end the thread. Blocks up to CLOSE_TIMEOUT_S.

        Returns:
            Whether the thread ended; it does not while the output is stalled.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None:
        """Run the thread: wait on ``_changed`` for ``_report`` to change, until ``_is_closed``."""


Topic = tuple[str, str]
"""Key of the rate limit: the subject of a change and, for a note, its code; else an empty code."""


class _Delayed(NamedTuple):
    newest: ReportChange
    changes: int


class TopicRateLimit:
    """Limit on the lines of each topic, which delays the newest change of a topic that has too many."""

    def __init__(self) -> None:
        self._logged_at: dict[Topic, deque[float]] = {}
        self._delayed: dict[Topic, _Delayed] = {}

    def take(self, new: Iterable[ReportChange], now_s: float) -> list[ReportChange]:
        """Return the changes to log now: delayed and then `new` changes whose topics are below the limit."""
        self._forget(now_s - WINDOW_S)
        free = [topic for topic in self._delayed if self._has_room(topic)]
        lines = [self._count(_summary(self._delayed.pop(topic)), now_s) for topic in free]
        for change in new:
            topic = _topic(change)
            if self._has_room(topic):
                lines.append(self._count(change, now_s))
            else:
                delayed = self._delayed.get(topic)
                self._delayed[topic] = _Delayed(change, delayed.changes + 1 if delayed else 1)
        return lines

    def due_s(self) -> float | None:
        """Return when :meth:`take` can return a delayed change [s]; None: no change is delayed."""
        return min((self._logged_at[topic][0] + WINDOW_S for topic in self._delayed), default=None)

    def _has_room(self, topic: Topic) -> bool:
        return len(self._logged_at.get(topic, ())) < MAX_LINES

    def _count(self, change: ReportChange, now_s: float) -> ReportChange:
        self._logged_at.setdefault(_topic(change), deque()).append(now_s)
        return change

    def _forget(self, before_s: float) -> None:
        for topic, times in list(self._logged_at.items()):
            while times and times[0] <= before_s:
                times.popleft()
            if not times:
                del self._logged_at[topic]


def _topic(change: ReportChange) -> Topic:
    return change.subject, change.code


def _summary(delayed: _Delayed) -> ReportChange:
    if delayed.changes == 1:
        return delayed.newest
    more = f"(and {format_count(delayed.changes - 1, 'more change')} before)"
    return delayed.newest._replace(message=f"{delayed.newest.message} {more}".lstrip())


class ReportLog(ReportPrinter):
    """Thread that logs the changes between reports, and writes every line that is logged, until closed."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        """Write to `stream`, in the format of `formatter`."""
        self._stream = stream
        self.backlog = Backlog(formatter, self._wake)
        """Handler of the log records."""
        # One lock for both: with two, a thread that logs could hold either first.
        super().__init__("dh-log", self.backlog.shared_lock)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        limit, seen, logged, is_closed = TopicRateLimit(), None, None, False
        while not is_closed:
            due_s = limit.due_s()
            with self._changed:
                left_s = None if due_s is None else max(0.0, due_s - time.monotonic())
                self._changed.wait_for(lambda: self._has_work(seen), left_s)  # noqa: B023
                is_closed, report = self._is_closed, self._report
            new: list[ReportChange] = []
            try:
                if report is not None and report is not seen:
                    seen = report
                    new = changes(logged, report)
                    logged = report
                for change in limit.take(new, time.monotonic()):
                    LOG.log(LEVEL_OF_SEVERITY[change.severity], "%s", change.text)
                    self._write()
            except Exception:  # an error in drahealth costs this report, not the log
                LOG.exception("report: changes cannot be logged")
            self._write()

    def _write(self) -> None:
        with suppress(OutputError):  # a full disk or a closed pipe costs lines, and does not end the agent
            self._stream.write(self.backlog.take())
            self._stream.flush()

    def _has_work(self, seen: Report | None) -> bool:
        return self._is_closed or self._report is not seen or not self.backlog.is_empty()
