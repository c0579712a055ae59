"""Devices that pods on this Kubernetes node certainly use now, from the consumer map.

A device is in use if it is prepared for the pod on this node or the kubelet lists it. A reservation does not
count.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, Protocol

from agent.devices.consumers.affected import HERE, containers_of, is_given
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.consumers import ClaimView, ConsumerEdge, ConsumerMap, DeviceEdge

CONTAINERS_MAX: Final = 16
MAYBE_MAX: Final = 4

RANKS: Final[Mapping[Origin, int]] = {
    Origin.CHECKPOINT: 0,
    Origin.PODRESOURCES: 1,
    Origin.DRIVER: 2,
    Origin.CLAIMS_FILE: 3,
}
"""Rank of each source by its knowledge of use on this node; 0 is best. A better source needs no other."""

UsageKey = tuple[str, str, DeviceRef]
"""Key of a use of a device by a pod: pod, claim (each by UID, or by ``<namespace>/<name>`` if the UID is
unknown) and device."""


class CurrentUse(NamedTuple):
    """Current use of a device by a pod. Fields as in :class:`agent.model.uses.DeviceUsage`."""

    pod: PodRef
    claim: ClaimRef
    device: DeviceRef
    sources: tuple[Origin, ...]
    requests: tuple[str, ...]
    containers: tuple[str, ...]
    owner: str
    maybe: tuple[str, ...]
    doubtful: bool
    """Whether the pod has no UID and may be the same pod as another pod of the claim that has a UID."""


class HasIdentity(Protocol):
    """Object that names a pod, a claim and a device."""

    @property
    def pod(self) -> PodRef: ...
    @property
    def claim(self) -> ClaimRef: ...
    @property
    def device(self) -> DeviceRef: ...


def key_of(one: HasIdentity) -> UsageKey:
    """Return the key of a use of a device by a pod, with UIDs if they are known."""
    return (one.pod.uid or str(one.pod), one.claim.uid or str(one.claim), one.device)


def lesser_keys(one: HasIdentity) -> Iterator[UsageKey]:
    """Yield the other keys of a use of a device by a pod, with names instead of UIDs."""
    pods = [one.pod.uid, str(one.pod)] if one.pod.uid and one.pod.name else [one.pod.uid or str(one.pod)]
    claims = [one.claim.uid, str(one.claim)] if one.claim.uid else [str(one.claim)]
    keys = [(pod, claim, one.device) for pod in pods for claim in claims]
    yield from keys[1:]


def in_use(known: ConsumerMap) -> Mapping[UsageKey, CurrentUse]:
    """Return all current uses of devices by pods, by key."""
    return {key_of(one): one for claim in known.claims.values() for one in _of_claim(known, claim)}


def _of_claim(known: ConsumerMap, claim: ClaimView) -> Iterator[CurrentUse]:
    by_device: dict[DeviceRef, list[DeviceEdge]] = {}
    for device_edge in claim.devices:
        by_device.setdefault(device_edge.use.device, []).append(device_edge)
    given = {device: edges for device, edges in by_device.items() if is_given(claim, device, edges)}
    by_pod: dict[PodRef, list[ConsumerEdge]] = {}
    for edge in claim.consumers:
        if edge.consumer.pod and edge.relation in HERE:
            by_pod.setdefault(edge.consumer.pod, []).append(edge)
    names = tuple(str(pod) for pod in by_pod if not pod.uid)
    for pod, of_pod in by_pod.items():
        doubtful = not pod.uid and len(names) < len(by_pod)
        obj = known.pods[pod].known
        owner = str(obj.controller or "") if obj else ""
        named = [one for one in claim.containers if one.pod == pod]
        proof = _strongest(of_pod)
        for device, of_device in given.items():
            requests = {request for one in of_device for request in one.use.requests}
            containers = containers_of(named, requests, only=len(by_device) == 1)
            yield CurrentUse(
                pod=pod,
                claim=claim.ref,
                device=device,
                sources=tuple(sorted({proof, _strongest(of_device)})),
                requests=tuple(sorted(requests)),
                containers=tuple(one.name for one in containers)[:CONTAINERS_MAX],
                owner=owner,
                maybe=() if pod.name else names[:MAYBE_MAX],
                doubtful=doubtful,
            )


def _strongest(edges: list[ConsumerEdge] | list[DeviceEdge]) -> Origin:
    return min((edge.provenance.origin for edge in edges), key=RANKS.__getitem__)
