"""Decisions on XIDs and SXids, from their table rows, the readings of the device, and the configuration.

The functions are pure: the caller counts occurrences and gathers the readings in every evaluation, so a
decision becomes worse or better with the readings.

An NVSwitch belongs to no GPU, so an SXid gets one decision for the whole fabric, by its scope and by the
severity in its line:

    scope           Fatal                                       Non-fatal
    fabric-wide     UNHEALTHY                                   DEGRADED: the driver contradicts the table
    one port        DEGRADED: its link is lost                  INFO
    non-fatal       DEGRADED if it names a link, else UNHEALTHY INFO
    not listed      DEGRADED if it names a link, else UNHEALTHY INFO
"""

from typing import Final

from agent.health.gpu.xid.conditions import (
    CONDITION_FUNCTIONS,
    ConditionResult,
    FaultDecision,
    XidFacts,
    XidFault,
)
from agent.health.gpu.xid.lines import SxidLine
from agent.health.gpu.xid.sxids import SxidRow, SxidScope
from agent.health.gpu.xid.values import XidAdvice, XidEffect, XidRow
from agent.model.faults import Cure
from agent.model.health import Blame, Severity, XidOverride

_OVERRIDES: Final = {
    XidOverride.IGNORE: Severity.OK,
    XidOverride.INFO: Severity.INFO,
    XidOverride.DEGRADED: Severity.DEGRADED,
    XidOverride.UNHEALTHY: Severity.UNHEALTHY,
}


def decide(
    row: XidRow, fault: XidFault, facts: XidFacts, override: XidOverride | None = None
) -> FaultDecision:
    """Decide on the severity and advice for one XID of one device.

    Args:
        row: Table row of the XID, from :func:`agent.health.gpu.xid.table.row_of`.
        fault: Occurrences of the XID.
        facts: Other readings of the device.
        override: Severity for the code in the configuration; it outranks all else, and the evidence names it.

    Returns:
        Decision, with at most DEGRADED for XidEffect.NEVER; severity OK: the configuration ignores the XID.
        The evidence contains no counts and times, so that it changes only with the readings.
    """
    if override is None:
        result = CONDITION_FUNCTIONS[row.condition](row, fault, facts)
        severity = min(result.severity, Severity.DEGRADED) if row.mark is XidEffect.NEVER else result.severity
    else:
        severity = _OVERRIDES[override]
        result = ConditionResult(severity, f"{override} by configuration")
    cure = result.cure or row.cure
    if severity <= Severity.INFO:
        cure = Cure.EXPIRES
    elif cure is Cure.EXPIRES:
        cure = Cure.RESET  # a suspicion stays until a reset, or until its bursts are a day old
    return FaultDecision(
        severity=severity,
        evidence=f"{row.meaning}: {result.why}" if result.why else row.meaning,
        advice=row.advice if result.advice is None else result.advice,
        blame=result.blame or row.blame,
        cure=cure,
    )


_SXID_SEVERITY: Final = {
    SxidScope.FABRIC: Severity.UNHEALTHY,
    SxidScope.PORT: Severity.DEGRADED,
    SxidScope.NON_FATAL: Severity.INFO,
    SxidScope.UNLISTED: Severity.DEGRADED,
}
"""Severity of an SXid by the scope in its table row, without a log line."""
_SXID_ADVICE: Final = {Severity.UNHEALTHY: XidAdvice.RESET_FABRIC, Severity.DEGRADED: XidAdvice.CHECK_LINKS}


def decide_sxid(row: SxidRow, line: SxidLine | None) -> FaultDecision:
    """Decide on the severity and advice for an SXid, for the whole fabric.

    Args:
        row: Table row of the SXid, from :func:`agent.health.gpu.xid.sxids.row_of`.
        line: Log line of the SXid; the evidence names its switch and link. None: only the row decides.
    """
    severity = _SXID_SEVERITY[row.scope] if line is None else _severity(row.scope, line)
    return FaultDecision(
        severity=severity,
        evidence=row.meaning if line is None else _evidence(row, line),
        advice=_SXID_ADVICE.get(severity, XidAdvice.WATCH),
        blame=Blame.HARDWARE,
        cure=Cure.EXPIRES if severity <= Severity.INFO else Cure.RESET,
    )


def _severity(scope: SxidScope, line: SxidLine) -> Severity:
    if scope is SxidScope.FABRIC:
        return Severity.UNHEALTHY if line.fatal else Severity.DEGRADED
    if not line.fatal:
        return Severity.INFO
    if scope is SxidScope.PORT or line.link is not None:
        return Severity.DEGRADED
    return Severity.UNHEALTHY  # fatal, and not limited to a port


def _evidence(row: SxidRow, line: SxidLine) -> str:
    meaning = line.detail if row.scope is SxidScope.UNLISTED and line.detail else row.meaning
    link = f", link {line.link}" if line.link is not None else ""
    severity = "Fatal" if line.fatal else "Non-fatal"
    return f"{meaning}: NVSwitch {line.switch} at {line.bus}{link}, {severity}"
