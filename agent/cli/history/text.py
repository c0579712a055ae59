"""Output of ``drahealth history`` as a table, JSON and CSV. Pure.

It shows recorded uses of devices by pods, changes in health, and the availability of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent.cli.explain.model import full_device_name
from agent.cli.output.json import API_VERSION, DEVICE_REF, POD_REF, ObjectKeys
from agent.cli.output.text import (
    BADGES,
    ListEntry,
    RowText,
    TextTable,
    clean,
    format_count,
    format_csv,
    format_entries,
    format_ranges,
    shorten_ids,
)
from agent.model.device_usage import UsageEndKind
from agent.model.health import Severity
from agent.model.history import STATE_OF_SEVERITY, USABLE, RecordedState
from agent.model.time import format_age, rfc3339

if TYPE_CHECKING:
    from pathlib import Path

    from agent.cli.output.terminal import TextStyle
    from agent.health.availability_statistics import (
        AvailabilitySummary,
        DeviceAvailability,
        ObservedTimeAxis,
        RuleActivity,
        VerdictSpan,
    )
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
    """Yield the names by which an operator can select the pod of a use.

    These are namespace/name, name, UID, and names that the pod possibly has.
    """
    if use.pod.name:
        yield str(use.pod)
        yield use.pod.name
    yield from filter(None, [use.pod.uid])
    for name in use.maybe:
        yield name
        yield name.partition("/")[2]


def claim_names(use: PodDeviceUsage) -> Iterator[str]:
    """Yield the names by which an operator can select the claim of a use: namespace/name, name, UID."""
    yield str(use.claim)
    yield use.claim.name
    yield from filter(None, [use.claim.uid])


def device_names(device: DeviceRef) -> Iterator[str]:
    """Yield the names by which an operator can select a device: driver/pool/name, pool/name, name."""
    yield full_device_name(device)
    yield f"{device.pool}/{device.device}"
    yield device.device


# --- table -------------------------------------------------------------------------------------------------


def render(
    uses: Sequence[PodDeviceUsage], style: TextStyle, *, now_s: float, left_s: float, hidden: int = 0
) -> str:
    """Return the table of uses of devices by pods.

    `left_s` is the time of the last write to the history file [s since 1970]. `hidden` is the number of older
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
    unhealthy = f", {bad:,} of them with a device that was not healthy at the end" if bad else ""
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
    """Yield texts on the faults of the device during a use, and on an uncertain end of the use."""
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
    """Return the uses of devices as JSON. Later versions only add keys.

    If `uses` is None, the document has no uses.
    """
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
    """Return the uses of devices as CSV, with a line of titles.

    An empty value is not known, or the use has not ended yet.
    """
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


# --- changes in health, and availability -------------------------------------------------------------------

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
    """Return the table of changes of the verdicts on devices, each with the duration of the new verdict.

    `hidden` is the number of older changes that are left out.
    """
    devices = {span.change.device for span in spans}
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
    names = short_names({span.change.device for span in spans})
    for span in spans:
        state = span.verdict.state
        assert span.change.before is not None
        table.add(
            rfc3339(span.change.at_s),
            WORDS[span.change.before],
            WORDS[state],
            f"{'>' if span.is_newest else ''}{format_age(span.end_s - span.begin_s)}",
            names[span.change.device],
            sign=_sign(state, style),
            text=(RowText(text, hanging=2) for text in _remarks(span)),
        )
    return table.lines(style)


def _remarks(span: VerdictSpan) -> Iterator[str]:
    for cause in span.verdict.causes:
        yield clean(": ".join(filter(None, [cause.code, shorten_ids(cause.evidence)])))
    if not span.change.offset_s:
        yield "found by the first report of the agent; changed while the agent did not run"


def change_document(span: VerdictSpan, timeline: ObservedTimeAxis) -> dict[str, Any]:
    """Return a recorded change of a device's verdict as JSON.

    `timeline` has the periods in which the agent observed the devices.
    """
    return {
        "device": DEVICE_REF(span.change.device),
        "at": rfc3339(span.change.at_s),
        "from": span.change.before,
        "to": span.verdict.state,
        "causes": [
            {"code": cause.code, "severity": cause.severity.name.lower(), "evidence": cause.evidence}
            for cause in span.verdict.causes
        ],
        "lastedSeconds": round(span.end_s - span.begin_s, 3),
        "notObservedSeconds": round(timeline.unobserved_s(span.begin_s, span.end_s), 3),
        "continues": span.is_newest,
        "foundAtStart": not span.change.offset_s,
    }


