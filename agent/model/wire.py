"""Constants and varints of the protobuf wire format. Source: protobuf.dev, Encoding."""

from typing import Final

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
FIXED32: Final = 5
FIXED: Final = {FIXED64: 8, FIXED32: 4}
"""Size of a fixed-width protobuf value [bytes], by wire type."""
LAST_FIELD: Final = (1 << 29) - 1


def varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    """Decode the varint at offset ``at``; return the number and the offset after it.

    Raises:
        ValueError: The bytes hold no varint; the text begins with ``where``.
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError(f"{where}: ends in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"{where}: a number of more than 10 bytes")
