"""What the cgroups of pods should say: of each cgroup every knob, with the arithmetic.

Where KEP-5517's text and the code that was released differ, both are accepted; the code's value comes first.
Swap, memory QoS (memory.min, low and high) and OOM scores are not here.

Source: kubelet v1.37.1, pkg/kubelet/cm (ResourceConfigForPod, QoS classes) and pkg/kubelet/kuberuntime
(generateLinuxContainerResources).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agent.allocatable.cgroups import Level
from agent.allocatable.facts import Exclusive, NodeFacts
from agent.allocatable.knobs import Knob, KnobId, bytes_text
from agent.allocatable.pod import CPU, HUGEPAGES, MEMORY, Container, Pod, Qos, Unsaid
from agent.allocatable.quantity import MILLI, ZERO, Quantity, parse_quantity
from agent.allocatable.sums import (
    Amount,
    Sum,
    added,
    container_limit,
    container_pages,
    container_request,
    limited,
    pod_limits,
    pod_requests,
)
from agent.allocatable.values import (
    Expected,
    Option,
    RequestSums,
    asked,
    cpu_quota,
    cpu_weight,
    least_weight,
    memory_limit,
    page_limits,
    unknown,
)
from agent.model.cgroup import NO_LIMIT
from agent.model.cpuset import format_cpus

QUIET_S: Final = 30
"""Runtimes, drivers and systemd write one after another when a container starts or is resized."""
QOS_QUIET_S: Final = 90
"""The kubelet looks after its classes once a minute."""


class GroupRef(NamedTuple):
    """Which cgroup."""

    level: Level
    qos: Qos
    pod_uid: str = ""
    """As the cgroup is named."""
    container: str = ""
    """Its name in the pod."""


@dataclass(frozen=True, slots=True)
class ExpectedGroup:
    """What one cgroup should say."""

    group: GroupRef
    knobs: tuple[Expected, ...]
    quiet_s: int = QUIET_S
    """For how long after a change it may say something else."""


def expect_pod(pod: Pod, facts: NodeFacts, exclusive: Sequence[Exclusive] = ()) -> tuple[ExpectedGroup, ...]:
    """What a pod's cgroup and those of its containers should say, the pod's first.

    Args:
        pod: An active one.
        facts: Of its node.
        exclusive: CPUs that its containers have for themselves, as far as somebody knows.
    """
    group = GroupRef(Level.POD, pod.qos, pod.cgroup_uid)
    groups = [ExpectedGroup(group, tuple(_pod_knobs(pod, facts, exclusive)))]
    for container in pod.containers:
        own = [one for one in exclusive if one.container == container.name]
        knobs = tuple(_container_knobs(pod, container, facts, own))
        groups.append(ExpectedGroup(group._replace(level=Level.CONTAINER, container=container.name), knobs))
    return tuple(groups)


def expect_qos(pods: Iterable[Pod], facts: NodeFacts) -> tuple[ExpectedGroup, ...]:
    """What the cgroups of the classes Burstable and BestEffort should say.

    Args:
        pods: All of the node. Those that are over do not count.
        facts: Of the node.
    """
    burstable = [pod for pod in pods if pod.active and pod.qos is Qos.BURSTABLE]
    wanted = asked(lambda claims: _summed(burstable, claims), facts)
    weights = (
        (Qos.BURSTABLE, cpu_weight(wanted, facts)),
        (Qos.BEST_EFFORT, least_weight("always the least", facts)),
    )
    pages = tuple(
        Expected(KnobId(knob, size), (Option(NO_LIMIT),), "a class has no limit of hugepages")
        for size in facts.hugepages_kib
        for knob in (Knob.PAGES, Knob.RESERVED)
    )
    return tuple(
        ExpectedGroup(GroupRef(Level.QOS, qos), (weight, *pages), QOS_QUIET_S) for qos, weight in weights
    )


def _summed(pods: Sequence[Pod], claims: bool) -> Amount:
    """CPU that all of them ask for. The kubelet rounds each up before it adds them."""
    total = ZERO
    for pod in pods:
        amount = pod_requests(pod, CPU, claims=claims)
        if isinstance(amount, Unsaid):
            return Unsaid(f"pod {pod}: {amount.why}")
        total += Quantity(amount.total.milli * MILLI) if amount else ZERO
    many = "1 pod" if len(pods) == 1 else f"{len(pods)} pods"
    return Sum(total, f"{total.milli}m ({many})")


# --- a pod -------------------------------------------------------------------------------------------------


def _pod_knobs(pod: Pod, facts: NodeFacts, exclusive: Sequence[Exclusive]) -> Iterable[Expected]:
    yield _pod_weight(pod, facts)
    by_kubelet = [one.container for one in exclusive if one.by_kubelet]
    lifted = f"{by_kubelet[0]} has CPUs of its own from the kubelet" if by_kubelet else ""
    yield from cpu_quota(_pod_limit(pod, CPU, facts), facts, lifted, _no_limit(pod, CPU))
    yield memory_limit(_pod_limit(pod, MEMORY, facts), facts, _no_limit(pod, MEMORY))
    for size in facts.hugepages_kib:
        yield from page_limits(size, _pod_pages(pod, size, facts))


def _pod_weight(pod: Pod, facts: NodeFacts) -> Expected:
    wanted = asked(lambda claims: pod_requests(pod, CPU, claims=claims), facts)
    if pod.qos is not Qos.BEST_EFFORT:
        return cpu_weight(wanted, facts)
    least = least_weight("BestEffort: the least", facts)
    if not isinstance(wanted.amount, Sum) or not wanted.amount.total:
        return least
    return _or_by_text(least, cpu_weight(wanted, facts), wanted.amount.text)


def _or_by_text(expected: Expected, by_text: Expected, why: str) -> Expected:
    """Accepts what the KEP's text comes to, too."""
    known = {option.value for option in expected.accepted}
    others = (
        Option(one.value, f"KEP-5517's text: {why}") for one in by_text.accepted if one.value not in known
    )
    return replace(expected, accepted=(*expected.accepted, *others))


