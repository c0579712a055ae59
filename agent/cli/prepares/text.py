"""Prepares as text and as a document. Pure: it takes values, a style and a time, and returns text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.cli.output.document import API_VERSION
from agent.cli.output.text import GAP, LOOKS, Entry, clean, format_age, format_count, format_entries, wrap
from agent.model.health import Severity
from agent.model.prepare import ErrorClass
from agent.model.time import rfc3339
from agent.prepare.ledger import STICKY

if TYPE_CHECKING:
    from pathlib import Path

    from agent.cli.output.terminal import Style
    from agent.cli.prepares.command import Problem
    from agent.model.claim import ClaimRef, DeviceRef
    from agent.model.prepare import DriverFault, Outcome, PrepareVerdict
    from agent.store.prepares import Prepares

TITLES: Final = ("DRIVER", "CLAIM", "CLASS", "CODE", "COUNT", "SINCE", "LAST")
NONE: Final = (
    Entry("written by", "DRA drivers that embed drahealth, at every claim that they prepare on this node"),
    Entry("elsewhere", "--kubelet-dir for another root of the kubelet, --file for one driver's file"),
    Entry("to try", "drahealth classify --errno ENOSPC --doing cdi: what would be said of an error"),
)
"""What helps whoever sees the list for the first time, and it is empty."""
NAMES_MAX: Final = 4
"""Devices that are named; of more, how many there are."""


class Claim(NamedTuple):
    """One line of the list."""

    driver: str
    version: str
    outcome: Outcome
    over_wall_s: float
    """Since when it is unprepared; 0: it is not."""

    @property
    def ref(self) -> ClaimRef:
        """Which claim."""
        return self.outcome.claim

    @property
    def state(self) -> str:
        """``prepared``, ``failing``, or ``over``: it failed, and is no longer there."""
        if self.over_wall_s:
            return "over"
        return "failing" if self.outcome.verdict else "prepared"

    @property
    def rank(self) -> int:
        """3: it fails for good; 2: that may pass; 1: prepared; 0: over."""
        verdict = self.outcome.verdict
        if self.over_wall_s:
            return 0
        return 1 if verdict is None else 2 + (verdict.error_class in STICKY)


def claims_of(found: Iterable[Prepares]) -> tuple[Claim, ...]:
    """Every claim that is there, or failed within the last day; those that fail first, then the newest."""
    claims = [
        Claim(one.driver, kept.version, kept.outcome, kept.over_wall_s)
        for one in found
        for kept in one.book.claims.values()
        if kept.outcome.verdict or not kept.over_wall_s
    ]
    return tuple(sorted(claims, key=lambda one: (-one.rank, -one.outcome.at_wall_s, one.driver, one.ref)))


def exit_of(claims: Iterable[Claim]) -> int:
    """0: all are prepared; 1: what fails may pass by itself; 2: it will not."""
    return max(0, max((claim.rank for claim in claims), default=0) - 1)


# --- for people --------------------------------------------------------------------------------------------

_LOOK: Final = (LOOKS[Severity.OK], LOOKS[Severity.OK], LOOKS[Severity.DEGRADED], LOOKS[Severity.UNHEALTHY])


def render(
    claims: Sequence[Claim], found: Iterable[Prepares], style: Style, *, now_s: float, whole: bool
) -> str:
    """The list; empty if there is none.

    Args:
        whole: All that is known of each.
    """
    told = [fault for one in found for fault in one.book.told.faults if not fault.excused_wall_s]
    if not claims:
        return ""
    rows = [_row(claim, now_s) for claim in claims]
    widths = [max(len(row[i]) for row in (TITLES, *rows)) for i in range(len(TITLES))]

    def cells(row: Sequence[str]) -> str:
        return GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))

    lines = [_headline(claims, style), "", style.paint(f"  {cells(TITLES)}".rstrip(), "dim")]
    at = sum(widths[:2]) + 2 * len(GAP)
    for claim, row in zip(claims, rows, strict=True):
        look = _LOOK[claim.rank]
        sign = style.paint(look.sign if style.unicode else look.ascii, look.colour)
        padded, end = cells(row).rstrip(), at + len(row[2])
        if claim.rank:
            lines.append(f"{sign} {padded[:at]}{style.paint(padded[at:end], look.colour)}{padded[end:]}")
        else:
            lines.append(style.paint(f"{'·' if style.unicode else '-'} {padded}", "dim"))
        lines += _body(claim, style, now_s, whole=whole)
    entries = [_told_entry(fault, now_s) for fault in told]
    if entries and not whole:
        lines += ["", *format_entries(entries, style)]
    return "\n".join(lines) + "\n"


def render_none(
    found: Iterable[Prepares], looked: Iterable[Path], absent: Iterable[Path], style: Style, *, unread: int
) -> str:
    """Where no claim is known: which drivers were heard, where they were looked for, and what that means.

    Args:
        absent: Directories that are not there, so that nothing can be in them.
        unread: How many places could not be read, so that nobody knows what is in them.
    """
    head = "no prepare of a claim could be read" if unread else "no prepare of a claim is known"
    entries = [Entry("found", clean(f"{one.driver} {one.version}".rstrip() + ": no claim")) for one in found]
    for path in looked:
        missing = next((f" ({top} is not there)" for top in absent if path.is_relative_to(top)), "")
        entries.append(Entry("looked for", clean(f"{path}{missing}")))
    entries += NONE
    return "\n".join([head, "", *format_entries(entries, style)]) + "\n"


def _headline(claims: Sequence[Claim], style: Style) -> str:
    words = ("over", "prepared", "failing", "failing for good")
    counts = Counter(claim.rank for claim in claims)
    tally = ", ".join(
        style.paint(f"{counts[rank]} {words[rank]}", _LOOK[rank].colour if rank else "dim")
        for rank in sorted(counts, reverse=True)
    )
    return f"{format_count(len(claims), 'claim')}: {tally}"


def _row(claim: Claim, now_s: float) -> list[str]:
    verdict, outcome = claim.outcome.verdict, claim.outcome
    who = [clean(claim.driver), clean(str(claim.ref))]
    last = f"{format_age(now_s - outcome.at_wall_s)} ago"
    if verdict is None:
        return [*who, "prepared", "", "", "", last]
    since = format_age(now_s - verdict.first_wall_s)
    return [*who, verdict.error_class, clean(verdict.code), f"{verdict.count:,}", since, last]


def _body(claim: Claim, style: Style, now_s: float, *, whole: bool) -> Iterator[str]:
    verdict = claim.outcome.verdict
    indent = " " * 4
    if verdict is not None:
        blamed = verdict.error_class is ErrorClass.FAILED_DEVICE
        lead = f"{_names(verdict.devices)}: " if blamed and verdict.devices else ""
        yield from wrap(f"{lead}{clean(verdict.summary)}", style, first=indent, rest=indent)
        if claim.over_wall_s:
            over = f"unprepared {format_age(now_s - claim.over_wall_s)} ago"
            yield from wrap(over, style, first=indent, rest=indent, paint=("dim",))
        elif verdict.advice:
            arrow = "→ " if style.unicode else "> "
            advice = arrow + clean(verdict.advice)
            yield from wrap(advice, style, first=indent, rest=indent + "  ", paint=("cyan",))
    if whole:
        facts = [Entry(title, clean(text)) for title, text in _facts(claim) if text]
        yield from (f"  {line}" for line in format_entries(facts, style))


def _facts(claim: Claim) -> Iterator[tuple[str, str]]:
    outcome = claim.outcome
    yield "uid", claim.ref.uid
    yield "driver", f"{claim.driver} {claim.version}".rstrip()
    yield "devices", ", ".join(f"{one.pool}/{one.device}" for one in outcome.devices)
    if verdict := outcome.verdict:
        if verdict.error_class is ErrorClass.FAILED_DEVICE:
            yield "to blame", ", ".join(map(str, verdict.devices))
        yield "requests", ", ".join(verdict.requests)
        yield "scope", verdict.scope
        yield "detail", verdict.detail
        for evidence in verdict.evidence:
            yield "shown by", evidence
        yield "first", rfc3339(verdict.first_wall_s)
    yield "last", rfc3339(outcome.at_wall_s)


def _names(devices: Sequence[DeviceRef]) -> str:
    names = [clean(device.device) for device in devices[:NAMES_MAX]]
    more = len(devices) - NAMES_MAX
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _told_entry(fault: DriverFault, now_s: float) -> Entry:
    age = format_age(now_s - fault.told_wall_s)
    text = f"{fault.subject}: {fault.code}: {fault.evidence} ({age} ago, while preparing {fault.claim})"
    return Entry("found broken", clean(text))


# --- for programs ------------------------------------------------------------------------------------------


def document(
    claims: Iterable[Claim], found: Iterable[Prepares], problems: Iterable[Problem], looked: Iterable[Path]
) -> dict[str, Any]:
    """All of it. Keys are only ever added."""
    return {
        "apiVersion": API_VERSION,
        "claims": [claim_document(claim) for claim in claims],
        "foundBroken": [_told(fault) for one in found for fault in one.book.told.faults],
        "problems": [{"file": str(one.path), "reason": one.reason} for one in problems],
        "lookedFor": [str(path) for path in looked],
    }


def claim_document(claim: Claim) -> dict[str, Any]:
    """How the last prepare of one claim ended."""
    outcome = claim.outcome
    return {
        "driver": claim.driver,
        "driverVersion": claim.version,
        **outcome.claim._asdict(),
        "state": claim.state,
        "devices": [_device(device) for device in outcome.devices],
        "last": rfc3339(outcome.at_wall_s),
        "unprepared": rfc3339(claim.over_wall_s) if claim.over_wall_s else None,
        "verdict": _verdict(outcome.verdict) if outcome.verdict else None,
    }


def _verdict(verdict: PrepareVerdict) -> dict[str, Any]:
    return {
        "class": verdict.error_class,
        "code": verdict.code,
        "scope": verdict.scope,
        "requests": list(verdict.requests),
        "devices": [_device(device) for device in verdict.devices],
        "summary": verdict.summary,
        "detail": verdict.detail,
        "evidence": list(verdict.evidence),
        "confidence": verdict.confidence,
        "advice": verdict.advice,
        "retryAfterSeconds": verdict.retry_after_s,
        "health": verdict.health.name.capitalize() if verdict.health is not None else None,
        "taint": verdict.taint._asdict() if verdict.taint else None,
        "count": verdict.count,
        "since": rfc3339(verdict.first_wall_s),
        "last": rfc3339(verdict.last_wall_s),
    }


def _device(device: DeviceRef) -> dict[str, str]:
    return {"driver": device.driver, "pool": device.pool, "name": device.device}


def _told(fault: DriverFault) -> dict[str, Any]:
    return {
        **_device(fault.device),
        "code": fault.code,
        "evidence": fault.evidence,
        "advice": fault.advice,
        "claim": fault.claim._asdict(),
        "since": rfc3339(fault.told_wall_s),
        "excused": rfc3339(fault.excused_wall_s) if fault.excused_wall_s else None,
    }
