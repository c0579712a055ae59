"""Expected settings of the cgroups of pods and QoS classes. Each value has a text that shows its arithmetic.

If the text of KEP-5517 (claims count as pod resources) and the released kubelet differ, both values are
accepted, the kubelet's first.

Source: kubelet v1.37.1, pkg/kubelet/cm (ResourceConfigForPod, QoS classes) and pkg/kubelet/kuberuntime
(generateLinuxContainerResources).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from agent.cgroup_audit.cgroup_paths import CgroupLevel
from agent.cgroup_audit.cgroup_settings import CgroupSettingId, SettingKind, format_bytes
from agent.cgroup_audit.expected_memory import (
    accept_either,
    class_memory_qos,
    container_memory_qos,
    container_swap,
    oom_score,
    pod_memory_qos,
    swap_with_memory,
)
from agent.cgroup_audit.expected_values import (
    AcceptedValue,
    Amount,
    ExpectedSetting,
    ResourceSum,
    ResourceSums,
    add_amounts,
    container_hugepages,
    container_limit,
    container_request,
    cpu_quota,
    cpu_weight,
    has_limit,
    hugepage_limits,
    memory_limit,
    minimum_weight,
    page_rounded_limits,
    pod_limits,
    pod_requests,
    resource_sums,
    unknown_setting,
    weight_from_millicores,
)
from agent.cgroup_audit.kubelet_config import (
    KUBE_RESERVED,
    MEMORY_QOS_DEFAULT_FROM,
    PODS,
    SYSTEM_RESERVED,
    ExclusiveCpus,
    KubeletConfig,
    NodeFacts,
)
from agent.cgroup_audit.pod_model import (
    CPU,
    HUGEPAGES,
    MEMORY,
    MILLI,
    NANO,
    ZERO,
    Pod,
    PodContainer,
    QosClass,
    Quantity,
    ResourceAmounts,
    UnknownAmount,
    parse_quantity,
)
from agent.model.cpuset import format_cpus
from agent.model.pod_findings import NO_LIMIT

QUIET_S: Final = 30
"""Time after a container's start or resize in which its settings may still be written [s].

The container runtime, the driver or systemd write them.
"""
QOS_QUIET_S: Final = 90
"""Time after a change of pods in which the cgroup of a QoS class may be outdated [s].

The kubelet updates it once a minute.
"""


class CgroupId(NamedTuple):
    """Identity of a cgroup: a QoS class, a pod or a container."""

    level: CgroupLevel
    qos: QosClass
    pod_uid: str = ""
    """Pod UID in the cgroup's name; empty: the cgroup of a QoS class or of the node."""
    container: str = ""
    """Name of the container that the cgroup belongs to; empty: the pod's cgroup."""
    name: str = ""
    """Name of a cgroup of the node, such as ``kubepods``; empty: another level."""


@dataclass(frozen=True, slots=True)
class ExpectedCgroup:
    """Identity of one cgroup with the expected value of each of its settings."""

    cgroup: CgroupId
    settings: tuple[ExpectedSetting, ...]
    quiet_s: int = QUIET_S
    """Time after a start or resize during which a wrong value has the verdict QUIET [s]."""


def expected_pod_cgroups(
    pod: Pod, facts: NodeFacts, exclusive_cpus: Sequence[ExclusiveCpus] = ()
) -> tuple[ExpectedCgroup, ...]:
    """Return the expected settings of a pod's cgroup and of its containers' cgroups, the pod's first.

    Args:
        pod: A pod that has not ended.
        exclusive_cpus: Known exclusive CPUs of the pod's containers.
    """
    group = CgroupId(CgroupLevel.POD, pod.qos, pod.cgroup_uid)
    groups = [ExpectedCgroup(group, tuple(_pod_settings(pod, facts, exclusive_cpus)))]
    for container in pod.containers:
        own = [cpus for cpus in exclusive_cpus if cpus.container == container.name]
        settings = tuple(_container_settings(pod, container, facts, own))
        groups.append(
            ExpectedCgroup(group._replace(level=CgroupLevel.CONTAINER, container=container.name), settings)
        )
    return tuple(groups)


