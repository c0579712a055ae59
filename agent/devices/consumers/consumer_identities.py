"""Names and UIDs of claims and pods, joined from all sources.

A name can be reused within seconds, so sources can disagree. A name gets a UID only if the most current
sources agree on one UID; otherwise the agent knows the object by its name alone.

The kubelet finds the claims of a pod by name. The podresources API therefore lists a new pod with the devices
of an older claim of the same name, until the older claim is unprepared. The UIDs in the kubelet's checkpoint
and in ``status.reservedFor`` decide which claim the pod has.

The module also has the contradictions between sources that report claims and pods, such as two UIDs of one
claim name.

The agent reports the statements of all sources and does not decide which is right. A source that does not
report an object contradicts no other source.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import ConsumerKind, Origin, PodObject, PodRef, Provenance, SourceAnswers
from agent.model.consumers import (
    ClaimView,
    Conflict,
    ConflictingStatement,
    ConflictKind,
    DeviceEdge,
    PodView,
    Relation,
)
from agent.model.time import Instant

NamespacedName = tuple[str, str]
"""(namespace, name) of a claim or pod."""

KUBELET_SOURCE_RANKS: Final[Mapping[Origin, int]] = {
    Origin.CHECKPOINT: 0,  # podresources and the pods API answer from the same memory of the kubelet
    Origin.PODRESOURCES: 0,
    Origin.PODS_API: 0,
    Origin.CGROUPS: 0,
    Origin.HEALTH_STATE: 0,
    Origin.DRIVER: 1,
    Origin.PODS_FILE: 2,
    Origin.CLAIMS_FILE: 2,
}
"""Rank of each source by how current its knowledge of the kubelet's state is; 0 is the most current."""


class UidsAndNames:
    """UIDs and names of all claims, or of all pods, with the sources that report each pair."""

    def __init__(self, pairs: Iterable[tuple[NamespacedName, str, Provenance]]) -> None:
        """Collect pairs of a name and a UID, each with the source that reported them together."""
        self.by_name: dict[NamespacedName, dict[str, set[Provenance]]] = {}
        self.by_uid: dict[str, dict[NamespacedName, set[Provenance]]] = {}
        for name, uid, provenance in pairs:
            self.by_name.setdefault(name, {}).setdefault(uid, set()).add(provenance)
            self.by_uid.setdefault(uid, {}).setdefault(name, set()).add(provenance)
        self._uids = {name: _unambiguous_uid(uids) for name, uids in self.by_name.items()}
        self._names = {
            uid: min(names, key=lambda name: (_rank(names[name]), name)) for uid, names in self.by_uid.items()
        }

    def uid_of(self, name: NamespacedName) -> str:
        """Return the UID of the object with a name; empty: unknown or ambiguous."""
        return self._uids.get(name, "")

    def name_of(self, uid: str) -> NamespacedName | None:
        """Return the name of the object with a UID, from the most current source; None: unknown."""
        return self._names.get(uid)


def _unambiguous_uid(uids: Mapping[str, Iterable[Provenance]]) -> str:
    """Return the only UID that the most current sources report for a name.

    Empty: the sources report several UIDs.
    """
    ranked = {uid: _rank(provenances) for uid, provenances in uids.items()}
    best = [uid for uid, rank in ranked.items() if rank == min(ranked.values())]
    return best[0] if len(best) == 1 else ""


def _rank(provenances: Iterable[Provenance]) -> int:
    return min(KUBELET_SOURCE_RANKS[provenance.origin] for provenance in provenances)


def provenance_order(provenance: Provenance) -> tuple[int, str, float, Instant]:
    """Return a sort key of sources' answers: most current kind of source first, then newest answer."""
    of_s = provenance.read_at.wall_s if provenance.written_s is None else provenance.written_s
    return (KUBELET_SOURCE_RANKS[provenance.origin], provenance.origin, -of_s, provenance.read_at)


