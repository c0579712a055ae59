"""Table of all SXids (errors that NVSwitches report). Each row states which part of the fabric is affected.

Sources: NVIDIA's Fabric Manager user guide, appendix of NVSwitch errors. For errors that the guide does not
list: NVIDIA's open kernel modules (ctrl_dev_nvswitch.h, and the texts that the driver prints).
"""

from enum import StrEnum
from typing import Final, NamedTuple


class SxidScope(StrEnum):
    """Part of the NVLink fabric that an NVSwitch error affects."""

    PORT = "port"
    """The error affects the link of one port, and the GPU at its end."""
    FABRIC = "fabric-wide"
    """The error affects every GPU that the switch connects."""
    SWITCH = "switch"
    """The error affects the switch, which still works, but slower or without some functions."""
    NON_FATAL = "non-fatal"
    """The error affects nothing: it was corrected, or has no consequence."""
    UNLISTED = "not listed"
    """The affected part is not known: the code comes from a newer driver."""


class SxidRow(NamedTuple):
    """Table row of one SXid: its meaning, and the part of the NVLink fabric that it affects."""

    code: int
    meaning: str
    scope: SxidScope
    states_severity: bool = True
    """Whether lines of the SXid contain ``Fatal`` or ``Non-fatal``; otherwise the scope decides alone."""


_CORRECTED: Final = "corrected one-bit ECC errors"
SWITCH_SHUTDOWN: Final = 10006
"""Number of the SXid with which an NVSwitch shuts down because it is too hot."""
SXID_ENDS: Final = {10005: 10004, 28002: 28001, 28004: 28003}
"""Number of the SXid that has ended, by the SXid that reports its end."""
RENUMBERED_SXIDS: Final = frozenset(range(28001, 28006))
"""Numbers of SXids that mean link errors in older drivers, whose lines for them state a severity."""