def expected_qos_cgroups(pods: Iterable[Pod], facts: NodeFacts) -> tuple[ExpectedCgroup, ...]:
    """Return the expected settings of the cgroups of the QoS classes Burstable and BestEffort.

    Args:
        pods: All pods of the Kubernetes node; ended pods are ignored.
    """
    pods = tuple(pods)
    burstable = [pod for pod in pods if pod.is_active and pod.qos is QosClass.BURSTABLE]
    wanted = resource_sums(lambda claims: _sum_cpu_requests(burstable, claims), facts)
    weights = (
        (QosClass.BURSTABLE, cpu_weight(wanted, facts)),
        (QosClass.BEST_EFFORT, minimum_weight("always the minimum", facts)),
    )
    pages = tuple(
        ExpectedSetting(
            CgroupSettingId(setting, size), (AcceptedValue(NO_LIMIT),), "QoS classes have no hugepage limit"
        )
        for size in facts.hugepages_kib
        for setting in (SettingKind.PAGES, SettingKind.RESERVED)
    )
    return tuple(
        ExpectedCgroup(
            CgroupId(CgroupLevel.QOS, qos),
            (weight, *pages, *_class_memory(qos, pods, facts)),
            QOS_QUIET_S,
        )
        for qos, weight in weights
    )


def _class_memory(qos: QosClass, pods: Iterable[Pod], facts: NodeFacts) -> Iterable[ExpectedSetting]:
    if facts.kubelet is not None and not facts.kubelet.reserves_qos_memory:
        setting = CgroupSettingId(SettingKind.MEMORY)
        yield ExpectedSetting(setting, (AcceptedValue(NO_LIMIT),), "QoS classes have no memory limit")
    yield from class_memory_qos(qos, partial(_sum_memory_requests, tuple(pods), facts), facts)


KUBEPODS: Final = "kubepods"
"""Name of the cgroup that holds all pods."""


def expected_node_cgroups(pods: Sequence[Pod] | None, facts: NodeFacts) -> tuple[ExpectedCgroup, ...]:
    """Return the expected settings of the cgroup kubepods, and of the cgroups for reserved resources.

    The result is empty if the kubelet's configuration, which reserves the resources, is unknown.

    Args:
        pods: All pods of the Kubernetes node; None: not all pods are known, so sums over them are left out.
    """
    if facts.kubelet is None:
        return ()
    groups = [(KUBEPODS, tuple(_kubepods_settings(pods, facts, facts.kubelet)))]
    kubelet = facts.kubelet
    if kubelet.kube_reserved_cgroup != kubelet.system_reserved_cgroup:  # else the values of one are lost
        for name, amounts in (
            (KUBE_RESERVED, kubelet.kube_reserved),
            (SYSTEM_RESERVED, kubelet.system_reserved),
        ):
            groups.append((name, tuple(_reserved_settings(name, amounts, facts, kubelet))))
    return tuple(
        ExpectedCgroup(CgroupId(CgroupLevel.NODE, QosClass.GUARANTEED, name=name), settings, QOS_QUIET_S)
        for name, settings in groups
        if settings
    )


def _kubepods_settings(
    pods: Sequence[Pod] | None, facts: NodeFacts, kubelet: KubeletConfig
) -> Iterable[ExpectedSetting]:
    is_enforced = kubelet.has_qos_cgroups and PODS in kubelet.enforced
    if options := [_allocatable_weight(count, facts, is_enforced) for count in facts.cpu_counts]:
        yield accept_either(options)
    if facts.memory_bytes is not None:
        reserved = facts.reserved_amount(MEMORY).value if is_enforced else 0
        total = Quantity(max(0, facts.memory_bytes - reserved) * NANO)
        text = f"{format_bytes(facts.memory_bytes)} of memory - {format_bytes(reserved)} reserved"
        yield _memory_of_node(SettingKind.MEMORY, total, text, facts)
    if pods is not None:
        sums = partial(_sum_memory_requests, tuple(pods), facts)
        yield from class_memory_qos(QosClass.GUARANTEED, sums, facts)


def _allocatable_weight(cpus: int, facts: NodeFacts, is_enforced: bool) -> ExpectedSetting:
    reserved = facts.reserved_amount(CPU).milli if is_enforced else 0
    text = f"{cpus} CPUs - {reserved}m reserved"
    return weight_from_millicores(max(0, cpus * 1000 - reserved), text, facts)


