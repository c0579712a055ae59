"""Which lines of the kernel log are looked for: the patterns that its reader is given.

Owns the table; what a line says is agent.health.gpu.xid.lines, and the language
agent.health.kernel_log.pattern.
"""

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
