"""The log of ``drahealth run``: lines of text or JSON on standard error, with priorities for the journal.

The rest of the agent only calls ``logging``. No thread of a running agent waits for a slow reader of the log.
"""

import json
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, NamedTuple, TextIO

from agent.cli.output.report_changes import ReportChange, changes_between_reports, facts_without_devices
from agent.cli.output.text import format_count
from agent.errors import OutputError
from agent.model.health import Severity
from agent.model.report import Report
from agent.model.time import rfc3339
from agent.system.threads.thread_start import DaemonThread

PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
    (logging.NOTSET, 7),
)
"""Lowest logging level of each syslog priority (sd-daemon(3)), highest first."""

LEVEL_OF_SEVERITY: Final = {
    Severity.OK: logging.INFO,
    Severity.INFO: logging.INFO,
    Severity.DEGRADED: logging.WARNING,
    Severity.UNKNOWN: logging.WARNING,
    Severity.UNHEALTHY: logging.ERROR,
}

MAX_QUEUED: Final = 1000
"""Largest number of log lines that wait to be written; when it is exceeded, the oldest are dropped."""

MAX_LINES: Final = 4
WINDOW_S: Final = 10.0
"""Window of the rate limit of log lines [s].

Each object of the report gets at most MAX_LINES lines in it; further changes share one later line.
"""

CLOSE_TIMEOUT_S: Final = 0.5
"""Longest time that closing the log waits for the output [s]: the agent must end within 2 s of its signal."""
FAILED_CLOSE_TIMEOUT_S: Final = 2.0
"""The same for an agent that ends with an error [s]: its last line has the only reason of the exit code.

systemd kills an agent that has not ended 5 s after its signal.
"""

CHANGE: Final = "report_change"
"""Name of the attribute of a ``logging.LogRecord`` that has the ReportChange which the log line is about."""

LOG: Final = logging.getLogger(__name__)


def install_log_handler(handler: logging.Handler) -> None:
    """Send the agent's log, and the warnings and errors of other libraries, to `handler`."""
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)  # Python's own output of warnings would wait for standard error, or raise
    logging.getLogger("agent").setLevel(logging.INFO)


# --- lines -------------------------------------------------------------------------------------------------


class LineFormatter(logging.Formatter):
    """Formatter of log records: one line for each record, and several lines for a traceback.

    A terminal gets time, level and text. The journal gets a priority and the text, and adds the time itself.
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
        """Return the text of the error that ends the agent. For the journal, each line has a priority."""
        return _with_priority(text.splitlines(), logging.ERROR) if self._journal else text


class JsonLineFormatter(logging.Formatter):
    """Formatter of log records as JSON objects, each on one line. In the journal, a priority precedes it."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        change: ReportChange | None = getattr(record, CHANGE, None)
        created = datetime.fromtimestamp(record.created, UTC).replace(tzinfo=None)
        entry = {
            "time": f"{created.isoformat(timespec='milliseconds')}Z",
            "level": record.levelname.lower(),
            "message": message_of(record),
            "logger": record.name,
        }
        if change is not None:
            entry |= {
                "object": change.subject,
                "state": change.state,
                "severity": change.severity.name.lower(),
            }
            entry |= {"code": change.code} if change.code else {}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        line = json.dumps(entry)  # ASCII only, so that no encoding of the output can damage it
        return _with_priority([line], record.levelno) if self._journal else line

    def format_failure(self, text: str) -> str:
        """Return the text of the error that ends the agent, as a separate log entry in JSON."""
        error = {"levelno": logging.ERROR, "levelname": "ERROR", "name": "agent", "msg": text}
        return self.format(logging.makeLogRecord(error))


def log_formatter(name: str, *, journal: bool) -> LineFormatter | JsonLineFormatter:
    """Return the formatter of the log format with this name, ``text`` or ``json``."""
    return JsonLineFormatter(journal=journal) if name == "json" else LineFormatter(journal=journal)


def _with_priority(lines: Iterable[str], levelno: int) -> str:
    priority = next(number for level, number in PRIORITIES if levelno >= level)
    return "\n".join(f"<{priority}>{line}" for line in lines)


