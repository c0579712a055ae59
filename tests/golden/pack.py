"""Protobuf by field numbers: messages written and read without the names that a proto file gives them."""

import struct
from collections.abc import Mapping
from typing import Any, Final

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
UINT64: Final = (1 << 64) - 1
TEXT: Final = "text"
"""Mark of a text for people, in a shape."""


def pack(fields: Mapping[int, Any]) -> bytes:
    """Return a message with these fields; a list is a repeated field, a mapping a message."""
    return b"".join(
        _field(number, item)
        for number, value in fields.items()
        for item in (value if isinstance(value, list) else [value])
    )


def _field(number: int, value: Any) -> bytes:
    if isinstance(value, float):
        return _varint(number << 3 | FIXED64) + struct.pack("<d", value)
    if isinstance(value, int):
        return _varint(number << 3 | VARINT) + _varint(value & UINT64)
    data = pack(value) if isinstance(value, Mapping) else value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*data, value))


def unpack(data: bytes, shape: Mapping[int, Any]) -> list[Any]:
    """Return the fields of a message in their order, as lists of number and value.

    Args:
        data: The message.
        shape: Number of a field to the shape of the message in it, or to TEXT for a text for people.
    """
    found: list[Any] = []
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _read_varint(data, at)
            found.append([number, value])
        elif wire == FIXED64:
            found.append([number, struct.unpack_from("<d", data, at)[0]])
            at += 8
        else:
            size, at = _read_varint(data, at)
            found.append([number, _read_bytes(data[at : at + size], shape.get(number))])
            at += size
    return found


def _read_bytes(data: bytes, shape: Mapping[int, Any] | str | None) -> Any:
    if isinstance(shape, Mapping):
        return unpack(data, shape)
    return {TEXT: data.decode()} if shape == TEXT else data.decode()


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
