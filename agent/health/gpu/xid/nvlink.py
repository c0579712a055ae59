"""Decoding of NVLink errors: XID 74 on NVLink 4 and older, XID 144 to 150 on NVLink 5.

A line of NVLink 4 contains seven registers of one link:

    NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)

NVIDIA's XID catalog explains bits of the first, third, fourth and fifth register, on Hopper. A bit that it
does not explain is never benign.

A line of NVLink 5 names a unit, its severity, a link, and hexadecimal words, of which the first two decide:

    NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x00000000 ...)
                                         intr_info  error_status

The low bits of ``intr_info`` name the part of the unit that reports; bits 25 to 20 are the reason why a link
went down, else zero. Drivers before 575 have another layout of the low bits. No value is valid in both
layouts, so the driver's version is not needed. The rows are from NVIDIA's XID catalog ("Xid 144-150 decode").
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, IntEnum, auto
from typing import Final, NamedTuple

NVLINK5_CODES: Final = range(144, 151)


class Nvlink5Status(NamedTuple):
    """Values of an NVLink 5 error line in the kernel log."""

    unit: str
    """Hardware unit as the driver names it, ``RLW_RXPIPE``."""
    fatal: bool | None
    """Whether the line contains ``Fatal``; None if it has no known severity."""
    link: int
    """Number of the NVLink; -1 if the line names no link."""
    intr_info: int
    error_status: int


class RequiredAction(IntEnum):
    """Action that an NVLink 5 error requires; the largest one applies if several error bits are set."""

    NOTHING = 0
    FOLLOW_154 = 1
    """The recovery action of the accompanying XID 154 is required; nothing if there is no XID 154."""
    UNKNOWN = 2
    """The required action is unknown, because no table row matches."""
    RESET = 3


class _RowKey(Enum):
    """Value of an NVLink 5 error line by which the table rows of a unit are found."""

    BITS = auto()
    """Each bit that is set in the error status."""
    STATUS = auto()
    """The whole error status as a number."""
    REASON = auto()
    """Reason why the link went down, from ``intr_info``."""
    NOTHING = auto()
    """No value: the unit has one row, with key 0."""


class NvlinkUnit(NamedTuple):
    """Part of a hardware unit that reports one XID, with its table rows."""

    code: int
    name: str
    v1: int
    """Value of bits 9 to 0 of ``intr_info`` that names this part, in drivers before 575."""
    v2: int
    """Value of bits 6 to 0 of ``intr_info`` that names this part, in drivers since 575."""
    key: _RowKey
    rows: Mapping[int, RequiredAction]
    flagged: int = 0
    """Bits of the error status that require a reset if the flag above the unit's bits is set."""


def _unit(
    code: int,
    name: str,
    v1: int,
    v2: int,
    key: _RowKey = _RowKey.BITS,
    *,
    nothing: tuple[int, ...] = (),
    follow: tuple[int, ...] = (),
    reset: tuple[int, ...] = (),
    flagged: int = 0,
) -> NvlinkUnit:
    rows = dict.fromkeys(nothing, RequiredAction.NOTHING)
    rows |= dict.fromkeys(follow, RequiredAction.FOLLOW_154) | dict.fromkeys(reset, RequiredAction.RESET)
    return NvlinkUnit(code, name, v1, v2, key, rows, flagged)


_SOFTWARE: Final = 0x80000000
"""Bit of the error status that the driver sets, not the hardware."""

_TLW_NOTHING: Final = (0x1, 0x2, _SOFTWARE)

# fmt: off
NVLINK5_UNITS: Final = (
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
    _unit(149, "NETIR_INT", 0b00000_00110, 24, _RowKey.NOTHING, reset=(0,)),
    _unit(149, "NETIR_LINK_DOWN", 0b01110_00110, 17, _RowKey.REASON, nothing=(0x26, 0x28),
          reset=(0x00, 0x01, 0x02, 0x04, 0x0A, 0x0F, 0x10, 0x11, 0x12, 0x15, 0x16,
                 0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x2A, 0x2B)),
    _unit(149, "NETIR_BER_EVENT", 0b10001_00110, 19, _RowKey.STATUS, nothing=(0, 1, 2, 3)),
    _unit(149, "NETIR_MFDE_EVENT", 0b10010_00110, 20, _RowKey.STATUS, nothing=(3,), reset=(1, 4, 5, 7)),
    _unit(150, "MSE", 0, 0, _RowKey.STATUS, reset=(0, 0xFFFFFFFF)),
)
# fmt: on

