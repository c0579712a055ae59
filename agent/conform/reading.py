"""Independent reader of health lists: strict about protobuf, tolerant of values that other readers refuse
or repair.

Independent of agent.serve.grpc.wire, so that a mistake there cannot hide a driver's. A string that is not
UTF-8, an entry without a device or an unknown health is a finding for a check, so this reader keeps them. A
list is broken only if it is not a protobuf message, or if a known field has another type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Final

from agent.conform.observed import DeviceEntry, HealthList
from agent.model.wire import FIXED, LAST_FIELD, LENGTH, VARINT, varint

DEVICES_LIMIT: Final = 16_384
"""Maximum number of entries that are read of a list: a hundred times the largest pools of a Kubernetes
node."""
FIELDS_LIMIT: Final = 16 * DEVICES_LIMIT
"""Maximum number of fields that are read of a list and its entries: twice what that many devices need."""

DEVICES: Final = 1
IDENTIFIER, HEALTH, UPDATED, LEASE, MESSAGE = 1, 2, 3, 4, 5
POOL, NAME = 1, 2

_LIST: Final = {DEVICES: LENGTH}
_DEVICE: Final = {IDENTIFIER: LENGTH, HEALTH: VARINT, UPDATED: VARINT, LEASE: VARINT, MESSAGE: LENGTH}
_IDENTIFIER: Final = {POOL: LENGTH, NAME: LENGTH}


class _Cut(Exception):
    """The list has more entries or fields than the reader accepts."""


def read_list(data: bytes, at_s: float, known: dict[bytes, DeviceEntry]) -> HealthList:
    """Decode a health list.

    Args:
        data: Encoded message.
        at_s: Time of its receipt.
        known: Entries that were read before, by their bytes. Receives the new entries, so that equal
            entries share one object.
    """
    devices: list[DeviceEntry] = []
    fields = count(1)
    try:
        for _, value in _fields(data, _LIST, "list", fields):
            if len(devices) == DEVICES_LIMIT:
                return HealthList(at_s, len(data), tuple(devices), cut=True)
            entry = _bytes(value)
            if entry not in known:
                known[entry] = _device(entry, f"device {len(devices)}", fields)
            devices.append(known[entry])
    except _Cut:
        return HealthList(at_s, len(data), tuple(devices), cut=True)
    except ValueError as error:
        return HealthList(at_s, len(data), (), broken=str(error))
    return HealthList(at_s, len(data), tuple(devices))


def _device(data: bytes, where: str, fields: Iterator[int]) -> DeviceEntry:
    """Decode an entry of a health list. Of repeated fields the last counts, as in protobuf; identifiers are
    merged."""
    values: dict[int, int | bytes] = {}
    identifier: dict[int, int | bytes] = {}
    for number, value in _fields(data, _DEVICE, where, fields):
        values[number] = value
        if number == IDENTIFIER:
            identifier |= dict(_fields(_bytes(value), _IDENTIFIER, f"{where}: identifier", fields))
    return DeviceEntry(
        has_identifier=IDENTIFIER in values,
        pool=_bytes(identifier.get(POOL, b"")),
        name=_bytes(identifier.get(NAME, b"")),
        health=_signed(values.get(HEALTH, 0), 32),
        updated_s=_signed(values.get(UPDATED, 0), 64),
        lease_s=_signed(values.get(LEASE, 0), 64),
        message=_bytes(values.get(MESSAGE, b"")),
    )


def _fields(
    data: bytes, types: Mapping[int, int], where: str, fields: Iterator[int]
) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field that `types` has; skip the others.

    Raises ValueError with the place if the data are not a message or a field has another type, and _Cut if
    `fields` is beyond its limit.
    """
    offset = 0
    while offset < len(data):
        if next(fields) > FIELDS_LIMIT:
            raise _Cut
        tag, offset = varint(data, offset, where)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number <= LAST_FIELD:
            raise ValueError(f"{where}: field number {number} is not valid")
        if wire_type != types.get(number, wire_type):
            raise ValueError(f"{where}: field {number} has wire type {wire_type}, should be {types[number]}")
        value: int | bytes = b""
        if wire_type == VARINT:
            value, offset = varint(data, offset, where)
        elif wire_type == LENGTH:
            size, offset = varint(data, offset, where)
            value, offset = data[offset : offset + size], offset + size
        elif wire_type in FIXED:
            offset += FIXED[wire_type]
        else:
            raise ValueError(f"{where}: field {number} has wire type {wire_type}, which is not valid")
        if offset > len(data):
            raise ValueError(
                f"{where}: field {number} ends {offset - len(data)} bytes after the last of {len(data)}"
            )
        if number in types:
            yield number, value


def _bytes(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)  # the field's wire type was checked
    return value


def _signed(value: int | bytes, bits: int) -> int:
    """Return the low `bits` bits of a varint as a signed number, as protobuf does."""
    assert isinstance(value, int)
    low = value & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low
