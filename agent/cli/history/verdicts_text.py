"""Output of ``drahealth history`` about health: its changes, and the availability of devices. Pure.

The output is a table, JSON or CSV.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent.cli.explain.name_lookup import full_device_name
from agent.cli.output.csv_text import format_csv
from agent.cli.output.json import API_VERSION, DEVICE_REF
from agent.cli.output.table import ListEntry, RowText, TextTable, format_entries
from agent.cli.output.text import BADGES, clean, format_count, format_ranges, shorten_ids
from agent.health.availability_statistics import USABLE
from agent.model.health import Severity
from agent.model.time import format_age, rfc3339
from agent.model.verdict_history import STATE_OF_SEVERITY, RecordedState

if TYPE_CHECKING:
    from pathlib import Path

    from agent.cli.output.terminal import TextStyle
    from agent.health.availability_statistics import (
        AvailabilitySummary,
        DeviceAvailability,
        RuleActivity,
        Timeline,
        VerdictSpan,
    )
    from agent.model.claim import DeviceRef

WORDS: Final = {
    RecordedState.ABSENT: "Absent",
    **{STATE_OF_SEVERITY[severity]: badge.word for severity, badge in BADGES.items()},
}
SEVERITIES: Final = {
    RecordedState.ABSENT: Severity.UNKNOWN,
    **{state: severity for severity, state in STATE_OF_SEVERITY.items() if severity is not Severity.INFO},
}
"""Severity whose sign marks each state of a device's health in tables."""


def short_names(devices: Iterable[DeviceRef]) -> dict[DeviceRef, str]:
    """Return the names of devices for a table, without the pool if all devices are of one pool."""
    known = tuple(devices)
    if len({device.pool for device in known}) == 1:
        return {ref: clean("/".join(filter(None, (ref.driver, ref.device)))) for ref in known}
    return {ref: clean(full_device_name(ref)) for ref in known}


def _sign(state: RecordedState, style: TextStyle) -> str:
    return BADGES[SEVERITIES[state]].coloured_sign(style)


# --- changes -----------------------------------------------------------------------------------------------


def render_changes(spans: Sequence[VerdictSpan], style: TextStyle, *, hidden: int = 0) -> str:
    """Return the table of changes, each with the duration of the verdict that follows it.

    `hidden` is the number of older changes that are left out.
    """
    devices = {one.change.device for one in spans}
    count = format_count(len(spans), "change of a verdict", "changes of verdicts")
    shown = f"the newest {len(spans):,} of {len(spans) + hidden:,} changes" if hidden else count
    lines = [
        f"{shown}, of {format_count(len(devices), 'device')}",
        "",
        *_change_lines(spans, style),
    ]
    if hidden:
        entry = ListEntry("older", f"{format_count(hidden, 'change')}: shown with --all")
        lines += ["", *format_entries([entry], style)]
    return "\n".join(lines) + "\n"


def _change_lines(spans: Sequence[VerdictSpan], style: TextStyle) -> Iterator[str]:
    table = TextTable("CHANGED", "FROM", "TO", "LASTED", "DEVICE", text_below=True)
    names = short_names({one.change.device for one in spans})
    for one in spans:
        state = one.verdict.state
        assert one.change.before is not None
        table.add(
            rfc3339(one.change.at_s),
            WORDS[one.change.before],
            WORDS[state],
            f"{'>' if one.is_newest else ''}{format_age(one.end_s - one.begin_s)}",
            names[one.change.device],
            sign=_sign(state, style),
            text=(RowText(text, hanging=2) for text in _remarks(one)),
        )
    return table.lines(style)


def _remarks(one: VerdictSpan) -> Iterator[str]:
    for cause in one.verdict.causes:
        yield clean(": ".join(filter(None, [cause.code, shorten_ids(cause.evidence)])))
    if not one.change.offset_s:
        yield "found by the first report of the agent; changed while the agent did not run"


def change_document(one: VerdictSpan, timeline: Timeline) -> dict[str, Any]:
    """Return a recorded change of a device's verdict as JSON."""
    return {
        "device": DEVICE_REF(one.change.device),
        "at": rfc3339(one.change.at_s),
        "from": one.change.before,
        "to": one.verdict.state,
        "causes": [
            {"code": cause.code, "severity": cause.severity.name.lower(), "evidence": cause.evidence}
            for cause in one.verdict.causes
        ],
        "lastedSeconds": round(one.end_s - one.begin_s, 3),
        "notObservedSeconds": round(timeline.unobserved_s(one.begin_s, one.end_s), 3),
        "continues": one.is_newest,
        "foundAtStart": not one.change.offset_s,
    }


CHANGE_COLUMNS: Final = (
    "at", "driver", "pool", "device", "from", "to", "lasted_seconds", "not_observed_seconds", "continues",
    "found_at_start", "codes", "evidence",
)  # fmt: skip


def changes_csv(spans: Sequence[VerdictSpan], timeline: Timeline) -> str:
    """Return changes of verdicts as CSV, with a line of titles."""
    documents = (change_document(one, timeline) for one in spans)
    return format_csv(
        CHANGE_COLUMNS,
        (
            (
                one["at"],
                *one["device"].values(),
                one["from"],
                one["to"],
                one["lastedSeconds"],
                one["notObservedSeconds"],
                *(str(one[key]).lower() for key in ("continues", "foundAtStart")),
                " ".join(cause["code"] for cause in one["causes"]),
                "; ".join(cause["evidence"] for cause in one["causes"]),
            )
            for one in documents
        ),
    )


# --- availability ------------------------------------------------------------------------------------------


