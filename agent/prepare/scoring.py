"""What each kind of evidence shows of itself: a code, a class, a summary, and how much that weighs.

Owns one function per kind and the table of them. How they are weighed against one another, and against the
health engine, is agent.prepare.classify.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agent.model.claim import DeviceRef
from agent.model.prepare import ErrorClass, Operation
from agent.prepare import codes
from agent.prepare.evidence import (
    ClaimResult,
    DecodeError,
    DriverReportedError,
    Errno,
    Evidence,
    GrpcStatus,
    Handled,
    HealthEngineEvidence,
    HttpStatus,
    Judged,
    NoBackend,
    NvmlCode,
    Raised,
    Text,
    TimedOut,
    Unconnected,
    UnreadableCdiFile,
    WrongValue,
)
from agent.prepare.judgement import Context, EvidenceScore, Weight
from agent.prepare.normalize import clean, mask, shorten
from agent.prepare.patterns import PATTERNS
from agent.prepare.taxonomy import DEFAULTS, is_code

NO_FAILURE: Final = frozenset(f"gpu.xid.{code}" for code in (13, 31, 43, 45, 68))
"""XIDs of programs: whoever reports them as a device's failure is wrong, unless the health engine agrees."""

DOES: Final[Mapping[Operation, str]] = {
    Operation.DEVICE: "using the device",
    Operation.CDI: "writing a CDI file",
    Operation.STATE: "keeping the driver's state",
    Operation.CONFIG: "reading the parameters",
    Operation.API: "asking the API server",
    Operation.LOCK: "waiting for a lock",
    Operation.CGROUP: "writing a cgroup",
}


def judge(piece: Evidence, context: Context) -> EvidenceScore:
    """What a piece of evidence shows of itself, and what it is told as."""
    judged = _JUDGES[type(piece)](piece, context)
    return judged._replace(said=(judged.said or (shorten(clean(str(piece))),)) + judged.notes)


def _errno(piece: Errno, context: Context) -> EvidenceScore:
    operation = piece.operation or context.operation
    code, error_class = codes.meaning_of_errno(piece.number, operation)
    text = f" ({mask(piece.text)})" if piece.text else ""  # the C library's, unless a driver wrote its own
    does = f" while {DOES[operation]}" if operation else ""
    summary = f"{piece.name}{text}{does}{piece.path and f': {mask(piece.path)}'}"
    if code.startswith("os."):
        shown = error_class is not ErrorClass.UNKNOWN
        weight, confidence = (Weight.LOOSE, 0.7) if shown else (Weight.CODE, 0.1)
        return _by_text(EvidenceScore(weight, code, error_class, summary, confidence), piece.text, context)
    return EvidenceScore(Weight.FACT, code, error_class, summary, 0.9)


def _nvml(piece: NvmlCode, context: Context) -> EvidenceScore:
    code, error_class = codes.meaning_of_nvml(piece.code)
    shows = error_class is not ErrorClass.UNKNOWN
    weight, confidence = (Weight.FACT, 0.9) if shows else (Weight.CODE, 0.1)
    judged = EvidenceScore(weight, code, error_class, f"NVML: {piece.name} ({piece.code})", confidence)
    if error_class is not ErrorClass.FAILED_DEVICE:
        return judged
    named = _named(piece.device, context)
    if named or not piece.device or piece.device.startswith("/"):  # a path may be anybody's
        return _blaming(judged, named, context)
    note = f"{clean(piece.device)[:80]!r} is no device of the claim"
    return judged._replace(error_class=ErrorClass.TRANSIENT, notes=(note,), confidence=0.5)


def _grpc(piece: GrpcStatus, context: Context) -> EvidenceScore:
    code, error_class = codes.meaning_of_grpc(piece.code)
    summary = f"gRPC: {piece.name}{piece.message and f': {mask(piece.message)}'}"
    weight, confidence = (Weight.CODE, 0.1) if error_class is ErrorClass.UNKNOWN else (Weight.LOOSE, 0.7)
    return _by_text(EvidenceScore(weight, code, error_class, summary, confidence), piece.message, context)


def _http(piece: HttpStatus, context: Context) -> EvidenceScore:
    code, error_class = codes.meaning_of_http(piece.status, piece.reason, piece.kubernetes)
    who = "API server" if piece.kubernetes else "HTTP"
    summary = f"{who}: {piece.status} {mask(piece.reason)}".rstrip()
    if piece.message:
        summary += f": {mask(piece.message)}"
    if error_class is ErrorClass.UNKNOWN:
        return _by_text(EvidenceScore(Weight.CODE, code, error_class, summary, 0.1), piece.message, context)
    weight, confidence = (Weight.FACT, 0.9) if piece.kubernetes else (Weight.LOOSE, 0.6)
    return EvidenceScore(weight, code, error_class, summary, confidence)


