"""Audit of the cgroups of a pod or of the QoS classes: compares each cgroup with its expected values.

The module does not read files; the caller passes the function ``read_cgroup``. A cgroup with a wrong value is
read twice, because the cgroup may be ending: its directories in the v1 hierarchies are then removed one after
another.

The module also has the risks that follow from the requests, limits and claims of a pod, although its cgroups
are correct.

The kubelet and the container runtime do not cause these risks. The author of the pod, claim or driver can
remove them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agent.cgroup_audit.audit_verdicts import DRIFT_VERDICTS, ActualCgroup, AuditVerdict, SettingComparison
from agent.cgroup_audit.cgroup_paths import (
    CgroupLevel,
    CgroupOwner,
    container_path,
    parse_path,
    pod_path,
    qos_path,
    reserved_path,
)
from agent.cgroup_audit.cgroup_settings import (
    PROTECTIONS,
    CgroupSettingId,
    SettingKind,
    hugepage_size_name,
    normalize_limit,
)
from agent.cgroup_audit.compare import compare_cgroups, compare_inherited_limit, since_change_s
from agent.cgroup_audit.expected_cgroups import (
    KUBEPODS,
    CgroupId,
    ExpectedCgroup,
    expected_node_cgroups,
    expected_pod_cgroups,
    expected_qos_cgroups,
)
from agent.cgroup_audit.expected_values import (
    Amount,
    ResourceSum,
    container_limit,
    container_request,
    format_amount,
)
from agent.cgroup_audit.kubelet_config import KUBE_RESERVED, ExclusiveCpus, NodeFacts
from agent.cgroup_audit.pod_model import (
    CPU,
    MEMORY,
    MILLI,
    ZERO,
    Pod,
    QosClass,
    Quantity,
    UnknownAmount,
)
from agent.errors import ProbeError
from agent.model.cpuset import cpu_numbers, format_cpus
from agent.model.pod_findings import NO_LIMIT, CgroupSettings, PodFinding, Resource
from agent.model.reading import Absence, Missing, Reading


class PodRisk(NamedTuple):
    """Risk of a pod or container although its cgroups are correct, such as CPU starvation."""

    code: str
    """Code of the risk, which is a key of :data:`ADVICE`."""
    pod: str
    """Pod that has the risk, as ``<namespace>/<name>``."""
    container: str
    """Name of the container that has the risk; empty: the risk concerns the pod."""
    description: str
    """Description of the risk with its numbers, on one line."""
    advice: str


ADVICE: Final[Mapping[str, str]] = {
    "claim.best_effort": "give one of its containers a small request, so that the pod is Burstable",
    "claim.not_counted": "enable the gate DRANodeAllocatableResources of kubelets from 1.37 on",
    "claim.over_pod_level": "raise spec.resources by the resources of the claims, which it includes",
    "claim.shared_mapping": "give each pod its own claim; if the pods share it on purpose, list it in the "
    "annotation drahealth/shared-claims of each",
    "claim.starved": "give the container a CPU request: within a pod, claims do not count for the weight",
    "cpus.exclusive_quota": "remove the container's CPU limit, or raise it to the number of its CPUs",
    "cpus.exclusive_throttled": "remove the container's CPU limit: its cpuset limits it already",
}
"""Advice for the operator by code of the risk."""


def pod_risks(
    pod: Pod,
    facts: NodeFacts,
    exclusive_cpus: Sequence[ExclusiveCpus] = (),
    throttled_periods: Mapping[str, int] | None = None,
    quotas: Mapping[str, int] | None = None,
) -> tuple[PodRisk, ...]:
    """Return the risks of one pod and its containers.

    Args:
        exclusive_cpus: Known exclusive CPUs of the pod's containers.
        throttled_periods: Throttled CPU periods (nr_throttled in ``cpu.stat``) by container, if read.
        quotas: Quota of CPU time [millicores] by container, if read; used if the limit is unknown.
    """
    found = [
        PodRisk(code, str(pod), container, description, ADVICE[code])
        for code, find in _POD_RISKS.items()
        for container, description in (find(pod, facts) if pod.known_claim_resources else ())
    ]
    counts, read_quotas = throttled_periods or {}, quotas or {}
    from_kubelet = {exclusive.container for exclusive in exclusive_cpus if exclusive.by_kubelet}
    for container in pod.containers:
        if container.name in from_kubelet:
            continue
        for own in (exclusive for exclusive in exclusive_cpus if exclusive.container == container.name):
            limit = container_limit(pod, container, CPU, with_claims=facts.counts_claims)
            quota = read_quotas.get(container.name)
            if isinstance(limit, UnknownAmount) and quota is not None:
                limit = ResourceSum(Quantity(quota * MILLI), f"{quota}m")
            for code, description in _exclusive_cpu_risks(limit, own, facts, counts.get(container.name, 0)):
                found.append(PodRisk(code, str(pod), container.name, description, ADVICE[code]))
    return tuple(found)


def shared_claim_risks(pods: Iterable[Pod]) -> tuple[PodRisk, ...]:
    """Return a risk for each pod that shares a claim with another pod, so that its resources count twice.

    A claim is no risk if each active pod that uses the claim declares it as shared on purpose.
    """
    users: dict[tuple[str, str], list[Pod]] = {}
    for pod in pods:
        for grant in pod.known_claim_resources:
            if grant.shared and pod.is_active:
                users.setdefault((pod.namespace, grant.claim), []).append(pod)
    code = "claim.shared_mapping"
    return tuple(
        PodRisk(code, str(pod), "", f"claim {claim} counts in full for {_pod_names(sharers)}", ADVICE[code])
        for (_, claim), sharers in users.items()
        if len(sharers) > 1 and not all(claim in pod.shared_claims for pod in sharers)
        for pod in sharers
    )


def _pod_names(pods: Sequence[Pod]) -> str:
    return ", ".join(sorted(str(pod) for pod in pods))


RiskDetails = Iterable[tuple[str, str]]
"""Risks of one code: pairs of container name (empty: the whole pod) and description."""


def _best_effort_risk(pod: Pod, facts: NodeFacts) -> RiskDetails:
    amounts = [f"{format_amount(key, given)} of {key}" for key, given in _claim_amounts(pod).items() if given]
    if pod.qos is QosClass.BEST_EFFORT and amounts and facts.counts_claims:
        text = f"claims give {' and '.join(amounts)}; the pod's cgroup has the lowest CPU weight and no limit"
        yield "", f"BestEffort: {text}"


def _not_counted_risk(pod: Pod, facts: NodeFacts) -> RiskDetails:
    if not facts.counts_claims:
        claims = ", ".join(sorted({grant.claim for grant in pod.known_claim_resources}))
        yield "", f"the kubelet does not count the resources of claims {claims}"


def _over_pod_level_risks(pod: Pod, _: NodeFacts) -> RiskDetails:
    """Yield the pod-level requests and limits of a pod that are below the resources of its claims.

    A pod-level amount should include the resources of the claims.
    """
    for resource, given in _claim_amounts(pod).items():
        for kind, level in (("request", pod.pod_level_requests), ("limit", pod.pod_level_limits)):
            if resource in level and level[resource] < given:
                amounts = format_amount(resource, level[resource]), format_amount(resource, given)
                yield "", f"{resource}: the pod-level {kind} is {amounts[0]}, claims give {amounts[1]}"


def _starved_risks(pod: Pod, facts: NodeFacts) -> RiskDetails:
    """Yield the containers that get CPU from claims but have no CPU request.

    The CPU weight of such a container is the lowest possible.
    """
    if len(pod.containers) < 2 or not facts.counts_claims:
        return
    for container in pod.containers:
        given = sum(
            (use.amount_for_container(container.name, CPU) or ZERO for use in pod.known_claim_resources), ZERO
        )
        if given and container_request(pod, container) is None:
            yield (
                container.name,
                f"the container's cgroup has 2 shares, the minimum; claims give {given.milli}m of CPU",
            )


_POD_RISKS: Final[Mapping[str, Callable[[Pod, NodeFacts], RiskDetails]]] = {
    "claim.best_effort": _best_effort_risk,
    "claim.not_counted": _not_counted_risk,
    "claim.over_pod_level": _over_pod_level_risks,
    "claim.starved": _starved_risks,
}


def _claim_amounts(pod: Pod) -> Mapping[str, Quantity]:
    """Sum the CPU and memory of all claims of a pod."""
    grants = pod.known_claim_resources
    return {key: sum((grant.amount_for_pod(key) or ZERO for grant in grants), ZERO) for key in (CPU, MEMORY)}


def _exclusive_cpu_risks(limit: Amount, own: ExclusiveCpus, facts: NodeFacts, throttled: int) -> RiskDetails:
    """Yield the risks of a container that has a CPU quota and exclusive CPUs from a DRA driver.

    The kubelet does not lift the quota for such CPUs.
    """
    cpus = format_cpus(own.cpus)
    if not isinstance(limit, ResourceSum) or not facts.enforces_quota:
        return
    milli = 1000 * len(list(cpu_numbers(own.cpus)))
    if limit.total.milli < milli:
        yield "cpus.exclusive_quota", f"exclusive CPUs {cpus} are {milli}m; the quota is {limit.text}"
    if throttled:
        yield "cpus.exclusive_throttled", f"throttled at {limit.text} on exclusive CPUs {cpus}"


# --- the audit ---------------------------------------------------------------------------------------------

VANISHED_CGROUP: Final = ActualCgroup(is_gone=True)


def actual_cgroup(settings: CgroupSettings | None, since_change_s: float | None) -> ActualCgroup:
    """Convert the settings of one cgroup, as read from its files, to the values that the audit compares.

    Args:
        settings: Settings of the cgroup; None: the cgroup does not exist.
        since_change_s: Time since the last start or resize of the cgroup's container or pod [s];
            None: long ago or unknown.
    """
    if settings is None:
        return VANISHED_CGROUP
    values: dict[CgroupSettingId, Reading] = {
        CgroupSettingId(SettingKind.WEIGHT): settings.weight,
        CgroupSettingId(SettingKind.QUOTA): settings.quota_us,
        CgroupSettingId(SettingKind.PERIOD): settings.period_us,
        CgroupSettingId(SettingKind.MEMORY): settings.memory,
        CgroupSettingId(SettingKind.CPUS): settings.cpus,
        CgroupSettingId(SettingKind.EFFECTIVE): settings.effective,
        CgroupSettingId(SettingKind.HIGH): settings.high,
        CgroupSettingId(SettingKind.MIN): settings.min,
        CgroupSettingId(SettingKind.LOW): settings.low,
        CgroupSettingId(SettingKind.SWAP): settings.swap,
        CgroupSettingId(SettingKind.OOM_SCORE): settings.oom_score,
        **_hugepage_readings(settings),
    }
    return ActualCgroup(values, settings.controllers, since_change_s=since_change_s)


def _hugepage_readings(settings: CgroupSettings) -> Mapping[CgroupSettingId, Reading]:
    found: dict[CgroupSettingId, Reading] = {}
    for page in settings.pages:
        found[CgroupSettingId(SettingKind.PAGES, page.size_kib)] = page.max
        found[CgroupSettingId(SettingKind.RESERVED, page.size_kib)] = page.rsvd_max
    return found


ReadCgroup = Callable[[str, bool], CgroupSettings | None]
"""Function that reads a cgroup: takes its path, and True to include the cpuset.
Returns None if it is gone."""

INCONCLUSIVE_VERDICTS: Final = frozenset({AuditVerdict.UNKNOWN, AuditVerdict.VANISHED, AuditVerdict.QUIET})
"""Verdicts that leave open whether the value is correct."""
_PAGES: Final = frozenset({SettingKind.PAGES, SettingKind.RESERVED})


class AuditedNode(NamedTuple):
    """Kubernetes node whose pod cgroups are audited."""

    facts: NodeFacts
    root: str = "/"
    """Parent cgroup of kubepods: the kubelet's ``--cgroup-root``."""
    has_hugetlb: bool = True
    """True: the hugetlb controller is enabled in kubepods. False: pods have no hugepage limits."""


