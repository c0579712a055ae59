"""Queries on the consumer map: pods that use a device, pods and claims by name, and pods that the kubelet
would refuse.

A pod certainly uses a device if its claim has the device and is prepared for the pod on this node. Other
consumers of the claim may use the device: a pod that the claim is reserved for can run on another node, or
not run yet.

The module also has the exclusive CPUs that DRA drivers give to containers, from the drivers' declarations and
the consumer map.

The kubelet's own CPU manager does not know these CPUs.

The module also has the lookup of a device's health in a report, by the name that the DRA driver uses for the
device.

A driver without declared devices uses the names of host devices. A driver that embeds drahealth reports its
devices itself.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from agent.devices.consumers.consumer_identities import may_name_claim
from agent.devices.consumers.kube_objects import (
    KubeletsRefusingPod,
    PredictedPodRefusal,
    find_refusal,
    find_refusal_by_uid,
)
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import ConsumerKind, Origin, PodRef
from agent.model.consumers import (
    AffectedPod,
    ClaimConsumerEdge,
    ClaimView,
    ConsumerMap,
    ContainerEdge,
    ContainerUse,
    DeviceEdge,
    PodView,
    Relation,
)
from agent.model.cpuset import CpuSet
from agent.model.declared_devices import Declarations, DeclaredCpuDevice
from agent.model.device_usage import STATE_NOT_KNOWN, DeviceState
from agent.model.health import DeviceHealth, Health
from agent.model.report import Report
from agent.model.time import Instant

USE_ON_THIS_NODE: Final = frozenset({Relation.PREPARED, Relation.LISTED})
"""Relations of a claim to a device or consumer that prove a use on this Kubernetes node."""


def affected_pods(known: ConsumerMap, device: DeviceRef) -> tuple[AffectedPod, ...]:
    """Return the pods that use or may use a device; the pods that certainly use it come first."""
    found = [pod for ref in known.devices.get(device, ()) for pod in _affected_by_claim(known, ref, device)]
    return tuple(sorted(found, key=lambda use: (not use.is_certain, use.pod.ref, use.claim)))


def _affected_by_claim(known: ConsumerMap, ref: ClaimRef, device: DeviceRef) -> Iterator[AffectedPod]:
    claim = known.claims[ref]
    uses = [edge for edge in claim.devices if edge.use.device == device]
    given = has_device(claim, device, uses)
    direct = direct_consumers(claim)
    containers: dict[PodRef, list[ContainerEdge]] = {}
    for named in claim.containers:
        containers.setdefault(named.pod, []).append(named)
    for pod, edges in direct.items():
        sure = given and any(edge.relation in USE_ON_THIS_NODE for edge in edges)
        yield _affected_pod(known.pods[pod], claim, uses, edges, containers.get(pod, ()), sure=sure)
    for edge in claim.consumers:
        if edge.consumer.kind is ConsumerKind.POD_GROUP:
            group = edge.consumer.name
            for member in group_members(known, ref, group):
                if member.ref not in direct:
                    of = containers.get(member.ref, ())
                    yield _affected_pod(member, claim, uses, [edge], of, sure=False, group=group)


def pod_state(pod: PodView) -> str:
    """Return a word for the state of a pod: ``no process``, or the phase of an ended pod.

    Empty: the pod runs, or its state is not known.
    """
    if pod.known and pod.has_ended:
        return pod.known.phase
    return "no process" if pod.running is False else ""


def pod_owner(pod: PodView, group: str = "") -> str:
    """Return the controller and the pod group of a pod: ``Job train, pod group workers``.

    ``group`` is the pod group through which the pod uses a claim; empty: the pod group that the Pod object
    names.
    """
    known = pod.known
    owner = known.controller if known else None
    group = group or (known.group if known else "")
    return ", ".join(filter(None, [str(owner or ""), group and f"pod group {group}"]))


def claims_used_with(known: ConsumerMap, uid: str) -> frozenset[str]:
    """Return the UIDs of all claims of the pods that use the claim ``uid``.

    Pods that have ended do not count.
    """
    return frozenset(
        claim.uid
        for pod in known.pods.values()
        if not pod.has_ended and any(claim.uid == uid for claim in pod.claims)
        for claim in pod.claims
        if claim.uid
    )


def direct_consumers(claim: ClaimView) -> Mapping[PodRef, Sequence[ClaimConsumerEdge]]:
    """Return the pods that use a claim themselves, not through a pod group, with their edges to the claim."""
    found: dict[PodRef, list[ClaimConsumerEdge]] = {}
    for edge in claim.consumers:
        if pod := edge.consumer.pod:
            found.setdefault(pod, []).append(edge)
    return found


def has_device(claim: ClaimView, device: DeviceRef, uses: Collection[DeviceEdge]) -> bool:
    """Return True if a device is prepared for a claim on this node, or is allocated to the claim and needs no
    prepare.

    Args:
        uses: Edges between the claim and the device.
    """
    return any(
        edge.relation in USE_ON_THIS_NODE
        or (edge.relation is Relation.ALLOCATED and device.driver in claim.skipped)
        for edge in uses
    )


def _affected_pod(
    pod: PodView,
    claim: ClaimView,
    uses: Sequence[DeviceEdge],
    edges: Sequence[ClaimConsumerEdge],
    named: Sequence[ContainerEdge],
    *,
    sure: bool,
    group: str = "",
) -> AffectedPod:
    containers = tuple(containers_using_device(claim, named, uses))
    return AffectedPod(pod, claim.ref, sure, containers, group, (*uses, *edges, *named))


def containers_using_device(
    claim: ClaimView, edges: Sequence[ContainerEdge], uses: Sequence[DeviceEdge]
) -> Iterator[ContainerUse]:
    """Yield the containers of a pod that use, or may use, a device of a claim.

    If the requests of the device or of a container are unknown, the container certainly uses the device only
    if the claim has no other device. A device without requests in the kubelet's checkpoint serves all: each
    container with the claim gets the device.

    Args:
        edges: Edges between the claim and the pod's containers.
        uses: Edges between the claim and the device.
    """
    requests = {request for edge in uses for request in edge.use.requests}
    serves_all = any(not use.use.requests for use in uses if use.provenance.origin is Origin.CHECKPOINT)
    by_name: dict[str, list[tuple[str, ...] | None]] = {}
    for edge in edges:
        by_name.setdefault(edge.container, []).append(edge.requests)
    for name, requests_by_source in sorted(by_name.items()):
        known = [request for request in requests_by_source if request is not None]
        if serves_all or any(not names or requests & set(names) for names in known):
            yield ContainerUse(name, is_certain=True)
        elif not known or not requests:
            yield ContainerUse(name, is_certain=_has_one_device(claim))


def _has_one_device(claim: ClaimView) -> bool:
    """Return True if a claim has exactly one device. Stops at the second one: claims may have thousands."""
    devices = (edge.use.device for edge in claim.devices)
    first = next(devices, None)
    if first is None or any(device != first for device in devices):
        return False
    return not {*claim.waiting, *claim.skipped} - {first.driver}


def group_members(known: ConsumerMap, claim: ClaimRef, group: str) -> tuple[PodView, ...]:
    """Return the known pods of a pod group that use or may use a claim."""
    pods = (known.pods[ref] for ref in known.groups.get((claim.namespace, group), ()))
    return tuple(pod for pod in pods if is_group_member(pod, claim, group))


def is_group_member(pod: PodView, claim: ClaimRef, group: str) -> bool:
    """Return True if a pod belongs to a pod group in the claim's namespace, and uses or may use the claim."""
    return any(
        obj.ref.namespace == claim.namespace and obj.group == group and may_name_claim(obj, claim.name)
        for obj, _ in pod.objects
    )


