"""Risks of pods with correct cgroups, which follow from the pod's requests, limits and claims.

Kubelet and runtime are not at fault: the author of the pod, claim or driver can remove the risk.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from agent.allocatable.facts import ExclusiveCpus, NodeFacts
from agent.allocatable.pod import CPU, MEMORY, Pod, PodContainer, Qos, UnknownAmount
from agent.allocatable.quantity import ZERO, Quantity
from agent.allocatable.sums import ResourceSum, amount_text, container_limit, container_request
from agent.model.cpuset import cpus_of, format_cpus


class Risk(NamedTuple):
    """One risk of a pod or container."""

    code: str
    pod: str
    """Pod as ``<namespace>/<name>``."""
    container: str
    """Container name; empty: the risk concerns the pod."""
    what: str
    """Description with the numbers, on one line."""
    advice: str


ADVICE: Final[Mapping[str, str]] = {
    "claim.best_effort": "give one of its containers a small request, so that the pod is Burstable",
    "claim.not_counted": "enable the gate DRANodeAllocatableResources of kubelets from 1.37 on",
    "claim.over_pod_level": "raise spec.resources by the resources of the claims, which it includes",
    "claim.shared_mapping": "give each pod its own claim; the scheduler should have refused the second pod",
    "claim.starved": "give the container a CPU request: within a pod, claims do not count for the weight",
    "cpus.exclusive_quota": "remove the container's CPU limit, or raise it to the number of its CPUs",
    "cpus.exclusive_throttled": "remove the container's CPU limit: its cpuset limits it already",
}
"""Advice by the code of the risk."""


def risks_of(
    pod: Pod,
    facts: NodeFacts,
    exclusive: Sequence[ExclusiveCpus] = (),
    throttled: Mapping[str, int] | None = None,
) -> tuple[Risk, ...]:
    """Return the risks of one pod.

    Args:
        pod: The pod.
        facts: Facts of the pod's node.
        exclusive: Known exclusive CPUs of the pod's containers.
        throttled: Throttled periods (``cpu.stat``, nr_throttled) by container, if read.
    """
    given = () if isinstance(pod.grants, UnknownAmount) else pod.grants
    found = [
        Risk(code, str(pod), container, what, ADVICE[code])
        for code, find in _OF_PODS.items()
        for container, what in (find(pod, facts) if given else ())
    ]
    counts = throttled or {}
    lifted = {one.container for one in exclusive if one.by_kubelet}
    for container in (one for one in pod.containers if one.name not in lifted):
        for own in (one for one in exclusive if one.container == container.name):
            for code, what in _exclusive(pod, container, own, facts, counts.get(container.name, 0)):
                found.append(Risk(code, str(pod), container.name, what, ADVICE[code]))
    return tuple(found)


def shared_mappings(pods: Iterable[Pod]) -> tuple[Risk, ...]:
    """Return a risk for each pod whose claim's resources are counted for several pods of the Kubernetes node.

    Overhead can be shared; each pod is charged for it.
    """
    users: dict[tuple[str, str], list[Pod]] = {}
    for pod in pods:
        for grant in () if isinstance(pod.grants, UnknownAmount) or not pod.active else pod.grants:
            if grant.mapping:
                users.setdefault((pod.namespace, grant.claim), []).append(pod)
    code = "claim.shared_mapping"
    return tuple(
        Risk(code, str(pod), "", f"claim {claim} counts in full for {_names(sharers)}", ADVICE[code])
        for (_, claim), sharers in users.items()
        if len(sharers) > 1
        for pod in sharers
    )


def _names(pods: Sequence[Pod]) -> str:
    return ", ".join(sorted(str(pod) for pod in pods))


# --- risks of pods -----------------------------------------------------------------------------------------

RiskDetails = Iterable[tuple[str, str]]
"""Risks of one code, each as (container name, description); an empty name means the pod."""


def _best_effort(pod: Pod, facts: NodeFacts) -> RiskDetails:
    amounts = [f"{amount_text(one, given)} of {one}" for one, given in _given(pod).items() if given]
    if pod.qos is Qos.BEST_EFFORT and amounts and facts.counts_claims:
        text = f"claims give {' and '.join(amounts)}; its cgroup has the lowest CPU weight, no limit"
        yield "", f"BestEffort: {text}"


def _not_counted(pod: Pod, facts: NodeFacts) -> RiskDetails:
    if not facts.counts_claims:
        claims = (
            [] if isinstance(pod.grants, UnknownAmount) else sorted({grant.claim for grant in pod.grants})
        )
        yield "", f"the kubelet does not count the resources of claims {', '.join(claims)}"


def _over_pod_level(pod: Pod, _: NodeFacts) -> RiskDetails:
    """Find pod-level requests and limits that are below the resources of the claims, which they include."""
    for resource, given in _given(pod).items():
        for kind, level in (("request", pod.level_requests), ("limit", pod.level_limits)):
            if resource in level and level[resource] < given:
                amounts = amount_text(resource, level[resource]), amount_text(resource, given)
                yield "", f"{resource}: the pod level {kind} is {amounts[0]}, its claims give {amounts[1]}"


def _starved(pod: Pod, facts: NodeFacts) -> RiskDetails:
    """Find containers without a CPU request: they have the lowest CPU weight, whatever their claims
    provide."""
    if isinstance(pod.grants, UnknownAmount) or len(pod.containers) < 2 or not facts.counts_claims:
        return
    for container in pod.containers:
        given = sum((one.to_container(container.name, CPU) or ZERO for one in pod.grants), ZERO)
        if given and container_request(pod, container) is None:
            yield (
                container.name,
                f"its cgroup has 2 shares, the minimum; its claims give {given.milli}m of CPU",
            )


_OF_PODS: Final[Mapping[str, Callable[[Pod, NodeFacts], RiskDetails]]] = {
    "claim.best_effort": _best_effort,
    "claim.not_counted": _not_counted,
    "claim.over_pod_level": _over_pod_level,
    "claim.starved": _starved,
}


def _given(pod: Pod) -> Mapping[str, Quantity]:
    """Sum the CPU and memory of all claims of a pod."""
    grants = () if isinstance(pod.grants, UnknownAmount) else pod.grants
    return {one: sum((grant.to_pod(one) or ZERO for grant in grants), ZERO) for one in (CPU, MEMORY)}


# --- risks of containers with CPUs from a driver -----------------------------------------------------------


def _exclusive(
    pod: Pod, container: PodContainer, own: ExclusiveCpus, facts: NodeFacts, throttled: int
) -> RiskDetails:
    """Find CPU quotas of containers with exclusive CPUs from a driver. The kubelet does not see these CPUs
    and does not lift the quota."""
    cpus = format_cpus(own.cpus)
    limit = container_limit(pod, container, CPU, claims=facts.counts_claims)
    if not isinstance(limit, ResourceSum) or not facts.enforces_quota:
        return
    milli = 1000 * len(list(cpus_of(own.cpus)))
    if limit.total.milli < milli:
        yield "cpus.exclusive_quota", f"exclusive CPUs {cpus} are {milli}m; the quota is {limit.text}"
    if throttled:
        yield "cpus.exclusive_throttled", f"throttled at {limit.text} on exclusive CPUs {cpus}"
