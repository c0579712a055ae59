"""From what everybody said to what concerns a device, a pod or a claim. Pure.

Nothing is joined by guess: where a name and a UID may be one and the same, both stand there, and it is said.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import Final

from agent.cli.explain.assertions import Said, mirrors, streamed
from agent.cli.explain.find import NotKnown, find_claims, find_devices, find_pods
from agent.cli.explain.words import (
    PREPARES,
    TAINTS,
    Account,
    Explained,
    Gathered,
    Hurt,
)
from agent.cli.history.find import claim_names, device_names, pod_names
from agent.devices.consumers.affected import affected, is_member, members, refusals
from agent.devices.consumers.consumer_map import consumer_map
from agent.errors import PermissionDenied
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import ConsumerKind, PodRef
from agent.model.consumers import Conflict, ConsumerMap
from agent.model.health import Severity
from agent.model.reading import Absence
from agent.model.uses import DeviceUsage

DEVICE = "device"
POD = "pod"
CLAIM = "claim"
LAST_MAX: Final = 5
"""Uses that have ended and are shown of what is there."""


def explain(kind: str, word: str, told: Gathered) -> Explained:
    """All that concerns what is meant.

    Args:
        kind: :data:`DEVICE`, :data:`POD` or :data:`CLAIM`.
        word: What it is called.

    Raises:
        NotKnown: Nothing of this name is known; with who could not be asked.
        PermissionDenied: Likewise, and this user may not ask some of them.
        UsageError: Several things have this name.
    """
    known = consumer_map(told.heard)
    try:
        devices, claims, pods = _concerned(kind, word, known, told)
    except NotKnown as error:
        if recorded := _recorded(kind, word, told):
            return Explained(kind, told.now, (), (), (), ended=recorded, accounts=told.accounts)
        missing = [one for one in told.accounts if _may_know(one)]
        text = "\n  not to be had: ".join([str(error), *(f"{one.source}: {one.why}" for one in missing)])
        raise (PermissionDenied if any(one.denied for one in missing) else NotKnown)(text) from None
    hurt = [Hurt(device, one) for device in devices for one in affected(known, device)]
    if kind == DEVICE:
        pods = {one.affected.pod.ref: None for one in hurt}
    else:
        hurt = [one for one in hurt if one.affected.claim in claims and one.affected.pod.ref in pods]
    said = Said(told, known)
    return Explained(
        kind=kind,
        now=told.now,
        devices=tuple(map(said.of_device, devices)),
        claims=tuple(map(said.of_claim, claims)),
        pods=tuple(map(said.of_pod, pods)),
        hurt=tuple(hurt),
        risks=tuple(one for one in refusals(known) if one.pod in pods and one.claim in claims),
        conflicts=tuple(_conflicts(known, claims, pods)),
        ended=tuple(islice(_ended(kind, told, devices, claims, pods), LAST_MAX)),
        accounts=told.accounts,
    )


def _ended(
    kind: str,
    told: Gathered,
    devices: Container[DeviceRef],
    claims: Iterable[ClaimRef],
    pods: Iterable[PodRef],
) -> Iterator[DeviceUsage]:
    """Uses that are recorded to have ended, of a device, a pod or a claim that is there."""
    uids_of = {POD: {ref.uid for ref in pods}, CLAIM: {ref.uid for ref in claims}}
    for one in told.recorded:
        uid = one.claim.uid if kind == CLAIM else one.pod.uid
        is_meant = one.device in devices if kind == DEVICE else uid and uid in uids_of[kind]
        if one.ended and is_meant:
            yield one


def _recorded(kind: str, word: str, told: Gathered) -> tuple[DeviceUsage, ...]:
    """What is recorded of a pod, a claim or a device that nobody knows any more."""
    names_of = {POD: pod_names, CLAIM: claim_names, DEVICE: device_names}[kind]
    found = tuple(one for one in told.recorded if word in names_of(one))
    return found[:LAST_MAX] if kind == DEVICE else found


def _may_know(account: Account) -> bool:
    """Whether something may not be known because a source is missing: not every driver keeps files."""
    is_missed = account.absence is Absence.UNREADABLE or account.source not in {PREPARES, TAINTS}
    return bool(account.absence and account.place and is_missed)


def severity_of(explained: Explained) -> Severity:
    """That of the worst device concerned. Of a claim without a device that anybody knows of nothing is known;
    of a pod that is seen to name no claim there is nothing to know. Of what has ended, as it was then."""
    if explained.ended and not (explained.devices or explained.claims or explained.pods):
        return max(one.state.severity for one in explained.ended)
    names_none = all(one.view.known is not None and not one.view.known.claims for one in explained.pods)
    if explained.kind == POD and not explained.claims and names_none:
        return Severity.OK
    blank = [Severity.UNKNOWN for one in explained.claims if not one.view.devices]
    return max([*blank, *(one.severity for one in explained.devices)], default=Severity.UNKNOWN)


# --- what is concerned -------------------------------------------------------------------------------------

_Concerned = tuple[dict[DeviceRef, None], dict[ClaimRef, None], dict[PodRef, None]]


def _concerned(kind: str, word: str, known: ConsumerMap, told: Gathered) -> _Concerned:
    """Devices, claims and pods; of a device the pods follow from it."""
    if kind == DEVICE:
        cdi = (pair for one in told.heard.prepared for claim in one.items for pair in claim.cdi)
        found = dict.fromkeys(find_devices(word, _all_devices(known, told), cdi, mirrors(told)))
        return found, dict.fromkeys(ref for one in found for ref in known.devices.get(one, ())), {}
    if kind == POD:
        pods = dict.fromkeys(find_pods(word, known))
        claims = dict.fromkeys(ref for pod in pods for ref in _claims_of(known, pod))
    else:
        claims = dict.fromkeys(find_claims(word, known))
        pods = dict.fromkeys(pod for claim in claims for pod in _pods_of(known, claim))
    devices = dict.fromkeys(
        ref for claim in claims for ref in sorted({edge.use.device for edge in known.claims[claim].devices})
    )
    return devices, claims, pods


def _all_devices(known: ConsumerMap, told: Gathered) -> Iterator[DeviceRef]:
    yield from known.devices
    for device in told.report.devices if told.report else ():
        yield DeviceRef(*device.key)
    hosts = mirrors(told)
    yield from (one for one in streamed(told) if one not in hosts)
    yield from (one.device for one in told.beliefs)
    yield from (one.device for one in told.broken)
    yield from (device for one in told.records for device in one.outcome.devices)
    yield from (device for tainted in told.taints.values() for device in tainted)


def _claims_of(known: ConsumerMap, pod: PodRef) -> Iterator[ClaimRef]:
    """A pod's claims, and those of its pod group that it names or may name."""
    yield from known.pods[pod].claims
    for ref, claim in known.claims.items():
        for edge in claim.consumers:
            one = edge.consumer
            if one.kind is ConsumerKind.POD_GROUP and is_member(known.pods[pod], ref, one.name):
                yield ref


def _pods_of(known: ConsumerMap, claim: ClaimRef) -> Iterator[PodRef]:
    """The pods of a claim, then those of its pod groups."""
    edges = known.claims[claim].consumers
    yield from (edge.consumer.pod for edge in edges if edge.consumer.pod)
    for edge in edges:
        if edge.consumer.kind is ConsumerKind.POD_GROUP:
            yield from (one.ref for one in members(known, claim, edge.consumer.name))


def _conflicts(
    known: ConsumerMap, claims: Container[ClaimRef], pods: Container[PodRef]
) -> Iterator[Conflict]:
    """Those about any of the claims and pods."""
    for one in known.conflicts:
        if any(ref in claims for ref in one.claims) or any(ref in pods for ref in one.pods):
            yield one
