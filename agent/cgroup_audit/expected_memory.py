"""Expected memory QoS, swap limits and OOM scores of pods and containers, each with its arithmetic.

Values that depend on the kubelet's configuration are expected only if the configuration is known. Where
kubelets differ, or the configuration leaves two possibilities, several values are accepted.

Source: kubelet v1.36 and v1.37.1, pkg/kubelet/kuberuntime (memory QoS and swap of containers), pkg/kubelet/cm
(memory QoS of pods and QoS classes), pkg/kubelet/qos (OOM scores); KEP-2570, KEP-2400, KEP-2837.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from agent.cgroup_audit.cgroup_settings import CgroupSettingId, SettingKind, format_bytes
from agent.cgroup_audit.expected_values import (
    AcceptedValue,
    Amount,
    ExpectedSetting,
    ResourceSum,
    containers_request,
    explain_without_claims,
    page_rounded_limits,
    pod_requests,
    unknown_setting,
    whole_pages,
)
from agent.cgroup_audit.kubelet_config import LIMITED_SWAP, MemoryQosMode, NodeFacts
from agent.cgroup_audit.pod_model import (
    MEMORY,
    ZERO,
    ContainerRole,
    Pod,
    PodContainer,
    QosClass,
    Quantity,
    UnknownAmount,
)
from agent.model.pod_findings import NO_LIMIT

TIE_BREAK_GATE: Final = "KubeletOOMScoreAdjTieBreak"
"""Kubernetes feature gate after 1.37 that makes OOM scores depend on more than requests.

With this gate, OOM scores are not compared.
"""
_LAST_KILLED: Final = -997
_FIRST_KILLED: Final = 1000
_PENDING: Final = "a resize is pending; the object does not contain the current values"
_CHANGED: Final = "the pod's spec may have changed since, and containers keep the value of their start"

# --- memory QoS --------------------------------------------------------------------------------------------


def pod_memory_qos(pod: Pod, facts: NodeFacts) -> Iterator[ExpectedSetting]:
    """Yield the expected memory protection of a pod's cgroup, if the kubelet may protect memory requests."""
    counted = _protections(pod.qos, pod_requests(pod, MEMORY, with_claims=facts.counts_claims), facts)
    uncounted = _protections(pod.qos, pod_requests(pod, MEMORY, with_claims=False), facts)
    for expected, without in zip(counted, uncounted, strict=True):
        yield explain_without_claims(expected, without.accepted)


def container_memory_qos(pod: Pod, container: PodContainer, facts: NodeFacts) -> Iterator[ExpectedSetting]:
    """Yield the expected ``memory.high`` of a container and, if the kubelet may protect memory requests, its
    memory protection."""
    if not facts.memory_qos:
        return
    request, given = _container_request(pod, container), _claim_memory(pod, container, facts)
    yield accept_either(
        _throttling_limit(pod, container, request, given, facts, way) for way in facts.memory_qos
    )
    for setting in _protections(pod.qos, _request_sum(request), facts):
        value = setting.accepted[0].value if setting.accepted else 0
        if not value or given == 0:
            yield setting
        elif isinstance(given, UnknownAmount):
            yield unknown_setting(setting.setting, given.reason, setting.accepted)
        else:
            yield _with_values(setting, [AcceptedValue(value + given, "with the memory of its claims")])


def class_memory_qos(
    qos: QosClass, requested: Callable[[Sequence[QosClass]], Amount], facts: NodeFacts
) -> Iterator[ExpectedSetting]:
    """Yield the expected memory protection of the cgroup of a QoS class.

    For Guaranteed this is the cgroup kubepods.

    Args:
        requested: Function that sums the memory requests of the pods of QoS classes.
    """
    if qos is QosClass.BEST_EFFORT or not facts.memory_qos:
        return
    both = (QosClass.GUARANTEED, QosClass.BURSTABLE)
    kind = SettingKind.LOW if qos is QosClass.BURSTABLE else SettingKind.MIN
    amount = requested((QosClass.BURSTABLE,) if qos is QosClass.BURSTABLE else both)
    yield accept_either(_protection(kind, qos, amount, facts, policy) for policy in facts.memory_qos)


def _protections(qos: QosClass, amount: Amount, facts: NodeFacts) -> Iterator[ExpectedSetting]:
    """Yield the expected memory protections of a cgroup: ``memory.min`` and ``memory.low``.

    If the kubelet protects no requests, the function yields nothing. An old value in the file then has no
    effect, since the parent cgroups protect nothing.
    """
    if any(policy.reserves for policy in facts.memory_qos) and qos is not QosClass.BEST_EFFORT:
        for kind in (SettingKind.MIN, SettingKind.LOW):
            yield accept_either(_protection(kind, qos, amount, facts, policy) for policy in facts.memory_qos)


