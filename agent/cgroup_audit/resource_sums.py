"""Sums of the requests and limits of a pod or container, computed as the kubelet does.

A sum has its arithmetic as text. None means that nothing is requested, which differs from zero.

Source: k8s.io/component-helpers v0.37, resource (PodRequests, PodLimits); kubelet v1.37.1,
pkg/kubelet/kuberuntime (limits of containers).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from agent.cgroup_audit.cgroup_settings import format_bytes
from agent.cgroup_audit.pod_model import (
    CPU,
    HUGEPAGES,
    ContainerRole,
    Pod,
    PodContainer,
    ResourceAmounts,
    UnknownAmount,
)
from agent.cgroup_audit.quantity import ZERO, Quantity


class ResourceSum(NamedTuple):
    """Sum of requests or limits for one resource, with its arithmetic as text."""

    total: Quantity
    text: str


Amount = ResourceSum | UnknownAmount | None
"""Sum of requests or limits of one resource.

UnknownAmount: it cannot be computed. None: nothing is requested.
"""


def format_amount(resource: str, amount: Quantity) -> str:
    """Format the amount of a resource: CPU in millicores (``1700m``), others in bytes (``384Mi``)."""
    return f"{amount.milli}m" if resource == CPU else format_bytes(amount.value)


def pod_requests(pod: Pod, resource: str, *, with_claims: bool) -> Amount:
    """Sum the requests and overhead of a pod for one resource; ``with_claims`` adds those of its claims."""
    level = pod.pod_level_requests.get(resource)
    if level is not None and (hidden := _pending_resize(pod, resource)):
        return hidden
    own = _containers_terms(pod, resource, _effective_requests(pod, resource))
    terms = _pod_terms(own, _claims_terms(pod, resource, with_claims), level)
    overhead = pod.overhead.get(resource)
    if overhead is not None and not isinstance(terms, UnknownAmount):
        terms = (*(terms or ()), SumTerm(overhead, "overhead"))
    return _sum_terms(resource, terms)


def containers_request(pod: Pod, resource: str) -> Amount:
    """Sum the requests of a pod's containers, without pod-level requests, claims and overhead."""
    return _sum_terms(resource, _containers_terms(pod, resource, _effective_requests(pod, resource)))


def pod_limits(pod: Pod, resource: str, *, with_claims: bool) -> Amount:
    """Sum the limits and overhead of a pod for one resource. Requires :func:`has_limit`.

    Args:
        with_claims: Add the claims' amounts if a container has a limit, and always for hugepages.
    """
    if hidden := _pending_resize(pod, resource):
        return hidden
    own = _containers_terms(pod, resource, lambda container: container.limits)
    counts = own is not None or resource.startswith(HUGEPAGES)
    terms = _pod_terms(
        own, _claims_terms(pod, resource, with_claims and counts), pod.pod_level_limits.get(resource)
    )
    overhead = pod.overhead.get(resource)
    if overhead is not None and terms and not isinstance(terms, UnknownAmount) and _total(terms):
        terms = (*terms, SumTerm(overhead, "overhead"))
    return _sum_terms(resource, terms)


def has_limit(pod: Pod, resource: str, *, count_earlier_sidecars: bool = False) -> bool:
    """Return True if the pod has a limit for a resource: a pod-level one, or one of each container.

    Args:
        count_earlier_sidecars: True: an init container has a limit if it or a sidecar before it has one. Up
            to 1.36, the kubelet sums the limits of sidecars before it looks for a missing one.
    """
    if pod.pod_level_limits.get(resource):
        return True
    has_limited_sidecar = False
    for container in pod.containers:
        is_limited = bool(container.limits.get(resource))
        is_init = container.role is not ContainerRole.APP
        if not is_limited and not (is_init and has_limited_sidecar):
            return False
        if count_earlier_sidecars and container.role is ContainerRole.SIDECAR:
            has_limited_sidecar = has_limited_sidecar or is_limited
    return True


def container_request(pod: Pod, container: PodContainer) -> Amount:
    """Return a container's CPU request, else its CPU limit, else the pod-level limit, without claims."""
    requests = _effective_requests(pod, CPU)(container)
    if isinstance(requests, UnknownAmount):
        return requests
    if (own := requests.get(CPU)) is not None:
        return ResourceSum(own, f"{own.milli}m (request)")
    if hidden := _pending_resize(pod, CPU):
        return hidden
    if limit := container.limits.get(CPU):
        return ResourceSum(limit, f"{limit.milli}m (limit, there is no request)")
    if level := pod.pod_level_limits.get(CPU):
        return ResourceSum(level, f"{level.milli}m (pod level limit, there is no request)")
    return None


def container_limit(pod: Pod, container: PodContainer, resource: str, *, with_claims: bool) -> Amount:
    """Return a container's limit plus the amounts of its claims; if it has no limit, the pod-level limit."""
    if hidden := _pending_resize(pod, resource):
        return hidden
    if own := container.limits.get(resource):
        return _plus_claims(pod, container, resource, (SumTerm(own, "limit"),), with_claims)
    level = pod.pod_level_limits.get(resource)
    return ResourceSum(level, f"{format_amount(resource, level)} (pod level limit)") if level else None


