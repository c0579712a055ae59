"""Decisions on XIDs and SXids, from their rows, what is known of the device, and the configuration.

The functions are pure: the caller counts occurrences and gathers facts in every evaluation, so a decision
becomes worse or better with the facts.

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
from agent.health.gpu.xid.values import Mark, XidAdvice, XidRow
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
    """Return the decision on one XID of one device.

    Args:
        row: Row of the code, from :func:`agent.health.gpu.xid.table.row_of`.
        fault: Occurrences of the XID.
        facts: Other readings of the device.
        override: Severity for the code in the configuration; it outranks all else, and the evidence names it.

    Returns:
        Decision with at most DEGRADED for Mark.NEVER. The evidence contains no counts and times, so that it
        changes only with the facts. OK: the configuration ignores the code.
    """
    if override is None:
        result = CONDITION_FUNCTIONS[row.condition](row, fault, facts)
        severity = min(result.severity, Severity.DEGRADED) if row.mark is Mark.NEVER else result.severity
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
"""Severity of an SXid by its row alone."""
_SXID_ADVICE: Final = {Severity.UNHEALTHY: XidAdvice.RESET_FABRIC, Severity.DEGRADED: XidAdvice.CHECK_LINKS}


def decide_sxid(row: SxidRow, line: SxidLine | None) -> FaultDecision:
    """Return the decision on an SXid, for the fabric.

    Args:
        row: Row of the code, from :func:`agent.health.gpu.xid.sxids.row_of`.
        line: Line that reported the SXid; the evidence names its switch and link. None: decide by the row.
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
