"""Decoders of the requests of ``drahealth.v1.DriverLink``, with the limits of driver_link.proto.

They raise GRPCError if any part of a request is not valid. Slow for a large request: call them in a thread.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.model.claim import Claim, ClaimConfig, ClaimDevice
from agent.model.health import Finding, Repair, Severity
from agent.model.prepare import ErrorClass, Operation
from agent.prepare.evidence import (
    ConnectionFailure,
    DecodeFailure,
    DriverReportedError,
    ErrnoEvidence,
    ErrorText,
    Evidence,
    GrpcStatus,
    HttpStatus,
    NvmlCode,
    OperationTimeout,
    UnreadableCdiFile,
    operation_of_path,
)
from agent.prepare.failure_kinds import DEFAULT_KINDS
from agent.prepare.kubelet_message import normalize, sanitize
from agent.serve.driver_link.handler_interface import (
    DeviceDeclaration,
    DriverCheckResult,
    ReportedClaimResult,
)
from agent.serve.grpc.gen.driver_link.drahealth import v1
from agent.serve.grpc.wire import FieldLimits, FieldValues, TooManyEntries, read_message

NAME_BYTES: Final = 253
TEXT_BYTES: Final = 4096
CLAIMS_MAX: Final = 256
DEVICES_MAX: Final = 128
"""Maximum number of devices of a claim, four times that of Kubernetes. The largest request takes 11 MiB of
memory while it is decoded."""
EVIDENCE_MAX: Final = 16
_SHOWN_CHARS: Final = 64  # length of a wrong value in an error text

LIMITS: Final[FieldLimits] = {
    v1.SyncDevicesRequest: {"devices": 4096},
    v1.DeclaredDevice: {"name": 63, "pool": NAME_BYTES, "lease_s": (0, 86_399), "checks": 8},
    v1.ReportChecksRequest: {"results": 4096},
    v1.CheckResult: {
        "check": 63,
        "pool": NAME_BYTES,
        "device": 63,
        "every_s": (0.1, 3600),
        "lease_s": (0, 86_400),
        "age_s": (0, 1e9),
        "raise_after": (0, 1000),
        "clear_after": (0, 1000),
        "run": (0, 1 << 62),
        "no_result": TEXT_BYTES,
    },
    v1.CheckFinding: {"code": 100, "evidence": TEXT_BYTES, "advice": TEXT_BYTES},
    v1.CheckClaimsRequest: {"claims": CLAIMS_MAX},
    v1.ClassifyRequest: {"evidence": EVIDENCE_MAX},
    v1.ReportPrepareRequest: {"outcomes": CLAIMS_MAX, "blocked_uids": CLAIMS_MAX},
    v1.PrepareOutcome: {"evidence": EVIDENCE_MAX},
    v1.PrepareClaim: {
        "namespace": NAME_BYTES,
        "name": NAME_BYTES,
        "uid": NAME_BYTES,
        "devices": DEVICES_MAX,
        "fingerprint": NAME_BYTES,
    },
    v1.ClaimedDevice: dict.fromkeys(("request", "pool", "device", "share_id"), NAME_BYTES),
    v1.Evidence: {"text": TEXT_BYTES},
    v1.Errno: {"number": (1, 4095), "path": TEXT_BYTES, "text": TEXT_BYTES},
    v1.NvmlReturn: {"code": (1, 999), "device": TEXT_BYTES},
    v1.GrpcStatus: {"code": (1, 16), "message": TEXT_BYTES},
    v1.HttpStatus: {"status": (400, 599), "reason": TEXT_BYTES, "message": TEXT_BYTES},
    v1.Timeout: {"by": TEXT_BYTES, "text": TEXT_BYTES},
    v1.OperationFailure: {"by": TEXT_BYTES, "text": TEXT_BYTES},
    v1.DecodeError: {"by": TEXT_BYTES, "text": TEXT_BYTES, "requests": DEVICES_MAX},
    v1.DriverReportedError: {
        "code": TEXT_BYTES,
        "summary": TEXT_BYTES,
        "detail": TEXT_BYTES,
        "device": TEXT_BYTES,
        "retry_after_s": (0, 86_400),
        "requests": DEVICES_MAX,
    },
}
"""Limits of fields by message type and field name.