def pods_by_name(known: ConsumerMap, namespace: str, name: str) -> tuple[PodView, ...]:
    """Return the pods with a name.

    There are several if a pod was created again or if UIDs are ambiguous. Empty: no pod has the name.
    """
    return tuple(pod for ref, pod in known.pods.items() if (ref.namespace, ref.name) == (namespace, name))


def claims_by_name(known: ConsumerMap, namespace: str, name: str) -> tuple[ClaimView, ...]:
    """Return the claims with a name.

    There are several if a claim was created again or if UIDs are ambiguous. Empty: no claim has the name.
    """
    return tuple(
        claim for ref, claim in known.claims.items() if (ref.namespace, ref.name) == (namespace, name)
    )


def refused_pods(known: ConsumerMap, node: str = "") -> tuple[PredictedPodRefusal, ...]:
    """Return the pods of this Kubernetes node that the kubelet refuses because of their claims.

    The kubelet refuses pending pods now, and running pods after a reboot.

    A claim is evaluated only if a source has its ResourceClaim object.

    Args:
        node: Name of the Kubernetes node; empty: the node name of the pods with prepared claims.
    """
    newer: dict[tuple[str, str], list[str]] = {}
    for ref, claim in known.claims.items():
        if claim.objects:
            newer.setdefault((ref.namespace, ref.name), []).append(ref.uid)
    held = {
        (ref.namespace, ref.name): ref.uid
        for ref, claim in known.claims.items()
        if any(edge.provenance.origin is Origin.CHECKPOINT for edge in claim.devices)
        or any(edge.provenance.origin is Origin.CHECKPOINT for edge in claim.consumers)
    }
    nodes = _names_of_this_node(known) | ({node} - {""})
    found = (refused for claim in known.claims.values() for refused in _refused_running(known, claim, newer))
    pending = (pod for claim in known.claims.values() for pod in _refused_pending(known, claim, nodes, held))
    return tuple(sorted({*found, *pending}))