@dataclass(frozen=True, slots=True)
class Identities:
    """Names and UIDs of the known claims and pods."""

    claims: UidsAndNames
    pods: UidsAndNames
    mirrors: Mapping[str, str]
    """UID of a static pod in the kubelet, by the UID of its mirror pod in the API server."""
    prepared_for: Mapping[str, frozenset[str]]
    """UIDs of the pods for which the kubelet's checkpoint has a claim, by the claim's UID."""
    reserved_for: Mapping[str, frozenset[str]]
    """UIDs of the pods for which ResourceClaim objects are reserved, by the claim's UID."""
    pending: frozenset[str]
    """UIDs of the pods that are pending according to the kubelet."""
    generated: Mapping[tuple[str, str], str]
    """Names of prepared claims by UID of the pod, and by all but the last 5 characters, which are random in a
    generated name."""

    def claim_by_uid(self, ref: ClaimRef) -> ClaimRef:
        """Return the identity of the claim with a UID, with its name if that is known."""
        name = self.claims.name_of(ref.uid)
        return ClaimRef(*name, ref.uid) if name else ref

    def claim_by_name(self, namespace: str, name: str) -> ClaimRef:
        """Return the identity of the claim with a name; its UID is empty if the name is ambiguous."""
        return ClaimRef(namespace, name, self.claims.uid_of((namespace, name)))

    def claim_names(self, pod: PodObject, uid: str) -> dict[str, str]:
        """Return the known names of a pod's claims, by their names in the pod's spec.

        The kubelet's Pod object lacks generated names. They stay unknown if those of two claims begin alike.
        """
        begins = [_begin_of_generated_name(pod.ref.name, claim.name) for claim in pod.claims]
        found = {
            claim.name: claim.claim
            or ("" if begins.count(begin) > 1 else self.generated.get((uid, begin), ""))
            for claim, begin in zip(pod.claims, begins, strict=True)
        }
        return {name: claim for name, claim in found.items() if claim}

    def claim_of_pod(self, namespace: str, name: str, pod_uid: str) -> ClaimRef:
        """Return the identity of the claim that a pod's spec names.

        If several claims have the name, the result is the claim that is prepared for the pod's UID or, if
        there is none, the claim that is reserved for it.
        """
        uids = self.claims.by_name.get((namespace, name), {})
        for pods_of in (self.prepared_for, self.reserved_for):
            found = [uid for uid in uids if pod_uid in pods_of.get(uid, ())]
            if len(found) == 1:
                return ClaimRef(namespace, name, found[0])
        return self.claim_by_name(namespace, name)

    def pod_by_uid(self, uid: str) -> PodRef:
        """Return the identity of the pod with a UID; its name is empty if it is unknown."""
        uid = self.mirrors.get(uid, uid)
        return PodRef(*(self.pods.name_of(uid) or ("", "")), uid)

    def pod_of_claim(self, namespace: str, name: str, claim: ClaimRef) -> PodRef:
        """Return the identity of a pod that the kubelet's podresources API lists with a claim.

        If several pods have the name, the result is the pod for which the kubelet's checkpoint has the claim,
        else its UID is empty.
        """
        uids = self.pods.by_name.get((namespace, name), {})
        found = [uid for uid in uids if uid in self.prepared_for.get(claim.uid, ())]
        return PodRef(namespace, name, found[0] if len(found) == 1 else self.pods.uid_of((namespace, name)))

    def is_prepared_for_others(self, claim: ClaimRef, pod: PodRef) -> bool:
        """Return True if the kubelet's checkpoint shows that a claim is not prepared for a pod.

        The kubelet's podresources API lists the claim for the pod. If the checkpoint lacks the claim, the
        result is True for a pending pod, since nothing is prepared for the pod yet.
        """
        uids = {pod.uid} if pod.uid else self.pods.by_name.get((pod.namespace, pod.name), {}).keys()
        prepared_for = self.prepared_for.get(claim.uid)
        return bool(uids) and (uids <= self.pending if prepared_for is None else not uids & prepared_for)


def collect_identities(answers: SourceAnswers) -> Identities:
    """Collect the pairs of name and UID of claims and pods, from all answers that have both."""
    mirrors = {
        pod.mirror_uid: pod.ref.uid for answer in answers.pods for pod in answer.items if pod.mirror_uid
    }
    prepared_for: dict[str, set[str]] = {}
    for prepared in answers.prepared:
        if prepared.provenance.origin is Origin.CHECKPOINT:
            for held in prepared.items:
                prepared_for.setdefault(held.ref.uid, set()).update(held.pods)
    reserved_for: dict[str, set[str]] = {}
    for claims in answers.claims:
        for claim in claims.items:
            uids = {user.uid for user in claim.reserved if user.kind is ConsumerKind.POD and user.uid}
            reserved_for.setdefault(claim.ref.uid, set()).update(mirrors.get(uid, uid) for uid in uids)
    named = UidsAndNames(_claims(answers))
    pod_claims = ((pod, named.name_of(uid)) for uid, pods in sorted(prepared_for.items()) for pod in pods)
    return Identities(
        named,
        UidsAndNames(_pods(answers, lambda uid: mirrors.get(uid, uid))),
        mirrors,
        {uid: frozenset(pods) for uid, pods in prepared_for.items() if uid},
        {uid: frozenset(pods) for uid, pods in reserved_for.items() if uid},
        frozenset(
            pod.ref.uid
            for answer in answers.pods
            if answer.provenance.origin is Origin.PODS_API
            for pod in answer.items
            if pod.phase == "Pending"
        ),
        {(pod, name[1][:-5]): name[1] for pod, name in pod_claims if name},
    )


