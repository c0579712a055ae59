"""Health report of the Kubernetes node as a table. Pure: takes values, a style and a time, and returns text.

Devices that drivers declare are listed below the driver's name. A MIG instance (part of a GPU) in the same
state as its GPU shares the GPU's line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.cli.output.text import (
    BADGES,
    GAP,
    ListEntry,
    RowText,
    TableCell,
    TextTable,
    advice_of_device,
    clean,
    default_pool,
    device_name,
    explains_absence,
    format_bytes,
    format_count,
    format_entries,
    format_instances,
    format_ranges,
    hardware_identity,
    name_without_pool,
    parent_gpu,
    shorten_ids,
    wrap,
)
from agent.model.health import Severity, most_needed_first
from agent.model.reading import SourceSample, SourceState
from agent.model.time import NS, Instant, format_age, rfc3339

if TYPE_CHECKING:
    from agent.cli.output.terminal import TextStyle
    from agent.model.health import DeviceHealth, NotApplicable
    from agent.model.report import Report
    from agent.model.snapshot import NativeCoreStats
    from agent.sources.gpu_os_facts import ProcessFacts

MIN_MESSAGE_WIDTH: Final = 32
"""Least width of the message column; on a narrower terminal, messages are printed below their device."""

DEVICE_SOURCES: Final = frozenset({"cpus", "hugepages", "nvml"})
"""Names of the sources that discover the host's devices."""

SOURCE_PAINT: Final[dict[SourceState, tuple[str, ...]]] = {
    SourceState.OK: (),
    SourceState.STARTING: ("dim",),
    SourceState.ABSENT: ("dim",),
    SourceState.FAILING: ("yellow",),
    SourceState.STALLED: ("red",),
}

MAX_NAMED_CODES: Final = 8
"""Limit of rules listed by name; more are only counted. For a GPU that hangs, no rule is evaluated."""

AdvisedCause = tuple[str, str, str]
"""Code, evidence and advice of a cause that is already printed.

Advice for the same cause is not repeated.
"""


def render_report(
    report: Report,
    style: TextStyle,
    *,
    now_s: float | None = None,
    processes: Sequence[ProcessFacts] = (),
    worst_first: bool = False,
    has_since: bool = True,
) -> str:
    """Return the health report as text: headline, table of devices, notes and footer.

    Args:
        now_s: Present wall time, from which ages are computed [s since 1970]; None: ages are left out.
        processes: Processes that the footer lists.
        worst_first: Sort devices by severity, not by name; for a window that is too small for all devices.
        has_since: False: the times of the last changes are not known, as in a driver's first list.
    """
    lines = [headline(default_pool(report), Counter(d.severity for d in report.devices), style)]
    if devices := list(_devices(report, style, now_s, worst_first=worst_first, has_since=has_since)):
        lines += ["", *devices]
    if notes := list(_notes(report, style, now_s)):
        lines += ["", style.paint("  NOTES", "dim"), *notes]
    if footer := list(format_entries(_footer(report, now_s, processes), style)):
        lines += ["", *footer]
    return "\n".join(lines) + "\n"


def headline(node: str, counts: Counter[Severity], style: TextStyle) -> str:
    """Return the node's name and device counts: ``worker-7  3 devices: 1 unhealthy, 2 healthy``."""
    words: Counter[str] = Counter()
    for severity in sorted(counts, reverse=True):
        words[BADGES[severity].word.lower()] += counts[severity]
    colours = {badge.word.lower(): badge.colour for badge in BADGES.values()}
    tally = ", ".join(style.paint(f"{number} {word}", colours[word]) for word, number in words.items())
    devices = f"{format_count(counts.total(), 'device')}: {tally}" if tally else "no devices"
    return f"{style.paint(clean(node), 'bold')}{GAP if node else ''}{devices}"


# --- devices -----------------------------------------------------------------------------------------------


class DeviceLine(NamedTuple):
    """Table line of a device, which may also stand for MIG instances in the same state as the device."""

    device: DeviceHealth
    instances: str
    """Text about the MIG instances of the line, such as ``and its 7 instances``; empty: none."""


def fold_instances(devices: Sequence[DeviceHealth]) -> list[DeviceLine]:
    """Return the table lines of `devices`; MIG instances in the same state as their GPU share its line.

    A machine with eight GPUs of seven instances has 64 devices, and one fault of a GPU affects eight devices.
    """
    by_key = {device.key: device for device in devices}
    shown: list[DeviceHealth] = []
    folded: Counter[tuple[str, str, str]] = Counter()
    instances: Counter[tuple[str, str, str]] = Counter()
    for device in devices:
        key = (device.driver, device.pool, parent_gpu(device.device))
        gpu = by_key.get(key)
        instances[key] += gpu is not None
        if gpu and _repeats(device, gpu):
            folded[key] += 1
        else:
            shown.append(device)
    return [
        DeviceLine(device, format_instances(folded[device.key], instances[device.key])) for device in shown
    ]


