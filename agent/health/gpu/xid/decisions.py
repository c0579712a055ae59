"""Decisions on XIDs and SXids: severity and advice, from table rows, readings and the configuration. Pure.

Decisions are repeated in every evaluation. An SXid gets one decision for all GPUs, by the scope in its table
row and the severity in its log line:

    scope           Fatal                                       Non-fatal
    fabric-wide     UNHEALTHY                                   DEGRADED: the driver contradicts the table
    one port        DEGRADED: its link is lost                  INFO
    non-fatal       DEGRADED if it names a link, else UNHEALTHY INFO
    not listed      DEGRADED if it names a link, else UNHEALTHY INFO
"""

from typing import Final

from agent.health.gpu.xid.conditions import (
    CONDITION_FUNCTIONS,
    FaultDecision,
    XidConditionResult,
    XidOccurrences,
    XidReadings,
)
from agent.health.gpu.xid.log_lines import SxidLine
from agent.health.gpu.xid.row_types import XidAdvice, XidEffect, XidRow
from agent.health.gpu.xid.sxid_table import SxidRow, SxidScope
from agent.model.health import Blame, Severity, XidOverride
from agent.model.persistent_faults import Cure

_OVERRIDES: Final = {
    XidOverride.IGNORE: Severity.OK,
    XidOverride.INFO: Severity.INFO,
    XidOverride.DEGRADED: Severity.DEGRADED,
    XidOverride.UNHEALTHY: Severity.UNHEALTHY,
}


def decide_xid(
    row: XidRow, fault: XidOccurrences, facts: XidReadings, override: XidOverride | None = None
) -> FaultDecision:
    """Decide the severity, evidence, advice and cure of one XID on one GPU or MIG instance.

    Args:
        row: Table row of the XID.
        fault: Occurrences of the XID.
        facts: Other readings of the GPU.
        override: Severity that the configuration sets for the XID, which outranks all else; None: not set.

    Returns:
        Decision; severity OK: the configuration ignores the XID. The evidence has no counts and no times, so
        that it does not change with each occurrence.
    """
    if override is None:
        result = CONDITION_FUNCTIONS[row.condition](row, fault, facts)
        severity = (
            min(result.severity, Severity.DEGRADED) if row.effect is XidEffect.NEVER else result.severity
        )
    else:
        severity = _OVERRIDES[override]
        result = XidConditionResult(severity, f"{override} by configuration")
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
"""Severity of an SXid without a log line, by scope."""
_SXID_ADVICE: Final = {Severity.UNHEALTHY: XidAdvice.RESET_FABRIC, Severity.DEGRADED: XidAdvice.CHECK_LINKS}


def decide_sxid(row: SxidRow, line: SxidLine | None) -> FaultDecision:
    """Decide the severity, evidence, advice and cure of an SXid for all GPUs; ``line`` may be missing."""
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