CHANGE_COLUMNS: Final = (
    "at", "driver", "pool", "device", "from", "to", "lasted_seconds", "not_observed_seconds", "continues",
    "found_at_start", "codes", "evidence",
)  # fmt: skip


def changes_csv(spans: Sequence[VerdictSpan], timeline: ObservedTimeAxis) -> str:
    """Return changes of verdicts as CSV, with a line of titles."""
    documents = (change_document(span, timeline) for span in spans)
    return format_csv(
        CHANGE_COLUMNS,
        (
            (
                document["at"],
                *document["device"].values(),
                document["from"],
                document["to"],
                document["lastedSeconds"],
                document["notObservedSeconds"],
                *(str(document[key]).lower() for key in ("continues", "foundAtStart")),
                " ".join(cause["code"] for cause in document["causes"]),
                "; ".join(cause["evidence"] for cause in document["causes"]),
            )
            for document in documents
        ),
    )


# --- availability ------------------------------------------------------------------------------------------


def render_summary(summary: AvailabilitySummary, style: TextStyle) -> str:
    """Return the table of devices with their availability, and the table of rules."""
    devices = summary.devices
    lost_s, total_s = sum(device.lost_s for device in devices), sum(device.total_s for device in devices)
    names = short_names(device.device for device in devices)
    lines = [
        f"{format_count(len(devices), 'device')}: {lost_s / 3600:,.1f} of {total_s / 3600:,.1f} device-hours "
        "lost",
        "",
        *_device_lines(devices, names, style),
    ]
    if flapping := [
        ListEntry("flaps", f"{names[dev.device]}: stopped being usable {dev.interruptions} times in an hour")
        for dev in devices
        if dev.is_flapping
    ]:
        lines += ["", *format_entries(flapping, style)]
    if summary.rules:
        lines += ["", *_rule_lines(summary.rules, names, style)]
    return "\n".join(lines) + "\n"


def _device_lines(
    devices: Sequence[DeviceAvailability], names: dict[DeviceRef, str], style: TextStyle
) -> Iterator[str]:
    table = TextTable(
        "OVER", "HEALTHY", "UNHEALTHY", "UNKNOWN", "NO DATA", "FAULTS", "MTBF", "MTTR", "LOST", "DEVICE"
    )
    for device in devices:
        times_s = (
            sum(device.observed_s[state] for state in USABLE),
            device.observed_s[RecordedState.UNHEALTHY],
            device.observed_s[RecordedState.UNKNOWN],
            device.observed_s[RecordedState.ABSENT] + device.not_observed_s,
        )
        table.add(
            format_age(device.total_s),
            *(format_share(seconds, device.total_s) for seconds in times_s),
            str(device.faults),
            *(
                "-" if mean is None else format_age(mean)
                for mean in (device.mean_between_faults_s, device.mean_to_recover_s)
            ),
            format_age(device.lost_s),
            names[device.device],
            sign=_sign(device.state, style),
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
    """Format the share of `part` in `whole` in percent.

    The text is ``0%`` only if `part` is zero, and ``100%`` only if `part` is equal to `whole`.
    """
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
        "devices": [_device_document(device) for device in summary.devices],
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


def _device_document(device: DeviceAvailability) -> dict[str, Any]:
    seconds = {str(state): device.observed_s[state] for state in RecordedState} | {
        "notObserved": device.not_observed_s
    }
    whole = device.total_s
    return {
        "device": DEVICE_REF(device.device),
        "begin": rfc3339(device.begin_s),
        "end": rfc3339(device.end_s),
        "state": device.state,
        "seconds": {name: round(part, 3) for name, part in seconds.items()},
        "shares": {name: round(part / whole, 6) if whole else 0.0 for name, part in seconds.items()},
        "changes": device.changes,
        "faults": device.faults,
        "meanTimeBetweenFaultsSeconds": _round_seconds(device.mean_between_faults_s),
        "meanTimeToRecoverSeconds": _round_seconds(device.mean_to_recover_s),
        "lostHours": round(device.lost_s / 3600, 4),
        "interruptionsPerHour": device.interruptions,
        "flapping": device.is_flapping,
    }


def _round_seconds(seconds: float | None) -> float | None:
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
                *document["device"].values(),
                *(document[key] for key in ("begin", "end", "state")),
                *document["seconds"].values(),
                *(
                    document[key]
                    for key in (
                        "changes",
                        "faults",
                        "meanTimeBetweenFaultsSeconds",
                        "meanTimeToRecoverSeconds",
                        "lostHours",
                        "interruptionsPerHour",
                    )
                ),
                str(document["flapping"]).lower(),
            )
            for document in documents
        ),
    )
