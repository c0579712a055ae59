"""Changes between two health reports, one line each, for a log or a pipe. Pure.

MIG instances (parts of a GPU) that change in the same way as their GPU share the line of the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from agent.cli.output.text import (
    BADGES,
    default_pool,
    device_name,
    explains_absence,
    format_count,
    format_instances,
    hardware_identity,
    parent_gpu,
    shorten_ids,
)
from agent.health.verdict import truncate_utf8
from agent.model.health import Severity
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.snapshot import NativeCoreStats
from agent.model.time import rfc3339

TEXT_MAX_BYTES: Final = 4096 - len("2026-11-21T10:04:04Z \n")
"""Largest size of a log line without its time and line break [bytes]: a pipe takes 4 KiB as a whole."""
_FINDING_MIN_BYTES: Final = 64
"""Size to which a finding in a log line is cut at most [bytes]."""


class ReportChange(NamedTuple):
    """New state of one object of a report: a device, a source, the cgroups, a pod or the Kubernetes node."""

    at_s: float
    """Wall time of the report with the new state [s]."""
    subject: str
    """Object that changed: a device, ``source <name>``, ``cgroups``, ``inotify``, ``devices``, pod, node."""
    state: str
    severity: Severity
    message: str
    code: str = ""
    """Finding code of a note about a pod or node, which may have several notes at once; empty: no note."""
    details: str = ""
    """Hardware identity and MIG instances in the same state; shown, but a difference in them is no change."""

    def __str__(self) -> str:
        return f"{rfc3339(self.at_s)} {self.text}"

    @property
    def text(self) -> str:
        """Log line of the change, without the time.

        The line has at most TEXT_MAX_BYTES. If necessary, the text of the finding is cut.
        """
        aside = f"({self.details})" if self.details else ""
        finding = ": ".join(filter(None, (self.code, self.message)))
        rest = " ".join(filter(None, (self.subject, self.state, aside)))
        finding = truncate_utf8(
            finding, max(TEXT_MAX_BYTES - len(rest.encode("utf-8", "replace")) - 1, _FINDING_MIN_BYTES)
        )
        text = shorten_ids(" ".join(filter(None, (self.subject, self.state, finding, aside))))
        return truncate_utf8(text, TEXT_MAX_BYTES)

    def has_same_text(self, other: ReportChange) -> bool:
        """Return whether state, code and message are those of `other`.

        The change `other` may be about another object.
        """
        return (self.state, self.code, self.message) == (other.state, other.code, other.message)


def changes_between_reports(before: Report | None, now: Report) -> list[ReportChange]:
    """Return the changes from the report `before` to the report `now`.

    If `before` is None, return the state of every device and of every failing source.
    """
    at = now.at.wall_s
    old: dict[str, ReportChange] = _states(before) if before else {}
    current = _states(now)
    # A new source is no change; but if there are no devices, the absent sources are the reason.
    unremarkable = {SourceState.OK, SourceState.ABSENT} if now.devices else {SourceState.OK}
    new = {
        key: change
        for key, change in current.items()
        if (
            old[key].severity != change.severity or not old[key].has_same_text(change)
            if key in old
            else change.severity or change.state not in unremarkable
        )
    }
    for key, change in old.items():
        if key not in current and key.startswith("device "):
            new[key] = ReportChange(at, change.subject, "gone", Severity.UNKNOWN, "no longer reported")
        elif key not in current and change.code:
            new[key] = ReportChange(at, change.subject, "over", Severity.OK, "", change.code)
    return _fold(new, {**Counter(map(parent_gpu, old)), **Counter(map(parent_gpu, current))})


def facts_without_devices(report: Report) -> tuple[object, ...]:
    """Return what :func:`changes_between_reports` compares apart from devices and notes: sources and cgroups.

    These facts may also change in a report that otherwise repeats the last one.
    """
    states = [(source.name, source.state, source.detail) for source in report.sources]
    return states, _cgroup_gaps(report.core), report.core.overflows


def _fold(new: Mapping[str, ReportChange], instances: Mapping[str, int]) -> list[ReportChange]:
    """Return `new` without the MIG instances (parts of a GPU) whose change has the same text as their GPU's.

    Args:
        new: Changes by key; the key of a MIG instance begins with the key of its GPU.
        instances: Number of MIG instances, by the key of the GPU.
    """
    gpus = {key: gpu for key in new if (gpu := parent_gpu(key)) in new and new[gpu].has_same_text(new[key])}
    folded = Counter(gpus.values())
    lines = []
    for key, change in new.items():
        if key not in gpus:
            also = format_instances(folded[key], instances.get(key, 0))
            lines.append(change._replace(details="; ".join(filter(None, (also, change.details)))))
    return lines


def _states(report: Report) -> dict[str, ReportChange]:
    """Return the present state of each device, source and note in a report, by a key of the object.

    A note is a finding about a pod or about the Kubernetes node.
    """
    at, default = report.at.wall_s, default_pool(report)
    states: dict[str, ReportChange] = {}
    for d in report.devices:
        identity = hardware_identity(d) if d.severity > Severity.INFO else ""
        # A device that is reported Healthy has no message; its causes, such as a program's own XID, do.
        message = d.message or "; ".join(f"{cause.code}: {cause.evidence}" for cause in d.causes)
        states[f"device {d.driver} {d.pool} {d.device}"] = ReportChange(
            at, device_name(d, default), BADGES[d.severity].word, d.severity, message, details=identity
        )
    if not report.devices:
        states["devices"] = ReportChange(at, "devices", "none", Severity.UNKNOWN, "no device was found")
    gpus = {device.device for device in report.devices if not device.driver and device.kind == "gpu"}
    for source in report.sources:
        if source.name in gpus:  # each GPU has a source of the same name; its device line has the error
            continue
        if source.state is SourceState.STARTING:
            continue
        severity = _severity(source)
        detail = source.detail if severity else ""
        states[f"source {source.name}"] = ReportChange(
            at, f"source {source.name}", source.state, severity, detail
        )
    if report.sources:  # a driver's socket sends no sources and no cgroups
        gaps = _cgroup_gaps(report.core)
        state, severity = ("incomplete", Severity.DEGRADED) if gaps else (SourceState.OK, Severity.OK)
        states["cgroups"] = ReportChange(at, "cgroups", state, severity, gaps)
    if report.core.overflows:
        message = f"{format_count(report.core.overflows, 'time')}, and everything was read again each time"
        states["inotify"] = ReportChange(at, "inotify", "overflowed", Severity.DEGRADED, message)
    for note in report.notes:
        cause = note.cause
        word = BADGES[cause.severity].word if cause.severity > Severity.INFO else "note"
        states[f"note {_without_pod_name(note.subject)} {cause.code}"] = ReportChange(
            at, note.subject, word, cause.severity, cause.evidence, cause.code
        )
    return states


def _without_pod_name(subject: str) -> str:
    """Return the subject of a note (finding about a pod or the node) without the pod's name in brackets.

    The name is left out, because it is not known in all reports.
    """
    kind, _, rest = subject.partition(" ")
    uid, _, rest = rest.partition(" ")
    if kind != "pod" or not rest.startswith("("):
        return subject
    return f"pod {uid} {rest.partition(') ')[2]}".rstrip()


def _severity(source: SourceSample) -> Severity:
    """Return the severity with which a source is logged.

    UNKNOWN: the source fails or stalls. INFO: the source is absent, which the operator should know. OK: all
    other states.
    """
    if source.state in (SourceState.FAILING, SourceState.STALLED):
        return Severity.UNKNOWN
    return Severity.INFO if source.state is SourceState.ABSENT and explains_absence(source) else Severity.OK


def _cgroup_gaps(core: NativeCoreStats) -> str:
    """Return a text on cgroups that the agent does not watch, or only reads periodically.

    Empty: the agent watches all cgroups.
    """
    facts = []
    if core.groups_dropped:
        facts.append(f"{core.groups_dropped:,} not watched, see cgroups.max-groups")
    if core.unwatched:
        refused = format_count(core.unwatched, "inotify watch", "inotify watches")
        facts.append(f"the kernel refused {refused}, read by the sweep instead")
    return "; ".join(facts)