def _reserved_settings(
    name: str, amounts: ResourceAmounts, facts: NodeFacts, kubelet: KubeletConfig
) -> Iterable[ExpectedSetting]:
    """Yield the expected settings of a cgroup for reserved resources, if the kubelet enforces them."""
    is_whole = name in kubelet.enforced
    if not is_whole and f"{name}-compressible" not in kubelet.enforced:
        return
    if CPU in amounts:
        yield weight_from_millicores(amounts[CPU].milli, f"{amounts[CPU].milli}m of {name}", facts)
    if not is_whole or MEMORY not in amounts:
        return
    memory, text = amounts[MEMORY], f"{format_bytes(amounts[MEMORY].value)} of {name}"
    yield _memory_of_node(SettingKind.MEMORY, memory, text, facts)
    minor = facts.kubelet_minor
    gates = kubelet.possible_gate("MemoryQoS", minor is None or minor >= MEMORY_QOS_DEFAULT_FROM)
    if facts.cgroup_version == 2 and gates == (True,) and (minor is not None or "MemoryQoS" in kubelet.gates):
        yield _memory_of_node(SettingKind.MIN, memory, text, facts)


def _memory_of_node(kind: SettingKind, total: Quantity, text: str, facts: NodeFacts) -> ExpectedSetting:
    options = page_rounded_limits(total, facts.page_bytes)
    return ExpectedSetting(CgroupSettingId(kind), options, f"{text} -> {options[0].value} bytes")


def _requests_of_spec(pod: Pod, resource: str, *, with_claims: bool) -> Amount:
    """Return the requests of a pod for the sum of its QoS class.

    The kubelet sums what the pods' specs request (``GetActivePods``), also while a resize is pending.
    """
    return pod_requests(replace(pod, resize=None), resource, with_claims=with_claims)


def _sum_memory_requests(pods: Sequence[Pod], facts: NodeFacts, classes: Sequence[QosClass]) -> Amount:
    """Sum the memory requests of the active pods that have one of the QoS classes ``classes``."""
    total, count = ZERO, 0
    for pod in pods:
        if pod.is_active and pod.qos in classes:
            amount = _requests_of_spec(pod, MEMORY, with_claims=facts.counts_claims)
            if isinstance(amount, UnknownAmount):
                return UnknownAmount(f"pod {pod}: {amount.reason}")
            total += Quantity(amount.total.value * NANO) if amount else ZERO
            count += 1
    return ResourceSum(total, f"{format_bytes(total.value)} ({'1 pod' if count == 1 else f'{count} pods'})")


def _sum_cpu_requests(pods: Sequence[Pod], claims: bool) -> Amount:
    """Sum the CPU requests of pods [millicores].

    Each request is rounded up before the addition, as the kubelet does.
    """
    total = ZERO
    for pod in pods:
        amount = _requests_of_spec(pod, CPU, with_claims=claims)
        if isinstance(amount, UnknownAmount):
            return UnknownAmount(f"pod {pod}: {amount.reason}")
        total += Quantity(amount.total.milli * MILLI) if amount else ZERO
    many = "1 pod" if len(pods) == 1 else f"{len(pods)} pods"
    return ResourceSum(total, f"{total.milli}m ({many})")


def _pod_settings(
    pod: Pod, facts: NodeFacts, exclusive: Sequence[ExclusiveCpus]
) -> Iterable[ExpectedSetting]:
    yield _pod_weight(pod, facts)
    by_kubelet = [
        container.name for container in pod.containers if _has_quota_lifted(pod, container, exclusive)
    ]
    is_lifted = len(by_kubelet) >= (len(pod.containers) if pod.has_pod_level_resources else 1)
    lifted = f"{by_kubelet[0]} has exclusive CPUs from the kubelet" if is_lifted else ""
    for setting in cpu_quota(_pod_limit(pod, CPU, facts), facts, lifted, _no_limit_text(pod, CPU)):
        yield _or_with_sidecars(
            setting, pod, CPU, facts, lambda sums: next(iter(cpu_quota(sums, facts, lifted, "")))
        )
    memory = memory_limit(_pod_limit(pod, MEMORY, facts), facts, _no_limit_text(pod, MEMORY))
    yield _or_with_sidecars(memory, pod, MEMORY, facts, lambda sums: memory_limit(sums, facts, ""))
    yield from pod_memory_qos(pod, facts)
    for size in facts.hugepages_kib:
        yield from hugepage_limits(size, _pod_pages(pod, size, facts))


