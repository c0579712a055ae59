"""Builds the explanation of a device, pod or claim from the answers of all sources. Pure.

The sources are the agent, the kubelet, drivers and files. If it is not certain that a name and a UID belong
to the same pod, both are shown with a remark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain, islice
from typing import Final, TypeVar

from agent.cli.explain.model import (
    AGENT,
    PREPARES,
    TAINTS,
    ClaimFacts,
    DeviceConsumer,
    DeviceFacts,
    Explanation,
    NodeAnswers,
    PodFacts,
    ReportedHealth,
    SourceResult,
    UnknownName,
    find_claims,
    find_devices,
    find_pods,
)
from agent.cli.history.text import claim_names, device_names, pod_names
from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.consumer_queries import (
    affected_pods,
    best_known_health,
    group_members,
    host_device,
    is_group_member,
    refused_pods,
)
from agent.devices.consumers.kube_objects import existing_reservation_targets, unmatched_reservations
from agent.errors import PermissionDeniedError
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import ConsumerKind, Origin, PodRef, PreparedClaim, Provenance, SourceAnswer
from agent.model.consumers import Conflict, ConsumerMap, PodView
from agent.model.device_usage import PodDeviceUsage
from agent.model.health import NonDeviceCause, Severity
from agent.model.reading import Absence

DEVICE: Final = "device"
POD: Final = "pod"
CLAIM: Final = "claim"
ALL: Final = "all"
MAX_ENDED: Final = 5
"""Limit of ended device uses that are shown for a device, pod or claim that still exists."""

_FILES: Final = frozenset({Origin.PODS_FILE, Origin.CLAIMS_FILE})

K = TypeVar("K")
V = TypeVar("V")
_Concerned = tuple[dict[DeviceRef, None], dict[ClaimRef, None], dict[PodRef, None]]


def explain(kind: str, name: str, answers: NodeAnswers) -> Explanation:
    """Return the explanation of one device, pod or claim.

    Args:
        kind: :data:`DEVICE`, :data:`POD` or :data:`CLAIM`.
        name: Name of the object that the operator gave.
        answers: Answers of all sources.

    Raises:
        UnknownName: No source knows the name; the text lists the sources that did not answer.
        PermissionDeniedError: No source knows the name, and this user may not read some sources.
        UsageError: Several objects have the name.
    """
    known = _consumer_map(answers)
    try:
        devices, claims, pods = _related_objects(kind, name, known, answers)
    except UnknownName as error:
        if recorded := _recorded_uses(kind, name, answers):
            return Explanation(kind, answers.now, (), (), (), ended=recorded, sources=answers.sources)
        missing = [result for result in answers.sources if _may_know(result)]
        unavailable = (f"{result.source}: {result.reason}" for result in missing)
        text = "\n  not available: ".join([str(error), *unavailable])
        raise (PermissionDeniedError if any(result.is_denied for result in missing) else UnknownName)(
            text
        ) from None
    uses = [DeviceConsumer(device, use) for device in devices for use in affected_pods(known, device)]
    if kind == DEVICE:
        pods = {use.affected.pod.ref: None for use in uses}
    else:
        uses = [use for use in uses if use.affected.claim in claims and use.affected.pod.ref in pods]
    ended = tuple(islice(_ended_uses(kind, answers, devices, claims, pods), MAX_ENDED))
    return replace(_explanation(kind, answers, known, (devices, claims, pods), uses), ended=ended)


def explain_all(answers: NodeAnswers) -> Explanation:
    """Return the explanation of all claims on this Kubernetes node, with their devices and consumers.

    Args:
        answers: Answers of all sources.
    """
    known = _consumer_map(answers)
    here = _claims_of_node(answers, known)
    claims = dict.fromkeys(ref for ref in known.claims if ref in here)
    pods = dict.fromkeys(pod for ref in claims for pod in _pods_of(known, ref))
    devices = _devices_of_claims(answers, known, claims)
    uses = [
        DeviceConsumer(device, use)
        for device in devices
        for use in affected_pods(known, device)
        if use.claim in claims
    ]
    found = _explanation(ALL, answers, known, (devices, claims, pods), uses)
    return replace(found, claims_elsewhere=len(known.claims) - len(claims))


def _consumer_map(answers: NodeAnswers) -> ConsumerMap:
    """Return the map of which pods and claims use which devices.

    The map includes claims that only the prepare results of a driver contain.
    """
    known = build_consumer_map(answers.consumers)
    unlisted = tuple(_claims_only_in_prepares(answers, known))
    if not unlisted:
        return known
    prepared = (*answers.consumers.prepared, SourceAnswer(Provenance(Origin.DRIVER, answers.now), unlisted))
    return build_consumer_map(replace(answers.consumers, prepared=prepared))


def _explanation(
    kind: str, answers: NodeAnswers, known: ConsumerMap, concerned: _Concerned, uses: Iterable[DeviceConsumer]
) -> Explanation:
    devices, claims, pods = concerned
    index = SourceFactIndex(answers, known)
    return Explanation(
        kind=kind,
        now=answers.now,
        devices=tuple(map(index.device_facts, devices)),
        claims=tuple(map(index.claim_facts, claims)),
        pods=tuple(map(index.pod_facts, pods)),
        affected=tuple(uses),
        risks=tuple(
            risk for risk in refused_pods(known, answers.node) if risk.pod in pods and risk.claim in claims
        ),
        conflicts=tuple(_conflicts(known, claims, pods)),
        sources=answers.sources,
    )


def _claims_of_node(answers: NodeAnswers, known: ConsumerMap) -> AbstractSet[ClaimRef]:
    """Return the claims that belong to this Kubernetes node.

    These are the claims that the kubelet, a driver or the agent on this node lists, and the claims that a pod
    of the node refers to. If only files of ``--pods`` and ``--claims`` gave an answer, all claims are
    returned.
    """
    consumers = answers.consumers
    answered = {answer.provenance.origin for answer in consumers.prepared if not answer.absence}
    answered |= {answer.provenance.origin for answer in consumers.listed if not answer.absence}
    answered |= {answer.provenance.origin for answer in consumers.pods if not answer.absence}
    if answered <= _FILES:
        return known.claims.keys()
    uids = {claim.ref.uid for answer in consumers.prepared for claim in answer.items}
    uids |= {record.claim.uid for record in answers.prepares}
    pods = {
        ref for ref, view in known.pods.items() if any(obj.node == answers.node for obj, _ in view.objects)
    }
    return {
        ref
        for ref, claim in known.claims.items()
        if (ref.uid and ref.uid in uids)
        or any(edge.provenance.origin not in _FILES for edge in claim.devices)
        or any(edge.provenance.origin not in _FILES or edge.consumer.pod in pods for edge in claim.consumers)
    }


def _claims_only_in_prepares(answers: NodeAnswers, known: ConsumerMap) -> Iterator[PreparedClaim]:
    """Yield the claims that only the file with a driver's prepare results contains.

    These claims are failed or unprepared.
    """
    uids = {ref.uid for ref in known.claims}
    for record in answers.prepares:
        if record.claim.uid not in uids:
            yield PreparedClaim(record.claim, waiting=(record.driver,) if record.state == "failing" else ())


def _ended_uses(
    kind: str,
    answers: NodeAnswers,
    devices: Container[DeviceRef],
    claims: Iterable[ClaimRef],
    pods: Iterable[PodRef],
) -> Iterator[PodDeviceUsage]:
    """Yield the ended uses in the agent's history that concern these devices, claims or pods.

    `kind` selects which of the three are compared with the history.
    """
    uids_of = {POD: {ref.uid for ref in pods}, CLAIM: {ref.uid for ref in claims}}
    for use in answers.usage:
        uid = use.claim.uid if kind == CLAIM else use.pod.uid
        matches = use.device in devices if kind == DEVICE else uid and uid in uids_of[kind]
        if use.ended and matches:
            yield use


def _recorded_uses(kind: str, name: str, answers: NodeAnswers) -> tuple[PodDeviceUsage, ...]:
    """Return the uses of devices in the agent's history that concern the device, pod or claim `name`."""
    found = tuple(use for use in answers.usage if name in _names(kind, use))
    return found[:MAX_ENDED] if kind == DEVICE else found


