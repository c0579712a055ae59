"""Reads a health list from its bytes, strictly, and keeps what others would refuse or repair.

A string that is no UTF-8, an entry without a device, a health that nobody knows: such is to be seen. Broken
is only what is no protobuf message, or has a known field in another type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Final

from agent.conform.observed import Device, HealthList
from agent.model.wire import FIXED, LAST_FIELD, LENGTH, VARINT, varint

DEVICES_LIMIT: Final = 16_384
"""Entries of one list that are read: a hundred times what a node's largest pools hold."""
FIELDS_LIMIT: Final = 16 * DEVICES_LIMIT
"""Fields of one list that are read, those in its entries included: twice what as many devices need."""

DEVICES: Final = 1
IDENTIFIER, HEALTH, UPDATED, LEASE, MESSAGE = 1, 2, 3, 4, 5
POOL, NAME = 1, 2

_LIST: Final = {DEVICES: LENGTH}
_DEVICE: Final = {IDENTIFIER: LENGTH, HEALTH: VARINT, UPDATED: VARINT, LEASE: VARINT, MESSAGE: LENGTH}
_IDENTIFIER: Final = {POOL: LENGTH, NAME: LENGTH}


class _Cut(Exception):
    """There is more than is read."""


def read_list(data: bytes, at_s: float, known: dict[bytes, Device]) -> HealthList:
    """The list in ``data``.

    Args:
        data: The message.
        at_s: When it came.
        known: Entries that were read before, by their bytes; gets the new ones, so that the same entry is one
            object however often it is told.
    """
    devices: list[Device] = []
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


def _device(data: bytes, where: str, fields: Iterator[int]) -> Device:
    """Of a field that is there twice the last one counts, as in protobuf; identifiers are merged."""
    said: dict[int, int | bytes] = {}
    named: dict[int, int | bytes] = {}
    for number, value in _fields(data, _DEVICE, where, fields):
        said[number] = value
        if number == IDENTIFIER:
            named |= dict(_fields(_bytes(value), _IDENTIFIER, f"{where}: identifier", fields))
    return Device(
        identified=IDENTIFIER in said,
        pool=_bytes(named.get(POOL, b"")),
        name=_bytes(named.get(NAME, b"")),
        health=_signed(said.get(HEALTH, 0), 32),
        updated_s=_signed(said.get(UPDATED, 0), 64),
        lease_s=_signed(said.get(LEASE, 0), 64),
        message=_bytes(said.get(MESSAGE, b"")),
    )


def _fields(
    data: bytes, types: Mapping[int, int], where: str, fields: Iterator[int]
) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field that ``types`` has; the others are passed over.

    Raises ValueError, naming the place, for what is no message or has one of them in another type; _Cut when
    ``fields`` is past its limit.
    """
    at = 0
    while at < len(data):
        if next(fields) > FIELDS_LIMIT:
            raise _Cut
        tag, at = varint(data, at, where)
        number, kind = tag >> 3, tag & 7
        if not 0 < number <= LAST_FIELD:
            raise ValueError(f"{where}: field number {number} is none of protobuf's")
        if kind != types.get(number, kind):
            raise ValueError(f"{where}: field {number} has wire type {kind}, should be {types[number]}")
        value: int | bytes = b""
        if kind == VARINT:
            value, at = varint(data, at, where)
        elif kind == LENGTH:
            size, at = varint(data, at, where)
            value, at = data[at : at + size], at + size
        elif kind in FIXED:
            at += FIXED[kind]
        else:
            raise ValueError(f"{where}: field {number} has wire type {kind}, which no message has")
        if at > len(data):
            raise ValueError(
                f"{where}: field {number} ends {at - len(data)} bytes after the last of {len(data)}"
            )
        if number in types:
            yield number, value


def _bytes(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)  # the field's wire type was looked at
    return value


def _signed(value: int | bytes, bits: int) -> int:
    """The number that its low bits are, as protobuf takes them."""
    assert isinstance(value, int)
    low = value & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low
