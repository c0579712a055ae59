"""Answers of the sources (kubelet, drivers, cgroups, files) about claims, pods and devices.

A field that a source does not report is empty. agent.devices.consumers joins the answers into the consumer
map (agent.model.consumers), which shows which pods use which devices.
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
"""API group of PodGroup objects, ``scheduling.k8s.io``."""


class Origin(StrEnum):
    """Kind of source that reports claims and pods on this Kubernetes node, such as the kubelet."""

    CHECKPOINT = "checkpoint"
    """The kubelet's checkpoint file ``dra_manager_state``."""
    PODRESOURCES = "podresources"
    """The kubelet's podresources API, v1."""
    PODS_API = "pods-api"
    """The kubelet's pods API."""
    DRIVER = "driver"
    """Prepare calls that a DRA driver received."""
    CGROUPS = "cgroups"
    """The cgroup tree below kubepods."""
    HEALTH_STATE = "health-state"
    """The kubelet's file ``dra_health_state``."""
    PODS_FILE = "pods-file"
    """Pod objects in a file that the operator names."""
    CLAIMS_FILE = "claims-file"
    """ResourceClaim objects in a file that the operator names."""


class Provenance(NamedTuple):
    """Kind of the source that gave an answer, and the times when the source was read and when its file was
    written."""

    origin: Origin
    read_at: Instant
    """Time when the agent read the source's file, or received the source's answer."""
    written_s: float | None = None
    """Time when the source's file was written [s since 1970]; None: the source is no file."""


@dataclass(frozen=True)  # with slots, SourceAnswer[X](...) is a TypeError in Python 3.11
class SourceAnswer(Generic[T]):
    """Answer of one source (kubelet, driver, cgroups or file) at one moment, or the reason why the source
    gave no answer."""

    provenance: Provenance
    items: tuple[T, ...] = ()
    absence: Absence | None = None
    """None: the source answered. ABSENT: the machine does not have the source. UNREADABLE: reading it
    failed."""
    reason: str = ""
    """Reason why the source gave no answer; empty: the source answered."""
    invalid: tuple[str, ...] = ()
    """Error text for each part of the answer that could not be parsed; the other parts are in ``items``."""

    @property
    def is_complete(self) -> bool:
        """True if the source answered and the whole answer was parsed.

        An object that is not in ``items`` then does not exist.
        """
        return self.absence is None and not self.invalid


class PodRef(NamedTuple):
    """Identity of a pod. A field that the source does not report is empty."""

    namespace: str = ""
    name: str = ""
    uid: str = ""
    """UID in the kubelet; for a static pod the hash of its configuration."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.name else f"pod {self.uid}"


class AllocatedDevice(NamedTuple):
    """Device that is allocated to a claim, with the requests that it serves."""

    device: DeviceRef
    requests: tuple[str, ...] = ()
    """Names of the claim's requests that the device serves, without subrequests. Empty: unknown or, in the
    kubelet's checkpoint, all requests."""
    share_id: str = ""
    """Id of the claim's share of a device that several claims consume; empty: the whole device."""


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A claim that is prepared, or being prepared, on this Kubernetes node."""

    ref: ClaimRef
    devices: tuple[AllocatedDevice, ...] = ()
    pods: tuple[str, ...] = ()
    """UIDs of the pods that the claim is prepared for; empty: the source is a driver, which does not know
    pods."""
    waiting: tuple[str, ...] = ()
    """Drivers that have no device for the claim yet: it is not prepared by them, unless they are in
    ``skipped``."""
    skipped: tuple[str, ...] = ()
    """Drivers that the kubelet does not call to prepare the claim, so that it does not know their devices."""
    cdi_ids: tuple[tuple[str, DeviceRef], ...] = ()
    """CDI ids as (CDI id, device). The pod's status lists a device under the first of its CDI ids."""


class PodResourcesClaim(NamedTuple):
    """A claim that the kubelet's podresources API lists for a container."""

    namespace: str
    name: str
    devices: tuple[AllocatedDevice, ...] = ()
    """All devices of the claim, also those that the container does not request."""


class PodResourcesContainer(NamedTuple):
    """A container that the kubelet's podresources API lists."""

    name: str
    claims: tuple[PodResourcesClaim, ...] = ()


class PodResourcesPod(NamedTuple):
    """A pod that the kubelet's podresources API lists."""

    namespace: str
    name: str
    containers: tuple[PodResourcesContainer, ...] = ()


class OwnerReference(NamedTuple):
    """Owner of a Kubernetes object. Source: ``metadata.ownerReferences[]``."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
    """True: the owner is the object's managing controller; at most one owner is."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class PodClaim(NamedTuple):
    """An entry of a pod's ``spec.resourceClaims``: one claim that the pod uses."""

    name: str
    claim: str
    """Name of the ResourceClaim; empty: not created yet, or not needed."""
    template: bool = False
    """True: the claim was created from a ResourceClaimTemplate, and its pod or pod group owns it."""


