"""Sums of requests and limits of a pod or container, computed as the kubelet does.

Each sum carries its arithmetic as text. None means that nothing is requested, which differs from zero;
UnknownAmount means that the pod's object does not contain the amount.

Source: k8s.io/component-helpers v0.37, resource (PodRequests, PodLimits); kubelet v1.37.1,
pkg/kubelet/kuberuntime (limits of containers).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from agent.allocatable.pod import CPU, HUGEPAGES, Pod, PodContainer, Resources, Role, UnknownAmount
from agent.allocatable.quantity import ZERO, Quantity
from agent.allocatable.settings import bytes_text


class ResourceSum(NamedTuple):
    """Sum of requests or limits, with its arithmetic as text."""

    total: Quantity
    text: str


Amount = ResourceSum | UnknownAmount | None
"""Sum of requests or limits; UnknownAmount: the sum is unknown; None: nothing is requested."""


def amount_text(resource: str, amount: Quantity) -> str:
    """Format an amount: CPU in millicores, other resources in bytes: ``1700m``, ``384Mi``."""
    return f"{amount.milli}m" if resource == CPU else bytes_text(amount.value)


# --- a pod -------------------------------------------------------------------------------------------------


def pod_requests(pod: Pod, resource: str, *, claims: bool) -> Amount:
    """Sum the pod's requests and overhead, with the resources of claims if ``claims``."""
    level = pod.level_requests.get(resource)
    if level is not None and (hidden := _pending_resize(pod, resource)):
        return hidden
    own = _containers_terms(pod, resource, _requests(pod, resource))
    terms = _pod_terms(own, _claims_terms(pod, resource, claims), level)
    overhead = pod.overhead.get(resource)
    if overhead is not None and not isinstance(terms, UnknownAmount):
        terms = (*(terms or ()), SumTerm(overhead, "overhead"))
    return _summed(resource, terms)


def pod_limits(pod: Pod, resource: str, *, claims: bool) -> Amount:
    """Sum the limits and overhead of a pod that :func:`is_limited`.

    Claims count if a container has a limit, and always for hugepages.
    """
    if hidden := _pending_resize(pod, resource):
        return hidden
    own = _containers_terms(pod, resource, lambda container: container.limits)
    counts = own is not None or resource.startswith(HUGEPAGES)
    terms = _pod_terms(own, _claims_terms(pod, resource, claims and counts), pod.level_limits.get(resource))
    overhead = pod.overhead.get(resource)
    if overhead is not None and terms and not isinstance(terms, UnknownAmount) and _total(terms):
        terms = (*terms, SumTerm(overhead, "overhead"))
    return _summed(resource, terms)


def is_limited(pod: Pod, resource: str) -> bool:
    """Return whether the pod has a limit: each container has one, or there is a pod-level limit."""
    return bool(pod.level_limits.get(resource)) or all(one.limits.get(resource) for one in pod.containers)


# --- a container -------------------------------------------------------------------------------------------


def container_request(pod: Pod, container: PodContainer) -> Amount:
    """Return a container's CPU request, else its limit, else the pod-level limit; claims do not count."""
    requests = _requests(pod, CPU)(container)
    if isinstance(requests, UnknownAmount):
        return requests
    if (own := requests.get(CPU)) is not None:
        return ResourceSum(own, f"{own.milli}m (request)")
    if hidden := _pending_resize(pod, CPU):
        return hidden
    if limit := container.limits.get(CPU):
        return ResourceSum(limit, f"{limit.milli}m (limit, there is no request)")
    if level := pod.level_limits.get(CPU):
        return ResourceSum(level, f"{level.milli}m (pod level limit, there is no request)")
    return None


def container_limit(pod: Pod, container: PodContainer, resource: str, *, claims: bool) -> Amount:
    """Return a container's limit: its own plus the resources of its claims, or the pod-level limit."""
    if hidden := _pending_resize(pod, resource):
        return hidden
    if own := container.limits.get(resource):
        return _plus_claims(pod, container, resource, (SumTerm(own, "limit"),), claims)
    level = pod.level_limits.get(resource)
    return ResourceSum(level, f"{amount_text(resource, level)} (pod level limit)") if level else None


def container_pages(pod: Pod, container: PodContainer, resource: str, *, claims: bool) -> Amount:
    """Return a container's hugepage limit. Claims count even if the container has no limit."""
    own, level = container.limits.get(resource), pod.level_limits.get(resource)
    if own is not None:
        return _plus_claims(pod, container, resource, (SumTerm(own, "limit"),), claims)
    if level is not None:
        return ResourceSum(level, f"{amount_text(resource, level)} (pod level limit)")
    return _plus_claims(pod, container, resource, None, claims)


