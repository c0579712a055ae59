"""Construction of the consumer map: claims of this node, their devices and consumers.

The map depends only on the answers of the sources, not on their order. Queries on the map are in
agent.devices.consumers.affected.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

from agent.devices.consumers.conflicts import conflicts
from agent.devices.consumers.edges import Edge, edges
from agent.devices.consumers.identities import Identities, identities, provenance_order
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


def consumer_map(answers: SourceAnswers) -> ConsumerMap:
    """Build the consumer map from the answers of all sources."""
    names = identities(answers)
    claims = _claims(answers, names)
    cgroups = min(
        (answer.provenance for answer in answers.live if answer.is_complete),
        key=provenance_order,
        default=None,
    )
    pods = _pods(answers, names, claims, is_whole=cgroups is not None)
    pairs = {(edge.use.device, ref) for ref, claim in claims.items() for edge in claim.devices}
    return ConsumerMap(
        claims=claims,
        pods=pods,
        devices={device: tuple(refs) for device, refs in _group_by_key(sorted(pairs)).items()},
        groups=_groups(pods),
        conflicts=conflicts(names, claims, pods, cgroups),
        missing_sources=tuple(_gaps(answers)),
        complete=_whole(answers),
    )


def _group_by_key(pairs: Iterable[tuple[K, V]]) -> Mapping[K, list[V]]:
    found: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


# --- claims ------------------------------------------------------------------------------------------------


def _claims(answers: SourceAnswers, names: Identities) -> dict[ClaimRef, ClaimView]:
    by_claim = _group_by_key((edge.claim, edge) for edge in set(edges(answers, names)))
    prepared = _group_by_key(
        (names.claim(one.ref), one) for answer in answers.prepared for one in answer.items
    )
    objects = _group_by_key(
        (names.claim(one.ref), (one, answer.provenance)) for answer in answers.claims for one in answer.items
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
    """Return a sort key that groups edges by kind and content."""
    what: tuple[object, ...]
    if isinstance(edge, DeviceEdge):
        what = (0, edge.use, edge.relation)
    elif isinstance(edge, ConsumerEdge):
        what = (1, edge.consumer, edge.relation)
    else:
        what = (2, edge.pod, edge.container, edge.requests is None, edge.requests or ())
    return (*what, provenance_order(edge.provenance), edge.by_name)


def _best_first(objects: Iterable[tuple[O, Provenance]]) -> tuple[tuple[O, Provenance], ...]:
    found = set(objects)
    if len(found) < 2:  # the usual case; sorting by the object's text is slow
        return tuple(found)
    return tuple(sorted(found, key=lambda one: (provenance_order(one[1]), repr(one[0]))))


# --- pods --------------------------------------------------------------------------------------------------


def _pods(
    answers: SourceAnswers, names: Identities, claims: Mapping[ClaimRef, ClaimView], *, is_whole: bool
) -> dict[PodRef, PodView]:
    of_pod = _group_by_key(
        (edge.consumer.pod, ref)
        for ref, claim in claims.items()
        for edge in claim.consumers
        if edge.consumer.pod
    )
    objects = _group_by_key(
        (names.pod(one.ref.uid), (one, answer.provenance)) for answer in answers.pods for one in answer.items
    )
    live = _group_by_key((names.pod(one.uid), one) for answer in answers.live for one in answer.items)
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
    return {group: tuple(refs) for group, refs in _group_by_key(sorted(found)).items()}


def _running(live: Iterable[LivePod], is_whole: bool) -> bool | None:
    """Return whether a pod has processes; None: unknown.

    A pod without a cgroup has no processes if all cgroups are known.
    """
    states = {one.running for one in live}
    if not states:
        return False if is_whole else None
    return True if True in states else None if None in states else False


# --- missing sources ---------------------------------------------------------------------------------------


def _gaps(answers: SourceAnswers) -> Iterator[MissingSource]:
    gaps = {gap for one in _all(answers) for gap in _gaps_of(one)}
    yield from sorted(gaps, key=lambda gap: (provenance_order(gap.provenance), gap.why))


def _gaps_of(answer: SourceAnswer[Any]) -> Iterator[MissingSource]:
    if answer.absence is not None:
        yield MissingSource(answer.provenance, answer.absence, answer.reason)
    for text in answer.invalid:
        yield MissingSource(answer.provenance, Absence.UNREADABLE, text)


def _whole(answers: SourceAnswers) -> frozenset[Origin]:
    """Return the sources of which all answers were complete."""
    whole = {one.provenance.origin for one in _all(answers) if one.is_complete}
    return frozenset(whole - {one.provenance.origin for one in _all(answers) if not one.is_complete})


def _all(answers: SourceAnswers) -> tuple[SourceAnswer[Any], ...]:
    return (*answers.prepared, *answers.listed, *answers.pods, *answers.claims, *answers.live)