def _pod_weight(pod: Pod, facts: NodeFacts) -> ExpectedSetting:
    wanted = resource_sums(lambda claims: pod_requests(pod, CPU, with_claims=claims), facts)
    if pod.qos is not QosClass.BEST_EFFORT:
        return cpu_weight(wanted, facts)
    least = minimum_weight("BestEffort: the least", facts)
    if isinstance(wanted.by_kubelet, UnknownAmount):
        return unknown_setting(least.setting, wanted.by_kubelet.reason, least.accepted)
    if not wanted.by_kubelet or not wanted.by_kubelet.total:
        return least
    return _or_by_text(least, cpu_weight(wanted, facts), wanted.by_kubelet.text)


def _or_by_text(expected: ExpectedSetting, by_text: ExpectedSetting, why: str) -> ExpectedSetting:
    """Return the expected setting ``expected``, which then also accepts the values in the text of KEP-5517.

    The KEP's text and the code of Kubernetes differ. ``by_text`` has the values of the text, and ``why``
    explains them.
    """
    known = {option.value for option in expected.accepted}
    others = (
        AcceptedValue(value.value, f"KEP-5517's text: {why}")
        for value in by_text.accepted
        if value.value not in known
    )
    return replace(expected, accepted=(*expected.accepted, *others))


def _pod_limit(pod: Pod, resource: str, facts: NodeFacts) -> ResourceSums:
    is_limited = has_limit(pod, resource, count_earlier_sidecars=bool(facts.counts_earlier_sidecars))
    if pod.qos is QosClass.BEST_EFFORT or (pod.qos is QosClass.BURSTABLE and not is_limited):
        return ResourceSums(None, None)
    return _sum_limits(pod, resource, facts)


def _sum_limits(pod: Pod, resource: str, facts: NodeFacts) -> ResourceSums:
    return resource_sums(lambda claims: pod_limits(pod, resource, with_claims=claims), facts)


def _or_with_sidecars(
    expected: ExpectedSetting,
    pod: Pod,
    resource: str,
    facts: NodeFacts,
    convert: Callable[[ResourceSums], ExpectedSetting],
) -> ExpectedSetting:
    """Return the expected setting ``expected``, which then may also accept the limit of a kubelet up to 1.36.

    Such a kubelet counts the limits of sidecars differently. Its limit is accepted if the kubelet's version
    is unknown and only a kubelet up to 1.36 sets a limit.

    Args:
        convert: Function that converts the sum of the pod's limits to the expected setting.
    """
    is_open = facts.counts_earlier_sidecars is None and pod.qos is QosClass.BURSTABLE
    is_differing = not has_limit(pod, resource) and has_limit(pod, resource, count_earlier_sidecars=True)
    if not is_open or not is_differing or not expected.accepted:
        return expected
    limited = convert(_sum_limits(pod, resource, facts))
    if not limited.accepted:
        return unknown_setting(expected.setting, limited.unknown_reason)
    known = {option.value for option in expected.accepted}
    others = tuple(
        option._replace(note=f"{limited.arithmetic}, as kubelets up to 1.36 count sidecars")
        for option in limited.accepted
        if option.value not in known
    )
    return replace(expected, accepted=(*expected.accepted, *others))


def _no_limit_text(pod: Pod, resource: str) -> str:
    if pod.qos is QosClass.BEST_EFFORT:
        return "BestEffort: no limit"
    without = [container.name for container in pod.containers if not container.limits.get(resource)]
    return f"no limit: {', '.join(without)} has none"


def _pod_pages(pod: Pod, size_kib: int, facts: NodeFacts) -> ResourceSums:
    names = _page_resources(pod, size_kib)
    return resource_sums(
        lambda claims: add_amounts(pod_requests(pod, name, with_claims=claims) for name in names), facts
    )


