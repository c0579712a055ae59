"""Construction of the consumer map: which claims, pods and containers use which devices.

The map does not depend on the order of the sources' answers. agent.devices.consumers.consumer_queries has
queries on the map.

The module also has the edges of the consumer map: the relations between claims, devices, pods and containers
that sources report.

An object that a source reports without a UID gets the UID of the only known object with its name; the edge
then has ``by_name``. If podresources lists a claim for a pod, but the kubelet has prepared the claim only for
other pods, the edge has the weakest relation, NAMED: the pod's spec names the claim.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

from agent.devices.consumers.consumer_identities import (
    Identities,
    collect_identities,
    find_conflicts,
    provenance_order,
)
from agent.devices.consumers.kube_objects import base_request
from agent.model.claim import ClaimRef
from agent.model.claim_sources import (
    ClaimObject,
    ConsumerKind,
    PodCgroup,
    PodObject,
    PodRef,
    PreparedClaim,
    Provenance,
    Reservation,
    SourceAnswer,
    SourceAnswers,
)
from agent.model.consumers import (
    ClaimConsumer,
    ClaimConsumerEdge,
    ClaimView,
    ConsumerMap,
    ContainerEdge,
    DeviceEdge,
    MissingSource,
    PodView,
    Relation,
)
from agent.model.reading import Absence

Edge = DeviceEdge | ClaimConsumerEdge | ContainerEdge


def collect_edges(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    """Yield all edges (reported relations of claims, devices, pods, containers) in the sources' answers.

    The function yields an edge twice if a source reports it twice.
    """
    yield from _prepared_edges(answers, names)
    yield from _listed_edges(answers, names)
    yield from _known_claims(answers, names)
    yield from _known_pods(answers, names)


def pod_consumer(pod: PodRef) -> ClaimConsumer:
    """Convert the identity of a pod to a consumer of a claim."""
    return ClaimConsumer(ConsumerKind.POD, pod.namespace, pod.name, pod.uid)


def _prepared_edges(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.prepared:
        for claim in answer.items:
            ref = names.claim_by_uid(claim.ref)
            for use in claim.devices:
                yield DeviceEdge(ref, use, Relation.PREPARED, answer.provenance)
            for uid in claim.pods:
                yield ClaimConsumerEdge(
                    ref, pod_consumer(names.pod_by_uid(uid)), Relation.PREPARED, answer.provenance
                )


def _listed_edges(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.listed:
        for pod in answer.items:
            for container in pod.containers:
                for claim in container.claims:
                    ref = names.claim_by_name(claim.namespace, claim.name)
                    consumer = names.pod_of_claim(pod.namespace, pod.name, ref)
                    is_others = names.is_prepared_for_others(ref, consumer)
                    relation = Relation.NAMED if is_others else Relation.LISTED
                    for use in claim.devices:
                        yield DeviceEdge(ref, use, Relation.LISTED, answer.provenance, by_name=True)
                    yield ClaimConsumerEdge(
                        ref, pod_consumer(consumer), relation, answer.provenance, by_name=True
                    )
                    yield ContainerEdge(ref, consumer, container.name, None, answer.provenance, by_name=True)


def _known_claims(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.claims:
        for claim in answer.items:
            ref = names.claim_by_uid(claim.ref)
            for use in claim.devices:
                yield DeviceEdge(ref, use, Relation.ALLOCATED, answer.provenance)
            for reservation in claim.reserved:
                consumer = _reserving_consumer(reservation, claim.ref.namespace, names)
                yield ClaimConsumerEdge(ref, consumer, Relation.RESERVED, answer.provenance)


def _reserving_consumer(reservation: Reservation, namespace: str, names: Identities) -> ClaimConsumer:
    if reservation.kind is ConsumerKind.POD:
        pod = names.pod_by_uid(reservation.uid) if reservation.uid else PodRef(namespace, reservation.name)
        return pod_consumer(pod)
    resource = f"{reservation.resource}.{reservation.api_group}".strip(".")
    return ClaimConsumer(reservation.kind, namespace, reservation.name, reservation.uid, resource)


def _known_pods(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.pods:
        for pod in answer.items:
            ref = names.pod_by_uid(pod.ref.uid)
            named = names.claim_names(pod, ref.uid)
            for name in named.values():
                claim = names.claim_of_pod(pod.ref.namespace, name, ref.uid)
                yield ClaimConsumerEdge(
                    claim, pod_consumer(ref), Relation.NAMED, answer.provenance, by_name=True
                )
            for container, name, requests in _container_claims(pod, named):
                claim = names.claim_of_pod(pod.ref.namespace, name, ref.uid)
                yield ContainerEdge(claim, ref, container, requests, answer.provenance, by_name=True)


def _container_claims(pod: PodObject, named: dict[str, str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for container in pod.containers:
        for use in container.claims:
            if use.name in named:
                yield container.name, named[use.name], (base_request(use.request),) if use.request else ()


# --- the map -----------------------------------------------------------------------------------------------

O = TypeVar("O", PodObject, ClaimObject)  # noqa: E741
K = TypeVar("K")
V = TypeVar("V")


def build_consumer_map(answers: SourceAnswers) -> ConsumerMap:
    """Build the map of claims, their devices and consumers from the answers of all sources."""
    names = collect_identities(answers)
    claims = _claims(answers, names)
    cgroups = min(
        (answer.provenance for answer in answers.live if answer.is_complete),
        key=provenance_order,
        default=None,
    )
    pods = _pods(answers, names, claims, knows_all_cgroups=cgroups is not None)
    pairs = {(edge.use.device, ref) for ref, claim in claims.items() for edge in claim.devices}
    every: tuple[SourceAnswer[Any], ...]
    every = (*answers.prepared, *answers.listed, *answers.pods, *answers.claims, *answers.live)
    incomplete = {answer.provenance.origin for answer in every if not answer.is_complete}
    gaps = {gap for answer in every for gap in _failures_of(answer)}
    return ConsumerMap(
        claims=claims,
        pods=pods,
        devices={device: tuple(refs) for device, refs in _group_by_key(sorted(pairs)).items()},
        groups=_groups(pods),
        conflicts=find_conflicts(names, claims, pods, cgroups),
        missing_sources=tuple(sorted(gaps, key=lambda gap: (provenance_order(gap.provenance), gap.reason))),
        complete=frozenset(answer.provenance.origin for answer in every) - incomplete,
    )


def _group_by_key(pairs: Iterable[tuple[K, V]]) -> Mapping[K, list[V]]:
    found: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def _claims(answers: SourceAnswers, names: Identities) -> dict[ClaimRef, ClaimView]:
    by_claim = _group_by_key((edge.claim, edge) for edge in set(collect_edges(answers, names)))
    prepared = _group_by_key(
        (names.claim_by_uid(item.ref), item) for answer in answers.prepared for item in answer.items
    )
    objects = _group_by_key(
        (names.claim_by_uid(item.ref), (item, answer.provenance))
        for answer in answers.claims
        for item in answer.items
    )
    return {
        ref: _claim(ref, by_claim.get(ref, []), prepared.get(ref, []), objects.get(ref, []))
        for ref in sorted({*by_claim, *prepared, *objects})
    }


def _claim(
    ref: ClaimRef,
    found: Iterable[Edge],
    prepared: Iterable[PreparedClaim],
    objects: Iterable[tuple[ClaimObject, Provenance]],
) -> ClaimView:
    found = sorted(found, key=_edge_order)
    return ClaimView(
        ref=ref,
        devices=tuple(edge for edge in found if isinstance(edge, DeviceEdge)),
        consumers=tuple(edge for edge in found if isinstance(edge, ClaimConsumerEdge)),
        containers=tuple(edge for edge in found if isinstance(edge, ContainerEdge)),
        objects=_best_first(objects),
        waiting=tuple(sorted({driver for claim_record in prepared for driver in claim_record.waiting})),
        skipped=tuple(sorted({driver for claim_record in prepared for driver in claim_record.skipped})),
    )


def _edge_order(edge: Edge) -> tuple[object, ...]:
    content: tuple[object, ...]
    if isinstance(edge, DeviceEdge):
        content = (0, edge.use, edge.relation)
    elif isinstance(edge, ClaimConsumerEdge):
        content = (1, edge.consumer, edge.relation)
    else:
        content = (2, edge.pod, edge.container, edge.requests is None, edge.requests or ())
    return (*content, provenance_order(edge.provenance), edge.by_name)


def _best_first(objects: Iterable[tuple[O, Provenance]]) -> tuple[tuple[O, Provenance], ...]:
    found = set(objects)
    if len(found) < 2:  # the usual case; sorting by the object's text is slow
        return tuple(found)
    return tuple(sorted(found, key=lambda pair: (provenance_order(pair[1]), repr(pair[0]))))


def _pods(
    answers: SourceAnswers,
    names: Identities,
    claims: Mapping[ClaimRef, ClaimView],
    *,
    knows_all_cgroups: bool,
) -> dict[PodRef, PodView]:
    of_pod = _group_by_key(
        (edge.consumer.pod, ref)
        for ref, claim in claims.items()
        for edge in claim.consumers
        if edge.consumer.pod
    )
    objects = _group_by_key(
        (names.pod_by_uid(item.ref.uid), (item, answer.provenance))
        for answer in answers.pods
        for item in answer.items
    )
    live = _group_by_key((names.pod_by_uid(pod.uid), pod) for answer in answers.live for pod in answer.items)
    return {
        ref: PodView(
            ref=ref,
            objects=_best_first(objects.get(ref, [])),
            claims=tuple(sorted(set(of_pod.get(ref, [])))),
            running=_has_processes(live.get(ref, []), knows_all_cgroups and bool(ref.uid)),
            live=tuple(
                sorted(set(chain.from_iterable(cgroup.containers for cgroup in live.get(ref, []))), key=repr)
            ),
        )
        for ref in sorted({*of_pod, *objects, *live})
    }


def _groups(pods: Mapping[PodRef, PodView]) -> Mapping[tuple[str, str], tuple[PodRef, ...]]:
    found = {
        ((obj.ref.namespace, obj.group), ref)
        for ref, view in pods.items()
        for obj, _ in view.objects
        if obj.group
    }
    return {group: tuple(refs) for group, refs in _group_by_key(sorted(found)).items()}


def _has_processes(live: Iterable[PodCgroup], knows_all_cgroups: bool) -> bool | None:
    """Return True if one of a pod's cgroups has processes; None: unknown.

    If all cgroups are known, a pod without a cgroup has no processes.
    """
    states = {cgroup.running for cgroup in live}
    if not states:
        return False if knows_all_cgroups else None
    return True if True in states else None if None in states else False


def _failures_of(answer: SourceAnswer[Any]) -> Iterator[MissingSource]:
    if answer.absence is not None:
        yield MissingSource(answer.provenance, answer.absence, answer.reason)
    for text in answer.invalid:
        yield MissingSource(answer.provenance, Absence.UNREADABLE, text)
