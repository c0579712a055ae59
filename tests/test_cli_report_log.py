"""The log of an agent: what is new and no flood of it; and one that nobody reads holds nobody up."""

import logging
import os
from collections.abc import Iterator

import pytest
from cli_reports import SHRUNK, device, report

from agent.cli.changes import Change
from agent.cli.report_log import LINES, WINDOW_S, Limit, ReportLog
from agent.model.health import Severity


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


class Pipe(logging.Handler):
    """Log records, one line each, into a pipe."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        os.write(self._fd, f"{record.levelname} {record.getMessage()}\n".encode())


@pytest.fixture
def log() -> Iterator[int]:
    """What reads the agent's log."""
    read, write = os.pipe()
    handler, logger = Pipe(write), logging.getLogger("agent")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield read
    logger.removeHandler(handler)
    logger.setLevel(level)
    os.close(read)
    os.close(write)


def test_reports_are_logged_with_a_level_each_and_the_last_before_it_closes(log):
    reports = ReportLog()
    reports.show(report(device("gpu-0")))
    assert os.read(log, 65536) == b"INFO gpu-0 Healthy\n"
    reports.show(report(device("gpu-0", SHRUNK)))
    assert reports.close()
    assert os.read(log, 65536).startswith(b"ERROR gpu-0 Unhealthy mem.hugepages.pool_shrunk: ")


def test_a_log_that_nobody_reads_holds_up_neither_reports_nor_the_end(log):
    reports = ReportLog()
    large = report(*(device(f"gpu-{i}", SHRUNK) for i in range(2000)))
    for _ in range(1000):
        reports.show(large)
    assert not reports.close()
    seen = b""
    while b"gpu-1999 Unhealthy" not in seen:  # once somebody reads, it goes on
        seen += os.read(log, 65536)
    reports._thread.join()