def _undecoded(piece: DecodeError, context: Context) -> EvidenceScore:
    summary = f"{piece.by}: {clean(piece.text)}"
    operation = piece.operation or context.operation
    if operation is Operation.CONFIG:
        return EvidenceScore(
            Weight.FACT, "config.decode", ErrorClass.BAD_CONFIG, f"parameters: {summary}", 0.9
        )
    if operation is Operation.STATE:
        return EvidenceScore(Weight.FACT, "state.checkpoint_corrupt", ErrorClass.PERMANENT, summary, 0.9)
    if piece.refused and operation is None and context.claim.configs:
        return EvidenceScore(
            Weight.LOOSE, "config.decode", ErrorClass.BAD_CONFIG, f"parameters: {summary}", 0.6
        )
    return EvidenceScore(
        Weight.CODE, "driver.decode", ErrorClass.UNKNOWN, f"{piece.by}: {mask(piece.text)}", 0.1
    )


def _wrong_value(piece: WrongValue, _: Context) -> EvidenceScore:
    summary = f"parameters: {clean(piece.text) or piece.by}"
    return EvidenceScore(Weight.FACT, "config.invalid", ErrorClass.BAD_CONFIG, summary, 0.8)


def _unconnected(piece: Unconnected, context: Context) -> EvidenceScore:
    asks = (piece.operation or context.operation) is Operation.API
    weight, code = (Weight.FACT, "api.unreachable") if asks else (Weight.LOOSE, "os.unconnected")
    summary = f"no connection: {piece.by}{piece.text and f': {mask(piece.text)}'}"
    return EvidenceScore(weight, code, ErrorClass.TRANSIENT, summary, 0.7)


def _cdi_file(piece: UnreadableCdiFile, _: Context) -> EvidenceScore:
    where = f" {mask(piece.path)}" if piece.path else ""
    summary = f"CDI file{where} cannot be understood: {mask(piece.text)}"
    return EvidenceScore(Weight.FACT, "cdi.malformed", ErrorClass.TRANSIENT, summary, 0.8)


def _device(piece: HealthEngineEvidence, _: Context) -> EvidenceScore:
    """One that is not Unhealthy: no failure is a device's for that."""
    text = f"{piece.device} is {piece.health.name.capitalize()}"
    return EvidenceScore(Weight.TYPE, "driver.error", ErrorClass.UNKNOWN, text, 0.0)


def _timed_out(piece: TimedOut, context: Context) -> EvidenceScore:
    operation = piece.operation or context.operation
    code = codes.TIMEOUTS.get(operation, "deadline") if operation else "deadline"
    does = f" while {DOES[operation]}" if operation else ""
    text = f": {mask(piece.text)}" if piece.text else ""
    weight = Weight.FACT if operation else Weight.LOOSE
    return EvidenceScore(weight, code, ErrorClass.TRANSIENT, f"not done in time{does}{text}", 0.7)


def _ended(piece: ClaimResult, _: Context) -> EvidenceScore:
    code = "driver.shutting_down" if piece.leaving else "driver.cancelled"
    return EvidenceScore(
        Weight.LOOSE, code, ErrorClass.TRANSIENT, f"given up before its end: {piece.by}", 0.7
    )


def _no_backend(piece: NoBackend, _: Context) -> EvidenceScore:
    summary = f"health backend: {mask(piece.text)}"
    return EvidenceScore(Weight.LOOSE, "backend.unreachable", ErrorClass.UNKNOWN, summary, 0.5)


def _raised(piece: Raised, context: Context) -> EvidenceScore:
    code = f"driver.{'bug' if piece.bug else 'exception'}.{_snake(piece.name)}"
    text = mask(piece.text)
    summary = f"{clean(piece.name)}{text and f': {text}'}"
    return _by_text(EvidenceScore(Weight.TYPE, code, ErrorClass.UNKNOWN, summary, 0.0), piece.text, context)


def _text(piece: Text, context: Context) -> EvidenceScore:
    judged = EvidenceScore(Weight.TYPE, "driver.error", ErrorClass.UNKNOWN, mask(piece.text), 0.0)
    return _by_text(judged, piece.text, context)


