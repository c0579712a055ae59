"""Attribution of findings about pods: notes on the pods, and causes on the devices that the pods use.

Findings come from cgroup rules and from audits, which compare cgroups with the expected allocation. Each pod
or container gets one note per code, however many cgroup files it covers, with all devices of the pod. A
finding is also a cause of

* each device that provides the resource (of hugepages, the size), with the severity of the catalog row: the
workload does not have what the device provides;
* every device of the pod if none provides it, as ``info``.

No such cause makes a device Unhealthy or Unknown: the device works, and repairing it would not help.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from agent.devices.inventory import Device, DeviceKind
from agent.health.evaluation import Evaluation, Subject, row_with_code
from agent.health.host.cgroup.rules import AFFECTED_KINDS, EXCLUSIVE_THROTTLED, GROUP_RULES
from agent.health.host.cgroup.state import GroupView
from agent.health.host.pod.rules import ALLOCATION_ROWS, UNLISTED, UNREAD
from agent.health.host.pod.state import PodAuditState, PodFindingGroup, brief
from agent.health.host.verdicts import NODE
from agent.health.rules import cause_from_row
from agent.health.verdict import PreviousVerdicts, with_minor_causes
from agent.model.claim import DeviceRef
from agent.model.health import Cause, DeviceHealth, Note, Severity
from agent.model.pods import PodFinding, PodsSample, Resource
from agent.model.settings import Settings
from agent.model.source import SourceSample

MAX_LISTED: Final = 3
"""Number of findings that a message lists."""


class AffectedDevice(NamedTuple):
    """Device that a pod finding affects, with the evidence for the cause on the device."""

    subject: str
    """Name of the device."""
    cause: Cause
    severity: Severity
    evidence: str
    """Evidence, which begins with the pod's name."""


class PodIssue(NamedTuple):
    """Finding about a pod or container, with the devices that it affects."""

    note: Note
    affected: tuple[AffectedDevice, ...] = ()


def joined_evidence(texts: Iterable[str]) -> str:
    """Join the first MAX_LISTED texts and the number of further texts; the result does not depend on their
    order."""
    kinds = sorted(set(texts))
    more = [f"and {len(kinds) - MAX_LISTED} more"] if len(kinds) > MAX_LISTED else []
    return "; ".join([*map(brief, kinds[:MAX_LISTED]), *more])


def with_pod_issues(
    evaluation: Evaluation,
    previous: PreviousVerdicts,
    issues: Iterable[PodIssue],
    devices: Mapping[Subject, Device],
    verdicts: Mapping[Subject, DeviceHealth],
) -> Iterator[tuple[Subject, DeviceHealth]]:
    """Yield the verdicts on devices that pod issues affect; issues with the same code become one cause.

    Args:
        devices: Evaluated devices, by name.
        verdicts: Verdicts without causes from pods.
    """
    found: dict[str, dict[str, list[AffectedDevice]]] = {}
    for issue in issues:
        for entry in issue.affected:
            found.setdefault(entry.subject, {}).setdefault(entry.cause.code, []).append(entry)
    for subject, by_code in found.items():
        causes = map(_cause, by_code.values())
        yield subject, with_minor_causes(evaluation, previous, devices[subject], verdicts[subject], causes)


def _cause(entries: Sequence[AffectedDevice]) -> Cause:
    """Merge the causes of one code; only causes with the highest severity are listed."""
    severity = max(entry.severity for entry in entries)
    worst = [entry for entry in entries if entry.severity is severity]
    return replace(
        worst[0].cause,
        severity=severity,
        evidence=joined_evidence(entry.evidence for entry in worst),
        since=min((entry.cause.since for entry in worst), key=lambda since: since.mono_ns),
    )


class UsedDevice(NamedTuple):
    """Device that was prepared for a pod."""

    subject: str
    device: Device | None
    """Evaluated device; None: this agent does not evaluate it."""


