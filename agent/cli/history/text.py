"""Output of ``drahealth history``: recorded uses of devices by pods, as a table, JSON and CSV. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent.cli.explain.name_lookup import full_device_name
from agent.cli.output.csv_text import format_csv
from agent.cli.output.json import API_VERSION, DEVICE_REF, POD_REF, ObjectKeys
from agent.cli.output.table import ListEntry, RowText, TextTable, format_entries
from agent.cli.output.text import BADGES, clean, format_count, shorten_ids
from agent.model.device_usage import UsageEndKind
from agent.model.health import Severity
from agent.model.time import format_age, rfc3339

if TYPE_CHECKING:
    from pathlib import Path

    from agent.cli.output.terminal import TextStyle
    from agent.model.claim import DeviceRef
    from agent.model.device_usage import DeviceState, PodDeviceUsage

END_WORDS: Final = {
    UsageEndKind.RELEASED: "released",
    UsageEndKind.SUCCEEDED: "succeeded",
    UsageEndKind.FAILED: "failed",
    UsageEndKind.REPLACED: "claim replaced",
    UsageEndKind.AWAY: "unseen",
}
EMPTY_HINTS: Final = (
    ListEntry("written by", "the agent: [history] in its configuration"),
    ListEntry("elsewhere", "--state-dir for another agent's record"),
)
"""Hints for an operator if no history file exists."""


# --- names -------------------------------------------------------------------------------------------------


def pod_names(use: PodDeviceUsage) -> Iterator[str]:
    """Yield the names that find the pod of a use: namespace/name, name, UID, and possible names."""
    if use.pod.name:
        yield str(use.pod)
        yield use.pod.name
    yield from filter(None, [use.pod.uid])
    for name in use.maybe:
        yield name
        yield name.partition("/")[2]


def claim_names(use: PodDeviceUsage) -> Iterator[str]:
    """Yield the names that find the claim of a use: namespace/name, name, UID."""
    yield str(use.claim)
    yield use.claim.name
    yield from filter(None, [use.claim.uid])


def device_names(device: DeviceRef) -> Iterator[str]:
    """Yield the names that find a device: driver/pool/name, pool/name, name."""
    yield full_device_name(device)
    yield f"{device.pool}/{device.device}"
    yield device.device


# --- table -------------------------------------------------------------------------------------------------


def render(
    uses: Sequence[PodDeviceUsage], style: TextStyle, *, now_s: float, left_s: float, hidden: int = 0
) -> str:
    """Return the table of uses.

    `left_s` is the time of the last write to the history file [s since 1970]; `hidden` is the number of older
    uses that are left out.
    """
    lines = [_headline(uses, hidden), "", *usage_lines(uses, style, now_s)]
    entries = []
    if hidden:
        entries.append(ListEntry("older", f"{format_count(hidden, 'use')}: shown with --all"))
    if any(use.ended is None for use in uses):
        age = format_age(now_s - left_s)
        entries.append(
            ListEntry("running", f"as of {age} ago or later; 'drahealth explain' shows the present")
        )
    if entries:
        lines += ["", *format_entries(entries, style)]
    return "\n".join(lines) + "\n"


def render_none(path: Path, style: TextStyle) -> str:
    """Return the text for an operator if the history file `path` does not exist."""
    entries = [ListEntry("looked for", clean(str(path))), *EMPTY_HINTS]
    return "\n".join(["nothing is recorded", "", *format_entries(entries, style)]) + "\n"


def _headline(uses: Sequence[PodDeviceUsage], hidden: int) -> str:
    running = sum(use.ended is None for use in uses)
    bad = sum(use.state.severity > Severity.INFO for use in uses if use.ended)
    count = format_count(len(uses), "use of a device", "uses of devices")
    shown = f"the newest {len(uses):,} of {len(uses) + hidden:,} uses" if hidden else count
    unhealthy = f", {bad:,} of them with a device that was not healthy" if bad else ""
    return f"{shown}: {running:,} running, {len(uses) - running:,} ended{unhealthy}"


def usage_lines(uses: Sequence[PodDeviceUsage], style: TextStyle, now_s: float) -> Iterator[str]:
    """Yield a table with one line for each use of a device, and below it the device's faults."""
    table = TextTable("ENDED", "LASTED", "POD", "OWNER", "CLAIM", "DEVICE", "HOW", "STATE", text_below=True)
    for use in uses:
        ended = use.ended
        lasted_s = ended.lasted_s if ended else now_s - use.began.wall_s
        badge = BADGES[use.state.severity]
        table.add(
            f"{format_age(now_s - ended.noticed_s)} ago" if ended else "running",
            f"{'>' if use.before else ''}{format_age(lasted_s)}",
            pod_name(use),
            clean(use.owner),
            clean(str(use.claim)),
            clean(full_device_name(use.device)),
            END_WORDS[ended.ending] if ended else "",
            badge.word,
            sign=badge.coloured_sign(style),
            text=(RowText(text, hanging=2) for text in _findings(use)),
        )
    return table.lines(style)


