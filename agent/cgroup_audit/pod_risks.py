"""Risks that follow from the requests, limits and claims of a pod, although its cgroups are correct.

Kubelet and container runtime are not at fault: the author of the pod, claim or driver can remove the risk.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from agent.cgroup_audit.node_facts import ExclusiveCpus, NodeFacts
from agent.cgroup_audit.pod_model import CPU, MEMORY, Pod, PodContainer, QosClass
from agent.cgroup_audit.quantity import ZERO, Quantity
from agent.cgroup_audit.resource_sums import ResourceSum, container_limit, container_request, format_amount
from agent.model.cpuset import cpu_numbers, format_cpus


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
) -> tuple[PodRisk, ...]:
    """Return the risks of one pod and its containers.

    Args:
        exclusive_cpus: Known exclusive CPUs of the pod's containers.
        throttled_periods: Throttled CPU periods (nr_throttled in ``cpu.stat``) by container, if read.
    """
    found = [
        PodRisk(code, str(pod), container, what, ADVICE[code])
        for code, find in _POD_RISKS.items()
        for container, what in (find(pod, facts) if pod.known_claim_resources else ())
    ]
    counts = throttled_periods or {}
    lifted = {one.container for one in exclusive_cpus if one.by_kubelet}
    for container in (one for one in pod.containers if one.name not in lifted):
        for own in (one for one in exclusive_cpus if one.container == container.name):
            for code, what in _exclusive_cpu_risks(pod, container, own, facts, counts.get(container.name, 0)):
                found.append(PodRisk(code, str(pod), container.name, what, ADVICE[code]))
    return tuple(found)


def shared_claim_risks(pods: Iterable[Pod]) -> tuple[PodRisk, ...]:
    """Return a risk for each pod that shares a claim with another pod, so that its resources count twice.

    Claims that each of their active pods declares as shared on purpose are no risk.
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
    amounts = [f"{format_amount(one, given)} of {one}" for one, given in _claim_amounts(pod).items() if given]
    if pod.qos is QosClass.BEST_EFFORT and amounts and facts.counts_claims:
        text = f"claims give {' and '.join(amounts)}; its cgroup has the lowest CPU weight, no limit"
        yield "", f"BestEffort: {text}"


def _not_counted_risk(pod: Pod, facts: NodeFacts) -> RiskDetails:
    if not facts.counts_claims:
        claims = ", ".join(sorted({grant.claim for grant in pod.known_claim_resources}))
        yield "", f"the kubelet does not count the resources of claims {claims}"


def _over_pod_level_risks(pod: Pod, _: NodeFacts) -> RiskDetails:
    """Yield pod-level requests and limits below the claims' resources, although they include these."""
    for resource, given in _claim_amounts(pod).items():
        for kind, level in (("request", pod.pod_level_requests), ("limit", pod.pod_level_limits)):
            if resource in level and level[resource] < given:
                amounts = format_amount(resource, level[resource]), format_amount(resource, given)
                yield "", f"{resource}: the pod level {kind} is {amounts[0]}, its claims give {amounts[1]}"


def _starved_risks(pod: Pod, facts: NodeFacts) -> RiskDetails:
    """Yield containers without a CPU request: their CPU weight is the lowest, despite their claims."""
    if len(pod.containers) < 2 or not facts.counts_claims:
        return
    for container in pod.containers:
        given = sum(
            (one.amount_for_container(container.name, CPU) or ZERO for one in pod.known_claim_resources), ZERO
        )
        if given and container_request(pod, container) is None:
            yield (
                container.name,
                f"its cgroup has 2 shares, the minimum; its claims give {given.milli}m of CPU",
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
    return {one: sum((grant.amount_for_pod(one) or ZERO for grant in grants), ZERO) for one in (CPU, MEMORY)}


def _exclusive_cpu_risks(
    pod: Pod, container: PodContainer, own: ExclusiveCpus, facts: NodeFacts, throttled: int
) -> RiskDetails:
    """Yield the risks of a CPU quota on exclusive CPUs from a driver: the kubelet keeps the quota."""
    cpus = format_cpus(own.cpus)
    limit = container_limit(pod, container, CPU, with_claims=facts.counts_claims)
    if not isinstance(limit, ResourceSum) or not facts.enforces_quota:
        return
    milli = 1000 * len(list(cpu_numbers(own.cpus)))
    if limit.total.milli < milli:
        yield "cpus.exclusive_quota", f"exclusive CPUs {cpus} are {milli}m; the quota is {limit.text}"
    if throttled:
        yield "cpus.exclusive_throttled", f"throttled at {limit.text} on exclusive CPUs {cpus}"
