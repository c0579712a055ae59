"""The methods of ``drahealth.v1.DriverLink``, from a request's bytes to those of its reply.

Owns what a reply says. What a request may say is agent.serve.driver_link.requests'.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agent.model.claim import Claim
from agent.model.prepare import PrepareVerdict
from agent.model.taint import TAINTS_MAX, Effect, Taint, Taints
from agent.prepare.message import text, texts
from agent.serve.driver_link import requests
from agent.serve.driver_link.requests import CLASSES, DEVICES_MAX
from agent.serve.driver_link.service import Link
from agent.serve.grpc.gen.driver_link.drahealth import v1
from agent.serve.grpc.wire.plain import Values, write

BLAMED_MAX: Final = 4096
TAINTED_MAX: Final = 6144
"""Devices to blame in a reply, and taints in a message. With the longest names, and the rest, these are just
below 4 MiB; gRPC's clients read no more unless they are told to."""

EFFECTS: Final = {Effect[str(one.name)]: int(one) for one in v1.TaintEffect if int(one)}
_CLASS_NUMBERS: Final = {one: number for number, one in CLASSES.items()}


# --- the methods --------------------------------------------------------------------------------------------


def sync(data: bytes, driver: str, link: Callable[[], Link]) -> bytes:
    """``SyncDevices``.

    Args:
        data: The request.
        driver: Whose it is.
        link: Gives who does it; asked when the request is found to be one.

    Raises:
        GRPCError: The data are no request that can be used. And whatever the link raises; so do the others.
    """
    rows = requests.read_sync(data)
    synced = link().sync(rows)
    return write(v1.SyncDevicesReply, synced._asdict())


def check(data: bytes, driver: str, link: Callable[[], Link]) -> bytes:
    """``CheckClaims``."""
    claims = requests.read_check(data, driver)
    return _answers(v1.CheckClaimsReply, claims, link().check(claims))


def classify(data: bytes, driver: str, link: Callable[[], Link]) -> bytes:
    """``Classify``."""
    claim, evidence = requests.read_classify(data, driver)
    verdict = link().classify(claim, evidence)
    return write(v1.ClassifyReply, {"verdict": _verdict(verdict, text(verdict), DEVICES_MAX)})


def report(data: bytes, driver: str, link: Callable[[], Link]) -> bytes:
    """``ReportPrepare``."""
    said = requests.read_report(data, driver)
    tell = link().unprepared if said.unprepare else link().prepared
    return _answers(v1.ReportPrepareReply, [one.claim for one in said.ended], tell(said.ended))


METHODS: Final[Mapping[str, Callable[[bytes, str, Callable[[], Link]], bytes]]] = {
    "SyncDevices": sync,
    "CheckClaims": check,
    "Classify": classify,
    "ReportPrepare": report,
}


# --- replies ------------------------------------------------------------------------------------------------


def encode_taints(taints: Taints) -> bytes:
    """A message of ``WatchTaints``. Where all would be too much, the mildest taints of a device go first."""
    devices = sorted(taints.devices.items(), key=lambda item: (item[0].pool, item[0].device))
    most = _share([len(of) for _, of in devices], TAINTED_MAX, TAINTS_MAX)
    told = [
        {"pool": ref.pool, "name": ref.device, "taints": [_taint(one) for one in of[:most]]}
        for ref, of in devices
    ]
    return write(v1.DeviceTaints, {"devices": told})


def _taint(taint: Taint) -> Values:
    return {
        "key": taint.key,
        "value": taint.value,
        "effect": EFFECTS[taint.effect],
        "time_added_s": taint.added_wall_s,
    }


def _answers(kind: type[Any], claims: Sequence[Claim], verdicts: Sequence[PrepareVerdict | None]) -> bytes:
    """One answer for each claim; the texts of those that failed name one another."""
    failed = [one for one in verdicts if one is not None]
    lines = iter(texts(failed))
    most = _share([len(one.devices) for one in failed], BLAMED_MAX, DEVICES_MAX)
    answers = [
        {"uid": claim.uid, **({} if one is None else {"verdict": _verdict(one, next(lines), most)})}
        for claim, one in zip(claims, verdicts, strict=True)
    ]
    return write(kind, {"answers": answers})


def _verdict(verdict: PrepareVerdict, line: str, devices_max: int) -> Values:
    return {
        "error_class": _CLASS_NUMBERS[verdict.error_class],
        "code": verdict.code,
        "text": line,
        "summary": verdict.summary,
        "advice": verdict.advice,
        "evidence": verdict.evidence,
        "confidence": verdict.confidence,
        "retry_after_s": verdict.retry_after_s or 0.0,
        "devices": [one._asdict() for one in verdict.devices[:devices_max]],
        "count": verdict.count if verdict.first_wall_s else 0,
        "first_s": verdict.first_wall_s,
    }


def _share(counts: Sequence[int], total: int, most: int) -> int:
    """How many each may have, so that together they have no more than the total; one at least."""
    while most > 1 and sum(min(count, most) for count in counts) > total:
        most //= 2
    return most
