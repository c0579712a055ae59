"""NVLink 5 errors, XID 144 to 150: what the words in the driver's line mean.

The line names a unit, how grave the driver takes it, a link, and hexadecimal words; the first two decide:

    NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x00000000 ...)
                                         intr_info  error_status

``intr_info`` says which part of the unit reports (in its low bits) and, for a link that went down, the reason
(bits 25 to 20, zero otherwise). Drivers before 575 and since lay its low bits out differently. No word of one
layout is a word of the other, so the number itself says which one it is; the driver's version is not needed.

Owns the rows, from NVIDIA's XID catalogue ("Xid 144-150 decode"). What they mean for a device is the rules'.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum, auto
from typing import Final, NamedTuple

CODES: Final = range(144, 151)


class Nvlink5Status(NamedTuple):
    """What one line says."""

    unit: str
    """As the driver names it, ``RLW_RXPIPE``."""
    fatal: bool | None
    """The line's own word; None if it has none that is known."""
    link: int
    """-1 if it names none."""
    intr_info: int
    error_status: int


class Remedy(IntEnum):
    """What a row asks for. Ordered: of several bits in one word, the greatest counts."""

    NOTHING = 0
    FOLLOW_154 = 1
    """What an XID 154 beside it asks for; without one, nothing."""
    UNKNOWN = 2
    """No row has it."""
    RESET = 3


class _Key(Enum):
    """What a unit's rows are looked up by."""

    BITS = auto()
    """Every bit that is set in the error status."""
    STATUS = auto()
    """The error status as a number."""
    REASON = auto()
    """The reason in ``intr_info``."""
    NOTHING = auto()
    """The unit alone; its one row has key 0."""


class Unit(NamedTuple):
    """One part of one XID's unit."""

    code: int
    name: str
    v1: int
    """Bits 9 to 0 of ``intr_info``, drivers before 575."""
    v2: int
    """Bits 6 to 0, drivers since."""
    key: _Key
    rows: Mapping[int, Remedy]
    flagged: int = 0
    """Bits of the error status that ask for a reset if the flag above the unit's bits is set."""


def _unit(
    code: int,
    name: str,
    v1: int,
    v2: int,
    key: _Key = _Key.BITS,
    *,
    nothing: tuple[int, ...] = (),
    follow: tuple[int, ...] = (),
    reset: tuple[int, ...] = (),
    flagged: int = 0,
) -> Unit:
    rows = dict.fromkeys(nothing, Remedy.NOTHING)
    rows |= dict.fromkeys(follow, Remedy.FOLLOW_154) | dict.fromkeys(reset, Remedy.RESET)
    return Unit(code, name, v1, v2, key, rows, flagged)


_SOFTWARE: Final = 0x80000000
"""The driver's own bit, not the hardware's."""

_TLW_NOTHING: Final = (0x1, 0x2, _SOFTWARE)