def _names(kind: str, use: PodDeviceUsage) -> Iterator[str]:
    if kind == DEVICE:
        return device_names(use.device)
    return pod_names(use) if kind == POD else claim_names(use)


def _may_know(result: SourceResult) -> bool:
    """Return whether a source that gave no answer may have data about the explained object.

    A driver without state files has no such data.
    """
    is_missed = result.absence is Absence.UNREADABLE or result.source not in {PREPARES, TAINTS}
    return bool(result.absence and result.place and is_missed)


def severity_of(explanation: Explanation) -> Severity:
    """Return the worst severity of the explained devices.

    The severity is UNKNOWN for a claim without a known device, and OK for a pod without claims. For an object
    that no longer exists, it is the severity in the agent's history.
    """
    if explanation.ended and not (explanation.devices or explanation.claims or explanation.pods):
        return max(use.state.severity for use in explanation.ended)
    if explanation.kind == ALL and not explanation.claims:
        unread = {result.source for result in explanation.sources if result.absence is Absence.UNREADABLE}
        # both list claims, so that claims may be missing
        return Severity.UNKNOWN if unread & {Origin.CHECKPOINT, Origin.PODRESOURCES} else Severity.OK
    has_no_claims = all(pod.view.known is not None and not pod.view.known.claims for pod in explanation.pods)
    if explanation.kind == POD and not explanation.claims and has_no_claims:
        return Severity.OK
    blank = [Severity.UNKNOWN for claim in explanation.claims if not devices_of_claim(claim)]
    return max([*blank, *(device.severity for device in explanation.devices)], default=Severity.UNKNOWN)