@dataclass(frozen=True, slots=True)
class PodAudit:
    """Result of the audit of one pod: compared cgroup settings and risks."""

    pod: Pod
    comparisons: tuple[SettingComparison, ...]
    """Compared settings of the pod and its running containers; empty: no container runs."""
    risks: tuple[PodRisk, ...]
    stopped_containers: tuple[str, ...]
    """Names of containers that do not run, so that they have no cgroup to compare."""


def audit_pod_cgroups(
    pod: Pod,
    node: AuditedNode,
    read_cgroup: ReadCgroup,
    now_wall_s: float,
    exclusive_cpus: Sequence[ExclusiveCpus] = (),
    *,
    exclusive_cpus_complete: bool = True,
) -> PodAudit:
    """Compare the cgroups of one pod with their expected values, and find the pod's risks.

    Args:
        pod: A pod that has not ended.
        exclusive_cpus: Exclusive CPUs of the pod's containers.
        exclusive_cpus_complete: False if ``exclusive_cpus`` may lack CPUs that the kubelet assigned.

    Raises:
        ProbeError: The pod's UID or a container's id is not valid in a cgroup name.
    """
    idle = tuple(part.name for part in pod.containers if not part.id or part.started_wall_s is None)
    if len(idle) == len(pod.containers):
        return PodAudit(pod, (), (), idle)
    groups = [
        _without_hugepage_limits(cgroup, node)
        for cgroup in expected_pod_cgroups(pod, node.facts, exclusive_cpus)
        if cgroup.cgroup.container not in idle
    ]
    at = {group.cgroup: _cgroup_path(group.cgroup, pod, node) for group in groups}
    owners = {exclusive.container for exclusive in exclusive_cpus}
    throttled: dict[str, int] = {}
    quotas: dict[str, int] = {}

    def read_actual(group: CgroupId) -> ActualCgroup:
        settings = read_cgroup(at[group], group.container in owners)
        if settings and group.container and not isinstance(settings.throttled, Missing):
            throttled[group.container] = settings.throttled
        quota_us, period_us = (settings.quota_us, settings.period_us) if settings else (NO_LIMIT, 0)
        if isinstance(quota_us, int) and isinstance(period_us, int) and period_us and quota_us != NO_LIMIT:
            quotas[group.container] = quota_us * 1000 // period_us
        return actual_cgroup(settings, since_change_s(pod, now_wall_s, group.container))

    compared = _compare_with_second_read(groups, read_actual, node)
    if not exclusive_cpus_complete:
        compared = tuple(_unknown_if_exclusive(comparison, pod) for comparison in compared)
    return PodAudit(pod, compared, pod_risks(pod, node.facts, exclusive_cpus, throttled, quotas), idle)


