"""The part of a pod that determines its cgroups, and the QoS class.

An amount that the pod's object does not contain is an :class:`UnknownAmount` with the reason, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.allocatable.quantity import ZERO, Quantity

CPU: Final = "cpu"
MEMORY: Final = "memory"
HUGEPAGES: Final = "hugepages-"
"""Prefix of the names of hugepage resources; the page size follows."""

Resources = Mapping[str, Quantity]
"""Amounts by resource: cpu, memory, hugepages-<size>."""


@dataclass(frozen=True, slots=True)
class UnknownAmount:
    """An amount that is unknown, with the reason."""

    why: str


class Qos(StrEnum):
    """QoS classes, as Kubernetes names them."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class Role(StrEnum):
    """Role of a container in its pod, which decides when the container runs."""

    APP = "app"
    INIT = "init"
    """Init container: runs before the app containers, one after another."""
    SIDECAR = "sidecar"
    """Init container with ``restartPolicy: Always``: runs from its turn on, in parallel with all others."""


class PodContainerClaim(NamedTuple):
    """Reference of a container to a claim of its pod."""

    name: str
    """Name of the claim in the pod's spec."""
    request: str
    """Request of the claim that the container uses; empty: all requests."""


@dataclass(frozen=True, slots=True)
class PodContainer:
    """A container of a pod with its resources."""

    name: str
    role: Role
    requests: Resources
    limits: Resources
    claims: tuple[PodContainerClaim, ...] = ()
    id: str = ""
    """Container id at the runtime; empty: the container has not started yet."""
    runtime: str = ""
    """Runtime: ``containerd``, ``cri-o``; empty if ``id`` is empty."""
    started_wall_s: float | None = None
    """Time of the last start [s since 1970]; None: the container does not run."""
    allocated: Resources | None = None
    """Requests that the kubelet has granted, from the status; None: unknown."""


@dataclass(frozen=True, slots=True)
class ClaimGrant:
    """Resources that a claim adds to the pod (KEP-5517).

    Source: ``status.nodeAllocatableResourceClaimStatuses[]``.
    """

    claim: str
    """Name of the ResourceClaim."""
    containers: tuple[str, ...]
    """Containers that refer to the claim."""
    mapping: Resources
    """Resources that the devices provide, shared by the containers."""
    per_pod: Resources
    """Overhead of the devices per pod."""
    per_container: Resources
    """Overhead of the devices per container."""

    def to_pod(self, resource: str) -> Quantity | None:
        """Return the amount of a resource that the claim adds to the pod; None: the claim lacks the
        resource."""
        if resource not in {*self.mapping, *self.per_pod, *self.per_container}:
            return None
        each = self.per_container.get(resource, ZERO) * len(self.containers)
        return self.mapping.get(resource, ZERO) + self.per_pod.get(resource, ZERO) + each

    def to_container(self, name: str, resource: str) -> Quantity | None:
        """Return the amount of a resource that the claim adds to a container; None: the container does not
        use the claim, or the claim lacks the resource."""
        if name not in self.containers or self.to_pod(resource) is None:
            return None
        each = self.per_container.get(resource, ZERO)
        return self.mapping.get(resource, ZERO) + self.per_pod.get(resource, ZERO) + each


class Resize(NamedTuple):
    """An in-place resize that is not finished."""

    pending: bool
    """True: the kubelet has not granted the resize, and the cgroups are unchanged. False: the resize is in
    progress."""
    reason: str
    """Reason from the pod status: ``Deferred``, ``Infeasible``, ``Error``; may be empty."""
    since_wall_s: float | None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod with everything that determines its cgroups."""

    namespace: str
    name: str
    uid: str
    """UID of the pod object; for a static pod the UID of its mirror pod."""
    cgroup_uid: str
    """UID in the name of the pod's cgroup."""
    reported_qos: Qos | None
    """QoS class from the status, which the kubelet uses; None: the status has none."""
    containers: tuple[PodContainer, ...]
    """Init containers and sidecars in their order, then app containers."""
    overhead: Resources
    level_requests: Resources
    """Pod-level requests (``spec.resources``)."""
    level_limits: Resources
    claims: tuple[str, ...]
    """Names of the pod's ResourceClaims; for a claim not created yet, its name in the pod's spec."""
    grants: tuple[ClaimGrant, ...] | UnknownAmount
    phase: str = ""
    resize: Resize | None = None

    @property
    def qos(self) -> Qos:
        """QoS class that the kubelet uses: from the status, else computed."""
        return self.reported_qos or computed_qos(self)

    @property
    def active(self) -> bool:
        """Whether the pod has not ended."""
        return self.phase not in {"Succeeded", "Failed"}

    @property
    def has_level(self) -> bool:
        """Whether the pod has pod-level requests or limits."""
        return bool(self.level_requests or self.level_limits)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def computed_qos(pod: Pod) -> Qos:
    """Compute the QoS class of a pod from its requests and limits; claims do not count.

    Source: kubelet v1.37.1, pkg/apis/core/v1/helper/qos.
    """
    if pod.has_level:
        return _qos_of(pod.level_requests, pod.level_limits)
    classes = {_qos_of(container.requests, container.limits) for container in pod.containers}
    if not classes:
        return Qos.BEST_EFFORT
    return classes.pop() if len(classes) == 1 else Qos.BURSTABLE


def _qos_of(requests: Resources, limits: Resources) -> Qos:
    """Compute the QoS class: Guaranteed needs equal CPU and memory requests and limits; a missing amount is
    zero."""
    pairs = [(requests.get(name, ZERO), limits.get(name, ZERO)) for name in (CPU, MEMORY)]
    if not any(request or limit for request, limit in pairs):
        return Qos.BEST_EFFORT
    equal = all(request == limit and request for request, limit in pairs)
    return Qos.GUARANTEED if equal else Qos.BURSTABLE
