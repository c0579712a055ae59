"""Findings about pods: their catalog rows, their state between evaluations, and their conversion to causes.

Findings come from cgroup rules and from pod audits. A pod audit compares the cgroup files and requests of
pods with the allocation that their claims and requests give them. A finding of an audit begins with the first
audit that reports it, and ends with the first audit that does not report it. Findings expire when pods can no
longer be read.

A finding becomes one cause (confirmed fault) for each pod or container and code. The finding also becomes a
cause of each prepared device that provides the resource, with the severity of the catalog row. If no device
provides the resource, it becomes a cause of every prepared device, with severity ``info``. Such a cause makes
no device Unhealthy or Unknown, because the device works, and a repair of the device would not help.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice
from agent.health.evaluation import Evaluation, Subject, row_with_code
from agent.health.host.cgroup.rules import AFFECTED_KINDS, CGROUP_RULES, EXCLUSIVE_THROTTLED
from agent.health.host.cgroup.state import CgroupRuleInput
from agent.health.host.verdicts import MACHINE_SUBJECT
from agent.health.rules import CatalogRow, cause_from_row
from agent.health.verdict import VerdictContext, add_minor_causes, stall_limit_ns, truncate_utf8
from agent.model.claim import DeviceRef
from agent.model.health import (
    Blame,
    Cause,
    DeviceHealth,
    NonDeviceCause,
    Repair,
    Severity,
    repair_for_severity,
)
from agent.model.pod_findings import PodFinding, PodsSample, Resource
from agent.model.reading import SourceSample, SourceState
from agent.model.settings import EngineSettings
from agent.model.time import Instant

MAX_GROUPS: Final = 512
"""Largest number of finding groups (findings of one pod or container with one code) that are reported, worst
first: more findings than that have one common cause."""
_AT_AUDIT: Final = "any cgroup file at an audit (pods.audit), 30 s or more after a start or a resize"
_AT_ANY_AUDIT: Final = "at any audit (pods.audit)"
_FIND_WRITER: Final = (
    "see drahealth audit for the arithmetic, and find out what wrote the value: the kubelet (its feature "
    "gates), the runtime, an NRI plugin, systemd, or an operator"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFindingRow(CatalogRow):
    """Catalog row for one finding code of pod audits. By default, the finding has severity ``info`` and is
    about a cgroup file that deviates from the allocation."""

    description: str
    """Meaning of the finding, as a sentence for the list of checks."""
    severity: Severity = Severity.INFO
    blame: Blame = Blame.CONFIGURATION
    source: str = "pods"
    threshold: str = _AT_AUDIT
    advice: str = _FIND_WRITER
    repair: Repair = Repair.NONE


_ROWS: Final = (
    PodFindingRow(
        code="cgroup.lower",
        severity=Severity.DEGRADED,
        description="A pod or a container that uses claims has a lower value in its cgroup than expected.",
        why="the pod is throttled, killed or refused pages before it has used its allocation",
        try_it="write half of its value to memory.max of a container that uses a claim",
    ),
    PodFindingRow(
        code="cgroup.limited",
        severity=Severity.DEGRADED,
        description="A pod or a container that uses claims has an unexpected limit in its cgroup.",
        why="the pod is throttled, killed or refused pages although no limit was requested",
        try_it="write 50000 100000 to cpu.max of a container that uses a claim and has no CPU limit",
    ),
    PodFindingRow(
        code="cgroup.parent_tighter",
        severity=Severity.DEGRADED,
        description="The cgroup of a pod that uses claims has a lower limit than those of its containers.",
        why="the containers cannot use their allocation because of the pod's limit",
        try_it="write a lower value to memory.max of a pod that uses a claim than its containers have",
    ),
    PodFindingRow(
        code="cgroup.higher",
        description="A pod or a container that uses claims has a higher value in its cgroup than expected.",
        why="the pod can use resources that are allocated to other pods",
        try_it="write twice its value to memory.max of a container that uses a claim",
    ),
    PodFindingRow(
        code="cgroup.unlimited",
        description="A pod or a container that uses claims lacks an expected limit in its cgroup.",
        why="the pod can use resources that are allocated to other pods",
        try_it="write max to memory.max of a container that uses a claim and has a memory limit",
    ),
    PodFindingRow(
        code="cgroup.missing",
        description="The controller or file for an expected value does not exist or cannot be read.",
        why="the kernel neither guarantees the pod's allocation nor limits the pod to it",
        advice="enable the controller: check cgroup.subtree_control of each cgroup above",
        try_it="write -memory to cgroup.subtree_control of a pod that uses a claim",
    ),
    PodFindingRow(
        code="claim.best_effort",
        blame=Blame.WORKLOAD,
        description="A pod is BestEffort though its claims give it CPU or memory.",
        threshold=_AT_ANY_AUDIT,
        why="on a busy node the pod gets the least CPU time, and its processes are killed first",
        advice="give one of its containers a small request, so that the pod is Burstable",
        try_it="claim CPU for a pod without requests and limits",
    ),
    PodFindingRow(
        code="claim.not_counted",
        description="The kubelet does not add the resources of claims to the cgroups of their pods.",
        threshold=_AT_ANY_AUDIT,
        why="the scheduler accounts for them, but the pod does not get them",
        advice="enable the gate DRANodeAllocatableResources of kubelets from 1.37 on",
        try_it="claim CPU on a node with kubelet 1.36",
    ),
    PodFindingRow(
        code="claim.over_pod_level",
        blame=Blame.WORKLOAD,
        description="The claims of a pod give more than its pod-level resources.",
        threshold=_AT_ANY_AUDIT,
        why="the pod gets its pod-level resources only; resources of claims beyond them are lost",
        advice="raise spec.resources by the resources of the claims, which it includes",
        try_it="claim 4 CPUs for a pod with 2 in spec.resources",
    ),
    PodFindingRow(
        code="claim.shared_mapping",
        blame=Blame.WORKLOAD,
        description="Several pods share a claim that counts as CPU, memory or hugepages.",
        threshold=_AT_ANY_AUDIT,
        why="the cgroup of each pod allows the whole amount, which the node has only once",
        advice="give each pod its own claim; if the pods share it on purpose, list it in the annotation "
        "drahealth/shared-claims of each",
        try_it="name one claim that gives CPU in two pods",
    ),
    PodFindingRow(
        code="claim.starved",
        blame=Blame.WORKLOAD,
        description="A container has no CPU request although its claims give it CPU.",
        threshold=_AT_ANY_AUDIT,
        why="within its pod the container has the lowest CPU weight, whatever its claims give",
        advice="give the container a CPU request: within a pod, claims do not count for the weight",
        try_it="claim CPU for a container without a CPU request",
    ),
    PodFindingRow(
        code="cpus.exclusive_quota",
        blame=Blame.WORKLOAD,
        description="A container has exclusive CPUs from a driver and a quota below their number.",
        threshold="any quota of less than 1000m for each of its CPUs",
        why="the CPUs idle while the container waits for its quota",
        advice="remove the container's CPU limit, or raise it to the number of its CPUs",
        try_it="give a container 4 exclusive CPUs by a driver, and a CPU limit of 2",
    ),
    PodFindingRow(
        code="cpus.exclusive_throttled",
        severity=Severity.DEGRADED,
        blame=Blame.WORKLOAD,
        description="A container was throttled although it has exclusive CPUs from a driver.",
        threshold="any throttled period since the container started",
        why="the CPUs idled while the container waited for its quota",
        advice="remove the container's CPU limit: its cpuset limits it already",
        try_it="give a container 4 exclusive CPUs by a driver, and a CPU limit of 2, and load them",
    ),
)
POD_AUDIT_ROWS: Final = {row.code: row for row in _ROWS}
"""Catalog rows for findings of pod audits, by code."""
UNLISTED_FINDINGS_ROW: Final = PodFindingRow(
    code="node.pods.unlisted",
    blame=Blame.AGENT,
    description="An audit has more findings than the agent lists for pods and their devices.",
    threshold=f"more than {MAX_GROUPS}, those of a pod or container under one code counted once",
    why="so many findings most likely have one common cause",
    advice="run drahealth audit for all findings and check what the first have in common",
    try_it="audit a node of 600 pods with claims whose kubelet does not count them",
)
PODS_UNREADABLE_ROW: Final = PodFindingRow(
    code="node.pods.unread",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    description="Pods and their claims can no longer be read.",
    threshold="three periods (pods.period) and some time without a successful pass",
    why="findings of audits are no longer reported, and the pods that a fault affects are unknown",
    advice="see the source pods in drahealth scan: the kubelet's files and sockets, and their permissions",
    try_it="chmod 0 /var/lib/kubelet/dra_manager_state, with an agent that is not root",
)


# --- state -------------------------------------------------------------------------------------------------

TEXT_LIMIT: Final = 512
"""Maximum size of the evidence of one finding in a message that may list several [bytes]."""
_FAILED: Final = frozenset({SourceState.FAILING, SourceState.STALLED})


class PodFindingGroup(NamedTuple):
    """Findings of a pod audit about one pod or container with the same finding code."""

    pod_uid: str
    container: str
    """Name of the container; empty for the pod itself."""
    code: str
    findings: tuple[PodFinding, ...]
    """Findings, one for each cgroup file that deviates."""
    since: Instant
    """Time of the first of the consecutive audits that reported the findings."""


@dataclass(frozen=True, slots=True)
class PodsSampleState:
    """Newest sample of pods with the findings of its audit, and whether the sample is still used."""

    sample: PodsSample | None = None
    """Newest sample of the node's pods; None: the agent does not watch pods."""
    groups: tuple[PodFindingGroup, ...] = ()
    """Findings of the newest audit, grouped by pod, container and code, worst first."""
    unlisted_groups: int = 0
    """Number of finding groups beyond MAX_GROUPS; only their number is reported."""
    was_read: bool = False
    """True: the source of pods could be read at least once."""
    unread_since: Instant | None = None
    """Time since which the source of pods cannot be read; None: it can be read."""
    trusted_until_ns: int | None = None
    """CLOCK_MONOTONIC until which the sample is trusted although the source cannot be read [ns]; None: the
    source can be read, or the sample is no longer trusted."""
    untrusted_since: Instant | None = None
    """Time since which the sample is no longer trusted; None: it is trusted."""

    @property
    def trusted(self) -> PodsSample | None:
        """Newest sample of pods; None if there is no sample, or the sample is too old to be used."""
        return None if self.untrusted_since else self.sample