def audit_qos_cgroups(
    pods: Sequence[Pod], node: AuditedNode, read_cgroup: ReadCgroup, now_wall_s: float
) -> tuple[SettingComparison, ...]:
    """Compare the cgroups of the QoS classes Burstable and BestEffort with their expected values.

    Args:
        pods: All pods of the Kubernetes node.
    """
    ages = [since_change_s(pod, now_wall_s) for pod in pods if pod.qos is QosClass.BURSTABLE]
    since = min((age for age in ages if age is not None), default=None)

    def read_actual(group: CgroupId) -> ActualCgroup:
        return actual_cgroup(
            read_cgroup(qos_path(group.qos, node.facts.cgroup_driver, node.root), False), since
        )

    groups = [_without_hugepage_limits(cgroup, node) for cgroup in expected_qos_cgroups(pods, node.facts)]
    return _compare_with_second_read(groups, read_actual, node)


def audit_node_cgroups(
    pods: Sequence[Pod] | None, node: AuditedNode, read_cgroup: ReadCgroup
) -> tuple[SettingComparison, ...]:
    """Compare the cgroup of all pods, and those of reserved resources, with the kubelet's configuration.

    Args:
        pods: All pods of the Kubernetes node; None: not all pods are known.
    """

    def read_actual(group: CgroupId) -> ActualCgroup:
        return actual_cgroup(read_cgroup(node_cgroup_path(group.name, node), False), None)

    return _compare_with_second_read(expected_node_cgroups(pods, node.facts), read_actual, node)