class ContainerClaim(NamedTuple):
    """An entry of a container's ``resources.claims``: a claim of the pod that the container uses."""

    name: str
    """Name of the claim in the pod's ``spec.resourceClaims``."""
    request: str = ""
    """Request of the claim that the container uses; empty: all."""


class ContainerObject(NamedTuple):
    """A container in a Pod object."""

    name: str
    claims: tuple[ContainerClaim, ...] = ()
    id: str = ""
    """Container id at the container runtime; empty: none yet, or unknown."""
    running: bool = False
    """True: by the pod's status the container runs."""


@dataclass(frozen=True, slots=True)
class PodObject:
    """The fields of a Pod object that concern claims and devices."""

    ref: PodRef
    node: str = ""
    phase: str = ""
    """``Pending``, ``Running``, ``Succeeded``, ``Failed``, ``Unknown``; empty: unknown."""
    owners: tuple[OwnerReference, ...] = ()
    group: str = ""
    """Name of the PodGroup that the pod belongs to; empty: none."""
    claims: tuple[PodClaim, ...] = ()
    containers: tuple[ContainerObject, ...] = ()
    """Containers in the order in which they start."""
    mirror_uid: str = ""
    """UID of a static pod's mirror pod in the API server; empty: not a static pod."""
    lacks_claim_names: bool = False
    """True: the object is the kubelet's own copy, which lacks the names of generated claims and of claims for
    extended resources."""

    @property
    def controller(self) -> OwnerReference | None:
        """Controller that manages the pod, such as a ReplicaSet or a Job; None: the pod has no controller."""
        return next((owner for owner in self.owners if owner.controller), None)

    @property
    def has_ended(self) -> bool:
        """True if the pod has succeeded or failed, so that none of its containers will run again."""
        return self.phase in {"Succeeded", "Failed"}


class ConsumerKind(StrEnum):
    """Kind of object that a claim can be reserved for."""

    POD = "pod"
    POD_GROUP = "pod group"
    OTHER = "other"
    """The claim is reserved for an object that is neither a pod nor a pod group."""


class Reservation(NamedTuple):
    """An object that a claim is reserved for. Source: ``status.reservedFor[]``."""

    kind: ConsumerKind
    api_group: str
    resource: str
    """Resource name of the object: ``pods``, ``podgroups``, ...; empty: unknown."""
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ClaimObject:
    """The fields of a ResourceClaim object that concern devices and consumers."""

    ref: ClaimRef
    allocated: bool = False
    devices: tuple[AllocatedDevice, ...] = ()
    """Devices of all drivers, in the order of the allocation."""
    reserved: tuple[Reservation, ...] = ()
    """Objects that the claim is reserved for, in the whole cluster: not all run on this Kubernetes node."""
    owner: OwnerReference | None = None
    """Controller of the claim: the pod or pod group that it was created for."""
    spec_reserved: tuple[Reservation, ...] = ()
    """``spec.reservedFor`` of KEP-5194; no Kubernetes release has it."""
    any_pod: bool = False
    """``status.allocation.reservedForAnyPod`` of KEP-5194; no Kubernetes release has it."""


class ContainerCgroup(NamedTuple):
    """Cgroup of one container, below the cgroup ``kubepods``, which holds all pods."""

    id: str
    running: bool | None
    """True: the cgroup has processes; None: the cgroup cannot be read."""


class PodCgroup(NamedTuple):
    """Cgroup of one pod, below the cgroup ``kubepods``, with the cgroups of the pod's containers."""

    uid: str
    running: bool | None
    """True: the cgroup has processes; None: the cgroup cannot be read."""
    containers: tuple[ContainerCgroup, ...] = ()


class WorkloadRef(NamedTuple):
    """Identity of an object that is neither a pod nor a claim, such as a Job or a Deployment."""

    api_group: str
    """API group of the object, such as ``batch``; empty: the core group."""
    resource: str
    """Resource name of the object, such as ``jobs``."""
    namespace: str
    name: str
    uid: str


class KubeletHealthRecord(NamedTuple):
    """Health of a device as the kubelet last wrote it to its file ``dra_health_state``."""

    device: DeviceRef
    health: Health
    message: str
    updated_s: float
    """Time when the kubelet last wrote a change of the health [s since 1970]."""
    lease_s: float
    """Lease: how long the kubelet uses the health [s]; negative: the kubelet never uses it."""

    def has_lapsed(self, now_s: float) -> bool:
        """Return True if the record's validity (its lease) is over: a kubelet that restarts now would treat
        the device as Unknown. A running kubelet may have received newer reports that the file does not show.
        """
        return now_s - self.updated_s > self.lease_s


@dataclass(frozen=True, slots=True)
class SourceAnswers:
    """Answers of all sources about claims and pods, grouped by the kind of object that an answer reports.

    Several sources can report one kind of object.
    """

    prepared: tuple[SourceAnswer[PreparedClaim], ...] = ()
    listed: tuple[SourceAnswer[PodResourcesPod], ...] = ()
    pods: tuple[SourceAnswer[PodObject], ...] = ()
    claims: tuple[SourceAnswer[ClaimObject], ...] = ()
    live: tuple[SourceAnswer[PodCgroup], ...] = ()
