"""Scores of evidence for failed prepares: the code and class that one piece of evidence suggests, and its
weight.

There is one scoring function per kind of evidence. agent.prepare.classify picks the greatest weight.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

from agent.model.claim import Claim, DeviceRef
from agent.model.health import DeviceHealth, Repair
from agent.model.prepare import ErrorClass, Operation, PrepareVerdict, Scope
from agent.prepare import error_tables
from agent.prepare.error_tables import BUILTIN_PATTERNS, ErrorPattern
from agent.prepare.evidence import (
    ConnectionFailure,
    DecodeFailure,
    DriverReportedError,
    EarlierException,
    ErrnoEvidence,
    ErrorText,
    Evidence,
    ExistingVerdict,
    GrpcStatus,
    HealthBackendUnreachable,
    HealthEngineEvidence,
    HttpStatus,
    InterruptedPrepare,
    NvmlCode,
    OperationTimeout,
    UnclassifiedException,
    UnreadableCdiFile,
    WrongParameterValue,
)
from agent.prepare.failure_kinds import DEFAULT_KINDS, USER_CODES, is_dotted_code
from agent.prepare.kubelet_message import normalize, sanitize, shorten


class EvidenceWeight(IntEnum):
    """Weight of a piece of evidence; of several pieces, the greatest weight decides the error class."""

    TYPE = 0
    """Weight of an exception's type without an error number."""
    CODE = 1
    """Weight of an error number that does not determine a class."""
    TEXT = 2
    """Weight of an error text that a pattern matches."""
    LOOSE = 3
    """Weight of an error number or exception type that determines a class without the operation."""
    FACT = 4
    """Weight of an error number together with the operation that failed."""
    DRIVER = 5
    """Weight of a class that the driver reported itself."""
    CLASSIFIED = 6
    """Weight of the verdict of an earlier classification."""


@dataclass(frozen=True, slots=True)
class PrepareContext:
    """Input of the classification of a failed prepare, in addition to the exception."""

    claim: Claim
    health: Mapping[DeviceRef, DeviceHealth] = field(default_factory=dict)
    """Health of the claim's devices; devices that the health engine does not evaluate are left out."""
    operation: Operation | None = None
    """Operation that failed, used if neither the exception nor a path shows the operation."""
    engine_up: bool = True
    """True: the health engine runs. False: ``health`` is outdated and ignored."""
    patterns: tuple[ErrorPattern, ...] = ()
    """Operator's patterns for error texts, tried before the built-in ones."""


class EvidenceScore(NamedTuple):
    """Code (``gpu.xid.79``), class and consequences of a failure that one piece of evidence suggests."""

    weight: EvidenceWeight
    code: str
    error_class: ErrorClass
    summary: str
    confidence: float
    evidence: tuple[str, ...] = ()
    """Texts that describe the evidence in the verdict; empty: ``str()`` of the evidence."""
    notes: tuple[str, ...] = ()
    """Remarks on the score that the verdict lists after ``evidence``."""
    detail: str = ""
    requests: tuple[str, ...] = ()
    devices: tuple[DeviceRef, ...] = ()
    """Devices that caused the failure."""
    retry_after_s: float | None = None
    scope: Scope | None = None
    advice: str = ""
    repair: Repair | None = None
    """Worst repair of ``devices``; None: that of the failure's kind."""
    verdict: PrepareVerdict | None = None
    """Verdict of an earlier classification; None: the failure was not classified before."""


APPLICATION_XIDS: Final = frozenset(f"gpu.xid.{code}" for code in (13, 31, 43, 45, 68))
"""Codes of XIDs (NVIDIA's GPU error numbers) that applications cause: the GPU itself is not broken."""

OPERATION_TEXTS: Final[Mapping[Operation, str]] = {
    Operation.DEVICE: "using the device",
    Operation.CDI: "writing a CDI file",
    Operation.STATE: "saving the driver's state",
    Operation.CONFIG: "reading the parameters",
    Operation.API: "calling the API server",
    Operation.LOCK: "waiting for a lock",
    Operation.CGROUP: "writing a cgroup",
}


