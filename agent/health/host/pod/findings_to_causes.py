"""Conversion of findings about pods to causes: one cause for each pod or container and code, and causes on
the devices that were prepared for the pod.

Findings come from cgroup rules and from pod audits, which compare cgroups with the expected allocation. A
finding becomes a cause of each prepared device that provides the resource, with the severity of the catalog
row; if no device provides it, of every prepared device, as ``info``. Such a cause makes no device Unhealthy
or Unknown: the device works, and repairing it would not help.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice
from agent.health.evaluation import Evaluation, Subject, row_with_code
from agent.health.host.cgroup.rules import AFFECTED_KINDS, CGROUP_RULES, EXCLUSIVE_THROTTLED
from agent.health.host.cgroup.state import CgroupRuleInput
from agent.health.host.pod.rules import POD_AUDIT_ROWS, PODS_UNREADABLE_ROW, UNLISTED_FINDINGS_ROW
from agent.health.host.pod.state import PodFindingGroup, PodsSampleState, truncate_evidence
from agent.health.host.verdicts import MACHINE_SUBJECT
from agent.health.rules import cause_from_row
from agent.health.verdict import VerdictContext, add_minor_causes
from agent.model.claim import DeviceRef
from agent.model.health import Cause, DeviceHealth, NonDeviceCause, Severity, repair_for_severity
from agent.model.pod_findings import PodFinding, PodsSample, Resource
from agent.model.settings import EngineSettings
from agent.model.source_state import SourceSample

MAX_LISTED: Final = 3
"""Largest number of findings that a message lists."""


class AffectedDevice(NamedTuple):
    """Device that a finding about a pod affects, with the cause that the finding becomes on the device."""

    subject: str
    """Name of the device in the report: its host name, or driver, pool and name if a driver declares it."""
    pod_cause: Cause
    """Cause that the finding becomes on the pod itself."""
    severity: Severity
    """Severity of the cause on the device."""
    evidence: str
    """Evidence of the cause on the device; begins with the pod's name."""


class PodIssue(NamedTuple):
    """Finding about a pod or container, with the devices that the finding affects."""

    pod_cause: NonDeviceCause
    affected: tuple[AffectedDevice, ...] = ()


def join_evidence(texts: Iterable[str]) -> str:
    """Join different texts of evidence in alphabetical order; of more than MAX_LISTED, count the others."""
    kinds = list(dict.fromkeys(texts))
    more = [f"and {len(kinds) - MAX_LISTED} more"] if len(kinds) > MAX_LISTED else []
    return "; ".join([*map(truncate_evidence, sorted(kinds[:MAX_LISTED])), *more])


def verdicts_with_pod_issues(
    evaluation: Evaluation,
    previous: VerdictContext,
    issues: Iterable[PodIssue],
    devices: Mapping[Subject, InventoryDevice],
    verdicts: Mapping[Subject, DeviceHealth],
) -> Iterator[tuple[Subject, DeviceHealth]]:
    """Yield name and new verdict of each device that pod issues affect; issues of one code become one cause.

    Args:
        devices: Evaluated devices, by name.
        verdicts: Verdicts without causes from pods, by name.
    """
    found: dict[str, dict[str, list[AffectedDevice]]] = {}
    for issue in issues:
        for entry in issue.affected:
            found.setdefault(entry.subject, {}).setdefault(entry.pod_cause.code, []).append(entry)
    for subject, by_code in found.items():
        causes = map(_merge_causes, by_code.values())
        yield subject, add_minor_causes(evaluation, previous, devices[subject], verdicts[subject], causes)


def _merge_causes(entries: Sequence[AffectedDevice]) -> Cause:
    """Merge the causes that pods' findings of one code give one device into a single cause.

    The evidence lists only the causes with the highest severity; of many, the newest.
    """
    severity = max(entry.severity for entry in entries)
    worst = [entry for entry in entries if entry.severity is severity]
    newest_first = sorted(worst, key=lambda entry: (-entry.pod_cause.since.mono_ns, entry.evidence))
    return replace(
        worst[0].pod_cause,
        severity=severity,
        repair=repair_for_severity(worst[0].pod_cause.repair, severity),
        evidence=join_evidence(entry.evidence for entry in newest_first),
        since=min((entry.pod_cause.since for entry in worst), key=lambda since: since.mono_ns),
    )


class PodPreparedDevice(NamedTuple):
    """Device that the kubelet had prepared for a pod's claim."""

    subject: str
    """Name of the device in the report: its host name, or driver, pool and name if a driver declares it."""
    device: InventoryDevice | None
    """Evaluated device; None: this agent does not evaluate it."""


