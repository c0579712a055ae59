"""Requests of ``drahealth.v1.DriverLink``: read and checked as a whole, before anything of one is done.

Owns the limits, as proto/drahealth/v1/driver_link.proto says them, and what each piece of evidence is in
agent.prepare's words. Slow for a large request: call it in a thread.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.model.claim import Claim, ClaimConfig, ClaimDevice
from agent.model.prepare import ErrorClass, Operation
from agent.prepare.evidence import (
    DecodeError,
    DriverReportedError,
    Errno,
    Evidence,
    GrpcStatus,
    HttpStatus,
    NvmlCode,
    Text,
    TimedOut,
)
from agent.prepare.normalize import clean
from agent.prepare.taxonomy import DEFAULTS
from agent.serve.driver_link.service import HandlerGone, Row
from agent.serve.grpc.gen.driver_link.drahealth import v1
from agent.serve.grpc.wire.plain import Limits, TooMany, Values, read

NAME_BYTES: Final = 253
TEXT_BYTES: Final = 4096
SUMMARY_CHARS: Final = 200
CLAIMS_MAX: Final = 256
DEVICES_MAX: Final = 128
"""Of a claim: four times what Kubernetes allocates. The densest request takes 11 MiB while it is read."""
EVIDENCE_MAX: Final = 16
_SHOWN_CHARS: Final = 64  # of a wrong value, so that the text stays one that can be read

LIMITS: Final[Limits] = {
    v1.SyncDevicesRequest: {"devices": 4096},
    v1.DeclaredDevice: {"name": 63, "pool": NAME_BYTES, "lease_s": (0, 86_399)},
    v1.CheckClaimsRequest: {"claims": CLAIMS_MAX},
    v1.ClassifyRequest: {"evidence": EVIDENCE_MAX},
    v1.ReportPrepareRequest: {"outcomes": CLAIMS_MAX},
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
    v1.HttpAnswer: {"status": (400, 599), "reason": TEXT_BYTES, "message": TEXT_BYTES},
    v1.Late: {"by": TEXT_BYTES, "text": TEXT_BYTES},
    v1.Undecoded: {"by": TEXT_BYTES, "text": TEXT_BYTES},
    v1.DriverWord: {
        "code": TEXT_BYTES,
        "summary": TEXT_BYTES,
        "detail": TEXT_BYTES,
        "device": TEXT_BYTES,
        "retry_after_s": (0, 86_400),
    },
}
"""The parts of a device have none here: what a declaration may say is its format's, whoever brings it."""

KINDS: Final = {"cpus": "cpu", "hugepages": "hugepages", "memory": "memory", "gpu": "gpu", "pci": "pci"}
"""What a device's part is called in a file. The names of its fields are the same."""

CLASSES: Final = {int(one): ErrorClass[str(one.name)] for one in v1.ErrorClass}
OPERATIONS: Final = {int(one): Operation[str(one.name)] for one in v1.Operation if int(one)}


# --- requests -----------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """What a report says."""

    unprepare: bool
    """Else they were to be prepared."""
    ended: list[HandlerGone]


def read_sync(data: bytes) -> list[Row]:
    """What a driver declares. Raises GRPCError for what is no request; so do the others."""
    devices = _read(data, v1.SyncDevicesRequest)["devices"]
    return [_row(device, f"devices[{number}]") for number, device in enumerate(devices)]


def read_check(data: bytes, driver: str) -> list[Claim]:
    """The claims that a driver asks about."""
    given = _read(data, v1.CheckClaimsRequest)["claims"]
    claims = [_claim(one, driver, f"claims[{number}]") for number, one in enumerate(given)]
    _check_once(claims, "claims[{}]")
    return claims


def read_classify(data: bytes, driver: str) -> tuple[Claim, tuple[Evidence, ...]]:
    """Whose prepare failed, and what shows why. Nobody's claim has no name."""
    request = _read(data, v1.ClassifyRequest)
    claim = _claim(request["claim"], driver, "claim") if "claim" in request else Claim("", "", "")
    evidence = _evidence(request["evidence"], "evidence")
    if not evidence:
        raise _invalid("evidence: 0 entries, at least 1")
    return claim, evidence


def read_report(data: bytes, driver: str) -> Report:
    """How prepares or unprepares have ended."""
    request = _read(data, v1.ReportPrepareRequest)
    if request["step"] not in {v1.Step.PREPARE, v1.Step.UNPREPARE}:
        raise _invalid("step: STEP_UNSPECIFIED, or one that this agent does not know")
    ended = [_ended(one, driver, f"outcomes[{number}]") for number, one in enumerate(request["outcomes"])]
    _check_once([one.claim for one in ended], "outcomes[{}].claim")
    return Report(request["step"] == v1.Step.UNPREPARE, ended)


def check_watch(data: bytes) -> None:
    """The request for taints, which says nothing."""
    _read(data, v1.WatchTaintsRequest)


