"""JSON document of ``drahealth explain``, ``apiVersion`` drahealth/v1. Pure. Later versions only add keys.

Each relation between a device, a claim, a pod and a container has the source that reports the relation, and
the times at which the source was read and written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agent.cli.explain.build import severity_of
from agent.cli.explain.model import CONSEQUENCES
from agent.cli.history.text import USE
from agent.cli.output.json import (
    API_VERSION,
    CAUSE,
    CLAIM_REF,
    CLEARED_FAULT,
    DEVICE,
    DEVICE_REF,
    POD_REF,
    ObjectKeys,
    encode_each,
)
from agent.cli.prepares.text import RECORD
from agent.model.time import rfc3339

if TYPE_CHECKING:
    from agent.cli.explain.model import (
        ClaimFacts,
        DeviceFacts,
        Explanation,
        PodFacts,
        ReportedHealth,
        SourceResult,
    )
    from agent.model.claim_sources import ClaimObject, PodObject, Provenance
    from agent.model.health import NonDeviceCause

MAX_MAYBE: Final = 256
"""Limit of pods listed as possibly the same as one pod: thousands of pods would have millions of pairs."""

PROVENANCE: Final = ObjectKeys("source:origin read:read_at written:written_s")
PROVENANCE_KEYS: Final = "source:provenance.origin read:provenance.read_at written:provenance.written_s"
NOTE: Final = ObjectKeys("subject")


def document(explanation: Explanation) -> dict[str, Any]:
    now_s = explanation.now.wall_s
    return {
        "apiVersion": API_VERSION,
        "kind": explanation.kind,
        "at": rfc3339(now_s),
        "severity": severity_of(explanation).name.lower(),
        "devices": [_device(device, now_s) for device in explanation.devices],
        "claims": [_claim(claim) for claim in explanation.claims],
        "claimsElsewhere": explanation.claims_elsewhere,
        "pods": [_pod(pod) for pod in explanation.pods],
        "hurt": [DEVICE_CONSUMER(use) for use in explanation.affected],  # verbatim
        "risks": [RISK(risk) for risk in explanation.risks],
        "conflicts": [CONFLICT(conflict) for conflict in explanation.conflicts],
        "ended": [USE(use) for use in explanation.ended],
        "sources": [_source(result) for result in explanation.sources],
    }


# --- devices -----------------------------------------------------------------------------------------------

TAINT: Final = ObjectKeys("key value effect timeAdded:added_wall_s")
FAULT: Final = ObjectKeys("code evidence advice claim since:reported_wall_s repair", claim=CLAIM_REF)
KUBELET_HEALTH: Final = ObjectKeys("health message heard?:updated_s leaseSeconds:lease_s")  # verbatim


def _device(device: DeviceFacts, now_s: float) -> dict[str, Any]:
    stored = device.kubelet_health
    return {
        **DEVICE_REF(device.ref),
        "severity": device.severity.name.lower(),
        "verdict": _health(device.reported),
        "told": _health(device.driver_reported),  # verbatim
        "kubelet": stored and {**KUBELET_HEALTH(stored), "lapsed": stored.has_lapsed(now_s)},
        "taints": None if device.taints is None else [TAINT(taint) for taint in device.taints],
        "foundBroken": [FAULT(fault) for fault in device.driver_faults],
        "notes": [_note(note) for note in device.notes],
        "cleared": [CLEARED_FAULT(record) for record in device.cleared],
    }


def _note(note: NonDeviceCause) -> dict[str, Any]:
    return {**NOTE(note), **CAUSE(note.cause)}


def _health(reported: ReportedHealth | None) -> dict[str, Any] | None:
    return {**DEVICE(reported.health), "source": reported.source} if reported else None


# --- claims ------------------------------------------------------------------------------------------------

RESERVATION: Final = ObjectKeys("kind apiGroup resource name uid")
OWNER: Final = ObjectKeys("apiVersion kind name uid")
DEVICE_EDGE: Final = ObjectKeys(
    "driver:use.device.driver pool:use.device.pool name:use.device.device requests:use.requests "
    f"shareID?:use.share_id relation byName {PROVENANCE_KEYS}"
)
CONSUMER_EDGE: Final = ObjectKeys(
    "kind:consumer.kind resource?:consumer.resource namespace?:consumer.namespace name?:consumer.name "
    f"uid?:consumer.uid relation byName {PROVENANCE_KEYS}"
)
CONTAINER_EDGE: Final = ObjectKeys(f"container pod requests byName {PROVENANCE_KEYS}", pod=POD_REF)
CLAIM_OBJECT: Final = ObjectKeys(
    "allocated reservedFor:reserved meantFor:spec_reserved reservedForAnyPod:any_pod owner",
    reservedFor=encode_each(RESERVATION),
    meantFor=encode_each(RESERVATION),
    owner=OWNER,
)


def _claim(claim: ClaimFacts) -> dict[str, Any]:
    view = claim.view
    return {
        **CLAIM_REF(view.ref),
        "devices": [DEVICE_EDGE(edge) for edge in view.devices],
        "consumers": [CONSUMER_EDGE(edge) for edge in view.consumers],
        "containers": [CONTAINER_EDGE(edge) for edge in view.containers],
        "waitsFor": list(view.waiting),
        "notCalled": list(view.skipped),
        "objects": [_object(CLAIM_OBJECT, *pair) for pair in view.objects],
        "orphans": None
        if claim.unmatched_reservations is None
        else [RESERVATION(reservation) for reservation in claim.unmatched_reservations],
        "prepares": [RECORD(record) for record in claim.prepares],
    }


def _object(keys: ObjectKeys, obj: ClaimObject | PodObject, provenance: Provenance) -> dict[str, Any]:
    return {**keys(obj), **PROVENANCE(provenance)}


# --- pods --------------------------------------------------------------------------------------------------

POD_OBJECT: Final = ObjectKeys(
    "node? phase? owner:controller podGroup?:group mirrorUID?:mirror_uid claims containers",
    owner=OWNER,
    claims=encode_each(ObjectKeys("name claim?")),
    containers=encode_each(ObjectKeys("name id? running")),
)


def _pod(pod: PodFacts) -> dict[str, Any]:
    view = pod.view
    return {
        **POD_REF(view.ref),
        "running": view.running,
        "cgroups": [{"container": container.id, "running": container.running} for container in view.live],
        "claims": [CLAIM_REF(claim) for claim in view.claims],
        "objects": [_object(POD_OBJECT, *pair) for pair in view.objects],
        "maybe": [POD_REF(ref) for ref in pod.possibly_same[:MAX_MAYBE]],
        "maybeMore": max(0, len(pod.possibly_same) - MAX_MAYBE),
        "notes": [_note(note) for note in pod.notes],
    }


# --- users, findings and sources ---------------------------------------------------------------------------

CONFLICT: Final = ObjectKeys(
    "kind subject claims pods sayings:assertions",  # verbatim
    claims=encode_each(CLAIM_REF),
    pods=encode_each(POD_REF),
    sayings=encode_each(ObjectKeys(f"{PROVENANCE_KEYS} text")),  # verbatim
)
RISK: Final = ObjectKeys(
    "pod claim kubelets why:reason pending:is_pending",
    pod=POD_REF,
    claim=CLAIM_REF,
    kubelets=lambda kubelets: kubelets.name.lower().replace("_", "-"),
)
DEVICE_CONSUMER: Final = ObjectKeys(
    """
    device claim:affected.claim pod:affected.pod.ref sure:affected.is_certain containers:affected.containers
    podGroup?:affected.group toldBy:affected.edges
    """,  # verbatim
    device=DEVICE_REF,
    claim=CLAIM_REF,
    pod=POD_REF,
    containers=encode_each(ObjectKeys("name sure:is_certain")),
    toldBy=lambda edges: list(map(PROVENANCE, dict.fromkeys(edge.provenance for edge in edges))),  # verbatim
)
SOURCE: Final = ObjectKeys("found? absence why?:reason")


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