@dataclass(frozen=True, slots=True)
class PodDevices:
    """Devices that were prepared for the claims of pods, by pod.

    A device is identified by driver, pool and name. Drivers that declare devices own them. Other drivers get
    the verdicts on the host's own devices, so a name in the node's pool is the host's device of that name.
    Devices of further drivers are named in notes, without a verdict.
    """

    sample: PodsSample | None
    """Newest sample of pods; None: unknown."""
    devices: Mapping[str, Device]
    """Evaluated devices, by name."""
    declaring: Collection[str]
    """Drivers that declare devices."""
    settings: Settings

    def used(self, pod_uid: str) -> tuple[UsedDevice, ...]:
        """Return the devices that were prepared for a pod, without duplicates."""
        refs = self.sample.uses.get(pod_uid, ()) if self.sample else ()
        return tuple(dict.fromkeys(map(self._used, refs)))

    def subject(self, pod_uid: str, container: str) -> str:
        """Format the subject of a note: the pod's UID, its name if known, and the container."""
        name = self.sample.names.get(pod_uid) if self.sample else None
        return _with_container(container, f"pod {pod_uid} ({name})" if name else f"pod {pod_uid}")

    def display_name(self, pod_uid: str, container: str) -> str:
        """Format the pod's name, or else its UID, and the container, for the message of a device."""
        name = self.sample.names.get(pod_uid) if self.sample else None
        return _with_container(container, f"pod {name or pod_uid}")

    def _used(self, ref: DeviceRef) -> UsedDevice:
        subject = str(ref)
        if subject not in self.devices and self._is_host_device(ref):
            subject = ref.device
        return UsedDevice(subject, self.devices.get(subject))

    def _is_host_device(self, ref: DeviceRef) -> bool:
        is_reported = ref.driver in self.settings.drivers and ref.driver not in self.declaring
        return is_reported and ref.pool == self.settings.node and ref.device in self.devices


def _with_container(container: str, pod: str) -> str:
    return f"{pod} container {container}" if container else pod


RESOURCE_KINDS: Final[Mapping[Resource, DeviceKind]] = {
    Resource.CPU: DeviceKind.CPU,
    Resource.MEMORY: DeviceKind.MEMORY,
    Resource.HUGEPAGES: DeviceKind.HUGEPAGES,
}
"""Kind of the devices that provide a resource, by resource."""


def allocation_issues(found: Iterable[PodFindingGroup], pods: PodDevices) -> Iterator[PodIssue]:
    """Yield a pod issue for each group of audit findings, in the same order."""
    for group in found:
        row = ALLOCATION_ROWS[group.code]
        used = pods.used(group.pod_uid)
        advice = next((finding.advice for finding in group.findings if finding.advice), row.advice)
        cause = Cause(row.code, row.severity, row.blame, _evidence(group.findings), advice, group.since)
        pod_name = pods.display_name(group.pod_uid, group.container)
        note = Note(
            pods.subject(group.pod_uid, group.container), cause, tuple(device.subject for device in used)
        )
        yield PodIssue(note, tuple(_affected_devices(group.findings, cause, used, pod_name)))


def allocation_notes(
    issues: Sequence[PodIssue], state: PodAuditState, sources: Mapping[str, SourceSample]
) -> Iterator[Note]:
    """Yield a note for each issue, for the findings beyond MAX_GROUPS, and for pods that can no longer be
    read.

    Args:
        issues: Issues of audits.
        state: State after this evaluation.
        sources: Sources, stalled ones in the state STALLED.
    """
    for issue in issues:
        yield issue.note
    if issues and state.dropped:
        since = min((issue.note.cause.since for issue in issues), key=lambda since: since.mono_ns)
        yield Note(NODE, cause_from_row(UNLISTED, f"{state.dropped} findings beyond the listed ones", since))
    if state.lost_since and state.was_read and state.sample:
        source = sources.get(state.sample.source.name, state.sample.source)
        yield Note(NODE, cause_from_row(UNREAD, f"{source.name}: {source.detail}", state.lost_since))