def _container_settings(
    pod: Pod, container: PodContainer, facts: NodeFacts, exclusive: Sequence[ExclusiveCpus]
) -> Iterable[ExpectedSetting]:
    yield _container_weight(pod, container, facts)
    lifted = "it has exclusive CPUs from the kubelet" if _has_quota_lifted(pod, container, exclusive) else ""
    yield from cpu_quota(_container_limit(pod, container, CPU, facts), facts, lifted, "no limit")
    memory = memory_limit(_container_limit(pod, container, MEMORY, facts), facts, "no limit")
    yield memory
    yield from container_memory_qos(pod, container, facts)
    yield from swap_with_memory(memory, facts)
    yield from container_swap(pod, container, facts)
    yield from oom_score(pod, container, facts)
    for size in facts.hugepages_kib:
        yield from hugepage_limits(size, _container_pages(pod, container, size, facts))
    if exclusive:
        yield from _exclusive_cpus(exclusive)


def _has_quota_lifted(pod: Pod, container: PodContainer, exclusive: Sequence[ExclusiveCpus]) -> bool:
    """Return whether the kubelet lifts a container's quota, because it gave the container exclusive CPUs.

    A container that shares the CPUs of its whole pod keeps its quota (gate PodLevelResourceManagers).
    """
    is_given = any(cpus.by_kubelet and cpus.container == container.name for cpus in exclusive)
    limits = container.limits
    own = all(limits.get(name) and limits[name] == container.requests.get(name) for name in (CPU, MEMORY))
    return is_given and (not pod.has_pod_level_resources or (own and limits[CPU].milli % 1000 == 0))


def _exclusive_cpus(exclusive: Sequence[ExclusiveCpus]) -> Iterable[ExpectedSetting]:
    """Yield the expected cpuset of a container.

    The value is unknown if the kubelet and a driver assigned different CPUs.
    """
    texts = [f"{format_cpus(cpus)} from {'the kubelet' if own else 'a driver'}" for _, cpus, own in exclusive]
    text = f"CPUs {' and '.join(texts)}"
    for setting in (CgroupSettingId(SettingKind.CPUS), CgroupSettingId(SettingKind.EFFECTIVE)):
        if len({own.cpus for own in exclusive}) > 1:
            yield unknown_setting(setting, text)
        else:
            yield ExpectedSetting(setting, (AcceptedValue(exclusive[0].cpus),), text)


def _container_weight(pod: Pod, container: PodContainer, facts: NodeFacts) -> ExpectedSetting:
    """Return the expected CPU weight of a container, which its claims do not change.

    KEP-5517's text and the released kubelet differ if only the pod has a limit.
    """
    amount = container_request(pod, container)
    expected = cpu_weight(ResourceSums(amount, amount), facts, by_runtime=True)
    if CPU in container.requests or container.limits.get(CPU) or not isinstance(amount, ResourceSum):
        return expected
    least = minimum_weight("", facts, by_runtime=True)
    return _or_by_text(expected, least, "no request of its own, so the minimum")


def _container_limit(pod: Pod, container: PodContainer, resource: str, facts: NodeFacts) -> ResourceSums:
    return resource_sums(lambda claims: container_limit(pod, container, resource, with_claims=claims), facts)


def _container_pages(pod: Pod, container: PodContainer, size_kib: int, facts: NodeFacts) -> ResourceSums:
    names = _page_resources(pod, size_kib)
    return resource_sums(
        lambda claims: add_amounts(
            container_hugepages(pod, container, name, with_claims=claims) for name in names
        ),
        facts,
    )


def _page_resources(pod: Pod, size_kib: int) -> tuple[str, ...]:
    """Return the resource names of one hugepage size that a pod uses, such as ``hugepages-2048Ki``."""
    resources = [pod.overhead, pod.pod_level_requests, pod.pod_level_limits]
    for container in pod.containers:
        resources += [container.requests, container.limits]
    for grant in pod.known_claim_resources:
        resources += [grant.shared, grant.per_pod, grant.per_container]
    names = {name for amounts in resources for name in amounts if name.startswith(HUGEPAGES)}
    found = sorted(name for name in names if _page_bytes(name) == size_kib * 1024)
    return tuple(found) or (f"{HUGEPAGES}{format_bytes(size_kib * 1024)}",)


def _page_bytes(resource: str) -> int:
    try:
        return parse_quantity(resource.removeprefix(HUGEPAGES)).value
    except ValueError:
        return 0  # the kubelet ignores such names
