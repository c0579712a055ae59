"""Parser of kernel log lines about NVIDIA GPUs and NVSwitches, and the patterns that select these lines.

agent.health.kernel_log.facts describes the language of the patterns.

Sources: NVIDIA's open kernel modules (kernel_rc.c, osinit.c, src/common/nvswitch), its XID catalog, and
published lines.

The module also has the decoder of NVLink errors in kernel log lines: XID 74 (NVLink 4 and older), XID 144 to
150 (NVLink 5).

A line of NVLink 4 contains seven registers of one link:

    NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)

NVIDIA's XID catalog explains bits of the first, third, fourth and fifth register, for Hopper GPUs. A bit that
the catalog does not explain never counts as benign.

A line of NVLink 5 contains a hardware unit, a severity, a link, and hexadecimal words. The first two words
decide the meaning:

    NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x00000000 ...)
                                         intr_info  error_status

The low bits of ``intr_info`` identify the part of the unit that reports the error. Bits 25 to 20 are the
reason why a link went down, else zero. Drivers before 575 have another layout of the low bits. No value is
valid in both layouts, so the driver's version is not needed. The rows are from NVIDIA's XID catalog ("Xid
144-150 decode").
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, IntEnum, auto
from functools import partial
from typing import Final, NamedTuple

from agent.health.gpu.xid.sxid_table import SWITCH_SHUTDOWN, SXID_ENDS
from agent.health.gpu.xid.xid_table import RecoveryAction
from agent.health.kernel_log.facts import LateExpression, LazyLinePattern
from agent.model.gpu import WHOLE_GPU

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
    """Value in an NVLink 5 error line that selects the row, among the table rows of one hardware unit."""

    BITS = auto()
    """Each bit that is set in the error status of the line selects a row."""
    STATUS = auto()
    """The whole error status of the line, as a number, selects the row."""
    REASON = auto()
    """The reason why the link went down, from ``intr_info``, selects the row."""
    NOTHING = auto()
    """The error line has no value that selects a row: the hardware unit has one row, with key 0."""


class Nvlink5Unit(NamedTuple):
    """Hardware unit of a GPU that reports NVLink 5 errors, with the required action of each error."""

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
        code: Number of the XID, 144 to 150. Other numbers have no table rows.
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
    """Meaning of bits in NVLink 4 error registers. If several bits are set, the largest value applies."""

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


# --- lines about GPUs and NVSwitches -----------------------------------------------------------------------

_XID_HEADS: Final = (
    "NVRM: Xid (PCI:%b): ",
    "NVRM: Xid (PCI:%b GPU-I:%d): ",
    "NVRM: Xid (PCI:%b GPU-I:%d GPU-CI:%d): ",
    "NVRM: Xid (%b): ",  # drivers before 2015
)
_XID_TAILS: Final = (
    "154, %*changed from %x%*) to %x%*",
    "%d, %w%*Link %*(%x %x%*",  # NVLink 5: unit, interrupt info and error status decide
    "74, %*link %d(%x, %x, %x, %x, %x%*",
    # later lines of this XID name no location; a program that faults everywhere has lines of all GPCs
    "13, %*(GPC %d%*",
    "%d, %*",
)
XID_PATTERNS: Final = tuple(head + tail for head in _XID_HEADS for tail in _XID_TAILS)
_SXID_HEAD: Final = "nvidia-nvswitch%d: SXid (PCI:%b): %d, "
_FATAL: Final = f"{_SXID_HEAD}Fatal, %*"
_NOT_FATAL: Final = (f"{_SXID_HEAD}Non-fatal, %*", f"{_SXID_HEAD}Correctable, %*")
# The driver prints these two after the line of a fault that it also records
_SEVERITY: Final = f"{_SXID_HEAD}Severity %d %*"
_DATA: Final = f"{_SXID_HEAD}Data {{%*"
_SHUTDOWN: Final = f"{_SXID_HEAD}PMGR OVERT%*"
_NO_SEVERITY: Final = f"{_SXID_HEAD}%*"
SXID_PATTERNS: Final = (_FATAL, *_NOT_FATAL, _SEVERITY, _DATA, _SHUTDOWN, _NO_SEVERITY)
LOST_PATTERNS: Final = (
    "NVRM: GPU %b: GPU has fallen off the bus%*",
    "NVRM: GPU at PCI:%b: GPU has fallen off the bus%*",
    "NVRM: GPU at PCI:%b has fallen off the bus%*",
    "NVRM: GPU at %b has fallen off the bus%*",
    "NVRM: The NVIDIA GPU %b%*fallen off the bus%*",  # three lines in one record
)
INIT_FAILED_PATTERNS: Final = ("NVRM: GPU %b: RmInitAdapter failed%*", "NVRM: RmInitAdapter failed%*")
MISMATCH_PATTERNS: Final = ("NVRM: API mismatch: %*",)
LINK_SETUP_PATTERNS: Final = (
    "NVRM: %*knvlinkDiscoverPostRxDetLinks%*failed%*",
    "NVRM: %*knvlinkUpdatePostRxDetectLinkMask%*Failed%*",
)
GPU_LOG_PATTERNS: Final = (
    *XID_PATTERNS,
    *SXID_PATTERNS,
    *LOST_PATTERNS,
    *INIT_FAILED_PATTERNS,
    *MISMATCH_PATTERNS,
    *LINK_SETUP_PATTERNS,
)
"""Patterns of the lines that the native kernel log reader must pass on, in order."""


class XidLocation(NamedTuple):
    """Location on the GPU chip (GPC and TPC numbers) at which a program faulted."""

    gpc: int
    tpc: int


class XidLine(NamedTuple):
    """Values of a kernel log line that reports an XID (GPU error)."""

    bus: str
    """PCI address of the GPU, ``0000:3b:00.0``."""
    code: int
    gi: int = WHOLE_GPU
    """Number of the GPU instance (MIG) that the line names, or WHOLE_GPU."""
    ci: int = WHOLE_GPU
    """Number of the compute instance (MIG) that the line names, or WHOLE_GPU."""
    pid: int | None = None
    """PID of the process that the line names; None: no PID."""
    root: int | None = None
    """XID that the line names as the cause of this XID; None: no XID."""
    location: XidLocation | None = None
    """Place on the GPU chip that a line of XID 13 names; None: no place."""
    action: RecoveryAction | None = None
    """New recovery action that a line of XID 154 announces; None: no action."""
    nvlink5: Nvlink5Status | None = None
    """NVLink 5 error status in a line of XID 144 to 150; None: no status."""
    nvlink4: Nvlink4Registers | None = None
    """NVLink 4 error registers in a line of XID 74; None: no registers."""


class SxidLine(NamedTuple):
    """Values of a kernel log line about an NVSwitch error (SXid)."""

    switch: int
    """Number of the NVSwitch, as in ``nvidia-nvswitch3``."""
    bus: str
    code: int
    fatal: bool | None
    """Whether the error is fatal: ``Fatal`` or ``Severity 1`` against ``Non-fatal``, ``Correctable`` or
    ``Severity 0``; None: the line states no severity."""
    link: int | None
    detail: str
    is_companion: bool = False
    """True: the driver prints the line (``Severity ...`` or ``Data {...``) after the line of the error."""

    @property
    def ended(self) -> int:
        """Number of the SXid whose end the line reports; 0: the line reports an error."""
        return SXID_ENDS.get(self.code, 0) if self.fatal is None and not self.is_companion else 0

    @property
    def rank(self) -> int:
        """Rank of the line among the kernel log lines of one SXid. The line with the highest rank decides the
        severity."""
        if self.fatal is None:
            return 0 if self.is_companion else 2
        return 3 if self.fatal else 1


class GpuLostLine(NamedTuple):
    """Kernel log line "GPU has fallen off the bus", which accompanies XID 79."""

    bus: str


class InitFailedLine(NamedTuple):
    """Kernel log line that reports that the driver could not initialize a GPU (RmInitAdapter failed)."""

    bus: str
    """PCI address of the GPU; empty in lines of old drivers."""


class VersionMismatchLine(NamedTuple):
    """Kernel log line about a program whose driver library differs in version from the kernel module."""


class LinkSetupFailedLine(NamedTuple):
    """Kernel log line that reports that the driver cannot determine which NVLinks are up. If the line
    repeats, NVML soon hangs."""


class UnparsedLine(NamedTuple):
    """Kernel log line that matches no pattern, or that contains values which cannot be parsed."""

    text: str


ParsedLine = (
    XidLine
    | SxidLine
    | GpuLostLine
    | InitFailedLine
    | VersionMismatchLine
    | LinkSetupFailedLine
    | UnparsedLine
)


_BUS: Final = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_XID: Final = LateExpression(
    rf"NVRM: Xid \((?:PCI:)?(?P<bus>{_BUS})"
    r"(?: GPU-I:(?P<gi>[0-9]{1,9}))?(?: GPU-CI:(?P<ci>[0-9]{1,9}))?\): (?P<code>[0-9]{1,9}), "
    r"(?:pid=(?P<pid>[^,]*)(?:, |$)(?:name=.*?(?:, |$))?)?"
    r"(?P<detail>.*)",
    re.DOTALL,
)
_ROOT: Final = LateExpression(r" caused by previous Xid ([0-9]{1,9})")
_LOCATION: Final = LateExpression(r"\(GPC ([0-9]{1,4}), TPC ([0-9]{1,4})")
_ACTION: Final = LateExpression(r"changed from 0x[0-9a-fA-F]{1,8} \([^)]*\) to 0x([0-9a-fA-F]{1,8})\b")
_NVLINK5: Final = LateExpression(
    r"(?P<unit>[^()]+?) +(?P<word>Fatal|Nonfatal|Non-fatal)?[^()]*\bLink +(?P<link>-?[0-9]{1,4}) *"
    r"\((?P<intr>0x[0-9a-fA-F]{1,8}) +(?P<status>0x[0-9a-fA-F]{1,8})\b"
)
_NVLINK4: Final = LateExpression(r" link ([0-9]{1,4}) ?\((0x[0-9a-fA-F]{1,8}(?:, *0x[0-9a-fA-F]{1,8}){4,6})")
_LINK: Final = LateExpression(r"\bLink ([0-9]{1,4})\b")
_VERSION: Final = r"(?:has|NVRM:) the version ([0-9][0-9.]*[0-9])"


def normal_pci_address(text: str) -> str:
    """Convert a PCI address to the format of sysfs: ``PCI:00000000:3B:00`` to ``0000:3b:00.0``.

    A text that is no PCI address is returned unchanged.
    """
    bus = text.removeprefix("PCI:")
    if not re.fullmatch(_BUS, bus):
        return text
    domain, number, rest = bus.lower().split(":")
    device, _, function = rest.partition(".")
    return f"{int(domain, 16):04x}:{number}:{device}.{function or 0}"


def _int(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,9}", text) else None


def _nvlink5(detail: str) -> Nvlink5Status | None:
    found = _NVLINK5.match(detail)
    if found is None:
        return None
    fatal = found["word"] == "Fatal" if found["word"] else None
    words = int(found["intr"], 16), int(found["status"], 16)
    return Nvlink5Status(found["unit"], fatal, int(found["link"]), *words)


def _nvlink4(detail: str) -> Nvlink4Registers | None:
    found = _NVLINK4.search(detail)
    return (
        Nvlink4Registers(int(found[1]), tuple(int(word, 16) for word in found[2].split(",")))
        if found
        else None
    )


def _xid(_: re.Match[str], text: str) -> ParsedLine:
    found = _XID.match(text)
    if found is None:
        return UnparsedLine(text)
    code, detail = int(found["code"]), found["detail"].strip()
    gi, ci = _int(found["gi"]), _int(found["ci"])
    root = _ROOT.search(detail)
    place = _LOCATION.search(detail) if code == 13 else None
    action = _ACTION.search(detail) if code == 154 else None
    return XidLine(
        bus=normal_pci_address(found["bus"]),
        code=code,
        gi=WHOLE_GPU if gi is None else gi,
        ci=WHOLE_GPU if ci is None else ci,
        pid=_int(found["pid"]),
        root=_int(root[1]) if root else None,
        location=XidLocation(int(place[1]), int(place[2])) if place else None,
        action=RecoveryAction(int(action[1], 16)) if action else None,
        nvlink5=_nvlink5(detail) if code in NVLINK5_CODES else None,
        nvlink4=_nvlink4(detail) if code == 74 else None,
    )


def _sxid(
    match: re.Match[str], text: str, *, fatal: bool | None = None, is_companion: bool = False, code: int = 0
) -> ParsedLine:
    switch, printed = _int(match[1]), _int(match[3])
    if switch is None or printed is None:
        return UnparsedLine(text)
    detail = text[match.end(3) + len(", ") :] if fatal is None else match[4]
    found = _LINK.match(detail)
    link = _int(found[1]) if found else None
    bus = normal_pci_address(match[2])
    return SxidLine(switch, bus, code or printed, fatal, link, detail.strip(), is_companion)


def _sxid_severity(match: re.Match[str], text: str) -> ParsedLine:
    line = _sxid(match, text, is_companion=True)
    fatal = {"0": False, "1": True}.get(match[4])
    return line._replace(fatal=fatal) if isinstance(line, SxidLine) else line


def _lost(match: re.Match[str], _: str) -> ParsedLine:
    return GpuLostLine(normal_pci_address(match[1]))


def _init_failed(_: re.Match[str], text: str) -> ParsedLine:
    bus = re.match(f"NVRM: GPU ({_BUS})", text)
    return InitFailedLine(normal_pci_address(bus[1]) if bus else "")


def _mismatch(match: re.Match[str], text: str) -> ParsedLine:
    return VersionMismatchLine() if len(re.findall(_VERSION, match[1])) == 2 else UnparsedLine(text)


_Parser = Callable[[re.Match[str], str], ParsedLine]
_TABLE: Final[tuple[tuple[LazyLinePattern, _Parser], ...]] = tuple(
    (LazyLinePattern(pattern), parser)
    for patterns, parser in (
        (XID_PATTERNS, _xid),
        ((_FATAL,), partial(_sxid, fatal=True)),
        (_NOT_FATAL, partial(_sxid, fatal=False)),
        ((_SEVERITY,), _sxid_severity),
        ((_DATA,), partial(_sxid, is_companion=True)),
        ((_SHUTDOWN,), partial(_sxid, code=SWITCH_SHUTDOWN)),  # printed with the code of a slowdown
        ((_NO_SEVERITY,), _sxid),
        (LOST_PATTERNS, _lost),
        (INIT_FAILED_PATTERNS, _init_failed),
        (MISMATCH_PATTERNS, _mismatch),
        (LINK_SETUP_PATTERNS, lambda *_: LinkSetupFailedLine()),
    )
    for pattern in patterns
)


def parse_line(text: str) -> ParsedLine:
    """Parse a message of /dev/kmsg without its prefix. Never raises. A message that is not about GPUs or
    NVSwitches, or that cannot be parsed, becomes an UnparsedLine."""
    text = text.replace("\\x0a", "\n")  # /dev/kmsg escapes line breaks
    for pattern, parser in _TABLE:
        if match := pattern.match(text):
            return parser(match, text)
    return UnparsedLine(text)