def _protection(
    kind: SettingKind, qos: QosClass, amount: Amount, facts: NodeFacts, way: MemoryQosMode
) -> ExpectedSetting:
    setting = CgroupSettingId(kind)
    tier = SettingKind.LOW if way.is_tiered and qos is QosClass.BURSTABLE else SettingKind.MIN
    if not way.reserves:
        return ExpectedSetting(setting, (AcceptedValue(0),), "requests are not protected")
    if kind is not tier:
        return ExpectedSetting(setting, (AcceptedValue(0),), f"{qos} pods have memory.{_FILES[tier]}")
    if isinstance(amount, UnknownAmount):
        return unknown_setting(setting, amount.reason)
    if amount is None:
        return ExpectedSetting(setting, (AcceptedValue(0),), "no request")
    options = page_rounded_limits(amount.total, facts.page_bytes)
    return ExpectedSetting(setting, options, f"{amount.text} -> {options[0].value} bytes")


_FILES: Final = {SettingKind.MIN: "min", SettingKind.LOW: "low"}


def _throttling_limit(
    pod: Pod,
    container: PodContainer,
    request: Quantity | UnknownAmount,
    given: int | UnknownAmount,
    facts: NodeFacts,
    way: MemoryQosMode,
) -> ExpectedSetting:
    setting, factor = CgroupSettingId(SettingKind.HIGH), way.throttling_factor
    if factor is None:
        return ExpectedSetting(setting, (AcceptedValue(NO_LIMIT),), "memoryThrottlingFactor is not in effect")
    if MEMORY in {*pod.pod_level_requests, *pod.pod_level_limits}:
        return unknown_setting(setting, "kubelets differ for pods with pod-level memory")
    if pod.qos is QosClass.GUARANTEED:
        return ExpectedSetting(setting, (AcceptedValue(NO_LIMIT),), "Guaranteed pods are not throttled")
    if isinstance(request, UnknownAmount):
        return unknown_setting(setting, request.reason)
    if isinstance(given, UnknownAmount):
        return unknown_setting(setting, given.reason)
    if pod.resize is not None and pod.resize.pending:
        return unknown_setting(setting, _PENDING)
    return _throttled_at(request, container, given, facts, factor)


def _throttled_at(
    request: Quantity, container: PodContainer, given: int, facts: NodeFacts, factor: float
) -> ExpectedSetting:
    """Return the expected ``memory.high`` of a container.

    The value is between the memory request and the memory limit. Without a limit, it is between the request
    and the node's allocatable memory.
    """
    setting, own = CgroupSettingId(SettingKind.HIGH), container.limits.get(MEMORY)
    limit = own.value + given if own else facts.allocatable_memory
    if own and request.value == own.value:  # kubelets compare without claims
        return ExpectedSetting(setting, (AcceptedValue(NO_LIMIT),), "the request equals the limit")
    if limit is None:
        return unknown_setting(setting, "the memory of the machine is unknown")
    low, top = request.value, "limit" if own else "allocatable memory of the node"
    high = int(math.floor(low + (limit - low) * factor) / facts.page_bytes) * facts.page_bytes
    text = (
        f"{format_bytes(low)} (request) + {factor:g} * ({format_bytes(limit)} ({top}) - {format_bytes(low)})"
    )
    if high <= low:
        return ExpectedSetting(setting, (AcceptedValue(NO_LIMIT),), f"{text} is not above the request")
    options = [AcceptedValue(high)]
    if not low and not own:  # up to 1.36, a missing request counts as equal to a missing limit
        options.append(AcceptedValue(NO_LIMIT, "as kubelets up to 1.36 leave it without a request"))
    return ExpectedSetting(setting, tuple(options), f"{text} -> {high} bytes")


# --- swap --------------------------------------------------------------------------------------------------


def container_swap(pod: Pod, container: PodContainer, facts: NodeFacts) -> Iterator[ExpectedSetting]:
    """Yield the expected swap limit of a container (cgroup v2), if the kubelet's configuration is known."""
    setting = CgroupSettingId(SettingKind.SWAP)
    if facts.kubelet is None or facts.cgroup_version == 1:
        return
    reason = _no_swap_reason(pod, container, facts.kubelet.swap_behavior)
    if reason:
        yield ExpectedSetting(setting, (AcceptedValue(0),), f"no swap: {reason}")
    elif facts.memory_bytes and facts.swap_bytes is not None:
        yield _limited_swap(pod, container, facts.memory_bytes, facts.swap_bytes, facts.page_bytes)
    else:
        yield unknown_setting(setting, "the memory and swap space of the machine are unknown")