def render_summary(summary: AvailabilitySummary, style: TextStyle) -> str:
    """Return the table of devices with their availability, and the table of rules."""
    devices = summary.devices
    lost_s, total_s = sum(one.lost_s for one in devices), sum(one.total_s for one in devices)
    names = short_names(one.device for one in devices)
    lines = [
        f"{format_count(len(devices), 'device')}: {lost_s / 3600:,.1f} of {total_s / 3600:,.1f} device-hours "
        "lost",
        "",
        *_device_lines(devices, names, style),
    ]
    if flapping := [
        ListEntry("flaps", f"{names[one.device]}: stopped being usable {one.interruptions} times in an hour")
        for one in devices
        if one.is_flapping
    ]:
        lines += ["", *format_entries(flapping, style)]
    if summary.rules:
        lines += ["", *_rule_lines(summary.rules, names, style)]
    return "\n".join(lines) + "\n"


def _device_lines(
    devices: Sequence[DeviceAvailability], names: dict[DeviceRef, str], style: TextStyle
) -> Iterator[str]:
    titles = (
        "OVER",
        "HEALTHY",
        "UNHEALTHY",
        "UNKNOWN",
        "NO DATA",
        "FAULTS",
        "MTBF",
        "MTTR",
        "LOST",
        "DEVICE",
    )
    table = TextTable(*titles)
    for one in devices:
        times_s = (
            sum(one.observed_s[state] for state in USABLE),
            one.observed_s[RecordedState.UNHEALTHY],
            one.observed_s[RecordedState.UNKNOWN],
            one.observed_s[RecordedState.ABSENT] + one.not_observed_s,
        )
        table.add(
            format_age(one.total_s),
            *(format_share(seconds, one.total_s) for seconds in times_s),
            str(one.faults),
            *(
                "-" if mean is None else format_age(mean)
                for mean in (one.mean_between_faults_s, one.mean_to_recover_s)
            ),
            format_age(one.lost_s),
            names[one.device],
            sign=_sign(one.state, style),
        )
    return table.lines(style)


def _rule_lines(
    rules: Sequence[RuleActivity], names: dict[DeviceRef, str], style: TextStyle
) -> Iterator[str]:
    table = TextTable("RAISED", "ACTIVE", "RULE", text_title="DEVICES", min_text_width=20)
    for rule in rules:
        devices = format_ranges(names[ref] for ref in sorted(rule.devices))
        text = [RowText(devices)]
        table.add(f"{rule.raised:,}", format_age(rule.active_s), clean(rule.code), text=text)
    return table.lines(style)


def format_share(part: float, whole: float) -> str:
    """Format a share in percent: ``0 %`` only for none of the whole, ``100 %`` only for all of it."""
    share = part / whole if whole > 0 else 0.0
    if part <= 0 or share == 0:
        return "0%"
    if share < 0.001:
        return "<0.1%"
    if share >= 1:
        return "100%"
    return ">99.9%" if share > 0.999 else f"{100 * share:.1f}%"


def summary_document(summary: AvailabilitySummary, path: Path) -> dict[str, Any]:
    """Return the availability of devices as JSON. Later versions only add keys."""
    return {
        "apiVersion": API_VERSION,
        "file": str(path),
        "devices": [_device_document(one) for one in summary.devices],
        "rules": [
            {
                "code": rule.code,
                "raised": rule.raised,
                "activeSeconds": round(rule.active_s, 3),
                "devices": [DEVICE_REF(device) for device in rule.devices],
            }
            for rule in summary.rules
        ],
    }


def _device_document(one: DeviceAvailability) -> dict[str, Any]:
    seconds = {str(state): one.observed_s[state] for state in RecordedState} | {
        "notObserved": one.not_observed_s
    }
    whole = one.total_s
    return {
        "device": DEVICE_REF(one.device),
        "begin": rfc3339(one.begin_s),
        "end": rfc3339(one.end_s),
        "state": one.state,
        "seconds": {name: round(part, 3) for name, part in seconds.items()},
        "shares": {name: round(part / whole, 6) if whole else 0.0 for name, part in seconds.items()},
        "changes": one.changes,
        "faults": one.faults,
        "meanTimeBetweenFaultsSeconds": _rounded(one.mean_between_faults_s),
        "meanTimeToRecoverSeconds": _rounded(one.mean_to_recover_s),
        "lostHours": round(one.lost_s / 3600, 4),
        "interruptionsPerHour": one.interruptions,
        "flapping": one.is_flapping,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


SUMMARY_COLUMNS: Final = (
    "driver", "pool", "device", "begin", "end", "state",
    *(f"{state}_seconds" for state in RecordedState), "not_observed_seconds", "changes", "faults",
    "mean_time_between_faults_seconds", "mean_time_to_recover_seconds", "lost_hours",
    "interruptions_per_hour", "flapping",
)  # fmt: skip


def summary_csv(summary: AvailabilitySummary) -> str:
    """Return the availability of devices as CSV, with a line of titles; an empty value is not known."""
    documents = map(_device_document, summary.devices)
    return format_csv(
        SUMMARY_COLUMNS,
        (
            (
                *one["device"].values(),
                *(one[key] for key in ("begin", "end", "state")),
                *one["seconds"].values(),
                *(
                    one[key]
                    for key in (
                        "changes",
                        "faults",
                        "meanTimeBetweenFaultsSeconds",
                        "meanTimeToRecoverSeconds",
                        "lostHours",
                        "interruptionsPerHour",
                    )
                ),
                str(one["flapping"]).lower(),
            )
            for one in documents
        ),
    )