_V1_MASK: Final = 0x3FF
_V1_FLAG: Final = 0x400
_V2_MASK: Final = 0x7F
_V2_FLAG: Final = 0x80


class DecodedError(NamedTuple):
    """Decoded NVLink 5 error line: the unit, the reason and the required action."""

    required: RequiredAction
    unit: str
    """Hardware unit as the table row names it; without a row, as the log line names it."""
    reason: int
    """Number of the reason why the link went down; 0: no reason."""


def _unit_of(code: int, intr_info: int) -> tuple[NvlinkUnit, bool] | None:
    for unit in NVLINK5_UNITS:
        if unit.code == code:
            if intr_info & _V1_MASK == unit.v1:
                return unit, bool(intr_info & _V1_FLAG)
            if intr_info & _V2_MASK == unit.v2:
                return unit, bool(intr_info & _V2_FLAG)
    return None


def _bits(word: int) -> list[int]:
    return [1 << place for place in range(word.bit_length()) if word >> place & 1]


def decode_nvlink5(code: int, status: Nvlink5Status) -> DecodedError:
    """Decode an NVLink 5 error line by its table row. Never raises.

    The required action of a line without a row is UNKNOWN, never NOTHING.

    Args:
        code: XID, 144 to 150; others have no rows.
        status: Values of the line.
    """
    reason = status.intr_info >> 20 & 0x3F
    match = _unit_of(code, status.intr_info)
    if match is None:
        return DecodedError(RequiredAction.UNKNOWN, status.unit, 0)
    unit, flag = match
    if unit.key is _RowKey.REASON:
        return DecodedError(unit.rows.get(reason, RequiredAction.UNKNOWN), unit.name, reason)
    if reason:
        return DecodedError(RequiredAction.UNKNOWN, unit.name, reason)
    keys = {
        _RowKey.BITS: _bits(status.error_status),
        _RowKey.STATUS: [status.error_status],
        _RowKey.NOTHING: [0],
    }[unit.key]
    actions = [unit.rows.get(key, RequiredAction.UNKNOWN) for key in keys] or [RequiredAction.UNKNOWN]
    if flag and status.error_status & unit.flagged:
        actions.append(RequiredAction.RESET)
    return DecodedError(max(actions), unit.name, 0)


class LinkRegisters(NamedTuple):
    """Registers of one NVLink, from an NVLink 4 error line."""

    link: int
    registers: tuple[int, ...]


class RegisterGrade(IntEnum):
    """Meaning of the set bits of NVLink 4 registers; the largest one applies if several bits are set."""

    NONE = 0
    """No bit is set."""
    BENIGN = 1
    SYMPATHETIC = 2
    """The bits report a consequence of another fault, or a fault of the link if there is no other."""
    HARDWARE = 3


def _mask(bits: Iterable[int]) -> int:
    return sum(1 << bit for bit in bits)


BENIGN_BITS: Final = {0: _mask((0, 23, 30)), 4: _mask((20, 23, 26, 29))}
"""Benign bits by index of the register. Bits of the fifth register report many corrected errors."""
SYMPATHETIC_BITS: Final = {0: _mask((1, 20)), 3: _mask((16, 17))}


def grade_registers(registers: Sequence[int]) -> RegisterGrade:
    """Return the meaning of the NVLink 4 registers in one log line."""
    found = RegisterGrade.NONE
    for index, value in enumerate(registers):
        benign, sympathetic = BENIGN_BITS.get(index, 0), SYMPATHETIC_BITS.get(index, 0)
        if value & ~(benign | sympathetic):
            return RegisterGrade.HARDWARE
        if value & sympathetic:
            found = RegisterGrade.SYMPATHETIC
        elif value:
            found = max(found, RegisterGrade.BENIGN)
    return found
