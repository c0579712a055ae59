"""Decoders of a driver's health lists, and of its answers to NodePrepareResources and
NodeUnprepareResources.

They keep invalid values of a health list for the conformance checks: strings that are not UTF-8, entries
without a device, and unknown health values. Only a list that is not a valid protobuf message cannot be
decoded. They are independent of agent.serve.grpc.wire, so that a mistake there cannot hide a mistake of the
driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Final

from agent.conform.session_record import ClaimReply, DeviceEntry, HealthList, ReturnedDevice
from agent.model.protobuf_wire import (
    FIXED_SIZES,
    LAST_FIELD,
    LENGTH,
    SIZE_VARINT_MAX,
    VARINT,
    decode_varint,
)

DEVICES_LIMIT: Final = 16_384
"""Largest number of device entries of a health list that are decoded."""
FIELDS_LIMIT: Final = 16 * DEVICES_LIMIT
"""Largest number of protobuf fields of a health list that are decoded.

It is twice what DEVICES_LIMIT device entries need.
"""

# field numbers of NodeWatchResourcesResponse and of the messages in it
DEVICES: Final = 1
IDENTIFIER, HEALTH, UPDATED, LEASE, MESSAGE = 1, 2, 3, 4, 5
POOL, NAME = 1, 2

_LIST: Final = {DEVICES: LENGTH}
_DEVICE: Final = {IDENTIFIER: LENGTH, HEALTH: VARINT, UPDATED: VARINT, LEASE: VARINT, MESSAGE: LENGTH}
_IDENTIFIER: Final = {POOL: LENGTH, NAME: LENGTH}


class TooManyFields(Exception):
    """The health list has more protobuf fields than FIELDS_LIMIT."""


def decode_health_list(data: bytes, at_s: float, decoded_entries: dict[bytes, DeviceEntry]) -> HealthList:
    """Decode a health list; an error is recorded in the result.

    Args:
        data: Encoded NodeWatchResourcesResponse.
        at_s: Time of its receipt.
        decoded_entries: Earlier entries by their bytes; gets the new entries, so that equal entries share one
            object.
    """
    devices: list[DeviceEntry] = []
    fields = count(1)
    try:
        for _, value in decode_fields(data, _LIST, "list", fields):
            if len(devices) == DEVICES_LIMIT:
                return HealthList(at_s, len(data), tuple(devices), is_truncated=True)
            entry = as_bytes(value)
            if entry not in decoded_entries:
                decoded_entries[entry] = _decode_entry(entry, f"device {len(devices)}", fields)
            devices.append(decoded_entries[entry])
    except TooManyFields:
        return HealthList(at_s, len(data), tuple(devices), is_truncated=True)
    except ValueError as error:
        return HealthList(at_s, len(data), (), decode_error=str(error))
    return HealthList(at_s, len(data), tuple(devices))


def _decode_entry(data: bytes, place: str, field_counter: Iterator[int]) -> DeviceEntry:
    """Decode the entry of one device in a health list. As in protobuf, the last of repeated fields counts."""
    values: dict[int, int | bytes] = {}
    identifier: dict[int, int | bytes] = {}
    for number, value in decode_fields(data, _DEVICE, place, field_counter):
        values[number] = value
        if number == IDENTIFIER:
            identifier |= dict(
                decode_fields(as_bytes(value), _IDENTIFIER, f"{place}: identifier", field_counter)
            )
    return DeviceEntry(
        has_identifier=IDENTIFIER in values,
        pool=as_bytes(identifier.get(POOL, b"")),
        name=as_bytes(identifier.get(NAME, b"")),
        health=_to_signed(values.get(HEALTH, 0), 32),
        updated_s=_to_signed(values.get(UPDATED, 0), 64),
        lease_s=_to_signed(values.get(LEASE, 0), 64),
        message=as_bytes(values.get(MESSAGE, b"")),
    )


def decode_fields(
    data: bytes, wire_types: Mapping[int, int], place: str, field_counter: Iterator[int]
) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message whose number is in `wire_types`.

    Raises ValueError, beginning with `place`, if the message is invalid, and TooManyFields if
    `field_counter` passes FIELDS_LIMIT.
    """
    offset = 0
    while offset < len(data):
        if next(field_counter) > FIELDS_LIMIT:
            raise TooManyFields
        tag, offset = decode_varint(data, offset, place, SIZE_VARINT_MAX)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number <= LAST_FIELD:
            raise ValueError(f"{place}: field number {number} is not valid")
        if wire_type != wire_types.get(number, wire_type):
            raise ValueError(
                f"{place}: field {number} has wire type {wire_type}, must be {wire_types[number]}"
            )
        value: int | bytes = b""
        if wire_type == VARINT:
            value, offset = decode_varint(data, offset, place)
        elif wire_type == LENGTH:
            size, offset = decode_varint(data, offset, place, SIZE_VARINT_MAX)
            value, offset = data[offset : offset + size], offset + size
        elif wire_type in FIXED_SIZES:
            offset += FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"{place}: field {number} has wire type {wire_type}, which is not valid")
        if offset > len(data):
            raise ValueError(
                f"{place}: field {number} ends {offset - len(data)} bytes after the message of {len(data)}"
            )
        if number in wire_types:
            yield number, value


def as_bytes(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)  # the field's wire type was checked
    return value


def _to_signed(value: int | bytes, bits: int) -> int:
    assert isinstance(value, int)
    low = value & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low


# --- answers to prepare and unprepare ----------------------------------------------------------------------

# field numbers of NodePrepareResourcesResponse, of its map's entries, and of the messages in them
CLAIMS: Final = 1
KEY, VALUE = 1, 2
PREPARED_DEVICES, PREPARE_ERROR = 1, 2
UNPREPARE_ERROR: Final = 1
REQUESTS, PREPARED_POOL, PREPARED_NAME, CDI_IDS, SHARE_ID = 1, 2, 3, 4, 5

_ANSWER: Final = {CLAIMS: LENGTH}
_ENTRY: Final = {KEY: LENGTH, VALUE: LENGTH}
_PREPARED: Final = {PREPARED_DEVICES: LENGTH, PREPARE_ERROR: LENGTH}
_UNPREPARED: Final = {UNPREPARE_ERROR: LENGTH}
_PREPARED_DEVICE: Final = dict.fromkeys((REQUESTS, PREPARED_POOL, PREPARED_NAME, CDI_IDS, SHARE_ID), LENGTH)


def decode_answers(data: bytes, *, is_prepare: bool) -> tuple[ClaimReply, ...]:
    """Decode a driver's answer to a prepare or unprepare call into one reply per claim, in the same order.

    Raises ValueError, which names the field, if the answer is not valid or has too many fields.
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
                    for part, text in decode_fields(as_bytes(content), _PREPARED_DEVICE, at, fields):
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
    pool, name, share_id = (found.get(field, [""])[-1] for field in (PREPARED_POOL, PREPARED_NAME, SHARE_ID))
    return ReturnedDevice(tuple(found.get(REQUESTS, ())), pool, name, tuple(found.get(CDI_IDS, ())), share_id)


def _text(value: int | bytes, place: str) -> str:
    try:
        return as_bytes(value).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{place}: the text is not UTF-8") from None
