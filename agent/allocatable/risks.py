"""What can go wrong although every cgroup says what it should: it follows from how pods ask.

Nothing of this is a mistake of kubelet or runtime. Who wrote the pod, the claim or the driver can mend it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from agent.allocatable.facts import Exclusive, NodeFacts
from agent.allocatable.pod import CPU, MEMORY, Container, Pod, Qos, Unsaid
from agent.allocatable.quantity import ZERO, Quantity
from agent.allocatable.sums import Sum, amount_text, container_limit, container_request
from agent.model.cpuset import cpus_of, format_cpus


class Risk(NamedTuple):
    """Something that can go wrong."""

    code: str
    pod: str
    """``<namespace>/<name>``."""
    container: str
    """Empty: it is the whole pod's."""
    what: str
    """The numbers, on one line."""
    advice: str


ADVICE: Final[Mapping[str, str]] = {
    "claim.best_effort": "give one of its containers a small request, so that the pod is Burstable",
    "claim.not_counted": "enable the gate DRANodeAllocatableResources of kubelets from 1.37 on",
    "claim.over_pod_level": "raise spec.resources by what the claims give, which is part of it",
    "claim.shared_mapping": "give each pod a claim of its own; the scheduler should have refused the second",
    "claim.starved": "give the container a request of CPU: within its pod, claims do not count",
    "cpus.exclusive_quota": "leave the container's CPU limit out, or raise it to the CPUs that it has",
    "cpus.exclusive_throttled": "leave the container's CPU limit out: its CPUs bound it well enough",
}
"""What to do, by code."""


def risks_of(
    pod: Pod,
    facts: NodeFacts,
    exclusive: Sequence[Exclusive] = (),
    throttled: Mapping[str, int] | None = None,
) -> tuple[Risk, ...]:
    """The risks of one pod.

    Args:
        pod: The pod.
        facts: Of its node.
        exclusive: CPUs that its containers have for themselves, as far as somebody knows.
        throttled: By container, how often it was throttled (``cpu.stat``, nr_throttled), where that was read.
    """
    given = () if isinstance(pod.grants, Unsaid) else pod.grants
    found = [
        Risk(code, str(pod), container, what, ADVICE[code])
        for code, judge in _OF_PODS.items()
        for container, what in (judge(pod, facts) if given else ())
    ]
    counts = throttled or {}
    lifted = {one.container for one in exclusive if one.by_kubelet}
    for container in (one for one in pod.containers if one.name not in lifted):
        for own in (one for one in exclusive if one.container == container.name):
            for code, what in _exclusive(pod, container, own, facts, counts.get(container.name, 0)):
                found.append(Risk(code, str(pod), container.name, what, ADVICE[code]))
    return tuple(found)


def shared_mappings(pods: Iterable[Pod]) -> tuple[Risk, ...]:
    """Claims whose devices are counted as resources of several pods of a node; a risk for each such pod.

    Overhead may be shared, and each pod is charged.
    """
    users: dict[tuple[str, str], list[Pod]] = {}
    for pod in pods:
        for grant in () if isinstance(pod.grants, Unsaid) or not pod.active else pod.grants:
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


# --- of pods: pairs of a container's name, or none, and what is the matter ---------------------------------

Found = Iterable[tuple[str, str]]


def _best_effort(pod: Pod, facts: NodeFacts) -> Found:
    amounts = [f"{amount_text(one, given)} of {one}" for one, given in _given(pod).items() if given]
    if pod.qos is Qos.BEST_EFFORT and amounts and facts.counts_claims:
        yield (
            "",
            f"BestEffort: its claims give {' and '.join(amounts)}, and its cgroup the least CPU and no limit",
        )


def _not_counted(pod: Pod, facts: NodeFacts) -> Found:
    if not facts.counts_claims:
        claims = [] if isinstance(pod.grants, Unsaid) else sorted({grant.claim for grant in pod.grants})
        yield "", f"the kubelet does not count what is given by {', '.join(claims)}"


def _over_pod_level(pod: Pod, _: NodeFacts) -> Found:
    """What is asked for the pod as a whole takes in the claims: less than these, it takes away from them."""
    for resource, given in _given(pod).items():
        for kind, level in (("request", pod.level_requests), ("limit", pod.level_limits)):
            if resource in level and level[resource] < given:
                amounts = amount_text(resource, level[resource]), amount_text(resource, given)
                yield "", f"{resource}: the pod level {kind} is {amounts[0]}, its claims give {amounts[1]}"


def _starved(pod: Pod, facts: NodeFacts) -> Found:
    """Without a request a container has the least weight, however much its claims give the pod."""
    if isinstance(pod.grants, Unsaid) or len(pod.containers) < 2 or not facts.counts_claims:
        return
    for container in pod.containers:
        given = sum((one.to_container(container.name, CPU) or ZERO for one in pod.grants), ZERO)
        if given and container_request(pod, container) is None:
            yield (
                container.name,
                f"shares 2 among the pod's containers; its claims give {given.milli}m of CPU",
            )


_OF_PODS: Final[Mapping[str, Callable[[Pod, NodeFacts], Found]]] = {
    "claim.best_effort": _best_effort,
    "claim.not_counted": _not_counted,
    "claim.over_pod_level": _over_pod_level,
    "claim.starved": _starved,
}


def _given(pod: Pod) -> Mapping[str, Quantity]:
    """What all claims of a pod give it of CPU and memory."""
    grants = () if isinstance(pod.grants, Unsaid) else pod.grants
    return {one: sum((grant.to_pod(one) or ZERO for grant in grants), ZERO) for one in (CPU, MEMORY)}


# --- of containers with CPUs that a driver gave ------------------------------------------------------------


def _exclusive(pod: Pod, container: Container, own: Exclusive, facts: NodeFacts, throttled: int) -> Found:
    """The kubelet sees nothing of such CPUs, so it does not lift the quota as it does for its own."""
    cpus = format_cpus(own.cpus)
    limit = container_limit(pod, container, CPU, claims=facts.counts_claims)
    if not isinstance(limit, Sum) or not facts.enforces_quota:
        return
    milli = 1000 * len(list(cpus_of(own.cpus)))
    if limit.total.milli < milli:
        yield "cpus.exclusive_quota", f"CPUs {cpus} are its own, {milli}m; its quota is {limit.text}"
    if throttled:
        yield "cpus.exclusive_throttled", f"CPUs {cpus} are its own, and it was throttled at {limit.text}"
