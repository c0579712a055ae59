"""What the sources do not agree on. Shown with who says what, and decided by nobody.

A source that says nothing of something contradicts nobody: a claim that is not prepared yet has no devices in
the checkpoint, and podresources leaves out what the kubelet does not remember.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final

from agent.devices.consumers.identities import RANKS, Identities, Naming, witness_order
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import KnownPod, PodRef, Provenance
from agent.model.consumers import (
    Assertion,
    ClaimView,
    Conflict,
    ConflictKind,
    DeviceEdge,
    PodView,
    Relation,
)

_ORDER: Final = {kind: number for number, kind in enumerate(ConflictKind)}


def conflicts(
    who: Identities,
    claims: Mapping[ClaimRef, ClaimView],
    pods: Mapping[PodRef, PodView],
    cgroups: Provenance | None,
) -> tuple[Conflict, ...]:
    """All of them, by kind and subject.

    Args:
        cgroups: Who has seen all cgroups of pods; None: nobody has.
    """
    of_claims = _several("claim", who.claims, ConflictKind.CLAIM_UIDS, ConflictKind.CLAIM_NAMES)
    of_pods = _several("pod", who.pods, ConflictKind.POD_UIDS, ConflictKind.POD_NAMES)
    found = [one._replace(claims=tuple(ClaimRef(*ref) for ref in refs)) for one, refs in of_claims]
    found += [one._replace(pods=tuple(PodRef(*ref) for ref in refs)) for one, refs in of_pods]
    for claim in claims.values():
        found += _devices(claim)
        found += _not_named(claim, pods)
    if cgroups is not None:
        for pod in pods.values():
            found += _containers(pod, cgroups)
    return tuple(sorted(found, key=lambda one: (_ORDER[one.kind], one.subject)))


def _several(
    what: str, naming: Naming, of_name: ConflictKind, of_uid: ConflictKind
) -> Iterator[tuple[Conflict, list[tuple[str, str, str]]]]:
    """Names that have several UIDs and UIDs that have several names, each with all of whom it is: namespace,
    name and UID."""
    for name, uids in naming.by_name.items():
        if len(uids) > 1:
            sayings = _sayings((witness, f"UID {uid}") for uid, by in uids.items() for witness in by)
            refs = {(*(naming.name_of(uid) or name), uid) for uid in uids} | {(*name, "")}
            yield Conflict(of_name, f"{what} {'/'.join(name)}", sayings), sorted(refs)
    for uid, names in naming.by_uid.items():
        if len(names) > 1:
            sayings = _sayings((witness, "/".join(name)) for name, by in names.items() for witness in by)
            yield Conflict(of_uid, f"{what} of UID {uid}", sayings), sorted((*name, uid) for name in names)


def _devices(view: ClaimView) -> Iterator[Conflict]:
    """Drivers whose devices of the claim are not the same for all who name any."""

    def driver(edge: DeviceEdge) -> str:
        return edge.use.device.driver

    for name, edges in groupby(sorted(view.devices, key=driver), key=driver):
        sets: dict[Provenance, set[DeviceRef]] = {}
        for edge in edges:
            sets.setdefault(edge.witness, set()).add(edge.use.device)
        if len(set(map(frozenset, sets.values()))) > 1:
            said = ((witness, _words(devices)) for witness, devices in sets.items())
            subject = f"claim {view.ref}, driver {name}"
            yield Conflict(ConflictKind.DEVICES, subject, _sayings(said), claims=(view.ref,))


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
                _sayings([(edge.witness, "prepared for the pod"), *_other_names(others)]),
                claims=(view.ref,),
                pods=(pod.ref,),
            )


def _containers(pod: PodView, cgroups: Provenance) -> Iterator[Conflict]:
    """Containers that the kubelet says run, and that have no cgroup. Of a saved object they may have ended
    since."""
    live = {one.id for one in pod.live}
    for obj, witness in pod.objects:
        gone = [one for one in obj.containers if one.running and one.id and one.id not in live]
        if gone and RANKS[witness.origin] == RANKS[cgroups.origin]:
            said = [(witness, f"container {one.name} runs as {one.id}") for one in gone]
            said += [(cgroups, f"no cgroup of {one.id}") for one in gone]
            yield Conflict(ConflictKind.CONTAINERS, _title(pod.ref), _sayings(said), pods=(pod.ref,))


def names_claim(pod: KnownPod, claim: str) -> bool:
    """Whether a pod names a claim, or may: what a claim made for it is called is not always known."""
    return any(one.claim in {claim, ""} for one in pod.claims)


def _other_names(others: Iterable[tuple[KnownPod, Provenance]]) -> Iterator[tuple[Provenance, str]]:
    for obj, witness in others:
        names = ", ".join(sorted(one.claim for one in obj.claims))
        yield witness, f"the pod names {names or 'no claim'}"


def _sayings(said: Iterable[tuple[Provenance, str]]) -> tuple[Assertion, ...]:
    found = {Assertion(*one) for one in said}
    return tuple(sorted(found, key=lambda one: (witness_order(one.witness), one.text)))


def _words(devices: set[DeviceRef]) -> str:
    return ", ".join(sorted(f"{device.pool}/{device.device}" for device in devices))


def _title(pod: PodRef) -> str:
    return f"pod {pod}" if pod.name else str(pod)
