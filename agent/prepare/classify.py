"""What kind of failure it is that a claim could not be prepared: all evidence, weighed in one ranking.

Owns the ranking and what becomes of the winner. What a piece of evidence shows of itself is
agent.prepare.scoring, what follows from a code agent.prepare.taxonomy, how it is put for the kubelet
agent.prepare.message.

Of one failure's evidence the weightiest decides; among equals the outermost exception. Then the health
engine: a device of the claim that it holds Unhealthy is the reason, unless something else is shown. One that
is down knows nothing now, and what it last said shows nothing. Of several failures at once the worst is told.
How often something came is not looked at: it shows nothing.
"""

from collections.abc import Sequence
from typing import Final

from agent.devices.taint_keys import spot_of
from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Health
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.evidence import Evidence, HealthEngineEvidence, Text
from agent.prepare.exceptions import failures
from agent.prepare.judgement import Context, EvidenceScore, Weight
from agent.prepare.normalize import clean, shorten
from agent.prepare.scoring import judge
from agent.prepare.taxonomy import row_of

__all__ = ["Context", "classify", "classify_evidence", "device_verdict", "judge_devices"]

EVIDENCE_MAX: Final = 8
DETAIL_CHARS: Final = 600
WORST_FIRST: Final = (
    ErrorClass.FAILED_DEVICE,  # or the next claim would be given the device
    ErrorClass.BAD_CONFIG,
    ErrorClass.PERMANENT,
    ErrorClass.UNKNOWN,  # trying twice may do harm; what passes is tried again within the call
    ErrorClass.TRANSIENT,
)
"""Which of several failures at once is told."""


def classify(error: BaseException, context: Context) -> PrepareVerdict:
    """What kind of failure an exception is."""
    chains = failures(error, context.operation)
    found = [_one_failure(chain, context) for chain in chains]
    held = _held([piece for chain in chains for piece in chain], context)
    return _verdict(_with_others(_worst(found), found, held), context)


def classify_evidence(evidence: Sequence[Evidence], context: Context) -> PrepareVerdict:
    """What kind of failure it is that all this is evidence of, the outermost first."""
    found = _one_failure(evidence or (Text(""),), context)
    return _verdict(_with_others(found, [found], _held(evidence, context)), context)


def judge_devices(context: Context) -> PrepareVerdict | None:
    """What there is to say of a claim if the health engine holds a device of it Unhealthy; else None."""
    held = _held((), context)
    return _verdict(_engines(held), context) if held else None


# --- the ranking -------------------------------------------------------------------------------------------


def _one_failure(evidence: Sequence[Evidence], context: Context) -> EvidenceScore:
    held = _held(evidence, context)
    judged = [judge(piece, context) for piece in evidence if piece not in held]
    if not judged:
        return _engines(held)
    best = max(judged, key=lambda one: one.weight)  # the first of equals: the outermost
    said = _once(best.said + tuple(word for one in judged for word in one.said))
    known = tuple(str(one) for one in held)
    if held and _outranked(best, held):
        return _in_engines_words(best, held)._replace(said=_once(known + said))
    return best._replace(said=_once(said + known))


def _in_engines_words(best: EvidenceScore, held: Sequence[HealthEngineEvidence]) -> EvidenceScore:
    """The same whether the health engine knew it before, or by the driver's own word of a while ago."""
    named = best.devices if best.error_class is ErrorClass.FAILED_DEVICE else ()
    engines = _engines([one for one in held if one.device in named] or held)
    detail = engines.detail or (best.detail if best.code == engines.code else "")
    return engines._replace(detail=detail, requests=best.requests or engines.requests)


def _outranked(best: EvidenceScore, held: Sequence[HealthEngineEvidence]) -> bool:
    """A device that the health engine holds Unhealthy is the reason: nothing shows another one."""
    if best.before is not None:
        return False
    if best.error_class is ErrorClass.FAILED_DEVICE:
        return set(best.devices) <= {one.device for one in held}  # what the engine says of them, so do we
    return best.weight < Weight.FACT or best.error_class not in {ErrorClass.BAD_CONFIG, ErrorClass.PERMANENT}


def _worst(found: Sequence[EvidenceScore]) -> EvidenceScore:
    """Of several failures the one to tell; the same one, in whatever order they came."""
    ranked = sorted(found, key=_rank)
    worst = ranked[0]
    same = [one for one in ranked if (one.error_class, one.code) == (worst.error_class, worst.code)]
    all_named = all(one.requests for one in same)
    return worst._replace(
        said=_once(tuple(word for one in ranked for word in one.said)),
        devices=tuple(sorted({device for one in same for device in one.devices})),
        requests=tuple(sorted({request for one in same for request in one.requests})) if all_named else (),
    )