def devices_of_claim(claim: ClaimFacts) -> tuple[DeviceRef, ...]:
    """Return the devices of a claim, then the devices that only failed prepares of the claim name."""
    refs = sorted({edge.use.device for edge in claim.view.devices})
    return (*refs, *claim.devices_of_failed_prepares)


# --- which objects are concerned ---------------------------------------------------------------------------


def _related_objects(kind: str, name: str, known: ConsumerMap, answers: NodeAnswers) -> _Concerned:
    """Return the devices, claims and pods that are related to the object to explain; no pods for a device."""
    if kind == DEVICE:
        cdi = (
            pair for answer in answers.consumers.prepared for claim in answer.items for pair in claim.cdi_ids
        )
        found = dict.fromkeys(find_devices(name, _all_devices(known, answers), cdi, host_aliases(answers)))
        return found, dict.fromkeys(ref for device in found for ref in known.devices.get(device, ())), {}
    if kind == POD:
        pods = dict.fromkeys(find_pods(name, known))
        claims = dict.fromkeys(ref for pod in pods for ref in _claims_of(known, pod))
    else:
        claims = dict.fromkeys(find_claims(name, known))
        pods = dict.fromkeys(pod for claim in claims for pod in _pods_of(known, claim))
    return _devices_of_claims(answers, known, claims), claims, pods


def _devices_of_claims(
    answers: NodeAnswers, known: ConsumerMap, claims: Iterable[ClaimRef]
) -> dict[DeviceRef, None]:
    """Return the devices of `claims`, including devices that only a failed prepare of a claim names."""
    failed = _group_by_key(
        (record.claim.uid, device)
        for record in answers.prepares
        if record.state == "failing"
        for device in record.outcome.devices
    )
    return dict.fromkeys(
        ref
        for claim in claims
        for ref in sorted(
            {*(edge.use.device for edge in known.claims[claim].devices), *failed.get(claim.uid, ())}
        )
    )


