"""Decoder of a driver's answers to NodePrepareResources and NodeUnprepareResources.

It is independent of agent.serve.grpc.wire, so that a mistake there cannot hide a mistake of the driver.
"""

from __future__ import annotations

from itertools import count
from typing import Final

from agent.conform.health_list_decoder import FIELDS_LIMIT, TooManyFields, as_bytes, decode_fields
from agent.conform.session_record import ClaimReply, ReturnedDevice
from agent.model.protobuf_wire import LENGTH

# field numbers of NodePrepareResourcesResponse, of its map's entries, and of the messages in them
CLAIMS: Final = 1
KEY, VALUE = 1, 2
DEVICES, PREPARE_ERROR = 1, 2
UNPREPARE_ERROR: Final = 1
REQUESTS, POOL, NAME, CDI_IDS, SHARE_ID = 1, 2, 3, 4, 5

_ANSWER: Final = {CLAIMS: LENGTH}
_ENTRY: Final = {KEY: LENGTH, VALUE: LENGTH}
_PREPARED: Final = {DEVICES: LENGTH, PREPARE_ERROR: LENGTH}
_UNPREPARED: Final = {UNPREPARE_ERROR: LENGTH}
_DEVICE: Final = dict.fromkeys((REQUESTS, POOL, NAME, CDI_IDS, SHARE_ID), LENGTH)


def decode_answers(data: bytes, *, is_prepare: bool) -> tuple[ClaimReply, ...]:
    """Decode a driver's answer to a prepare or unprepare call into one reply per claim, in their order.

    Raises ValueError, which names the field, if the answer is not valid, and for too many fields.
    """
    fields = count(1)
    answers = []
    try:
        for number, (_, entry) in enumerate(decode_fields(data, _ANSWER, "answer", fields)):
            place = f"claim {number}"
            parts = dict(decode_fields(as_bytes(entry), _ENTRY, place, fields))
            uid, value = _text(parts.get(KEY, b""), f"{place}: uid"), as_bytes(parts.get(VALUE, b""))
            devices: list[ReturnedDevice] = []
            error: int | bytes = b""
            if is_prepare:
                for field, content in decode_fields(value, _PREPARED, place, fields):
                    if field == PREPARE_ERROR:
                        error = content
                        continue
                    at = f"{place}: device {len(devices)}"
                    found: dict[int, list[str]] = {}
                    for part, text in decode_fields(as_bytes(content), _DEVICE, at, fields):
                        found.setdefault(part, []).append(_text(text, at))
                    devices.append(_device(found))
            else:
                error = dict(decode_fields(value, _UNPREPARED, place, fields)).get(UNPREPARE_ERROR, b"")
            answers.append(ClaimReply(uid, tuple(devices), _text(error, f"{place}: error")))
    except TooManyFields:
        raise ValueError(
            f"the driver's answer has more than {FIELDS_LIMIT} protobuf fields, the limit"
        ) from None
    return tuple(answers)


def _device(found: dict[int, list[str]]) -> ReturnedDevice:
    """Return a device of a claim from its decoded protobuf fields.
    As in protobuf, the last of repeated single fields counts."""
    pool, name, share_id = (found.get(field, [""])[-1] for field in (POOL, NAME, SHARE_ID))
    return ReturnedDevice(tuple(found.get(REQUESTS, ())), pool, name, tuple(found.get(CDI_IDS, ())), share_id)


def _text(value: int | bytes, place: str) -> str:
    try:
        return as_bytes(value).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{place}: the text is not UTF-8") from None
