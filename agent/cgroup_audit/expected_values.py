"""Conversion of requests and limits to the expected value of one cgroup setting, with its arithmetic.

If the kubelet and container runtimes round, or differ by version, several values are accepted, each with a
note on its origin. Conversions truncate to integers, as the kubelet does.

Source: kubelet v1.37.1, pkg/kubelet/cm (shares, quota, linear weight); github.com/opencontainers/cgroups
v0.0.7 (quadratic weight, systemd's round-up); kernel, mm/page_counter.c and mm/hugetlb_cgroup.c (pages).

The module also has the sums of the requests and limits of a pod or container, computed as the kubelet does.

Each sum has a text with its arithmetic. None instead of a sum means that nothing is requested, which differs
from zero.

Source: k8s.io/component-helpers v0.37, resource (PodRequests, PodLimits); kubelet v1.37.1,
pkg/kubelet/kuberuntime (limits of containers).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agent.cgroup_audit.cgroup_settings import CgroupSettingId, SettingKind, format_bytes, hugepage_size_name
from agent.cgroup_audit.kubelet_config import LIFTS_QUOTA_GATE, CgroupDriver, NodeFacts
from agent.cgroup_audit.pod_model import (
    CPU,
    HUGEPAGES,
    ZERO,
    ContainerRole,
    Pod,
    PodContainer,
    Quantity,
    ResourceAmounts,
    UnknownAmount,
)
from agent.model.pod_findings import NO_LIMIT


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


def containers_request(pod: Pod, resource: str, *, with_claims: bool) -> Amount:
    """Sum the requests of a pod's containers and claims, without pod-level requests and overhead."""
    own = _containers_terms(pod, resource, _effective_requests(pod, resource))
    return _sum_terms(resource, _pod_terms(own, _claims_terms(pod, resource, with_claims), None))


def pod_limits(pod: Pod, resource: str, *, with_claims: bool) -> Amount:
    """Sum the limits and overhead of a pod for one resource. The pod must have a limit (:func:`has_limit`).

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
    """Return True if the pod has a limit for a resource: a pod-level limit, or a limit of each container.

    Args:
        count_earlier_sidecars: True: an init container has a limit if it or a sidecar before it has one. Up
            to 1.36, the kubelet sums the limits of sidecars before it looks for a missing limit.
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
    """Return a container's limit plus the amounts of its claims.

    If the container has no limit, return the pod-level limit.
    """
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
    for new in amounts:
        if isinstance(new, UnknownAmount):
            return new
        if new is not None:
            found = (
                new if found is None else ResourceSum(found.total + new.total, f"{found.text} + {new.text}")
            )
    return found


class SumTerm(NamedTuple):
    """One amount in a sum of requests or limits, with a text that names the origin of the amount."""

    amount: Quantity
    label: str


Terms = tuple[SumTerm, ...]


def _pending_resize(pod: Pod, resource: str) -> UnknownAmount | None:
    """Return UnknownAmount if a resize of the pod is pending, because the Pod object then lacks the amounts
    in effect. None: the amounts are known.

    For hugepages the result is always None, because they cannot be resized.
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
    """Return the amounts of those containers of a pod that run at the same time and together need the most.

    None: no container has an amount of the resource.
    """
    found: dict[str, ResourceAmounts] = {}
    for container in pod.containers:
        resources = amounts(container)
        if isinstance(resources, UnknownAmount):
            return resources
        if resource in resources:
            found[container.name] = resources
    stages = [
        tuple(SumTerm(found[part.name][resource], _term_label(part)) for part in stage if part.name in found)
        for stage in _stages(pod)
    ]
    return max(stages, key=_total) if found else None  # the first of equal stages: the app containers


def _stages(pod: Pod) -> Iterator[tuple[PodContainer, ...]]:
    """Yield the sets of containers of a pod that run at the same time.

    The first set has the app containers and all sidecars. Each further set has one init container and the
    sidecars before it.
    """
    yield tuple(container for container in pod.containers if container.role is not ContainerRole.INIT)
    sidecars: tuple[PodContainer, ...] = ()
    for container in pod.containers:
        if container.role is ContainerRole.INIT:
            yield (*sidecars, container)
        elif container.role is ContainerRole.SIDECAR:
            sidecars = (*sidecars, container)


def _claims_terms(pod: Pod, resource: str, claims: bool) -> Terms | UnknownAmount:
    """Return the amounts that a pod's claims add to a sum of requests or limits; none without ``claims``."""
    if not claims:
        return ()
    if isinstance(pod.claim_resources, UnknownAmount):
        return pod.claim_resources
    given = [(grant.amount_for_pod(resource), grant.claim) for grant in pod.claim_resources]
    return tuple(SumTerm(amount, f"claim {claim}") for amount, claim in given if amount is not None)


