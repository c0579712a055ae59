"""A pod as far as its cgroups follow from it: frozen values, and its QoS class.

What the pod's object does not say is :class:`Unsaid`, with the reason. It is never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.allocatable.quantity import ZERO, Quantity

CPU: Final = "cpu"
MEMORY: Final = "memory"
HUGEPAGES: Final = "hugepages-"
"""What the names of hugepages' resources begin with; their size follows."""

Resources = Mapping[str, Quantity]
"""Amounts by resource, of those that cgroups know: cpu, memory, hugepages-<size>."""


@dataclass(frozen=True, slots=True)
class Unsaid:
    """An amount that nobody knows, and why."""

    why: str


class Qos(StrEnum):
    """QoS classes, as Kubernetes names them."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class Role(StrEnum):
    """When a container runs."""

    APP = "app"
    INIT = "init"
    """Before the others, one after another."""
    SIDECAR = "sidecar"
    """An init container with ``restartPolicy: Always``: from its turn on, beside all others."""


class ContainerClaim(NamedTuple):
    """A claim that a container names."""

    name: str
    """Within the pod."""
    request: str
    """Of the claim; empty: all."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container."""

    name: str
    role: Role
    requests: Resources
    limits: Resources
    claims: tuple[ContainerClaim, ...] = ()
    id: str = ""
    """The runtime's; empty: it was not started yet."""
    runtime: str = ""
    """``containerd``, ``cri-o``; empty with the id."""
    started_wall_s: float | None = None
    """When it was last started; None: it does not run."""
    allocated: Resources | None = None
    """Requests that the kubelet has granted it, where the status says so."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a claim adds to the pod's node-allocatable resources (KEP-5517).

    Source: ``status.nodeAllocatableResourceClaimStatuses[]``.
    """

    claim: str
    """The ResourceClaim's name."""
    containers: tuple[str, ...]
    """That refer to it."""
    mapping: Resources
    """What its devices are; shared by the containers."""
    per_pod: Resources
    """What they need besides, once..."""
    per_container: Resources
    """...and for each container."""

    def to_pod(self, resource: str) -> Quantity | None:
        """What the pod is charged; None: the claim does not name the resource."""
        if resource not in {*self.mapping, *self.per_pod, *self.per_container}:
            return None
        each = self.per_container.get(resource, ZERO) * len(self.containers)
        return self.mapping.get(resource, ZERO) + self.per_pod.get(resource, ZERO) + each

    def to_container(self, name: str, resource: str) -> Quantity | None:
        """What one container may use more; None: the claim is not its, or names no such."""
        if name not in self.containers or self.to_pod(resource) is None:
            return None
        each = self.per_container.get(resource, ZERO)
        return self.mapping.get(resource, ZERO) + self.per_pod.get(resource, ZERO) + each


class Resize(NamedTuple):
    """A change of resources in place that is not done."""

    pending: bool
    """The kubelet has not granted it, so the cgroups stay as they were; else it is at work on it."""
    reason: str
    """``Deferred``, ``Infeasible``, ``Error``; may be empty."""
    since_wall_s: float | None


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod."""

    namespace: str
    name: str
    uid: str
    """Of its object. A static pod's is that of its mirror."""
    cgroup_uid: str
    """That its cgroup is named by."""
    stated_qos: Qos | None
    """As the status says; the kubelet goes by it. None: it does not."""
    containers: tuple[Container, ...]
    """Init containers and sidecars in their order, then the others."""
    overhead: Resources
    level_requests: Resources
    """Of the pod as a whole (``spec.resources``)."""
    level_limits: Resources
    claims: tuple[str, ...]
    """Names of the ResourceClaims that it refers to; of those not made yet, the name within the pod."""
    grants: tuple[Grant, ...] | Unsaid
    phase: str = ""
    resize: Resize | None = None

    @property
    def qos(self) -> Qos:
        """The class that the kubelet goes by: once stated, it does not change."""
        return self.stated_qos or computed_qos(self)

    @property
    def active(self) -> bool:
        """Whether it counts among the pods of the node."""
        return self.phase not in {"Succeeded", "Failed"}

    @property
    def has_level(self) -> bool:
        """Whether anything is asked for the pod as a whole."""
        return bool(self.level_requests or self.level_limits)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def computed_qos(pod: Pod) -> Qos:
    """The class that requests and limits make. Claims have no say in it.

    Source: kubelet v1.37.1, pkg/apis/core/v1/helper/qos.
    """
    if pod.has_level:
        return _qos_of(pod.level_requests, pod.level_limits)
    classes = {_qos_of(container.requests, container.limits) for container in pod.containers}
    if not classes:
        return Qos.BEST_EFFORT
    return classes.pop() if len(classes) == 1 else Qos.BURSTABLE


def _qos_of(requests: Resources, limits: Resources) -> Qos:
    """Both resources must be asked for, and alike: one that is missing counts as zero."""
    asked = [(requests.get(name, ZERO), limits.get(name, ZERO)) for name in (CPU, MEMORY)]
    if not any(request or limit for request, limit in asked):
        return Qos.BEST_EFFORT
    alike = all(request == limit and request for request, limit in asked)
    return Qos.GUARANTEED if alike else Qos.BURSTABLE
