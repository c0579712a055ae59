"""All checks, judged."""

from __future__ import annotations

from typing import NamedTuple

from agent.conform.observed import Observed
from agent.conform.table import CHECKS, Check
from agent.conform.verdicts import Verdict, not_run


class Result(NamedTuple):
    """One check, judged."""

    check: Check
    verdict: Verdict
    saw: str


def judge(seen: Observed) -> tuple[Result, ...]:
    """One result for each check, in the order of the table."""
    return tuple(_judge(check, seen) for check in CHECKS)


def _judge(check: Check, seen: Observed) -> Result:
    missing = check.need(seen)
    found = not_run(missing) if missing else check.judge(seen)
    return Result(check, found.verdict, found.saw)