def _with_others(
    worst: EvidenceScore, found: Sequence[EvidenceScore], held: Sequence[HealthEngineEvidence]
) -> EvidenceScore:
    """What is told, with the claim's other broken devices, if a device is to blame."""
    if worst.error_class is not ErrorClass.FAILED_DEVICE:
        return worst
    others = {
        device: f"{device} is broken, too: {one.code}"
        for one in sorted(found, key=_rank, reverse=True)
        if one.error_class is ErrorClass.FAILED_DEVICE
        for device in one.devices
    }
    others |= {one.device: f"{one.device} is Unhealthy, too: {one.code}" for one in held}
    more = [others[device] for device in sorted(others) if device not in worst.devices]
    return worst._replace(detail="; ".join([worst.detail, *more] if worst.detail else more))


def _rank(one: EvidenceScore) -> tuple[object, ...]:
    """The worst class first, then the weightiest; words and numbers, so that no two have the same rank."""
    told = (
        one.code,
        one.summary,
        one.detail,
        one.devices,
        one.requests,
        one.retry_after_s or 0.0,
        str(one.scope),
    )
    return (WORST_FIRST.index(one.error_class), -one.weight, *told)


def _once(said: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(said))[:EVIDENCE_MAX]


# --- the health engine -------------------------------------------------------------------------------------


def _held(evidence: Sequence[Evidence], context: Context) -> tuple[HealthEngineEvidence, ...]:
    """The claim's devices that the health engine holds Unhealthy, in the order of their names."""
    refs = {device.ref for device in context.claim.devices}
    known = {piece.device: piece for piece in evidence if isinstance(piece, HealthEngineEvidence)}
    if context.engine_up:
        known |= {ref: device_verdict(ref, context.health[ref]) for ref in refs & context.health.keys()}
    return tuple(known[ref] for ref in sorted(known) if known[ref].health is Health.UNHEALTHY)


def device_verdict(ref: DeviceRef, health: DeviceHealth) -> HealthEngineEvidence:
    """What the health engine holds of a device, by its worst cause."""
    if not health.causes:
        return HealthEngineEvidence(ref, health.health, "device.unhealthy", health.message)
    worst = max(health.causes, key=lambda cause: cause.severity)  # the first of equals
    return HealthEngineEvidence(ref, health.health, worst.code, worst.evidence, worst.advice)


def _engines(held: Sequence[HealthEngineEvidence]) -> EvidenceScore:
    """In the words of the health message: both say the same."""
    first, *rest = held
    return EvidenceScore(
        Weight.WORD,
        first.code or "device.unhealthy",
        ErrorClass.FAILED_DEVICE,
        clean(first.text) or "the device is Unhealthy",
        1.0,
        said=tuple(str(one) for one in held),
        detail="; ".join(f"{one.device}: {one.code}: {clean(one.text)}" for one in rest),
        devices=tuple(one.device for one in held),
        advice=first.advice,
    )


# --- the verdict -------------------------------------------------------------------------------------------


def _verdict(judged: EvidenceScore, context: Context) -> PrepareVerdict:
    if judged.before is not None:
        return judged.before
    claim, row = context.claim, row_of(judged.code, judged.error_class)
    blamed = judged.error_class is ErrorClass.FAILED_DEVICE
    devices = judged.devices if blamed else tuple(device.ref for device in claim.devices)
    requests = judged.requests or tuple(device.request for device in claim.devices if device.ref in devices)
    said = judged.said if context.engine_up else (*judged.said, "health engine is down")
    return PrepareVerdict(
        error_class=judged.error_class,
        code=judged.code,
        scope=judged.scope or row.scope,
        claim=claim.ref,
        summary=shorten(judged.summary or row.why),
        requests=tuple(sorted(set(requests))),
        devices=tuple(sorted(set(devices))),
        detail=shorten(judged.detail, DETAIL_CHARS),
        evidence=said,
        confidence=judged.confidence,
        advice=judged.advice or row.advice,
        retry_after_s=judged.retry_after_s,
        sticky_s=row.sticky_s,
        health=row.health,
        taint=row.taint and row.taint._replace(value=spot_of(judged.code, domain="").value),
    )
