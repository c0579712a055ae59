"""Devices that pods on this Kubernetes node certainly use now, from the consumer map.

A pod uses a device if the device is prepared for the pod on this node, or the kubelet lists it for the pod. A
reservation alone does not count.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, Protocol

from agent.devices.consumers.consumer_queries import USE_ON_THIS_NODE, containers_using_device, has_device
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.consumers import ClaimConsumerEdge, ClaimView, ConsumerMap, DeviceEdge

CONTAINERS_MAX: Final = 16
"""Largest number of containers that are listed for one pod's use of a device."""
MAYBE_MAX: Final = 4
"""Largest number of possible pod names that are listed for one use of a device."""

USE_SOURCE_RANKS: Final[Mapping[Origin, int]] = {
    Origin.CHECKPOINT: 0,
    Origin.PODRESOURCES: 1,
    Origin.DRIVER: 2,
    Origin.CLAIMS_FILE: 3,
}
"""Rank of each source as proof that a pod uses a device on this node; 0 is the strongest proof."""

UsageKey = tuple[str, str, DeviceRef]
"""Identity of one pod's use of a device: (pod, claim, device).

Pod and claim are UIDs; if the UID is unknown, they are ``<namespace>/<name>``.
"""


class CurrentUse(NamedTuple):
    """One pod's current use of one device. Fields as in :class:`agent.model.device_usage.PodDeviceUsage`."""

    pod: PodRef
    claim: ClaimRef
    device: DeviceRef
    sources: tuple[Origin, ...]
    requests: tuple[str, ...]
    containers: tuple[str, ...]
    owner: str
    maybe: tuple[str, ...]
    may_be_duplicate: bool
    """True: the pod has no UID, and may be the same as another pod of the claim, which has a UID."""


class HasUsageIdentity(Protocol):
    """Record of a use of a device that has a pod, a claim and a device."""

    @property
    def pod(self) -> PodRef: ...
    @property
    def claim(self) -> ClaimRef: ...
    @property
    def device(self) -> DeviceRef: ...


def usage_key(use: HasUsageIdentity) -> UsageKey:
    """Return the identity of one pod's use of a device, with UIDs where they are known."""
    return (use.pod.uid or str(use.pod), use.claim.uid or str(use.claim), use.device)


def usage_keys_with_names(use: HasUsageIdentity) -> Iterator[UsageKey]:
    """Yield the other identities of a pod's use of a device: with the name of the pod, the claim or both."""
    pods = [use.pod.uid, str(use.pod)] if use.pod.uid and use.pod.name else [use.pod.uid or str(use.pod)]
    claims = [use.claim.uid, str(use.claim)] if use.claim.uid else [str(use.claim)]
    keys = [(pod, claim, use.device) for pod in pods for claim in claims]
    yield from keys[1:]


def current_uses(known: ConsumerMap) -> Mapping[UsageKey, CurrentUse]:
    """Return all current uses of devices by pods, by the identity of the use."""
    return {usage_key(one): one for claim in known.claims.values() for one in _uses_of_claim(known, claim)}


def _uses_of_claim(known: ConsumerMap, claim: ClaimView) -> Iterator[CurrentUse]:
    by_device: dict[DeviceRef, list[DeviceEdge]] = {}
    for device_edge in claim.devices:
        by_device.setdefault(device_edge.use.device, []).append(device_edge)
    given = {device: edges for device, edges in by_device.items() if has_device(claim, device, edges)}
    by_pod: dict[PodRef, list[ClaimConsumerEdge]] = {}
    for edge in claim.consumers:
        if edge.consumer.pod and edge.relation in USE_ON_THIS_NODE:
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
            containers = containers_using_device(named, requests, is_only_device=len(by_device) == 1)
            yield CurrentUse(
                pod=pod,
                claim=claim.ref,
                device=device,
                sources=tuple(sorted({proof, _strongest(of_device)})),
                requests=tuple(sorted(requests)),
                containers=tuple(one.name for one in containers)[:CONTAINERS_MAX],
                owner=owner,
                maybe=() if pod.name else names[:MAYBE_MAX],
                may_be_duplicate=doubtful,
            )


def _strongest(edges: list[ClaimConsumerEdge] | list[DeviceEdge]) -> Origin:
    return min((edge.provenance.origin for edge in edges), key=USE_SOURCE_RANKS.__getitem__)