def score_evidence(piece: Evidence, context: PrepareContext) -> EvidenceScore:
    """Return the score of one piece of evidence, without regard to other evidence."""
    scored = _SCORERS[type(piece)](piece, context)
    if scored.code in USER_CODES and scored.verdict is None:
        scored = _blame_claim(scored)
    return scored._replace(evidence=(scored.evidence or (shorten(sanitize(str(piece))),)) + scored.notes)


def _score_errno(piece: ErrnoEvidence, context: PrepareContext) -> EvidenceScore:
    operation = piece.operation or context.operation
    code, error_class = error_tables.classify_errno(piece.number, operation)
    text = f" ({normalize(piece.text)})" if piece.text else ""  # libc's text, or the driver's own
    action = f" while {OPERATION_TEXTS[operation]}" if operation else ""
    summary = f"{piece.name}{text}{action}{piece.path and f': {normalize(piece.path)}'}"
    if code.startswith("os."):
        is_classified = error_class is not ErrorClass.UNKNOWN
        weight, confidence = (EvidenceWeight.LOOSE, 0.7) if is_classified else (EvidenceWeight.CODE, 0.1)
        return _match_patterns(
            EvidenceScore(weight, code, error_class, summary, confidence), piece.text, context
        )
    return EvidenceScore(EvidenceWeight.FACT, code, error_class, summary, 0.9)


def _score_nvml(piece: NvmlCode, context: PrepareContext) -> EvidenceScore:
    code, error_class = error_tables.classify_nvml_code(piece.code)
    is_classified = error_class is not ErrorClass.UNKNOWN
    weight, confidence = (EvidenceWeight.FACT, 0.9) if is_classified else (EvidenceWeight.CODE, 0.1)
    scored = EvidenceScore(weight, code, error_class, f"NVML: {piece.name} ({piece.code})", confidence)
    if error_class is not ErrorClass.FAILED_DEVICE:
        return scored
    named = _devices_named(piece.device, context)
    if named or not piece.device or piece.device.startswith("/"):  # a path names no device
        return _blame_device(scored, named, context)
    note = f"{sanitize(piece.device)[:80]!r} is not a device of the claim"
    return scored._replace(error_class=ErrorClass.TRANSIENT, notes=(note,), confidence=0.5)


def _score_grpc(piece: GrpcStatus, context: PrepareContext) -> EvidenceScore:
    code, error_class = error_tables.classify_grpc_status(piece.code)
    summary = f"gRPC: {piece.name}{piece.message and f': {normalize(piece.message)}'}"
    weight, confidence = (
        (EvidenceWeight.CODE, 0.1) if error_class is ErrorClass.UNKNOWN else (EvidenceWeight.LOOSE, 0.7)
    )
    return _match_patterns(
        EvidenceScore(weight, code, error_class, summary, confidence), piece.message, context
    )


def _score_http(piece: HttpStatus, context: PrepareContext) -> EvidenceScore:
    code, error_class = error_tables.classify_http_status(piece.status, piece.reason, piece.from_api_server)
    server = "API server" if piece.from_api_server else "HTTP"
    summary = f"{server}: {piece.status} {normalize(piece.reason)}".rstrip()
    if piece.message:
        summary += f": {normalize(piece.message)}"
    if error_class is ErrorClass.UNKNOWN:
        return _match_patterns(
            EvidenceScore(EvidenceWeight.CODE, code, error_class, summary, 0.1), piece.message, context
        )
    weight, confidence = (EvidenceWeight.FACT, 0.9) if piece.from_api_server else (EvidenceWeight.LOOSE, 0.6)
    return EvidenceScore(weight, code, error_class, summary, confidence)


