"""What a check says: a verdict and what it saw; and how several of these are put together."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

SHOWN: Final = 3
"""Culprits that are named; the others are counted."""
NAME_LIMIT: Final = 80
TEXT_LIMIT: Final = 200


class Verdict(StrEnum):
    """How a check ended, the worse the later."""

    PASS = "pass"
    NOT_RUN = "not run"
    """Nothing was seen that it could judge. Never as good as a pass."""
    WARN = "warn"
    FAIL = "fail"


RANK: Final = {verdict: rank for rank, verdict in enumerate(Verdict)}


class Judgement(NamedTuple):
    """What a check says."""

    verdict: Verdict
    saw: str
    """With its numbers; of a check that was not run, why."""


def passed(saw: str) -> Judgement:
    """All is well."""
    return Judgement(Verdict.PASS, saw)


def warned(saw: str) -> Judgement:
    """Some kubelets, or people, are led astray."""
    return Judgement(Verdict.WARN, saw)


def failed(saw: str) -> Judgement:
    """Health or registration is lost."""
    return Judgement(Verdict.FAIL, saw)


def not_run(why: str) -> Judgement:
    """Nothing can be said."""
    return Judgement(Verdict.NOT_RUN, why)


def worst(found: Iterable[Judgement], otherwise: Judgement) -> Judgement:
    """The worst of what was found, with the first few that are as bad; ``otherwise`` if that is nothing."""
    found = list(found)
    if not found:
        return otherwise
    verdict = max((one.verdict for one in found), key=RANK.__getitem__)
    return Judgement(verdict, listed(one.saw for one in found if one.verdict is verdict))


def listed(texts: Iterable[str]) -> str:
    """The first few, each once, and how many more there are."""
    different = list(dict.fromkeys(texts))
    more = len(different) - SHOWN
    return "; ".join([*different[:SHOWN], *([f"and {more:,} more"] if more > 0 else [])])


def shorten(text: str, limit: int = NAME_LIMIT) -> str:
    """At most so many characters of it."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def spell(data: bytes, limit: int = NAME_LIMIT) -> str:
    """Bytes as text; those that are none are spelled out."""
    return shorten(data.decode(errors="backslashreplace"), limit)


def said(status: str, text: str) -> str:
    """A gRPC status and its text; where there was none, only what happened."""
    return shorten(f"{status or 'no status'}: {text}" if text else status or "no status", TEXT_LIMIT)


def seconds(value: float) -> str:
    """A duration with as many digits as matter: ``12 ms``, ``1.3 s``, ``40 s``."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 9.95 else f"{value:,.0f} s"


def count(number: int, one: str) -> str:
    """``1 list``, ``2 lists``."""
    return f"{number:,} {one if number == 1 else one + 's'}"
