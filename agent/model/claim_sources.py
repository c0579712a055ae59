"""Answers of the node's sources about claims, pods and devices, each with its origin and time.

Each value holds the facts of one source; a field that the source lacks is empty. agent.model.consumers has
the map that joins all answers.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import Health
from agent.model.reading import Absence
from agent.model.time import Instant

T = TypeVar("T")

SCHEDULING_GROUP: Final = "scheduling.k8s.io"
"""The API group of PodGroups."""


# --- sources and their answers -----------------------------------------------------------------------------


class Origin(StrEnum):
    """Source of information about claims and pods."""

    CHECKPOINT = "checkpoint"
    """The kubelet's ``dra_manager_state``."""
    PODRESOURCES = "podresources"
    """The kubelet's podresources API, v1."""
    PODS_API = "pods-api"
    """The kubelet's pods API."""
    DRIVER = "driver"
    """Prepare calls of a driver."""
    CGROUPS = "cgroups"
    """The cgroup tree below kubepods."""
    HEALTH_STATE = "health-state"
    """The kubelet's ``dra_health_state``."""
    PODS_FILE = "pods-file"
    """Pod objects in a file that the operator names."""
    CLAIMS_FILE = "claims-file"
    """ResourceClaim objects in a file that the operator names."""


class Provenance(NamedTuple):
    """Origin and time of an answer."""

    origin: Origin
    read: Instant
    """Time when the agent read the file or got the answer."""
    written_s: float | None = None
    """Time when the file was written [s since 1970]; None: the source answered the request directly."""


@dataclass(frozen=True)  # with slots, SourceAnswer[X](...) is a TypeError in Python 3.11
class SourceAnswer(Generic[T]):
    """Complete answer of one source at one moment, or the reason why there is none."""

    provenance: Provenance
    items: tuple[T, ...] = ()
    absence: Absence | None = None
    """Kind of failure. None: none; ABSENT: the node lacks the source; UNREADABLE: it could not be read."""
    reason: str = ""
    """Reason why the source gave no answer; empty: the source answered."""
    invalid: tuple[str, ...] = ()
    """Parts of the answer that could not be parsed, each with its place; the rest is in ``items``."""

    @property
    def is_complete(self) -> bool:
        """Whether ``items`` is everything that the source has: an item that is missing does not exist."""
        return self.absence is None and not self.invalid


# --- contents of the answers -------------------------------------------------------------------------------


class PodRef(NamedTuple):
    """Identity of a pod; parts that are unknown are empty."""

    namespace: str = ""
    name: str = ""
    uid: str = ""
    """UID as the kubelet uses it; for a static pod the hash of its configuration."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.name else f"pod {self.uid}"


class DeviceUse(NamedTuple):
    """Allocation of one device to a claim."""

    device: DeviceRef
    requests: tuple[str, ...] = ()
    """Requests of the claim that the device serves, without subrequests; empty: unknown."""
    share_id: str = ""
    """Id of the claim's share of a device that several claims consume; empty: the whole device."""


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A claim that is prepared on this node, or is being prepared."""

    ref: ClaimRef
    devices: tuple[DeviceUse, ...] = ()
    pods: tuple[str, ...] = ()
    """UIDs of the pods that the claim is prepared for; empty in a driver's answer."""
    waiting: tuple[str, ...] = ()
    """Drivers of the claim that have no device yet: not prepared, unless in ``skipped``."""
    skipped: tuple[str, ...] = ()
    """Drivers that the kubelet does not call, so that it does not know their devices."""
    cdi: tuple[tuple[str, DeviceRef], ...] = ()
    """CDI ids and their devices. The pod's status lists a device under its first id."""


class ListedClaim(NamedTuple):
    """A claim of a container in podresources."""

    namespace: str
    name: str
    devices: tuple[DeviceUse, ...] = ()
    """All devices of the claim, whichever of its requests the container names."""


class ListedContainer(NamedTuple):
    """A container of a pod in podresources."""

    name: str
    claims: tuple[ListedClaim, ...] = ()


class ListedPod(NamedTuple):
    """A pod in podresources."""

    namespace: str
    name: str
    containers: tuple[ListedContainer, ...] = ()


class Owner(NamedTuple):
    """Owner of an object. Source: ``metadata.ownerReferences[]``."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
    """Whether the owner is the managing controller; at most one owner of an object is."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class PodClaim(NamedTuple):
    """An entry of a pod's ``spec.resourceClaims``."""

    name: str
    claim: str
    """Name of the ResourceClaim; empty: not created yet, or not needed."""
    template: bool = False
    """Whether the claim was created from a template and is owned by the pod or its pod group."""


