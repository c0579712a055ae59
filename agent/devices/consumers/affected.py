"""Queries on the consumer map: pods that a device affects, claims of a pod, pods that would be refused.

A pod is certainly affected if its claim is prepared for it on this node and has the device. Other consumers
may be affected: a reservation is cluster-wide, a member of a pod group need not run, a pod may still wait.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from agent.devices.consumers.conflicts import names_claim
from agent.devices.consumers.reservations import RefusedPod, RefusingKubelets, refusal, refusal_of_uid
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import ConsumerKind, PodRef
from agent.model.consumers import (
    Affected,
    ClaimView,
    ConsumerEdge,
    ConsumerMap,
    ContainerEdge,
    ContainerUse,
    DeviceEdge,
    PodView,
    Relation,
)

HERE: Final = frozenset({Relation.PREPARED, Relation.LISTED})
"""Relations between a device and a claim that prove use on this Kubernetes node."""


# --- from a device -----------------------------------------------------------------------------------------


def affected(known: ConsumerMap, device: DeviceRef) -> tuple[Affected, ...]:
    """Return the pods that use or may use a device; pods that certainly use it come first."""
    found = [one for ref in known.devices.get(device, ()) for one in _of_claim(known, ref, device)]
    return tuple(sorted(found, key=lambda one: (not one.sure, one.pod.ref, one.claim)))


def _of_claim(known: ConsumerMap, ref: ClaimRef, device: DeviceRef) -> Iterator[Affected]:
    claim = known.claims[ref]
    uses = [edge for edge in claim.devices if edge.use.device == device]
    given = is_given(claim, device, uses)
    direct = consumers_of(claim)
    containers: dict[PodRef, list[ContainerEdge]] = {}
    for named in claim.containers:
        containers.setdefault(named.pod, []).append(named)
    for pod, edges in direct.items():
        sure = given and any(edge.relation in HERE for edge in edges)
        yield _affected(known.pods[pod], claim, uses, edges, containers.get(pod, ()), sure=sure)
    for edge in claim.consumers:
        if edge.consumer.kind is ConsumerKind.POD_GROUP:
            group = edge.consumer.name
            for member in members(known, ref, group):
                if member.ref not in direct:
                    of = containers.get(member.ref, ())
                    yield _affected(member, claim, uses, [edge], of, sure=False, group=group)


def consumers_of(claim: ClaimView) -> Mapping[PodRef, Sequence[ConsumerEdge]]:
    """Return the pods that hold a claim themselves, not by a pod group, each with its edges to the claim."""
    found: dict[PodRef, list[ConsumerEdge]] = {}
    for edge in claim.consumers:
        if pod := edge.consumer.pod:
            found.setdefault(pod, []).append(edge)
    return found


def is_given(claim: ClaimView, device: DeviceRef, uses: Collection[DeviceEdge]) -> bool:
    """Return whether the claim has the device on this node: True if it is prepared, or needs no prepare
    call."""
    return any(
        edge.relation in HERE or (edge.relation is Relation.ALLOCATED and device.driver in claim.skipped)
        for edge in uses
    )


def _affected(
    pod: PodView,
    claim: ClaimView,
    uses: Sequence[DeviceEdge],
    edges: Sequence[ConsumerEdge],
    named: Sequence[ContainerEdge],
    *,
    sure: bool,
    group: str = "",
) -> Affected:
    requests = {request for edge in uses for request in edge.use.requests}
    only = len({edge.use.device for edge in claim.devices}) == 1
    containers = tuple(containers_of(named, requests, only=only))
    return Affected(pod, claim.ref, sure, containers, group, (*uses, *edges, *named))


def containers_of(
    named: Sequence[ContainerEdge], requests: AbstractSet[str], *, only: bool
) -> Iterator[ContainerUse]:
    """Yield the containers that use a device of a claim.

    Args:
        named: Edges of the pod's containers that use the claim.
        requests: Requests that the device serves; empty: unknown; the kubelet then provides the device for
            any request.
        only: Whether the claim has no other device.
    """
    by_name: dict[str, list[tuple[str, ...] | None]] = {}
    for edge in named:
        by_name.setdefault(edge.container, []).append(edge.requests)
    for name, requests_by_source in sorted(by_name.items()):
        known = [one for one in requests_by_source if one is not None]
        if only or not known:
            yield ContainerUse(name, sure=only)
        elif any(not one or not requests or requests & set(one) for one in known):
            yield ContainerUse(name, sure=True)


def members(known: ConsumerMap, claim: ClaimRef, group: str) -> tuple[PodView, ...]:
    """Return the known pods of a claim's pod group that use or may use the claim."""
    pods = (known.pods[ref] for ref in known.groups.get((claim.namespace, group), ()))
    return tuple(pod for pod in pods if is_member(pod, claim, group))


