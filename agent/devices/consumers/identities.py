"""Who is who: which UID is meant where a source told a name, and what the name is where it told a UID.

A name means one claim or pod at a time, and another a moment later. So a name stands for a UID only if the
best informed of those who know both agree on one; else it stays a name, and belongs to nobody.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from agent.model.claim import ClaimRef
from agent.model.claim_sources import ConsumerKind, Origin, PodRef, Provenance, SourceAnswers
from agent.model.time import Instant

Name = tuple[str, str]
"""Namespace and name."""

RANKS: Final[Mapping[Origin, int]] = {
    Origin.CHECKPOINT: 0,  # podresources and the pods API answer from the memory that it is kept of
    Origin.PODRESOURCES: 0,
    Origin.PODS_API: 0,
    Origin.CGROUPS: 0,
    Origin.HEALTH_STATE: 0,
    Origin.DRIVER: 1,
    Origin.PODS_FILE: 2,
    Origin.CLAIMS_FILE: 2,
}
"""How well informed each is of what the kubelet has now: 0 is best."""


class Naming:
    """UIDs and names of one kind of object, each pair with those who told it."""

    def __init__(self, told: Iterable[tuple[Name, str, Provenance]]) -> None:
        """
        Args:
            told: Name, UID and who said that they belong together.
        """
        self.by_name: dict[Name, dict[str, set[Provenance]]] = {}
        self.by_uid: dict[str, dict[Name, set[Provenance]]] = {}
        for name, uid, witness in told:
            self.by_name.setdefault(name, {}).setdefault(uid, set()).add(witness)
            self.by_uid.setdefault(uid, {}).setdefault(name, set()).add(witness)
        self._uids = {name: _one_of(uids) for name, uids in self.by_name.items()}
        self._names = {
            uid: min(names, key=lambda name: (_rank(names[name]), name)) for uid, names in self.by_uid.items()
        }

    def uid_of(self, name: Name) -> str:
        """The UID that a name stands for; empty: nobody knows, or it is not clear."""
        return self._uids.get(name, "")

    def name_of(self, uid: str) -> Name | None:
        """The name of a UID; None: nobody knows. Should there be several, the first of the best informed."""
        return self._names.get(uid)


def _one_of(uids: Mapping[str, Iterable[Provenance]]) -> str:
    """The only one of which the best informed know; empty if that is more than one."""
    ranked = {uid: _rank(witnesses) for uid, witnesses in uids.items()}
    best = [uid for uid, rank in ranked.items() if rank == min(ranked.values())]
    return best[0] if len(best) == 1 else ""


def _rank(witnesses: Iterable[Provenance]) -> int:
    """That of the best informed."""
    return min(RANKS[witness.origin] for witness in witnesses)


def witness_order(witness: Provenance) -> tuple[int, str, float, Instant]:
    """The best informed first, and of those the newest."""
    of_s = witness.read.wall_s if witness.written_s is None else witness.written_s
    return (RANKS[witness.origin], witness.origin, -of_s, witness.read)


@dataclass(frozen=True, slots=True)
class Identities:
    """Everybody that anybody knows."""

    claims: Naming
    pods: Naming
    mirrors: Mapping[str, str]
    """UID of the object that stands for a static pod, to the kubelet's."""

    def claim(self, ref: ClaimRef) -> ClaimRef:
        """A claim by its UID, under the one name that it has here."""
        name = self.claims.name_of(ref.uid)
        return ClaimRef(*name, ref.uid) if name else ref

    def claim_named(self, namespace: str, name: str) -> ClaimRef:
        """A claim by its name; without a UID if it is not clear which that is."""
        return ClaimRef(namespace, name, self.claims.uid_of((namespace, name)))

    def pod(self, uid: str) -> PodRef:
        """A pod by its UID; without a name if nobody knows it."""
        uid = self.mirrors.get(uid, uid)
        return PodRef(*(self.pods.name_of(uid) or ("", "")), uid)

    def pod_named(self, namespace: str, name: str) -> PodRef:
        """A pod by its name; without a UID if it is not clear which that is."""
        return PodRef(namespace, name, self.pods.uid_of((namespace, name)))


def identities(heard: SourceAnswers) -> Identities:
    """Everybody of whom a source told both name and UID."""
    mirrors = {pod.mirror_uid: pod.ref.uid for told in heard.pods for pod in told.items if pod.mirror_uid}
    return Identities(
        Naming(_claims(heard)), Naming(_pods(heard, lambda uid: mirrors.get(uid, uid))), mirrors
    )


def _claims(heard: SourceAnswers) -> Iterable[tuple[Name, str, Provenance]]:
    refs = [(claim.ref, told.witness) for told in heard.prepared for claim in told.items]
    refs += [(claim.ref, told.witness) for told in heard.claims for claim in told.items]
    return (((ref.namespace, ref.name), ref.uid, witness) for ref, witness in refs if ref.uid and ref.name)


def _pods(heard: SourceAnswers, uid_of: Callable[[str], str]) -> Iterable[tuple[Name, str, Provenance]]:
    for told in heard.pods:
        for pod in told.items:
            yield (pod.ref.namespace, pod.ref.name), pod.ref.uid, told.witness
    for claims in heard.claims:
        for claim in claims.items:
            for one in claim.reserved:
                if one.kind is ConsumerKind.POD and one.uid and one.name:
                    yield (claim.ref.namespace, one.name), uid_of(one.uid), claims.witness
