"""The record of uses as text and as a document. Pure: it takes values, a style and a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent.cli.explain.find import title
from agent.cli.output.document import API_VERSION
from agent.cli.output.text import (
    GAP,
    LOOKS,
    Entry,
    brief,
    clean,
    format_age,
    format_count,
    format_entries,
    wrap,
)
from agent.model.health import Severity
from agent.model.time import rfc3339
from agent.model.uses import Ending

if TYPE_CHECKING:
    from pathlib import Path

    from agent.cli.output.terminal import Style
    from agent.model.uses import DeviceState, DeviceUsage

TITLES: Final = ("ENDED", "LASTED", "POD", "OWNER", "CLAIM", "DEVICE", "HOW", "STATE")
HOW: Final = {
    Ending.RELEASED: "released",
    Ending.SUCCEEDED: "succeeded",
    Ending.FAILED: "failed",
    Ending.REPLACED: "claim replaced",
    Ending.AWAY: "unseen",
}
NONE: Final = (
    Entry("written by", "the agent, where a kubelet prepares claims: [history] in its configuration"),
    Entry("elsewhere", "--state-dir for another agent's record"),
)
"""What helps whoever sees the list for the first time, and it is empty."""


def render(uses: Sequence[DeviceUsage], style: Style, *, now_s: float, left_s: float, hidden: int = 0) -> str:
    """The list.

    Args:
        left_s: When the agent last wrote [s since 1970].
        hidden: How many more there are.
    """
    lines = [_headline(uses, hidden), "", *table(uses, style, now_s)]
    entries = []
    if hidden:
        entries.append(Entry("older", f"{format_count(hidden, 'use')}: --all shows them"))
    if any(use.ended is None for use in uses):
        entries.append(
            Entry("running", f"as of {format_age(now_s - left_s)} ago, or later: 'explain' asks now")
        )
    if entries:
        lines += ["", *format_entries(entries, style)]
    return "\n".join(lines) + "\n"


def render_none(path: Path, style: Style) -> str:
    """Where nothing is recorded."""
    entries = [Entry("looked for", clean(str(path))), *NONE]
    return "\n".join(["nothing is recorded", "", *format_entries(entries, style)]) + "\n"


def _headline(uses: Sequence[DeviceUsage], hidden: int) -> str:
    running = sum(use.ended is None for use in uses)
    bad = sum(use.state.severity > Severity.INFO for use in uses if use.ended)
    shown = f"the newest {len(uses):,} of {len(uses) + hidden:,} uses" if hidden else _count(uses)
    ended = f"{len(uses) - running:,} ended"
    which = f", {bad:,} of them with a device that was not healthy" if bad else ""
    return f"{shown}: {running:,} running, {ended}{which}"


def _count(uses: Sequence[DeviceUsage]) -> str:
    return format_count(len(uses), "use of a device", "uses of devices")


def table(uses: Sequence[DeviceUsage], style: Style, now_s: float) -> Iterator[str]:
    """A line for each use, and below it what was wrong."""
    rows = [_row(use, now_s) for use in uses]
    widths = [max(len(row[i]) for row in (TITLES, *rows)) for i in range(len(TITLES))]

    def cells(row: Sequence[str]) -> str:
        return GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    yield style.paint(f"  {cells(TITLES)}", "dim")
    for use, row in zip(uses, rows, strict=True):
        look = LOOKS[use.state.severity]
        yield f"{style.paint(look.sign if style.unicode else look.ascii, look.colour)} {cells(row)}"
        for text in _troubles(use):
            yield from wrap(text, style, first="    ", rest="      ")


def _row(use: DeviceUsage, now_s: float) -> tuple[str, ...]:
    ended = use.ended
    lasted_s = ended.lasted_s if ended else now_s - use.began.wall_s
    return (
        f"{format_age(now_s - ended.noticed_s)} ago" if ended else "running",
        f"{'>' if use.before else ''}{format_age(lasted_s)}",
        pod_name(use),
        clean(use.owner),
        clean(str(use.claim)),
        clean(title(use.device)),
        HOW[ended.ending] if ended else "",
        LOOKS[use.state.severity].word,
    )


def pod_name(use: DeviceUsage) -> str:
    """The pod's name; with a question mark those that it may have; else its UID."""
    if use.pod.name or not use.maybe:
        return clean(str(use.pod))
    return clean(" or ".join(f"{name}?" for name in use.maybe))


def _troubles(use: DeviceUsage) -> Iterator[str]:
    """What was wrong with the device, and what is not known of the end."""
    if use.state.severity > Severity.INFO:
        yield _words(use.state)
    if use.worst.severity > max(use.state.severity, Severity.INFO):
        yield f"meanwhile {LOOKS[use.worst.severity].word}: {_words(use.worst)}"
    if use.ended and use.ended.ending is Ending.AWAY:
        between = f"{rfc3339(use.ended.seen_s)} and {rfc3339(use.ended.noticed_s)}"
        yield f"ended between {between}, while the agent was away; the state is the last known"


def _words(state: DeviceState) -> str:
    since = f" (since {rfc3339(state.since_s)})" if state.since_s > 0 else ""
    return clean(": ".join(filter(None, [state.code, brief(state.evidence)]))) + since


# --- for programs ------------------------------------------------------------------------------------------


def document(uses: Sequence[DeviceUsage], path: Path, left_s: float) -> dict[str, Any]:
    """All of it. Keys are only ever added."""
    return {
        "apiVersion": API_VERSION,
        "file": str(path),
        "lastWritten": rfc3339(left_s) if left_s > 0 else None,
        "uses": [use_document(use) for use in uses],
    }


def use_document(use: DeviceUsage) -> dict[str, Any]:
    """One of them."""
    ended = use.ended
    return {
        "pod": {name: value or None for name, value in use.pod._asdict().items()},
        "podMayBe": list(use.maybe),
        "owner": use.owner or None,
        "claim": {name: value or None for name, value in use.claim._asdict().items()},
        "device": {"driver": use.device.driver, "pool": use.device.pool, "name": use.device.device},
        "requests": list(use.requests),
        "containers": list(use.containers),
        "began": rfc3339(use.began.wall_s),
        "beganBefore": use.before,
        "toldBy": list(use.told_by),
        "state": _state(use.state),
        "worst": _state(use.worst),
        "ended": {
            "how": ended.ending,
            "lastSeen": rfc3339(ended.seen_s),
            "noticed": rfc3339(ended.noticed_s),
            "lastedSeconds": ended.lasted_s,
        }
        if ended
        else None,
    }


def _state(state: DeviceState) -> dict[str, Any]:
    return {
        "health": state.health.name.capitalize(),
        "severity": state.severity.name.lower(),
        "code": state.code or None,
        "evidence": state.evidence or None,
        "since": rfc3339(state.since_s) if state.since_s > 0 else None,
    }