def _read(data: bytes, kind: type[Any]) -> Values:
    try:
        return read(data, kind, LIMITS)
    except TooMany as error:
        raise GRPCError(Status.RESOURCE_EXHAUSTED, str(error)) from None
    except ValueError as error:
        raise _invalid(str(error)) from None


def _invalid(text: str) -> GRPCError:
    return GRPCError(Status.INVALID_ARGUMENT, text)


# --- devices and claims -------------------------------------------------------------------------------------


def _row(device: Values, where: str) -> Row:
    part = next((name for name in KINDS if name in device), None)
    if part is None:
        raise _invalid(f"{where}.part: none is set, or one that this agent does not know")
    lease = {"lease": f"{device['lease_s']}s"} if device["lease_s"] else {}
    said = {name: value for name, value in device[part].items() if value != ""}
    return Row(device["pool"], {"name": device["name"], "kind": KINDS[part], **lease, **said})


def _claim(values: Values, driver: str, where: str) -> Claim:
    _check_names(values, ("namespace", "name", "uid", "fingerprint"), where)
    if not values["uid"]:
        raise _invalid(f"{where}.uid: is empty")
    devices = []
    for number, one in enumerate(values["devices"]):
        _check_names(one, one, f"{where}.devices[{number}]")
        devices.append(ClaimDevice(one["request"], driver, one["pool"], one["device"], one["share_id"]))
    fingerprint = values["fingerprint"]
    configs = (ClaimConfig("", (), {"fingerprint": fingerprint}),) if fingerprint else ()
    return Claim(values["namespace"], values["name"], values["uid"], tuple(devices), configs)


def _check_names(values: Values, names: Iterable[str], where: str) -> None:
    for name in names:
        if not (value := values[name]).isprintable():
            raise _invalid(f"{where}.{name}: {value[:_SHOWN_CHARS]!r} is not printable")


def _check_once(claims: Sequence[Claim], place: str) -> None:
    first: dict[str, int] = {}
    for number, claim in enumerate(claims):
        if (before := first.setdefault(claim.uid, number)) != number:
            raise _invalid(f"{place.format(number)}.uid: the same as {place.format(before)}'s")


def _ended(outcome: Values, driver: str, where: str) -> HandlerGone:
    if "claim" not in outcome:
        raise _invalid(f"{where}.claim: is not set")
    claim = _claim(outcome["claim"], driver, f"{where}.claim")
    evidence = _evidence(outcome["evidence"], f"{where}.evidence")
    if evidence and not outcome["failed"]:
        raise _invalid(f"{where}.evidence: {len(evidence)} entries, limit 0 of what has not failed")
    return HandlerGone(claim, evidence if outcome["failed"] else None)


# --- evidence -----------------------------------------------------------------------------------------------


def _evidence(given: Sequence[Values], where: str) -> tuple[Evidence, ...]:
    found = []
    for number, values in enumerate(given):
        kind = next(iter(values), None)  # of a oneof, so there is but one
        if kind is None:
            raise _invalid(f"{where}[{number}].kind: none is set, or one that this agent does not know")
        found.append(_SHOWN[kind](values[kind], f"{where}[{number}].{kind}"))
    return tuple(found)


def _errno(values: Values, _: str) -> Evidence:
    number = values["number"]
    return Errno(number, _operation(values), values["path"], values["text"] or os.strerror(number))


def _word(values: Values, where: str) -> Evidence:
    error_class, summary = CLASSES[values["error_class"]], values["summary"]
    if len(summary) > SUMMARY_CHARS:
        raise _invalid(f"{where}.summary: {len(summary)} characters, limit {SUMMARY_CHARS}")
    if error_class is ErrorClass.UNKNOWN:
        return Text(summary)
    return DriverReportedError(
        error_class,
        values["code"] or DEFAULTS[error_class].code,
        summary,
        values["detail"],
        retry_after_s=values["retry_after_s"] or None,
        device=values["device"] or None,
    )


def _operation(values: Values) -> Operation | None:
    return OPERATIONS.get(values["operation"])


_SHOWN: Final[Mapping[str, Callable[[Any, str], Evidence]]] = {
    "errno": _errno,
    "nvml": lambda values, _: NvmlCode(values["code"], values["device"]),
    "grpc": lambda values, _: GrpcStatus(values["code"], values["message"]),
    "http": lambda values, _: HttpStatus(
        values["status"], values["reason"], values["message"], values["kubernetes"]
    ),
    "late": lambda values, _: TimedOut(values["by"] or "deadline", _operation(values), values["text"]),
    "undecoded": lambda values, _: DecodeError(
        clean(values["by"]) or "decoder", values["text"], Operation.CONFIG
    ),
    "word": _word,
    "text": lambda text, _: Text(text),
}
"""By what is set of a piece of evidence: from its values, and where they are."""