def _score_decode_failure(piece: DecodeFailure, context: PrepareContext) -> EvidenceScore:
    summary = f"{piece.exception_type}: {sanitize(piece.text)}"
    operation = piece.operation or context.operation
    requests = tuple(map(sanitize, piece.requests)) or _requests_with_parameters(context)
    if operation is Operation.CONFIG:
        return EvidenceScore(
            EvidenceWeight.FACT,
            "config.decode",
            ErrorClass.BAD_CONFIG,
            f"parameters: {summary}",
            0.9,
            requests=requests,
        )
    if operation is Operation.STATE:
        return EvidenceScore(
            EvidenceWeight.FACT, "state.checkpoint_corrupt", ErrorClass.PERMANENT, summary, 0.9
        )
    if piece.rejected_by_type_check and operation is None and context.claim.configs:
        return EvidenceScore(
            EvidenceWeight.LOOSE,
            "config.decode",
            ErrorClass.BAD_CONFIG,
            f"parameters: {summary}",
            0.6,
            requests=requests,
        )
    return EvidenceScore(
        EvidenceWeight.CODE,
        "driver.decode",
        ErrorClass.UNKNOWN,
        f"{piece.exception_type}: {normalize(piece.text)}",
        0.1,
    )


def _score_wrong_value(piece: WrongParameterValue, context: PrepareContext) -> EvidenceScore:
    summary = f"parameters: {sanitize(piece.text) or piece.exception_type}"
    return EvidenceScore(
        EvidenceWeight.FACT,
        "config.invalid",
        ErrorClass.BAD_CONFIG,
        summary,
        0.8,
        requests=_requests_with_parameters(context),
    )


def _requests_with_parameters(context: PrepareContext) -> tuple[str, ...]:
    """Return the claim's requests to which opaque parameters apply.

    Only these requests can have wrong parameters. Empty: the parameters apply to all requests.
    """
    named = [set(config.requests) for config in context.claim.configs]
    return tuple(sorted(set[str]().union(*named))) if all(named) else ()


def _score_no_connection(piece: ConnectionFailure, context: PrepareContext) -> EvidenceScore:
    is_api = (piece.operation or context.operation) is Operation.API
    weight, code = (
        (EvidenceWeight.FACT, "api.unreachable") if is_api else (EvidenceWeight.LOOSE, "os.unconnected")
    )
    summary = f"no connection: {piece.exception_type}{piece.text and f': {normalize(piece.text)}'}"
    return EvidenceScore(weight, code, ErrorClass.TRANSIENT, summary, 0.7)


def _score_cdi_file(piece: UnreadableCdiFile, _: PrepareContext) -> EvidenceScore:
    where = f" {normalize(piece.path)}" if piece.path else ""
    summary = f"CDI file{where} cannot be parsed: {normalize(piece.text)}"
    return EvidenceScore(EvidenceWeight.FACT, "cdi.malformed", ErrorClass.TRANSIENT, summary, 0.8)


def _score_device_health(piece: HealthEngineEvidence, _: PrepareContext) -> EvidenceScore:
    # only devices that are not Unhealthy get here: their state explains no failure
    text = f"{piece.device} is {piece.health.name.capitalize()}"
    return EvidenceScore(EvidenceWeight.TYPE, "driver.error", ErrorClass.UNKNOWN, text, 0.0)


def _score_timeout(piece: OperationTimeout, context: PrepareContext) -> EvidenceScore:
    operation = piece.operation or context.operation
    code = error_tables.TIMEOUT_CODES.get(operation, "deadline") if operation else "deadline"
    action = f" while {OPERATION_TEXTS[operation]}" if operation else ""
    text = f": {normalize(piece.text)}" if piece.text else ""
    weight = EvidenceWeight.FACT if operation else EvidenceWeight.LOOSE
    return EvidenceScore(weight, code, ErrorClass.TRANSIENT, f"timed out{action}{text}", 0.7)


