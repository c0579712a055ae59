"""Reservations of a claim (``status.reservedFor``), and pods that the kubelet refuses because of them.

A reservation names a pod, a pod group (KEP-5729) or another object, anywhere in the cluster. The kubelet
evaluates reservations only when it creates a pod's sandbox, so a running pod can be refused after a reboot.

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
    ClaimObject,
    ConsumerKind,
    PodClaim,
    PodObject,
    PodRef,
    Reservation,
    WorkloadRef,
)
from agent.model.json_values import get_text, raise_invalid, type_in_words

RESERVED_MAX: Final = 256
"""Largest number of reservations of one claim that the API server accepts."""

_KINDS: Final = {
    ("", "pods"): ConsumerKind.POD,
    (SCHEDULING_GROUP, "podgroups"): ConsumerKind.POD_GROUP,
}


class ClaimReservations(NamedTuple):
    """Reservations of a claim, grouped by the kind of consumer that they name."""

    pods: tuple[Reservation, ...]
    groups: tuple[Reservation, ...]
    others: tuple[Reservation, ...]

    @property
    def exceeds_limit(self) -> bool:
        """True if the claim has more reservations than the API server accepts."""
        return sum(map(len, self)) > RESERVED_MAX


def parse_reservations(value: object, place: str) -> tuple[Reservation, ...]:
    """Parse the value of a ``reservedFor`` field: a list of references, or one reference (KEP-5194).

    Raises ValueError with the entry, at ``place``, that is not an object reference.
    """
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_reservation(entry, f"{place}[{number}]") for number, entry in enumerate(entries))


def _reservation(entry: object, place: str) -> Reservation:
    if not isinstance(entry, Mapping):
        raise_invalid(place, f"is {type_in_words(entry)}, not an object")
    group, resource, name, uid = (
        get_text(entry, key, place) for key in ("apiGroup", "resource", "name", "uid")
    )
    return Reservation(_KINDS.get((group, resource), ConsumerKind.OTHER), group, resource, name, uid)


def reservations_by_kind(reserved: Iterable[Reservation]) -> ClaimReservations:
    """Group the reservations of a claim by the kind of consumer that they name, in their order."""
    entries = tuple(reserved)
    kinds = (ConsumerKind.POD, ConsumerKind.POD_GROUP, ConsumerKind.OTHER)
    return ClaimReservations(*(tuple(one for one in entries if one.kind is kind) for kind in kinds))


class ExistingReservationTargets(NamedTuple):
    """Pods, pod groups and other objects that exist, with which reservations of claims are compared."""

    uids: frozenset[tuple[str, str]]
    """Existing pods, as (namespace, UID)."""
    groups: frozenset[tuple[str, str]]
    """Existing pod groups, which have pods, as (namespace, name)."""
    workloads: Mapping[tuple[str, str], frozenset[tuple[str, str]]]
    """(namespace, UID) of each other object, by (API group, resource).
    A missing key: no object of the resource is given, so that nothing is known about it."""


def existing_reservation_targets(
    pods: Iterable[PodObject], workloads: Iterable[WorkloadRef] = ()
) -> ExistingReservationTargets:
    """Collect the pods, their pod groups and other objects with which reservations of claims are compared."""
    known = tuple(pods)
    uids = ((pod.ref.namespace, uid) for pod in known for uid in (pod.ref.uid, pod.mirror_uid) if uid)
    groups = ((pod.ref.namespace, pod.group) for pod in known if pod.group)
    given: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for one in workloads:
        given.setdefault((one.api_group, one.resource), set()).add((one.namespace, one.uid))
    return ExistingReservationTargets(
        frozenset(uids),
        frozenset(groups),
        {resource: frozenset(found) for resource, found in given.items()},
    )


def unmatched_reservations(claim: ClaimObject, known: ExistingReservationTargets) -> tuple[Reservation, ...]:
    """Return a claim's reservations for objects that ``known`` does not have.

    If ``known`` has all objects of the cluster, these reservations are orphaned. Reservations for other
    objects than pods and pod groups are left out unless ``known`` has objects of their resource.
    """
    return tuple(one for one in claim.reserved if _is_unmatched(one, claim.ref.namespace, known))


def _is_unmatched(one: Reservation, namespace: str, known: ExistingReservationTargets) -> bool:
    if one.kind is ConsumerKind.POD:
        return (namespace, one.uid) not in known.uids
    if one.kind is ConsumerKind.POD_GROUP and (namespace, one.name) in known.groups:
        return False
    given = known.workloads.get((one.api_group, one.resource))
    if given is None:
        return one.kind is ConsumerKind.POD_GROUP
    return (namespace, one.uid) not in given


class KubeletsRefusingPod(StrEnum):
    """Set of kubelets that refuse a pod: all, or those of some versions and feature gates."""

    ALL = "all kubelets"
    WITHOUT_GROUPS = "kubelets without DRAWorkloadResourceClaims: before 1.36 all, to 1.37 by default"
    """Kubelets that do not know pod groups.

    The feature gate for pod groups is alpha in 1.36 and beta in 1.37, off in both, and needs GenericWorkload.
    """


class RefusedPod(NamedTuple):
    """A pod that the kubelet refuses when it creates the pod's sandbox.

    The pod is pending, or it runs and is refused after a reboot.
    """

    pod: PodRef
    claim: ClaimRef
    kubelets: KubeletsRefusingPod
    reason: str
    """Main reason of the refusal; a reason of all kubelets precedes a reason of some kubelets."""
    is_pending: bool = False
    """True: the pod is pending, and the kubelet refuses to start it. False: the pod runs."""


def find_refusal(pod: PodObject, named: PodClaim, claim: ClaimObject) -> RefusedPod | None:
    """Return why the kubelet would not start a pod because of a claim; None: it would, or the pod has ended.

    Args:
        pod: A pod in the claim's namespace.
        named: Entry of the pod's ``spec.resourceClaims`` for the claim.
        claim: The claim.
    """
    if pod.has_ended:
        return None
    reasons = list(_refusal_reasons(pod, named, claim))
    if not reasons:
        return None
    kubelets, why = min(reasons, key=lambda reason: reason[0] is not KubeletsRefusingPod.ALL)
    return RefusedPod(pod.ref, claim.ref, kubelets, why)


def find_refusal_by_uid(uid: str, claim: ClaimObject) -> RefusedPod | None:
    """Return why the kubelet would not start a pod of which only the UID is known.

    None: no refusal, or unknown, since the pod can belong to a pod group that the claim is reserved for.
    """
    groups = reservations_by_kind(claim.reserved).groups
    if not claim.allocated:
        why = "the claim is not allocated"
    elif not groups and not _is_reserved_for(claim, uid):
        why = f"the claim is not reserved for the pod, but for {_format_reserved(claim)}"
    else:
        return None
    return RefusedPod(PodRef(uid=uid), claim.ref, KubeletsRefusingPod.ALL, why)


def _refusal_reasons(
    pod: PodObject, named: PodClaim, claim: ClaimObject
) -> Iterable[tuple[KubeletsRefusingPod, str]]:
    if not claim.allocated:
        yield KubeletsRefusingPod.ALL, "the claim is not allocated"
    owner = claim.owner
    if named.template and (owner is None or owner.uid != pod.ref.uid):
        is_group = owner is not None and owner.api_version.startswith(f"{SCHEDULING_GROUP}/")
        if is_group and owner and owner.kind == "PodGroup" and owner.name == pod.group != "":
            yield KubeletsRefusingPod.WITHOUT_GROUPS, f"the claim belongs to pod group {owner.name}"
        else:
            yield (
                KubeletsRefusingPod.ALL,
                f"the claim was created for {owner or 'an unknown owner'}, not for the pod",
            )
    if _is_reserved_for(claim, pod.ref.uid):
        return
    if pod.group and any(one.name == pod.group for one in reservations_by_kind(claim.reserved).groups):
        yield KubeletsRefusingPod.WITHOUT_GROUPS, f"the claim is reserved for pod group {pod.group}"
    else:
        yield (
            KubeletsRefusingPod.ALL,
            f"the claim is not reserved for the pod, but for {_format_reserved(claim)}",
        )


def _is_reserved_for(claim: ClaimObject, uid: str) -> bool:
    return any(one.uid == uid != "" for one in claim.reserved)


def _format_reserved(claim: ClaimObject) -> str:
    nouns = (("pod", "pods"), ("pod group", "pod groups"), ("other", "others"))
    counted = [
        f"{len(of)} {names[len(of) > 1]}"
        for of, names in zip(reservations_by_kind(claim.reserved), nouns, strict=True)
        if of
    ]
    return " and ".join(counted) or "no consumer"
