"""JSON document of ``drahealth explain``, ``apiVersion`` drahealth/v1. Pure. Keys are only ever added.

Each edge between a device, a claim, a pod and a container has its source, with read and write time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agent.cli.explain.answer import CONSEQUENCES
from agent.cli.explain.facts import severity_of
from agent.cli.history.text import USE
from agent.cli.output.json import API_VERSION, CAUSE, CLAIM_REF, DEVICE, DEVICE_REF, POD_REF, ObjectKeys, each
from agent.cli.prepares.text import RECORD
from agent.model.time import rfc3339

if TYPE_CHECKING:
    from agent.cli.explain.answer import (
        AffectedUse,
        ClaimFacts,
        DeviceFacts,
        Explanation,
        PodFacts,
        ReportedHealth,
        SourceResult,
    )
    from agent.devices.consumers.reservations import RefusedPod
    from agent.model.claim_sources import KnownClaim, KnownPod, Provenance
    from agent.model.consumers import Conflict, DeviceEdge
    from agent.model.health import Note

MAX_MAYBE: Final = 256
"""Limit of listed pods that may be the same pod: for thousands of pods there are millions of pairs."""

PROVENANCE: Final = ObjectKeys("source:origin read written:written_s")
NOTE: Final = ObjectKeys("subject")


def document(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation as JSON."""
    now_s = explanation.now.wall_s
    return {
        "apiVersion": API_VERSION,
        "kind": explanation.kind,
        "at": rfc3339(now_s),
        "severity": severity_of(explanation).name.lower(),
        "devices": [_device(device, now_s) for device in explanation.devices],
        "claims": [_claim(claim) for claim in explanation.claims],
        "pods": [_pod(pod) for pod in explanation.pods],
        "hurt": [_affected(use) for use in explanation.affected],  # verbatim
        "risks": [_risk(risk) for risk in explanation.risks],
        "conflicts": [_conflict(conflict) for conflict in explanation.conflicts],
        "ended": [USE(use) for use in explanation.ended],
        "sources": [_source(result) for result in explanation.sources],
    }


# --- devices -----------------------------------------------------------------------------------------------

TAINT: Final = ObjectKeys("key value effect timeAdded:added_wall_s")
FAULT: Final = ObjectKeys("code evidence advice claim since:reported_wall_s", claim=CLAIM_REF)
BELIEF: Final = ObjectKeys("health message heard?:updated_s leaseSeconds:lease_s")  # verbatim


def _device(device: DeviceFacts, now_s: float) -> dict[str, Any]:
    belief = device.belief and {**BELIEF(device.belief), "lapsed": device.belief.has_lapsed(now_s)}
    return {
        **DEVICE_REF(device.ref),
        "severity": device.severity.name.lower(),
        "verdict": _health(device.reported),
        "told": _health(device.driver_reported),  # verbatim
        "kubelet": belief,
        "taints": None if device.taints is None else [TAINT(taint) for taint in device.taints],
        "foundBroken": [FAULT(fault) for fault in device.driver_faults],
        "notes": [_note(note) for note in device.notes],
    }


def _note(note: Note) -> dict[str, Any]:
    return {**NOTE(note), **CAUSE(note.cause)}


def _health(reported: ReportedHealth | None) -> dict[str, Any] | None:
    return {**DEVICE(reported.health), "source": reported.source} if reported else None


# --- claims ------------------------------------------------------------------------------------------------

RESERVATION: Final = ObjectKeys("kind apiGroup resource name uid")
OWNER: Final = ObjectKeys("apiVersion kind name uid")
DEVICE_EDGE: Final = ObjectKeys("requests:use.requests shareID?:use.share_id relation byName")
CONSUMER_EDGE: Final = ObjectKeys(
    """
    kind:consumer.kind resource?:consumer.resource namespace?:consumer.namespace name?:consumer.name
    uid?:consumer.uid relation byName
    """
)
CONTAINER_EDGE: Final = ObjectKeys("container pod requests byName", pod=POD_REF)
CLAIM_OBJECT: Final = ObjectKeys(
    "allocated reservedFor:reserved meantFor:meant_for reservedForAnyPod:any_pod owner",
    reservedFor=each(RESERVATION),
    meantFor=each(RESERVATION),
    owner=OWNER,
)