def _word(piece: DriverReportedError, context: Context) -> EvidenceScore:
    judged = EvidenceScore(
        Weight.WORD,
        piece.code,
        piece.error_class,
        clean(piece.summary),
        1.0,
        detail=clean(piece.detail),
        requests=tuple(map(clean, piece.requests)),
        retry_after_s=piece.retry_after_s,
        scope=piece.scope,
    )
    if not is_code(piece.code):
        note = f"its code {clean(piece.code)[:40]!r} is no dotted code"
        judged = judged._replace(code=DEFAULTS[piece.error_class].code, notes=(note,))
    if piece.error_class is ErrorClass.UNKNOWN:
        return judged._replace(weight=Weight.LOOSE)  # it does not say what a number may show
    if piece.error_class is not ErrorClass.FAILED_DEVICE:
        return judged
    if piece.code in NO_FAILURE:
        return judged._replace(error_class=ErrorClass.TRANSIENT, notes=("which is a program's fault",))
    if isinstance(piece.device, DeviceRef):
        drivers = {device.driver for device in context.claim.devices}
        if not drivers or piece.device.driver in drivers:
            return judged._replace(devices=(piece.device,))
        note = f"{clean(str(piece.device))[:160]} is another driver's"
    elif named := _named(piece.device or "", context):
        return _blaming(judged, named, context)
    else:
        note = f"no device of the claim is called {clean(piece.device or '')[:80]!r}"
    return judged._replace(weight=Weight.LOOSE, error_class=ErrorClass.UNKNOWN, notes=(note,), confidence=0.5)


def _judged(piece: Judged, _: Context) -> EvidenceScore:
    was = piece.verdict
    return EvidenceScore(
        Weight.VERDICT,
        was.code,
        was.error_class,
        was.summary,
        was.confidence,
        said=was.evidence,
        requests=was.requests,
        devices=was.devices,
        before=was,
    )


def _handled(piece: Handled, context: Context) -> EvidenceScore:
    """It counts only if it passes: that a cache was missing shows nothing of what came then."""
    judged = judge(piece.evidence, context)
    if judged.error_class is ErrorClass.TRANSIENT and judged.weight < Weight.WORD:
        return judged._replace(weight=min(judged.weight, Weight.LOOSE), said=(str(piece),))
    return judged._replace(
        weight=Weight.TYPE, error_class=ErrorClass.UNKNOWN, code="driver.error", said=(str(piece),),
        confidence=0.0, devices=(), before=None,
    )  # fmt: skip


_JUDGES: Final[Mapping[type, Callable[[Any, Context], EvidenceScore]]] = {
    Errno: _errno,
    NvmlCode: _nvml,
    GrpcStatus: _grpc,
    HttpStatus: _http,
    DecodeError: _undecoded,
    WrongValue: _wrong_value,
    Unconnected: _unconnected,
    UnreadableCdiFile: _cdi_file,
    HealthEngineEvidence: _device,
    TimedOut: _timed_out,
    ClaimResult: _ended,
    NoBackend: _no_backend,
    Raised: _raised,
    Text: _text,
    DriverReportedError: _word,
    Judged: _judged,
    Handled: _handled,
}


def _by_text(judged: EvidenceScore, text: str, context: Context) -> EvidenceScore:
    """The same, or what a pattern makes of the text if nothing else shows anything."""
    if judged.weight >= Weight.TEXT:
        return judged
    text = clean(text)
    found = next((one for one in (*context.patterns, *PATTERNS) if one.takes(text)), None)
    if found is None:
        return judged
    judged = judged._replace(
        weight=Weight.TEXT, code=found.code, error_class=found.error_class, confidence=found.confidence,
        summary=clean(found.summary) or judged.summary,
    )  # fmt: skip
    return _blaming(judged, (), context) if found.error_class is ErrorClass.FAILED_DEVICE else judged


def _blaming(judged: EvidenceScore, named: Sequence[DeviceRef], context: Context) -> EvidenceScore:
    """A device of the claim is broken: the one that is named, or the only one; else nobody knows which."""
    devices = named or sorted({device.ref for device in context.claim.devices})
    if len(devices) == 1:
        return judged._replace(devices=tuple(devices))
    note = f"nothing says which of {len(devices)} devices it is"
    confidence = min(judged.confidence, 0.5)
    return judged._replace(error_class=ErrorClass.TRANSIENT, notes=(note,), confidence=confidence)


def _named(name: str, context: Context) -> tuple[DeviceRef, ...]:
    """The claim's devices of that name."""
    refs = sorted({device.ref for device in context.claim.devices})
    return tuple(ref for ref in refs if name in {ref.device, f"{ref.pool}/{ref.device}", str(ref)})


_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def _snake(name: str) -> str:
    """``ValueError`` as a part of a code: ``value_error``."""
    words = re.sub(r"[^a-z0-9]+", "_", _HUMP.sub("_", name).lower()).strip("_")
    return words[:48].rstrip("_") or "nameless"
