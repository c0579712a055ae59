"""Pod as the cgroup audit needs it: containers, requests, limits, resources of claims, QoS class.

An amount that the API object does not contain is an :class:`UnknownAmount` with the reason, never zero.

The module also converts Kubernetes quantities (``250m``, ``1.5Gi``, ``2e3``) to exact integers.

The parser accepts what Kubernetes accepts, with the same rounding: away from zero. It refuses a text without
a digit, which Kubernetes parses as zero but never writes.

Source: k8s.io/apimachinery v0.37, pkg/api/resource.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

NANO: Final = 10**9
MILLI: Final = 10**6
"""Number of nanos in one thousandth."""
MAX_VALUE: Final = 2**63 - 1
"""Largest amount that a quantity returns: larger ones are cut to it, the largest 64-bit integer."""
_LONGEST: Final = 256
_EXPONENT_MAX: Final = 1000
"""Largest exponent. Kubernetes has no limit and needs minutes for 1e2147483648."""

_DECIMAL: Final = {
    "n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18,
}  # fmt: skip
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_TEXT: Final = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?([eEinumkKMGTP]*[+-]?[0-9]*)", re.ASCII)
_EXPONENT: Final = re.compile(r"[eE]([+-]?[0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Quantity:
    """Kubernetes quantity, held as an integer number of nanos (10^-9)."""

    nanos: int

    def __add__(self, other: "Quantity") -> "Quantity":
        return Quantity(self.nanos + other.nanos)

    def __mul__(self, times: int) -> "Quantity":
        return Quantity(self.nanos * times)

    def __bool__(self) -> bool:
        return self.nanos != 0

    @property
    def value(self) -> int:
        """Amount in whole units, such as bytes, rounded away from zero, at most :data:`MAX_VALUE`."""
        return _limit_to_max(_divide_away_from_zero(self.nanos, NANO))

    @property
    def milli(self) -> int:
        """Amount in thousandths, such as millicores, rounded away from zero, at most :data:`MAX_VALUE`."""
        return _limit_to_max(_divide_away_from_zero(self.nanos, MILLI))


ZERO: Final = Quantity(0)


def parse_quantity(text: str) -> Quantity:
    """Parse a Kubernetes quantity.

    Raises:
        ValueError: The text is not a quantity; the message has the text and the reason.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"{text[:64]!a}... is not a quantity: {len(text)} characters, limit {_LONGEST}")
    match = _TEXT.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        raise ValueError(
            f"{text[:64]!a} is not a quantity: expected a number and a suffix such as m, k, Mi or e3"
        )
    sign, whole, fraction, suffix = match.groups(default="")
    digits = int(whole + fraction)
    if suffix in _BINARY:
        nanos = min(_scale_to_nanos(digits << _BINARY[suffix], -len(fraction)), MAX_VALUE * NANO)
    else:
        nanos = _scale_to_nanos(digits, _exponent(text, suffix) - len(fraction))
    return Quantity(-nanos if sign == "-" else nanos)


def _exponent(text: str, suffix: str) -> int:
    if suffix in _DECIMAL:
        return _DECIMAL[suffix]
    match = _EXPONENT.fullmatch(suffix)
    if match is None:
        raise ValueError(f"{text[:64]!a} is not a quantity: unknown suffix {suffix[:16]!a}")
    if len(match[1]) > 8 or abs(int(match[1])) > _EXPONENT_MAX:
        raise ValueError(f"{text[:64]!a} is not a quantity: exponent {match[1][:12]}, limit {_EXPONENT_MAX}")
    return int(match[1])


def _scale_to_nanos(digits: int, exponent: int) -> int:
    """Return ``digits * 10**exponent`` in nanos, rounded away from zero."""
    exponent += 9
    return digits * 10**exponent if exponent >= 0 else _divide_away_from_zero(digits, 10**-exponent)


