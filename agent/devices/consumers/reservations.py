"""For whom a claim is reserved, in every shape that this ever had; and whom the kubelet would refuse.

``status.reservedFor`` names pods, pod groups (KEP-5729), both, or anything at all. It holds for the cluster:
who is listed may run elsewhere, or not yet, and who runs here under a pod group is not listed. The kubelet
looks at it when it makes a pod's sandbox and never again, so a pod may run for weeks that would be refused
after a reboot.

Source of what is refused: kubelet ``cm/dra/manager.go`` prepareResources, and ``IsForPod`` and
``IsReservedForPod`` of k8s.io/dynamic-resource-allocation, as of 1.36 and 1.37. A kubelet compares the UID of
a reservation with the pod's and looks at nothing else of the entry.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import ClaimRef
from agent.model.claim_sources import (
    SCHEDULING_GROUP,
    ConsumerKind,
    KnownClaim,
    KnownPod,
    PodClaim,
    PodRef,
    Reservation,
)
from agent.model.objects import kind_of, refuse, text

RESERVED_MAX: Final = 256
"""Entries that the API server takes."""

_KINDS: Final = {
    ("", "pods"): ConsumerKind.POD,
    (SCHEDULING_GROUP, "podgroups"): ConsumerKind.POD_GROUP,
}


class Reserved(NamedTuple):
    """A claim's reservations, sorted."""

    pods: tuple[Reservation, ...]
    groups: tuple[Reservation, ...]
    others: tuple[Reservation, ...]

    @property
    def is_over(self) -> bool:
        """Whether there are more than the API server takes."""
        return sum(map(len, self)) > RESERVED_MAX


def parse_reservations(value: object, place: str) -> tuple[Reservation, ...]:
    """The entries of a list of consumer references; a single one is a list of one, as in KEP-5194.

    Raises:
        ValueError: An entry is no reference, with its place. One of an unknown kind is fine.
    """
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_reservation(entry, f"{place}[{number}]") for number, entry in enumerate(entries))


def _reservation(entry: object, place: str) -> Reservation:
    if not isinstance(entry, Mapping):
        refuse(place, f"is {kind_of(entry)}, no object")
    group, resource, name, uid = (text(entry, key, place) for key in ("apiGroup", "resource", "name", "uid"))
    return Reservation(_KINDS.get((group, resource), ConsumerKind.OTHER), group, resource, name, uid)


def by_kind(reserved: Iterable[Reservation]) -> Reserved:
    """The reservations of each kind, in their order."""
    entries = tuple(reserved)
    kinds = (ConsumerKind.POD, ConsumerKind.POD_GROUP, ConsumerKind.OTHER)
    return Reserved(*(tuple(one for one in entries if one.kind is kind) for kind in kinds))


class Standing(NamedTuple):
    """Who can stand behind a reservation, each with its namespace."""

    uids: frozenset[tuple[str, str]]
    groups: frozenset[tuple[str, str]]
    """Those that have members."""


def standing(pods: Iterable[KnownPod]) -> Standing:
    """Those that are among these pods."""
    known = tuple(pods)
    uids = ((pod.ref.namespace, uid) for pod in known for uid in (pod.ref.uid, pod.mirror_uid) if uid)
    groups = ((pod.ref.namespace, pod.group) for pod in known if pod.group)
    return Standing(frozenset(uids), frozenset(groups))


def unmatched(claim: KnownClaim, known: Standing) -> tuple[Reservation, ...]:
    """Reservations behind which nobody stands. Where the pods are all of the cluster's, orphans.

    Pod groups are orphaned for good when the feature is switched off. What is neither a pod nor a pod group
    cannot be looked for.
    """
    namespace = claim.ref.namespace
    return tuple(
        one
        for one in claim.reserved
        if (one.kind is ConsumerKind.POD and (namespace, one.uid) not in known.uids)
        or (one.kind is ConsumerKind.POD_GROUP and (namespace, one.name) not in known.groups)
    )


# --- whom the kubelet would refuse -------------------------------------------------------------------------


class Kubelets(StrEnum):
    """Which of them."""

    ALL = "all kubelets"
    WITHOUT_GROUPS = "kubelets without DRAWorkloadResourceClaims: before 1.36 all, to 1.37 by default"
    """The gate is alpha in 1.36 and beta in 1.37, off in both, and needs GenericWorkload."""


class Refusal(NamedTuple):
    """A pod that would not get its claim if its sandbox were made again, by a reboot for instance."""

    pod: PodRef
    claim: ClaimRef
    kubelets: Kubelets
    why: str
    """The worst reason: one for which all kubelets refuse comes before one for which some do."""


def refusal(pod: KnownPod, named: PodClaim, claim: KnownClaim) -> Refusal | None:
    """Why the pod would be refused; None: it would not, or nothing of it will run again.

    Args:
        pod: Of the claim's namespace.
        named: The pod's claim that this is.
        claim: As far as that is known.
    """
    if pod.has_ended:
        return None
    reasons = list(_reasons(pod, named, claim))
    if not reasons:
        return None
    kubelets, why = min(reasons, key=lambda reason: reason[0] is not Kubelets.ALL)
    return Refusal(pod.ref, claim.ref, kubelets, why)


def refusal_of_uid(uid: str, claim: KnownClaim) -> Refusal | None:
    """The same of a pod of which nothing but its UID is known.

    None also where nobody can say: it may be of a pod group that the claim is reserved for.
    """
    groups = by_kind(claim.reserved).groups
    if not claim.allocated:
        why = "the claim is not allocated"
    elif not groups and not _lists(claim, uid):
        why = f"the claim is not reserved for it, but for {_words(claim)}"
    else:
        return None
    return Refusal(PodRef(uid=uid), claim.ref, Kubelets.ALL, why)


def _reasons(pod: KnownPod, named: PodClaim, claim: KnownClaim) -> Iterable[tuple[Kubelets, str]]:
    if not claim.allocated:
        yield Kubelets.ALL, "the claim is not allocated"
    owner = claim.owner
    if named.template and (owner is None or owner.uid != pod.ref.uid):
        is_group = owner is not None and owner.api_version.startswith(f"{SCHEDULING_GROUP}/")
        if is_group and owner and owner.kind == "PodGroup" and owner.name == pod.group != "":
            yield Kubelets.WITHOUT_GROUPS, f"the claim belongs to pod group {owner.name}"
        else:
            yield Kubelets.ALL, f"the claim was made for {owner or 'nobody that it names'}, not for the pod"
    if _lists(claim, pod.ref.uid):
        return
    if pod.group and any(one.name == pod.group for one in by_kind(claim.reserved).groups):
        yield Kubelets.WITHOUT_GROUPS, f"the claim is reserved for pod group {pod.group}"
    else:
        yield Kubelets.ALL, f"the claim is not reserved for it, but for {_words(claim)}"


def _lists(claim: KnownClaim, uid: str) -> bool:
    return any(one.uid == uid != "" for one in claim.reserved)


def _words(claim: KnownClaim) -> str:
    """For whom, as short as it can be said; numbers, for there may be hundreds."""
    words = (("pod", "pods"), ("pod group", "pod groups"), ("other", "others"))
    counted = [
        f"{len(of)} {names[len(of) > 1]}"
        for of, names in zip(by_kind(claim.reserved), words, strict=True)
        if of
    ]
    return " and ".join(counted) or "nobody"
