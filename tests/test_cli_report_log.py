"""The log of an agent: changes with a rate limit, and a stalled reader that blocks no caller."""

import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

import pytest
from agents import short_tmp
from cli_reports import SHRUNK, device, report
from patience import PATIENCE_S

from agent.cli.output.log import (
    MAX_LINES,
    MAX_QUEUED,
    WINDOW_S,
    LineFormatter,
    LogQueue,
    ReportLogThread,
    TopicRateLimit,
)
from agent.cli.output.report_changes import ReportChange
from agent.model.health import Severity
from agent.model.reading import SourceSample, SourceState

__all__ = ["short_tmp"]

LOG: Final = logging.getLogger("agent.example")


def change(subject: str, message: str = "") -> ReportChange:
    return ReportChange(0.0, subject, "Unknown", Severity.UNKNOWN, message)


def test_rare_changes_are_logged_unchanged():
    limit = TopicRateLimit()
    for second in range(0, 100, 5):
        assert limit.changes_to_log([change("a", f"{second}")], second) == [change("a", f"{second}")]
    assert limit.due_s() is None


def test_flood_of_a_topic_is_cut_and_the_newest_follows():
    limit = TopicRateLimit()
    logged = [line for n in range(100) for line in limit.changes_to_log([change("a", f"{n}")], n / 100)]
    assert logged == [change("a", f"{n}") for n in range(MAX_LINES)]
    assert limit.due_s() == WINDOW_S
    assert limit.changes_to_log([], WINDOW_S - 0.01) == []
    assert limit.changes_to_log([], WINDOW_S) == [
        change("a", f"99 (and {99 - MAX_LINES} more changes before)")
    ]
    assert limit.due_s() is None


def test_flood_for_hours_is_limited_per_window():
    limit = TopicRateLimit()
    logged = [line for n in range(36_000) for line in limit.changes_to_log([change("a", f"{n}")], n / 10)]
    assert len(logged) <= MAX_LINES * 3600 / WINDOW_S


def test_single_delayed_change_is_logged_unchanged():
    limit = TopicRateLimit()
    for n in range(MAX_LINES + 1):
        limit.changes_to_log([change("a", f"{n}")], 0)
    assert limit.changes_to_log([], WINDOW_S) == [change("a", f"{MAX_LINES}")]


def test_flood_of_a_topic_does_not_limit_another():
    limit = TopicRateLimit()
    for n in range(100):
        limit.changes_to_log([change("a", f"{n}")], 0)
    assert limit.changes_to_log([change("b")], 0) == [change("b")]
    limit.changes_to_log([], WINDOW_S)
    limit.changes_to_log([], 2 * WINDOW_S)
    assert (limit._logged_at, limit._delayed) == ({}, {})


def test_flood_of_a_note_code_does_not_limit_another():
    notes = [
        ReportChange(0.0, "node", "Degraded", Severity.DEGRADED, "", f"node.{n}")
        for n in range(3 * MAX_LINES)
    ]
    assert TopicRateLimit().changes_to_log(notes, 0) == notes


class Log:
    """Log that writes into a pipe, and the reading end."""

    def __init__(self, read: int, stream: TextIO) -> None:
        self.read = read
        self.reports = ReportLogThread(stream, logging.Formatter("%(levelname)s %(message)s"))

    def read_until(self, text: str) -> str:
        """Read up to the line with `text`, which must be the last one."""
        seen = ""
        while text not in seen or not seen.endswith("\n"):
            assert select.select([self.read], [], [], PATIENCE_S)[0], f"no {text!r}, but {seen[-1000:]!r}"
            seen += os.read(self.read, 65536).decode()
        return seen


@pytest.fixture
def log() -> Iterator[Log]:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        log, logger = Log(read, stream), logging.getLogger("agent")
        level = logger.level
        # not of threads that an earlier test has left
        log.reports.queue.addFilter(lambda record: record.name in {LOG.name, ReportLogThread.__module__})
        logger.addHandler(log.reports.queue)
        logger.setLevel(logging.INFO)
        yield log
        logger.removeHandler(log.reports.queue)
        logger.setLevel(level)
        log.reports.close()
    os.close(read)


@pytest.fixture
def slow_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the log's thread take as long as a busy machine needs for its last lines."""
    monkeypatch.setattr("agent.cli.output.log.CLOSE_TIMEOUT_S", PATIENCE_S)


