"""The foot of a table: which GPUs these are, the sources, the cgroups, what was not judged and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from agent.cli.output.fold import fold_names, gpu_of
from agent.cli.output.text import (
    Entry,
    clean,
    format_age,
    format_bytes,
    format_count,
    home_of,
    is_missed,
    name_of_subject,
)
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant, rfc3339

if TYPE_CHECKING:
    from agent.model.health import DeviceHealth, NotApplicable
    from agent.model.report import Report
    from agent.model.snapshot import CoreStats
    from agent.sources.processes import ProcessFacts

SOURCE_PAINT: Final[dict[SourceState, tuple[str, ...]]] = {
    SourceState.OK: (),
    SourceState.STARTING: ("dim",),
    SourceState.ABSENT: ("dim",),
    SourceState.FAILING: ("yellow",),
    SourceState.STALLED: ("red",),
}

MOST_CODES: Final = 8
"""More rules than these are counted, not named: of a GPU that does not answer that is all of them."""


def foot_of(report: Report, now_s: float | None, processes: Sequence[ProcessFacts]) -> Iterator[Entry]:
    """All that stands below the devices.

    Args:
        now_s: As for the table.
        processes: Of the node, that are to be shown.
    """
    yield from _gpus(report.devices)
    yield from sources_of(report.sources, report.at, now_s)
    if report.sources:
        yield groups_of(report.groups, report.core)
    yield from (Entry("processes", _process(process)) for process in processes)
    # Last, because long, and the same for as long as the machine is.
    for title, rules in (("not evaluated", report.not_evaluated), ("not applicable", report.not_applicable)):
        yield from (Entry(title, text) for text in _collapse(rules, home_of(report)))


def _collapse(rules: Iterable[NotApplicable], home: str) -> Iterator[str]:
    """Rules of the same devices with the same reason as one text: the reason, then which rules of which."""
    devices_of: dict[tuple[str, str], dict[str, None]] = {}
    for rule in rules:
        devices = devices_of.setdefault((clean(rule.reason), clean(rule.code)), {})
        if rule.device:
            devices[name_of_subject(rule.device, home)] = None
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (reason, code), devices in devices_of.items():
        together.setdefault((reason, tuple(devices)), []).append(code)
    for (reason, names), codes in together.items():
        what = ", ".join(codes) if len(codes) <= MOST_CODES else f"{len(codes)} rules"
        where = f" on {', '.join(names)}" if len(names) <= 3 else f" on {len(names)} devices"
        yield f"{reason}: {what}{where if names else ''}"


def _gpus(devices: Iterable[DeviceHealth]) -> Iterator[Entry]:
    """``8 x NVIDIA H100 80GB HBM3, driver 570.86.15``: which GPUs these are, and how they are parted."""
    gpus: Counter[str] = Counter()
    profiles: Counter[str] = Counter()
    for device in devices:
        if device.driver:  # one that a driver declares is one of these
            continue
        known = dict(device.attributes)
        if gpu_of(device.device):
            profiles[known.get("profile", "")] += 1
        elif product := known.get("product"):
            driver = known.get("driver")
            gpus[f"{product}, driver {driver}" if driver else product] += 1
    for what, number in gpus.items():
        yield Entry("gpus", f"{number} x {clean(what)}")
    if parts := [f"{number} x {clean(profile)}" for profile, number in profiles.items() if profile]:
        yield Entry("mig", ", ".join(parts))


def sources_of(sources: Iterable[SourceSample], at: Instant | None, now_s: float | None) -> Iterator[Entry]:
    """The sources, those of which the same is to be said on one line; first those that are well."""
    lines: dict[tuple[SourceState, str], list[str]] = {(SourceState.OK, "ok"): []}
    for source in sources:
        facts = ", ".join(_facts(source, at, now_s))
        lines.setdefault((source.state, facts), []).append(clean(source.name))
    for (state, facts), names in lines.items():
        if names:
            yield Entry("sources", f"{fold_names(names)}: {facts}", SOURCE_PAINT[state])


def _facts(source: SourceSample, at: Instant | None, now_s: float | None) -> Iterator[str]:
    yield str(source.state)
    if source.state is SourceState.OK:
        return
    if source.state is not SourceState.ABSENT and source.beat_ns and at and now_s is not None:
        read_s = at.wall_s - (at.mono_ns - source.beat_ns) / NS
        yield f"last read {format_age(now_s - read_s)} ago"
    if source.failures:
        yield format_count(source.failures, "failure")
    if source.detail and (source.state is not SourceState.ABSENT or is_missed(source)):
        yield clean(source.detail)


def groups_of(groups: int, core: CoreStats) -> Entry:
    """How many cgroups are watched, and how many are not."""
    facts = [f"{groups:,} watched"]
    if core.groups_dropped:
        facts.append(f"{core.groups_dropped:,} beyond cgroups.max-groups are not")
    if core.unwatched:
        refused = format_count(core.unwatched, "inotify watch", "inotify watches")
        facts.append(f"{refused} refused by the kernel, read by the sweep instead")
    return Entry("cgroups", ", ".join(facts), ("yellow",) if len(facts) > 1 else ())


def _process(process: ProcessFacts) -> str:
    return (
        f"{clean(process.name)} {process.pid}: since {rfc3339(process.since_s)}, {process.cpu_s:,.1f} s CPU, "
        f"{format_bytes(process.rss_bytes)}, {format_count(process.threads, 'thread')}"
    )
