"""From what everybody said to what concerns a device, a pod or a claim. Pure.

Nothing is joined by guess: where a name and a UID may be one and the same, both stand there, and it is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agent.cli.explain_find import find_claims, find_devices, find_pods
from agent.cli.explain_words import (
    AGENT,
    PREPARES,
    TAINTS,
    Account,
    ClaimFacts,
    DeviceFacts,
    Explained,
    Gathered,
    Hurt,
    PodFacts,
    Verdict,
)
from agent.cli.prepare_text import Claim
from agent.devices.affected import affected, members, refusals
from agent.devices.consumers import consumer_map
from agent.errors import UsageError
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.consumers import Conflict, ConsumerMap
from agent.model.health import Severity
from agent.model.reading import Absence
from agent.model.testimony import ConsumerKind, PodRef

DEVICE = "device"
POD = "pod"
CLAIM = "claim"


def explain(kind: str, word: str, told: Gathered) -> Explained:
    """All that concerns what is meant.

    Args:
        kind: :data:`DEVICE`, :data:`POD` or :data:`CLAIM`.
        word: What it is called.

    Raises:
        UsageError: Nothing of this name is known, or several things are; and who could not be asked.
    """
    known = consumer_map(told.heard)
    try:
        devices, claims, pods = _concerned(kind, word, known, told)
    except UsageError as error:
        missing = [f"{one.source}: {one.why}" for one in told.accounts if _may_know(one)]
        raise UsageError("\n  not to be had: ".join([str(error), *missing])) from None
    hurt = [Hurt(device, one) for device in devices for one in affected(known, device)]
    if kind == DEVICE:
        pods = {one.affected.pod.ref: None for one in hurt}
    else:
        hurt = [one for one in hurt if one.affected.claim in claims and one.affected.pod.ref in pods]
    return Explained(
        kind=kind,
        now=told.now,
        devices=tuple(_device(one, told) for one in devices),
        claims=tuple(ClaimFacts(known.claims[one], _records(one, told)) for one in claims),
        pods=tuple(_pod(one, known, told) for one in pods),
        hurt=tuple(hurt),
        risks=tuple(one for one in refusals(known) if one.pod in pods and one.claim in claims),
        conflicts=tuple(_conflicts(known, claims, pods)),
        accounts=told.accounts,
    )


def _may_know(account: Account) -> bool:
    """Whether something may not be known because a source is missing: not every driver keeps files."""
    is_missed = account.absence is Absence.UNREADABLE or account.source not in {PREPARES, TAINTS}
    return bool(account.absence and account.place and is_missed)


def severity_of(explained: Explained) -> Severity:
    """That of the worst device concerned. Of a claim without a device that anybody knows of nothing is known;
    of a pod that is seen to name no claim there is nothing to know."""
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
        found = dict.fromkeys(find_devices(word, _all_devices(known, told), cdi, _mirrors(told)))
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
    mirrors = _mirrors(told)
    yield from (one for one in _streamed(told) if one not in mirrors)
    yield from (one.device for one in told.beliefs)
    yield from (one.device for one in told.broken)
    yield from (device for one in told.records for device in one.outcome.devices)
    yield from (device for tainted in told.taints.values() for device in tainted)


def _streamed(told: Gathered) -> Iterator[DeviceRef]:
    for driver, stream in told.streams.items():
        yield from (DeviceRef(driver, one.pool, one.device) for one in stream.report.devices)


def _mirrors(told: Gathered) -> dict[DeviceRef, DeviceRef]:
    """Devices of drivers that have declared nothing, each with the host's own that it is: on the socket of
    such a driver the agent tells of the host's."""
    refs = {DeviceRef(*one.key) for one in told.report.devices} if told.report else set()
    declaring = {ref.driver for ref in refs}
    return {
        ref: host
        for ref in _streamed(told)
        if ref.driver not in declaring
        and told.streams[ref.driver].of_agent
        and (host := ref._replace(driver="")) in refs
    }


