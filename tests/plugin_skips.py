"""The last line of a test run: what was not tested on this machine, and why, grouped by reason.

A green run that skipped half of its claims must differ from one that proved them all. Steps before pytest
that had to leave something out write a line each into the file that ``SKIPPED_BEFORE`` names.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of ``pytest.skip`` or of the mark, without pytest's own prefix."""
    words = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return words.removeprefix("Skipped: ")


def skip_line(before: Iterable[str], reasons: Iterable[str]) -> str:
    """Return one line with the steps that were left out, then the reasons, the most frequent first."""
    counted = sorted(Counter(reasons).items(), key=lambda item: (-item[1], item[0]))
    parts = [*before, *(f"{number} test{'s' if number > 1 else ''}: {reason}" for reason, number in counted)]
    return "skipped: " + ("; ".join(" ".join(part.split()) for part in parts) or "nothing")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Keep the reason of a skip in a Trio task, which pytest-trio drops."""
    try:
        return (yield)
    except pytest.skip.Exception as skip:
        reason = skip.__context__
        while isinstance(reason, BaseExceptionGroup):
            reason = reason.exceptions[0]
        if skip.msg or not isinstance(reason, pytest.skip.Exception):
            raise
        raise reason from None


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the line about skips after pytest's own summary."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly:
        return
    file = os.environ.get("SKIPPED_BEFORE")
    before = Path(file).read_text("utf-8").splitlines() if file else []
    reporter.ensure_newline()
    reporter.write_line(skip_line(before, map(reason_of, reporter.stats.get("skipped", []))))