def _affected_devices(
    findings: Sequence[PodFinding], cause: Cause, used: Iterable[UsedDevice], pod_name: str
) -> Iterator[AffectedDevice]:
    """Yield the evaluated devices that the findings affect."""
    devices = [entry.device for entry in used if entry.device]
    unmatched = [finding for finding in findings if not any(_gives(device, finding) for device in devices)]
    for device in devices:
        own = [finding for finding in findings if _gives(device, finding)]
        for matched, severity in ((own, cause.severity), (unmatched, Severity.INFO)):
            if matched:
                yield AffectedDevice(device.subject, cause, severity, f"{pod_name}: {_evidence(matched)}")


def _gives(device: Device, finding: PodFinding) -> bool:
    is_kind = finding.resource is not None and device.kind is RESOURCE_KINDS[finding.resource]
    return is_kind and finding.size_kib in {0, device.size_kib}


def _evidence(findings: Iterable[PodFinding]) -> str:
    return joined_evidence(finding.evidence for finding in findings)


def evaluate_pods(
    evaluation: Evaluation,
    previous: PreviousVerdicts,
    state: PodAuditState,
    views: Sequence[GroupView],
    devices: Mapping[Subject, Device],
    verdicts: Mapping[Subject, DeviceHealth],
    declaring: Collection[str],
) -> tuple[Sequence[Note], Mapping[Subject, DeviceHealth]]:
    """Evaluate cgroups and the findings of audits.

    Args:
        state: State of the audits after this evaluation.
        views: Rule inputs for the cgroups with recent events.
        devices: Evaluated devices, by name.
        verdicts: Verdicts without causes from pods.
        declaring: Drivers that declare devices.

    Returns:
        The notes, and the verdicts that the findings change.
    """
    if state.trusted_until_ns is not None:
        evaluation.due_ns.append(state.trusted_until_ns)
    if not views and not state.groups and not state.lost_since:
        return (), {}
    pods = PodDevices(state.trusted, devices, declaring, evaluation.settings)
    from_groups = list(group_issues(evaluation, views, pods))
    from_audit = list(allocation_issues(state.groups if state.trusted else (), pods))
    notes = [*(issue.note for issue in from_groups), *allocation_notes(from_audit, state, evaluation.sources)]
    return notes, dict(with_pod_issues(evaluation, previous, [*from_groups, *from_audit], devices, verdicts))


def group_issues(evaluation: Evaluation, views: Iterable[GroupView], pods: PodDevices) -> Iterator[PodIssue]:
    """Yield the issues that the cgroup rules find for pods and containers."""
    for view in views:
        subject = f"group:{view.group.id}"
        evaluation.run_rules(subject, GROUP_RULES, view)
        causes = evaluation.causes(subject, partial(row_with_code, GROUP_RULES))
        if not causes:
            continue
        owner = (view.group.pod_uid, view.group.container)
        used = pods.used(view.group.pod_uid)
        devices = tuple(dict.fromkeys([*view.exclusive, *(entry.subject for entry in used)]))
        for cause in causes:
            evidence = f"{pods.display_name(*owner)}: {cause.evidence}"
            affected = [
                AffectedDevice(device_subject, cause, cause.severity, evidence)
                for device_subject in _affected_by_group(cause, view, used)
            ]
            yield PodIssue(Note(pods.subject(*owner), cause, devices), tuple(affected))


def _affected_by_group(cause: Cause, view: GroupView, used: Iterable[UsedDevice]) -> Iterable[str]:
    """Return the names of the used devices that provide what the pod lacks."""
    if cause.code == EXCLUSIVE_THROTTLED.code:
        return view.exclusive
    kind = AFFECTED_KINDS.get(cause.code)
    return [entry.subject for entry in used if entry.device and entry.device.kind is kind]