def _score_interruption(piece: InterruptedPrepare, _: PrepareContext) -> EvidenceScore:
    code = "driver.shutting_down" if piece.process_exit else "driver.cancelled"
    return EvidenceScore(
        EvidenceWeight.LOOSE, code, ErrorClass.TRANSIENT, f"interrupted: {piece.exception_type}", 0.7
    )


def _score_no_backend(piece: HealthBackendUnreachable, _: PrepareContext) -> EvidenceScore:
    summary = f"health backend: {normalize(piece.text)}"
    return EvidenceScore(EvidenceWeight.LOOSE, "backend.unreachable", ErrorClass.UNKNOWN, summary, 0.5)


def _score_exception(piece: UnclassifiedException, context: PrepareContext) -> EvidenceScore:
    code = f"driver.{'bug' if piece.is_programming_error else 'exception'}.{_snake(piece.exception_type)}"
    text = normalize(piece.text)
    summary = f"{sanitize(piece.exception_type)}{text and f': {text}'}"
    return _match_patterns(
        EvidenceScore(EvidenceWeight.TYPE, code, ErrorClass.UNKNOWN, summary, 0.0), piece.text, context
    )


def _score_text(piece: ErrorText, context: PrepareContext) -> EvidenceScore:
    scored = EvidenceScore(
        EvidenceWeight.TYPE, "driver.error", ErrorClass.UNKNOWN, normalize(piece.text), 0.0
    )
    return _match_patterns(scored, piece.text, context)


def _score_driver_error(piece: DriverReportedError, context: PrepareContext) -> EvidenceScore:
    scored = EvidenceScore(
        EvidenceWeight.DRIVER,
        piece.code,
        piece.error_class,
        sanitize(piece.summary),
        1.0,
        detail=sanitize(piece.detail),
        requests=tuple(map(sanitize, piece.requests)),
        retry_after_s=piece.retry_after_s,
        scope=piece.scope,
    )
    if not is_dotted_code(piece.code):
        note = f"code {sanitize(piece.code)[:40]!r} is not a dotted code"
        scored = scored._replace(code=DEFAULT_KINDS[piece.error_class].code, notes=(note,))
    if piece.error_class is ErrorClass.UNKNOWN:
        return scored._replace(weight=EvidenceWeight.LOOSE)  # a number with an operation may show the class
    if piece.error_class is not ErrorClass.FAILED_DEVICE:
        return scored
    if piece.code in APPLICATION_XIDS:
        return scored._replace(
            error_class=ErrorClass.TRANSIENT, notes=("an application causes this XID, not the GPU",)
        )
    if isinstance(piece.device, DeviceRef):
        drivers = {device.driver for device in context.claim.devices}
        if not drivers or piece.device.driver in drivers:
            return scored._replace(devices=(piece.device,))
        note = f"{sanitize(str(piece.device))[:160]} belongs to another driver"
    elif named := _devices_named(piece.device or "", context):
        return _blame_device(scored, named, context)
    else:
        note = f"the claim has no device {sanitize(piece.device or '')[:80]!r}"
    return scored._replace(
        weight=EvidenceWeight.LOOSE, error_class=ErrorClass.UNKNOWN, notes=(note,), confidence=0.5
    )


def _score_verdict(piece: ExistingVerdict, _: PrepareContext) -> EvidenceScore:
    verdict = piece.verdict
    return EvidenceScore(
        EvidenceWeight.CLASSIFIED,
        verdict.code,
        verdict.error_class,
        verdict.summary,
        verdict.confidence,
        evidence=verdict.evidence,
        requests=verdict.requests,
        devices=verdict.devices,
        verdict=verdict,
    )


