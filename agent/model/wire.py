"""Protobuf's wire: what everybody needs who reads a message field by field.

Who reads, which fields there are, and what becomes of them, is theirs. Source: protobuf.dev, Encoding.
"""

from typing import Final

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
FIXED32: Final = 5
FIXED: Final = {FIXED64: 8, FIXED32: 4}
"""Bytes of a value, by wire type."""
LAST_FIELD: Final = (1 << 29) - 1


def varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    """The number that begins there, as it stands in the bytes, and where it ends.

    Raises:
        ValueError: There is none; ``where`` first.
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