The oneof ``part`` of a device has none here: the declaration format checks its values.
"""

KIND_OF_PART: Final = {
    "cpus": "cpu",
    "hugepages": "hugepages",
    "memory": "memory",
    "gpu": "gpu",
    "pci": "pci",
    "nic": "nic",
}
"""Kind of a device in a declaration file, by the field of the oneof ``part`` that is set."""

ERROR_CLASSES: Final = {int(number): ErrorClass[str(number.name)] for number in v1.ErrorClass}
SEVERITIES: Final = {
    v1.CheckSeverity.DEGRADED: Severity.DEGRADED,
    v1.CheckSeverity.UNHEALTHY: Severity.UNHEALTHY,
}
"""Severities of findings by their numbers; all other numbers stand for UNKNOWN."""
REPAIR_OF_NUMBER: Final = {int(number): Repair[str(number.name)] for number in v1.DeviceRepair}
RUNS_DEFAULT: Final = 3
LEASE_PERIODS: Final = 3
LEASE_MIN_S: Final = 2.0
"""Shortest default lease of a check's result [s]; the default is LEASE_PERIODS periods of the check."""
DECODER_TYPES: Final = frozenset({"json.SyntaxError", "json.UnmarshalTypeError", "yaml.TypeError"})
"""Go types of errors of data that cannot be decoded."""
CONNECTION_PACKAGES: Final = frozenset({"net", "tls", "x509"})
"""Go packages whose types of errors stand for a failed connection, except PARSE_TYPES."""
PARSE_TYPES: Final = frozenset(
    {"net.AddrError", "net.InvalidAddrError", "net.ParseError", "net.UnknownNetworkError"}
)
"""Go types of errors of an address that cannot be parsed."""
OPERATIONS: Final = {int(number): Operation[str(number.name)] for number in v1.Operation if int(number)}


# --- requests -----------------------------------------------------------------------------------------------


class PrepareReport(NamedTuple):
    """Decoded ReportPrepare request: results of the driver's prepares or unprepares."""

    unprepare: bool
    """True: the results are those of unprepares. False: of prepares."""
    results: list[ReportedClaimResult]
    blocked_uids: frozenset[str]
    """UIDs of the call's claims that the driver did not try, because the agent knows why they fail."""


def decode_sync_devices(data: bytes) -> list[DeviceDeclaration]:
    """Decode the declared devices of a SyncDevices request. Raises GRPCError."""
    devices = _read(data, v1.SyncDevicesRequest)["devices"]
    return [_declaration(device, f"devices[{number}]") for number, device in enumerate(devices)]


def decode_report_checks(data: bytes) -> list[DriverCheckResult]:
    """Decode the check results of a ReportChecks request. Raises GRPCError."""
    return [_check_result(values) for values in _read(data, v1.ReportChecksRequest)["results"]]


def decode_check_claims(data: bytes, driver: str) -> list[Claim]:
    """Decode the claims of a CheckClaims request. Raises GRPCError.

    Args:
        driver: Name of the driver, to which the claims' devices belong.
    """
    given = _read(data, v1.CheckClaimsRequest)["claims"]
    claims = [_claim(values, driver, f"claims[{index}]") for index, values in enumerate(given)]
    _check_unique(claims, "claims[{}]")
    return claims


def decode_classify(data: bytes, driver: str) -> tuple[Claim, tuple[Evidence, ...]]:
    """Decode claim and evidence of a Classify request; a missing claim has empty names. Raises GRPCError."""
    request = _read(data, v1.ClassifyRequest)
    claim = _claim(request["claim"], driver, "claim") if "claim" in request else Claim("", "", "")
    evidence = _evidence(request["evidence"], "evidence")
    if not evidence:
        raise _invalid(f"evidence: 0 entries with one of {', '.join(_EVIDENCE_READERS)}; must be at least 1")
    return claim, evidence


