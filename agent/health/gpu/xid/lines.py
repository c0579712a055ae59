"""What a line of the kernel log says of NVIDIA's devices.

Owns the values that a line becomes, and the parsing of texts; which lines are looked for is
agent.health.gpu.xid.patterns, and what a line means for a device is the rules' to say.

Sources of the shapes: NVIDIA's open kernel modules (kernel_rc.c, osinit.c), the XID catalogue, and lines that
operators have published.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from agent.health.gpu.xid import patterns as log_patterns
from agent.health.gpu.xid.nvlink4 import LinkFault
from agent.health.gpu.xid.nvlink5 import CODES as NVLINK5_CODES
from agent.health.gpu.xid.nvlink5 import Nvlink5Status
from agent.health.gpu.xid.recovery import RecoveryAction
from agent.health.kernel_log.pattern import compile_pattern
from agent.model.gpu import WHOLE_GPU


class Place(NamedTuple):
    """Where on the chip a program faulted."""

    gpc: int
    tpc: int


class XidLine(NamedTuple):
    """An XID."""

    bus: str
    """PCI address, ``0000:3b:00.0``."""
    code: int
    gi: int = WHOLE_GPU
    """MIG instance that it names, or WHOLE_GPU; so ``ci``."""
    ci: int = WHOLE_GPU
    pid: int | None = None
    process: str = ""
    """Empty if the line does not know it."""
    detail: str = ""
    """The driver's text after all that."""
    root: int | None = None
    """The XID that this one says it was caused by."""
    place: Place | None = None
    """Of XID 13."""
    action: RecoveryAction | None = None
    """The new one of XID 154."""
    nvlink5: Nvlink5Status | None = None
    """Of XID 144 to 150."""
    nvlink4: LinkFault | None = None
    """Of XID 74."""


class SxidLine(NamedTuple):
    """An error of an NVSwitch."""

    switch: int
    """Its number, as in ``nvidia-nvswitch3``."""
    bus: str
    code: int
    fatal: bool
    """The line's own word."""
    link: int | None
    detail: str


class LostLine(NamedTuple):
    """A GPU has fallen off the bus, in a line that is no XID; the same as XID 79."""

    bus: str


class InitFailedLine(NamedTuple):
    """The driver could not initialise a GPU."""

    bus: str
    """Empty in lines of old drivers."""
    status: str
    """The driver's numbers for it, ``0x62:0xffff:1863``; empty if there are none."""


class MismatchLine(NamedTuple):
    """A program's driver library is of another version than the loaded module."""

    client: str
    module: str


class LinkSetupLine(NamedTuple):
    """The driver cannot find out which NVLinks came up; when it repeats this, NVML soon hangs."""

    detail: str


class Unparsed(NamedTuple):
    """A line that no pattern takes, or that a pattern takes and says nothing."""

    text: str


Line = XidLine | SxidLine | LostLine | InitFailedLine | MismatchLine | LinkSetupLine | Unparsed


_BUS: Final = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_XID: Final = re.compile(
    rf"NVRM: Xid \((?:PCI:)?(?P<bus>{_BUS})"
    r"(?: GPU-I:(?P<gi>[0-9]{1,9}))?(?: GPU-CI:(?P<ci>[0-9]{1,9}))?\): (?P<code>[0-9]{1,9}), "
    r"(?:pid=(?P<pid>[^,]*)(?:, |$)(?:name=(?P<process>.*?)(?:, |$))?)?"
    r"(?P<detail>.*)",
    re.DOTALL,
)
_ROOT: Final = re.compile(r" caused by previous Xid ([0-9]{1,9})")
_PLACE: Final = re.compile(r"\(GPC ([0-9]{1,4}), TPC ([0-9]{1,4})")
_ACTION: Final = re.compile(r"changed from 0x[0-9a-fA-F]{1,8} \([^)]*\) to 0x([0-9a-fA-F]{1,8})\b")
_NVLINK5: Final = re.compile(
    r"(?P<unit>[^()]+?) +(?P<word>Fatal|Nonfatal|Non-fatal)?[^()]*\bLink +(?P<link>-?[0-9]{1,4}) *"
    r"\((?P<intr>0x[0-9a-fA-F]{1,8}) +(?P<status>0x[0-9a-fA-F]{1,8})\b"
)
_NVLINK4: Final = re.compile(r" link ([0-9]{1,4}) ?\((0x[0-9a-fA-F]{1,8}(?:, *0x[0-9a-fA-F]{1,8}){4,6})")
_LINK: Final = re.compile(r"\bLink ([0-9]{1,4})\b")
_VERSION: Final = re.compile(r"has the version ([0-9][0-9.]*[0-9])")
_STATUS: Final = re.compile(r"\(([0-9a-fA-Fx:]{1,40})\)")