class ContainerClaim(NamedTuple):
    """A reference of a container to a claim of its pod."""

    name: str
    """Name of the entry in the pod's ``spec.resourceClaims``."""
    request: str = ""
    """Request of the claim that the container uses; empty: all."""


class Container(NamedTuple):
    """A container of a pod object."""

    name: str
    claims: tuple[ContainerClaim, ...] = ()
    id: str = ""
    """Id at the container runtime; empty: none yet, or unknown."""
    running: bool = False
    """Whether the pod's status reports the container as running."""


@dataclass(frozen=True, slots=True)
class KnownPod:
    """The part of a pod object that concerns claims and devices."""

    ref: PodRef
    node: str = ""
    phase: str = ""
    """``Pending``, ``Running``, ``Succeeded``, ``Failed``, ``Unknown``; empty: unknown."""
    owners: tuple[Owner, ...] = ()
    group: str = ""
    """Name of the pod's PodGroup; empty: none."""
    claims: tuple[PodClaim, ...] = ()
    containers: tuple[Container, ...] = ()
    """Containers in the order in which they start."""
    mirror_uid: str = ""
    """UID of the mirror pod in the API server, for a static pod."""

    @property
    def controller(self) -> Owner | None:
        """Managing controller, such as a ReplicaSet or a Job; None: there is none."""
        return next((owner for owner in self.owners if owner.controller), None)

    @property
    def has_ended(self) -> bool:
        """Whether no container of the pod will run again."""
        return self.phase in {"Succeeded", "Failed"}


class ConsumerKind(StrEnum):
    """Kind of object that a claim can be reserved for."""

    POD = "pod"
    POD_GROUP = "pod group"
    OTHER = "other"
    """Any other kind, known only from its entry in ``reservedFor``."""


class Reservation(NamedTuple):
    """A consumer that a claim is reserved for. Source: ``status.reservedFor[]``."""

    kind: ConsumerKind
    api_group: str
    resource: str
    """``pods``, ``podgroups``, ...; empty: unknown."""
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class KnownClaim:
    """The part of a ResourceClaim object that concerns devices and consumers."""

    ref: ClaimRef
    allocated: bool = False
    devices: tuple[DeviceUse, ...] = ()
    """Devices of all drivers, in the order of the allocation."""
    reserved: tuple[Reservation, ...] = ()
    """Consumers in the object's order, cluster-wide: it does not show which of them run on this node."""
    owner: Owner | None = None
    """Controller of the claim: the pod or pod group that it was created for."""
    meant_for: tuple[Reservation, ...] = ()
    """``spec.reservedFor`` of KEP-5194; no Kubernetes release has it."""
    any_pod: bool = False
    """``status.allocation.reservedForAnyPod`` of KEP-5194; no Kubernetes release has it."""


class LiveContainer(NamedTuple):
    """Cgroup of one container."""

    id: str
    running: bool | None
    """Whether the cgroup has processes; None: it cannot be read."""


class LivePod(NamedTuple):
    """Cgroup of one pod, with the cgroups of its containers."""

    uid: str
    running: bool | None
    containers: tuple[LiveContainer, ...] = ()


class KubeletHealthRecord(NamedTuple):
    """A device's health as the kubelet last wrote it to ``dra_health_state``."""

    device: DeviceRef
    health: Health
    message: str
    updated_s: float
    """Time of the entry [s since 1970]; the kubelet writes changes only."""
    lease_s: float
    """Lease: how long the kubelet uses the health [s]; negative: the kubelet never uses it."""

    def has_lapsed(self, now_s: float) -> bool:
        """Return whether a kubelet that starts now, with this file alone, treats the device as Unknown.

        A kubelet that kept running may have received heartbeats since; the file does not show them.
        """
        return now_s - self.updated_s > self.lease_s


@dataclass(frozen=True, slots=True)
class SourceAnswers:
    """Answers of all sources, by content; each field has any number of sources in any order."""

    prepared: tuple[SourceAnswer[PreparedClaim], ...] = ()
    listed: tuple[SourceAnswer[ListedPod], ...] = ()
    pods: tuple[SourceAnswer[KnownPod], ...] = ()
    claims: tuple[SourceAnswer[KnownClaim], ...] = ()
    live: tuple[SourceAnswer[LivePod], ...] = ()