# fmt: off
UNITS: Final = (
    _unit(144, "SAW_MVB", 0b00001_00001, 1, nothing=(0x1, 0x4, 0x8, 0x20), reset=(0x2, 0x10)),
    _unit(145, "RLW_CTRL", 0b00011_00010, 3, nothing=(_SOFTWARE,)),
    _unit(145, "RLW_REMAP", 0b00100_00010, 4, nothing=(0x100, 0x200, _SOFTWARE),
          follow=(0x1, 0x2, 0x4, 0x8, 0x10, 0x20), reset=(0x40, 0x80)),
    _unit(145, "RLW_RSPCOL", 0b00101_00010, 5, nothing=(0x1, _SOFTWARE), reset=(0x2,)),
    _unit(145, "RLW_RXPIPE", 0b00110_00010, 6, nothing=(0x1, 0x2, 0x4, 0x8, _SOFTWARE), flagged=0x7),
    _unit(145, "RLW_SRC_TRACK", 0b00111_00010, 7, nothing=(0x2, _SOFTWARE), follow=(0x4, 0x8),
          reset=(0x1, 0x10, 0x20)),
    _unit(145, "RLW_TAGSTATE", 0b01000_00010, 8, nothing=(0x1, 0x10000, _SOFTWARE),
          reset=(0x2, 0x20000, 0x100000)),
    _unit(146, "TLW_CTRL", 0b01001_00011, 9, nothing=_TLW_NOTHING, reset=(0x4,)),
    _unit(146, "TLW_RX_PIPE0", 0b01010_00011, 10, nothing=_TLW_NOTHING, reset=(0x4,)),
    _unit(146, "TLW_RX_PIPE1", 0b01010_00011, 11, nothing=_TLW_NOTHING, reset=(0x4,)),
    _unit(146, "TLW_TX_PIPE0", 0b01011_00011, 12, nothing=_TLW_NOTHING, reset=(0x4,)),
    _unit(146, "TLW_TX_PIPE1", 0b01011_00011, 13, nothing=_TLW_NOTHING, reset=(0x4,)),
    _unit(147, "TREX", 0b01100_00100, 14, nothing=(0x1, _SOFTWARE)),
    _unit(148, "NVLPW", 0b00000_00101, 15, nothing=(_SOFTWARE,)),
    _unit(149, "NETIR_INT", 0b00000_00110, 24, _Key.NOTHING, reset=(0,)),
    _unit(149, "NETIR_LINK_DOWN", 0b01110_00110, 17, _Key.REASON, nothing=(0x26, 0x28),
          reset=(0x00, 0x01, 0x02, 0x04, 0x0A, 0x0F, 0x10, 0x11, 0x12, 0x15, 0x16,
                 0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x2A, 0x2B)),
    _unit(149, "NETIR_BER_EVENT", 0b10001_00110, 19, _Key.STATUS, nothing=(0, 1, 2, 3)),
    _unit(149, "NETIR_MFDE_EVENT", 0b10010_00110, 20, _Key.STATUS, nothing=(3,), reset=(1, 4, 5, 7)),
    _unit(150, "MSE", 0, 0, _Key.STATUS, reset=(0, 0xFFFFFFFF)),
)
# fmt: on

_V1_MASK: Final = 0x3FF
_V1_FLAG: Final = 0x400
_V2_MASK: Final = 0x7F
_V2_FLAG: Final = 0x80


class Decoded(NamedTuple):
    """What the rows make of one line."""

    remedy: Remedy
    unit: str
    """The row's name of it, or the line's own if no row has it."""
    reason: int
    """Why the link went down; 0 otherwise."""


def _reported(code: int, intr_info: int) -> tuple[Unit, bool] | None:
    for unit in UNITS:
        if unit.code == code:
            if intr_info & _V1_MASK == unit.v1:
                return unit, bool(intr_info & _V1_FLAG)
            if intr_info & _V2_MASK == unit.v2:
                return unit, bool(intr_info & _V2_FLAG)
    return None


def _bits(word: int) -> list[int]:
    return [1 << place for place in range(word.bit_length()) if word >> place & 1]


def decode(code: int, status: Nvlink5Status) -> Decoded:
    """The row of a line. Total: whatever no row has is UNKNOWN, never benign.

    Args:
        code: The XID, 144 to 150; any other has no rows.
        status: The line's words.
    """
    reason = status.intr_info >> 20 & 0x3F
    reported = _reported(code, status.intr_info)
    if reported is None:
        return Decoded(Remedy.UNKNOWN, status.unit, 0)
    unit, flag = reported
    if unit.key is _Key.REASON:
        return Decoded(unit.rows.get(reason, Remedy.UNKNOWN), unit.name, reason)
    if reason:
        return Decoded(Remedy.UNKNOWN, unit.name, reason)
    keys = {
        _Key.BITS: _bits(status.error_status),
        _Key.STATUS: [status.error_status],
        _Key.NOTHING: [0],
    }[unit.key]
    remedies = [unit.rows.get(key, Remedy.UNKNOWN) for key in keys] or [Remedy.UNKNOWN]
    if flag and status.error_status & unit.flagged:
        remedies.append(Remedy.RESET)
    return Decoded(max(remedies), unit.name, 0)
