"""Classification of failed prepares: picks the strongest evidence, and derives class, code and advice.

Within one failure the evidence with the greatest weight decides; among equals, that of the outermost
exception. An Unhealthy device of the claim is the cause unless the evidence proves another cause. While the
health engine is down, the last health of devices does not count.
"""

from collections.abc import Sequence
from typing import Final

from agent.devices.taints import taint_id
from agent.model.claim import Claim, DeviceRef
from agent.model.health import DeviceHealth, Health, worst_repair
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.evidence import ErrorText, Evidence, HealthEngineEvidence
from agent.prepare.evidence_scores import EvidenceScore, EvidenceWeight, PrepareContext, score_evidence
from agent.prepare.extract_evidence import extract_evidence_chains
from agent.prepare.failure_kinds import failure_kind
from agent.prepare.kubelet_message import sanitize, shorten

__all__ = [
    "PrepareContext",
    "classify",
    "classify_evidence",
    "classify_unhealthy_devices",
    "health_engine_evidence",
]

EVIDENCE_MAX: Final = 8
DETAIL_CHARS: Final = 600
CLASSES_WORST_FIRST: Final = (
    ErrorClass.FAILED_DEVICE,  # else the scheduler gives the device to the next claim
    ErrorClass.BAD_CONFIG,
    ErrorClass.PERMANENT,
    ErrorClass.UNKNOWN,  # a retry may do harm; transient failures are retried within the call
    ErrorClass.TRANSIENT,
)
"""Error classes of failed prepares, worst first: of several failures at once the worst is reported."""


def classify(error: BaseException, context: PrepareContext) -> PrepareVerdict:
    """Classify a failed prepare by the exception that the driver's handler raised."""
    chains = extract_evidence_chains(error, context.operation)
    scores = [_score_failure(chain, context) for chain in chains]
    unhealthy = _unhealthy_devices([piece for chain in chains for piece in chain], context)
    return _build_verdict(_with_other_devices(_worst_failure(scores), scores, unhealthy), context)


def classify_evidence(evidence: Sequence[Evidence], context: PrepareContext) -> PrepareVerdict:
    """Classify a failed prepare by its evidence, such as an error text and an errno.

    Args:
        evidence: Evidence of one failure, that of the outermost exception first.
    """
    worst = _score_failure(evidence or (ErrorText(""),), context)
    return _build_verdict(_with_other_devices(worst, [worst], _unhealthy_devices(evidence, context)), context)


def classify_unhealthy_devices(context: PrepareContext) -> PrepareVerdict | None:
    """Return the verdict on a claim that has an Unhealthy device, before a prepare.

    The verdict has the class failed-device. None: the claim has no Unhealthy device.
    """
    unhealthy = _unhealthy_devices((), context)
    return _build_verdict(_score_unhealthy(unhealthy), context) if unhealthy else None


def _score_failure(evidence: Sequence[Evidence], context: PrepareContext) -> EvidenceScore:
    unhealthy = _unhealthy_devices(evidence, context)
    scores = [score_evidence(piece, context) for piece in evidence if piece not in unhealthy]
    if not scores:
        return _score_unhealthy(unhealthy)
    best = max(scores, key=lambda score: score.weight)  # the first of equals: the outermost
    lines = _unique_lines(best.evidence + tuple(line for score in scores for line in score.evidence))
    engine_evidence = tuple(str(device) for device in unhealthy)
    if unhealthy and _health_engine_decides(best, unhealthy):
        best = _health_engine_score(best, unhealthy)
        return best._replace(evidence=_unique_lines(engine_evidence + lines))
    return best._replace(evidence=_unique_lines(lines + engine_evidence))


def _health_engine_score(best: EvidenceScore, unhealthy: Sequence[HealthEngineEvidence]) -> EvidenceScore:
    """Return the score that blames the Unhealthy devices of the claim instead of the best evidence.

    Args:
        best: Score of the best evidence; the requests and devices that it names stay.
        unhealthy: Unhealthy devices of the claim.
    """
    named = best.devices if best.error_class is ErrorClass.FAILED_DEVICE else ()
    engines = _score_unhealthy([evidence for evidence in unhealthy if evidence.device in named] or unhealthy)
    detail = engines.detail or (best.detail if best.code == engines.code else "")
    return engines._replace(detail=detail, requests=best.requests or engines.requests)


def _health_engine_decides(best: EvidenceScore, unhealthy: Sequence[HealthEngineEvidence]) -> bool:
    """Return whether the Unhealthy devices of the claim, and not the best evidence, explain the failure."""
    if best.verdict is not None:
        return False
    if best.error_class is ErrorClass.FAILED_DEVICE:
        return set(best.devices) <= {bad.device for bad in unhealthy}  # the engine's cause counts for them
    return best.weight < EvidenceWeight.FACT or best.error_class not in {
        ErrorClass.BAD_CONFIG,
        ErrorClass.PERMANENT,
    }


def _worst_failure(found: Sequence[EvidenceScore]) -> EvidenceScore:
    """Return the score of the worst of several failures in one prepare, with the evidence of all."""
    ranked = sorted(found, key=_worst_first_key)
    worst = ranked[0]
    same = [score for score in ranked if (score.error_class, score.code) == (worst.error_class, worst.code)]
    all_named = all(score.requests for score in same)
    return worst._replace(
        evidence=_unique_lines(tuple(line for score in ranked for line in score.evidence)),
        devices=tuple(sorted({device for score in same for device in score.devices})),
        requests=tuple(sorted({request for top in same for request in top.requests})) if all_named else (),
    )


