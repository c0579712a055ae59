"""The map of who uses what on this node: claims, their devices, and who holds them.

It follows from what was said and from nothing else: the same words in another order make the same map. What
it answers is in agent.devices.consumers.affected.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

from agent.devices.consumers.conflicts import conflicts
from agent.devices.consumers.edges import Edge, edges
from agent.devices.consumers.identities import Identities, identities, witness_order
from agent.model.claim import ClaimRef
from agent.model.claim_sources import (
    KnownClaim,
    KnownPod,
    LivePod,
    Origin,
    PodRef,
    PreparedClaim,
    Provenance,
    SourceAnswer,
    SourceAnswers,
)
from agent.model.consumers import (
    ClaimView,
    ConsumerEdge,
    ConsumerMap,
    ContainerEdge,
    DeviceEdge,
    MissingSource,
    PodView,
)
from agent.model.reading import Absence

O = TypeVar("O", KnownPod, KnownClaim)  # noqa: E741
K = TypeVar("K")
V = TypeVar("V")


def consumer_map(heard: SourceAnswers) -> ConsumerMap:
    """Who uses what, from all that was said."""
    who = identities(heard)
    claims = _claims(heard, who)
    cgroups = min((told.witness for told in heard.live if told.is_whole), key=witness_order, default=None)
    pods = _pods(heard, who, claims, is_whole=cgroups is not None)
    pairs = {(edge.use.device, ref) for ref, claim in claims.items() for edge in claim.devices}
    return ConsumerMap(
        claims=claims,
        pods=pods,
        devices={device: tuple(refs) for device, refs in _gathered(sorted(pairs)).items()},
        groups=_groups(pods),
        conflicts=conflicts(who, claims, pods, cgroups),
        gaps=tuple(_gaps(heard)),
        whole=_whole(heard),
    )


def _gathered(pairs: Iterable[tuple[K, V]]) -> Mapping[K, list[V]]:
    found: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


# --- claims ------------------------------------------------------------------------------------------------


def _claims(heard: SourceAnswers, who: Identities) -> dict[ClaimRef, ClaimView]:
    by_claim = _gathered((edge.claim, edge) for edge in set(edges(heard, who)))
    prepared = _gathered((who.claim(one.ref), one) for told in heard.prepared for one in told.items)
    objects = _gathered(
        (who.claim(one.ref), (one, told.witness)) for told in heard.claims for one in told.items
    )
    return {
        ref: _claim(ref, by_claim.get(ref, []), prepared.get(ref, []), objects.get(ref, []))
        for ref in sorted({*by_claim, *prepared, *objects})
    }


def _claim(
    ref: ClaimRef,
    found: Iterable[Edge],
    prepared: Iterable[PreparedClaim],
    objects: Iterable[tuple[KnownClaim, Provenance]],
) -> ClaimView:
    found = sorted(found, key=_edge_order)
    return ClaimView(
        ref=ref,
        devices=tuple(edge for edge in found if isinstance(edge, DeviceEdge)),
        consumers=tuple(edge for edge in found if isinstance(edge, ConsumerEdge)),
        containers=tuple(edge for edge in found if isinstance(edge, ContainerEdge)),
        objects=_best_first(objects),
        waiting=tuple(sorted({driver for one in prepared for driver in one.waiting})),
        skipped=tuple(sorted({driver for one in prepared for driver in one.skipped})),
    )


def _edge_order(edge: Edge) -> tuple[object, ...]:
    """Edges of one kind stand together, and those that say the same."""
    what: tuple[object, ...]
    if isinstance(edge, DeviceEdge):
        what = (0, edge.use, edge.relation)
    elif isinstance(edge, ConsumerEdge):
        what = (1, edge.consumer, edge.relation)
    else:
        what = (2, edge.pod, edge.container, edge.requests is None, edge.requests or ())
    return (*what, witness_order(edge.witness), edge.by_name)


def _best_first(objects: Iterable[tuple[O, Provenance]]) -> tuple[tuple[O, Provenance], ...]:
    found = set(objects)
    if len(found) < 2:  # nearly always, and the text of an object is long
        return tuple(found)
    return tuple(sorted(found, key=lambda one: (witness_order(one[1]), repr(one[0]))))


# --- pods --------------------------------------------------------------------------------------------------


def _pods(
    heard: SourceAnswers, who: Identities, claims: Mapping[ClaimRef, ClaimView], *, is_whole: bool
) -> dict[PodRef, PodView]:
    of_pod = _gathered(
        (edge.consumer.pod, ref)
        for ref, claim in claims.items()
        for edge in claim.consumers
        if edge.consumer.pod
    )
    objects = _gathered(
        (who.pod(one.ref.uid), (one, told.witness)) for told in heard.pods for one in told.items
    )
    live = _gathered((who.pod(one.uid), one) for told in heard.live for one in told.items)
    return {
        ref: PodView(
            ref=ref,
            objects=_best_first(objects.get(ref, [])),
            claims=tuple(sorted(set(of_pod.get(ref, [])))),
            running=_running(live.get(ref, []), is_whole and bool(ref.uid)),
            live=tuple(
                sorted(set(chain.from_iterable(one.containers for one in live.get(ref, []))), key=repr)
            ),
        )
        for ref in sorted({*of_pod, *objects, *live})
    }


def _groups(pods: Mapping[PodRef, PodView]) -> Mapping[tuple[str, str], tuple[PodRef, ...]]:
    found = {
        ((one.ref.namespace, one.group), ref)
        for ref, view in pods.items()
        for one, _ in view.objects
        if one.group
    }
    return {group: tuple(refs) for group, refs in _gathered(sorted(found)).items()}


def _running(live: Iterable[LivePod], is_whole: bool) -> bool | None:
    """Whether a pod has processes; one without a cgroup has none, where all cgroups are known."""
    states = {one.running for one in live}
    if not states:
        return False if is_whole else None
    return True if True in states else None if None in states else False


# --- what is not known -------------------------------------------------------------------------------------


def _gaps(heard: SourceAnswers) -> Iterator[MissingSource]:
    gaps = {gap for one in _all(heard) for gap in _gaps_of(one)}
    yield from sorted(gaps, key=lambda gap: (witness_order(gap.witness), gap.why))


def _gaps_of(told: SourceAnswer[Any]) -> Iterator[MissingSource]:
    if told.absence is not None:
        yield MissingSource(told.witness, told.absence, told.why)
    for text in told.wrong:
        yield MissingSource(told.witness, Absence.UNREADABLE, text)


def _whole(heard: SourceAnswers) -> frozenset[Origin]:
    """Those who told all of it, each time that they were asked."""
    whole = {one.witness.origin for one in _all(heard) if one.is_whole}
    return frozenset(whole - {one.witness.origin for one in _all(heard) if not one.is_whole})


def _all(heard: SourceAnswers) -> tuple[SourceAnswer[Any], ...]:
    return (*heard.prepared, *heard.listed, *heard.pods, *heard.claims, *heard.live)
