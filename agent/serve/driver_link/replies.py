"""Methods of ``drahealth.v1.DriverLink``, from the bytes of a request to those of its reply.

This module encodes replies; agent.serve.driver_link.requests decodes and checks requests.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agent.model.claim import Claim
from agent.model.prepare import PrepareVerdict
from agent.model.taint import TAINTS_MAX, Effect, Taint, Taints
from agent.prepare.message import kubelet_text, kubelet_texts
from agent.serve.driver_link import requests
from agent.serve.driver_link.requests import CLASSES, DEVICES_MAX
from agent.serve.driver_link.types import DriverLinkHandler
from agent.serve.grpc.gen.driver_link.drahealth import v1
from agent.serve.grpc.wire.reader import FieldValues
from agent.serve.grpc.wire.writer import write_message

BLAMED_MAX: Final = 4096
TAINTED_MAX: Final = 6144
"""Maximum number of taints in a message. With this and BLAMED_MAX, messages with the longest names are just
below 4 MiB, the default limit of gRPC clients."""

EFFECTS: Final = {Effect[str(effect.name)]: int(effect) for effect in v1.TaintEffect if int(effect)}
_CLASS_NUMBERS: Final = {error_class: number for number, error_class in CLASSES.items()}


# --- the methods --------------------------------------------------------------------------------------------


def sync(data: bytes, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> bytes:
    """Handle ``SyncDevices``.

    Args:
        data: Encoded request.
        driver: Name of the driver.
        open_handler: Returns the handler of the driver's calls; called after the request was checked.

    Raises:
        GRPCError: The request is not valid. The handler's exceptions are passed on. The other methods raise
            the same.
    """
    rows = requests.read_sync(data)
    synced = open_handler().sync(rows)
    return write_message(v1.SyncDevicesReply, synced._asdict())


def check(data: bytes, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> bytes:
    """Handle ``CheckClaims``."""
    claims = requests.read_check(data, driver)
    return _answers(v1.CheckClaimsReply, claims, open_handler().check(claims))


def classify(data: bytes, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> bytes:
    """Handle ``Classify``."""
    claim, evidence = requests.read_classify(data, driver)
    verdict = open_handler().classify(claim, evidence)
    return write_message(v1.ClassifyReply, {"verdict": _verdict(verdict, kubelet_text(verdict), DEVICES_MAX)})


def report(data: bytes, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> bytes:
    """Handle ``ReportPrepare``."""
    prepare_report = requests.read_report(data, driver)
    handler = open_handler()
    record = handler.unprepared if prepare_report.unprepare else handler.prepared
    results = prepare_report.results
    return _answers(v1.ReportPrepareReply, [result.claim for result in results], record(results))


METHODS: Final[Mapping[str, Callable[[bytes, str, Callable[[], DriverLinkHandler]], bytes]]] = {
    "SyncDevices": sync,
    "CheckClaims": check,
    "Classify": classify,
    "ReportPrepare": report,
}


# --- replies ------------------------------------------------------------------------------------------------


def encode_taints(taints: Taints) -> bytes:
    """Encode a message of ``WatchTaints``. With too many taints, the mildest of each device are omitted."""
    devices = sorted(taints.devices.items(), key=lambda item: (item[0].pool, item[0].device))
    maximum = _share([len(device_taints) for _, device_taints in devices], TAINTED_MAX, TAINTS_MAX)
    tainted = [
        {"pool": ref.pool, "name": ref.device, "taints": [_taint(taint) for taint in device_taints[:maximum]]}
        for ref, device_taints in devices
    ]
    return write_message(v1.DeviceTaints, {"devices": tainted})


def _taint(taint: Taint) -> FieldValues:
    return {
        "key": taint.key,
        "value": taint.value,
        "effect": EFFECTS[taint.effect],
        "time_added_s": taint.added_wall_s,
    }


def _answers(kind: type[Any], claims: Sequence[Claim], verdicts: Sequence[PrepareVerdict | None]) -> bytes:
    """Encode one answer for each claim; the texts of several failures name one another."""
    failed = [verdict for verdict in verdicts if verdict is not None]
    texts = iter(kubelet_texts(failed))
    maximum = _share([len(verdict.devices) for verdict in failed], BLAMED_MAX, DEVICES_MAX)
    answers: list[FieldValues] = []
    for claim, verdict in zip(claims, verdicts, strict=True):
        answers.append({"uid": claim.uid})
        if verdict is not None:
            answers[-1]["verdict"] = _verdict(verdict, next(texts), maximum)
    return write_message(kind, {"answers": answers})


def _verdict(verdict: PrepareVerdict, text: str, devices_max: int) -> FieldValues:
    return {
        "error_class": _CLASS_NUMBERS[verdict.error_class],
        "code": verdict.code,
        "text": text,
        "summary": verdict.summary,
        "advice": verdict.advice,
        "evidence": verdict.evidence,
        "confidence": verdict.confidence,
        "retry_after_s": verdict.retry_after_s or 0.0,
        "devices": [device._asdict() for device in verdict.devices[:devices_max]],
        "count": verdict.count if verdict.first_wall_s else 0,
        "first_s": verdict.first_wall_s,
    }


def _share(counts: Sequence[int], total: int, maximum: int) -> int:
    """Return the limit for each of the counts, at least 1, so that the sum of the limited counts is at most
    `total`."""
    while maximum > 1 and sum(min(count, maximum) for count in counts) > total:
        maximum //= 2
    return maximum