def _pod_limit(pod: Pod, resource: str, facts: NodeFacts) -> RequestSums:
    if pod.qos is Qos.BEST_EFFORT or (pod.qos is Qos.BURSTABLE and not limited(pod, resource)):
        return RequestSums(None, None)
    return asked(lambda claims: pod_limits(pod, resource, claims=claims), facts)


def _no_limit(pod: Pod, resource: str) -> str:
    if pod.qos is Qos.BEST_EFFORT:
        return "BestEffort: no limit"
    without = [one.name for one in pod.containers if not one.limits.get(resource)]
    return f"no limit: {', '.join(without)} has none"


def _pod_pages(pod: Pod, size_kib: int, facts: NodeFacts) -> RequestSums:
    names = _page_resources(pod, size_kib)
    return asked(lambda claims: added(pod_requests(pod, name, claims=claims) for name in names), facts)


# --- a container -------------------------------------------------------------------------------------------


def _container_knobs(
    pod: Pod, container: Container, facts: NodeFacts, exclusive: Sequence[Exclusive]
) -> Iterable[Expected]:
    yield _container_weight(pod, container, facts)
    lifted = "it has CPUs of its own from the kubelet" if any(one.by_kubelet for one in exclusive) else ""
    yield from cpu_quota(_container_limit(pod, container, CPU, facts), facts, lifted, "no limit")
    yield memory_limit(_container_limit(pod, container, MEMORY, facts), facts, "no limit")
    for size in facts.hugepages_kib:
        yield from page_limits(size, _container_pages(pod, container, size, facts))
    if exclusive:
        yield from _own_cpus(exclusive)


def _own_cpus(exclusive: Sequence[Exclusive]) -> Iterable[Expected]:
    """If kubelet and driver gave it different ones, it has those of who wrote last."""
    texts = [f"{format_cpus(cpus)} from {'the kubelet' if own else 'a driver'}" for _, cpus, own in exclusive]
    text = f"CPUs {' and '.join(texts)}"
    for knob in (KnobId(Knob.CPUS), KnobId(Knob.EFFECTIVE)):
        if len({one.cpus for one in exclusive}) > 1:
            yield unknown(knob, text)
        else:
            yield Expected(knob, (Option(exclusive[0].cpus),), text)


def _container_weight(pod: Pod, container: Container, facts: NodeFacts) -> Expected:
    """Claims do not count; but text and code differ where only the pod as a whole has a limit."""
    amount = container_request(pod, container)
    expected = cpu_weight(RequestSums(amount, amount), facts, runtimes=True)
    if CPU in container.requests or container.limits.get(CPU) or not isinstance(amount, Sum):
        return expected
    least = least_weight("", facts, runtimes=True)
    return _or_by_text(expected, least, "it asks for nothing itself, so the least")


def _container_limit(pod: Pod, container: Container, resource: str, facts: NodeFacts) -> RequestSums:
    return asked(lambda claims: container_limit(pod, container, resource, claims=claims), facts)


def _container_pages(pod: Pod, container: Container, size_kib: int, facts: NodeFacts) -> RequestSums:
    names = _page_resources(pod, size_kib)
    return asked(
        lambda claims: added(container_pages(pod, container, name, claims=claims) for name in names), facts
    )


# --- hugepages' names --------------------------------------------------------------------------------------


def _page_resources(pod: Pod, size_kib: int) -> tuple[str, ...]:
    """The names by which a pod asks for pages of a size, which may end in ``2Mi``, ``2048Ki`` or bytes."""
    resources = [pod.overhead, pod.level_requests, pod.level_limits]
    for container in pod.containers:
        resources += [container.requests, container.limits]
    for grant in () if isinstance(pod.grants, Unsaid) else pod.grants:
        resources += [grant.mapping, grant.per_pod, grant.per_container]
    names = {name for amounts in resources for name in amounts if name.startswith(HUGEPAGES)}
    found = sorted(name for name in names if _page_bytes(name) == size_kib * 1024)
    return tuple(found) or (f"{HUGEPAGES}{bytes_text(size_kib * 1024)}",)


def _page_bytes(resource: str) -> int:
    try:
        return parse_quantity(resource.removeprefix(HUGEPAGES)).value
    except ValueError:
        return 0  # the kubelet passes over such names