def _all_devices(known: ConsumerMap, answers: NodeAnswers) -> Iterator[DeviceRef]:
    yield from known.devices
    for device in answers.report.devices if answers.report else ():
        yield DeviceRef(*device.key)
    hosts = host_aliases(answers)
    yield from (ref for ref in _driver_devices(answers) if ref not in hosts)
    yield from (belief.device for belief in answers.kubelet_health)
    yield from (fault.device for fault in answers.driver_faults)
    yield from (device for record in answers.prepares for device in record.outcome.devices)
    yield from (device for tainted in answers.taints.values() for device in tainted)


def _claims_of(known: ConsumerMap, pod: PodRef) -> Iterator[ClaimRef]:
    """Yield the claims of a pod, then those claims of its pod group that the pod uses or may use."""
    yield from known.pods[pod].claims
    for ref, claim in known.claims.items():
        for edge in claim.consumers:
            consumer = edge.consumer
            if consumer.kind is ConsumerKind.POD_GROUP and is_group_member(
                known.pods[pod], ref, consumer.name
            ):
                yield ref


def _pods_of(known: ConsumerMap, claim: ClaimRef) -> Iterator[PodRef]:
    edges = known.claims[claim].consumers
    yield from (edge.consumer.pod for edge in edges if edge.consumer.pod)
    for edge in edges:
        if edge.consumer.kind is ConsumerKind.POD_GROUP:
            yield from (view.ref for view in group_members(known, claim, edge.consumer.name))


def _conflicts(
    known: ConsumerMap, claims: Container[ClaimRef], pods: Container[PodRef]
) -> Iterator[Conflict]:
    for conflict in known.conflicts:
        if any(ref in claims for ref in conflict.claims) or any(ref in pods for ref in conflict.pods):
            yield conflict


def host_aliases(answers: NodeAnswers) -> dict[DeviceRef, DeviceRef]:
    """Return the devices of drivers that the agent reports as host devices, without a driver.

    The keys are the devices of the drivers, and the values are the host devices.
    """
    if answers.report is None:
        return {}
    known = {DeviceRef(*device.key) for device in answers.report.devices}
    declaring = {ref.driver for ref in known}
    served = {driver for driver, sent in answers.driver_reports.items() if sent.is_agents}
    found = {
        ref: host_device(ref, known=known, declaring=declaring, served=served)
        for ref in _driver_devices(answers)
    }
    return {ref: host for ref, host in found.items() if host}


def _driver_devices(answers: NodeAnswers) -> Iterator[DeviceRef]:
    for driver, sent in answers.driver_reports.items():
        yield from (DeviceRef(driver, device.pool, device.device) for device in sent.report.devices)


# --- facts by object ---------------------------------------------------------------------------------------


