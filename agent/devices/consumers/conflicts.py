"""Contradictions between sources that report claims and pods, such as two UIDs of one claim name.

The agent reports the statements of all sources and does not decide which is right. A source that does not
report an object contradicts no other source.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final

from agent.devices.consumers.consumer_identities import (
    KUBELET_SOURCE_RANKS,
    Identities,
    UidsAndNames,
    provenance_order,
)
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import PodObject, PodRef, Provenance
from agent.model.consumers import (
    ClaimView,
    Conflict,
    ConflictingStatement,
    ConflictKind,
    DeviceEdge,
    PodView,
    Relation,
)

_ORDER: Final = {kind: number for number, kind in enumerate(ConflictKind)}


def find_conflicts(
    names: Identities,
    claims: Mapping[ClaimRef, ClaimView],
    pods: Mapping[PodRef, PodView],
    cgroups: Provenance | None,
) -> tuple[Conflict, ...]:
    """Return all conflicts between sources, sorted by kind and subject.

    Args:
        cgroups: Source that has read the cgroups of all pods; None: no source has.
    """
    of_claims = _ambiguous_identities(
        "claim", names.claims, ConflictKind.CLAIM_UIDS, ConflictKind.CLAIM_NAMES
    )
    of_pods = _ambiguous_identities("pod", names.pods, ConflictKind.POD_UIDS, ConflictKind.POD_NAMES)
    found = [one._replace(claims=tuple(ClaimRef(*ref) for ref in refs)) for one, refs in of_claims]
    found += [one._replace(pods=tuple(PodRef(*ref) for ref in refs)) for one, refs in of_pods]
    for claim in claims.values():
        found += _device_conflicts(claim)
        found += _not_named_conflicts(claim, pods)
    if cgroups is not None:
        for pod in pods.values():
            found += _container_conflicts(pod, cgroups)
    return tuple(sorted(found, key=lambda one: (_ORDER[one.kind], one.subject)))


def _ambiguous_identities(
    kind: str, naming: UidsAndNames, of_name: ConflictKind, of_uid: ConflictKind
) -> Iterator[tuple[Conflict, list[tuple[str, str, str]]]]:
    """Yield a conflict for each name with several UIDs and each UID with several names.

    Each conflict comes with the (namespace, name, UID) of the claims or pods that it concerns.
    """
    for name, uids in naming.by_name.items():
        if len(uids) > 1:
            assertions = _assertions(
                (provenance, f"UID {uid}") for uid, by in uids.items() for provenance in by
            )
            refs = {(*(naming.name_of(uid) or name), uid) for uid in uids} | {(*name, "")}
            yield Conflict(of_name, f"{kind} {'/'.join(name)}", assertions), sorted(refs)
    for uid, names in naming.by_uid.items():
        if len(names) > 1:
            assertions = _assertions(
                (provenance, "/".join(name)) for name, by in names.items() for provenance in by
            )
            yield Conflict(of_uid, f"{kind} of UID {uid}", assertions), sorted((*name, uid) for name in names)


def _device_conflicts(view: ClaimView) -> Iterator[Conflict]:
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


def _not_named_conflicts(view: ClaimView, pods: Mapping[PodRef, PodView]) -> Iterator[Conflict]:
    for edge in view.consumers:
        pod = pods.get(edge.consumer.pod) if edge.consumer.pod else None
        if pod is None or edge.relation is not Relation.PREPARED:
            continue
        others = [
            (obj, provenance) for obj, provenance in pod.objects if not may_name_claim(obj, view.ref.name)
        ]
        if others:
            yield Conflict(
                ConflictKind.NOT_NAMED,
                f"claim {view.ref}, {_title(pod.ref)}",
                _assertions([(edge.provenance, "prepared for the pod"), *_other_names(others)]),
                claims=(view.ref,),
                pods=(pod.ref,),
            )


def _container_conflicts(pod: PodView, cgroups: Provenance) -> Iterator[Conflict]:
    """Yield a conflict for each container that runs according to the pod's status and has no cgroup.
    Pod objects from files are skipped, since they may be old."""
    live = {one.id for one in pod.live}
    for obj, provenance in pod.objects:
        gone = [one for one in obj.containers if one.running and one.id and one.id not in live]
        if gone and KUBELET_SOURCE_RANKS[provenance.origin] == KUBELET_SOURCE_RANKS[cgroups.origin]:
            statements = [(provenance, f"container {one.name} runs as {one.id}") for one in gone]
            statements += [(cgroups, f"no cgroup of {one.id}") for one in gone]
            yield Conflict(ConflictKind.CONTAINERS, _title(pod.ref), _assertions(statements), pods=(pod.ref,))


def may_name_claim(pod: PodObject, claim: str) -> bool:
    """Return True if a pod's spec names the claim or may name it.

    The name of a generated claim can be unknown.
    """
    return pod.lacks_claim_names or any(one.claim in {claim, ""} for one in pod.claims)


def _other_names(others: Iterable[tuple[PodObject, Provenance]]) -> Iterator[tuple[Provenance, str]]:
    for obj, provenance in others:
        names = ", ".join(sorted(one.claim for one in obj.claims))
        yield provenance, f"the pod names {names or 'no claim'}"


def _assertions(statements: Iterable[tuple[Provenance, str]]) -> tuple[ConflictingStatement, ...]:
    found = {ConflictingStatement(*one) for one in statements}
    return tuple(sorted(found, key=lambda one: (provenance_order(one.provenance), one.text)))


def _format_devices(devices: set[DeviceRef]) -> str:
    return ", ".join(sorted(f"{device.pool}/{device.device}" for device in devices))


def _title(pod: PodRef) -> str:
    return f"pod {pod}" if pod.name else str(pod)