def _with_other_devices(
    worst: EvidenceScore, found: Sequence[EvidenceScore], unhealthy: Sequence[HealthEngineEvidence]
) -> EvidenceScore:
    """Return the score ``worst`` with the other broken devices of the claim added to its detail text.

    A score that does not blame a device is unchanged.

    Args:
        worst: Score of the failure that is reported.
        found: Scores of all failures.
        unhealthy: Unhealthy devices of the claim.
    """
    if worst.error_class is not ErrorClass.FAILED_DEVICE:
        return worst
    others = {
        device: f"{device} is also broken: {score.code}"
        for score in sorted(found, key=_worst_first_key, reverse=True)
        if score.error_class is ErrorClass.FAILED_DEVICE
        for device in score.devices
    }
    others |= {bad.device: f"{bad.device} is also Unhealthy: {bad.code}" for bad in unhealthy}
    more = [others[device] for device in sorted(others) if device not in worst.devices]
    return worst._replace(detail="; ".join([worst.detail, *more] if worst.detail else more))


def _worst_first_key(score: EvidenceScore) -> tuple[object, ...]:
    """Return a key that sorts the scores of failures, the worst first.

    The texts in the key make the order unique.
    """
    texts = (
        score.code,
        score.summary,
        score.detail,
        score.devices,
        score.requests,
        score.retry_after_s or 0.0,
        str(score.scope),
    )
    return (CLASSES_WORST_FIRST.index(score.error_class), -score.weight, *texts)


def _unique_lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lines))[:EVIDENCE_MAX]


def _unhealthy_devices(
    evidence: Sequence[Evidence], context: PrepareContext
) -> tuple[HealthEngineEvidence, ...]:
    refs = {device.ref for device in context.claim.devices}
    known = {piece.device: piece for piece in evidence if isinstance(piece, HealthEngineEvidence)}
    if context.engine_up:
        reported = refs & context.health.keys()
        known |= {ref: health_engine_evidence(ref, context.health[ref]) for ref in reported}
    return tuple(known[ref] for ref in sorted(known) if known[ref].health is Health.UNHEALTHY)


def health_engine_evidence(ref: DeviceRef, health: DeviceHealth) -> HealthEngineEvidence:
    """Return a device's health and its worst cause as evidence for a failed prepare."""
    if not health.causes:
        return HealthEngineEvidence(ref, health.health, "device.unhealthy", health.message)
    worst = max(health.causes, key=lambda cause: cause.severity)  # the first of equals
    return HealthEngineEvidence(ref, health.health, worst.code, worst.evidence, worst.advice, health.repair)


def _score_unhealthy(unhealthy: Sequence[HealthEngineEvidence]) -> EvidenceScore:
    """Return the score that blames the claim's Unhealthy devices for a failed prepare."""
    first, *rest = unhealthy
    repairs = [evidence.repair for evidence in unhealthy if evidence.repair is not None]
    return EvidenceScore(
        EvidenceWeight.DRIVER,
        first.code or "device.unhealthy",
        ErrorClass.FAILED_DEVICE,
        sanitize(first.text) or "the device is Unhealthy",
        1.0,
        evidence=tuple(str(evidence) for evidence in unhealthy),
        detail="; ".join(f"{bad.device}: {bad.code}: {sanitize(bad.text)}" for bad in rest),
        devices=tuple(evidence.device for evidence in unhealthy),
        advice=first.advice,
        repair=worst_repair(repairs) if repairs else None,
    )


def _build_verdict(decisive: EvidenceScore, context: PrepareContext) -> PrepareVerdict:
    if decisive.verdict is not None:
        return decisive.verdict
    claim, row = context.claim, failure_kind(decisive.code, decisive.error_class)
    is_device_failure = decisive.error_class is ErrorClass.FAILED_DEVICE
    devices = decisive.devices if is_device_failure else _requested_devices(claim, decisive.requests)
    requests = decisive.requests or tuple(device.request for device in claim.devices if device.ref in devices)
    has_several = is_device_failure and len(set(devices)) > 1
    evidence = decisive.evidence if context.engine_up else (*decisive.evidence, "health engine is down")
    proven = is_device_failure or decisive.weight is not EvidenceWeight.TEXT  # a user's text may be quoted
    return PrepareVerdict(
        error_class=decisive.error_class,
        code=decisive.code,
        scope=decisive.scope or row.scope,
        claim=claim.ref,
        summary=shorten(decisive.summary or row.explanation),
        requests=tuple(sorted(set(requests))),
        devices=tuple(sorted(set(devices))),
        detail=shorten(decisive.detail, DETAIL_CHARS),
        evidence=evidence,
        confidence=decisive.confidence,
        advice=decisive.advice or row.advice,
        repair=row.repair if decisive.repair is None else decisive.repair,
        retry_after_s=decisive.retry_after_s,
        sticky_s=row.cached_s,
        health=row.health if proven else None,
        taint=row.taint._replace(value=taint_id(decisive.code, domain="").value)
        if row.taint and proven
        else None,
        request_devices=len(set(_requested_devices(claim, requests))) if has_several and requests else 0,
    )


def _requested_devices(claim: Claim, requests: Sequence[str]) -> tuple[DeviceRef, ...]:
    """Return the devices of a claim for the named requests and their subrequests.

    If no request is named, return all devices.
    """
    return tuple(
        device.ref
        for device in claim.devices
        if not requests or device.request in requests or device.request.partition("/")[0] in requests
    )