def is_member(pod: PodView, claim: ClaimRef, group: str) -> bool:
    """Return whether a pod belongs to a claim's pod group and uses or may use the claim."""
    return any(
        one.ref.namespace == claim.namespace and one.group == group and names_claim(one, claim.name)
        for one, _ in pod.objects
    )


# --- from a pod or a claim ---------------------------------------------------------------------------------


def pods_named(known: ConsumerMap, namespace: str, name: str) -> tuple[PodView, ...]:
    """Return the pods with a namespace and name: several if a pod was created again or UIDs are unclear."""
    return tuple(pod for ref, pod in known.pods.items() if (ref.namespace, ref.name) == (namespace, name))


def claims_named(known: ConsumerMap, namespace: str, name: str) -> tuple[ClaimView, ...]:
    """Return the claims with a namespace and name: several if a claim was created again or UIDs are
    unclear."""
    return tuple(
        claim for ref, claim in known.claims.items() if (ref.namespace, ref.name) == (namespace, name)
    )


# --- after a reboot ----------------------------------------------------------------------------------------


def refusals(known: ConsumerMap) -> tuple[RefusedPod, ...]:
    """Return the pods that the kubelet would refuse if their sandbox were created again.

    Only claims with a known object are checked; the result is as old as the object.
    """
    newer: dict[tuple[str, str], list[str]] = {}
    for ref, claim in known.claims.items():
        if claim.objects:
            newer.setdefault((ref.namespace, ref.name), []).append(ref.uid)
    found = (one for claim in known.claims.values() for one in _refused(known, claim, newer))
    return tuple(sorted(found))


def _refused(
    known: ConsumerMap, claim: ClaimView, uids: Mapping[tuple[str, str], Sequence[str]]
) -> Iterator[RefusedPod]:
    """Yield the pods that the kubelet would refuse because of one claim.

    Args:
        uids: UIDs of the claims with a known object, by namespace and name.
    """
    ref = claim.ref
    for pod in {edge.consumer.pod for edge in claim.consumers if edge.relation in HERE}:
        if pod is None:
            continue
        view = known.pods[pod]
        if claim.objects:
            found = _refusal(claim, view)
        else:
            found = _replaced(claim, view, uids.get((ref.namespace, ref.name), ()))
        if found is not None:
            yield found._replace(pod=pod)


def _refusal(claim: ClaimView, pod: PodView) -> RefusedPod | None:
    obj, one = claim.objects[0][0], pod.known
    if one is None:
        return refusal_of_uid(pod.ref.uid, obj) if pod.ref.uid else None
    named = [mine for mine in one.claims if mine.claim == claim.ref.name]
    return refusal(one, named[0], obj) if named else None


def _replaced(claim: ClaimView, pod: PodView, uids: Sequence[str]) -> RefusedPod | None:
    """Return the refusal of a pod whose claim was deleted and created again; None: no such refusal.

    The kubelet refuses the new claim while it holds the old claim.
    """
    if not uids or not claim.ref.uid or (pod.known and pod.known.has_ended):
        return None
    why = f"the claim with this name now has UID {uids[0]}; the kubelet holds {claim.ref.uid}"
    return RefusedPod(pod.ref, claim.ref, RefusingKubelets.ALL, why)
