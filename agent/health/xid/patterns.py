"""Which lines of the kernel log are looked for: the patterns that its reader is given.

Owns the table and the language that it is written in; what a line says is agent.health.xid.lines.

A pattern is literal text and directives, matched from the start of a message; the first that matches counts:

    %b  a PCI bus id        %d  a decimal number    %x  a hexadecimal number with its 0x
    %w  a word              %k  the rest of the line
    %*  anything up to the next literal, or to the end

Lines whose directives all match the same text, but for %*, are one kind, and are counted together. So what
varies within a flood (a process, a channel, an address) stands under %*, and what decides does not.
"""

import re
from typing import Final

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
    "13, %*(GPC %*",  # apart from the lines that follow it and name no place
    "%d, %*",
)
XID: Final = tuple(head + tail for head in _XID_HEADS for tail in _XID_TAILS)
SXID: Final = (
    "nvidia-nvswitch%d: SXid (PCI:%b): %d, Fatal, %*",
    "nvidia-nvswitch%d: SXid (PCI:%b): %d, Non-fatal, %*",
)
LOST: Final = (
    "NVRM: GPU %b: GPU has fallen off the bus%*",
    "NVRM: GPU at PCI:%b: GPU has fallen off the bus%*",
    "NVRM: GPU at PCI:%b has fallen off the bus%*",
    "NVRM: GPU at %b has fallen off the bus%*",
    "NVRM: The NVIDIA GPU %b%*fallen off the bus%*",  # three lines in one record
)
INIT_FAILED: Final = ("NVRM: GPU %b: RmInitAdapter failed%*", "NVRM: RmInitAdapter failed%*")
MISMATCH: Final = ("NVRM: API mismatch: %*",)
LINK_SETUP: Final = (
    "NVRM: %*knvlinkDiscoverPostRxDetLinks%*failed%*",
    "NVRM: %*knvlinkUpdatePostRxDetectLinkMask%*Failed%*",
)
PATTERNS: Final = (
    *XID,
    *SXID,
    *LOST,
    *INIT_FAILED,
    *MISMATCH,
    *LINK_SETUP,
)
"""For the kernel-log reader, in order."""

_DIRECTIVES: Final = {
    "%b": r"([0-9a-fA-F]{4,8}+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?+)",
    "%d": r"([0-9]++)",
    "%x": r"(0x[0-9a-fA-F]++)",
    "%w": r"([^ \t,()]++)",
    "%k": r"(.*+)",
}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression that takes just what the reader's interpreter takes.

    Each directive is a group, ``%*`` too. None ever gives back what it took: the interpreter does not.
    """
    tokens = re.split(r"(%[bdxwk*])", pattern)
    parts = []
    for index, token in enumerate(tokens):
        if index % 2 == 0:
            parts.append(re.escape(token))
        elif token != "%*":
            parts.append(_DIRECTIVES[token])
        elif literal := tokens[index + 1]:
            parts.append(f"((?>(?:(?!{re.escape(literal)}).)*))")  # not *+: wrong in 3.11.2
        else:
            parts.append("(.*+)")
    return re.compile("".join(parts), re.DOTALL)