def next_pods_sample_state(
    previous: PodsSampleState, sample: PodsSample | None, sources: Mapping[str, SourceSample], now: Instant
) -> PodsSampleState:
    """Return the state of pod audits after a snapshot (the newest readings).

    Args:
        sample: Sample of pods in the snapshot, with the findings of the newest audit.
        sources: Sources of the snapshot by name. Sources that have stopped reading have the state STALLED.
    """
    if sample is None:
        return previous if previous.sample is None else PodsSampleState()
    source = sources.get(sample.source.name, sample.source)
    unread_since = (previous.unread_since or now) if source.state in _FAILED else None
    # a stalled source has been without a pass for that long already
    limit_ns = 0 if source.state is SourceState.STALLED else stall_limit_ns(source)
    trusted_until_ns = unread_since.mono_ns + limit_ns if unread_since else None
    is_lost = trusted_until_ns is not None and now.mono_ns >= trusted_until_ns
    groups, dropped = previous.groups, previous.unlisted_groups
    if previous.sample is None or previous.sample.findings != sample.findings:
        all_groups = _group_findings(sample.findings, previous.groups, now)
        groups, dropped = all_groups[:MAX_GROUPS], max(0, len(all_groups) - MAX_GROUPS)
    return PodsSampleState(
        sample=sample,
        groups=groups,
        unlisted_groups=dropped,
        was_read=previous.was_read or source.state is SourceState.OK,
        unread_since=unread_since,
        trusted_until_ns=None if is_lost else trusted_until_ns,
        untrusted_since=(previous.untrusted_since or now) if is_lost else None,
    )


