"""Methods of ``drahealth.v1.DriverLink``: decode a request, call the handler, encode the reply.

agent.serve.driver_link.requests decodes and checks the requests. Each method blocks while the handler blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from agent.model.claim import Claim, ClaimRef
from agent.model.health import TAINTS_MAX, Effect, Repair, Taint, Taints
from agent.model.prepare import PrepareVerdict
from agent.prepare.kubelet_message import kubelet_text, kubelet_texts
from agent.serve.driver_link import requests
from agent.serve.driver_link.handler_interface import DriverLinkHandler
from agent.serve.driver_link.requests import DEVICES_MAX, ERROR_CLASSES
from agent.serve.grpc.gen.driver_link.drahealth import v1
from agent.serve.grpc.wire import FieldValues, encode_message

REPLY_DEVICES_MAX: Final = 4096
"""Largest number of devices in all verdicts of one reply together."""
MESSAGE_TAINTS_MAX: Final = 6144
"""Largest number of taints in one message to a driver.

This and REPLY_DEVICES_MAX keep a message with the longest names below 4 MiB, the default limit of gRPC
clients.
"""

EFFECTS: Final = {Effect[str(effect.name)]: int(effect) for effect in v1.TaintEffect if int(effect)}
REPAIRS: Final = {Repair[str(repair.name)]: int(repair) for repair in v1.DeviceRepair}
_CLASS_NUMBERS: Final = {error_class: number for number, error_class in ERROR_CLASSES.items()}


# --- the methods --------------------------------------------------------------------------------------------


def handle_sync_devices(data: bytes, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> bytes:
    """Handle ``SyncDevices``; return the encoded reply.

    Args:
        data: Encoded request.
        driver: Name of the driver.
        open_handler: Returns the handler of the driver's calls; called after the request was checked.

    Raises:
        GRPCError: The request is not valid. Exceptions of the handler are not caught.
    """
    synced = open_handler().sync(requests.decode_sync_devices(data))
    return encode_message(v1.SyncDevicesReply, synced._asdict())


def handle_report_checks(data: bytes, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> bytes:
    """Handle a call of ``ReportChecks``. Arguments and errors are those of :func:`handle_sync_devices`."""
    results = requests.decode_report_checks(data)
    open_handler().report_checks(results)
    return encode_message(v1.ReportChecksReply, {})


def handle_check_claims(data: bytes, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> bytes:
    """Handle a call of ``CheckClaims``. Arguments and errors are those of :func:`handle_sync_devices`."""
    claims, handler = requests.decode_check_claims(data, driver), open_handler()
    texts = partial(kubelet_texts, elsewhere=handler.failures_at_other_drivers)
    return _answers(v1.CheckClaimsReply, claims, handler.check_claims(claims), texts)


def handle_classify(data: bytes, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> bytes:
    """Handle a call of ``Classify``. Arguments and errors are those of :func:`handle_sync_devices`."""
    claim, evidence = requests.decode_classify(data, driver)
    verdict = open_handler().classify(claim, evidence)
    return encode_message(
        v1.ClassifyReply, {"verdict": _verdict(verdict, kubelet_text(verdict), DEVICES_MAX)}
    )


def handle_report_prepare(data: bytes, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> bytes:
    """Handle a call of ``ReportPrepare``. Arguments and errors are those of :func:`handle_sync_devices`."""
    prepare_report = requests.decode_report_prepare(data, driver)
    handler = open_handler()
    results = prepare_report.results
    claims = [result.claim.ref for result in results]
    if prepare_report.unprepare:
        return _answers(v1.ReportPrepareReply, claims, handler.record_unprepares(results), kubelet_texts)
    texts = partial(kubelet_texts, elsewhere=handler.failures_at_other_drivers)
    verdicts = handler.record_prepares(results)
    blocked_uids = prepare_report.blocked_uids - {claim.uid for claim in claims}
    blocked = handler.recorded_failures(sorted(blocked_uids))
    claims += [verdict.claim for verdict in blocked]
    return _answers(v1.ReportPrepareReply, claims, [*verdicts, *blocked], texts)


METHODS: Final[Mapping[str, Callable[[bytes, str, Callable[[], DriverLinkHandler]], bytes]]] = {
    "SyncDevices": handle_sync_devices,
    "ReportChecks": handle_report_checks,
    "CheckClaims": handle_check_claims,
    "Classify": handle_classify,
    "ReportPrepare": handle_report_prepare,
}


# --- replies ------------------------------------------------------------------------------------------------


def encode_taints(taints: Taints) -> bytes:
    """Encode the taints of a driver's devices as a message of ``WatchTaints``.

    With more than MESSAGE_TAINTS_MAX taints in all, the mildest taints of each device are left out.
    """
    devices = sorted(taints.devices.items(), key=lambda item: (item[0].pool, item[0].device))
    maximum = _limit_per_item(
        [len(device_taints) for _, device_taints in devices], MESSAGE_TAINTS_MAX, TAINTS_MAX
    )
    tainted = [
        {"pool": ref.pool, "name": ref.device, "taints": [_taint(taint) for taint in device_taints[:maximum]]}
        for ref, device_taints in devices
    ]
    return encode_message(v1.DeviceTaints, {"devices": tainted})


def _taint(taint: Taint) -> FieldValues:
    return {
        "key": taint.key,
        "value": taint.value,
        "effect": EFFECTS[taint.effect],
        "time_added_s": taint.added_wall_s,
    }


def _answers(
    kind: type[Any],
    claims: Sequence[Claim | ClaimRef],
    verdicts: Sequence[PrepareVerdict | None],
    texts_of: Callable[[Sequence[PrepareVerdict]], Sequence[str]],
) -> bytes:
    """Encode a reply with one answer per claim.

    Args:
        kind: Message type of the reply.
        verdicts: Verdict on each claim; None: the claim has no failure.
        texts_of: Returns the error texts for the kubelet, one for each failure.
    """
    failed = [verdict for verdict in verdicts if verdict is not None]
    texts = iter(texts_of(failed))
    maximum = _limit_per_item([len(verdict.devices) for verdict in failed], REPLY_DEVICES_MAX, DEVICES_MAX)
    answers: list[FieldValues] = []
    for claim, verdict in zip(claims, verdicts, strict=True):
        answers.append({"uid": claim.uid})
        if verdict is not None:
            answers[-1]["verdict"] = _verdict(verdict, next(texts), maximum)
    return encode_message(kind, {"answers": answers})


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
        "repair": REPAIRS[verdict.repair],
    }


def _limit_per_item(counts: Sequence[int], total: int, maximum: int) -> int:
    """Return a limit for each count, so that the sum of the limited counts is at most `total`.

    The limit is `maximum`, halved until the sum is small enough; it is at least 1.
    """
    while maximum > 1 and sum(min(count, maximum) for count in counts) > total:
        maximum //= 2
    return maximum
