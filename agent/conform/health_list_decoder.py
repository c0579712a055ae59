"""Decoder of the driver's health lists that keeps invalid values for the conformance checks.

It keeps strings that are not UTF-8, entries without a device, and unknown health values. Only a list that is
not a valid protobuf message cannot be decoded. It is independent of agent.serve.grpc.wire, so that a mistake
there cannot hide a mistake of the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Final

from agent.conform.session_record import DeviceEntry, HealthList
from agent.model.protobuf_wire import FIXED_SIZES, LAST_FIELD, LENGTH, VARINT, decode_varint

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
        health=_signed(values.get(HEALTH, 0), 32),
        updated_s=_signed(values.get(UPDATED, 0), 64),
        lease_s=_signed(values.get(LEASE, 0), 64),
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
        tag, offset = decode_varint(data, offset, place)
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
            size, offset = decode_varint(data, offset, place)
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


def _signed(value: int | bytes, bits: int) -> int:
    assert isinstance(value, int)
    low = value & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low
