"""What is asked for, added up as the kubelet adds it: for a pod, and for one of its containers.

Each sum carries its arithmetic as text. None is that nobody asked for any, which is not the same as zero;
Unsaid, that the pod's object does not say.

Source: k8s.io/component-helpers v0.37, resource (PodRequests, PodLimits); kubelet v1.37.1,
pkg/kubelet/kuberuntime (limits of containers).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from agent.allocatable.knobs import bytes_text
from agent.allocatable.pod import CPU, HUGEPAGES, Container, Pod, Resources, Role, Unsaid
from agent.allocatable.quantity import ZERO, Quantity


class Sum(NamedTuple):
    """An amount and how it came about."""

    total: Quantity
    text: str


Amount = Sum | Unsaid | None
"""None: nobody asked for any."""


def amount_text(resource: str, amount: Quantity) -> str:
    """CPU in thousandths, all else in bytes: ``1700m``, ``384Mi``."""
    return f"{amount.milli}m" if resource == CPU else bytes_text(amount.value)


# --- a pod -------------------------------------------------------------------------------------------------


def pod_requests(pod: Pod, resource: str, *, claims: bool) -> Amount:
    """What the whole pod asks for, its overhead included. ``claims``: what claims give counts."""
    level = pod.level_requests.get(resource)
    if level is not None and (hidden := _hidden(pod, resource)):
        return hidden
    own = _containers_terms(pod, resource, _requests(pod, resource))
    terms = _pod_terms(own, _claims_terms(pod, resource, claims), level)
    overhead = pod.overhead.get(resource)
    if overhead is not None and not isinstance(terms, Unsaid):
        terms = (*(terms or ()), Term(overhead, "overhead"))
    return _summed(resource, terms)


def pod_limits(pod: Pod, resource: str, *, claims: bool) -> Amount:
    """What the whole pod is limited to, if it is :func:`limited`; its overhead included.

    Claims add to limits that somebody declared, and to hugepages in any case.
    """
    if hidden := _hidden(pod, resource):
        return hidden
    own = _containers_terms(pod, resource, lambda container: container.limits)
    counts = own is not None or resource.startswith(HUGEPAGES)
    terms = _pod_terms(own, _claims_terms(pod, resource, claims and counts), pod.level_limits.get(resource))
    overhead = pod.overhead.get(resource)
    if overhead is not None and terms and not isinstance(terms, Unsaid) and _total(terms):
        terms = (*terms, Term(overhead, "overhead"))
    return _summed(resource, terms)


def limited(pod: Pod, resource: str) -> bool:
    """Whether the pod as a whole is limited: each container is, or a limit is set for the pod."""
    return bool(pod.level_limits.get(resource)) or all(one.limits.get(resource) for one in pod.containers)


# --- a container -------------------------------------------------------------------------------------------


def container_request(pod: Pod, container: Container) -> Amount:
    """CPU that one container asks for. If it does not say, its limit or the pod's counts, without claims."""
    requests = _requests(pod, CPU)(container)
    if isinstance(requests, Unsaid):
        return requests
    if (own := requests.get(CPU)) is not None:
        return Sum(own, f"{own.milli}m (request)")
    if hidden := _hidden(pod, CPU):
        return hidden
    if limit := container.limits.get(CPU):
        return Sum(limit, f"{limit.milli}m (limit, there is no request)")
    if level := pod.level_limits.get(CPU):
        return Sum(level, f"{level.milli}m (pod level limit, there is no request)")
    return None


def container_limit(pod: Pod, container: Container, resource: str, *, claims: bool) -> Amount:
    """What one container is limited to: its own limit and what its claims give, or the pod's limit alone."""
    if hidden := _hidden(pod, resource):
        return hidden
    if own := container.limits.get(resource):
        return _plus_claims(pod, container, resource, (Term(own, "limit"),), claims)
    level = pod.level_limits.get(resource)
    return Sum(level, f"{amount_text(resource, level)} (pod level limit)") if level else None


def container_pages(pod: Pod, container: Container, resource: str, *, claims: bool) -> Amount:
    """Likewise of hugepages. Without a limit claims count, too: else nobody could use what they give."""
    own, level = container.limits.get(resource), pod.level_limits.get(resource)
    if own is not None:
        return _plus_claims(pod, container, resource, (Term(own, "limit"),), claims)
    if level is not None:
        return Sum(level, f"{amount_text(resource, level)} (pod level limit)")
    return _plus_claims(pod, container, resource, None, claims)


