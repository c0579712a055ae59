"""What the sources do not agree on. Shown with who says what, and decided by nobody.

A source that says nothing of something contradicts nobody: a claim that is not prepared yet has no devices in
the checkpoint, and podresources leaves out what the kubelet does not remember.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from agent.devices.identities import Identities, Naming, witness_order
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.consumers import (
    ClaimView,
    Conflict,
    ConflictKind,
    ConsumerEdge,
    DeviceEdge,
    PodView,
    Relation,
    Saying,
)
from agent.model.testimony import KnownPod, PodRef, Witness


def conflicts(
    who: Identities, claims: Mapping[ClaimRef, ClaimView], pods: Mapping[PodRef, PodView]
) -> tuple[Conflict, ...]:
    """All of them, by kind and subject."""
    found = [
        *_several_uids(ConflictKind.CLAIM_UIDS, "claim", who.claims),
        *_several_names(ConflictKind.CLAIM_NAMES, "claim", who.claims),
        *_several_uids(ConflictKind.POD_UIDS, "pod", who.pods),
        *_several_names(ConflictKind.POD_NAMES, "pod", who.pods),
    ]
    for view in claims.values():
        found += _devices(view)
        found += _not_named(view, pods)
    return tuple(sorted(found, key=lambda one: (list(ConflictKind).index(one.kind), one.subject)))


def _several_uids(kind: ConflictKind, what: str, naming: Naming) -> Iterator[Conflict]:
    for (namespace, name), uids in naming.by_name.items():
        if len(uids) > 1:
            sayings = _sayings((witness, f"UID {uid}") for uid, by in uids.items() for witness in by)
            yield Conflict(kind, f"{what} {namespace}/{name}", sayings)


def _several_names(kind: ConflictKind, what: str, naming: Naming) -> Iterator[Conflict]:
    for uid, names in naming.by_uid.items():
        if len(names) > 1:
            sayings = _sayings((witness, "/".join(name)) for name, by in names.items() for witness in by)
            yield Conflict(kind, f"{what} of UID {uid}", sayings)


def _devices(view: ClaimView) -> Iterator[Conflict]:
    """Drivers whose devices of the claim are not the same for all who name any."""

    def driver(edge: DeviceEdge) -> str:
        return edge.use.device.driver

    for name, edges in groupby(sorted(view.devices, key=driver), key=driver):
        sets: dict[Witness, set[DeviceRef]] = {}
        for edge in edges:
            sets.setdefault(edge.witness, set()).add(edge.use.device)
        if len(set(map(frozenset, sets.values()))) > 1:
            said = ((witness, _words(devices)) for witness, devices in sets.items())
            yield Conflict(ConflictKind.DEVICES, f"claim {view.ref}, driver {name}", _sayings(said))


def _not_named(view: ClaimView, pods: Mapping[PodRef, PodView]) -> Iterator[Conflict]:
    for edge in view.consumers:
        pod = pods.get(edge.consumer.pod) if edge.consumer.pod else None
        if pod is None or edge.relation is not Relation.PREPARED:
            continue
        others = [(obj, witness) for obj, witness in pod.objects if not names_claim(obj, view.ref.name)]
        if others:
            yield Conflict(
                ConflictKind.NOT_NAMED,
                f"claim {view.ref}, {_title(pod.ref)}",
                _sayings([(edge.witness, "prepared for the pod"), *_other_names(edge, others)]),
            )


def names_claim(pod: KnownPod, claim: str) -> bool:
    """Whether a pod names a claim, or may: what a claim made for it is called is not always known."""
    return any(one.claim in {claim, ""} for one in pod.claims)


def _other_names(
    edge: ConsumerEdge, others: Iterable[tuple[KnownPod, Witness]]
) -> Iterator[tuple[Witness, str]]:
    for obj, witness in others:
        names = ", ".join(sorted(one.claim for one in obj.claims))
        yield witness, f"the pod names {names or 'no claim'}"


def _sayings(said: Iterable[tuple[Witness, str]]) -> tuple[Saying, ...]:
    found = {Saying(*one) for one in said}
    return tuple(sorted(found, key=lambda one: (witness_order(one.witness), one.text)))


def _words(devices: set[DeviceRef]) -> str:
    return ", ".join(sorted(f"{device.pool}/{device.device}" for device in devices))


def _title(pod: PodRef) -> str:
    return f"pod {pod}" if pod.name else str(pod)