@dataclass(frozen=True, slots=True)
class PodDeviceLookup:
    """Lookup of the devices that were prepared for the claims of a pod, and of the pod's name.

    A device of a driver that declares its devices is found by driver, pool and name. A device of another
    configured driver in the node's pool is the host's device of that name. Other devices have no verdict.
    """

    sample: PodsSample | None
    """Newest sample of pods; None: pods are unknown."""
    devices: Mapping[str, InventoryDevice]
    """Evaluated devices, by name."""
    declaring: Collection[str]
    """Names of the drivers that declare devices of their own."""
    settings: EngineSettings

    def prepared_for(self, pod_uid: str) -> tuple[PodPreparedDevice, ...]:
        """Return the devices that were prepared for a pod, without duplicates."""
        refs = self.sample.uses.get(pod_uid, ()) if self.sample else ()
        return tuple(dict.fromkeys(map(self._prepared_device, refs)))

    def report_name(self, pod_uid: str, container: str) -> str:
        """Format a pod and its container for a report: ``pod <uid> (<name>) container <container>``."""
        name = self.sample.names.get(pod_uid) if self.sample else None
        return _append_container(container, f"pod {pod_uid} ({name})" if name else f"pod {pod_uid}")

    def message_name(self, pod_uid: str, container: str) -> str:
        """Format a pod and its container for the message of a device: the pod's name, or its UID if
        unknown."""
        name = self.sample.names.get(pod_uid) if self.sample else None
        return _append_container(container, f"pod {name or pod_uid}")

    def _prepared_device(self, ref: DeviceRef) -> PodPreparedDevice:
        subject, settings = str(ref), self.settings
        has_host_verdicts = ref.driver in settings.drivers and ref.driver not in self.declaring
        is_host_device = has_host_verdicts and ref.pool == settings.node and ref.device in self.devices
        if subject not in self.devices and is_host_device:
            subject = ref.device
        return PodPreparedDevice(subject, self.devices.get(subject))


def _append_container(container: str, pod: str) -> str:
    return f"{pod} container {container}" if container else pod


RESOURCE_KINDS: Final[Mapping[Resource, DeviceKind]] = {
    Resource.CPU: DeviceKind.CPU,
    Resource.MEMORY: DeviceKind.MEMORY,
    Resource.HUGEPAGES: DeviceKind.HUGEPAGES,
}
"""Kind of the devices that provide a resource to a pod, by resource."""


def audit_issues(found: Iterable[PodFindingGroup], pods: PodDeviceLookup) -> Iterator[PodIssue]:
    """Yield an issue, with the affected devices, for each group of audit findings about a pod."""
    for group in found:
        row = POD_AUDIT_ROWS[group.code]
        used = pods.prepared_for(group.pod_uid)
        advice = next((finding.advice for finding in group.findings if finding.advice), row.advice)
        cause = replace(cause_from_row(row, _evidence(group.findings), group.since), advice=advice)
        pod_name = pods.message_name(group.pod_uid, group.container)
        pod_cause = NonDeviceCause(
            pods.report_name(group.pod_uid, group.container), cause, tuple(device.subject for device in used)
        )
        yield PodIssue(pod_cause, tuple(_affected_devices(group.findings, cause, used, pod_name)))


def audit_causes(
    issues: Sequence[PodIssue], state: PodsSampleState, sources: Mapping[str, SourceSample]
) -> Iterator[NonDeviceCause]:
    """Yield the causes that pod audits give to pods and the machine.

    They are one for each issue, one for findings that are not listed, and one if pods can no longer be read.

    Args:
        issues: Issues of audits.
        state: State of the audits after this evaluation.
        sources: Sources by name, stalled ones in the state STALLED.
    """
    for issue in issues:
        yield issue.pod_cause
    if issues and state.unlisted_groups:
        since = min((issue.pod_cause.cause.since for issue in issues), key=lambda since: since.mono_ns)
        yield NonDeviceCause(
            MACHINE_SUBJECT,
            cause_from_row(
                UNLISTED_FINDINGS_ROW, f"{state.unlisted_groups} findings beyond the listed ones", since
            ),
        )
    if state.untrusted_since and state.was_read and state.sample:
        source = sources.get(state.sample.source.name, state.sample.source)
        yield NonDeviceCause(
            MACHINE_SUBJECT,
            cause_from_row(PODS_UNREADABLE_ROW, f"{source.name}: {source.detail}", state.untrusted_since),
        )


