"""What is new in a report: for those who read line by line, a log or a pipe. Pure."""

from typing import NamedTuple

from agent.cli.text import clean, format_count, home_of, name_of, word_of
from agent.model.health import Severity
from agent.model.report import Report
from agent.model.snapshot import CoreStats, SourceSample, SourceState
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

    def __str__(self) -> str:
        return f"{rfc3339(self.at_s)} {self.words}"

    @property
    def words(self) -> str:
        """The line without the time."""
        return clean(" ".join(filter(None, (self.subject, self.state, self.message))))


def changes(before: Report | None, now: Report) -> list[Change]:
    """What ``now`` says that ``before`` did not; of a first report, every device and what cannot be seen."""
    at = now.at.wall_s
    told: dict[str, Change] = _states(before) if before else {}
    stands = _states(now)
    news = [
        change
        for key, change in stands.items()
        if not (old := told.get(key)) or (old.state, old.severity, old.message) != change[2:]
    ]
    news += [
        Change(at, old.subject, "gone", Severity.UNKNOWN, "no longer reported")
        for key, old in told.items()
        if key not in stands and key.startswith("device ")
    ]
    if before is None:
        # if no device was found, what is absent is the reason
        dull = {SourceState.OK, SourceState.ABSENT} if now.devices else {SourceState.OK}
        news = [c for c in news if c.severity or c.state not in dull]
    return news


def _states(report: Report) -> dict[str, Change]:
    at, home = report.at.wall_s, home_of(report)
    states: dict[str, Change] = {}
    for d in report.devices:
        name = name_of(d, home)
        states[f"device {d.pool} {d.device}"] = Change(at, name, word_of(d.severity), d.severity, d.message)
    if not report.devices:
        states["devices"] = Change(at, "devices", "none", Severity.UNKNOWN, "no device was found")
    for source in report.sources:
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
        message = f"{note.cause.code}: {note.cause.evidence}"
        states[f"note {note.subject} {message}"] = Change(at, note.subject, "note", Severity.INFO, message)
    return states


def _severity(source: SourceSample) -> Severity:
    """One that is absent is nothing to tell of, unless there is a reason to tell."""
    if source.state in (SourceState.FAILING, SourceState.STALLED):
        return Severity.UNKNOWN
    return Severity.INFO if source.state is SourceState.ABSENT and source.detail else Severity.OK


def _blindness(core: CoreStats) -> str:
    """What of the cgroups is not watched as it should be; empty if all is."""
    facts = []
    if core.groups_dropped:
        facts.append(f"{core.groups_dropped:,} found no room, see cgroups.max-groups")
    if core.unwatched:
        refused = format_count(core.unwatched, "inotify watch", "inotify watches")
        facts.append(f"the kernel refused {refused}, read by the sweep instead")
    return "; ".join(facts)