def _begin_of_generated_name(pod: str, claim: str) -> str:
    """Return all but the random end of a generated claim's name. Kubernetes (the resourceclaim controller)
    shortens both parts of a long name in proportion, and then omits the last hyphen."""
    begin = f"{pod}-{claim}-"
    if (length := len(begin)) <= 57:
        return begin
    return f"{pod[: len(pod) * 57 // length]}-{claim[: len(claim) * 57 // length]}"


def _claims(answers: SourceAnswers) -> Iterable[tuple[NamespacedName, str, Provenance]]:
    refs = [(claim.ref, answer.provenance) for answer in answers.prepared for claim in answer.items]
    refs += [(claim.ref, answer.provenance) for answer in answers.claims for claim in answer.items]
    return (
        ((ref.namespace, ref.name), ref.uid, provenance) for ref, provenance in refs if ref.uid and ref.name
    )


def _pods(
    answers: SourceAnswers, uid_of: Callable[[str], str]
) -> Iterable[tuple[NamespacedName, str, Provenance]]:
    for answer in answers.pods:
        for pod in answer.items:
            yield (pod.ref.namespace, pod.ref.name), pod.ref.uid, answer.provenance
    for claims in answers.claims:
        for claim in claims.items:
            for reservation in claim.reserved:
                if reservation.kind is ConsumerKind.POD and reservation.uid and reservation.name:
                    yield (claim.ref.namespace, reservation.name), uid_of(reservation.uid), claims.provenance


# --- contradictions ----------------------------------------------------------------------------------------

_ORDER: Final = {kind: number for number, kind in enumerate(ConflictKind)}


def find_conflicts(
    names: Identities,
    claims: Mapping[ClaimRef, ClaimView],
    pods: Mapping[PodRef, PodView],
    cgroups: Provenance | None,
) -> tuple[Conflict, ...]:
    """Return all conflicts between sources, sorted by kind and subject.

    Args:
        cgroups: Source that has read the cgroups of all pods; None: no source has read them.
    """
    of_claims = _ambiguous_identities(
        "claim", names.claims, ConflictKind.CLAIM_UIDS, ConflictKind.CLAIM_NAMES
    )
    of_pods = _ambiguous_identities("pod", names.pods, ConflictKind.POD_UIDS, ConflictKind.POD_NAMES)
    found = [conflict._replace(claims=tuple(ClaimRef(*ref) for ref in refs)) for conflict, refs in of_claims]
    found += [conflict._replace(pods=tuple(PodRef(*ref) for ref in refs)) for conflict, refs in of_pods]
    for claim in claims.values():
        found += _device_conflicts(claim)
        found += _not_named_conflicts(claim, pods)
    if cgroups is not None:
        for pod in pods.values():
            found += _container_conflicts(pod, cgroups)
    return tuple(sorted(found, key=lambda conflict: (_ORDER[conflict.kind], conflict.subject)))


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
    live = {container.id for container in pod.live}
    for obj, provenance in pod.objects:
        gone = [old for old in obj.containers if old.running and old.id and old.id not in live]
        if gone and KUBELET_SOURCE_RANKS[provenance.origin] == KUBELET_SOURCE_RANKS[cgroups.origin]:
            statements = [(provenance, f"container {old.name} runs as {old.id}") for old in gone]
            statements += [(cgroups, f"no cgroup of {container.id}") for container in gone]
            yield Conflict(ConflictKind.CONTAINERS, _title(pod.ref), _assertions(statements), pods=(pod.ref,))


def may_name_claim(pod: PodObject, claim: str) -> bool:
    """Return True if a pod's spec names the claim or may name it.

    If the name of a claim that is generated from a template is unknown, the pod may name the claim.
    """
    return pod.lacks_claim_names or any(used.claim in {claim, ""} for used in pod.claims)


def _other_names(others: Iterable[tuple[PodObject, Provenance]]) -> Iterator[tuple[Provenance, str]]:
    for obj, provenance in others:
        names = ", ".join(sorted(claim.claim for claim in obj.claims))
        yield provenance, f"the pod names {names or 'no claim'}"


def _assertions(statements: Iterable[tuple[Provenance, str]]) -> tuple[ConflictingStatement, ...]:
    found = {ConflictingStatement(*statement) for statement in statements}
    return tuple(sorted(found, key=lambda side: (provenance_order(side.provenance), side.text)))


def _format_devices(devices: set[DeviceRef]) -> str:
    return ", ".join(sorted(f"{device.pool}/{device.device}" for device in devices))


def _title(pod: PodRef) -> str:
    return f"pod {pod}" if pod.name else str(pod)
