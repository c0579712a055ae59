"""Fields of a message as the bytes that they are sent as, by their numbers.

For what is sent often, or by an agent that should load nothing for it: betterproto takes 30 us for a field,
and 4 MiB. Which fields a message has whoever writes it knows, and sets them end to end in their order. A
field that is zero, or empty, is left out as everywhere in proto3, a message within a message is not.
"""

import struct
from collections.abc import Iterable
from typing import Final

from agent.model.wire import FIXED64, LENGTH, VARINT

_UINT64: Final = (1 << 64) - 1
_DOUBLE: Final = struct.Struct("<d")
_BYTES: Final = tuple(bytes([byte]) for byte in range(256))


def varint(value: int) -> bytes:
    """A number from 0 to 2**64 - 1, seven bits to a byte, the lowest first."""
    if value < 0x80:
        return _BYTES[value]
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def number(field: int, value: int) -> bytes:
    """An int64, an enum or a bool."""
    return varint(field << 3 | VARINT) + varint(value & _UINT64) if value else b""


def double(field: int, value: float) -> bytes:
    """A double."""
    return varint(field << 3 | FIXED64) + _DOUBLE.pack(value) if value else b""


def text(field: int, value: str) -> bytes:
    """A string; what is no Unicode is replaced, for nobody could read the message."""
    return message(field, value.encode("utf-8", "replace")) if value else b""


def texts(field: int, values: Iterable[str]) -> bytes:
    """A repeated string, of which none is left out."""
    return b"".join(message(field, value.encode("utf-8", "replace")) for value in values)


def message(field: int, data: bytes) -> bytes:
    """A message, by its bytes."""
    return varint(field << 3 | LENGTH) + varint(len(data)) + data
