"""Conflicts between the sources of the consumer map. The agent reports the facts of all sources and decides
no conflict.

A source without a fact contradicts no other source: a claim that is not prepared yet has no devices in the
checkpoint, and podresources leaves out what the kubelet does not remember.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final

from agent.devices.consumers.identities import RANKS, Identities, UidsAndNames, provenance_order
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
    names: Identities,
    claims: Mapping[ClaimRef, ClaimView],
    pods: Mapping[PodRef, PodView],
    cgroups: Provenance | None,
) -> tuple[Conflict, ...]:
    """Return all conflicts between sources, sorted by kind and by the object that they concern.

    Args:
        cgroups: Source that has read all cgroups of pods; None: there is none.
    """
    of_claims = _several("claim", names.claims, ConflictKind.CLAIM_UIDS, ConflictKind.CLAIM_NAMES)
    of_pods = _several("pod", names.pods, ConflictKind.POD_UIDS, ConflictKind.POD_NAMES)
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
    what: str, naming: UidsAndNames, of_name: ConflictKind, of_uid: ConflictKind
) -> Iterator[tuple[Conflict, list[tuple[str, str, str]]]]:
    """Yield names with several UIDs and UIDs with several names, each with its objects as (namespace, name,
    UID)."""
    for name, uids in naming.by_name.items():
        if len(uids) > 1:
            assertions = _assertions(
                (provenance, f"UID {uid}") for uid, by in uids.items() for provenance in by
            )
            refs = {(*(naming.name_of(uid) or name), uid) for uid in uids} | {(*name, "")}
            yield Conflict(of_name, f"{what} {'/'.join(name)}", assertions), sorted(refs)
    for uid, names in naming.by_uid.items():
        if len(names) > 1:
            assertions = _assertions(
                (provenance, "/".join(name)) for name, by in names.items() for provenance in by
            )
            yield Conflict(of_uid, f"{what} of UID {uid}", assertions), sorted((*name, uid) for name in names)


def _devices(view: ClaimView) -> Iterator[Conflict]:
    """Yield a conflict for each driver of which sources list different devices for the claim."""

    def driver(edge: DeviceEdge) -> str:
        return edge.use.device.driver

    for name, edges in groupby(sorted(view.devices, key=driver), key=driver):
        sets: dict[Provenance, set[DeviceRef]] = {}
        for edge in edges:
            sets.setdefault(edge.provenance, set()).add(edge.use.device)
        if len(set(map(frozenset, sets.values()))) > 1:
            statements = ((provenance, _format_devices(devices)) for provenance, devices in sets.items())
            subject = f"claim {view.ref}, driver {name}"
            yield Conflict(ConflictKind.DEVICES, subject, _assertions(statements), claims=(view.ref,))


def _not_named(view: ClaimView, pods: Mapping[PodRef, PodView]) -> Iterator[Conflict]:
    for edge in view.consumers:
        pod = pods.get(edge.consumer.pod) if edge.consumer.pod else None
        if pod is None or edge.relation is not Relation.PREPARED:
            continue
        others = [(obj, provenance) for obj, provenance in pod.objects if not names_claim(obj, view.ref.name)]
        if others:
            yield Conflict(
                ConflictKind.NOT_NAMED,
                f"claim {view.ref}, {_title(pod.ref)}",
                _assertions([(edge.provenance, "prepared for the pod"), *_other_names(others)]),
                claims=(view.ref,),
                pods=(pod.ref,),
            )


def _containers(pod: PodView, cgroups: Provenance) -> Iterator[Conflict]:
    """Yield a conflict for each container that runs according to the pod's status and has no cgroup. Objects
    from files are not compared, since their containers may have ended."""
    live = {one.id for one in pod.live}
    for obj, provenance in pod.objects:
        gone = [one for one in obj.containers if one.running and one.id and one.id not in live]
        if gone and RANKS[provenance.origin] == RANKS[cgroups.origin]:
            statements = [(provenance, f"container {one.name} runs as {one.id}") for one in gone]
            statements += [(cgroups, f"no cgroup of {one.id}") for one in gone]
            yield Conflict(ConflictKind.CONTAINERS, _title(pod.ref), _assertions(statements), pods=(pod.ref,))


def names_claim(pod: KnownPod, claim: str) -> bool:
    """Return whether a pod names or may name a claim: the name of a generated claim is not always known."""
    return any(one.claim in {claim, ""} for one in pod.claims)


def _other_names(others: Iterable[tuple[KnownPod, Provenance]]) -> Iterator[tuple[Provenance, str]]:
    for obj, provenance in others:
        names = ", ".join(sorted(one.claim for one in obj.claims))
        yield provenance, f"the pod names {names or 'no claim'}"


def _assertions(statements: Iterable[tuple[Provenance, str]]) -> tuple[Assertion, ...]:
    found = {Assertion(*one) for one in statements}
    return tuple(sorted(found, key=lambda one: (provenance_order(one.provenance), one.text)))


def _format_devices(devices: set[DeviceRef]) -> str:
    return ", ".join(sorted(f"{device.pool}/{device.device}" for device in devices))


def _title(pod: PodRef) -> str:
    return f"pod {pod}" if pod.name else str(pod)