def pod_name(use: PodDeviceUsage) -> str:
    """Return the pod's name; if it is not known, possible names with question marks, else the UID."""
    if use.pod.name or not use.maybe:
        return clean(str(use.pod))
    return clean(" or ".join(f"{name}?" for name in use.maybe))


def _findings(use: PodDeviceUsage) -> Iterator[str]:
    """Yield the faults of the device during a use, and a remark if the time of the use's end is uncertain."""
    if use.state.severity > Severity.INFO:
        yield _state_text(use.state)
    if use.worst.severity > max(use.state.severity, Severity.INFO):
        yield f"in between {BADGES[use.worst.severity].word}: {_state_text(use.worst)}"
    if use.ended and use.ended.ending is UsageEndKind.AWAY:
        between = f"{rfc3339(use.ended.seen_s)} and {rfc3339(use.ended.noticed_s)}"
        yield f"ended between {between}, while the agent did not run; the state is the last known one"


def _state_text(state: DeviceState) -> str:
    since = f" (since {rfc3339(state.since_s)})" if state.since_s > 0 else ""
    return clean(": ".join(filter(None, [state.code, shorten_ids(state.evidence)]))) + since


# --- JSON --------------------------------------------------------------------------------------------------

STATE: Final = ObjectKeys("health severity code? evidence? since?:since_s")
USE: Final = ObjectKeys(
    """
    pod podMayBe:maybe owner? claim device requests containers began beganBefore:before toldBy:sources
    state worst ended
    """,  # verbatim
    pod=POD_REF,
    claim=POD_REF,
    device=DEVICE_REF,
    state=STATE,
    worst=STATE,
    ended=ObjectKeys("how:ending lastSeen:seen_s noticed:noticed_s lastedSeconds:lasted_s"),
)


def document(uses: Sequence[PodDeviceUsage] | None, path: Path, left_s: float) -> dict[str, Any]:
    """Return the uses of devices as JSON; None: without them. Later versions only add keys."""
    return {
        "apiVersion": API_VERSION,
        "file": str(path),
        "lastWritten": rfc3339(left_s) if left_s > 0 else None,
        **({} if uses is None else {"uses": [USE(use) for use in uses]}),
    }


USE_COLUMNS: Final = (
    "pod_namespace", "pod_name", "pod_uid", "owner", "claim_namespace", "claim_name", "claim_uid", "driver",
    "pool", "device", "began", "began_before", "health", "severity", "code", "worst_severity", "worst_code",
    "how", "last_seen", "noticed", "lasted_seconds",
)  # fmt: skip


def uses_csv(uses: Sequence[PodDeviceUsage]) -> str:
    """Return the uses of devices as CSV, with a line of titles; an empty value is not known, or not yet."""
    return format_csv(USE_COLUMNS, map(_csv_row, map(USE, uses)))


def _csv_row(use: dict[str, Any]) -> list[object]:
    state, worst, ended = use["state"], use["worst"], use["ended"] or {}
    return [
        *use["pod"].values(),
        use["owner"],
        *use["claim"].values(),
        *use["device"].values(),
        use["began"],
        str(use["beganBefore"]).lower(),
        *(state[key] for key in ("health", "severity", "code")),
        *(worst[key] for key in ("severity", "code")),
        *(ended.get(key) for key in ("how", "lastSeen", "noticed", "lastedSeconds")),
    ]
