"""Decoder of NVLink errors in kernel log lines: XID 74 (NVLink 4 and older), XID 144 to 150 (NVLink 5).

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
    """True: the error line has ``Fatal``. False: ``Nonfatal``. None: neither word."""
    link: int
    """Number of the NVLink that the error line names; -1: none."""
    intr_info: int
    """First hexadecimal word of the NVLink 5 error line: part of the unit, and reason of a lost link."""
    error_status: int
    """Second hexadecimal word of the NVLink 5 error line: the error bits."""


class RequiredAction(IntEnum):
    """Action that an NVLink 5 error requires; of several error bits, the largest value applies."""

    NOTHING = 0
    FOLLOW_154 = 1
    """The recovery action in the XID 154 that accompanies the error; nothing without XID 154."""
    UNKNOWN = 2
    """Not known: no table row matches the NVLink 5 error."""
    RESET = 3


class _RowKey(Enum):
    """Kind of value in an NVLink 5 error line that selects the table row within a hardware unit."""

    BITS = auto()
    """Each bit that is set in the error status of the line selects a row."""
    STATUS = auto()
    """The whole error status of the line, as a number, selects the row."""
    REASON = auto()
    """The reason why the link went down, from ``intr_info``, selects the row."""
    NOTHING = auto()
    """The error line has no value that selects a row: the hardware unit has one row, with key 0."""


class Nvlink5Unit(NamedTuple):
    """Hardware unit that reports NVLink 5 errors, with the required action of each error."""

    code: int
    name: str
    v1: int
    """Value of bits 9 to 0 of ``intr_info`` that names this hardware unit, in drivers before 575."""
    v2: int
    """Value of bits 6 to 0 of ``intr_info`` that names this hardware unit, in drivers since 575."""
    key: _RowKey
    rows: Mapping[int, RequiredAction]
    """Required action of each error, by the value in the error line that ``key`` selects."""
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
) -> Nvlink5Unit:
    rows = dict.fromkeys(nothing, RequiredAction.NOTHING)
    rows |= dict.fromkeys(follow, RequiredAction.FOLLOW_154) | dict.fromkeys(reset, RequiredAction.RESET)
    return Nvlink5Unit(code, name, v1, v2, key, rows, flagged)


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


class DecodedNvlink5Error(NamedTuple):
    """Meaning of an NVLink 5 error line: the required action, the hardware unit and the reason."""

    required: RequiredAction
    unit: str
    """Name of the hardware unit in the table; without a table row, in the log line."""
    reason: int
    """Number of the reason why the link went down; 0: no reason."""


def _unit_of(code: int, intr_info: int) -> tuple[Nvlink5Unit, bool] | None:
    for unit in NVLINK5_UNITS:
        if unit.code == code:
            if intr_info & _V1_MASK == unit.v1:
                return unit, bool(intr_info & _V1_FLAG)
            if intr_info & _V2_MASK == unit.v2:
                return unit, bool(intr_info & _V2_FLAG)
    return None


def _bits(word: int) -> list[int]:
    return [1 << place for place in range(word.bit_length()) if word >> place & 1]


def decode_nvlink5(code: int, status: Nvlink5Status) -> DecodedNvlink5Error:
    """Decode the values of an NVLink 5 error line. Never raises.

    Args:
        code: Number of the XID, 144 to 150; other numbers have no table rows.
    """
    reason = status.intr_info >> 20 & 0x3F
    match = _unit_of(code, status.intr_info)
    if match is None:
        return DecodedNvlink5Error(RequiredAction.UNKNOWN, status.unit, 0)
    unit, flag = match
    if unit.key is _RowKey.REASON:
        return DecodedNvlink5Error(unit.rows.get(reason, RequiredAction.UNKNOWN), unit.name, reason)
    if reason:
        return DecodedNvlink5Error(RequiredAction.UNKNOWN, unit.name, reason)
    keys = {
        _RowKey.BITS: _bits(status.error_status),
        _RowKey.STATUS: [status.error_status],
        _RowKey.NOTHING: [0],
    }[unit.key]
    actions = [unit.rows.get(key, RequiredAction.UNKNOWN) for key in keys] or [RequiredAction.UNKNOWN]
    if flag and status.error_status & unit.flagged:
        actions.append(RequiredAction.RESET)
    return DecodedNvlink5Error(max(actions), unit.name, 0)


class Nvlink4Registers(NamedTuple):
    """Error registers of one NVLink in an error line of NVLink 4."""

    link: int
    registers: tuple[int, ...]


class Nvlink4Grade(IntEnum):
    """Meaning of bits in NVLink 4 error registers; of several set bits, the largest value applies."""

    NONE = 0
    """No bit is set in the registers."""
    BENIGN = 1
    """The set bits report nothing that needs an action."""
    SYMPATHETIC = 2
    """The bits report a consequence of another fault, or a fault of the link if there is no other."""
    HARDWARE = 3
    """The set bits report a hardware fault, or are unknown."""


def _mask(bits: Iterable[int]) -> int:
    return sum(1 << bit for bit in bits)


BENIGN_BITS: Final = {0: _mask((0, 23, 30)), 4: _mask((20, 23, 26, 29))}
"""Mask of the bits that need no action, by index of the NVLink 4 register.

Those of the fifth register report many corrected errors.
"""
SYMPATHETIC_BITS: Final = {0: _mask((1, 20)), 3: _mask((16, 17))}
"""Mask of the bits that report a consequence of another fault, by index of the NVLink 4 register."""


def grade_registers(registers: Sequence[int]) -> Nvlink4Grade:
    """Return the worst meaning of the bits that are set in the NVLink 4 error registers of one log line."""
    found = Nvlink4Grade.NONE
    for index, value in enumerate(registers):
        benign, sympathetic = BENIGN_BITS.get(index, 0), SYMPATHETIC_BITS.get(index, 0)
        if value & ~(benign | sympathetic):
            return Nvlink4Grade.HARDWARE
        if value & sympathetic:
            found = Nvlink4Grade.SYMPATHETIC
        elif value:
            found = max(found, Nvlink4Grade.BENIGN)
    return found