def add_amounts(amounts: Iterable[Amount]) -> Amount:
    """Add the amounts of one resource that a pod requests under several names."""
    found: ResourceSum | None = None
    for one in amounts:
        if isinstance(one, UnknownAmount):
            return one
        if one is not None:
            found = (
                one if found is None else ResourceSum(found.total + one.total, f"{found.text} + {one.text}")
            )
    return found


# --- terms -------------------------------------------------------------------------------------------------


class SumTerm(NamedTuple):
    """One addend of a sum of requests or limits."""

    amount: Quantity
    label: str


Terms = tuple[SumTerm, ...]


def _pending_resize(pod: Pod, resource: str) -> UnknownAmount | None:
    """Return UnknownAmount while a resize is pending, since the object lacks the values in effect; else None.

    Hugepages cannot be resized.
    """
    if pod.resize is None or not pod.resize.pending or resource.startswith(HUGEPAGES):
        return None
    reason = pod.resize.reason or "no reason given"
    return UnknownAmount(f"a resize is pending ({reason}); the object does not contain the current values")


def _requests(pod: Pod, resource: str) -> Callable[[PodContainer], Resources | UnknownAmount]:
    """Return a function from container to its requests in effect: those of the spec, or those that the
    kubelet has granted while a resize is pending."""
    hidden = _pending_resize(pod, resource)
    if hidden is None:
        return lambda container: container.requests
    return lambda container: hidden if container.allocated is None else container.allocated


def _containers_terms(
    pod: Pod, resource: str, amounts: Callable[[PodContainer], Resources | UnknownAmount]
) -> Terms | UnknownAmount | None:
    """Return the addends of the start-up stage whose containers need the most at the same time."""
    found: dict[str, Resources] = {}
    for container in pod.containers:
        resources = amounts(container)
        if isinstance(resources, UnknownAmount):
            return resources
        if resource in resources:
            found[container.name] = resources
    stages = [
        tuple(SumTerm(found[one.name][resource], _label(one)) for one in stage if one.name in found)
        for stage in _stages(pod)
    ]
    return max(stages, key=_total) if found else None  # the first of equal stages: the app containers


def _stages(pod: Pod) -> Iterator[tuple[PodContainer, ...]]:
    """Yield each set of containers that run at the same time: app containers with sidecars, then init
    stages."""
    yield tuple(container for container in pod.containers if container.role is not Role.INIT)
    sidecars: tuple[PodContainer, ...] = ()
    for container in pod.containers:
        if container.role is Role.INIT:
            yield (*sidecars, container)
        elif container.role is Role.SIDECAR:
            sidecars = (*sidecars, container)


def _claims_terms(pod: Pod, resource: str, claims: bool) -> Terms | UnknownAmount:
    """Return the addends of all claims. The released code adds all; the KEP's text follows the init
    stages."""
    if not claims:
        return ()
    if isinstance(pod.grants, UnknownAmount):
        return pod.grants
    given = [(grant.to_pod(resource), grant.claim) for grant in pod.grants]
    return tuple(SumTerm(amount, f"claim {claim}") for amount, claim in given if amount is not None)


def _pod_terms(
    own: Terms | UnknownAmount | None, given: Terms | UnknownAmount, level: Quantity | None
) -> Terms | UnknownAmount | None:
    """Return the addends of a pod; a pod-level amount replaces those of containers and claims."""
    if level is not None:
        return (SumTerm(level, "pod level, claims included" if given else "pod level"),)
    if isinstance(own, UnknownAmount):
        return own
    if isinstance(given, UnknownAmount):
        return given
    return (*(own or ()), *given) or own


def _plus_claims(pod: Pod, container: PodContainer, resource: str, own: Terms | None, claims: bool) -> Amount:
    if not claims:
        return _summed(resource, own)
    if isinstance(pod.grants, UnknownAmount):
        return pod.grants
    given = [(grant.to_container(container.name, resource), grant.claim) for grant in pod.grants]
    terms = tuple(SumTerm(amount, f"claim {claim}") for amount, claim in given if amount is not None)
    return _summed(resource, (*(own or ()), *terms) or None)


def _total(terms: Terms) -> Quantity:
    return sum((term.amount for term in terms), ZERO)


def _summed(resource: str, terms: Terms | UnknownAmount | None) -> Amount:
    if terms is None or isinstance(terms, UnknownAmount):
        return terms
    total = _total(terms)
    text = " + ".join(f"{amount_text(resource, term.amount)} ({term.label})" for term in terms)
    return ResourceSum(
        total, text if len(terms) == 1 else f"{text} = {amount_text(resource, total)}".lstrip(" =")
    )


def _label(container: PodContainer) -> str:
    return container.name if container.role is Role.APP else f"{container.role} {container.name}"
