"""Edges of the consumer map between claims, devices, consumers and containers: one for each reported fact.

An object reported without a UID gets the UID of the only known object with its name; the edge is then marked
``by_name``.
"""

from collections.abc import Iterator

from agent.devices.consumers.identities import Identities
from agent.devices.consumers.kube_objects import base_request
from agent.model.claim_sources import ConsumerKind, KnownPod, PodClaim, PodRef, Reservation, SourceAnswers
from agent.model.consumers import Consumer, ConsumerEdge, ContainerEdge, DeviceEdge, Relation

Edge = DeviceEdge | ConsumerEdge | ContainerEdge


def edges(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    """Yield all edges of the consumer map; an edge appears twice if a source reports it twice."""
    yield from _prepared(answers, names)
    yield from _listed(answers, names)
    yield from _known_claims(answers, names)
    yield from _known_pods(answers, names)


def consumer_of(pod: PodRef) -> Consumer:
    """Return a pod as a consumer."""
    return Consumer(ConsumerKind.POD, pod.namespace, pod.name, pod.uid)


def _prepared(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.prepared:
        for claim in answer.items:
            ref = names.claim(claim.ref)
            for use in claim.devices:
                yield DeviceEdge(ref, use, Relation.PREPARED, answer.provenance)
            for uid in claim.pods:
                yield ConsumerEdge(ref, consumer_of(names.pod(uid)), Relation.PREPARED, answer.provenance)


def _listed(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.listed:
        for pod in answer.items:
            consumer = names.pod_named(pod.namespace, pod.name)
            for container in pod.containers:
                for claim in container.claims:
                    ref = names.claim_named(claim.namespace, claim.name)
                    for use in claim.devices:
                        yield DeviceEdge(ref, use, Relation.LISTED, answer.provenance, by_name=True)
                    yield ConsumerEdge(
                        ref, consumer_of(consumer), Relation.LISTED, answer.provenance, by_name=True
                    )
                    yield ContainerEdge(ref, consumer, container.name, None, answer.provenance, by_name=True)


def _known_claims(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.claims:
        for claim in answer.items:
            ref = names.claim(claim.ref)
            for use in claim.devices:
                yield DeviceEdge(ref, use, Relation.ALLOCATED, answer.provenance)
            for one in claim.reserved:
                consumer = _reserved(one, claim.ref.namespace, names)
                yield ConsumerEdge(ref, consumer, Relation.RESERVED, answer.provenance)


def _reserved(one: Reservation, namespace: str, names: Identities) -> Consumer:
    """Return the consumer of a reservation. Only a reservation for a pod has a pod's UID."""
    if one.kind is ConsumerKind.POD:
        pod = names.pod(one.uid) if one.uid else PodRef(namespace, one.name)
        return consumer_of(pod)
    resource = f"{one.resource}.{one.api_group}".strip(".")
    return Consumer(one.kind, namespace, one.name, one.uid, resource)


def _known_pods(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.pods:
        for pod in answer.items:
            ref = names.pod(pod.ref.uid)
            named = {one.name: one for one in pod.claims if one.claim}
            for one in named.values():
                claim = names.claim_named(pod.ref.namespace, one.claim)
                yield ConsumerEdge(claim, consumer_of(ref), Relation.NAMED, answer.provenance, by_name=True)
            for container, one, requests in _uses(pod, named):
                claim = names.claim_named(pod.ref.namespace, one.claim)
                yield ContainerEdge(claim, ref, container, requests, answer.provenance, by_name=True)


def _uses(pod: KnownPod, named: dict[str, PodClaim]) -> Iterator[tuple[str, PodClaim, tuple[str, ...]]]:
    for container in pod.containers:
        for use in container.claims:
            if use.name in named:
                yield container.name, named[use.name], (base_request(use.request),) if use.request else ()