def decode_report_prepare(data: bytes, driver: str) -> PrepareReport:
    """Decode the results of a ReportPrepare request. Raises GRPCError."""
    request = _read(data, v1.ReportPrepareRequest)
    if request["step"] not in {v1.Step.PREPARE, v1.Step.UNPREPARE}:
        raise _invalid("step: not set, or unknown to this agent; set STEP_PREPARE or STEP_UNPREPARE")
    results = [
        _result(outcome, driver, f"outcomes[{index}]") for index, outcome in enumerate(request["outcomes"])
    ]
    _check_unique([result.claim for result in results], "outcomes[{}].claim")
    is_unprepare = request["step"] == v1.Step.UNPREPARE
    return PrepareReport(is_unprepare, results, frozenset(request["blocked_uids"]))


def check_watch_taints(data: bytes) -> None:
    """Check a WatchTaints request, which has no fields."""
    _read(data, v1.WatchTaintsRequest)


def _read(data: bytes, kind: type[Any]) -> FieldValues:
    try:
        return read_message(data, kind, LIMITS)
    except TooManyEntries as error:
        raise GRPCError(Status.RESOURCE_EXHAUSTED, str(error)) from None
    except ValueError as error:
        raise _invalid(str(error)) from None


def _invalid(text: str) -> GRPCError:
    return GRPCError(Status.INVALID_ARGUMENT, text)


# --- devices and claims -------------------------------------------------------------------------------------


def _declaration(device: FieldValues, field_path: str) -> DeviceDeclaration:
    part = next((name for name in KIND_OF_PART if name in device), None)
    if part is None and not device["checks"]:
        raise _invalid(
            f"{field_path}.part: not set, or unknown to this agent; set one of {', '.join(KIND_OF_PART)}, or "
            "checks"
        )
    keys: dict[str, object] = {"name": device["name"]}
    if part is not None:
        keys["kind"] = KIND_OF_PART[part]
    if device["lease_s"]:
        keys["lease"] = f"{device['lease_s']}s"
    if device["checks"]:
        keys["checks"] = list(device["checks"])
    if part is not None:
        keys |= {name: value for name, value in device[part].items() if value != ""}
    return DeviceDeclaration(device["pool"], keys)


def _check_result(values: FieldValues) -> DriverCheckResult:
    finding = None
    if (found := values.get("finding")) is not None:
        severity = SEVERITIES.get(found["severity"], Severity.UNKNOWN)
        repair = REPAIR_OF_NUMBER[found["repair"]]
        finding = Finding(found["code"], severity, found["evidence"], found["advice"], repair=repair)
    has_result = finding is not None or "no_fault" in values
    return DriverCheckResult(
        values["check"],
        values["pool"],
        values["device"],
        finding=finding,
        no_result_reason="" if has_result else values.get("no_result") or "the driver gave no reason",
        every_s=values["every_s"],
        lease_s=values["lease_s"] or max(LEASE_PERIODS * values["every_s"], LEASE_MIN_S),
        age_s=values["age_s"],
        raise_after=values["raise_after"] or RUNS_DEFAULT,
        clear_after=values["clear_after"] or RUNS_DEFAULT,
        run=values["run"],
    )


def _claim(values: FieldValues, driver: str, field_path: str) -> Claim:
    _check_names(values, ("namespace", "name", "uid", "fingerprint"), field_path)
    if not values["uid"]:
        raise _invalid(f"{field_path}.uid: is empty; set the claim's UID")
    devices = []
    for index, device in enumerate(values["devices"]):
        admin = device.pop("admin_access")
        _check_names(device, device, f"{field_path}.devices[{index}]")
        devices.append(
            ClaimDevice(
                device["request"], driver, device["pool"], device["device"], device["share_id"], admin=admin
            )
        )
    fingerprint = values["fingerprint"]
    configs = (ClaimConfig("", (), {"fingerprint": fingerprint}),) if fingerprint else ()
    return Claim(values["namespace"], values["name"], values["uid"], devices=tuple(devices), configs=configs)


def _check_names(values: FieldValues, names: Iterable[str], field_path: str) -> None:
    for name in names:
        if not (value := values[name]).isprintable():
            raise _invalid(f"{field_path}.{name}: {value[:_SHOWN_CHARS]!r} has unprintable characters")