def _divide_away_from_zero(number: int, divisor: int) -> int:
    """Return ``number / divisor``, rounded away from zero."""
    return -(-number // divisor) if number >= 0 else number // divisor


def _limit_to_max(number: int) -> int:
    return max(-MAX_VALUE, min(number, MAX_VALUE))


# --- the pod -----------------------------------------------------------------------------------------------

CPU: Final = "cpu"
MEMORY: Final = "memory"
HUGEPAGES: Final = "hugepages-"
"""Prefix of the names of hugepage resources: ``hugepages-2Mi``."""

ResourceAmounts = Mapping[str, Quantity]
"""Amounts of resources by resource name: cpu, memory, hugepages-<size>."""


@dataclass(frozen=True, slots=True)
class UnknownAmount:
    """Placeholder for a resource amount that the pod's API object does not contain."""

    reason: str


class QosClass(StrEnum):
    """QoS class of a pod, as Kubernetes names it."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class ContainerRole(StrEnum):
    """Role of a container in its pod, which decides when it runs."""

    APP = "app"
    INIT = "init"
    """Init container: runs before the app containers, one after another."""
    SIDECAR = "sidecar"
    """Init container with ``restartPolicy: Always``: runs from its turn on, in parallel with all others."""


class ContainerClaimRef(NamedTuple):
    """Reference from a container to a claim of its pod: ``resources.claims[]``."""

    name: str
    """Name of the claim in the pod's spec."""
    request: str
    """Request of the claim that the container uses; empty: all requests."""


@dataclass(frozen=True, slots=True)
class PodContainer:
    """Container of a pod, with its requests, limits and state."""

    name: str
    role: ContainerRole
    requests: ResourceAmounts
    limits: ResourceAmounts
    claims: tuple[ContainerClaimRef, ...] = ()
    id: str = ""
    """Container id at the runtime; empty: the container has not started yet."""
    runtime: str = ""
    """Name of the container runtime: ``containerd``, ``cri-o``; empty: the container has not started yet."""
    started_wall_s: float | None = None
    """Time of the last start [s since 1970]; None: the container does not run."""
    granted_requests: ResourceAmounts | None = None
    """Requests in effect, other than ``requests`` during a resize (``allocatedResources``); None: unknown."""


@dataclass(frozen=True, slots=True)
class ClaimResources:
    """CPU, memory and hugepages that a ResourceClaim adds to its pod (KEP-5517).

    Source: ``status.nodeAllocatableResourceClaimStatuses[]``.
    """

    claim: str
    """Name of the ResourceClaim that adds the resources."""
    containers: tuple[str, ...]
    """Names of the containers that refer to the claim."""
    shared: ResourceAmounts
    """Amounts of resources that the claim's containers share."""
    per_pod: ResourceAmounts
    """Overhead for each pod that uses the claim."""
    per_container: ResourceAmounts
    """Overhead for each container that uses the claim."""

    def amount_for_pod(self, resource: str) -> Quantity | None:
        """Return the amount that the claim adds to its pod; None: the claim does not provide the resource."""
        if resource not in {*self.shared, *self.per_pod, *self.per_container}:
            return None
        each = self.per_container.get(resource, ZERO) * len(self.containers)
        return self.shared.get(resource, ZERO) + self.per_pod.get(resource, ZERO) + each

    def amount_for_container(self, container: str, resource: str) -> Quantity | None:
        """Return the amount that the claim adds to a container; None: the claim adds nothing."""
        if container not in self.containers or self.amount_for_pod(resource) is None:
            return None
        each = self.per_container.get(resource, ZERO)
        return self.shared.get(resource, ZERO) + self.per_pod.get(resource, ZERO) + each


class UnfinishedResize(NamedTuple):
    """In-place resize of a pod that has not finished."""

    pending: bool
    """True: the kubelet has not granted the resize; the cgroups are unchanged. False: it is in progress."""
    reason: str
    """Reason: ``Deferred``, ``Infeasible`` or ``Error`` from the pod status, or a text; may be empty."""
    since_wall_s: float | None
    """Time since which the resize is pending or in progress [s since 1970]; None: unknown."""


@dataclass(frozen=True, slots=True)
class Pod:
    """Pod with everything that its expected cgroup values depend on."""

    namespace: str
    name: str
    uid: str
    """UID of the pod object; for a static pod the UID of its mirror pod."""
    cgroup_uid: str
    """UID in the name of the pod's cgroup; for a static pod the hash of its manifest."""
    reported_qos: QosClass | None
    """QoS class in the pod's status; None: the status has none."""
    containers: tuple[PodContainer, ...]
    """Init containers and sidecars in their order, then app containers."""
    overhead: ResourceAmounts
    """``spec.overhead``: amounts for the pod's sandbox."""
    pod_level_requests: ResourceAmounts
    """Pod-level requests (``spec.resources``)."""
    pod_level_limits: ResourceAmounts
    claims: tuple[str, ...]
    """Names of the pod's ResourceClaims; for a claim not created yet, its name in the pod's spec."""
    claim_resources: tuple[ClaimResources, ...] | UnknownAmount
    """Resources that each claim adds; empty: no claim adds any."""
    phase: str = ""
    resize: UnfinishedResize | None = None
    is_critical: bool = False
    """True: a static pod, or a pod with the priority of a system class, such as system-cluster-critical."""
    is_node_critical: bool = False
    """True: a critical pod of the class system-node-critical, which the kernel kills last."""
    is_changed: bool = False
    """True: the pod's spec changed after it was created, so that running containers may have older values."""
    shared_claims: frozenset[str] = frozenset()
    """Names of claims that the pod declares to share with other pods on purpose."""

    @property
    def known_claim_resources(self) -> tuple[ClaimResources, ...]:
        """Resources that each of the pod's claims adds; empty: the claims add nothing, or the amounts are
        unknown."""
        return () if isinstance(self.claim_resources, UnknownAmount) else self.claim_resources

    @property
    def qos(self) -> QosClass:
        """QoS class from the pod's status or, if the status lacks it, computed from requests and limits."""
        return self.reported_qos or compute_qos_class(self)

    @property
    def is_active(self) -> bool:
        """True: the pod has not ended. False: its phase is Succeeded or Failed."""
        return self.phase not in {"Succeeded", "Failed"}

    @property
    def has_pod_level_resources(self) -> bool:
        """True: ``spec.resources`` has requests or limits."""
        return bool(self.pod_level_requests or self.pod_level_limits)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def compute_qos_class(pod: Pod) -> QosClass:
    """Compute the QoS class of a pod from its requests and limits, without the resources of claims.

    Source: kubelet v1.37.1, pkg/apis/core/v1/helper/qos.
    """
    if pod.has_pod_level_resources:
        return _qos_of(pod.pod_level_requests, pod.pod_level_limits)
    classes = {_qos_of(container.requests, container.limits) for container in pod.containers}
    if not classes:
        return QosClass.BEST_EFFORT
    return classes.pop() if len(classes) == 1 else QosClass.BURSTABLE


def _qos_of(requests: ResourceAmounts, limits: ResourceAmounts) -> QosClass:
    """Return the QoS class: Guaranteed if CPU and memory requests equal the limits, BestEffort if there are
    no amounts, else Burstable."""
    pairs = [(requests.get(name, ZERO), limits.get(name, ZERO)) for name in (CPU, MEMORY)]
    if not any(request or limit for request, limit in pairs):
        return QosClass.BEST_EFFORT
    equal = all(request == limit and request for request, limit in pairs)
    return QosClass.GUARANTEED if equal else QosClass.BURSTABLE