def _affected_devices(
    findings: Sequence[PodFinding], cause: Cause, used: Iterable[PodPreparedDevice], pod_name: str
) -> Iterator[AffectedDevice]:
    """Yield the devices of a pod that its findings affect.

    Args:
        findings: Findings about the pod with one code.
        cause: Cause that the findings become on the pod.
        used: Devices that were prepared for the pod.
        pod_name: Name of the pod for the evidence.
    """
    devices = [entry.device for entry in used if entry.device]
    unmatched = [finding for finding in findings if not any(_provides(device, finding) for device in devices)]
    for device in devices:
        own = [finding for finding in findings if _provides(device, finding)]
        for matched, severity in ((own, cause.severity), (unmatched, Severity.INFO)):
            if matched:
                yield AffectedDevice(device.subject, cause, severity, f"{pod_name}: {_evidence(matched)}")


def _provides(device: InventoryDevice, finding: PodFinding) -> bool:
    is_kind = finding.resource is not None and device.kind is RESOURCE_KINDS[finding.resource]
    return is_kind and finding.size_kib in {0, device.size_kib}


def _evidence(findings: Iterable[PodFinding]) -> str:
    return join_evidence(sorted(finding.evidence for finding in findings))


def evaluate_pods(
    evaluation: Evaluation,
    previous: VerdictContext,
    state: PodsSampleState,
    views: Sequence[CgroupRuleInput],
    devices: Mapping[Subject, InventoryDevice],
    verdicts: Mapping[Subject, DeviceHealth],
    declaring: Collection[str],
) -> tuple[Sequence[NonDeviceCause], Mapping[Subject, DeviceHealth]]:
    """Evaluate the cgroup rules and the findings of pod audits, and attribute them to pods and devices.

    Args:
        state: State of the audits after this evaluation.
        views: Rules' inputs for the cgroups with recent events.
        devices: Evaluated devices, by name.
        verdicts: Verdicts without causes from pods, by name.
        declaring: Names of the drivers that declare devices.

    Returns:
        The causes on pods and the machine, and the verdicts that the findings change, by device name.
    """
    if state.trusted_until_ns is not None:
        evaluation.due_ns.append(state.trusted_until_ns)
    if not views and not state.groups and not state.untrusted_since:
        return (), {}
    pods = PodDeviceLookup(state.trusted, devices, declaring, evaluation.settings)
    from_groups = list(cgroup_issues(evaluation, views, pods))
    from_audit = list(audit_issues(state.groups if state.trusted else (), pods))
    pod_causes = [
        *(issue.pod_cause for issue in from_groups),
        *audit_causes(from_audit, state, evaluation.sources),
    ]
    return pod_causes, dict(
        verdicts_with_pod_issues(evaluation, previous, [*from_groups, *from_audit], devices, verdicts)
    )


def cgroup_issues(
    evaluation: Evaluation, views: Iterable[CgroupRuleInput], pods: PodDeviceLookup
) -> Iterator[PodIssue]:
    """Evaluate the cgroup rules for each cgroup in ``views``, and yield an issue for each raised cause."""
    for view in views:
        subject = f"group:{view.group.id}"
        evaluation.run_rules(subject, CGROUP_RULES, view)
        causes = evaluation.causes(subject, partial(row_with_code, CGROUP_RULES))
        if not causes:
            continue
        owner = (view.group.pod_uid, view.group.container)
        used = pods.prepared_for(view.group.pod_uid)
        devices = tuple(dict.fromkeys([*view.exclusive, *(entry.subject for entry in used)]))
        for cause in causes:
            evidence = f"{pods.message_name(*owner)}: {cause.evidence}"
            affected = [
                AffectedDevice(device_subject, cause, cause.severity, evidence)
                for device_subject in _affected_by_group(cause, view, used)
            ]
            yield PodIssue(NonDeviceCause(pods.report_name(*owner), cause, devices), tuple(affected))


def _affected_by_group(
    cause: Cause, view: CgroupRuleInput, used: Iterable[PodPreparedDevice]
) -> Iterable[str]:
    """Return the names of the devices that provide the resource which a pod lacks.

    Args:
        cause: Cause that a cgroup rule raised for the pod or a container.
        view: Input of the rule: the cgroup.
        used: Devices that were prepared for the pod.
    """
    if cause.code == EXCLUSIVE_THROTTLED.code:
        return view.exclusive
    kind = AFFECTED_KINDS.get(cause.code)
    return [entry.subject for entry in used if entry.device and entry.device.kind is kind]
