"""Reports and status as text for people. Pure: it takes values, a style and a time, and returns text.

One line per device, what to do below those that are not well, and at the foot what was not judged and why,
the sources and the cgroups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from agent.cli.text import (
    GAP,
    LOOKS,
    Entry,
    clean,
    format_age,
    format_bytes,
    format_count,
    format_entries,
    home_of,
    name_of,
    word_of,
    wrap,
)
from agent.model.health import NotApplicable, Severity
from agent.model.snapshot import CoreStats, SourceSample, SourceState
from agent.model.time import NS, Instant, rfc3339

if TYPE_CHECKING:
    from agent.cli.terminal import Style
    from agent.model.health import DeviceHealth
    from agent.model.report import Report
    from agent.model.status import AgentStatus
    from agent.sources.processes import ProcessFacts

NARROWEST: Final = 32
"""A message with fewer columns than this goes below its device [columns]."""

DEVICE_SOURCES: Final = frozenset({"cpus", "hugepages"})
"""The sources that devices are found by."""

SOURCE_PAINT: Final[dict[SourceState, tuple[str, ...]]] = {
    SourceState.OK: (),
    SourceState.STARTING: ("dim",),
    SourceState.ABSENT: ("dim",),
    SourceState.FAILING: ("yellow",),
    SourceState.STALLED: ("red",),
}


def render_report(
    report: Report,
    style: Style,
    *,
    now_s: float | None = None,
    processes: Sequence[ProcessFacts] = (),
) -> str:
    """The report as a table.

    Args:
        now_s: Wall time that ages are counted to [s]. Without it there are no ages: a single look knows none.
        processes: Shown at the foot.
    """
    lines = [_headline(home_of(report), Counter(d.severity for d in report.devices), style)]
    if devices := list(_devices(report, style, now_s)):
        lines += ["", *devices]
    if report.notes:
        lines += ["", style.paint("  NOTES", "dim")]
        for note in report.notes:
            age = "" if now_s is None else f" ({format_age(now_s - note.cause.since.wall_s)} ago)"
            text = f"{clean(note.subject)}: {clean(note.cause.code)}: {clean(note.cause.evidence)}{age}"
            lines += wrap(text, style, first="  ", rest="    ")
    if foot := list(_foot(report, style, now_s, processes)):
        lines += ["", *foot]
    return "\n".join(lines) + "\n"


def _headline(node: str, counts: Counter[Severity], style: Style) -> str:
    """``worker-7  3 devices: 1 unhealthy, 2 healthy``, worst first."""
    words: dict[str, int] = {}
    for severity in sorted(counts, reverse=True):
        word = word_of(severity).lower()
        words[word] = words.get(word, 0) + counts[severity]
    colours = {look.word.lower(): look.colour for look in LOOKS.values()}
    tally = ", ".join(style.paint(f"{n} {word}", colours[word]) for word, n in words.items())
    devices = f"{format_count(counts.total(), 'device')}: {tally}" if tally else "no devices"
    return f"{style.paint(clean(node), 'bold')}{GAP if node else ''}{devices}"


def _devices(report: Report, style: Style, now_s: float | None) -> Iterator[str]:
    """The table proper, or why there is none."""
    rows = [_row(device, home_of(report), now_s) for device in report.devices]
    if not rows:
        if reasons := [_why_none(s) for s in report.sources if s.name in DEVICE_SOURCES]:
            yield from wrap(f"nothing to judge: {'; '.join(reasons)}", style, first="  ", rest="    ")
        return
    titles = ["NAME", "HEALTH", *([] if now_s is None else ["SINCE", "VERIFIED"])]
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]

    def cells(row: Sequence[str]) -> str:
        return GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))

    column = 2 + len(cells(titles)) + len(GAP)
    beside = style.width is None or style.width - column >= NARROWEST
    yield style.paint(f"  {cells(titles)}{GAP}MESSAGE" if beside else f"  {cells(titles)}", "dim")
    for device, row in zip(report.devices, rows, strict=True):
        look = LOOKS[device.severity]
        sign = style.paint(look.sign if style.unicode else look.ascii, look.colour)
        # Padded first, painted second: an escape sequence has no width.
        padded, at = cells(row), widths[0] + len(GAP)
        painted = padded[:at] + style.paint(look.word, look.colour) + padded[at + len(look.word) :]
        body = list(_body(device, style, " " * (column if beside else 4)))
        if beside and body:
            yield f"{sign} {painted}{GAP}{body[0][column:]}"
            yield from body[1:]
        else:
            yield f"{sign} {painted}".rstrip()
            yield from body


def _body(device: DeviceHealth, style: Style, indent: str) -> Iterator[str]:
    """What is to be said of a device: each cause and what to do about it, else the message.

    The message is made of the causes, so it is only shown of a device whose causes are not known.
    """
    arrow, dot = ("→ ", "· ") if style.unicode else ("> ", "- ")
    if not device.causes:
        yield from wrap(clean(device.message), style, first=indent, rest=indent)
    for i, cause in enumerate(device.causes):
        text, told = f"{clean(cause.code)}: {clean(cause.evidence)}", cause.severity > Severity.INFO
        if not told:
            yield from wrap(dot + text, style, first=indent, rest=indent + "  ", paint=("dim",))
            continue
        yield from wrap(text, style, first=indent, rest=indent)
        if cause.advice and cause.advice not in [later.advice for later in device.causes[i + 1 :]]:
            yield from wrap(
                arrow + clean(cause.advice), style, first=indent, rest=indent + "  ", paint=("cyan",)
            )


def _row(device: DeviceHealth, home: str, now_s: float | None) -> list[str]:
    row = [name_of(device, home), word_of(device.severity)]
    if now_s is not None:
        row.append(format_age(now_s - device.since.wall_s))
        row.append(f"{format_age(now_s - device.verified.wall_s)} ago")
    return row


def _why_none(source: SourceSample) -> str:
    return f"{source.name} {source.state}" + (f" ({clean(source.detail)})" if source.detail else "")


def _foot(
    report: Report, style: Style, now_s: float | None, processes: Sequence[ProcessFacts]
) -> Iterator[str]:
    entries = [Entry("not applicable", text) for text in _collapse(report.not_applicable)]
    entries += [Entry("not evaluated", text) for text in _collapse(report.not_evaluated)]
    entries += _sources(report.sources, report.at, now_s)
    if report.sources:
        entries.append(_groups(report.groups, report.core))
    entries += [Entry("processes", _process(process)) for process in processes]
    yield from format_entries(entries, style)


def _process(process: ProcessFacts) -> str:
    return (
        f"{clean(process.name)} {process.pid}: since {rfc3339(process.since_s)}, {process.cpu_s:,.1f} s CPU, "
        f"{format_bytes(process.rss_bytes)}, {format_count(process.threads, 'thread')}"
    )


def _collapse(rules: Iterable[NotApplicable]) -> Iterator[str]:
    """Rules with the same reason as one text: the reason, then which rules of which devices."""
    by_reason: dict[str, list[NotApplicable]] = {}
    for rule in rules:
        by_reason.setdefault(rule.reason, []).append(rule)
    for reason, same in by_reason.items():
        codes = list(dict.fromkeys(clean(rule.code) for rule in same))
        devices = list(dict.fromkeys(clean(rule.device) for rule in same if rule.device))
        where = f" on {', '.join(devices)}" if len(devices) <= 3 else f" on {len(devices)} devices"
        yield f"{clean(reason)}: {', '.join(codes)}{where if devices else ''}"


def _sources(sources: Iterable[SourceSample], at: Instant | None, now_s: float | None) -> Iterator[Entry]:
    """The sources that are well on one line, each of the others on its own."""
    well = [clean(s.name) for s in sources if s.state is SourceState.OK]
    if well:
        yield Entry("sources", f"{', '.join(well)}: ok")
    for s in sources:
        if s.state is SourceState.OK:
            continue
        facts = [str(s.state)]
        if s.state is not SourceState.ABSENT and s.beat_ns and at and now_s is not None:
            read_s = at.wall_s - (at.mono_ns - s.beat_ns) / NS
            facts.append(f"last read {format_age(now_s - read_s)} ago")
        if s.failures:
            facts.append(format_count(s.failures, "failure"))
        if s.detail:
            facts.append(clean(s.detail))
        yield Entry("sources", f"{clean(s.name)}: {', '.join(facts)}", SOURCE_PAINT[s.state])


def _groups(groups: int, core: CoreStats) -> Entry:
    facts = [f"{groups:,} watched"]
    if core.groups_dropped:
        facts.append(f"{core.groups_dropped:,} beyond cgroups.max-groups are not")
    if core.unwatched:
        refused = format_count(core.unwatched, "inotify watch", "inotify watches")
        facts.append(f"{refused} refused by the kernel, read by the sweep instead")
    return Entry("cgroups", ", ".join(facts), ("yellow",) if len(facts) > 1 else ())


def render_status(status: AgentStatus, style: Style, *, now_s: float) -> str:
    """The agent's own state: what it costs and whom it serves."""
    counts = Counter({tally.severity: tally.devices for tally in status.tallies})
    uptime_s = max(now_s - status.started_wall_s, 1e-9)
    core = status.core
    costs = [
        f"{status.cpu_s:.2f} s CPU ({100 * status.cpu_s / uptime_s:.2f} % of a core)",
        format_bytes(status.rss_bytes),
        format_count(status.threads, "thread"),
        format_count(status.descriptors, "descriptor"),
    ]
    core_costs = [
        format_count(core.passes, "pass", "passes"),
        format_count(core.wakes, "wake-up"),
        format_count(core.reads, "read"),
        format_count(core.opens, "open"),
        format_count(core.descriptors, "descriptor"),
        format_count(core.watches, "watch", "watches"),
        f"{format_bytes(core.kernel_bytes)} in the kernel",
    ]
    reports = "none yet"
    if status.at:
        reports = f"{status.publications:,} published, the last {format_age(now_s - status.at.wall_s)} ago"
    entries = [
        Entry("agent", f"drahealth {clean(status.version)}, pid {status.pid}, up {format_age(uptime_s)}"),
        Entry("costs", ", ".join(costs)),
        Entry("core", ", ".join(core_costs)),
        Entry("reports", reports),
        *(
            Entry("subscribers", f"{clean(one.socket)}: {format_count(one.streams, 'stream')}")
            for one in status.subscribers
        ),
        *_sources(status.sources, status.at, now_s),
        _groups(status.groups, core),
    ]
    return "\n".join([_headline(status.node, counts, style), "", *format_entries(entries, style)]) + "\n"
