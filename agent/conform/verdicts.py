"""Outcome of a conformance check, and functions that combine outcomes and format observations."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

SHOWN: Final = 3
"""Number of devices or other items that an observation names; the others are only counted."""
NAME_LIMIT: Final = 80
TEXT_LIMIT: Final = 200


class CheckVerdict(StrEnum):
    """Verdict of a conformance check, from the best to the worst."""

    PASS = "pass"
    NOT_RUN = "not run"
    """The session recorded nothing that the check could evaluate. Never as good as a pass."""
    WARN = "warn"
    FAIL = "fail"


RANK: Final = {verdict: rank for rank, verdict in enumerate(CheckVerdict)}


class CheckOutcome(NamedTuple):
    """Verdict and observation of a conformance check."""

    verdict: CheckVerdict
    observation: str
    """Observation with its numbers; for a check that was not run, the reason."""


def passed(observation: str) -> CheckOutcome:
    """Return the outcome of a driver that meets the check."""
    return CheckOutcome(CheckVerdict.PASS, observation)


def warned(observation: str) -> CheckOutcome:
    """Return the outcome of a driver that misleads some kubelets, or operators."""
    return CheckOutcome(CheckVerdict.WARN, observation)


def failed(observation: str) -> CheckOutcome:
    """Return the outcome of a driver whose health or registration is lost."""
    return CheckOutcome(CheckVerdict.FAIL, observation)


def not_run(reason: str) -> CheckOutcome:
    """Return the outcome of a check that had nothing to evaluate."""
    return CheckOutcome(CheckVerdict.NOT_RUN, reason)


def worst(found: Iterable[CheckOutcome], otherwise: CheckOutcome) -> CheckOutcome:
    """Return the worst outcome with the first observations of that verdict; `otherwise` if there is none."""
    found = list(found)
    if not found:
        return otherwise
    verdict = max((outcome.verdict for outcome in found), key=RANK.__getitem__)
    return CheckOutcome(verdict, listed(item.observation for item in found if item.verdict is verdict))


def listed(texts: Iterable[str]) -> str:
    """Join the first few texts, each once, and add how many more there are."""
    different = list(dict.fromkeys(texts))
    more = len(different) - SHOWN
    return "; ".join([*different[:SHOWN], *([f"and {more:,} more"] if more > 0 else [])])


def shorten(text: str, limit: int = NAME_LIMIT) -> str:
    """Cut a text to `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def escape_bytes(data: bytes, limit: int = NAME_LIMIT) -> str:
    """Decode bytes for display; bytes that are not UTF-8 become escapes."""
    return shorten(data.decode(errors="backslashreplace"), limit)


def describe_status(status: str, text: str) -> str:
    """Return a gRPC status with its text; with an empty status, the text alone."""
    return shorten(f"{status or 'no status'}: {text}" if text else status or "no status", TEXT_LIMIT)


def seconds(value: float) -> str:
    """Format a duration with as many digits as matter: ``12 ms``, ``1.3 s``, ``40 s``."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 9.95 else f"{value:,.0f} s"


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 list``, ``2 lists``."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"
