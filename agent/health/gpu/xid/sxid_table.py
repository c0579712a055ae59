"""Table of all SXids (errors that NVSwitches report), with the part of the fabric that each affects.

Source: NVIDIA's Fabric Manager user guide, appendix of NVSwitch errors.
"""

from enum import StrEnum
from typing import Final, NamedTuple


class SxidScope(StrEnum):
    """Part of the NVLink fabric that an NVSwitch error affects."""

    PORT = "port"
    """The link of one port, and the GPU at its end."""
    FABRIC = "fabric-wide"
    """Every GPU that the switch connects."""
    NON_FATAL = "non-fatal"
    """Nothing: the error was corrected, or has no consequence."""
    UNLISTED = "not listed"
    """Unknown scope: the code comes from a newer driver."""


class SxidRow(NamedTuple):
    """Table row of one SXid."""

    code: int
    meaning: str
    scope: SxidScope


_CORRECTED: Final = "corrected one-bit ECC errors"

# fmt: off
_FABRIC: Final = {
    10003: "unhandled host interrupt", 12020: "egress sequence id error", 22003: "link controller halted",
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
    10004: "thermal event began", 10005: "thermal event ended",
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
    19047: "uncorrectable NCISOC header error", 19048: "uncorrectable NCISOC data error",
    19054: "uncorrectable header RAM error", 19056: "uncorrectable data RAM 0 error",
    19058: "uncorrectable data RAM 1 error", 19060: "uncorrectable CREQ RAM header error",
    19061: "uncorrectable CREQ RAM data error", 19063: "uncorrectable response RAM header error",
    19064: "uncorrectable response RAM data error", 19066: "uncorrectable COM RAM header error",
    19067: "uncorrectable COM RAM data error", 19069: "uncorrectable response 1 RAM header error",
    19070: "uncorrectable response 1 RAM data error",
    20034: "link training fault while up",
    24004: "uncorrectable source track store 0 error", 24005: "uncorrectable source track store 0 data error",
    24006: "uncorrectable source track store 1 error", 24007: "source track timeout",
}
_NON_FATAL: Final = {
    11004: "ingress access denied", 12028: "privilege error of a non-posted egress request",
    19084: "heartbeat timeout",
    20001: "transmit replay", 20009: "short-term receive error rate",
    20012: "broken or inconsistent connection", 22013: "link controller event",
    **dict.fromkeys(
        (11012, 11021, 11022, 11023, 12021, 12023, 15008, 15011, 19049, 19055, 19057, 19059, 19062, 19065,
         19068, 19071, 24001, 24002, 24003),
        _CORRECTED,
    ),
}
# fmt: on

SXIDS: Final = {
    row.code: row
    for row in sorted(
        SxidRow(code, meaning, scope)
        for scope, table in (
            (SxidScope.FABRIC, _FABRIC),
            (SxidScope.PORT, _PORT),
            (SxidScope.NON_FATAL, _NON_FATAL),
        )
        for code, meaning in table.items()
    )
}
"""Table rows by SXid number, in ascending order."""


def sxid_row(code: int) -> SxidRow:
    """Return the table row of an SXid; for an unknown SXid, a row with the scope UNLISTED."""
    return SXIDS.get(code) or SxidRow(code, "unknown to this version", SxidScope.UNLISTED)