def _pod_terms(
    own: Terms | UnknownAmount | None, given: Terms | UnknownAmount, level: Quantity | None
) -> Terms | UnknownAmount | None:
    """Return the amounts that make up a pod's sum: those of its containers (``own``) and of its claims
    (``given``).

    A pod-level amount (``level``) replaces the amounts of containers and claims.
    """
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


# --- one expected value ------------------------------------------------------------------------------------

MIN_SHARES: Final = 2
MAX_SHARES: Final = 262_144
MIN_QUOTA_US: Final = 1000
_STEP_US: Final = 10_000
"""Granularity of a CPU quota set by systemd [us]: 1 % of a CPU, 10 ms of each second."""
_SECOND_US: Final = 1_000_000


def shares_from_millicores(milli: int) -> int:
    """Convert millicores to ``cpu.shares``, within the kernel's limits."""
    return max(MIN_SHARES, min(milli * 1024 // 1000, MAX_SHARES))


def linear_weight(shares: int) -> int:
    """Convert CPU shares (cgroup v1) to ``cpu.weight`` (v2) as the kubelet and older OCI runtimes do."""
    return 1 + (max(MIN_SHARES, min(shares, MAX_SHARES)) - 2) * 9999 // 262_142


def quadratic_weight(shares: int) -> int:
    """Convert CPU shares to ``cpu.weight`` as runc 1.3.2 and crun 1.23 do: 1024 shares become 100."""
    if shares <= MIN_SHARES:
        return 1
    if shares >= MAX_SHARES:
        return 10_000
    exponent = math.log2(shares)
    # The order of evaluation decides whether 1024 shares are 100 or 101.
    return math.ceil(math.pow(10, (exponent * exponent + 125 * exponent) / 612.0 - 7.0 / 34.0))


def quota_from_millicores(milli: int, period_us: int) -> int:
    """Convert millicores to a CFS quota [us]; 0: no quota, the file stays unchanged."""
    return max(milli * period_us // 1000, MIN_QUOTA_US) if milli else 0


def systemd_quota(quota_us: int, period_us: int) -> int:
    """Round a CFS quota up as systemd does, to the next 10 ms of each second."""
    per_second = quota_us * _SECOND_US // period_us
    if per_second % _STEP_US == 0:
        return quota_us
    return (per_second // _STEP_US + 1) * _STEP_US * period_us // _SECOND_US


def whole_pages(limit_bytes: int, page_bytes: int) -> int:
    """Round a memory limit down to whole pages, as the kernel does."""
    return limit_bytes - limit_bytes % page_bytes


class AcceptedValue(NamedTuple):
    """Value that is correct for a cgroup setting."""

    value: int
    note: str = ""
    """Origin or reason of the value; empty: it is the only accepted value."""
    is_rounded: bool = False
    """True: the first accepted value after rounding by systemd or the kernel. False: an exact value."""


@dataclass(frozen=True, slots=True)
class ExpectedSetting:
    """All values that are correct for one cgroup setting."""

    setting: CgroupSettingId
    accepted: tuple[AcceptedValue, ...]
    """Values that are correct for the setting, the released kubelet's value first. Empty: unknown."""
    arithmetic: str
    unknown_reason: str = ""
    """Reason why the expected value is unknown; empty: it is known."""
    at_least: int | None = None
    """Lowest correct value if the expected value is unknown: the value without claims. None: unknown."""
    explained_wrong_values: tuple[AcceptedValue, ...] = ()
    """Wrong values whose cause is known, with the cause as note."""
    period_us: int = 0
    """CFS period of a quota [us]; 0 for other settings."""
    doubt: str = ""
    """Reason why an unexpected value may be correct, too: its verdict is then UNKNOWN; empty: no reason."""
    no_limit_doubt: str = ""
    """As ``doubt``, for a missing limit only."""


class ResourceSums(NamedTuple):
    """Sum of the requests or limits for a resource, with and without the resources of claims."""

    by_kubelet: Amount
    """Sum as this node's kubelet computes it: with claims if NodeFacts.counts_claims."""
    without_claims: Amount
    """Sum without claims, as a kubelet computes it that does not count them."""


def resource_sums(add: Callable[[bool], Amount], facts: NodeFacts) -> ResourceSums:
    """Compute a sum of requests or limits with and without claims.

    ``add`` returns the sum; its argument is True if claims count.
    """
    return ResourceSums(add(facts.counts_claims), add(False))


def unknown_setting(
    setting: CgroupSettingId, reason: str, least: Iterable[AcceptedValue] = (), period_us: int = 0
) -> ExpectedSetting:
    """Return the expected setting for a cgroup setting whose correct value is unknown, with the reason.

    Args:
        least: Values of the setting without claims, which claims can only raise; empty: unknown.
        period_us: CFS period of a quota.
    """
    at_least = min((option.value for option in least), default=None)
    return ExpectedSetting(setting, (), "", reason, at_least, period_us=period_us)


def cpu_weight(sums: ResourceSums, facts: NodeFacts, *, by_runtime: bool = False) -> ExpectedSetting:
    """Return the expected CPU weight (v2) or CPU shares (v1).

    Args:
        by_runtime: True: the container runtime writes the weight. False: the kubelet writes it.
    """
    uncounted: tuple[AcceptedValue, ...] = ()
    if not isinstance(sums.without_claims, UnknownAmount):
        uncounted = _weight(sums.without_claims, facts, by_runtime).accepted
    if isinstance(sums.by_kubelet, UnknownAmount):
        return unknown_setting(CgroupSettingId(SettingKind.WEIGHT), sums.by_kubelet.reason, uncounted)
    return explain_without_claims(_weight(sums.by_kubelet, facts, by_runtime), uncounted)


def minimum_weight(reason: str, facts: NodeFacts, *, by_runtime: bool = False) -> ExpectedSetting:
    """Return the lowest CPU weight as the expected value of a container, with the reason."""
    return _weight_setting(MIN_SHARES, reason, facts, by_runtime)


def _weight(amount: Amount, facts: NodeFacts, runtimes: bool) -> ExpectedSetting:
    if amount is None or isinstance(amount, UnknownAmount):
        return minimum_weight("no request", facts, by_runtime=runtimes)
    return _weight_setting(shares_from_millicores(amount.total.milli), amount.text, facts, runtimes)


def weight_from_millicores(milli: int, text: str, facts: NodeFacts) -> ExpectedSetting:
    """Return the CPU weight or shares that the kubelet writes for an amount of CPU.

    ``text`` describes the amount.
    """
    return _weight_setting(shares_from_millicores(milli), text, facts, runtimes=False)


def _weight_setting(shares: int, text: str, facts: NodeFacts, runtimes: bool) -> ExpectedSetting:
    arithmetic = f"{text} -> shares {shares}"
    if facts.cgroup_version == 1:
        return ExpectedSetting(CgroupSettingId(SettingKind.WEIGHT), (AcceptedValue(shares),), arithmetic)
    formulas = [(linear_weight(shares), "linear")]
    if runtimes:  # newer runtimes use the quadratic formula, no kubelet does
        formulas.insert(0, (quadratic_weight(shares), "quadratic"))
    if formulas[0][0] == formulas[-1][0]:
        formulas = [(formulas[0][0], "")]
    options = tuple(AcceptedValue(weight, formula) for weight, formula in formulas)
    weights = " or ".join(f"{weight} ({formula})" if formula else str(weight) for weight, formula in formulas)
    return ExpectedSetting(CgroupSettingId(SettingKind.WEIGHT), options, f"{arithmetic} -> weight {weights}")


def cpu_quota(
    sums: ResourceSums, facts: NodeFacts, lifted_reason: str, no_limit_text: str
) -> Iterable[ExpectedSetting]:
    """Yield the expected CFS quota and, if there is a quota, the expected CFS period.

    Args:
        sums: Sums of the CPU limits.
        lifted_reason: Reason why there is no quota despite the limit; empty: the limit applies.
        no_limit_text: Text that explains the expected quota if there is no CPU limit.
    """
    setting, amount = CgroupSettingId(SettingKind.QUOTA), sums.by_kubelet
    uncounted = _convert_known(sums.without_claims, lambda total: _accepted_quotas(total, facts))
    if not facts.enforces_quota:
        lifted_reason = "the kubelet sets no quotas"
    elif True not in facts.lifts_quota:
        lifted_reason = ""
    if lifted_reason:
        kept = amount if facts.enforces_quota and False in facts.lifts_quota else None
        others = _accepted_quotas(kept.total, facts) if isinstance(kept, ResourceSum) and kept.total else ()
        noted = (other._replace(note=f"without the gate {LIFTS_QUOTA_GATE}") for other in others)
        doubt = kept.reason if isinstance(kept, UnknownAmount) else ""
        options = (AcceptedValue(NO_LIMIT), *noted)
        yield ExpectedSetting(setting, options, f"no limit: {lifted_reason}", doubt=doubt)
    elif isinstance(amount, UnknownAmount):
        yield unknown_setting(setting, amount.reason, uncounted, facts.period_us)
    elif amount is None or not amount.total:
        yield ExpectedSetting(setting, (AcceptedValue(NO_LIMIT),), no_limit_text)
    else:
        options = _accepted_quotas(amount.total, facts)
        arithmetic = f"{amount.text} -> {options[0].value} us of {facts.period_us}"
        doubt = "" if facts.are_quotas_known else "the kubelet may set no quotas"
        expected = ExpectedSetting(
            setting, options, arithmetic, period_us=facts.period_us, no_limit_doubt=doubt
        )
        yield explain_without_claims(expected, uncounted)
        if facts.are_quotas_known:
            yield ExpectedSetting(
                CgroupSettingId(SettingKind.PERIOD), (AcceptedValue(facts.period_us),), "the kubelet's period"
            )


def _accepted_quotas(amount: Quantity, facts: NodeFacts) -> tuple[AcceptedValue, ...]:
    exact = quota_from_millicores(amount.milli, facts.period_us)
    if facts.cgroup_driver is not CgroupDriver.SYSTEMD:
        return (AcceptedValue(exact),)
    up = systemd_quota(exact, facts.period_us)
    return (
        (AcceptedValue(exact),)
        if up == exact
        else (AcceptedValue(exact), AcceptedValue(up, "systemd rounds up", is_rounded=True))
    )


def memory_limit(sums: ResourceSums, facts: NodeFacts, no_limit_text: str) -> ExpectedSetting:
    """Return the expected memory limit.

    If there is no limit, ``no_limit_text`` is the text for the arithmetic.
    """
    setting, amount = CgroupSettingId(SettingKind.MEMORY), sums.by_kubelet
    uncounted = _convert_known(
        sums.without_claims, lambda total: page_rounded_limits(total, facts.page_bytes)
    )
    if isinstance(amount, UnknownAmount):
        return unknown_setting(setting, amount.reason, uncounted)
    if amount is None or not amount.total:
        return ExpectedSetting(setting, (AcceptedValue(NO_LIMIT),), no_limit_text)
    options = page_rounded_limits(amount.total, facts.page_bytes)
    expected = ExpectedSetting(setting, options, f"{amount.text} -> {options[0].value} bytes")
    return explain_without_claims(expected, uncounted)


def hugepage_limits(size_kib: int, sums: ResourceSums) -> Iterable[ExpectedSetting]:
    """Yield the expected limits on use and reservation of one hugepage size; 0 without a request."""
    amount = sums.by_kubelet
    uncounted = _convert_known(sums.without_claims, lambda total: page_rounded_limits(total, size_kib * 1024))
    for kind in (SettingKind.PAGES, SettingKind.RESERVED):
        setting = CgroupSettingId(kind, size_kib)
        if isinstance(amount, UnknownAmount):
            yield unknown_setting(setting, amount.reason, uncounted)
            continue
        options = page_rounded_limits(amount.total if amount else ZERO, size_kib * 1024)
        text = amount.text if amount else f"no pages of {hugepage_size_name(size_kib)} requested"
        expected = ExpectedSetting(setting, options, f"{text} -> {options[0].value} bytes")
        is_none = sums.without_claims is None
        yield explain_without_claims(expected, (AcceptedValue(0),) if is_none else uncounted)


def page_rounded_limits(amount: Quantity, page_bytes: int) -> tuple[AcceptedValue, ...]:
    """Return the values that are correct for an amount of memory: exact, and rounded to whole pages."""
    exact, kept = amount.value, whole_pages(amount.value, page_bytes)
    if exact == kept:
        return (AcceptedValue(exact),)
    return (
        AcceptedValue(exact),
        AcceptedValue(kept, f"whole pages of {format_bytes(page_bytes)}", is_rounded=True),
    )


def _convert_known(
    amount: Amount, options: Callable[[Quantity], tuple[AcceptedValue, ...]]
) -> tuple[AcceptedValue, ...]:
    return () if amount is None or isinstance(amount, UnknownAmount) else options(amount.total)


def explain_without_claims(expected: ExpectedSetting, uncounted: Iterable[AcceptedValue]) -> ExpectedSetting:
    """Return an expected setting that also explains the wrong values of a kubelet that does not count claims.

    ``uncounted`` has these values.
    """
    right = {option.value for option in expected.accepted}
    why = "the value of a kubelet that does not count claims"
    explains = tuple(AcceptedValue(value.value, why) for value in uncounted if value.value not in right)
    return replace(expected, explained_wrong_values=explains) if explains else expected