def _group_findings(
    findings: Iterable[PodFinding], before: Sequence[PodFindingGroup], now: Instant
) -> tuple[PodFindingGroup, ...]:
    """Group audit findings by pod, container and code, worst first.

    Args:
        before: Groups of the last evaluation. A group that is also in ``before`` keeps its begin.
    """
    since = {group[:3]: group.since for group in before}
    parts: dict[tuple[str, str, str], list[PodFinding]] = {}
    for finding in findings:
        key = (finding.pod_uid, finding.container, finding.code.replace("-", "_"))
        parts.setdefault(key, []).append(finding._replace(evidence=truncate_evidence(finding.evidence)))
    groups = [
        PodFindingGroup(*key, tuple(members), since.get(key, now)) for key, members in sorted(parts.items())
    ]
    return tuple(sorted(groups, key=lambda group: -POD_AUDIT_ROWS[group.code].severity))


def truncate_evidence(text: str) -> str:
    """Truncate the evidence of a finding to TEXT_LIMIT bytes."""
    return truncate_utf8(text, TEXT_LIMIT)


# --- causes ------------------------------------------------------------------------------------------------

MAX_LISTED: Final = 3
"""Largest number of findings that a message lists."""


class AffectedDevice(NamedTuple):
    """Device that a finding about a pod affects, with the cause (reported fault) that the device gets."""

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
    """Join different texts of evidence in alphabetical order. If there are more than MAX_LISTED, the rest is
    counted."""
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
    """Yield the name and new verdict of each device that issues of pods affect.

    Issues with the same finding code become one cause of the device.

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
    """Merge the causes that findings about several pods, with one code, give one device into a single cause.
    The evidence lists only the causes with the highest severity. If there are many, it lists the newest."""
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


def host_device_of(ref: DeviceRef, declaring: Collection[str], settings: EngineSettings) -> str:
    """Return the name of the host's device that a driver's device is; empty: it is none.

    Args:
        ref: Device of a driver.
        declaring: Names of the drivers that declare devices of their own.
        settings: Settings with the node's name and the configured drivers.
    """
    has_host_verdicts = ref.driver in settings.drivers and ref.driver not in declaring
    return ref.device if has_host_verdicts and ref.pool == settings.node else ""


@dataclass(frozen=True, slots=True)
class PodDeviceLookup:
    """Lookup of the devices that were prepared for the claims of a pod, and of the pod's name.

    If a driver declares its devices, a device is found by driver, pool and name. If another configured driver
    has the device in the node's pool, it is the host's device with that name. Other devices have no verdict.
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
        subject, host_device = str(ref), host_device_of(ref, self.declaring, self.settings)
        if subject not in self.devices and host_device in self.devices:
            subject = host_device
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

    There is one cause for each issue, one for findings that are not listed, and one if pods can no longer be
    read.

    Args:
        issues: Issues of audits.
        state: State of the audits after this evaluation.
        sources: Sources by name. Sources that have stopped reading have the state STALLED.
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
    """Yield the devices of a pod that findings about the pod affect.

    Args:
        findings: Findings about the pod with one code.
        cause: Cause (reported fault) that the pod gets from the findings.
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
    """Evaluate the cgroup rules and the findings of pod audits, and attribute the findings to pods and
    devices.

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
    """Evaluate the cgroup rules for each cgroup in ``views``, and yield an issue for each raised fault."""
    for base in views:
        view = _with_prepared_cpus(base, pods)
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


