"""Expected allocation of pod cgroups: the value of each cgroup setting with its arithmetic.

If KEP-5517's text and the released code differ, both values are accepted, the code's first. Swap, memory QoS
(memory.min, low and high) and OOM scores are not compared.

Source: kubelet v1.37.1, pkg/kubelet/cm (ResourceConfigForPod, QoS classes) and pkg/kubelet/kuberuntime
(generateLinuxContainerResources).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agent.allocatable.cgroups import Level
from agent.allocatable.facts import ExclusiveCpus, NodeFacts
from agent.allocatable.pod import CPU, HUGEPAGES, MEMORY, Pod, PodContainer, Qos, UnknownAmount
from agent.allocatable.quantity import MILLI, ZERO, Quantity, parse_quantity
from agent.allocatable.settings import SettingId, SettingKind, bytes_text
from agent.allocatable.sums import (
    Amount,
    ResourceSum,
    add_amounts,
    container_limit,
    container_pages,
    container_request,
    is_limited,
    pod_limits,
    pod_requests,
)
from agent.allocatable.values import (
    AcceptedValue,
    ExpectedSetting,
    RequestSums,
    cpu_quota,
    cpu_weight,
    least_weight,
    memory_limit,
    page_limits,
    request_sums,
    unknown,
)
from agent.model.cgroup import NO_LIMIT
from agent.model.cpuset import format_cpus

QUIET_S: Final = 30
"""Time after a start or resize in which runtimes, drivers and systemd may still write [s]."""
QOS_QUIET_S: Final = 90
"""Time after a change in which the cgroup of a QoS class may be outdated [s]: the kubelet updates it once a
minute."""


class GroupRef(NamedTuple):
    """Identity of a cgroup: a QoS class, a pod or a container."""

    level: Level
    qos: Qos
    pod_uid: str = ""
    """Pod UID in the cgroup's name; empty: the cgroup of a QoS class."""
    container: str = ""
    """Name of the container in its pod; empty: the pod's cgroup."""


@dataclass(frozen=True, slots=True)
class ExpectedGroup:
    """Expected values of one cgroup."""

    group: GroupRef
    knobs: tuple[ExpectedSetting, ...]
    quiet_s: int = QUIET_S
    """Time after a change during which another value is QUIET [s]."""


def expect_pod(
    pod: Pod, facts: NodeFacts, exclusive: Sequence[ExclusiveCpus] = ()
) -> tuple[ExpectedGroup, ...]:
    """Return the expected values of a pod's cgroup and of its containers' cgroups, the pod's first.

    Args:
        pod: An active pod.
        facts: Facts of the pod's node.
        exclusive: Known exclusive CPUs of the pod's containers.
    """
    group = GroupRef(Level.POD, pod.qos, pod.cgroup_uid)
    groups = [ExpectedGroup(group, tuple(_pod_knobs(pod, facts, exclusive)))]
    for container in pod.containers:
        own = [one for one in exclusive if one.container == container.name]
        knobs = tuple(_container_knobs(pod, container, facts, own))
        groups.append(ExpectedGroup(group._replace(level=Level.CONTAINER, container=container.name), knobs))
    return tuple(groups)


def expect_qos(pods: Iterable[Pod], facts: NodeFacts) -> tuple[ExpectedGroup, ...]:
    """Return the expected values of the QoS classes Burstable and BestEffort.

    Args:
        pods: All pods of the node; ended pods are ignored.
        facts: Facts of the node.
    """
    burstable = [pod for pod in pods if pod.active and pod.qos is Qos.BURSTABLE]
    wanted = request_sums(lambda claims: _summed(burstable, claims), facts)
    weights = (
        (Qos.BURSTABLE, cpu_weight(wanted, facts)),
        (Qos.BEST_EFFORT, least_weight("always the minimum", facts)),
    )
    pages = tuple(
        ExpectedSetting(
            SettingId(knob, size), (AcceptedValue(NO_LIMIT),), "QoS classes have no hugepage limit"
        )
        for size in facts.hugepages_kib
        for knob in (SettingKind.PAGES, SettingKind.RESERVED)
    )
    return tuple(
        ExpectedGroup(GroupRef(Level.QOS, qos), (weight, *pages), QOS_QUIET_S) for qos, weight in weights
    )


def _summed(pods: Sequence[Pod], claims: bool) -> Amount:
    """Sum the CPU requests of pods, each rounded up before the addition as in the kubelet."""
    total = ZERO
    for pod in pods:
        amount = pod_requests(pod, CPU, claims=claims)
        if isinstance(amount, UnknownAmount):
            return UnknownAmount(f"pod {pod}: {amount.why}")
        total += Quantity(amount.total.milli * MILLI) if amount else ZERO
    many = "1 pod" if len(pods) == 1 else f"{len(pods)} pods"
    return ResourceSum(total, f"{total.milli}m ({many})")


# --- a pod -------------------------------------------------------------------------------------------------


def _pod_knobs(pod: Pod, facts: NodeFacts, exclusive: Sequence[ExclusiveCpus]) -> Iterable[ExpectedSetting]:
    yield _pod_weight(pod, facts)
    by_kubelet = [one.container for one in exclusive if one.by_kubelet]
    lifted = f"{by_kubelet[0]} has exclusive CPUs from the kubelet" if by_kubelet else ""
    yield from cpu_quota(_pod_limit(pod, CPU, facts), facts, lifted, _no_limit(pod, CPU))
    yield memory_limit(_pod_limit(pod, MEMORY, facts), facts, _no_limit(pod, MEMORY))
    for size in facts.hugepages_kib:
        yield from page_limits(size, _pod_pages(pod, size, facts))