def _score_earlier_exception(piece: EarlierException, context: PrepareContext) -> EvidenceScore:
    """Return the score of an exception that was being handled when the failure was raised.

    The exception counts only if it is transient.
    """
    scored = score_evidence(piece.evidence, context)
    if scored.error_class is ErrorClass.TRANSIENT and scored.weight < EvidenceWeight.DRIVER:
        return scored._replace(weight=min(scored.weight, EvidenceWeight.LOOSE), evidence=(str(piece),))
    return scored._replace(
        weight=EvidenceWeight.TYPE, error_class=ErrorClass.UNKNOWN, code="driver.error",
        evidence=(str(piece),), confidence=0.0, devices=(), verdict=None,
    )  # fmt: skip


_SCORERS: Final[Mapping[type, Callable[[Any, PrepareContext], EvidenceScore]]] = {
    ErrnoEvidence: _score_errno,
    NvmlCode: _score_nvml,
    GrpcStatus: _score_grpc,
    HttpStatus: _score_http,
    DecodeFailure: _score_decode_failure,
    WrongParameterValue: _score_wrong_value,
    ConnectionFailure: _score_no_connection,
    UnreadableCdiFile: _score_cdi_file,
    HealthEngineEvidence: _score_device_health,
    OperationTimeout: _score_timeout,
    InterruptedPrepare: _score_interruption,
    HealthBackendUnreachable: _score_no_backend,
    UnclassifiedException: _score_exception,
    ErrorText: _score_text,
    DriverReportedError: _score_driver_error,
    ExistingVerdict: _score_verdict,
    EarlierException: _score_earlier_exception,
}


def _match_patterns(scored: EvidenceScore, text: str, context: PrepareContext) -> EvidenceScore:
    """Return the score of the first pattern that matches the error text, else the score ``scored``.

    A score with a weight of TEXT or more is not replaced.
    """
    if scored.weight >= EvidenceWeight.TEXT:
        return scored
    text = sanitize(text)
    found = next(
        (pattern for pattern in (*context.patterns, *BUILTIN_PATTERNS) if pattern.matches(text)), None
    )
    if found is None:
        return scored
    scored = scored._replace(
        weight=EvidenceWeight.TEXT, code=found.code, error_class=found.error_class,
        confidence=found.confidence, summary=sanitize(found.summary) or scored.summary,
    )  # fmt: skip
    return _blame_device(scored, (), context) if found.error_class is ErrorClass.FAILED_DEVICE else scored


def _blame_claim(scored: EvidenceScore) -> EvidenceScore:
    """Change the class of a score from a lasting class to bad-config, if the code of the score names user
    input.

    The lasting classes are failed-device and permanent; a driver or a pattern can name them.
    """
    if scored.error_class not in {ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT}:
        return scored
    notes = ("the claim causes this code, neither a device nor the node",)
    return scored._replace(error_class=ErrorClass.BAD_CONFIG, devices=(), notes=notes)


def _blame_device(
    scored: EvidenceScore, named: Sequence[DeviceRef], context: PrepareContext
) -> EvidenceScore:
    """Add the broken device to a score: the device that the evidence names, or the only device of the claim.

    If several devices may be broken, none is added, and the error class becomes transient.

    Args:
        named: Devices that the evidence names.
    """
    devices = named or sorted({device.ref for device in context.claim.devices})
    if len(devices) == 1:
        return scored._replace(devices=tuple(devices))
    note = f"the evidence does not name which of {len(devices)} devices failed"
    confidence = min(scored.confidence, 0.5)
    return scored._replace(error_class=ErrorClass.TRANSIENT, notes=(note,), confidence=confidence)


def _devices_named(name: str, context: PrepareContext) -> tuple[DeviceRef, ...]:
    refs = sorted({device.ref for device in context.claim.devices})
    return tuple(ref for ref in refs if name in {ref.device, f"{ref.pool}/{ref.device}", str(ref)})


_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def _snake(name: str) -> str:
    """Convert a class name to a part of a failure's code: ``ValueError`` to ``value_error``."""
    words = re.sub(r"[^a-z0-9]+", "_", _HUMP.sub("_", name).lower()).strip("_")
    return words[:48].rstrip("_") or "nameless"