@pytest.mark.usefixtures("slow_close")
def test_reports_are_logged_by_level_up_to_close(log):
    log.reports.show(report(device("gpu-0")))
    assert log.read_until("gpu-0") == "INFO gpu-0 Healthy\n"
    log.reports.show(report(device("gpu-0", SHRUNK)))
    assert log.reports.close()
    assert log.read_until("gpu-0").startswith("ERROR gpu-0 Unhealthy mem.hugepages.pool_shrunk: ")


def test_reason_of_a_failed_run_is_written_by_a_late_log_thread(short_tmp: Path) -> None:
    program = """
import sys, time
from agent.app import daemon
from agent.cli.main import main
from agent.cli.output import log
from agent.errors import ResourceBusyError

def fail(*_, **__):
    raise ResourceBusyError("the reason")

def write_late(thread):
    time.sleep(0.05)  # longer than the agent waits if it ends without an error
    write(thread)

write, log.ReportLogThread._write = log.ReportLogThread._write, write_late
daemon.run, log.CLOSE_TIMEOUT_S, log.FAILED_CLOSE_TIMEOUT_S = fail, 0.0, 60.0
code = main(["run", "--table", "never", "--runtime-dir", sys.argv[1]])
sys.stderr.flush()
log.os._exit(code)
"""
    command = [sys.executable, "-c", program, str(short_tmp / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (75, "drahealth: the reason\n")


@pytest.mark.usefixtures("slow_close")
def test_repeated_report_is_logged_only_with_changed_sources(log):
    first = report(device("gpu-0"))
    failing = SourceSample("hugepages", SourceState.FAILING, 0, 1, 1, "EIO")
    log.reports.show(first)
    for _ in range(3):
        log.reports.show(replace(first), is_repeat=True)
    newest = log.reports._report
    log.reports.show(replace(first), is_repeat=True)
    assert log.reports._report is newest, "a report without news does not wake the thread"
    log.reports.show(replace(first, sources=(*first.sources, failing)), is_repeat=True)
    assert log.reports.close()
    assert log.read_until("source hugepages") == "INFO gpu-0 Healthy\nWARNING source hugepages failing EIO\n"


@pytest.mark.usefixtures("slow_close")
def test_other_log_lines_are_written_in_order(log):
    for number in range(100):
        LOG.info("line %d", number)
    assert log.reports.close()
    assert log.read_until("line 99") == "".join(f"INFO line {number}\n" for number in range(100))


def test_stalled_reader_blocks_neither_reports_nor_logging_nor_close(log):
    large = report(*(device(f"gpu-{i}", SHRUNK) for i in range(2000)))
    for _ in range(1000):
        log.reports.show(large)
    LOG.warning("another line")
    assert not log.reports.close()
    seen = log.read_until("gpu-1999 Unhealthy")  # the thread continues once the pipe is read
    assert "WARNING another line\n" in seen
    log.reports._thread.join(PATIENCE_S)
    assert not log.reports._thread.is_alive()


def test_report_that_cannot_be_compared_does_not_end_the_log(log):
    log.reports.show(object())  # a bug
    assert "AttributeError" in log.read_until("AttributeError")
    log.reports.show(report(device("gpu-0")))
    assert "INFO gpu-0 Healthy\n" in log.read_until("gpu-0")


def test_full_queue_drops_the_oldest_lines_and_counts_them():
    woken: list[None] = []
    backlog = LogQueue(LineFormatter(journal=True), lambda: woken.append(None))
    for number in range(MAX_QUEUED + 42):
        backlog.handle(logging.makeLogRecord({"levelno": logging.INFO, "msg": f"line {number}"}))
    assert len(woken) == MAX_QUEUED + 42
    lost, *lines = backlog.take().splitlines()
    assert lost == "<4>log: 42 lines were dropped: the reader of this log was stalled"
    assert lines == [f"<6>line {number}" for number in range(42, MAX_QUEUED + 42)]
    assert backlog.is_empty()
    assert backlog.take() == ""


def test_record_that_cannot_be_formatted_is_named():
    backlog = LogQueue(LineFormatter(journal=True), lambda: None)
    wrong = {"levelno": 30, "pathname": "example.py", "lineno": 7, "msg": "%d pages", "args": ("no",)}
    backlog.handle(logging.makeLogRecord(wrong))
    assert backlog.take() == "<4>example.py:7: log line cannot be formatted: TypeError\n"