def _pod_weight(pod: Pod, facts: NodeFacts) -> ExpectedSetting:
    wanted = request_sums(lambda claims: pod_requests(pod, CPU, claims=claims), facts)
    if pod.qos is not Qos.BEST_EFFORT:
        return cpu_weight(wanted, facts)
    least = least_weight("BestEffort: the least", facts)
    if not isinstance(wanted.counted, ResourceSum) or not wanted.counted.total:
        return least
    return _or_by_text(least, cpu_weight(wanted, facts), wanted.counted.text)


def _or_by_text(expected: ExpectedSetting, by_text: ExpectedSetting, why: str) -> ExpectedSetting:
    """Accept the value that follows from the KEP's text in addition to the released code's."""
    known = {option.value for option in expected.accepted}
    others = (
        AcceptedValue(one.value, f"KEP-5517's text: {why}")
        for one in by_text.accepted
        if one.value not in known
    )
    return replace(expected, accepted=(*expected.accepted, *others))


def _pod_limit(pod: Pod, resource: str, facts: NodeFacts) -> RequestSums:
    if pod.qos is Qos.BEST_EFFORT or (pod.qos is Qos.BURSTABLE and not is_limited(pod, resource)):
        return RequestSums(None, None)
    return request_sums(lambda claims: pod_limits(pod, resource, claims=claims), facts)


def _no_limit(pod: Pod, resource: str) -> str:
    if pod.qos is Qos.BEST_EFFORT:
        return "BestEffort: no limit"
    without = [one.name for one in pod.containers if not one.limits.get(resource)]
    return f"no limit: {', '.join(without)} has none"


def _pod_pages(pod: Pod, size_kib: int, facts: NodeFacts) -> RequestSums:
    names = _page_resources(pod, size_kib)
    return request_sums(
        lambda claims: add_amounts(pod_requests(pod, name, claims=claims) for name in names), facts
    )


# --- a container -------------------------------------------------------------------------------------------


def _container_knobs(
    pod: Pod, container: PodContainer, facts: NodeFacts, exclusive: Sequence[ExclusiveCpus]
) -> Iterable[ExpectedSetting]:
    yield _container_weight(pod, container, facts)
    lifted = "it has exclusive CPUs from the kubelet" if any(one.by_kubelet for one in exclusive) else ""
    yield from cpu_quota(_container_limit(pod, container, CPU, facts), facts, lifted, "no limit")
    yield memory_limit(_container_limit(pod, container, MEMORY, facts), facts, "no limit")
    for size in facts.hugepages_kib:
        yield from page_limits(size, _container_pages(pod, container, size, facts))
    if exclusive:
        yield from _exclusive_cpus(exclusive)


def _exclusive_cpus(exclusive: Sequence[ExclusiveCpus]) -> Iterable[ExpectedSetting]:
    """Yield a container's expected cpuset; its value is unknown if kubelet and driver assigned different
    CPUs."""
    texts = [f"{format_cpus(cpus)} from {'the kubelet' if own else 'a driver'}" for _, cpus, own in exclusive]
    text = f"CPUs {' and '.join(texts)}"
    for knob in (SettingId(SettingKind.CPUS), SettingId(SettingKind.EFFECTIVE)):
        if len({one.cpus for one in exclusive}) > 1:
            yield unknown(knob, text)
        else:
            yield ExpectedSetting(knob, (AcceptedValue(exclusive[0].cpus),), text)


def _container_weight(pod: Pod, container: PodContainer, facts: NodeFacts) -> ExpectedSetting:
    """Return the expected CPU weight of a container, from its request without claims.

    The KEP's text and the released code differ if only the pod has a limit.
    """
    amount = container_request(pod, container)
    expected = cpu_weight(RequestSums(amount, amount), facts, runtimes=True)
    if CPU in container.requests or container.limits.get(CPU) or not isinstance(amount, ResourceSum):
        return expected
    least = least_weight("", facts, runtimes=True)
    return _or_by_text(expected, least, "no request of its own, so the minimum")


def _container_limit(pod: Pod, container: PodContainer, resource: str, facts: NodeFacts) -> RequestSums:
    return request_sums(lambda claims: container_limit(pod, container, resource, claims=claims), facts)


def _container_pages(pod: Pod, container: PodContainer, size_kib: int, facts: NodeFacts) -> RequestSums:
    names = _page_resources(pod, size_kib)
    return request_sums(
        lambda claims: add_amounts(container_pages(pod, container, name, claims=claims) for name in names),
        facts,
    )


# --- names of hugepage resources ---------------------------------------------------------------------------


def _page_resources(pod: Pod, size_kib: int) -> tuple[str, ...]:
    """Return the resource names under which a pod requests a page size: ``2Mi``, ``2048Ki`` or bytes."""
    resources = [pod.overhead, pod.level_requests, pod.level_limits]
    for container in pod.containers:
        resources += [container.requests, container.limits]
    for grant in () if isinstance(pod.grants, UnknownAmount) else pod.grants:
        resources += [grant.mapping, grant.per_pod, grant.per_container]
    names = {name for amounts in resources for name in amounts if name.startswith(HUGEPAGES)}
    found = sorted(name for name in names if _page_bytes(name) == size_kib * 1024)
    return tuple(found) or (f"{HUGEPAGES}{bytes_text(size_kib * 1024)}",)


def _page_bytes(resource: str) -> int:
    try:
        return parse_quantity(resource.removeprefix(HUGEPAGES)).value
    except ValueError:
        return 0  # the kubelet ignores such names