def _repeats(instance: DeviceHealth, gpu: DeviceHealth) -> bool:
    is_same = BADGES[instance.severity].word == BADGES[gpu.severity].word
    return is_same and _findings(instance) <= _findings(gpu)


def _findings(device: DeviceHealth) -> set[tuple[str, str]]:
    """Return the finding code and the evidence of each cause of a device's health.

    If the causes are not known, as on a driver's socket, return the message of the health with an empty code.
    """
    if device.causes:
        return {(cause.code, cause.evidence) for cause in device.causes}
    return {("", device.message)} if device.message else set()


def _devices(
    report: Report, style: TextStyle, now_s: float | None, *, worst_first: bool, has_since: bool
) -> Iterator[str]:
    """Yield the table of devices.

    If there are no devices, yield the reasons from the sources that discover devices.
    """
    default, folds = default_pool(report), fold_instances(report.devices)
    if not folds:
        if reasons := [_absence(s) for s in report.sources if s.name in DEVICE_SOURCES]:
            yield from wrap(f"no device found: {'; '.join(reasons)}", style, first="  ", rest="    ")
        return
    if worst_first:
        folds.sort(key=lambda fold: fold.device.severity, reverse=True)
    titles = ["NAME", "HEALTH", *([] if now_s is None else ["SINCE"] * has_since + ["VERIFIED"])]
    table = TextTable(*titles, text_title="MESSAGE", min_text_width=MIN_MESSAGE_WIDTH)
    owner_above, advised = "", set[AdvisedCause]()
    for device, instances in folds:
        owner = "" if worst_first else _owner(device, default)
        if owner != owner_above:
            table.add_lines(wrap(owner, style, first="  ", rest="    ", paint=("bold",)))
            owner_above = owner
        badge = BADGES[device.severity]
        ages = []
        if now_s is not None:
            verified = f"{format_age(now_s - device.verified.wall_s)} ago"
            ages = [format_age(now_s - device.since.wall_s)] * has_since + [verified]
        table.add(
            clean(device.device) if owner else device_name(device, default),
            TableCell(badge.word, (badge.colour,)),
            *ages,
            sign=badge.coloured_sign(style),
            text=[*_message(device, style, advised), RowText(instances, ("dim",))],
        )
    yield from table.lines(style)


def _owner(device: DeviceHealth, default: str) -> str:
    """Return the driver of a device and, unless it is `default`, the pool; empty: a host device."""
    pool = f", pool {device.pool}" if device.pool != default else ""
    return clean(f"{device.driver}{pool}") if device.driver else ""


def _message(device: DeviceHealth, style: TextStyle, advised: set[AdvisedCause]) -> Iterator[RowText]:
    """Yield each cause of a device's health with its advice, then the hardware identity of the device.

    If causes are not known, yield the message of the health instead.

    Args:
        device: Device of the table line.
        style: Style of the output.
        advised: Causes whose advice the lines above show. The causes of this line are added. Advice is not
            repeated, because a driver that fails for eight devices needs one repair.
    """
    if not device.causes:
        yield RowText(shorten_ids(device.message))
    for cause in device.causes:
        text = f"{clean(cause.code)}: {shorten_ids(cause.evidence)}"
        if cause.severity <= Severity.INFO:
            yield RowText(style.bullet + text, ("dim",), 2)
        else:
            yield RowText(text)
    keys = {(cause.code, cause.evidence, cause.advice): cause for cause in most_needed_first(device.causes)}
    yield from advice_of_device((cause.advice for key, cause in keys.items() if key not in advised), style)
    advised.update(keys)
    if device.severity > Severity.INFO:
        yield RowText(hardware_identity(device), ("dim",), 2)


def _absence(source: SourceSample) -> str:
    return f"{source.name} {source.state}" + (f" ({clean(source.detail)})" if source.detail else "")


# --- notes -------------------------------------------------------------------------------------------------


def _notes(report: Report, style: TextStyle, now_s: float | None) -> Iterator[str]:
    """Yield the lines of the notes (findings about pods or the Kubernetes node), worst first.

    If several notes have the same advice, the advice is printed once.
    """
    default = default_pool(report)
    notes = sorted(report.notes, key=lambda note: note.cause.severity, reverse=True)
    for i, note in enumerate(notes):
        cause = note.cause
        subject = "" if cause.code.startswith(f"{note.subject}.") else f"{shorten_ids(note.subject)}: "
        devices = ", ".join(name_without_pool(name, default) for name in note.devices)
        uses = f" (uses {devices})" if devices else ""
        age = "" if now_s is None else f" ({format_age(now_s - cause.since.wall_s)} ago)"
        text = f"{subject}{clean(cause.code)}: {shorten_ids(cause.evidence)}{uses}{age}"
        if cause.severity <= Severity.INFO:
            yield from wrap(style.bullet + text, style, first="", rest="  ")
            continue
        first, *rest = wrap(text, style, first="  ", rest="  ")
        yield BADGES[cause.severity].coloured_sign(style) + first[1:]
        yield from rest
        if cause.advice and cause.advice not in [other.cause.advice for other in notes[i + 1 :]]:
            action = style.arrow + clean(cause.advice)
            yield from wrap(action, style, first="  ", rest="    ", paint=("cyan",))