def node_cgroup_path(name: str, node: AuditedNode) -> str:
    """Return the path of a cgroup of the Kubernetes node.

    The name is kubepods, kube-reserved or system-reserved.
    """
    kubelet = node.facts.kubelet
    if name == KUBEPODS or kubelet is None:
        return qos_path(QosClass.GUARANTEED, node.facts.cgroup_driver, node.root)
    is_kube = name == KUBE_RESERVED
    cgroup = kubelet.kube_reserved_cgroup if is_kube else kubelet.system_reserved_cgroup
    return reserved_path(cgroup, node.facts.cgroup_driver)


QOS_REWRITE_S: Final = 60
"""Interval in which the kubelet rewrites the cgroups of QoS classes [s].

A deleted or resized pod, or a restart of the kubelet, makes them outdated until the next rewrite.
"""


REWRITTEN_VERDICTS: Final = DRIFT_VERDICTS - {AuditVerdict.MISSING}
"""Verdicts on a wrong setting that the kubelet's next rewrite may correct; it creates no missing file."""


class QosDifferences(NamedTuple):
    """Wrong cgroup settings of QoS classes, and wrong memory protections of kubepods, of one audit."""

    at_wall_s: float
    """Time of the audit that found the differences [s since 1970]."""
    settings: frozenset[tuple[CgroupId, CgroupSettingId]]