# fmt: off
_FABRIC: Final = {
    10003: "unhandled host interrupt", 10008: "switch firmware did not start",
    10009: "switch firmware is in recovery mode", 12020: "egress sequence id error",
    22003: "link controller halted",
    22009: "fatal interrupt of a link controller", 22010: "link controller watchdog ran out",
    22011: "link controller error",
    23001: "ingress source buffer overflow", 23002: "ingress source buffer underflow",
    23003: "egress destination credit overflow", 23004: "egress destination credit underflow",
    23005: "ingress packet burst error", 23006: "sticky ingress packet error",
    23007: "possible bubbles at ingress", 23008: "invalid destination of an ingress packet",
    23009: "ingress packet parity error",
    23010: "ingress source buffer overflow", 23011: "ingress source buffer underflow",
    23012: "egress destination credit overflow", 23013: "egress destination credit underflow",
    23014: "ingress packet burst error", 23015: "sticky ingress packet error",
    23016: "possible bubbles at ingress", 23017: "ingress credit parity error",
}
_PORT: Final = {
    10001: "privileged access error of the host", 10002: "privileged access timeout of the host",
    11001: "invalid ingress command", 11009: "invalid ingress virtual channel set",
    11013: "uncorrectable ingress header error", 11018: "uncorrectable ingress RID table error",
    11019: "uncorrectable ingress RLAN table error", 11020: "ingress control parity error",
    12001: "egress crossbar overflow", 12002: "egress packet route error",
    12022: "uncorrectable egress input error", 12024: "uncorrectable egress output error",
    12025: "egress credit overflow", 12026: "egress destination request id error",
    12027: "egress destination response id error",
    12030: "egress control parity error", 12031: "egress credit parity error",
    12032: "egress flit type mismatch",
    14017: "TS ATO timeout",
    15001: "route buffer over- or underflow", 15006: "route completion over- or underflow",
    15009: "uncorrectable route GLT error", 15010: "route parity error",
    15012: "uncorrectable incoming route error", 15013: "route credit parity error",
    15015: "uncorrectable multicast route table error",
    15017: "uncorrectable extended multicast route table error",
    15019: "uncorrectable route RAM error", 15020: "invalid multicast route",
    18018: "timeout of the PHY arbiter in a link reset", 18019: "timeout of the PLL in a link reset",
    18020: "illegal clock request of a link",
    **dict.fromkeys(range(19072, 19080), "the link's other end did not answer in time"),
    19047: "uncorrectable NCISOC header error", 19048: "uncorrectable NCISOC data error",
    19054: "uncorrectable header RAM error", 19056: "uncorrectable data RAM 0 error",
    19058: "uncorrectable data RAM 1 error", 19060: "uncorrectable CREQ RAM header error",
    19061: "uncorrectable CREQ RAM data error", 19063: "uncorrectable response RAM header error",
    19064: "uncorrectable response RAM data error", 19066: "uncorrectable COM RAM header error",
    19067: "uncorrectable COM RAM data error", 19069: "uncorrectable response 1 RAM header error",
    19070: "uncorrectable response 1 RAM data error",
    20013: "link training fault", 20014: "link training protocol error",
    # A fatal error of one port is DEGRADED: the line names a port of the switch, not the GPU behind it, and
    # the other GPUs of the node work. The GPU that lost its link has findings of its own, from its readings
    # and XIDs. So it is with 20034 and 24007, which other monitors rate by the word Fatal alone.
    20034: "link training fault while up", 20035: "link training fault while down",
    22006: "link controller command failed with a fault", 22007: "link controller command timed out",
    22008: "link controller command failed", 22012: "fatal interrupt of a link",
    24004: "uncorrectable source track store 0 error", 24005: "uncorrectable source track store 0 data error",
    24006: "uncorrectable source track store 1 error", 24007: "source track timeout",
    24008: "duplicate tag in source track 0", 24009: "invalid response in source track 0",
    24010: "invalid response in source track 1",
    25001: "illegal link state request", 25002: "link controller refused a link state request",
    25003: "reserved value in a link state request", 25004: "link state request while busy",
    25005: "link state request timed out", 25006: "write to a locked register of a link",
    25007: "sleep requested of an active link", 25008: "timeout of the PHY control in a link reset",
    25009: "timeout of the clock control in a link reset",
    **{
        first + offset: f"{meaning} of multicast or reduction state"
        for first in (29000, 30000)
        for offset, meaning in (
            (2, "uncorrectable tag pool error"), (4, "uncorrectable store error"), (5, "overwritten store"),
            (6, "timeout"),
        )
    },
}
_SWITCH: Final = {26003: "switch controller takes no commands"}
_NON_FATAL: Final = {
    11004: "ingress access denied", 12028: "privilege error of a non-posted egress request",
    19084: "heartbeat timeout",
    20001: "transmit replay", 20009: "short-term receive error rate",
    20012: "broken or inconsistent connection", 22013: "link controller event",
    **dict.fromkeys(
        (11012, 11021, 11022, 11023, 12021, 12023, 15008, 15011, 15014, 15016, 15018, 19049, 19055, 19057,
         19059, 19062, 19065, 19068, 19071, 24001, 24002, 24003, 29001, 29003, 30001, 30003),
        _CORRECTED,
    ),
}
# Lines of these SXids state no severity
_FABRIC_PLAIN: Final = {SWITCH_SHUTDOWN: "the switch shuts down: too hot"}
_SWITCH_PLAIN: Final = {
    10004: "the switch is too hot and slows down", 10007: "the switch does not answer its driver",
    10010: "register access failed (trusted NVLink mode)",
    22001: "link controller code not loaded", 22002: "link controller data not loaded",
    22004: "link controller did not start", 22005: "link controller did not answer in time",
    26001: "switch controller could not be reset", 26002: "switch controller did not start",
    26004: "switch controller did not answer in time",
    26005: "switch controller could not be shut down", 26006: "switch controller halted",
    26007: "external error of the switch controller", 26008: "switch controller watchdog ran out",
    27001: "cable controller could not be reset", 27002: "cable controller did not start",
    27003: "cable controller did not answer in time", 27004: "cable controller could not be shut down",
    28001: "optical modules are too hot", 28003: "optical modules are above their highest temperature",
    28005: "optical modules were shut down (heartbeat of the switch controller)",
}
_PORT_PLAIN: Final = {
    25010: "link training failed", 27005: "cable module is faulty", 27006: "cable module did not start",
    27007: "cable module did not recover",
}
_NON_FATAL_PLAIN: Final = {
    end: f"end of SXid {begun}" for end, begun in SXID_ENDS.items()
}
# fmt: on

SXIDS: Final = {
    row.code: row
    for row in sorted(
        SxidRow(code, meaning, scope, states_severity)
        for scope, states_severity, table in (
            (SxidScope.FABRIC, True, _FABRIC),
            (SxidScope.PORT, True, _PORT),
            (SxidScope.SWITCH, True, _SWITCH),
            (SxidScope.NON_FATAL, True, _NON_FATAL),
            (SxidScope.FABRIC, False, _FABRIC_PLAIN),
            (SxidScope.SWITCH, False, _SWITCH_PLAIN),
            (SxidScope.PORT, False, _PORT_PLAIN),
            (SxidScope.NON_FATAL, False, _NON_FATAL_PLAIN),
        )
        for code, meaning in table.items()
    )
}
"""Table rows of all SXids, by SXid number in ascending order."""


def sxid_row(code: int) -> SxidRow:
    """Return the table row of an SXid; for an unknown SXid, a row with the scope UNLISTED."""
    return SXIDS.get(code) or unlisted_sxid_row(code)


def unlisted_sxid_row(code: int) -> SxidRow:
    """Return the row of an SXid whose meaning this version of the agent does not know."""
    return SxidRow(code, "unknown to this version", SxidScope.UNLISTED)