def message_of(record: logging.LogRecord) -> str:
    """Return the text of a log record; if it cannot be formatted, the line of code that logged it."""
    try:
        return record.getMessage()
    except Exception as error:
        return f"{record.pathname}:{record.lineno}: log line cannot be formatted: {type(error).__name__}"


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether `stream` is connected to the systemd journal.

    The variable JOURNAL_STREAM has the device and the inode of the journal's stream, which must be those of
    `stream`. The variable alone does not suffice, because child processes that write elsewhere inherit it.
    """
    named = environ.get("JOURNAL_STREAM")
    if not named:
        return False
    try:
        stat = os.fstat(stream.fileno())
    except OSError:
        return False
    return named == f"{stat.st_dev}:{stat.st_ino}"


class LogQueue(logging.Handler):
    """Log handler that queues lines until one thread writes them. Thread-safe. Never blocks on the output."""

    def __init__(self, formatter: logging.Formatter, wake: Callable[[], None]) -> None:
        """Create the queue of log lines in the format of `formatter`.

        `wake` is called after each line, in the thread that logged the line.
        """
        super().__init__()
        assert self.lock is not None, "createLock() has made the lock"
        self.shared_lock: threading.RLock = self.lock
        """Lock that the logging module holds while it calls this handler."""
        self.setFormatter(formatter)
        self._wake = wake
        self._lines: deque[str] = deque(maxlen=MAX_QUEUED)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._put(self.format(record))

    def write(self, text: str) -> None:
        """Queue a log text that is already formatted."""
        with self.shared_lock:
            self._put(text)

    def _put(self, text: str) -> None:
        self._lost += len(self._lines) == MAX_QUEUED
        self._lines.append(text)
        self._wake()

    def is_empty(self) -> bool:
        return not self._lines

    def take(self) -> str:
        """Remove and return all queued log lines; if lines were dropped, the first line states how many."""
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
    """Base class of a thread that prints the newest health report.

    It has its own thread, so that the agent waits neither for a stopped terminal nor for the reader of a log.
    """

    def __init__(self, name: str, lock: "threading.RLock | None" = None) -> None:
        """Start the thread with the name `name`.

        Subclasses set the attributes that ``_run`` needs before this call. `lock` is the lock of the
        condition variable ``_changed``; None: a new lock is created.
        """
        self._report: Report | None = None
        self._is_closed = False
        self._changed = threading.Condition(lock)
        # A daemon thread: one that hangs in its output must not keep the process alive.
        self._thread = DaemonThread(self._run, name)
        self._thread.start()

    def show(self, report: Report, *, is_repeat: bool = False) -> None:
        """Print `report` soon, unless a newer report replaces it. Thread-safe. Never blocks on the output.

        `is_repeat`: devices and notes are those of the last report.
        """
        with self._changed:
            self._report = report
            self._changed.notify()

    def close(self, *, has_failed: bool = False) -> bool:
        """Print the last report and end the thread.

        Args:
            has_failed: True: the agent ends with an error. Blocks up to FAILED_CLOSE_TIMEOUT_S then,
                otherwise up to CLOSE_TIMEOUT_S.

        Returns:
            True: the thread ended; False: it still waits for a stalled output.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(FAILED_CLOSE_TIMEOUT_S if has_failed else CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None:
        """Print reports until ``_is_closed`` is true: wait on ``_changed`` for a new ``_report``."""


Topic = tuple[str, str]
"""Key of the log's rate limit: the object of a change (ReportChange.subject), and a note's finding code."""


class _DelayedChange(NamedTuple):
    newest: ReportChange
    changes: int


class TopicRateLimit:
    """Rate limit of log lines for each topic. A topic is one object of the health report.

    If a topic exceeds the limit, its newest change is logged later.
    """

    def __init__(self) -> None:
        self._logged_at: dict[Topic, deque[float]] = {}
        self._delayed: dict[Topic, _DelayedChange] = {}

    def changes_to_log(self, new: Iterable[ReportChange], now_s: float) -> list[ReportChange]:
        """Return the changes that may be logged at the time `now_s` [s]: delayed changes, then `new` ones."""
        self._forget(now_s - WINDOW_S)
        free = [topic for topic in self._delayed if self._has_room(topic)]
        lines = [self._count(_with_change_count(self._delayed.pop(topic)), now_s) for topic in free]
        for change in new:
            topic = _topic(change)
            if self._has_room(topic):
                lines.append(self._count(change, now_s))
            else:
                delayed = self._delayed.get(topic)
                self._delayed[topic] = _DelayedChange(change, delayed.changes + 1 if delayed else 1)
        return lines

    def due_s(self) -> float | None:
        """Return the time at which a delayed change can be logged [s]; None: no change is delayed."""
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


def _with_change_count(delayed: _DelayedChange) -> ReportChange:
    if delayed.changes == 1:
        return delayed.newest
    more = f"(and {format_count(delayed.changes - 1, 'more change')} before)"
    return delayed.newest._replace(message=f"{delayed.newest.message} {more}".lstrip())


class ReportLogThread(ReportPrinter):
    """Thread that logs the changes between health reports and writes all queued log lines to a stream."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        self._stream = stream
        self.queue = LogQueue(formatter, self._wake)
        """Log handler whose lines this thread writes."""
        # One lock for both: with two, a thread that logs could hold either first.
        super().__init__("dh-log", self.queue.shared_lock)
        self._facts: tuple[object, ...] | None = None
        """What the last report shows apart from devices and notes; None: it was no repeat."""

    def show(self, report: Report, *, is_repeat: bool = False) -> None:
        facts = facts_without_devices(report) if is_repeat else None
        if is_repeat and facts == self._facts:
            return  # nothing to log: a wake would compete with the core thread for the interpreter lock
        self._facts = facts
        super().show(report, is_repeat=is_repeat)

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
                    new = changes_between_reports(logged, report)
                    logged = report
                for change in limit.changes_to_log(new, time.monotonic()):
                    LOG.log(LEVEL_OF_SEVERITY[change.severity], "%s", change.text, extra={CHANGE: change})
                    self._write()
            except Exception:  # an error in drahealth costs this report, not the log
                LOG.exception("report: changes not logged: internal error; later reports are logged")
            self._write()

    def _write(self) -> None:
        with suppress(OutputError):  # a full disk or a closed pipe costs lines, and does not end the agent
            self._stream.write(self.queue.take())
            self._stream.flush()

    def _has_work(self, seen: Report | None) -> bool:
        return self._is_closed or self._report is not seen or not self.queue.is_empty()