def qos_differences(compared: Sequence[SettingComparison], now_wall_s: float) -> QosDifferences | None:
    """Return the wrong settings that the kubelet rewrites every minute; None: there are none."""
    found = frozenset((item.cgroup, item.setting) for item in compared if _may_be_rewritten(item))
    return QosDifferences(now_wall_s, found) if found else None


def confirmed_qos_comparisons(
    compared: Sequence[SettingComparison], now_wall_s: float, earlier: QosDifferences | None
) -> tuple[SettingComparison, ...]:
    """Mark a wrong setting as QUIET (not reported) while the kubelet's next rewrite may still correct it.

    A wrong setting is confirmed if an earlier audit also found it wrong, and the kubelet has rewritten the
    setting since then.

    Args:
        earlier: Differences of an earlier audit; None: there was none.
    """
    is_rewritten = earlier is not None and now_wall_s - earlier.at_wall_s >= QOS_REWRITE_S
    confirmed = earlier.settings if earlier is not None and is_rewritten else frozenset()
    why = "seen once; the kubelet rewrites this setting about once a minute"
    return tuple(
        comparison._replace(verdict=AuditVerdict.QUIET, reason=f"{comparison.reason}; {why}", consequence="")
        if _may_be_rewritten(comparison) and (comparison.cgroup, comparison.setting) not in confirmed
        else comparison
        for comparison in compared
    )


def _may_be_rewritten(compared: SettingComparison) -> bool:
    """Return whether the kubelet's next rewrite may change a wrong setting.

    The kubelet writes the weights and memory limits of kubepods and of the cgroups of reserved resources only
    when it starts.
    """
    is_rewritten = compared.cgroup.level is CgroupLevel.QOS or compared.setting.kind in PROTECTIONS
    return compared.verdict in REWRITTEN_VERDICTS and is_rewritten


def _compare_with_second_read(
    groups: Sequence[ExpectedCgroup], read_actual: Callable[[CgroupId], ActualCgroup], node: AuditedNode
) -> tuple[SettingComparison, ...]:
    actual = {group.cgroup: read_actual(group.cgroup) for group in groups}
    compared = compare_cgroups(groups, actual, node.facts.cgroup_version)
    if not any(comparison.verdict in DRIFT_VERDICTS for comparison in compared):
        return compared
    wrong: Iterable[CgroupId] = {found.cgroup for found in compared if found.verdict in DRIFT_VERDICTS}
    again: Mapping[CgroupId, ActualCgroup] = {group: read_actual(group) for group in wrong}
    return compare_cgroups(groups, {**actual, **again}, node.facts.cgroup_version)


def _cgroup_path(group: CgroupId, pod: Pod, node: AuditedNode) -> str:
    path = pod_path(pod.cgroup_uid, pod.qos, node.facts.cgroup_driver, node.root)
    ident = ""
    if group.level is CgroupLevel.CONTAINER:
        container = next(container for container in pod.containers if container.name == group.container)
        ident = container.id
        path = container_path(path, ident, container.runtime, node.facts.cgroup_driver)
    if parse_path(path, node.root) != CgroupOwner(group.level, pod.qos, pod.cgroup_uid, ident):
        raise ProbeError(
            f"pod {pod}: {path[:256]!a} is not the path of its cgroup: the UID or a container id has "
            "an invalid form; check both in the pod's object"
        )
    return path


def _without_hugepage_limits(group: ExpectedCgroup, node: AuditedNode) -> ExpectedCgroup:
    """Drop the expected hugepage limits of zero from a cgroup if pods have no hugetlb controller."""
    if node.has_hugetlb:
        return group
    settings = tuple(
        item
        for item in group.settings
        if item.setting.kind not in _PAGES or not item.accepted or item.accepted[0].value != 0
    )
    return replace(group, settings=settings)


def with_inherited_page_limits(audits: Sequence[PodAudit]) -> tuple[tuple[PodAudit, ...], bool]:
    """Compare the pods' hugepage limits instead of the containers', if the container runtime sets none.

    containerd sets no hugepage limits by default (``disable_hugetlb_controller``). The pod's limit is then in
    effect.

    Returns:
        The audits, and True if the container runtime sets no hugepage limits.
    """
    own = [limit for audit in audits for limit in audit.comparisons if _is_container_page_limit(limit)]
    is_set = any(
        not isinstance(limit.actual, Missing) and normalize_limit(limit.actual) != NO_LIMIT for limit in own
    )
    if is_set or not any(_has_no_limit(comparison) for comparison in own):
        return tuple(audits), False
    return tuple(replace(audit, comparisons=tuple(_inherited_limits(audit))) for audit in audits), True


