"""Reports and status as text for people. Pure: it takes values, a style and a time, and returns text.

One line per device, and below those that are not well what to do and which piece of hardware it is. Devices
that drivers declare stand below their driver's name. MIG instances that only repeat their GPU are told of
with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from agent.cli.output.fold import fold_instances, identity_of
from agent.cli.output.footer import foot_of, groups_of, sources_of
from agent.cli.output.text import (
    GAP,
    LOOKS,
    Entry,
    brief,
    clean,
    format_age,
    format_bytes,
    format_count,
    format_entries,
    home_of,
    name_of,
    name_of_subject,
    word_of,
    wrap,
)
from agent.model.health import Severity

if TYPE_CHECKING:
    from agent.cli.output.terminal import Style
    from agent.model.health import DeviceHealth
    from agent.model.report import Report
    from agent.model.source import SourceSample
    from agent.model.status import AgentStatus
    from agent.sources.processes import ProcessFacts

NARROWEST: Final = 32
"""A message with fewer columns than this goes below its device [columns]."""

Advised = tuple[str, str, str]
"""A code, its evidence, and the advice that was given for it."""

DEVICE_SOURCES: Final = frozenset({"cpus", "hugepages", "nvml"})
"""The sources that devices are found by."""


def render_report(
    report: Report,
    style: Style,
    *,
    now_s: float | None = None,
    processes: Sequence[ProcessFacts] = (),
    worst_first: bool = False,
) -> str:
    """The report as a table.

    Args:
        now_s: Wall time that ages are counted to [s]. Without it there are no ages: a single look knows none.
        processes: Shown at the foot.
        worst_first: Instead of in the order of their names: for a window that will not hold all.
    """
    lines = [_headline(home_of(report), Counter(d.severity for d in report.devices), style)]
    if devices := list(_devices(report, style, now_s, worst_first=worst_first)):
        lines += ["", *devices]
    if notes := list(_notes(report, style, now_s)):
        lines += ["", style.paint("  NOTES", "dim"), *notes]
    if foot := list(format_entries(list(foot_of(report, now_s, processes)), style)):
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


def _devices(report: Report, style: Style, now_s: float | None, *, worst_first: bool) -> Iterator[str]:
    """The table proper, or why there is none."""
    home, folds = home_of(report), fold_instances(report.devices)
    if worst_first:
        folds.sort(key=lambda fold: fold.device.severity, reverse=True)
    owners = ["" if worst_first else _owner_of(fold.device, home) for fold in folds]
    rows = [
        _row(clean(fold.device.device) if owner else name_of(fold.device, home), fold.device, now_s)
        for owner, fold in zip(owners, folds, strict=True)
    ]
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
    yield style.paint(f"  {cells(titles)}{GAP}MESSAGE" if beside else f"  {cells(titles)}".rstrip(), "dim")
    above, advised = "", set[Advised]()
    for fold, owner, row in zip(folds, owners, rows, strict=True):
        if owner != above:
            yield from wrap(owner, style, first="  ", rest="    ", paint=("bold",))
        above = owner
        look = LOOKS[fold.device.severity]
        sign = style.paint(look.sign if style.unicode else look.ascii, look.colour)
        # Padded first, painted second: an escape sequence has no width.
        padded, at = cells(row), widths[0] + len(GAP)
        painted = padded[:at] + style.paint(look.word, look.colour) + padded[at + len(look.word) :]
        indent = " " * (column if beside else 4)
        body = list(_body(fold.device, style, indent, advised))
        body += wrap(fold.words, style, first=indent, rest=indent, paint=("dim",))
        if beside and body:
            yield f"{sign} {painted}{GAP}{body[0][column:]}"
            yield from body[1:]
        else:
            yield f"{sign} {painted}".rstrip()
            yield from body


def _owner_of(device: DeviceHealth, home: str) -> str:
    """Whose device it is, if it is not the host's own; above all that are."""
    pool = f", pool {device.pool}" if device.pool != home else ""
    return clean(f"{device.driver}{pool}") if device.driver else ""


def _body(device: DeviceHealth, style: Style, indent: str, advised: set[Advised]) -> Iterator[str]:
    """What is to be said of a device: each cause and what to do about it, else the message; and which it is.

    The message is made of the causes, so it is only shown of a device whose causes are not known.

    Args:
        advised: Grows. What to do about the same cause of a device above stands there: a driver that fails is
            one thing to mend, not eight, and a GPU that its driver declares is the host's.
    """
    arrow, dot = _marks(style)
    if not device.causes:
        yield from wrap(brief(device.message), style, first=indent, rest=indent)
    for i, cause in enumerate(device.causes):
        text, told = f"{clean(cause.code)}: {brief(cause.evidence)}", cause.severity > Severity.INFO
        if not told:
            yield from wrap(dot + text, style, first=indent, rest=indent + "  ", paint=("dim",))
            continue
        yield from wrap(text, style, first=indent, rest=indent)
        later = [other.advice for other in device.causes[i + 1 :]]
        known = (cause.code, cause.evidence, cause.advice)
        if cause.advice and cause.advice not in later and known not in advised:
            yield from wrap(
                arrow + clean(cause.advice), style, first=indent, rest=indent + "  ", paint=("cyan",)
            )
        advised.add(known)
    if device.severity > Severity.INFO:
        yield from wrap(identity_of(device), style, first=indent, rest=indent + "  ", paint=("dim",))


def _marks(style: Style) -> tuple[str, str]:
    """Before what to do, and before what is only worth knowing."""
    return ("→ ", "· ") if style.unicode else ("> ", "- ")


def _row(name: str, device: DeviceHealth, now_s: float | None) -> list[str]:
    row = [name, word_of(device.severity)]
    if now_s is not None:
        row.append(format_age(now_s - device.since.wall_s))
        row.append(f"{format_age(now_s - device.verified.wall_s)} ago")
    return row


def _notes(report: Report, style: Style, now_s: float | None) -> Iterator[str]:
    """What is about no device, worst first; what to do that is the same for several once, below the last."""
    arrow, dot = _marks(style)
    home = home_of(report)
    notes = sorted(report.notes, key=lambda note: note.cause.severity, reverse=True)
    for i, note in enumerate(notes):
        cause = note.cause
        who = "" if cause.code.startswith(f"{note.subject}.") else f"{brief(note.subject)}: "
        devices = ", ".join(name_of_subject(subject, home) for subject in note.devices)
        uses = f" (uses {devices})" if devices else ""
        age = "" if now_s is None else f" ({format_age(now_s - cause.since.wall_s)} ago)"
        text = f"{who}{clean(cause.code)}: {brief(cause.evidence)}{uses}{age}"
        if cause.severity <= Severity.INFO:
            yield from wrap(dot + text, style, first="", rest="  ")
            continue
        look = LOOKS[cause.severity]
        first, *rest = wrap(text, style, first="  ", rest="  ")
        yield style.paint(look.sign if style.unicode else look.ascii, look.colour) + first[1:]
        yield from rest
        if cause.advice and cause.advice not in [other.cause.advice for other in notes[i + 1 :]]:
            yield from wrap(arrow + clean(cause.advice), style, first="  ", rest="    ", paint=("cyan",))


def _why_none(source: SourceSample) -> str:
    return f"{source.name} {source.state}" + (f" ({clean(source.detail)})" if source.detail else "")


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
        *sources_of(status.sources, status.at, now_s),
        groups_of(status.groups, core),
    ]
    return "\n".join([_headline(status.node, counts, style), "", *format_entries(entries, style)]) + "\n"