def container_hugepages(pod: Pod, container: PodContainer, resource: str, *, with_claims: bool) -> Amount:
    """Return a container's limit for a hugepage resource; claims count even if the container has no limit."""
    own, level = container.limits.get(resource), pod.pod_level_limits.get(resource)
    if own is not None:
        return _plus_claims(pod, container, resource, (SumTerm(own, "limit"),), with_claims)
    if level is not None:
        return ResourceSum(level, f"{format_amount(resource, level)} (pod level limit)")
    return _plus_claims(pod, container, resource, None, with_claims)


def add_amounts(amounts: Iterable[Amount]) -> Amount:
    """Add amounts of one resource, such as those of one hugepage size under several resource names."""
    found: ResourceSum | None = None
    for one in amounts:
        if isinstance(one, UnknownAmount):
            return one
        if one is not None:
            found = (
                one if found is None else ResourceSum(found.total + one.total, f"{found.text} + {one.text}")
            )
    return found


class SumTerm(NamedTuple):
    """Addend of a sum of requests or limits, with the text that names its origin."""

    amount: Quantity
    label: str


Terms = tuple[SumTerm, ...]


def _pending_resize(pod: Pod, resource: str) -> UnknownAmount | None:
    """Return UnknownAmount if a pending resize hides the amounts in effect, else None.

    Hugepages cannot be resized: always None.
    """
    if pod.resize is None or not pod.resize.pending or resource.startswith(HUGEPAGES):
        return None
    reason = pod.resize.reason or "no reason given"
    return UnknownAmount(f"a resize is pending ({reason}); the object does not contain the current values")


def _effective_requests(pod: Pod, resource: str) -> Callable[[PodContainer], ResourceAmounts | UnknownAmount]:
    """Return a function that maps a container to its requests in effect, also while a resize is pending."""
    hidden = _pending_resize(pod, resource)
    if hidden is None:
        return lambda container: container.requests
    return lambda container: hidden if container.granted_requests is None else container.granted_requests


def _containers_terms(
    pod: Pod, resource: str, amounts: Callable[[PodContainer], ResourceAmounts | UnknownAmount]
) -> Terms | UnknownAmount | None:
    """Return the amounts of the containers that run at the same time and need the most; None: no amounts."""
    found: dict[str, ResourceAmounts] = {}
    for container in pod.containers:
        resources = amounts(container)
        if isinstance(resources, UnknownAmount):
            return resources
        if resource in resources:
            found[container.name] = resources
    stages = [
        tuple(SumTerm(found[one.name][resource], _term_label(one)) for one in stage if one.name in found)
        for stage in _stages(pod)
    ]
    return max(stages, key=_total) if found else None  # the first of equal stages: the app containers


def _stages(pod: Pod) -> Iterator[tuple[PodContainer, ...]]:
    """Yield the sets of containers of a pod that run at the same time.

    First the app containers with all sidecars, then each init container with the sidecars before it.
    """
    yield tuple(container for container in pod.containers if container.role is not ContainerRole.INIT)
    sidecars: tuple[PodContainer, ...] = ()
    for container in pod.containers:
        if container.role is ContainerRole.INIT:
            yield (*sidecars, container)
        elif container.role is ContainerRole.SIDECAR:
            sidecars = (*sidecars, container)


def _claims_terms(pod: Pod, resource: str, claims: bool) -> Terms | UnknownAmount:
    """Return the addends of a pod's sum that are amounts of its claims; none if ``claims`` is False."""
    if not claims:
        return ()
    if isinstance(pod.claim_resources, UnknownAmount):
        return pod.claim_resources
    given = [(grant.amount_for_pod(resource), grant.claim) for grant in pod.claim_resources]
    return tuple(SumTerm(amount, f"claim {claim}") for amount, claim in given if amount is not None)


def _pod_terms(
    own: Terms | UnknownAmount | None, given: Terms | UnknownAmount, level: Quantity | None
) -> Terms | UnknownAmount | None:
    """Join the addends of containers (own) and claims (given); a pod-level amount (level) replaces both."""
    if level is not None:
        return (SumTerm(level, "pod level, claims included" if given else "pod level"),)
    if isinstance(own, UnknownAmount):
        return own
    if isinstance(given, UnknownAmount):
        return given
    return (*(own or ()), *given) or own


def _plus_claims(pod: Pod, container: PodContainer, resource: str, own: Terms | None, claims: bool) -> Amount:
    if not claims:
        return _sum_terms(resource, own)
    if isinstance(pod.claim_resources, UnknownAmount):
        return pod.claim_resources
    given = [
        (grant.amount_for_container(container.name, resource), grant.claim) for grant in pod.claim_resources
    ]
    terms = tuple(SumTerm(amount, f"claim {claim}") for amount, claim in given if amount is not None)
    return _sum_terms(resource, (*(own or ()), *terms) or None)


def _total(terms: Terms) -> Quantity:
    return sum((term.amount for term in terms), ZERO)


def _sum_terms(resource: str, terms: Terms | UnknownAmount | None) -> Amount:
    if terms is None or isinstance(terms, UnknownAmount):
        return terms
    total = _total(terms)
    text = " + ".join(f"{format_amount(resource, term.amount)} ({term.label})" for term in terms)
    return ResourceSum(
        total, text if len(terms) == 1 else f"{text} = {format_amount(resource, total)}".lstrip(" =")
    )


def _term_label(container: PodContainer) -> str:
    return container.name if container.role is ContainerRole.APP else f"{container.role} {container.name}"
