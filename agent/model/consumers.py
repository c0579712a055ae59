"""Who uses a device: claims, their devices and their consumers, each edge with the source that says so.

Words only. What the sources say is in agent.model.claim_sources; agent.devices makes one map of it.
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
    """What joins a claim and a device, or a claim and its consumer. Ordered by how much it proves."""

    PREPARED = "prepared"
    """The driver gave the device; the kubelet asked for it on behalf of the pod."""
    LISTED = "listed"
    """The kubelet tells so in podresources."""
    ALLOCATED = "allocated"
    """The scheduler gave the device to the claim: on some node, prepared or not."""
    RESERVED = "reserved"
    """The claim may be used by it: on some node, now or later."""
    NAMED = "named"
    """The pod names the claim."""


class Consumer(NamedTuple):
    """Who holds a claim."""

    kind: ConsumerKind
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource: str = ""
    """Of anything but a pod: what it is, ``podgroups.scheduling.k8s.io``."""

    @property
    def pod(self) -> PodRef | None:
        """Which pod; None: it is none."""
        return PodRef(self.namespace, self.name, self.uid) if self.kind is ConsumerKind.POD else None


class DeviceEdge(NamedTuple):
    """A claim has a device."""

    claim: ClaimRef
    use: DeviceUse
    relation: Relation
    witness: Provenance
    by_name: bool = False
    """The witness told no UID: the claim is the only one of that name that is known."""


class ConsumerEdge(NamedTuple):
    """A claim has a consumer."""

    claim: ClaimRef
    consumer: Consumer
    relation: Relation
    witness: Provenance
    by_name: bool = False
    """The witness left out the UID of one of them, or of both."""


class ContainerEdge(NamedTuple):
    """A container uses a claim."""

    claim: ClaimRef
    pod: PodRef
    container: str
    requests: tuple[str, ...] | None
    """Those of the claim that it names; empty: all; None: not said."""
    witness: Provenance
    by_name: bool = False


class ConflictKind(StrEnum):
    """What sources do not agree on."""

    CLAIM_UIDS = "claim-uids"
    """Two claims of one name: it was deleted and made anew, and somebody has not noticed yet."""
    CLAIM_NAMES = "claim-names"
    POD_UIDS = "pod-uids"
    POD_NAMES = "pod-names"
    DEVICES = "devices"
    """Which devices of a driver a claim has."""
    NOT_NAMED = "not-named"
    """A claim was prepared for a pod that does not name it."""
    CONTAINERS = "containers"
    """A pod's status has a container run that has no cgroup."""


class Assertion(NamedTuple):
    """What one side of a conflict says."""

    witness: Provenance
    text: str


class Conflict(NamedTuple):
    """Sources that say different things; nobody here decides who is right."""

    kind: ConflictKind
    subject: str
    assertions: tuple[Assertion, ...]
    claims: tuple[ClaimRef, ...] = ()
    """Those that it is about, under every name that they have here..."""
    pods: tuple[PodRef, ...] = ()
    """...and the pods."""


class MissingSource(NamedTuple):
    """Something that nobody could say."""

    witness: Provenance
    absence: Absence
    why: str


@dataclass(frozen=True, slots=True)
class ClaimView:
    """A claim and all that was said of it."""

    ref: ClaimRef
    devices: tuple[DeviceEdge, ...] = ()
    consumers: tuple[ConsumerEdge, ...] = ()
    containers: tuple[ContainerEdge, ...] = ()
    objects: tuple[tuple[KnownClaim, Provenance], ...] = ()
    waiting: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    """As of :class:`PreparedClaim`."""


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod and what was said of it."""

    ref: PodRef
    objects: tuple[tuple[KnownPod, Provenance], ...] = ()
    """Best informed first: those that the kubelet told before those that stand in files."""
    claims: tuple[ClaimRef, ...] = ()
    running: bool | None = None
    """Whether it has processes; None: nobody says."""
    live: tuple[LiveContainer, ...] = ()

    @property
    def known(self) -> KnownPod | None:
        """The best object that there is of it."""
        return self.objects[0][0] if self.objects else None

    @property
    def has_ended(self) -> bool:
        """Whether its object says that nothing of it will run again."""
        return self.known is not None and self.known.has_ended


@dataclass(frozen=True, slots=True)
class ConsumerMap:
    """Who uses what on this node. Claims by UID: a name is given again within seconds."""

    claims: Mapping[ClaimRef, ClaimView] = field(default_factory=dict)
    """One without a UID is known by its name alone."""
    pods: Mapping[PodRef, PodView] = field(default_factory=dict)
    devices: Mapping[DeviceRef, tuple[ClaimRef, ...]] = field(default_factory=dict)
    """The claims of each device."""
    groups: Mapping[tuple[str, str], tuple[PodRef, ...]] = field(default_factory=dict)
    """The pods of each pod group, by namespace and name."""
    conflicts: tuple[Conflict, ...] = ()
    gaps: tuple[MissingSource, ...] = ()
    whole: frozenset[Origin] = frozenset()
    """Who said all that there is to say: what these do not tell of is not there."""


class ContainerUse(NamedTuple):
    """A container and a device."""

    name: str
    sure: bool
    """False: it uses the device's claim, and nobody says which requests of it."""


@dataclass(frozen=True, slots=True)
class Affected:
    """A pod that a sick device hurts, or may."""

    pod: PodView
    claim: ClaimRef
    sure: bool
    """The claim was prepared for the pod here, with that device. Else it may: it is reserved for it, say."""
    containers: tuple[ContainerUse, ...]
    group: str = ""
    """Name of the pod group through which it has the claim; empty: it has it itself."""
    edges: tuple[DeviceEdge | ConsumerEdge | ContainerEdge, ...] = ()
    """Who says so."""
