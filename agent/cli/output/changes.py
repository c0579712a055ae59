"""What is new in a report: for those who read line by line, a log or a pipe. Pure.

MIG instances of which the same is new as of their GPU are told of with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from agent.cli.output.fold import format_instances, gpu_of, identity_of
from agent.cli.output.text import brief, format_count, home_of, is_missed, name_of, word_of
from agent.model.health import DeviceHealth, Severity
from agent.model.report import Report
from agent.model.snapshot import CoreStats
from agent.model.source import SourceSample, SourceState
from agent.model.time import rfc3339


class Change(NamedTuple):
    """One line's worth of news."""

    at_s: float
    """Wall time of the report that brought it [s]."""
    subject: str
    """A device, ``source <name>``, ``cgroups``, ``inotify``, ``devices``, or what a note is about."""
    state: str
    severity: Severity
    message: str
    code: str = ""
    """Of a note: a pod or the node may have several at once, and each has news of its own."""
    aside: str = ""
    """What helps the reader and is no news: which piece of hardware it is, who is told of with it."""

    def __str__(self) -> str:
        return f"{rfc3339(self.at_s)} {self.words}"

    @property
    def words(self) -> str:
        """The line without the time."""
        aside = f"({self.aside})" if self.aside else ""
        what = ": ".join(filter(None, (self.code, self.message)))
        return brief(" ".join(filter(None, (self.subject, self.state, what, aside))))

    def differs_from(self, other: Change) -> bool:
        """Whether the one is news after the other, of the same."""
        return self.severity != other.severity or not self.same_as(other)

    def same_as(self, other: Change) -> bool:
        """Whether a reader is told the same of the two, whatever they are about."""
        return (self.state, self.code, self.message) == (other.state, other.code, other.message)


def changes(before: Report | None, now: Report) -> list[Change]:
    """What ``now`` says that ``before`` did not; of a first report, every device and what cannot be seen."""
    at = now.at.wall_s
    told: dict[str, Change] = _states(before) if before else {}
    stands = _states(now)
    # that there is one more source is no news; but if no device was found, what is absent is the reason
    dull = {SourceState.OK, SourceState.ABSENT} if now.devices else {SourceState.OK}
    news = {
        key: change
        for key, change in stands.items()
        if (told[key].differs_from(change) if key in told else change.severity or change.state not in dull)
    }
    for key, old in told.items():
        if key not in stands and key.startswith("device "):
            news[key] = Change(at, old.subject, "gone", Severity.UNKNOWN, "no longer reported")
        elif key not in stands and old.code:
            news[key] = Change(at, old.subject, "over", Severity.OK, "", old.code)
    return _fold(news, {**Counter(map(gpu_of, told)), **Counter(map(gpu_of, stands))})


def _fold(news: Mapping[str, Change], instances: Mapping[str, int]) -> list[Change]:
    """The news, where that of an instance is no line of its own if its GPU's line says the same.

    Args:
        news: By key; an instance's is its GPU's with more behind it.
        instances: How many a GPU has, by its key.
    """
    gpus = {key: gpu for key in news if (gpu := gpu_of(key)) in news and news[gpu].same_as(news[key])}
    folded = Counter(gpus.values())
    lines = []
    for key, change in news.items():
        if key not in gpus:
            also = format_instances(folded[key], instances.get(key, 0))
            lines.append(change._replace(aside="; ".join(filter(None, (also, change.aside)))))
    return lines


def _states(report: Report) -> dict[str, Change]:
    at, home = report.at.wall_s, home_of(report)
    states: dict[str, Change] = {}
    for d in report.devices:
        name = name_of(d, home)
        which = identity_of(d) if d.severity > Severity.INFO else ""
        message = d.message or _in_passing(d)
        states[f"device {d.driver} {d.pool} {d.device}"] = Change(
            at, name, word_of(d.severity), d.severity, message, aside=which
        )
    if not report.devices:
        states["devices"] = Change(at, "devices", "none", Severity.UNKNOWN, "no device was found")
    devices = {device.device for device in report.devices}
    for source in report.sources:
        if source.name in devices:  # a GPU has its own, and says itself what is wrong with it
            continue
        if source.state is SourceState.STARTING:  # in a moment it will have been read
            continue
        severity = _severity(source)
        detail = source.detail if severity else ""
        states[f"source {source.name}"] = Change(at, f"source {source.name}", source.state, severity, detail)
    if report.sources:  # a driver's socket says nothing of them
        blind = _blindness(report.core)
        state, severity = ("incomplete", Severity.DEGRADED) if blind else (SourceState.OK, Severity.OK)
        states["cgroups"] = Change(at, "cgroups", state, severity, blind)
    if report.core.overflows:
        message = f"{format_count(report.core.overflows, 'time')}, and everything was read again each time"
        states["inotify"] = Change(at, "inotify", "overflowed", Severity.DEGRADED, message)
    for note in report.notes:
        cause = note.cause
        word = word_of(cause.severity) if cause.severity > Severity.INFO else "note"
        states[f"note {note.subject} {cause.code}"] = Change(
            at, note.subject, word, cause.severity, cause.evidence, cause.code
        )
    return states


def _in_passing(device: DeviceHealth) -> str:
    """What is worth a line and no harm: the kubelet is not told of it. A program's own XID, say."""
    return "; ".join(f"{cause.code}: {cause.evidence}" for cause in device.causes)


def _severity(source: SourceSample) -> Severity:
    """One that is absent is nothing to tell of, unless somebody may miss it."""
    if source.state in (SourceState.FAILING, SourceState.STALLED):
        return Severity.UNKNOWN
    return Severity.INFO if source.state is SourceState.ABSENT and is_missed(source) else Severity.OK


def _blindness(core: CoreStats) -> str:
    """What of the cgroups is not watched as it should be; empty if all is."""
    facts = []
    if core.groups_dropped:
        facts.append(f"{core.groups_dropped:,} found no room, see cgroups.max-groups")
    if core.unwatched:
        refused = format_count(core.unwatched, "inotify watch", "inotify watches")
        facts.append(f"the kernel refused {refused}, read by the sweep instead")
    return "; ".join(facts)