def _claim(claim: ClaimFacts) -> dict[str, Any]:
    view = claim.view
    return {
        **CLAIM_REF(view.ref),
        "devices": [_device_edge(edge) for edge in view.devices],
        "consumers": [{**CONSUMER_EDGE(edge), **PROVENANCE(edge.provenance)} for edge in view.consumers],
        "containers": [{**CONTAINER_EDGE(edge), **PROVENANCE(edge.provenance)} for edge in view.containers],
        "waitsFor": list(view.waiting),
        "notCalled": list(view.skipped),
        "objects": [_object(CLAIM_OBJECT, *pair) for pair in view.objects],
        "orphans": None
        if claim.orphans is None
        else [RESERVATION(reservation) for reservation in claim.orphans],
        "prepares": [RECORD(record) for record in claim.prepares],
    }


def _device_edge(edge: DeviceEdge) -> dict[str, Any]:
    return {**DEVICE_REF(edge.use.device), **DEVICE_EDGE(edge), **PROVENANCE(edge.provenance)}


def _object(shape: ObjectKeys, obj: KnownClaim | KnownPod, provenance: Provenance) -> dict[str, Any]:
    return {**shape(obj), **PROVENANCE(provenance)}


# --- pods --------------------------------------------------------------------------------------------------

POD_OBJECT: Final = ObjectKeys(
    "node? phase? owner:controller podGroup?:group mirrorUID?:mirror_uid containers",
    owner=OWNER,
    containers=each(ObjectKeys("name id? running")),
)


def _pod(pod: PodFacts) -> dict[str, Any]:
    view = pod.view
    return {
        **POD_REF(view.ref),
        "running": view.running,
        "cgroups": [{"container": container.id, "running": container.running} for container in view.live],
        "claims": [CLAIM_REF(claim) for claim in view.claims],
        "objects": [_object(POD_OBJECT, *pair) for pair in view.objects],
        "maybe": [POD_REF(ref) for ref in pod.maybe[:MAX_MAYBE]],
        "maybeMore": max(0, len(pod.maybe) - MAX_MAYBE),
        "notes": [_note(note) for note in pod.notes],
    }


# --- users, findings and sources ---------------------------------------------------------------------------

CONFLICT: Final = ObjectKeys("kind subject claims pods", claims=each(CLAIM_REF), pods=each(POD_REF))
SOURCE: Final = ObjectKeys("found? absence why?:reason")
CONTAINER_USE: Final = ObjectKeys("name sure")


def _affected(use: AffectedUse) -> dict[str, Any]:
    affected = use.affected
    provenances = dict.fromkeys(edge.provenance for edge in affected.edges)
    return {
        "device": DEVICE_REF(use.device),
        "claim": CLAIM_REF(affected.claim),
        "pod": POD_REF(affected.pod.ref),
        "sure": affected.sure,
        "containers": [CONTAINER_USE(container) for container in affected.containers],
        "podGroup": affected.group or None,
        "toldBy": [PROVENANCE(provenance) for provenance in provenances],  # verbatim
    }


def _risk(risk: RefusedPod) -> dict[str, Any]:
    return {
        "pod": POD_REF(risk.pod),
        "claim": CLAIM_REF(risk.claim),
        "kubelets": risk.kubelets.name.lower().replace("_", "-"),
        "why": risk.why,
    }


def _conflict(conflict: Conflict) -> dict[str, Any]:
    sides = [
        {**PROVENANCE(assertion.provenance), "text": assertion.text} for assertion in conflict.assertions
    ]
    return {**CONFLICT(conflict), "sayings": sides}  # verbatim


def _source(result: SourceResult) -> dict[str, Any]:
    return {
        "source": result.source,
        "place": result.place or None,
        "read": rfc3339(result.read.wall_s) if result.place else None,
        "written": rfc3339(result.written_s) if result.written_s is not None else None,
        **SOURCE(result),
        "costs": CONSEQUENCES.get(result.source) if result.absence else None,
        "wrong": list(result.invalid),
    }
