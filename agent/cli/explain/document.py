"""``drahealth explain`` for programs, ``apiVersion`` drahealth/v1. Pure.

Keys are only ever added. Each edge between a device, a claim, a pod and a container has its source, and when
that was read and written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from agent.cli.explain.facts import severity_of
from agent.cli.explain.words import COSTS, ClaimFacts, DeviceFacts, Explained, PodFacts
from agent.cli.history.text import use_document
from agent.cli.output.document import API_VERSION, cause_document, device_document
from agent.cli.prepares.text import claim_document
from agent.model.consumers import ConsumerEdge, ContainerEdge, DeviceEdge
from agent.model.time import rfc3339

if TYPE_CHECKING:
    from agent.cli.explain.words import Account, Hurt, Verdict
    from agent.devices.consumers.reservations import Refusal
    from agent.model.claim import ClaimRef, DeviceRef
    from agent.model.claim_sources import Belief, KnownClaim, KnownPod, Owner, PodRef, Provenance, Reservation
    from agent.model.consumers import Conflict
    from agent.model.health import Note


MAYBE_MAX: Final = 256
"""Pods that may be one and the same, which are named of each: of thousands it would be millions."""


def document(explained: Explained) -> dict[str, Any]:
    """All of it."""
    return {
        "apiVersion": API_VERSION,
        "kind": explained.kind,
        "at": rfc3339(explained.now.wall_s),
        "severity": severity_of(explained).name.lower(),
        "devices": [_device(one, explained) for one in explained.devices],
        "claims": [_claim(one) for one in explained.claims],
        "pods": [_pod(one) for one in explained.pods],
        "hurt": [_hurt(one) for one in explained.hurt],
        "risks": [_risk(one) for one in explained.risks],
        "conflicts": [_conflict(one) for one in explained.conflicts],
        "ended": [use_document(one) for one in explained.ended],
        "sources": [_source(one) for one in explained.accounts],
    }


def _ref(device: DeviceRef) -> dict[str, str]:
    return {"driver": device.driver, "pool": device.pool, "name": device.device}


def _pod_ref(pod: PodRef) -> dict[str, str | None]:
    return {"namespace": pod.namespace or None, "name": pod.name or None, "uid": pod.uid or None}


def _claim_ref(claim: ClaimRef) -> dict[str, str | None]:
    return {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid or None}


def _told_by(witness: Provenance) -> dict[str, str | None]:
    written = None if witness.written_s is None else rfc3339(witness.written_s)
    return {"source": witness.origin, "read": rfc3339(witness.read.wall_s), "written": written}


# --- devices -----------------------------------------------------------------------------------------------


def _device(one: DeviceFacts, explained: Explained) -> dict[str, Any]:
    return {
        **_ref(one.ref),
        "severity": one.severity.name.lower(),
        "verdict": _verdict(one.verdict),
        "told": _verdict(one.told),
        "kubelet": _belief(one.belief, explained) if one.belief else None,
        "taints": None
        if one.taints is None
        else [
            {"key": of.key, "value": of.value, "effect": of.effect, "timeAdded": rfc3339(of.added_wall_s)}
            for of in one.taints
        ],
        "foundBroken": [
            {
                "code": fault.code,
                "evidence": fault.evidence,
                "advice": fault.advice,
                "claim": _claim_ref(fault.claim),
                "since": rfc3339(fault.told_wall_s),
            }
            for fault in one.broken
        ],
        "notes": [_note(of) for of in one.notes],
    }


def _note(note: Note) -> dict[str, Any]:
    return {"subject": note.subject, **cause_document(note.cause)}


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    return {**device_document(verdict.health), "source": verdict.by} if verdict else None


def _belief(belief: Belief, explained: Explained) -> dict[str, Any]:
    return {
        "health": belief.health.name.capitalize(),
        "message": belief.message,
        "heard": rfc3339(belief.heard_s) if belief.heard_s > 0 else None,
        "leaseSeconds": belief.lease_s,
        "lapsed": belief.has_lapsed(explained.now.wall_s),
    }


# --- claims ------------------------------------------------------------------------------------------------


def _claim(claim: ClaimFacts) -> dict[str, Any]:
    view = claim.view
    return {
        **_claim_ref(view.ref),
        "devices": [_device_edge(edge) for edge in view.devices],
        "consumers": [_consumer_edge(edge) for edge in view.consumers],
        "containers": [_container_edge(edge) for edge in view.containers],
        "waitsFor": list(view.waiting),
        "notCalled": list(view.skipped),
        "objects": [{**_claim_object(one), **_told_by(witness)} for one, witness in view.objects],
        "orphans": None if claim.orphans is None else [_reservation(one) for one in claim.orphans],
        "prepares": [claim_document(record) for record in claim.records],
    }


def _device_edge(edge: DeviceEdge) -> dict[str, Any]:
    return {
        **_ref(edge.use.device),
        "requests": list(edge.use.requests),
        "shareID": edge.use.share_id or None,
        "relation": edge.relation,
        "byName": edge.by_name,
        **_told_by(edge.witness),
    }


def _consumer_edge(edge: ConsumerEdge) -> dict[str, Any]:
    one = edge.consumer
    return {
        "kind": one.kind,
        "resource": one.resource or None,
        "namespace": one.namespace or None,
        "name": one.name or None,
        "uid": one.uid or None,
        "relation": edge.relation,
        "byName": edge.by_name,
        **_told_by(edge.witness),
    }


def _container_edge(edge: ContainerEdge) -> dict[str, Any]:
    return {
        "container": edge.container,
        "pod": _pod_ref(edge.pod),
        "requests": None if edge.requests is None else list(edge.requests),
        "byName": edge.by_name,
        **_told_by(edge.witness),
    }


def _claim_object(claim: KnownClaim) -> dict[str, Any]:
    return {
        "allocated": claim.allocated,
        "reservedFor": [_reservation(one) for one in claim.reserved],
        "meantFor": [_reservation(one) for one in claim.meant_for],
        "reservedForAnyPod": claim.any_pod,
        "owner": _owner(claim.owner),
    }


def _reservation(one: Reservation) -> dict[str, str]:
    return {
        "kind": one.kind,
        "apiGroup": one.api_group,
        "resource": one.resource,
        "name": one.name,
        "uid": one.uid,
    }


# --- pods --------------------------------------------------------------------------------------------------


def _pod(pod: PodFacts) -> dict[str, Any]:
    return {
        **_pod_ref(pod.view.ref),
        "running": pod.view.running,
        "cgroups": [{"container": one.id, "running": one.running} for one in pod.view.live],
        "claims": [_claim_ref(one) for one in pod.view.claims],
        "objects": [{**_pod_object(one), **_told_by(witness)} for one, witness in pod.view.objects],
        "maybe": [_pod_ref(one) for one in pod.maybe[:MAYBE_MAX]],
        "maybeMore": max(0, len(pod.maybe) - MAYBE_MAX),
        "notes": [_note(one) for one in pod.notes],
    }


def _pod_object(pod: KnownPod) -> dict[str, Any]:
    return {
        "node": pod.node or None,
        "phase": pod.phase or None,
        "owner": _owner(pod.controller),
        "podGroup": pod.group or None,
        "mirrorUID": pod.mirror_uid or None,
        "containers": [
            {"name": one.name, "id": one.id or None, "running": one.running} for one in pod.containers
        ],
    }


def _owner(owner: Owner | None) -> dict[str, str] | None:
    if owner is None:
        return None
    return {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name, "uid": owner.uid}


# --- what follows ------------------------------------------------------------------------------------------


def _hurt(hurt: Hurt) -> dict[str, Any]:
    one = hurt.affected
    return {
        "device": _ref(hurt.device),
        "claim": _claim_ref(one.claim),
        "pod": _pod_ref(one.pod.ref),
        "sure": one.sure,
        "containers": [{"name": use.name, "sure": use.sure} for use in one.containers],
        "podGroup": one.group or None,
        "toldBy": _witnesses(edge.witness for edge in one.edges),
    }


def _witnesses(witnesses: Iterable[Provenance]) -> list[dict[str, str | None]]:
    return [_told_by(one) for one in dict.fromkeys(witnesses)]


def _risk(risk: Refusal) -> dict[str, Any]:
    return {
        "pod": _pod_ref(risk.pod),
        "claim": _claim_ref(risk.claim),
        "kubelets": risk.kubelets.name.lower().replace("_", "-"),
        "why": risk.why,
    }


def _conflict(conflict: Conflict) -> dict[str, Any]:
    sayings = [{**_told_by(one.witness), "text": one.text} for one in conflict.assertions]
    return {
        "kind": conflict.kind,
        "subject": conflict.subject,
        "claims": [_claim_ref(one) for one in conflict.claims],
        "pods": [_pod_ref(one) for one in conflict.pods],
        "sayings": sayings,
    }


def _source(account: Account) -> dict[str, Any]:
    return {
        "source": account.source,
        "place": account.place or None,
        "read": rfc3339(account.read.wall_s) if account.place else None,
        "written": rfc3339(account.written_s) if account.written_s is not None else None,
        "found": account.found or None,
        "absence": account.absence,
        "why": account.why or None,
        "costs": COSTS.get(account.source) if account.absence else None,
        "wrong": list(account.wrong),
    }
