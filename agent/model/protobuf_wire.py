"""Constants of the protobuf wire format, and the decoder of its varints. Source: protobuf.dev, Encoding."""

from typing import Final

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
FIXED32: Final = 5
"""Wire type of a field of 4 bytes.

The other wire types are VARINT, FIXED64 (8 bytes) and LENGTH (the size of the data, then the data).
"""
FIXED_SIZES: Final = {FIXED64: 8, FIXED32: 4}
"""Size of a fixed-width field [bytes], by wire type."""
LAST_FIELD: Final = (1 << 29) - 1
"""Largest number that a protobuf field can have."""


SIZE_VARINT_MAX: Final = 5
"""Largest size of the varint of a tag or a length [bytes], as in Google's parsers for C++ and Python."""


def decode_varint(data: bytes, offset: int, place: str, size_max: int = 10) -> tuple[int, int]:
    """Decode the varint at an offset of ``data``; return the number and the offset after it.

    Args:
        size_max: Largest size of the varint [bytes].

    Raises:
        ValueError: There is no valid varint at the offset; the message begins with ``place``, the name
            of the field.
    """
    value = 0
    for shift in range(0, 7 * size_max, 7):
        if offset >= len(data):
            raise ValueError(f"{place}: message ends inside a varint")
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError(f"{place}: varint is longer than {size_max} bytes")
