"""NVLink 4 and older, XID 74: what the registers in the driver's line mean.

The line carries seven registers of one link:

    NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)

Owns the grading of their bits, from NVIDIA's XID catalogue, which explains the first, third, fourth and
fifth of them on Hopper. A bit that it does not explain is never benign.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple


class LinkFault(NamedTuple):
    """What one line says."""

    link: int
    registers: tuple[int, ...]


class Bits(IntEnum):
    """What the bits that are set amount to. Ordered: the greatest counts."""

    NONE = 0
    """No bit is set: nothing is explained."""
    BENIGN = 1
    SYMPATHETIC = 2
    """The echo of another fault; a fault itself if there is no other."""
    HARDWARE = 3


def _mask(bits: Iterable[int]) -> int:
    return sum(1 << bit for bit in bits)


BENIGN: Final = {0: _mask((0, 23, 30)), 4: _mask((20, 23, 26, 29))}
"""By register. Those of the fifth say that many errors were corrected, and none was lost."""
SYMPATHETIC: Final = {0: _mask((1, 20)), 3: _mask((16, 17))}


def grade(registers: Sequence[int]) -> Bits:
    """What the registers of one line amount to."""
    found = Bits.NONE
    for index, value in enumerate(registers):
        benign, sympathetic = BENIGN.get(index, 0), SYMPATHETIC.get(index, 0)
        if value & ~(benign | sympathetic):
            return Bits.HARDWARE
        if value & sympathetic:
            found = Bits.SYMPATHETIC
        elif value:
            found = max(found, Bits.BENIGN)
    return found