def _with_prepared_cpus(view: CgroupRuleInput, pods: PodDeviceLookup) -> CgroupRuleInput:
    """Return the rules' input of a cgroup without exclusive CPUs, unless each of their devices is prepared
    for the pod: the CPUs of a pod without claims can be those of unused devices."""
    if not (view.exclusive or any(container.exclusive for container in view.containers)):
        return view
    containers = tuple(_with_prepared_cpus(container, pods) for container in view.containers)
    prepared = {entry.subject for entry in pods.prepared_for(view.group.pod_uid)}
    exclusive = view.exclusive if prepared.issuperset(view.exclusive) else ()
    return view._replace(containers=containers, exclusive=exclusive)


def _affected_by_group(
    cause: Cause, view: CgroupRuleInput, used: Iterable[PodPreparedDevice]
) -> Iterable[str]:
    """Return the names of the devices that provide the resource which a pod lacks.

    Args:
        cause: Cause that a cgroup rule raised for the pod or a container.
        view: Input of the rule for the cgroup of the pod or container.
        used: Devices that were prepared for the pod.
    """
    if cause.code == EXCLUSIVE_THROTTLED.code:
        return view.exclusive
    kind = AFFECTED_KINDS.get(cause.code)
    counts = zip(view.group.hugetlb, view.hits, view.refusals, strict=True)
    sizes = {sample.size_kib for sample, hits, refusals in counts if hits or refusals}
    return [
        entry.subject
        for entry in used
        if entry.device and entry.device.kind is kind
        if kind is not DeviceKind.HUGEPAGES or not sizes or entry.device.size_kib in sizes
    ]