def _names_of_this_node(known: ConsumerMap) -> frozenset[str]:
    """Return the names of this Kubernetes node, according to the objects of pods with prepared claims."""
    pods = {
        edge.consumer.pod
        for claim in known.claims.values()
        for edge in claim.consumers
        if edge.consumer.pod and edge.relation in USE_ON_THIS_NODE
    }
    return frozenset(obj.node for pod in pods for obj, _ in known.pods[pod].objects if obj.node)


def _refused_pending(
    known: ConsumerMap, claim: ClaimView, nodes: Collection[str], held: Mapping[tuple[str, str], str]
) -> Iterator[PredictedPodRefusal]:
    """Yield the pending pods of this Kubernetes node that the kubelet refuses to start because of a claim.

    Args:
        nodes: Names of this Kubernetes node.
        held: UIDs of the claims in the kubelet's checkpoint, by (namespace, name).
    """
    direct = direct_consumers(claim) if claim.objects else {}
    for pod, edges in direct.items():
        if any(edge.relation in USE_ON_THIS_NODE for edge in edges):
            continue
        view = known.pods[pod]
        is_here = any(source.origin is Origin.PODS_API or obj.node in nodes for obj, source in view.objects)
        if not (is_here and view.known and view.known.phase == "Pending"):
            continue
        found = _refusal(claim, view)
        older = held.get((claim.ref.namespace, claim.ref.name), claim.ref.uid)
        if found is None and older != claim.ref.uid:
            why = f"the kubelet still has an older claim of this name, with UID {older}"
            found = PredictedPodRefusal(pod, claim.ref, KubeletsRefusingPod.ALL, why)
        if found is not None:
            yield found._replace(pod=pod, is_pending=True)


def _refused_running(
    known: ConsumerMap, claim: ClaimView, uids: Mapping[tuple[str, str], Sequence[str]]
) -> Iterator[PredictedPodRefusal]:
    """Yield the running pods that the kubelet would refuse after a reboot, because of one claim.

    Args:
        uids: UIDs of the claims whose ResourceClaim object is known, by (namespace, name).
    """
    ref = claim.ref
    for pod in {edge.consumer.pod for edge in claim.consumers if edge.relation in USE_ON_THIS_NODE}:
        if pod is None:
            continue
        view = known.pods[pod]
        if claim.objects:
            found = _refusal(claim, view)
        else:
            found = _refusal_of_replaced_claim(claim, view, uids.get((ref.namespace, ref.name), ()))
        if found is not None:
            yield found._replace(pod=pod)


def _refusal(claim: ClaimView, pod: PodView) -> PredictedPodRefusal | None:
    obj = claim.objects[0][0]
    if pod.known is None:
        return find_refusal_by_uid(pod.ref.uid, obj) if pod.ref.uid else None
    for pod_object, _ in pod.objects:  # the kubelet's object may lack the claim's name
        for named in pod_object.claims:
            if named.claim == claim.ref.name:
                return find_refusal(pod_object, named, obj)
    return None


def _refusal_of_replaced_claim(
    claim: ClaimView, pod: PodView, uids: Sequence[str]
) -> PredictedPodRefusal | None:
    if not uids or not claim.ref.uid or (pod.known and pod.known.has_ended):
        return None
    why = f"the claim with this name now has UID {uids[0]}; the kubelet holds {claim.ref.uid}"
    return PredictedPodRefusal(pod.ref, claim.ref, KubeletsRefusingPod.ALL, why)


