"""The log: what is new in each report, no more of a topic than somebody can read, and what else is logged."""

import logging
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple, TextIO

from agent.cli.output.changes import Change, changes
from agent.cli.output.log import LEVEL_OF_SEVERITY, Backlog
from agent.cli.output.report_printer import ReportPrinter
from agent.cli.output.text import format_count
from agent.errors import OutputError
from agent.model.report import Report

LINES: Final = 4
WINDOW_S: Final = 10.0
"""A topic has LINES lines in this time [s]; what it does beyond is one line, when there is room again."""

Topic = tuple[str, str]
"""A subject and, of its notes, the code: each of them is told, however many come at once."""

LOG: Final = logging.getLogger(__name__)


class _Held(NamedTuple):
    newest: Change
    changes: int


class Limit:
    """Lets so many lines of a topic through, and holds back the newest of those that are too many."""

    def __init__(self) -> None:
        self._told: dict[Topic, deque[float]] = {}
        self._held: dict[Topic, _Held] = {}

    def take(self, news: Iterable[Change], now_s: float) -> list[Change]:
        """What may be told now, of what was held back and of this."""
        self._forget(now_s - WINDOW_S)
        free = [topic for topic in self._held if self._has_room(topic)]
        lines = [self._tell(_summary(self._held.pop(topic)), now_s) for topic in free]
        for change in news:
            topic = _topic_of(change)
            if self._has_room(topic):
                lines.append(self._tell(change, now_s))
            else:
                held = self._held.get(topic)
                self._held[topic] = _Held(change, held.changes + 1 if held else 1)
        return lines

    def due_s(self) -> float | None:
        """When :meth:`take` will have room for something that is held back."""
        return min((self._told[topic][0] + WINDOW_S for topic in self._held), default=None)

    def _has_room(self, topic: Topic) -> bool:
        return len(self._told.get(topic, ())) < LINES

    def _tell(self, change: Change, now_s: float) -> Change:
        self._told.setdefault(_topic_of(change), deque()).append(now_s)
        return change

    def _forget(self, before_s: float) -> None:
        for topic, times in list(self._told.items()):
            while times and times[0] <= before_s:
                times.popleft()
            if not times:
                del self._told[topic]


def _topic_of(change: Change) -> Topic:
    return change.subject, change.code


def _summary(held: _Held) -> Change:
    if held.changes == 1:
        return held.newest
    more = f"(and {format_count(held.changes - 1, 'more change')} before)"
    return held.newest._replace(message=f"{held.newest.message} {more}".lstrip())


class ReportLog(ReportPrinter):
    """Logs what each report says that the one before did not, and writes all that is logged, until closed."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        """``stream`` gets what is logged to :attr:`backlog`, in the form that ``formatter`` gives it."""
        self._stream = stream
        self.backlog = Backlog(formatter, self._wake)
        super().__init__("dh-log", self.backlog.own)  # one lock: who logs may hold either

    def _wake(self) -> None:
        with self._news:
            self._news.notify()

    def _run(self) -> None:
        limit, seen, told, is_closed = Limit(), None, None, False
        while not is_closed:
            due_s = limit.due_s()
            with self._news:
                left_s = None if due_s is None else max(0.0, due_s - time.monotonic())
                self._news.wait_for(lambda: self._has_news(seen), left_s)  # noqa: B023
                is_closed, report = self._is_closed, self._report
            news: list[Change] = []
            try:
                if report is not None and report is not seen:
                    seen = report
                    news = changes(told, report)
                    told = report
                for change in limit.take(news, time.monotonic()):
                    LOG.log(LEVEL_OF_SEVERITY[change.severity], "%s", change.words)
                    self._write()
            except Exception:  # a mistake of ours costs this report, and not the log
                LOG.exception("what is new cannot be told")
            self._write()

    def _write(self) -> None:
        with suppress(OutputError):  # a full disk, or a reader that has gone, costs lines and stops nobody
            self._stream.write(self.backlog.take())
            self._stream.flush()

    def _has_news(self, seen: Report | None) -> bool:
        return self._is_closed or self._report is not seen or not self.backlog.is_empty()