def swap_with_memory(memory: ExpectedSetting, facts: NodeFacts) -> Iterator[ExpectedSetting]:
    """Yield the expected limit of a container on memory and swap together (cgroup v1).

    The limit equals the memory limit, since no container swaps on v1. Without a memory limit, the kubelet
    sets no limit.

    Args:
        memory: Expected memory limit of the container.
    """
    is_limited = bool(memory.accepted) and memory.accepted[0].value != NO_LIMIT
    if facts.kubelet is not None and facts.cgroup_version == 1 and is_limited:
        yield replace(
            memory,
            setting=CgroupSettingId(SettingKind.SWAP),
            arithmetic=f"no swap: memory limit {memory.arithmetic}",
        )


def _no_swap_reason(pod: Pod, container: PodContainer, behaviour: str) -> str:
    """Return the reason why a container may not swap; empty: the container may swap, up to a limit."""
    if behaviour != LIMITED_SWAP:
        return f"memorySwap.swapBehavior is {behaviour or 'NoSwap'}"
    if pod.is_critical:
        return "the pod is critical"
    if pod.qos is not QosClass.BURSTABLE:
        return f"{pod.qos} pods do not swap"
    request, limit = _spec_memory(container), container.limits.get(MEMORY, ZERO)
    if not request and not limit:
        return "no request"
    return "the request equals the limit" if request == limit else ""


def _limited_swap(
    pod: Pod, container: PodContainer, memory: int, swap: int, page_bytes: int
) -> ExpectedSetting:
    setting, request = CgroupSettingId(SettingKind.SWAP), _container_request(pod, container)
    if isinstance(request, UnknownAmount):
        return unknown_setting(setting, request.reason)
    share = int(request.value / memory * swap) if request.value <= memory else 0
    text = f"{format_bytes(request.value)} (request) / {format_bytes(memory)} * {format_bytes(swap)} of swap"
    kept = whole_pages(share, page_bytes)
    options = [AcceptedValue(share)]
    if kept != share:
        options.append(AcceptedValue(kept, f"whole pages of {format_bytes(page_bytes)}", is_rounded=True))
    return ExpectedSetting(setting, tuple(options), f"{text} -> {share} bytes", doubt=_doubt(pod))


# --- OOM scores --------------------------------------------------------------------------------------------


def oom_score(pod: Pod, container: PodContainer, facts: NodeFacts) -> Iterator[ExpectedSetting]:
    """Yield the expected OOM score of a container, if the machine's memory is known."""
    if facts.memory_bytes is None:
        return
    setting = CgroupSettingId(SettingKind.OOM_SCORE)
    fixed = _fixed_score(pod)
    if fixed is not None:
        yield ExpectedSetting(setting, (AcceptedValue(fixed[0]),), fixed[1])
    elif facts.kubelet is None or not any(facts.kubelet.possible_gate(TIE_BREAK_GATE, default=False)):
        uncounted = _burstable_score(pod, container, replace(facts, counts_claims=False), facts.memory_bytes)
        expected = _burstable_score(pod, container, facts, facts.memory_bytes)
        yield explain_without_claims(expected, uncounted.accepted)


def _fixed_score(pod: Pod) -> tuple[int, str] | None:
    if pod.is_node_critical:
        return _LAST_KILLED, "system-node-critical pods are killed last"
    if pod.qos is QosClass.GUARANTEED:
        return _LAST_KILLED, "Guaranteed pods are killed last"
    return (_FIRST_KILLED, "BestEffort pods are killed first") if pod.qos is QosClass.BEST_EFFORT else None


