"""The log of an agent: what is new and no flood of it; and one that nobody reads holds nobody up."""

import logging
import os
import select
from collections.abc import Iterator
from typing import Final, TextIO

import pytest
from cli_reports import SHRUNK, device, report
from patience import PATIENCE_S

from agent.cli.output.changes import Change
from agent.cli.output.log import HELD, Backlog, LineFormatter
from agent.cli.output.report_log import LINES, WINDOW_S, Limit, ReportLog
from agent.model.health import Severity

LOG: Final = logging.getLogger("agent.somebody")


def change(subject: str, message: str = "") -> Change:
    return Change(0.0, subject, "Unknown", Severity.UNKNOWN, message)


def test_what_happens_seldom_is_told_as_it_is():
    limit = Limit()
    for second in range(0, 100, 5):
        assert limit.take([change("a", f"{second}")], second) == [change("a", f"{second}")]
    assert limit.due_s() is None


def test_a_flood_of_one_subject_is_cut_and_the_newest_comes_when_there_is_room():
    limit = Limit()
    told = [line for n in range(100) for line in limit.take([change("a", f"{n}")], n / 100)]
    assert told == [change("a", f"{n}") for n in range(LINES)]
    assert limit.due_s() == WINDOW_S
    assert limit.take([], WINDOW_S - 0.01) == []
    assert limit.take([], WINDOW_S) == [change("a", f"99 (and {99 - LINES} more changes before)")]
    assert limit.due_s() is None


def test_a_flood_for_hours_is_lines_by_the_minute():
    limit = Limit()
    told = [line for n in range(36_000) for line in limit.take([change("a", f"{n}")], n / 10)]
    assert len(told) <= LINES * 3600 / WINDOW_S


def test_one_that_was_held_back_alone_is_told_as_it_is():
    limit = Limit()
    for n in range(LINES + 1):
        limit.take([change("a", f"{n}")], 0)
    assert limit.take([], WINDOW_S) == [change("a", f"{LINES}")]


def test_a_flood_of_one_subject_is_none_of_another_and_is_forgotten():
    limit = Limit()
    for n in range(100):
        limit.take([change("a", f"{n}")], 0)
    assert limit.take([change("b")], 0) == [change("b")]
    limit.take([], WINDOW_S)
    limit.take([], 2 * WINDOW_S)
    assert (limit._told, limit._held) == ({}, {})


def test_a_flood_of_one_kind_of_note_is_none_of_another():
    notes = [Change(0.0, "node", "Degraded", Severity.DEGRADED, "", f"node.{n}") for n in range(3 * LINES)]
    assert Limit().take(notes, 0) == notes


class Log:
    """A log whose lines go into a pipe, and what reads it."""

    def __init__(self, read: int, stream: TextIO) -> None:
        self.read = read
        self.reports = ReportLog(stream, logging.Formatter("%(levelname)s %(message)s"))

    def read_until(self, words: str) -> str:
        """What it says up to the line with these words, which ends what can be read."""
        seen = ""
        while words not in seen or not seen.endswith("\n"):
            assert select.select([self.read], [], [], PATIENCE_S)[0], f"no {words!r}, but {seen[-1000:]!r}"
            seen += os.read(self.read, 65536).decode()
        return seen


@pytest.fixture
def log() -> Iterator[Log]:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        log, logger = Log(read, stream), logging.getLogger("agent")
        level = logger.level
        logger.addHandler(log.reports.backlog)
        logger.setLevel(logging.INFO)
        yield log
        logger.removeHandler(log.reports.backlog)
        logger.setLevel(level)
        log.reports.close()
    os.close(read)


def test_reports_are_logged_with_a_level_each_and_the_last_before_it_closes(log):
    log.reports.show(report(device("gpu-0")))
    assert log.read_until("gpu-0") == "INFO gpu-0 Healthy\n"
    log.reports.show(report(device("gpu-0", SHRUNK)))
    assert log.reports.close()
    assert log.read_until("gpu-0").startswith("ERROR gpu-0 Unhealthy mem.hugepages.pool_shrunk: ")


def test_what_is_logged_beside_reports_is_written_in_its_order(log):
    for number in range(100):
        LOG.info("line %d", number)
    assert log.reports.close()
    assert log.read_until("line 99") == "".join(f"INFO line {number}\n" for number in range(100))


def test_a_log_that_nobody_reads_holds_up_neither_reports_nor_who_logs_nor_the_end(log):
    large = report(*(device(f"gpu-{i}", SHRUNK) for i in range(2000)))
    for _ in range(1000):
        log.reports.show(large)
    LOG.warning("beside it")
    assert not log.reports.close()
    seen = log.read_until("gpu-1999 Unhealthy")  # once somebody reads, it goes on
    assert "WARNING beside it\n" in seen
    log.reports._thread.join(PATIENCE_S)
    assert not log.reports._thread.is_alive()


def test_a_report_that_cannot_be_told_costs_neither_the_log_nor_the_next_one(log):
    log.reports.show(object())  # a mistake of ours
    assert "AttributeError" in log.read_until("AttributeError")
    log.reports.show(report(device("gpu-0")))
    assert "INFO gpu-0 Healthy\n" in log.read_until("gpu-0")


def test_of_lines_that_are_too_many_the_oldest_are_lost_and_their_number_is_told():
    woken: list[None] = []
    backlog = Backlog(LineFormatter(journal=True), lambda: woken.append(None))
    for number in range(HELD + 42):
        backlog.handle(logging.makeLogRecord({"levelno": logging.INFO, "msg": f"line {number}"}))
    assert len(woken) == HELD + 42
    lost, *lines = backlog.take().splitlines()
    assert lost == "<4>42 lines are lost: whoever reads this log stood still"
    assert lines == [f"<6>line {number}" for number in range(42, HELD + 42)]
    assert backlog.is_empty()
    assert backlog.take() == ""


def test_a_line_that_cannot_be_formatted_is_named_and_stops_nobody():
    backlog = Backlog(LineFormatter(journal=True), lambda: None)
    wrong = {"levelno": 30, "pathname": "somebody.py", "lineno": 7, "msg": "%d pages", "args": ("no",)}
    backlog.handle(logging.makeLogRecord(wrong))
    assert backlog.take() == "<4>somebody.py:7: a line that cannot be logged: TypeError\n"
