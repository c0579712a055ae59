"""What each source of the node says of claims, pods and devices, and of when that is.

Words only: the sources fill them in, and what a source does not say is empty, never filled in from another.
What follows from all of them together is in agent.model.consumers.
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


# --- who said it -------------------------------------------------------------------------------------------


class Origin(StrEnum):
    """Who knows something of claims and pods."""

    CHECKPOINT = "checkpoint"
    """The kubelet's ``dra_manager_state``."""
    PODRESOURCES = "podresources"
    """The kubelet's podresources API, v1."""
    PODS_API = "pods-api"
    """The kubelet's pods API."""
    DRIVER = "driver"
    """A driver's own prepare calls."""
    CGROUPS = "cgroups"
    """The cgroup tree below kubepods."""
    HEALTH_STATE = "health-state"
    """The kubelet's ``dra_health_state``."""
    PODS_FILE = "pods-file"
    """Pod objects that somebody wrote into a file."""
    CLAIMS_FILE = "claims-file"
    """ResourceClaim objects likewise."""


class Provenance(NamedTuple):
    """Who said it, and when."""

    origin: Origin
    read: Instant
    """When it was read or answered."""
    written_s: float | None = None
    """When the file was written [s since 1970]; None: it was said when it was asked for."""


@dataclass(frozen=True)  # with slots, Told[X](...) is a TypeError in Python 3.11
class SourceAnswer(Generic[T]):
    """All that one source said at one moment, or why it said nothing."""

    witness: Provenance
    items: tuple[T, ...] = ()
    absence: Absence | None = None
    """Absent: the node does not have the source. Unreadable: it has, and it could not be used."""
    why: str = ""
    """Why there is nothing."""
    wrong: tuple[str, ...] = ()
    """Parts that could not be used, each with its place; the rest is in ``items``."""

    @property
    def is_whole(self) -> bool:
        """Whether all is there that the source has to say: who is not among the items is not there."""
        return self.absence is None and not self.wrong


# --- what the sources say ----------------------------------------------------------------------------------


class PodRef(NamedTuple):
    """Which pod, as far as that is known."""

    namespace: str = ""
    name: str = ""
    uid: str = ""
    """As the kubelet has it: of a static pod, the hash of its configuration."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.name else f"pod {self.uid}"


class DeviceUse(NamedTuple):
    """A device that a claim was given."""

    device: DeviceRef
    requests: tuple[str, ...] = ()
    """Those of the claim that it is for, without the names of alternatives; empty: not said."""
    share_id: str = ""
    """Of a device that several claims consume a part of."""


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A claim that was prepared on this node, or is about to be."""

    ref: ClaimRef
    devices: tuple[DeviceUse, ...] = ()
    pods: tuple[str, ...] = ()
    """UIDs of the pods that it was prepared for; a driver knows none."""
    waiting: tuple[str, ...] = ()
    """Drivers of the claim that have named no device: not prepared yet, if not skipped."""
    skipped: tuple[str, ...] = ()
    """Drivers that the kubelet does not call, so that it does not learn of their devices."""
    cdi: tuple[tuple[str, DeviceRef], ...] = ()
    """CDI ids, each with its device: under the first of a device's a pod's status has it."""


class ListedClaim(NamedTuple):
    """A claim that a container uses."""

    namespace: str
    name: str
    devices: tuple[DeviceUse, ...] = ()
    """All of the claim, whichever of its requests the container names."""


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
    """What an object belongs to. Source: ``metadata.ownerReferences[]``."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
    """Whether it manages the object: at most one does."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class PodClaim(NamedTuple):
    """A claim of a pod, by the pod's own name for it."""

    name: str
    claim: str
    """Name of the ResourceClaim; empty: it was not made yet, or is not needed."""
    template: bool = False
    """It was made for the pod or its pod group, and belongs to that."""


class ContainerClaim(NamedTuple):
    """A claim that a container names."""

    name: str
    """The pod's own name of it."""
    request: str = ""
    """Of the claim; empty: all."""


class Container(NamedTuple):
    """A container of a pod object."""

    name: str
    claims: tuple[ContainerClaim, ...] = ()
    id: str = ""
    """At the container runtime; empty: it has none yet, or nobody says."""
    running: bool = False
    """The status says that it runs."""


@dataclass(frozen=True, slots=True)
class KnownPod:
    """A pod object, as far as it says who uses what."""

    ref: PodRef
    node: str = ""
    phase: str = ""
    """``Pending``, ``Running``, ``Succeeded``, ``Failed``, ``Unknown``; empty: not said."""
    owners: tuple[Owner, ...] = ()
    group: str = ""
    """Name of its PodGroup; empty: it has none."""
    claims: tuple[PodClaim, ...] = ()
    containers: tuple[Container, ...] = ()
    """Those that start first come first."""
    mirror_uid: str = ""
    """Of a static pod: the UID of the object that stands for it in the API server."""

    @property
    def controller(self) -> Owner | None:
        """What manages it: a ReplicaSet, a Job, ...; None: nothing does."""
        return next((owner for owner in self.owners if owner.controller), None)

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will run again."""
        return self.phase in {"Succeeded", "Failed"}


class ConsumerKind(StrEnum):
    """What can hold a claim."""

    POD = "pod"
    POD_GROUP = "pod group"
    OTHER = "other"
    """Anything else: known by what its entry says, and by nothing more."""


class Reservation(NamedTuple):
    """One for whom a claim is reserved. Source: ``status.reservedFor[]``."""

    kind: ConsumerKind
    api_group: str
    resource: str
    """``pods``, ``podgroups``, ...; empty: not said."""
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class KnownClaim:
    """A ResourceClaim object, as far as it says who uses what."""

    ref: ClaimRef
    allocated: bool = False
    devices: tuple[DeviceUse, ...] = ()
    """Of all drivers, in the order of the allocation."""
    reserved: tuple[Reservation, ...] = ()
    """In its order: cluster-wide, so it does not say who runs here."""
    owner: Owner | None = None
    """Its controller: the pod or pod group that it was made for."""
    meant_for: tuple[Reservation, ...] = ()
    """``spec.reservedFor`` of KEP-5194, which no release has."""
    any_pod: bool = False
    """``status.allocation.reservedForAnyPod`` likewise."""


class LiveContainer(NamedTuple):
    """A container's cgroup."""

    id: str
    running: bool | None
    """Whether it has processes; None: it cannot be read."""


class LivePod(NamedTuple):
    """A pod's cgroup, and those in it."""

    uid: str
    running: bool | None
    containers: tuple[LiveContainer, ...] = ()


class Belief(NamedTuple):
    """What the kubelet last wrote of a device's health."""

    device: DeviceRef
    health: Health
    message: str
    heard_s: float
    """When it had heard so last, as it wrote [s since 1970]; what changes nothing is not written."""
    lease_s: float
    """How long it believes what it heard [s]; negative: never."""

    def has_lapsed(self, now_s: float) -> bool:
        """Whether a kubelet that begins now and knows nothing but the file takes it for Unknown.

        One that has run on has heard heartbeats since, or has not: the file cannot say.
        """
        return now_s - self.heard_s > self.lease_s


@dataclass(frozen=True, slots=True)
class SourceAnswers:
    """All that the sources said; of each kind any number of sources, in any order."""

    prepared: tuple[SourceAnswer[PreparedClaim], ...] = ()
    listed: tuple[SourceAnswer[ListedPod], ...] = ()
    pods: tuple[SourceAnswer[KnownPod], ...] = ()
    claims: tuple[SourceAnswer[KnownClaim], ...] = ()
    live: tuple[SourceAnswer[LivePod], ...] = ()