# --- exclusive CPUs ----------------------------------------------------------------------------------------


def exclusive_cpus(known: ConsumerMap, declared: Declarations) -> Mapping[str, Mapping[str, CpuSet]]:
    """Return the exclusive CPUs of containers, by pod UID and container name.

    They are the CPUs of devices that are declared exclusive and prepared for the pod on this node. A
    container that may also have other CPUs is left out.
    """
    own: dict[str, dict[str, CpuSet]] = defaultdict(dict)
    unclear: set[tuple[str, str]] = set()
    for device in (device for file in declared for device in file.devices):
        if not isinstance(device.part, DeclaredCpuDevice):
            continue
        for user in affected_pods(known, DeviceRef(device.driver, device.pool, device.name)):
            if not user.is_certain:
                continue
            is_share = any(isinstance(edge, DeviceEdge) and edge.use.share_id for edge in user.edges)
            is_whole = device.part.exclusive and not is_share
            of_pod = own[user.pod.ref.uid]
            for container in user.containers:
                if is_whole and container.is_certain:
                    of_pod[container.name] = of_pod.get(container.name, 0) | device.part.cpus
                else:
                    unclear.add((user.pod.ref.uid, container.name))
    return {
        uid: clear
        for uid, containers in own.items()
        if (clear := {name: cpus for name, cpus in containers.items() if (uid, name) not in unclear})
    }


# --- lookup of health --------------------------------------------------------------------------------------


def host_device(
    device: DeviceRef, *, known: Container[DeviceRef], declaring: Container[str], served: Container[str]
) -> DeviceRef | None:
    """Return the host device (a part of the machine) that a driver's device name stands for.

    None: the name stands for the driver's own device.

    Args:
        known: All devices in the report.
        declaring: Drivers that have declared devices.
        served: Drivers that the agent serves.
    """
    if not device.driver or device.driver in declaring or device.driver not in served:
        return None
    host = device._replace(driver="")
    return host if host in known else None


def health_lookup(report: Report, served: Container[str]) -> Callable[[DeviceRef], DeviceHealth | None]:
    """Return a function that returns the health of a device; it returns None if the report lacks the device.

    Args:
        report: The agent's report.
        served: Drivers that the agent serves.
    """
    known = {DeviceRef(*device.key): device for device in report.devices}
    declaring = {ref.driver for ref in known} | set(report.declaring)

    def health_of(device: DeviceRef) -> DeviceHealth | None:
        host = host_device(device, known=known, declaring=declaring, served=served)
        return known.get(host or device)

    return health_of


def best_known_health(own: DeviceHealth | None, sent: DeviceHealth | None) -> DeviceHealth | None:
    """Return the agent's health of a device or, if missing or Unknown, the health that its driver sends.

    None: both are missing.

    Args:
        own: Health in the agent's report, with causes.
        sent: Health from the driver's socket, without causes.
    """
    if own is None or (sent is not None and own.health is Health.UNKNOWN is not sent.health):
        return sent
    return own


def with_embedding_drivers(report: Report, sent: Mapping[str, Iterable[DeviceHealth]]) -> Report:
    """Return the agent's report, with the devices of drivers that embed drahealth added.

    Args:
        report: The agent's report.
        sent: Devices that the driver's own socket reports, by driver. Their ``since`` is dropped: it is the
            time of the read.
    """
    found = {device.key: device for device in report.devices}
    for driver, devices in sent.items():
        for device in devices:
            named = device._replace(driver=driver, since=Instant(0, 0.0))
            found[named.key] = best_known_health(found.get(named.key), named) or named
    return replace(report, devices=tuple(found.values())) if sent else report


def state_lookup(report: Report, served: Container[str]) -> Callable[[DeviceRef], DeviceState]:
    """Return a function that returns the state of a device.

    The state is STATE_NOT_KNOWN if the report lacks the device.
    """
    health_of = health_lookup(report, served)

    def state_of(device: DeviceRef) -> DeviceState:
        found = health_of(device)
        return _to_device_state(found) if found else STATE_NOT_KNOWN

    return state_of


def _to_device_state(health: DeviceHealth) -> DeviceState:
    if not health.causes:
        return DeviceState(health.health, health.severity, "", health.message, health.since.wall_s)
    leading = health.causes[0]
    since_s = leading.since.wall_s  # the verdict's own moves when a lesser cause comes or goes
    return DeviceState(health.health, health.severity, leading.code, leading.evidence, since_s)
