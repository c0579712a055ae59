"""Identities of claims and pods: the UID behind a name, and the name behind a UID.

A name can be reused within seconds. It stands for a UID only if the best-informed sources that know both
agree on one UID; else the object stays identified by name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from agent.model.claim import ClaimRef
from agent.model.claim_sources import ConsumerKind, Origin, PodRef, Provenance, SourceAnswers
from agent.model.time import Instant

Name = tuple[str, str]
"""Namespace and name of a claim or pod."""

RANKS: Final[Mapping[Origin, int]] = {
    Origin.CHECKPOINT: 0,  # podresources and the pods API answer from the same memory of the kubelet
    Origin.PODRESOURCES: 0,
    Origin.PODS_API: 0,
    Origin.CGROUPS: 0,
    Origin.HEALTH_STATE: 0,
    Origin.DRIVER: 1,
    Origin.PODS_FILE: 2,
    Origin.CLAIMS_FILE: 2,
}
"""Rank of each source by how current its knowledge of the kubelet's state is; 0 is best."""


class UidsAndNames:
    """UIDs and names of one kind of object, each pair with its sources."""

    def __init__(self, pairs: Iterable[tuple[Name, str, Provenance]]) -> None:
        """Collect the pairs of UID and name, each with its sources.

        Args:
            pairs: Name, UID and the source that reported them together.
        """
        self.by_name: dict[Name, dict[str, set[Provenance]]] = {}
        self.by_uid: dict[str, dict[Name, set[Provenance]]] = {}
        for name, uid, provenance in pairs:
            self.by_name.setdefault(name, {}).setdefault(uid, set()).add(provenance)
            self.by_uid.setdefault(uid, {}).setdefault(name, set()).add(provenance)
        self._uids = {name: _one_of(uids) for name, uids in self.by_name.items()}
        self._names = {
            uid: min(names, key=lambda name: (_rank(names[name]), name)) for uid, names in self.by_uid.items()
        }

    def uid_of(self, name: Name) -> str:
        """Return the UID of a name; empty: unknown or ambiguous."""
        return self._uids.get(name, "")

    def name_of(self, uid: str) -> Name | None:
        """Return the name of a UID, from the best-informed source; None: unknown."""
        return self._names.get(uid)


def _one_of(uids: Mapping[str, Iterable[Provenance]]) -> str:
    """Return the only UID that the best-informed sources report; empty: several."""
    ranked = {uid: _rank(provenances) for uid, provenances in uids.items()}
    best = [uid for uid, rank in ranked.items() if rank == min(ranked.values())]
    return best[0] if len(best) == 1 else ""


def _rank(provenances: Iterable[Provenance]) -> int:
    """Return the rank of the best-informed source; 0 is best."""
    return min(RANKS[provenance.origin] for provenance in provenances)


def provenance_order(provenance: Provenance) -> tuple[int, str, float, Instant]:
    """Return a sort key: best-informed source first, then the newest."""
    of_s = provenance.read.wall_s if provenance.written_s is None else provenance.written_s
    return (RANKS[provenance.origin], provenance.origin, -of_s, provenance.read)


@dataclass(frozen=True, slots=True)
class Identities:
    """Known claims and pods by UID and name."""

    claims: UidsAndNames
    pods: UidsAndNames
    mirrors: Mapping[str, str]
    """The kubelet's UID of a static pod, by the UID of its mirror pod."""

    def claim(self, ref: ClaimRef) -> ClaimRef:
        """Return a claim by its UID, with its known name."""
        name = self.claims.name_of(ref.uid)
        return ClaimRef(*name, ref.uid) if name else ref

    def claim_named(self, namespace: str, name: str) -> ClaimRef:
        """Return a claim by its name; without a UID if the name is ambiguous."""
        return ClaimRef(namespace, name, self.claims.uid_of((namespace, name)))

    def pod(self, uid: str) -> PodRef:
        """Return a pod by its UID; without a name if it is unknown."""
        uid = self.mirrors.get(uid, uid)
        return PodRef(*(self.pods.name_of(uid) or ("", "")), uid)

    def pod_named(self, namespace: str, name: str) -> PodRef:
        """Return a pod by its name; without a UID if the name is ambiguous."""
        return PodRef(namespace, name, self.pods.uid_of((namespace, name)))


def identities(answers: SourceAnswers) -> Identities:
    """Collect the claims and pods for which a source reports both name and UID."""
    mirrors = {
        pod.mirror_uid: pod.ref.uid for answer in answers.pods for pod in answer.items if pod.mirror_uid
    }
    return Identities(
        UidsAndNames(_claims(answers)),
        UidsAndNames(_pods(answers, lambda uid: mirrors.get(uid, uid))),
        mirrors,
    )


def _claims(answers: SourceAnswers) -> Iterable[tuple[Name, str, Provenance]]:
    refs = [(claim.ref, answer.provenance) for answer in answers.prepared for claim in answer.items]
    refs += [(claim.ref, answer.provenance) for answer in answers.claims for claim in answer.items]
    return (
        ((ref.namespace, ref.name), ref.uid, provenance) for ref, provenance in refs if ref.uid and ref.name
    )


def _pods(answers: SourceAnswers, uid_of: Callable[[str], str]) -> Iterable[tuple[Name, str, Provenance]]:
    for answer in answers.pods:
        for pod in answer.items:
            yield (pod.ref.namespace, pod.ref.name), pod.ref.uid, answer.provenance
    for claims in answers.claims:
        for claim in claims.items:
            for one in claim.reserved:
                if one.kind is ConsumerKind.POD and one.uid and one.name:
                    yield (claim.ref.namespace, one.name), uid_of(one.uid), claims.provenance