def _burstable_score(pod: Pod, container: PodContainer, facts: NodeFacts, memory: int) -> ExpectedSetting:
    """Return the expected OOM score of a Burstable pod's container.

    A larger memory request makes the score lower.
    """
    setting = CgroupSettingId(SettingKind.OOM_SCORE)
    share, own = _pod_level_share(pod, facts), _scored_memory(pod, container, facts)
    if isinstance(share, UnknownAmount):
        return unknown_setting(setting, share.reason)
    if isinstance(own, UnknownAmount):
        return unknown_setting(setting, own.reason)
    requested = own + share
    text = f"1000 - 1000 * {format_bytes(requested)} (request) / {format_bytes(memory)}"
    score = 1000 - 1000 * requested // memory
    if container.role is ContainerRole.SIDECAR:
        apps = [_scored_memory(pod, app, facts) for app in pod.containers if app.role is ContainerRole.APP]
        least = min(app for app in apps if isinstance(app, int)) + share  # all are known, like `own`
        if (of_apps := 1000 - 1000 * least // memory) < score:
            score, origin = of_apps, "least of the app containers"
            text = f"1000 - 1000 * {format_bytes(least)} ({origin}) / {format_bytes(memory)}"
    score = min(max(score, 1000 + _LAST_KILLED), _FIRST_KILLED - 1)
    return ExpectedSetting(setting, (AcceptedValue(score),), f"{text} -> {score}", doubt=_doubt(pod))


def _scored_memory(pod: Pod, container: PodContainer, facts: NodeFacts) -> int | UnknownAmount:
    """Return the memory that determines a container's OOM score: its memory request plus its share of the
    memory of claims."""
    total = _spec_memory(container).value
    if not facts.counts_claims:
        return total
    if isinstance(pod.claim_resources, UnknownAmount):
        return pod.claim_resources
    for grant in pod.claim_resources:
        if container.name in grant.containers:
            sharers = len(grant.containers)
            total += grant.shared.get(MEMORY, ZERO).value // sharers
            total += grant.per_pod.get(MEMORY, ZERO).value // sharers
            total += grant.per_container.get(MEMORY, ZERO).value
    return total


def _pod_level_share(pod: Pod, facts: NodeFacts) -> int | UnknownAmount:
    """Return one container's share of the pod-level memory request.

    The part of the request above the sum of the containers' requests and claims is divided equally.
    """
    level = pod.pod_level_requests.get(MEMORY)
    if not level:
        return 0
    requested = containers_request(pod, MEMORY, with_claims=facts.counts_claims)
    if isinstance(requested, UnknownAmount):
        return requested
    rest = level.value - (requested.total.value if requested else 0)
    return max(0, rest) // len(pod.containers)


def _doubt(pod: Pod) -> str:
    """Return why a pod's cgroups may rightly differ from the expected values; empty: no reason."""
    return _CHANGED if pod.is_changed or pod.resize is not None else ""


# --- amounts -----------------------------------------------------------------------------------------------


def _container_request(pod: Pod, container: PodContainer) -> Quantity | UnknownAmount:
    """Return a container's memory request in effect.

    A container without a request has its limit as request.
    """
    if pod.resize is None or not pod.resize.pending:
        return _spec_memory(container)
    if container.granted_requests is None:
        return UnknownAmount(_PENDING)
    return container.granted_requests.get(MEMORY, ZERO)


def _spec_memory(container: PodContainer) -> Quantity:
    return container.requests.get(MEMORY, container.limits.get(MEMORY, ZERO))


def _request_sum(request: Quantity | UnknownAmount) -> Amount:
    if isinstance(request, UnknownAmount):
        return request
    return ResourceSum(request, f"{format_bytes(request.value)} (request)") if request else None


def _claim_memory(pod: Pod, container: PodContainer, facts: NodeFacts) -> int | UnknownAmount:
    """Return the memory that the claims of a container add to the container's memory limit."""
    if not facts.counts_claims:
        return 0
    if isinstance(pod.claim_resources, UnknownAmount):
        return pod.claim_resources
    amounts = (resource.amount_for_container(container.name, MEMORY) for resource in pod.claim_resources)
    return sum((amount for amount in amounts if amount is not None), ZERO).value


def accept_either(options: Iterable[ExpectedSetting]) -> ExpectedSetting:
    """Join the expected settings of several possible configurations: the values of all configurations are
    accepted.

    If the setting of one configuration is unknown, the joined setting is unknown.
    """
    first, *others = dict.fromkeys(options)
    for other in others:
        if not first.accepted or not other.accepted:
            return first if not first.accepted else other
        first = _with_values(
            first,
            [AcceptedValue(value.value, other.arithmetic, value.is_rounded) for value in other.accepted],
        )
    return first


def _with_values(setting: ExpectedSetting, values: Iterable[AcceptedValue]) -> ExpectedSetting:
    known = {option.value for option in setting.accepted}
    added = tuple(value for value in values if value.value not in known)
    return replace(setting, accepted=(*setting.accepted, *added))