def _claims_of(known: ConsumerMap, pod: PodRef) -> Iterator[ClaimRef]:
    """A pod's claims, and those of its pod group that it names or may name."""
    yield from known.pods[pod].claims
    groups = {one.group for one, _ in known.pods[pod].objects if one.group}
    for ref, claim in known.claims.items():
        held = {
            edge.consumer.name for edge in claim.consumers if edge.consumer.kind is ConsumerKind.POD_GROUP
        }
        for group in groups & held:
            if any(one.ref == pod for one in members(known, ref, group)):
                yield ref


def _pods_of(known: ConsumerMap, claim: ClaimRef) -> Iterator[PodRef]:
    """The pods of a claim, then those of its pod groups."""
    edges = known.claims[claim].consumers
    yield from (edge.consumer.pod for edge in edges if edge.consumer.pod)
    for edge in edges:
        if edge.consumer.kind is ConsumerKind.POD_GROUP:
            yield from (one.ref for one in members(known, claim, edge.consumer.name))


def _conflicts(known: ConsumerMap, claims: Iterable[ClaimRef], pods: Iterable[PodRef]) -> Iterator[Conflict]:
    """Those about the claims and pods, by the names that conflicts have for them."""
    names = {name for ref in claims for name in (f"claim {ref}", f"claim of UID {ref.uid}")}
    for pod in pods:
        names |= {f"pod {pod.namespace}/{pod.name}", f"pod {pod.uid}", f"pod of UID {pod.uid}"}
    for one in known.conflicts:
        if names & set(one.subject.split(", ")):
            yield one


# --- what is known of each ---------------------------------------------------------------------------------


def _device(ref: DeviceRef, told: Gathered) -> DeviceFacts:
    by_agent = _by_agent(ref, told)
    by_driver = _by_driver(ref, told)
    tainted = told.taints.get(ref.driver)
    return DeviceFacts(
        ref,
        verdict=by_agent or by_driver,
        told=by_driver,
        belief=next((one for one in told.beliefs if one.device == ref), None),
        taints=None if tainted is None else tainted.get(ref, ()),
        broken=tuple(one for one in told.broken if one.device == ref),
    )


def _by_agent(ref: DeviceRef, told: Gathered) -> Verdict | None:
    """What the agent says of it."""
    if told.report is None:
        return None
    by_ref = {DeviceRef(*one.key): one for one in told.report.devices}
    health = by_ref.get(_mirrors(told).get(ref, ref))
    return Verdict(health, AGENT) if health else None


def _by_driver(ref: DeviceRef, told: Gathered) -> Verdict | None:
    stream = told.streams.get(ref.driver)
    if stream is None:
        return None
    by_name = {(one.pool, one.device): one for one in stream.report.devices}
    health = by_name.get((ref.pool, ref.device))
    return Verdict(health, stream.socket) if health else None


def _records(claim: ClaimRef, told: Gathered) -> tuple[Claim, ...]:
    return tuple(one for one in told.records if one.outcome.claim.uid == claim.uid)


def _pod(ref: PodRef, known: ConsumerMap, told: Gathered) -> PodFacts:
    notes = told.report.notes if told.report else ()
    return PodFacts(
        known.pods[ref],
        maybe=tuple(_maybe(ref, known)),
        notes=tuple(one for one in notes if ref.uid and one.subject.split()[:2] == ["pod", ref.uid]),
    )


def _maybe(pod: PodRef, known: ConsumerMap) -> Iterator[PodRef]:
    """Pods that have a claim of this one's, and of which just that is known that of this one is not."""
    if pod.name and pod.uid:
        return
    claims = set(known.pods[pod].claims)
    for other, view in known.pods.items():
        fits = (not other.name and other.uid) if pod.name else (other.name and not other.uid)
        if fits and not claims.isdisjoint(view.claims):
            yield other
