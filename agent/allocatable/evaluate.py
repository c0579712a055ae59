"""Audit of a pod or the QoS classes: paths of the cgroups, expected and actual values, verdicts.

Pure: the caller passes ``read``, which reads a cgroup. A cgroup with a wrong value is read a second time,
since its container may be ending, and the v1 hierarchies are removed one after another.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agent.allocatable.cgroups import CgroupOwner, Level, container_path, parse_path, pod_path, qos_path
from agent.allocatable.compare import changed_s, compare
from agent.allocatable.expected import ExpectedGroup, GroupRef, expect_pod, expect_qos
from agent.allocatable.facts import ExclusiveCpus, NodeFacts
from agent.allocatable.pod import CPU, Pod, PodContainer, Qos
from agent.allocatable.risks import Risk, risks_of
from agent.allocatable.settings import SettingId, SettingKind, page_name
from agent.allocatable.verdicts import DRIFT, ActualCgroup, AuditVerdict, SettingComparison
from agent.errors import ProbeError
from agent.model.cgroup import CgroupSettings
from agent.model.pods import PodFinding, Resource
from agent.model.reading import Missing, Reading

GONE: Final = ActualCgroup(vanished=True)


def actual_of(knobs: CgroupSettings | None, changed_s: float | None) -> ActualCgroup:
    """Return the actual values of one cgroup.

    Args:
        knobs: Settings of the cgroup; None: a second read did not find it either.
        changed_s: Time since the last start or resize of its container or pod [s]; None: long ago or unknown.
    """
    if knobs is None:
        return GONE
    values: dict[SettingId, Reading] = {
        SettingId(SettingKind.WEIGHT): knobs.weight,
        SettingId(SettingKind.QUOTA): knobs.quota_us,
        SettingId(SettingKind.PERIOD): knobs.period_us,
        SettingId(SettingKind.MEMORY): knobs.memory,
        SettingId(SettingKind.CPUS): knobs.cpus,
        SettingId(SettingKind.EFFECTIVE): knobs.effective,
        **_pages(knobs),
    }
    return ActualCgroup(values, knobs.controllers, changed_s=changed_s)


def _pages(knobs: CgroupSettings) -> Mapping[SettingId, Reading]:
    found: dict[SettingId, Reading] = {}
    for page in knobs.pages:
        found[SettingId(SettingKind.PAGES, page.size_kib)] = page.max
        found[SettingId(SettingKind.RESERVED, page.size_kib)] = page.rsvd_max
    return found


ReadCgroup = Callable[[str, bool], CgroupSettings | None]
"""Function that reads the cgroup at a path, with cpusets if the flag is set; None: no such cgroup."""

INCONCLUSIVE: Final = frozenset({AuditVerdict.UNKNOWN, AuditVerdict.VANISHED, AuditVerdict.QUIET})
"""Verdicts that state neither a correct nor a wrong value."""
_PAGES: Final = frozenset({SettingKind.PAGES, SettingKind.RESERVED})


class AuditNode(NamedTuple):
    """Audited Kubernetes node: its facts and the root of its pod cgroups."""

    facts: NodeFacts
    root: str = "/"
    """Parent cgroup of kubepods: the kubelet's ``--cgroup-root``."""
    has_hugetlb: bool = True
    """Whether pods can have hugepage limits: kubepods has the hugetlb controller."""


@dataclass(frozen=True, slots=True)
class PodAudit:
    """Result of the audit of one pod: compared cgroup settings and risks."""

    pod: Pod
    compared: tuple[SettingComparison, ...]
    """Compared settings of the pod and its running containers; empty: no container runs."""
    risks: tuple[Risk, ...]
    idle: tuple[str, ...]
    """Containers that do not run and have no cgroup to compare."""


def evaluate_pod(
    pod: Pod,
    node: AuditNode,
    read: ReadCgroup,
    now_wall_s: float,
    exclusive: Sequence[ExclusiveCpus] = (),
    *,
    all_known: bool = True,
) -> PodAudit:
    """Compare the cgroups of one pod with its expected allocation, and find its risks.

    Args:
        pod: An active pod.
        node: The pod's node.
        read: Reads a cgroup.
        now_wall_s: Time of the audit [s since 1970].
        exclusive: Exclusive CPUs of the pod's containers.
        all_known: Whether ``exclusive`` has all CPUs that the kubelet assigned.

    Raises:
        ProbeError: The pod's UID or a container's id is not valid in a cgroup name.
    """
    idle = tuple(one.name for one in pod.containers if not _runs(one))
    if len(idle) == len(pod.containers):
        return PodAudit(pod, (), (), idle)
    groups = [
        _without_page_limits(one, node)
        for one in expect_pod(pod, node.facts, exclusive)
        if one.group.container not in idle
    ]
    at = {one.group: _path(one.group, pod, node) for one in groups}
    owners = {one.container for one in exclusive}
    throttled: dict[str, int] = {}

    def read_actual(group: GroupRef) -> ActualCgroup:
        knobs = read(at[group], group.container in owners)
        if knobs and group.container and not isinstance(knobs.throttled, Missing):
            throttled[group.container] = knobs.throttled
        return actual_of(knobs, changed_s(pod, now_wall_s, group.container))

    compared = _compared(groups, read_actual, node)
    if not all_known:
        compared = tuple(_unknown_if_exclusive(one, pod) for one in compared)
    return PodAudit(pod, compared, risks_of(pod, node.facts, exclusive, throttled), idle)