def normal_bus(text: str) -> str:
    """``PCI:00000000:3B:00`` as sysfs spells it, ``0000:3b:00.0``; what is no PCI address, unchanged."""
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


def _nvlink4(detail: str) -> LinkFault | None:
    found = _NVLINK4.search(detail)
    return LinkFault(int(found[1]), tuple(int(word, 16) for word in found[2].split(","))) if found else None


def _xid(_: re.Match[str], text: str) -> Line:
    found = _XID.match(text)
    if found is None:
        return Unparsed(text)
    code, detail = int(found["code"]), found["detail"].strip()
    gi, ci = _int(found["gi"]), _int(found["ci"])
    process = found["process"] or ""
    root = _ROOT.search(detail)
    place = _PLACE.search(detail) if code == 13 else None
    action = _ACTION.search(detail) if code == 154 else None
    return XidLine(
        bus=normal_bus(found["bus"]),
        code=code,
        gi=WHOLE_GPU if gi is None else gi,
        ci=WHOLE_GPU if ci is None else ci,
        pid=_int(found["pid"]),
        process="" if process.startswith("<") else process,
        detail=detail,
        root=_int(root[1]) if root else None,
        place=Place(int(place[1]), int(place[2])) if place else None,
        action=RecoveryAction(int(action[1], 16)) if action else None,
        nvlink5=_nvlink5(detail) if code in NVLINK5_CODES else None,
        nvlink4=_nvlink4(detail) if code == 74 else None,
    )


def _sxid(match: re.Match[str], text: str, *, fatal: bool) -> Line:
    switch, code = _int(match[1]), _int(match[3])
    if switch is None or code is None:
        return Unparsed(text)
    found = _LINK.match(match[4])
    link = _int(found[1]) if found else None
    return SxidLine(switch, normal_bus(match[2]), code, fatal, link, match[4].strip())


def _lost(match: re.Match[str], _: str) -> Line:
    return LostLine(normal_bus(match[1]))


def _init_failed(_: re.Match[str], text: str) -> Line:
    bus, status = re.match(f"NVRM: GPU ({_BUS})", text), _STATUS.search(text)
    return InitFailedLine(normal_bus(bus[1]) if bus else "", status[1] if status else "")


def _mismatch(match: re.Match[str], text: str) -> Line:
    versions = _VERSION.findall(match[1])
    return MismatchLine(versions[0], versions[1]) if len(versions) == 2 else Unparsed(text)


def _link_setup(_: re.Match[str], text: str) -> Line:
    return LinkSetupLine(text.removeprefix("NVRM: ").strip())


_Parser = Callable[[re.Match[str], str], Line]
_TABLE: Final[tuple[tuple[re.Pattern[str], _Parser], ...]] = tuple(
    (compile_pattern(pattern), parser)
    for patterns, parser in (
        (log_patterns.XID, _xid),
        (log_patterns.SXID[:1], partial(_sxid, fatal=True)),
        (log_patterns.SXID[1:], partial(_sxid, fatal=False)),
        (log_patterns.LOST, _lost),
        (log_patterns.INIT_FAILED, _init_failed),
        (log_patterns.MISMATCH, _mismatch),
        (log_patterns.LINK_SETUP, _link_setup),
    )
    for pattern in patterns
)


def parse(text: str) -> Line:
    """What a message of the kernel log says. Total: a line that says nothing is Unparsed.

    Args:
        text: As /dev/kmsg gives it, without the prefix; a line break within a record is ``\\x0a`` there.
    """
    text = text.replace("\\x0a", "\n")
    for pattern, parser in _TABLE:
        if match := pattern.match(text):
            return parser(match, text)
    return Unparsed(text)
