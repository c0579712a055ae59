"""Outcomes of conformance checks, and functions that combine outcomes and format their texts."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

ITEMS_SHOWN: Final = 3
"""Number of items that join_first() lists; the others are only counted."""
NAME_LIMIT: Final = 80
"""Length at which shorten() cuts a name by default [characters]."""
TEXT_LIMIT: Final = 200
"""Length at which a gRPC status with its text is cut [characters]."""


class CheckVerdict(StrEnum):
    """Verdict of a conformance check, from the best to the worst."""

    PASS = "pass"
    SKIPPED = "skipped"
    """The options of the session exclude the check."""
    NOT_RUN = "not run"
    """The session recorded too little to evaluate the check."""
    WARN = "warn"
    FAIL = "fail"


VERDICT_RANKS: Final = {verdict: rank for rank, verdict in enumerate(CheckVerdict)}
"""Rank of each verdict; the verdict with the greatest rank is the worst."""


class CheckOutcome(NamedTuple):
    """Verdict of a conformance check with the observation behind it."""

    verdict: CheckVerdict
    observation: str
    """Behaviour of the driver, with numbers; for SKIPPED and NOT_RUN: the reason."""


def passed(observation: str) -> CheckOutcome:
    """Return an outcome with verdict PASS: the driver behaves as the kubelet expects."""
    return CheckOutcome(CheckVerdict.PASS, observation)


def warned(observation: str) -> CheckOutcome:
    """Return an outcome with verdict WARN: some kubelets, or operators, are misled."""
    return CheckOutcome(CheckVerdict.WARN, observation)


def failed(observation: str) -> CheckOutcome:
    """Return an outcome with verdict FAIL: kubelets lose the driver's health reports or registration."""
    return CheckOutcome(CheckVerdict.FAIL, observation)


def skipped(reason: str) -> CheckOutcome:
    """Return an outcome with verdict SKIPPED: the options of the command exclude the check."""
    return CheckOutcome(CheckVerdict.SKIPPED, reason)


def not_run(reason: str) -> CheckOutcome:
    """Return an outcome with verdict NOT_RUN: the session recorded nothing that the check could evaluate."""
    return CheckOutcome(CheckVerdict.NOT_RUN, reason)


def worst_outcome(outcomes: Iterable[CheckOutcome], otherwise: CheckOutcome) -> CheckOutcome:
    """Return the worst verdict of several outcomes, with the first observations of the outcomes that have it.

    `otherwise` is returned if there are no outcomes.
    """
    outcomes = list(outcomes)
    if not outcomes:
        return otherwise
    verdict = max((outcome.verdict for outcome in outcomes), key=VERDICT_RANKS.__getitem__)
    return CheckOutcome(verdict, join_first(item.observation for item in outcomes if item.verdict is verdict))


def join_first(texts: Iterable[str]) -> str:
    """Join the first three different texts with semicolons, and add how many more there are."""
    different = list(dict.fromkeys(texts))
    more = len(different) - ITEMS_SHOWN
    return "; ".join([*different[:ITEMS_SHOWN], *([f"and {more:,} more"] if more > 0 else [])])


def shorten(text: str, limit: int = NAME_LIMIT) -> str:
    """Cut a text to `limit` characters; a cut text ends with three dots."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def escape_bytes(data: bytes, limit: int = NAME_LIMIT) -> str:
    """Decode bytes for display, with escapes for bytes that are not UTF-8; cut at `limit` characters."""
    return shorten(data.decode(errors="backslashreplace"), limit)


def describe_status(status: str, text: str) -> str:
    """Return ``<gRPC status>: <text>``; an empty status, as of a lost connection, becomes ``no status``."""
    return shorten(f"{status or 'no status'}: {text}" if text else status or "no status", TEXT_LIMIT)


def format_seconds(value: float) -> str:
    """Format a duration with its unit: ``12 ms``, ``1.3 s``, ``40 s``."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 9.95 else f"{value:,.0f} s"


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 list``, ``2 lists``."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"