def evaluate_classes(
    pods: Sequence[Pod], node: AuditNode, read: ReadCgroup, now_wall_s: float
) -> tuple[SettingComparison, ...]:
    """Compare the cgroups of the QoS classes Burstable and BestEffort with their expected values.

    Args:
        pods: All pods of the node.
        node: The pods' node.
        read: Reads a cgroup.
        now_wall_s: Time of the audit [s since 1970].
    """
    ages = [changed_s(pod, now_wall_s) for pod in pods if pod.qos is Qos.BURSTABLE]
    since = min((age for age in ages if age is not None), default=None)

    def read_actual(group: GroupRef) -> ActualCgroup:
        return actual_of(read(qos_path(group.qos, node.facts.driver, node.root), False), since)

    groups = [_without_page_limits(one, node) for one in expect_qos(pods, node.facts)]
    return _compared(groups, read_actual, node)


def _compared(
    groups: Sequence[ExpectedGroup], read_actual: Callable[[GroupRef], ActualCgroup], node: AuditNode
) -> tuple[SettingComparison, ...]:
    actual = {one.group: read_actual(one.group) for one in groups}
    compared = compare(groups, actual, node.facts.version)
    if not any(one.verdict in DRIFT for one in compared):
        return compared
    wrong: Iterable[GroupRef] = {one.group for one in compared if one.verdict in DRIFT}
    again: Mapping[GroupRef, ActualCgroup] = {group: read_actual(group) for group in wrong}
    return compare(groups, {**actual, **again}, node.facts.version)


# --- paths -------------------------------------------------------------------------------------------------


def _runs(container: PodContainer) -> bool:
    return bool(container.id) and container.started_wall_s is not None


def _path(group: GroupRef, pod: Pod, node: AuditNode) -> str:
    path = pod_path(pod.cgroup_uid, pod.qos, node.facts.driver, node.root)
    ident = ""
    if group.level is Level.CONTAINER:
        container = next(one for one in pod.containers if one.name == group.container)
        path, ident = container_path(path, container.id, container.runtime, node.facts.driver), container.id
    if parse_path(path, node.root) != CgroupOwner(group.level, pod.qos, pod.cgroup_uid, ident):
        raise ProbeError(f"pod {pod}: {path[:256]!a} is not a cgroup path")
    return path


# --- missing controllers, unknown CPUs ---------------------------------------------------------------------


def _without_page_limits(group: ExpectedGroup, node: AuditNode) -> ExpectedGroup:
    """Drop expected hugepage limits of zero if no pod can have hugepage limits."""
    if node.has_hugetlb:
        return group
    knobs = tuple(one for one in group.knobs if one.knob.knob not in _PAGES or not _is_nothing(one.accepted))
    return replace(group, knobs=knobs)


def _is_nothing(accepted: Sequence[tuple[int, str, bool]]) -> bool:
    return bool(accepted) and accepted[0][0] == 0


def _unknown_if_exclusive(compared: SettingComparison, pod: Pod) -> SettingComparison:
    """Make a missing quota UNKNOWN if the kubelet may have assigned exclusive CPUs, which lift the quota."""
    is_lifted = compared.verdict is AuditVerdict.UNLIMITED and compared.knob.knob is SettingKind.QUOTA
    if not is_lifted or pod.qos is not Qos.GUARANTEED or not _could_be_exclusive(pod):
        return compared
    why = f"{compared.why}; the kubelet may have assigned exclusive CPUs, which could not be read"
    return compared._replace(verdict=AuditVerdict.UNKNOWN, why=why, risk="")


def _could_be_exclusive(pod: Pod) -> bool:
    limits = [pod.level_limits.get(CPU), *(one.limits.get(CPU) for one in pod.containers)]
    return any(limit and limit.milli % 1000 == 0 for limit in limits)


RESOURCE_OF: Final = {
    SettingKind.WEIGHT: Resource.CPU,
    SettingKind.QUOTA: Resource.CPU,
    SettingKind.PERIOD: Resource.CPU,
    SettingKind.CPUS: Resource.CPU,
    SettingKind.EFFECTIVE: Resource.CPU,
    SettingKind.MEMORY: Resource.MEMORY,
    SettingKind.PAGES: Resource.HUGEPAGES,
    SettingKind.RESERVED: Resource.HUGEPAGES,
}
"""Resource that each cgroup setting controls."""
_OF_CPUS: Final = ("claim.starved", "cpus.")
"""Code prefixes of risks that concern only CPUs."""


def findings_of(judged: PodAudit) -> Iterator[PodFinding]:
    """Yield the wrong cgroup settings of a pod, then its risks; omit correct and inconclusive settings."""
    uid = judged.pod.cgroup_uid
    for one in judged.compared:
        if one.verdict in DRIFT:
            what, size_kib = one.knob
            code, who = f"cgroup.{one.verdict}", one.group.container
            yield PodFinding(uid, who, code, _evidence(one), "", RESOURCE_OF[what], size_kib)
    for risk in judged.risks:
        resource = Resource.CPU if risk.code.startswith(_OF_CPUS) else None
        yield PodFinding(uid, risk.container, risk.code, risk.what, risk.advice, resource)


def _evidence(compared: SettingComparison) -> str:
    knob = compared.knob
    size = f"{page_name(knob.size_kib)} " if knob.size_kib else ""
    return f"{size}{knob.knob}: {compared.why}"
