"""Map of claims, their devices and their consumers; each edge names the source that reported it.

The answers of the sources are in agent.model.claim_sources; agent.devices.consumers joins them into one map.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    ConsumerKind,
    DeviceUse,
    KnownClaim,
    KnownPod,
    LiveContainer,
    Origin,
    PodRef,
    Provenance,
)
from agent.model.reading import Absence


class Relation(StrEnum):
    """Relation between a claim and a device or consumer; members are ordered, strongest proof first."""

    PREPARED = "prepared"
    """The driver prepared the device for the claim, at the kubelet's request for the pod."""
    LISTED = "listed"
    """The kubelet lists the device or the pod with the claim in podresources."""
    ALLOCATED = "allocated"
    """The scheduler allocated the device to the claim: on any node, prepared or not."""
    RESERVED = "reserved"
    """The claim is reserved for the consumer: on any node, now or later."""
    NAMED = "named"
    """The pod's spec names the claim."""


class Consumer(NamedTuple):
    """Consumer of a claim: a pod, a pod group or another object."""

    kind: ConsumerKind
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource: str = ""
    """Resource of a consumer that is not a pod: ``podgroups.scheduling.k8s.io``."""

    @property
    def pod(self) -> PodRef | None:
        """Identity of the pod; None: the consumer is not a pod."""
        return PodRef(self.namespace, self.name, self.uid) if self.kind is ConsumerKind.POD else None


class DeviceEdge(NamedTuple):
    """Edge between a claim and a device."""

    claim: ClaimRef
    use: DeviceUse
    relation: Relation
    provenance: Provenance
    by_name: bool = False
    """True: the source gives no UID, and the claim was found by its unique name. False: found by UID."""


class ConsumerEdge(NamedTuple):
    """Edge between a claim and a consumer."""

    claim: ClaimRef
    consumer: Consumer
    relation: Relation
    provenance: Provenance
    by_name: bool = False
    """True: the source lacks the UID of the claim, the consumer or both. False: it has both UIDs."""


class ContainerEdge(NamedTuple):
    """Edge between a claim and a container."""

    claim: ClaimRef
    pod: PodRef
    container: str
    requests: tuple[str, ...] | None
    """Requests of the claim that the container uses; empty: all; None: unknown."""
    provenance: Provenance
    by_name: bool = False


class ConflictKind(StrEnum):
    """Fact on which sources disagree."""

    CLAIM_UIDS = "claim-uids"
    """Two claims have one name: the claim was deleted and created again, and a source is not up to date."""
    CLAIM_NAMES = "claim-names"
    POD_UIDS = "pod-uids"
    POD_NAMES = "pod-names"
    DEVICES = "devices"
    """Sources list different devices of one driver for a claim."""
    NOT_NAMED = "not-named"
    """A claim is prepared for a pod whose spec does not name it."""
    CONTAINERS = "containers"
    """A container runs by its pod's status and has no cgroup."""


class Assertion(NamedTuple):
    """Statement of one source in a conflict."""

    provenance: Provenance
    text: str


class Conflict(NamedTuple):
    """Contradiction between sources. The agent reports all sides and does not decide."""

    kind: ConflictKind
    subject: str
    assertions: tuple[Assertion, ...]
    claims: tuple[ClaimRef, ...] = ()
    """Claims that the conflict concerns, under all names of each claim."""
    pods: tuple[PodRef, ...] = ()
    """Pods that the conflict concerns."""


class MissingSource(NamedTuple):
    """A source that gave no answer."""

    provenance: Provenance
    absence: Absence
    why: str


@dataclass(frozen=True, slots=True)
class ClaimView:
    """All facts that the sources report about one claim."""

    ref: ClaimRef
    devices: tuple[DeviceEdge, ...] = ()
    consumers: tuple[ConsumerEdge, ...] = ()
    containers: tuple[ContainerEdge, ...] = ()
    objects: tuple[tuple[KnownClaim, Provenance], ...] = ()
    waiting: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    """Drivers that the kubelet does not call, so that it does not know their devices."""


@dataclass(frozen=True, slots=True)
class PodView:
    """All facts that the sources report about one pod."""

    ref: PodRef
    objects: tuple[tuple[KnownPod, Provenance], ...] = ()
    """Objects of the pod, the best source first: from the kubelet before from files."""
    claims: tuple[ClaimRef, ...] = ()
    running: bool | None = None
    """Whether the pod has processes; None: unknown."""
    live: tuple[LiveContainer, ...] = ()

    @property
    def known(self) -> KnownPod | None:
        """Object of the pod from the best source; None: there is none."""
        return self.objects[0][0] if self.objects else None

    @property
    def has_ended(self) -> bool:
        """Whether the pod's object has a final phase; False without an object."""
        return self.known is not None and self.known.has_ended


@dataclass(frozen=True, slots=True)
class ConsumerMap:
    """Claims, pods and devices of this node. Claims are keyed by UID, since names can be reused."""

    claims: Mapping[ClaimRef, ClaimView] = field(default_factory=dict)
    """Claims by identity; a claim without a UID is known by name alone."""
    pods: Mapping[PodRef, PodView] = field(default_factory=dict)
    devices: Mapping[DeviceRef, tuple[ClaimRef, ...]] = field(default_factory=dict)
    """Claims that sources report for each device."""
    groups: Mapping[tuple[str, str], tuple[PodRef, ...]] = field(default_factory=dict)
    """Pods of each pod group, by (namespace, name)."""
    conflicts: tuple[Conflict, ...] = ()
    missing_sources: tuple[MissingSource, ...] = ()
    complete: frozenset[Origin] = frozenset()
    """Sources whose answer is complete: what they do not list does not exist."""


class ContainerUse(NamedTuple):
    """Use of a device by a container."""

    name: str
    sure: bool
    """Whether the use is certain. False: the container uses the claim, but its requests are unknown."""


@dataclass(frozen=True, slots=True)
class Affected:
    """A pod that an unhealthy device affects, or may affect."""

    pod: PodView
    claim: ClaimRef
    sure: bool
    """Whether the claim is prepared for the pod on this node. False: for example, only reserved."""
    containers: tuple[ContainerUse, ...]
    group: str = ""
    """Pod group through which the pod uses the claim; empty: the pod itself is the consumer."""
    edges: tuple[DeviceEdge | ConsumerEdge | ContainerEdge, ...] = ()
    """Edges that prove the pod's use of the device, with their sources."""