def added(amounts: Iterable[Amount]) -> Amount:
    """The sum of amounts under several names for the same."""
    found: Sum | None = None
    for one in amounts:
        if isinstance(one, Unsaid):
            return one
        if one is not None:
            found = one if found is None else Sum(found.total + one.total, f"{found.text} + {one.text}")
    return found


# --- terms -------------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """One part of a sum."""

    amount: Quantity
    label: str


Terms = tuple[Term, ...]


def _hidden(pod: Pod, resource: str) -> Unsaid | None:
    """While a resize waits, cgroups are as before, which nobody writes down. Hugepages cannot be resized."""
    if pod.resize is None or not pod.resize.pending or resource.startswith(HUGEPAGES):
        return None
    reason = pod.resize.reason or "no reason given"
    return Unsaid(f"a resize is pending ({reason}), and the object does not say what holds until then")


def _requests(pod: Pod, resource: str) -> Callable[[Container], Resources | Unsaid]:
    """Those that hold: while a resize waits, what the kubelet has granted, not what the spec wants."""
    hidden = _hidden(pod, resource)
    if hidden is None:
        return lambda container: container.requests
    return lambda container: hidden if container.allocated is None else container.allocated


def _containers_terms(
    pod: Pod, resource: str, asked: Callable[[Container], Resources | Unsaid]
) -> Terms | Unsaid | None:
    """The most that is asked for at the same time."""
    said: dict[str, Resources] = {}
    for container in pod.containers:
        resources = asked(container)
        if isinstance(resources, Unsaid):
            return resources
        if resource in resources:
            said[container.name] = resources
    stages = [
        tuple(Term(said[one.name][resource], _label(one)) for one in stage if one.name in said)
        for stage in _stages(pod)
    ]
    return max(stages, key=_total) if said else None  # of equals the first: the apps


def _stages(pod: Pod) -> Iterator[tuple[Container, ...]]:
    """Who runs together: in the end, and at the turn of each init container."""
    yield tuple(container for container in pod.containers if container.role is not Role.INIT)
    sidecars: tuple[Container, ...] = ()
    for container in pod.containers:
        if container.role is Role.INIT:
            yield (*sidecars, container)
        elif container.role is Role.SIDECAR:
            sidecars = (*sidecars, container)


def _claims_terms(pod: Pod, resource: str, claims: bool) -> Terms | Unsaid:
    """Whoever runs when: the released code adds all, though the KEP's text follows the init containers."""
    if not claims:
        return ()
    if isinstance(pod.grants, Unsaid):
        return pod.grants
    given = [(grant.to_pod(resource), grant.claim) for grant in pod.grants]
    return tuple(Term(amount, f"claim {claim}") for amount, claim in given if amount is not None)


def _pod_terms(
    own: Terms | Unsaid | None, given: Terms | Unsaid, level: Quantity | None
) -> Terms | Unsaid | None:
    """What is asked for the pod as a whole stands in the place of all that containers and claims ask for."""
    if level is not None:
        return (Term(level, "pod level, claims included" if given else "pod level"),)
    if isinstance(own, Unsaid):
        return own
    if isinstance(given, Unsaid):
        return given
    return (*(own or ()), *given) or own


def _plus_claims(pod: Pod, container: Container, resource: str, own: Terms | None, claims: bool) -> Amount:
    if not claims:
        return _summed(resource, own)
    if isinstance(pod.grants, Unsaid):
        return pod.grants
    given = [(grant.to_container(container.name, resource), grant.claim) for grant in pod.grants]
    terms = tuple(Term(amount, f"claim {claim}") for amount, claim in given if amount is not None)
    return _summed(resource, (*(own or ()), *terms) or None)


def _total(terms: Terms) -> Quantity:
    return sum((term.amount for term in terms), ZERO)


def _summed(resource: str, terms: Terms | Unsaid | None) -> Amount:
    if terms is None or isinstance(terms, Unsaid):
        return terms
    total = _total(terms)
    text = " + ".join(f"{amount_text(resource, term.amount)} ({term.label})" for term in terms)
    return Sum(total, text if len(terms) == 1 else f"{text} = {amount_text(resource, total)}".lstrip(" ="))


def _label(container: Container) -> str:
    return container.name if container.role is Role.APP else f"{container.role} {container.name}"
