"""Edges of the consumer map: the relations between claims, devices, pods and containers that sources report.

An object that a source reports without a UID gets the UID of the only known object with its name; the edge
then has ``by_name``. If podresources lists a claim for a pod, but the kubelet has prepared it only
for other pods, the edge is NAMED: the pod names the claim.
"""

from collections.abc import Iterator

from agent.devices.consumers.consumer_identities import Identities
from agent.devices.consumers.kube_objects import base_request
from agent.model.claim_sources import ConsumerKind, PodClaim, PodObject, PodRef, Reservation, SourceAnswers
from agent.model.consumers import ClaimConsumer, ClaimConsumerEdge, ContainerEdge, DeviceEdge, Relation

Edge = DeviceEdge | ClaimConsumerEdge | ContainerEdge


def collect_edges(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    """Yield all edges (reported relations of claims, devices, pods, containers) in the sources' answers.

    An edge that a source reports twice is yielded twice.
    """
    yield from _prepared(answers, names)
    yield from _listed(answers, names)
    yield from _known_claims(answers, names)
    yield from _known_pods(answers, names)


def pod_consumer(pod: PodRef) -> ClaimConsumer:
    """Convert the identity of a pod to a consumer of a claim."""
    return ClaimConsumer(ConsumerKind.POD, pod.namespace, pod.name, pod.uid)


def _prepared(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.prepared:
        for claim in answer.items:
            ref = names.claim_by_uid(claim.ref)
            for use in claim.devices:
                yield DeviceEdge(ref, use, Relation.PREPARED, answer.provenance)
            for uid in claim.pods:
                yield ClaimConsumerEdge(
                    ref, pod_consumer(names.pod_by_uid(uid)), Relation.PREPARED, answer.provenance
                )


def _listed(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
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
            for one in claim.reserved:
                consumer = _reserved(one, claim.ref.namespace, names)
                yield ClaimConsumerEdge(ref, consumer, Relation.RESERVED, answer.provenance)


def _reserved(reservation: Reservation, namespace: str, names: Identities) -> ClaimConsumer:
    if reservation.kind is ConsumerKind.POD:
        pod = names.pod_by_uid(reservation.uid) if reservation.uid else PodRef(namespace, reservation.name)
        return pod_consumer(pod)
    resource = f"{reservation.resource}.{reservation.api_group}".strip(".")
    return ClaimConsumer(reservation.kind, namespace, reservation.name, reservation.uid, resource)


def _known_pods(answers: SourceAnswers, names: Identities) -> Iterator[Edge]:
    for answer in answers.pods:
        for pod in answer.items:
            ref = names.pod_by_uid(pod.ref.uid)
            named = {one.name: one for one in pod.claims if one.claim}
            for one in named.values():
                claim = names.claim_of_pod(pod.ref.namespace, one.claim, ref.uid)
                yield ClaimConsumerEdge(
                    claim, pod_consumer(ref), Relation.NAMED, answer.provenance, by_name=True
                )
            for container, one, requests in _container_claims(pod, named):
                claim = names.claim_of_pod(pod.ref.namespace, one.claim, ref.uid)
                yield ContainerEdge(claim, ref, container, requests, answer.provenance, by_name=True)


def _container_claims(
    pod: PodObject, named: dict[str, PodClaim]
) -> Iterator[tuple[str, PodClaim, tuple[str, ...]]]:
    for container in pod.containers:
        for use in container.claims:
            if use.name in named:
                yield container.name, named[use.name], (base_request(use.request),) if use.request else ()
