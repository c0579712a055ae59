"""Reservations of a claim in all released forms, and pods that the kubelet would refuse.

``status.reservedFor`` lists pods, pod groups (KEP-5729) or other objects, cluster-wide: a listed pod can run
on another node or not yet, and a pod of a listed pod group is not listed itself. The kubelet checks it only
when it creates a pod's sandbox, so a running pod can be refused after a reboot.

Source of the refusal rules: kubelet ``cm/dra/manager.go`` prepareResources, and ``IsForPod`` and
``IsReservedForPod`` of k8s.io/dynamic-resource-allocation, as of 1.36 and 1.37. A kubelet compares the UID of
a reservation with the pod's and ignores the rest of the entry.
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
"""Largest number of reservations of a claim that the API server accepts."""

_KINDS: Final = {
    ("", "pods"): ConsumerKind.POD,
    (SCHEDULING_GROUP, "podgroups"): ConsumerKind.POD_GROUP,
}


class ClaimReservations(NamedTuple):
    """Reservations of a claim by kind."""

    pods: tuple[Reservation, ...]
    groups: tuple[Reservation, ...]
    others: tuple[Reservation, ...]

    @property
    def is_over(self) -> bool:
        """Whether the claim has more reservations than the API server accepts."""
        return sum(map(len, self)) > RESERVED_MAX


def parse_reservations(value: object, place: str) -> tuple[Reservation, ...]:
    """Parse a list of consumer references; a single reference is a list of one, as in KEP-5194.

    Raises:
        ValueError: An entry is not a reference; the message names the entry. Unknown kinds are accepted.
    """
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_reservation(entry, f"{place}[{number}]") for number, entry in enumerate(entries))


def _reservation(entry: object, place: str) -> Reservation:
    if not isinstance(entry, Mapping):
        refuse(place, f"is {kind_of(entry)}, not an object")
    group, resource, name, uid = (text(entry, key, place) for key in ("apiGroup", "resource", "name", "uid"))
    return Reservation(_KINDS.get((group, resource), ConsumerKind.OTHER), group, resource, name, uid)


def by_kind(reserved: Iterable[Reservation]) -> ClaimReservations:
    """Group reservations by kind, in their order."""
    entries = tuple(reserved)
    kinds = (ConsumerKind.POD, ConsumerKind.POD_GROUP, ConsumerKind.OTHER)
    return ClaimReservations(*(tuple(one for one in entries if one.kind is kind) for kind in kinds))


class KnownConsumers(NamedTuple):
    """Consumers that can match a reservation, each with its namespace."""

    uids: frozenset[tuple[str, str]]
    groups: frozenset[tuple[str, str]]
    """Namespace and name of each pod group that has members."""


def known_consumers(pods: Iterable[KnownPod]) -> KnownConsumers:
    """Return the given pods and their pod groups as known consumers."""
    known = tuple(pods)
    uids = ((pod.ref.namespace, uid) for pod in known for uid in (pod.ref.uid, pod.mirror_uid) if uid)
    groups = ((pod.ref.namespace, pod.group) for pod in known if pod.group)
    return KnownConsumers(frozenset(uids), frozenset(groups))


def unmatched(claim: KnownClaim, known: KnownConsumers) -> tuple[Reservation, ...]:
    """Return reservations without a known consumer; they are orphaned if ``known`` has all pods of the
    cluster.

    Reservations of pod groups stay orphaned after the feature is disabled. Other kinds cannot be checked.
    """
    namespace = claim.ref.namespace
    return tuple(
        one
        for one in claim.reserved
        if (one.kind is ConsumerKind.POD and (namespace, one.uid) not in known.uids)
        or (one.kind is ConsumerKind.POD_GROUP and (namespace, one.name) not in known.groups)
    )


# --- refusals of the kubelet -------------------------------------------------------------------------------


class RefusingKubelets(StrEnum):
    """Kubelets, by version and feature gate, that refuse a pod."""

    ALL = "all kubelets"
    WITHOUT_GROUPS = "kubelets without DRAWorkloadResourceClaims: before 1.36 all, to 1.37 by default"
    """Kubelets without pod groups. The gate is alpha in 1.36 and beta in 1.37, off in both, and needs
    GenericWorkload."""


class RefusedPod(NamedTuple):
    """A pod that the kubelet would refuse if its sandbox were created again, such as after a reboot."""

    pod: PodRef
    claim: ClaimRef
    kubelets: RefusingKubelets
    why: str
    """Main reason of the refusal; a reason for all kubelets precedes a reason for some kubelets."""


def refusal(pod: KnownPod, named: PodClaim, claim: KnownClaim) -> RefusedPod | None:
    """Return why the kubelet would refuse a pod; None: no refusal, or the pod has ended.

    Args:
        pod: A pod in the claim's namespace.
        named: Entry of the pod's spec for the claim.
        claim: The claim as far as it is known.
    """
    if pod.has_ended:
        return None
    reasons = list(_reasons(pod, named, claim))
    if not reasons:
        return None
    kubelets, why = min(reasons, key=lambda reason: reason[0] is not RefusingKubelets.ALL)
    return RefusedPod(pod.ref, claim.ref, kubelets, why)


def refusal_of_uid(uid: str, claim: KnownClaim) -> RefusedPod | None:
    """Return why the kubelet would refuse a pod of which only the UID is known.

    None: no refusal, or unknown, since the pod can belong to a pod group that the claim is reserved for.
    """
    groups = by_kind(claim.reserved).groups
    if not claim.allocated:
        why = "the claim is not allocated"
    elif not groups and not _lists(claim, uid):
        why = f"the claim is not reserved for the pod, but for {_format_reserved(claim)}"
    else:
        return None
    return RefusedPod(PodRef(uid=uid), claim.ref, RefusingKubelets.ALL, why)


def _reasons(pod: KnownPod, named: PodClaim, claim: KnownClaim) -> Iterable[tuple[RefusingKubelets, str]]:
    if not claim.allocated:
        yield RefusingKubelets.ALL, "the claim is not allocated"
    owner = claim.owner
    if named.template and (owner is None or owner.uid != pod.ref.uid):
        is_group = owner is not None and owner.api_version.startswith(f"{SCHEDULING_GROUP}/")
        if is_group and owner and owner.kind == "PodGroup" and owner.name == pod.group != "":
            yield RefusingKubelets.WITHOUT_GROUPS, f"the claim belongs to pod group {owner.name}"
        else:
            yield (
                RefusingKubelets.ALL,
                f"the claim was created for {owner or 'an unknown owner'}, not for the pod",
            )
    if _lists(claim, pod.ref.uid):
        return
    if pod.group and any(one.name == pod.group for one in by_kind(claim.reserved).groups):
        yield RefusingKubelets.WITHOUT_GROUPS, f"the claim is reserved for pod group {pod.group}"
    else:
        yield (
            RefusingKubelets.ALL,
            f"the claim is not reserved for the pod, but for {_format_reserved(claim)}",
        )


def _lists(claim: KnownClaim, uid: str) -> bool:
    return any(one.uid == uid != "" for one in claim.reserved)


def _format_reserved(claim: KnownClaim) -> str:
    """Format the number of reservations by kind."""
    nouns = (("pod", "pods"), ("pod group", "pod groups"), ("other", "others"))
    counted = [
        f"{len(of)} {names[len(of) > 1]}"
        for of, names in zip(by_kind(claim.reserved), nouns, strict=True)
        if of
    ]
    return " and ".join(counted) or "no consumer"
