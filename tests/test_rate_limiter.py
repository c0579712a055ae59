"""Log lines: a rate limit reports the first event at once, then once a minute; a logger raises nothing."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import agent
from agent.system.output import LOG_INTERVAL_S, LogRateLimiter, get_logger


def test_limiter_reports_first_event_and_then_counts_once_a_minute() -> None:
    now = 0.0
    seldom = LogRateLimiter(lambda: now)
    assert [seldom.tick() for _ in range(4)] == [1, 0, 0, 0]
    now = LOG_INTERVAL_S - 0.1
    assert seldom.tick() == 0
    now = LOG_INTERVAL_S
    assert [seldom.tick(), seldom.tick()] == [5, 0]
    now = 5 * LOG_INTERVAL_S
    assert seldom.tick() == 2


def fail(*_: object, **__: object) -> bool:
    raise LookupError("no claim in this context")


def with_filter(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    logger.addFilter(fail)


def with_handler(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", fail)
    logger.addHandler(handler)


def with_record_factory(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", fail)


@pytest.mark.parametrize("broken", [with_filter, with_handler, with_record_factory])
def test_logger_prints_exceptions_of_the_driver_and_raises_none(
    broken: Callable[[logging.Logger, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = get_logger(f"agent.test_{broken.__name__}")
    broken(log, monkeypatch)
    for write in (log.warning, log.error, log.exception):
        write("device %s: lost", "gpu-0")
    log.log(logging.ERROR, "device %s: lost", "gpu-0")
    printed = capsys.readouterr().err
    assert printed.count("LookupError: no claim in this context") == 4
    assert "device %s: lost" in printed


def test_logger_keeps_the_place_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("agent.test_place").warning("device %s: lost", "gpu-0")
    (record,) = caplog.records
    assert (record.funcName, record.getMessage()) == (
        "test_logger_keeps_the_place_of_the_call",
        "device gpu-0: lost",
    )


def test_modules_use_the_logger_that_does_not_raise() -> None:
    root = Path(agent.__file__).parent
    plain = [path for path in root.rglob("*.py") if "logging.getLogger(__name__)" in path.read_text()]
    assert plain == [root / "cli/output/log.py"], "the agent's own handler; others use get_logger()"