class SourceFactIndex:
    """Index of what the sources report, by device, by claim and by pod.

    The index saves time, because a node can have thousands of these objects.
    """

    def __init__(self, answers: NodeAnswers, known: ConsumerMap) -> None:
        """Create an index of `answers` and of `known`, the map of which pods and claims use which devices."""
        self._known = known
        self._reported = _agent_health(answers)
        self._driver_reported = {
            DeviceRef(driver, device.pool, device.device): ReportedHealth(device, sent.socket)
            for driver, sent in answers.driver_reports.items()
            for device in sent.report.devices
        }
        self._beliefs = {belief.device: belief for belief in reversed(answers.kubelet_health)}
        self._taints = answers.taints
        self._driver_faults = _group_by_key((fault.device, fault) for fault in answers.driver_faults)
        self._prepares = _group_by_key((record.outcome.claim.uid, record) for record in answers.prepares)
        notes = answers.report.notes if answers.report else ()
        self._notes_of_devices = _group_by_key((name, note) for note in notes for name in note.devices)
        cleared = answers.report.cleared if answers.report else ()
        self._cleared_of_devices = _group_by_key((record.device, record) for record in cleared)
        self._notes_of_pods = _group_by_key((pod_uid(note), note) for note in notes)
        from_files = [
            answer.items for answer in answers.consumers.pods if answer.provenance.origin is Origin.PODS_FILE
        ]
        pods = chain.from_iterable(from_files)
        self._standing = existing_reservation_targets(pods, answers.workloads) if from_files else None
        uses = [(claim, view.ref) for view in known.pods.values() for claim in view.claims]
        self._without_names = _group_by_key(use for use in uses if not use[1].name)
        self._without_uids = _group_by_key(use for use in uses if not use[1].uid)

    def device_facts(self, ref: DeviceRef) -> DeviceFacts:
        """Return everything that the sources report about the device `ref`."""
        driver_reported, own = self._driver_reported.get(ref), self._reported.get(ref)
        best = best_known_health(own and own.health, driver_reported and driver_reported.health)
        tainted = self._taints.get(ref.driver)
        return DeviceFacts(
            ref,
            reported=own if own and own.health is best else driver_reported,
            driver_reported=driver_reported,
            kubelet_health=self._beliefs.get(ref),
            taints=None if tainted is None else tainted.get(ref, ()),
            driver_faults=self._driver_faults.get(ref, ()),
            notes=self._notes_of_devices.get(str(ref), ()),
            cleared=self._cleared_of_devices.get(str(ref) if ref.driver else ref.device, ()),
        )

    def claim_facts(self, ref: ClaimRef) -> ClaimFacts:
        """Return everything that sources report about a claim. Raises KeyError if no source lists it."""
        view = self._known.claims[ref]
        # The kubelet has only pods of its own node, so a pod that it does not have proves nothing.
        orphans = (
            unmatched_reservations(view.objects[0][0], self._standing)
            if view.objects and self._standing
            else None
        )
        return ClaimFacts(view, self._prepares.get(ref.uid, ()), orphans)

    def pod_facts(self, ref: PodRef) -> PodFacts:
        """Return everything that sources report about the pod `ref`, a pod that is in the consumer map."""
        view = self._known.pods[ref]
        notes = self._notes_of_pods.get(ref.uid, ()) if ref.uid else ()
        return PodFacts(view, possibly_same=self._possibly_same_pods(view), notes=notes)

    def _possibly_same_pods(self, pod: PodView) -> tuple[PodRef, ...]:
        """Return pods that may be the same pod as `pod`.

        They share a claim with `pod`, and have the name or the UID that `pod` lacks.
        """
        if pod.ref.name and pod.ref.uid:
            return ()
        others = self._without_names if pod.ref.name else self._without_uids
        found = [others.get(claim, ()) for claim in pod.claims]
        return found[0] if len(found) == 1 else tuple(dict.fromkeys(chain.from_iterable(found)))


def pod_uid(note: NonDeviceCause) -> str:
    """Return the UID of the pod that the finding `note` is about; empty: the finding is not about a pod."""
    kind, _, rest = note.subject.partition(" ")
    return rest.partition(" ")[0] if kind == "pod" else ""


def container_name(note: NonDeviceCause, pod: PodView) -> str:
    """Return the name of the container that the finding `note` is about.

    If the name is not known, return the ID of the container. Empty: the finding names no container.
    """
    ident = note.subject.partition(" container ")[2]
    names = {container.id: container.name for obj, _ in pod.objects for container in obj.containers}
    return names.get(ident, ident)


def _agent_health(answers: NodeAnswers) -> Mapping[DeviceRef, ReportedHealth]:
    """Return the health of each device in the agent's report.

    A host device that a driver also publishes is contained under both names.
    """
    if answers.report is None:
        return {}
    own = {DeviceRef(*device.key): ReportedHealth(device, AGENT) for device in answers.report.devices}
    return own | {ref: own[host] for ref, host in host_aliases(answers).items()}


def _group_by_key(pairs: Iterable[tuple[K, V]]) -> Mapping[K, tuple[V, ...]]:
    found: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: tuple(values) for key, values in found.items()}