def _is_container_page_limit(compared: SettingComparison) -> bool:
    return compared.setting.kind in _PAGES and compared.cgroup.level is CgroupLevel.CONTAINER


def _has_no_limit(compared: SettingComparison) -> bool:
    """Return True if a container's hugepage file has no limit, or is missing in a cgroup that exists."""
    if compared.verdict is AuditVerdict.VANISHED:
        return False
    if isinstance(compared.actual, Missing):
        return compared.actual.absence is Absence.ABSENT
    return normalize_limit(compared.actual) == NO_LIMIT


def _inherited_limits(audit: PodAudit) -> Iterator[SettingComparison]:
    pod_limits = {row.setting: row.actual for row in audit.comparisons if row.cgroup.level is CgroupLevel.POD}
    for row in audit.comparisons:
        limit = pod_limits.get(row.setting)
        is_inherited = _is_container_page_limit(row) and row.expected.accepted and _has_no_limit(row)
        yield compare_inherited_limit(row, limit) if is_inherited and isinstance(limit, int) else row


def _unknown_if_exclusive(compared: SettingComparison, pod: Pod) -> SettingComparison:
    """Change the verdict on a missing quota to UNKNOWN if the kubelet may have lifted the quota.

    The kubelet lifts the quota of a container with exclusive CPUs. The agent could not read whether the
    kubelet assigned such CPUs.
    """
    is_lifted = compared.verdict is AuditVerdict.UNLIMITED and compared.setting.kind is SettingKind.QUOTA
    if not is_lifted or pod.qos is not QosClass.GUARANTEED or not _could_be_exclusive(pod):
        return compared
    why = f"{compared.reason}; the kubelet may have assigned exclusive CPUs, which could not be read"
    return compared._replace(verdict=AuditVerdict.UNKNOWN, reason=why, consequence="")


def _could_be_exclusive(pod: Pod) -> bool:
    limits = [pod.pod_level_limits.get(CPU), *(container.limits.get(CPU) for container in pod.containers)]
    return any(limit and limit.milli % 1000 == 0 for limit in limits)


RESOURCE_BY_SETTING: Final = {
    SettingKind.WEIGHT: Resource.CPU,
    SettingKind.QUOTA: Resource.CPU,
    SettingKind.PERIOD: Resource.CPU,
    SettingKind.CPUS: Resource.CPU,
    SettingKind.EFFECTIVE: Resource.CPU,
    SettingKind.MEMORY: Resource.MEMORY,
    SettingKind.PAGES: Resource.HUGEPAGES,
    SettingKind.RESERVED: Resource.HUGEPAGES,
    SettingKind.HIGH: Resource.MEMORY,
    SettingKind.MIN: Resource.MEMORY,
    SettingKind.LOW: Resource.MEMORY,
    SettingKind.SWAP: Resource.MEMORY,
}
"""Resource by the cgroup setting that limits it; an OOM score limits none."""
_OF_CPUS: Final = ("claim.starved", "cpus.")
"""Prefixes of the codes of pod risks that concern only CPUs."""


def audit_findings(audit: PodAudit) -> Iterator[PodFinding]:
    """Yield a finding for each wrong setting of a pod that limits a resource, then one for each risk."""
    uid = audit.pod.cgroup_uid
    for comparison in audit.comparisons:
        kind, size_kib = comparison.setting
        if comparison.verdict in DRIFT_VERDICTS and kind in RESOURCE_BY_SETTING:
            code, name = f"cgroup.{comparison.verdict}", comparison.cgroup.container
            yield PodFinding(uid, name, code, _evidence(comparison), "", RESOURCE_BY_SETTING[kind], size_kib)
    for risk in audit.risks:
        resource = Resource.CPU if risk.code.startswith(_OF_CPUS) else None
        yield PodFinding(uid, risk.container, risk.code, risk.description, risk.advice, resource)


def _evidence(compared: SettingComparison) -> str:
    setting = compared.setting
    size = f"{hugepage_size_name(setting.size_kib)} " if setting.size_kib else ""
    return f"{size}{setting.kind}: {compared.reason}"