def _check_unique(claims: Sequence[Claim], path: str) -> None:
    first: dict[str, int] = {}
    for number, claim in enumerate(claims):
        if (before := first.setdefault(claim.uid, number)) != number:
            raise _invalid(
                f"{path.format(number)}.uid: same as {path.format(before)}.uid; list each claim once"
            )


def _result(outcome: FieldValues, driver: str, field_path: str) -> ReportedClaimResult:
    if "claim" not in outcome:
        raise _invalid(f"{field_path}.claim: not set; every result needs its claim")
    claim = _claim(outcome["claim"], driver, f"{field_path}.claim")
    evidence = _evidence(outcome["evidence"], f"{field_path}.evidence")
    if evidence and not outcome["failed"]:
        raise _invalid(f"{field_path}.evidence: {len(evidence)} entries, must be 0 unless failed is true")
    return ReportedClaimResult(claim, evidence if outcome["failed"] else None)


# --- evidence -----------------------------------------------------------------------------------------------


def _evidence(given: Sequence[FieldValues], field_path: str) -> tuple[Evidence, ...]:
    return tuple(
        _EVIDENCE_READERS[kind](value, f"{field_path}[{number}].{kind}")
        for number, values in enumerate(given)
        for kind, value in values.items()  # a oneof: one field, or none if a newer driver set an unknown one
    )


def _errno(values: FieldValues, _: str) -> Evidence:
    number, path = values["number"], values["path"]
    operation = _operation(values) or operation_of_path(path)
    return ErrnoEvidence(number, operation, path, values["text"] or os.strerror(number))


def _operation_failure(values: FieldValues, _: str) -> Evidence:
    by, text, operation = values["by"], normalize(values["text"]), _operation(values)
    if by in DECODER_TYPES:
        is_cdi = operation is Operation.CDI
        return UnreadableCdiFile("", text) if is_cdi else DecodeFailure(by, text, operation)
    if by.partition(".")[0] in CONNECTION_PACKAGES and by not in PARSE_TYPES:
        return ConnectionFailure(sanitize(by), text, operation)
    return ErrorText(values["text"])


def _requests(values: FieldValues, field_path: str) -> tuple[str, ...]:
    """Return the names of a claim's requests. Raises GRPCError for a name that no request can have."""
    for index, name in enumerate(values["requests"]):
        if not name or not name.isprintable() or len(name.encode()) > NAME_BYTES:
            raise _invalid(
                f"{field_path}.requests[{index}]: {name[:_SHOWN_CHARS]!r} is not the name of a request, "
                f"1 to {NAME_BYTES} printable bytes"
            )
    return tuple(values["requests"])


def _driver_error(values: FieldValues, field_path: str) -> Evidence:
    error_class, summary = ERROR_CLASSES[values["error_class"]], values["summary"]
    if error_class is ErrorClass.UNKNOWN:
        return ErrorText(summary)
    return DriverReportedError(
        error_class,
        values["code"] or DEFAULT_KINDS[error_class].code,
        summary,
        values["detail"],
        _requests(values, field_path),
        retry_after_s=values["retry_after_s"] or None,
        device=values["device"] or None,
    )


def _operation(values: FieldValues) -> Operation | None:
    return OPERATIONS.get(values["operation"])


_EVIDENCE_READERS: Final[Mapping[str, Callable[[Any, str], Evidence]]] = {
    "errno": _errno,
    "nvml": lambda values, _: NvmlCode(values["code"], values["device"]),
    "grpc": lambda values, _: GrpcStatus(values["code"], values["message"]),
    "http": lambda values, _: HttpStatus(
        values["status"], values["reason"], values["message"], values["kubernetes"]
    ),
    "timeout": lambda values, _: OperationTimeout(
        values["by"] or "deadline", _operation(values), values["text"]
    ),
    "decode_error": lambda values, field_path: DecodeFailure(
        sanitize(values["by"]) or "decoder",
        values["text"],
        Operation.CONFIG,
        requests=_requests(values, field_path),
    ),
    "driver_error": _driver_error,
    "operation_failure": _operation_failure,
    "text": lambda text, _: ErrorText(text),
}
"""Function that converts each kind of evidence, by name of its field in the proto file.

Its arguments are the field's values, and the path of the evidence for error texts.
"""
