"""Edges between claims, devices, consumers and containers: one for each thing that a source said.

None is invented and none is left out. What has no UID gets that of the only one of its name, and says so.
"""

from collections.abc import Iterator

from agent.devices.consumers.identities import Identities
from agent.devices.consumers.kube_objects import base_request
from agent.model.claim_sources import ConsumerKind, KnownPod, PodClaim, PodRef, Reservation, SourceAnswers
from agent.model.consumers import Consumer, ConsumerEdge, ContainerEdge, DeviceEdge, Relation

Edge = DeviceEdge | ConsumerEdge | ContainerEdge


def edges(heard: SourceAnswers, who: Identities) -> Iterator[Edge]:
    """All edges; the same one may come twice if a source said so twice."""
    yield from _prepared(heard, who)
    yield from _listed(heard, who)
    yield from _known_claims(heard, who)
    yield from _known_pods(heard, who)


def consumer_of(pod: PodRef) -> Consumer:
    """A pod as a consumer."""
    return Consumer(ConsumerKind.POD, pod.namespace, pod.name, pod.uid)


def _prepared(heard: SourceAnswers, who: Identities) -> Iterator[Edge]:
    for told in heard.prepared:
        for claim in told.items:
            ref = who.claim(claim.ref)
            for use in claim.devices:
                yield DeviceEdge(ref, use, Relation.PREPARED, told.witness)
            for uid in claim.pods:
                yield ConsumerEdge(ref, consumer_of(who.pod(uid)), Relation.PREPARED, told.witness)


def _listed(heard: SourceAnswers, who: Identities) -> Iterator[Edge]:
    for told in heard.listed:
        for pod in told.items:
            consumer = who.pod_named(pod.namespace, pod.name)
            for container in pod.containers:
                for claim in container.claims:
                    ref = who.claim_named(claim.namespace, claim.name)
                    for use in claim.devices:
                        yield DeviceEdge(ref, use, Relation.LISTED, told.witness, by_name=True)
                    yield ConsumerEdge(
                        ref, consumer_of(consumer), Relation.LISTED, told.witness, by_name=True
                    )
                    yield ContainerEdge(ref, consumer, container.name, None, told.witness, by_name=True)


def _known_claims(heard: SourceAnswers, who: Identities) -> Iterator[Edge]:
    for told in heard.claims:
        for claim in told.items:
            ref = who.claim(claim.ref)
            for use in claim.devices:
                yield DeviceEdge(ref, use, Relation.ALLOCATED, told.witness)
            for one in claim.reserved:
                consumer = _reserved(one, claim.ref.namespace, who)
                yield ConsumerEdge(ref, consumer, Relation.RESERVED, told.witness)


def _reserved(one: Reservation, namespace: str, who: Identities) -> Consumer:
    """Whom a reservation means. Only a pod's UID is a pod's."""
    if one.kind is ConsumerKind.POD:
        pod = who.pod(one.uid) if one.uid else PodRef(namespace, one.name)
        return consumer_of(pod)
    resource = f"{one.resource}.{one.api_group}".strip(".")
    return Consumer(one.kind, namespace, one.name, one.uid, resource)


def _known_pods(heard: SourceAnswers, who: Identities) -> Iterator[Edge]:
    for told in heard.pods:
        for pod in told.items:
            ref = who.pod(pod.ref.uid)
            named = {one.name: one for one in pod.claims if one.claim}
            for one in named.values():
                claim = who.claim_named(pod.ref.namespace, one.claim)
                yield ConsumerEdge(claim, consumer_of(ref), Relation.NAMED, told.witness, by_name=True)
            for container, one, requests in _uses(pod, named):
                claim = who.claim_named(pod.ref.namespace, one.claim)
                yield ContainerEdge(claim, ref, container, requests, told.witness, by_name=True)


def _uses(pod: KnownPod, named: dict[str, PodClaim]) -> Iterator[tuple[str, PodClaim, tuple[str, ...]]]:
    for container in pod.containers:
        for use in container.claims:
            if use.name in named:
                yield container.name, named[use.name], (base_request(use.request),) if use.request else ()
