"""Consumer map: ResourceClaims, their devices and the pods that use them.

An edge of the map is a relation between two of these objects, with the source that reports it.

agent.devices.consumers builds the map from the answers of the sources (agent.model.claim_sources).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    AllocatedDevice,
    ClaimObject,
    ConsumerKind,
    ContainerCgroup,
    Origin,
    PodObject,
    PodRef,
    Provenance,
)
from agent.model.reading import Absence


class Relation(StrEnum):
    """Way in which a claim is related to a device or to a consumer.

    The members that prove a use most strongly come first.
    """

    PREPARED = "prepared"
    """The driver prepared the device for the claim, at the kubelet's request for the pod."""
    LISTED = "listed"
    """The kubelet lists the device or the pod with the claim in podresources."""
    ALLOCATED = "allocated"
    """The scheduler allocated the device to the claim; it need not be prepared, or be on this node."""
    RESERVED = "reserved"
    """The claim is reserved for the consumer, which need not run, or run on this node."""
    NAMED = "named"
    """The pod's spec names the claim. Another claim of the same name may be meant."""


class ClaimConsumer(NamedTuple):
    """Consumer of a claim: a pod, a pod group or another object."""

    kind: ConsumerKind
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource: str = ""
    """Resource of a consumer that is not a pod: ``podgroups.scheduling.k8s.io``."""

    @property
    def pod(self) -> PodRef | None:
        """Identity of the consumer if it is a pod; None: the consumer is not a pod."""
        return PodRef(self.namespace, self.name, self.uid) if self.kind is ConsumerKind.POD else None


class DeviceEdge(NamedTuple):
    """Edge of the consumer map: relation between a claim and a device, as one source reports it."""

    claim: ClaimRef
    use: AllocatedDevice
    relation: Relation
    provenance: Provenance
    by_name: bool = False
    """True: the source gives no UID, so the claim was found by its name. False: found by its UID."""


class ClaimConsumerEdge(NamedTuple):
    """Edge of the consumer map: relation between a claim and a consumer, as one source reports it."""

    claim: ClaimRef
    consumer: ClaimConsumer
    relation: Relation
    provenance: Provenance
    by_name: bool = False
    """True: claim or consumer was found by its name, since the source lacks a UID. False: found by UIDs."""


class ContainerEdge(NamedTuple):
    """Edge of the consumer map: relation between a claim and a container, as one source reports it."""

    claim: ClaimRef
    pod: PodRef
    container: str
    requests: tuple[str, ...] | None
    """Requests of the claim that the container uses; empty: all requests; None: unknown."""
    provenance: Provenance
    by_name: bool = False


class ConflictKind(StrEnum):
    """Kind of contradiction between sources: the property of an object on which the sources disagree."""

    CLAIM_UIDS = "claim-uids"
    """One claim name has two UIDs: the claim was created again, and a source is outdated."""
    CLAIM_NAMES = "claim-names"
    """One claim UID has two names."""
    POD_UIDS = "pod-uids"
    POD_NAMES = "pod-names"
    DEVICES = "devices"
    """Sources list different devices of one driver for a claim."""
    NOT_NAMED = "not-named"
    """A claim is prepared for a pod whose spec does not name it."""
    CONTAINERS = "containers"
    """By the pod's status a container runs, but the container has no cgroup."""


class ConflictingStatement(NamedTuple):
    """Statement of one source about a claim, pod or device that contradicts that of another source."""

    provenance: Provenance
    text: str


class Conflict(NamedTuple):
    """Contradiction between sources about a claim, pod or device.

    The agent reports every statement and does not decide which is right.
    """

    kind: ConflictKind
    subject: str
    """Claim, pod or driver that the contradiction concerns, as text."""
    assertions: tuple[ConflictingStatement, ...]
    claims: tuple[ClaimRef, ...] = ()
    """Claims that the conflict concerns, under all names of each claim."""
    pods: tuple[PodRef, ...] = ()
    """Pods that the conflict concerns."""


class MissingSource(NamedTuple):
    """Error of a source that the consumer map is built from: the source gave no answer, or a part of its
    answer is invalid."""

    provenance: Provenance
    absence: Absence
    reason: str


@dataclass(frozen=True, slots=True)
class ClaimView:
    """Information of all sources about one claim."""

    ref: ClaimRef
    devices: tuple[DeviceEdge, ...] = ()
    consumers: tuple[ClaimConsumerEdge, ...] = ()
    containers: tuple[ContainerEdge, ...] = ()
    objects: tuple[tuple[ClaimObject, Provenance], ...] = ()
    """ResourceClaim objects, the best source first; empty: no source has the object."""
    waiting: tuple[str, ...] = ()
    """Drivers that have no device for the claim yet: it is not prepared by them, unless they are in
    ``skipped``."""
    skipped: tuple[str, ...] = ()
    """Drivers that the kubelet does not call to prepare the claim, so that it does not know their devices."""


@dataclass(frozen=True, slots=True)
class PodView:
    """Information of all sources about one pod."""

    ref: PodRef
    objects: tuple[tuple[PodObject, Provenance], ...] = ()
    """Pod objects, the best source first: the kubelet before files; empty: no source has the object."""
    claims: tuple[ClaimRef, ...] = ()
    running: bool | None = None
    """True: the pod has processes; None: unknown."""
    live: tuple[ContainerCgroup, ...] = ()
    """Cgroups of the pod's containers that exist now."""

    @property
    def known(self) -> PodObject | None:
        """Pod object from the best source that has it; None: no source has the pod object."""
        return self.objects[0][0] if self.objects else None

    @property
    def has_ended(self) -> bool:
        """True if the pod has succeeded or failed.

        The result is False also if no source has the pod object.
        """
        return self.known is not None and self.known.has_ended


@dataclass(frozen=True, slots=True)
class ConsumerMap:
    """Consumer map: claims, devices and pods of this Kubernetes node, and which of them belong together."""

    claims: Mapping[ClaimRef, ClaimView] = field(default_factory=dict)
    """Claims by identity; a UID is empty if only the claim's name is known."""
    pods: Mapping[PodRef, PodView] = field(default_factory=dict)
    devices: Mapping[DeviceRef, tuple[ClaimRef, ...]] = field(default_factory=dict)
    """Claims that a device is allocated to or prepared for, by device."""
    groups: Mapping[tuple[str, str], tuple[PodRef, ...]] = field(default_factory=dict)
    """Pods of each pod group, by (namespace, name of the group)."""
    conflicts: tuple[Conflict, ...] = ()
    missing_sources: tuple[MissingSource, ...] = ()
    complete: frozenset[Origin] = frozenset()
    """Sources whose answer is complete: an object that such a source does not list does not exist."""


class ContainerUse(NamedTuple):
    """Container that uses, or may use, a device."""

    name: str
    is_certain: bool
    """True: the container uses the device. False: it uses the claim, but perhaps not this device."""


@dataclass(frozen=True, slots=True)
class AffectedPod:
    """A pod that uses, or may use, a device, so that a fault of the device affects the pod."""

    pod: PodView
    claim: ClaimRef
    is_certain: bool
    """True: the claim is prepared for the pod on this node. False: for example, it is only reserved."""
    containers: tuple[ContainerUse, ...]
    group: str = ""
    """Pod group through which the pod uses the claim; empty: the pod itself is the consumer."""
    edges: tuple[DeviceEdge | ClaimConsumerEdge | ContainerEdge, ...] = ()
    """Edges of the consumer map that show the pod's use of the device."""