# --- footer ------------------------------------------------------------------------------------------------


def _footer(report: Report, now_s: float | None, processes: Sequence[ProcessFacts]) -> Iterator[ListEntry]:
    """Yield the lines below the table of devices: GPUs, sources, cgroups, processes, rules not evaluated."""
    yield from _gpus(report.devices)
    yield from source_entries(report.sources, report.at, now_s)
    if report.sources:
        yield cgroup_entry(report.groups, report.core)
    yield from (ListEntry("processes", _process(process)) for process in processes)
    # Last, because these are long and seldom change.
    for title, rules in (("not evaluated", report.not_evaluated), ("not applicable", report.not_applicable)):
        yield from (ListEntry(title, text) for text in _group_rules(rules, default_pool(report)))


def _group_rules(rules: Iterable[NotApplicable], default: str) -> Iterator[str]:
    """Yield ``reason: rules on devices`` for rules that were not evaluated.

    Rules with equal reason and devices share a text. The pool `default` is left out of device names.
    """
    devices_of: dict[tuple[str, str], dict[str, None]] = {}
    for rule in rules:
        devices = devices_of.setdefault((clean(rule.reason), clean(rule.code)), {})
        if rule.device:
            devices[name_without_pool(rule.device, default)] = None
    codes_of: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (reason, code), devices in devices_of.items():
        codes_of.setdefault((reason, tuple(devices)), []).append(code)
    for (reason, names), codes in codes_of.items():
        rules_text = ", ".join(codes) if len(codes) <= MAX_NAMED_CODES else f"{len(codes)} rules"
        where = f" on {', '.join(names)}" if len(names) <= 3 else f" on {len(names)} devices"
        yield f"{reason}: {rules_text}{where if names else ''}"


def _gpus(devices: Iterable[DeviceHealth]) -> Iterator[ListEntry]:
    """Yield the number of GPUs by product, with the driver version, and of MIG instances by profile."""
    gpus: Counter[str] = Counter()
    profiles: Counter[str] = Counter()
    for device in devices:
        if device.driver:  # a declared GPU is one of the host's
            continue
        known = dict(device.attributes)
        if parent_gpu(device.device):
            profiles[known.get("profile", "")] += 1
        elif product := known.get("product"):
            driver = known.get("driver")
            gpus[f"{product}, driver {driver}" if driver else product] += 1
    for product, number in gpus.items():
        yield ListEntry("gpus", f"{number} x {clean(product)}")
    if parts := [f"{number} x {clean(profile)}" for profile, number in profiles.items() if profile]:
        yield ListEntry("mig", ", ".join(parts))


def source_entries(
    sources: Iterable[SourceSample], at: Instant | None, now_s: float | None, *, explains_all: bool = False
) -> Iterator[ListEntry]:
    """Yield one line for each state of sources, such as stalled, with all sources in this state.

    Working sources come first. `explains_all`: also sources that most machines lack have a reason.
    """
    lines: dict[tuple[SourceState, str], list[str]] = {(SourceState.OK, "ok"): []}
    for source in sources:
        facts = ", ".join(_source_facts(source, at, now_s, explains_all))
        lines.setdefault((source.state, facts), []).append(clean(source.name))
    for (state, facts), names in lines.items():
        if names:
            yield ListEntry("sources", f"{format_ranges(names)}: {facts}", SOURCE_PAINT[state])


def _source_facts(
    source: SourceSample, at: Instant | None, now_s: float | None, explains_all: bool
) -> Iterator[str]:
    yield str(source.state)
    if source.state is SourceState.OK:
        return
    if source.state is not SourceState.ABSENT and source.beat_ns and at and now_s is not None:
        read_s = at.wall_s - (at.mono_ns - source.beat_ns) / NS
        yield f"last read {format_age(now_s - read_s)} ago"
    if source.failures:
        yield format_count(source.failures, "failure")
    if source.detail and (source.state is not SourceState.ABSENT or explains_all or explains_absence(source)):
        yield clean(source.detail)


def cgroup_entry(groups: int, core: NativeCoreStats) -> ListEntry:
    """Return the line with the number of cgroups that are watched, and of those that cannot be watched."""
    facts = [f"{groups:,} watched"]
    if core.groups_dropped:
        facts.append(f"{core.groups_dropped:,} beyond cgroups.max-groups are not")
    if core.unwatched:
        refused = format_count(core.unwatched, "inotify watch", "inotify watches")
        facts.append(f"{refused} refused by the kernel, read by the sweep instead")
    return ListEntry("cgroups", ", ".join(facts), ("yellow",) if len(facts) > 1 else ())


def _process(process: ProcessFacts) -> str:
    return (
        f"{clean(process.name)} {process.pid}: since {rfc3339(process.since_s)}, {process.cpu_s:,.1f} s CPU, "
        f"{format_bytes(process.rss_bytes)}, {format_count(process.threads, 'thread')}"
    )
