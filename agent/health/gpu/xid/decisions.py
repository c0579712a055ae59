"""Decisions on XIDs and SXids: severity and advice, from table rows, readings and the configuration. Pure.

Decisions are repeated in every evaluation. An SXid gets one decision for all GPUs, by the scope in its table
row and the severity in its log line:

    scope           Fatal                           no severity   Non-fatal
    fabric-wide     UNHEALTHY                       UNHEALTHY     DEGRADED: the driver contradicts the table
    one port        DEGRADED: its link is lost      DEGRADED      INFO
    switch          DEGRADED if it names a link,    DEGRADED      INFO
                    else UNHEALTHY
    non-fatal       as switch                       INFO          INFO
    not listed      as switch                       DEGRADED      INFO

If only a companion line of an SXid is known, because its line was overwritten, it is UNHEALTHY only if it is
fatal and fabric-wide: companions do not state whether an error is limited to a link.
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
from agent.health.gpu.xid.row_types import RecoveryAction, XidAdvice, XidEffect, XidRow
from agent.health.gpu.xid.sxid_table import RENUMBERED_SXIDS, SxidRow, SxidScope, unlisted_sxid_row
from agent.model.health import Blame, Repair, Severity, XidOverride, repair_for_severity
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
    """Decide the severity, evidence, advice, repair and cure of one XID on one GPU or MIG instance.

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
    advice, repair = _advice_and_repair(row, result, facts.requested_action)
    return FaultDecision(
        severity=severity,
        evidence=f"{row.meaning}: {result.why}" if result.why else row.meaning,
        advice=advice,
        blame=result.blame or row.blame,
        cure=cure,
        repair=repair_for_severity(repair, severity),
    )


_SOFTWARE_REPAIRS: Final = (Repair.RESET_DEVICE, Repair.RELOAD_DRIVER, Repair.REBOOT_NODE)


def _advice_and_repair(
    row: XidRow, result: XidConditionResult, requested: RecoveryAction | None
) -> tuple[str, Repair]:
    """Return the advice on an XID and its repair. A recovery action that the driver requests replaces another
    reset or reboot; it does not replace an inspection or a replacement of the hardware."""
    advice = row.advice if result.advice is None else result.advice
    if result.repair is not None:
        return advice, result.repair
    repair = advice.repair if result.advice is not None and isinstance(advice, XidAdvice) else row.repair
    if requested and repair in _SOFTWARE_REPAIRS and requested.repair is not repair:
        return requested.advice, requested.repair
    return advice, repair


_SXID_SEVERITY: Final = {
    SxidScope.FABRIC: Severity.UNHEALTHY,
    SxidScope.PORT: Severity.DEGRADED,
    SxidScope.SWITCH: Severity.DEGRADED,
    SxidScope.NON_FATAL: Severity.INFO,
    SxidScope.UNLISTED: Severity.DEGRADED,
}
"""Severity of an SXid without a log line, or whose line states no severity, by scope."""
_SXID_ADVICE: Final = {Severity.UNHEALTHY: XidAdvice.RESET_FABRIC, Severity.DEGRADED: XidAdvice.CHECK_LINKS}


def decide_sxid(row: SxidRow, line: SxidLine | None) -> FaultDecision:
    """Decide the severity, evidence, advice, repair and cure of an SXid for all GPUs.

    Args:
        row: Table row of the SXid.
        line: Kernel log line of the SXid; None: its line was overwritten.
    """
    if line and (line.is_companion or line.fatal is not None) and row.code in RENUMBERED_SXIDS:
        row = unlisted_sxid_row(row.code)
    severity = _SXID_SEVERITY[row.scope] if line is None else _severity(row.scope, line)
    advice = _sxid_advice(row, severity)
    return FaultDecision(
        severity=severity,
        evidence=row.meaning if line is None else _evidence(row, line),
        advice=advice,
        blame=Blame.HARDWARE,
        cure=Cure.EXPIRES if severity <= Severity.INFO else Cure.RESET,
        repair=advice.repair,
    )


def _sxid_advice(row: SxidRow, severity: Severity) -> XidAdvice:
    if severity is Severity.DEGRADED and row.scope is SxidScope.SWITCH:
        return XidAdvice.CHECK_SWITCH
    return _SXID_ADVICE.get(severity, XidAdvice.WATCH)


def _severity(scope: SxidScope, line: SxidLine) -> Severity:
    if line.fatal is None:
        severity = _SXID_SEVERITY[scope]
        return min(severity, Severity.DEGRADED) if line.is_companion else severity
    if scope is SxidScope.FABRIC:
        return Severity.UNHEALTHY if line.fatal else Severity.DEGRADED
    if not line.fatal:
        return Severity.INFO
    if scope is SxidScope.PORT or line.link is not None or line.is_companion:
        return Severity.DEGRADED
    return Severity.UNHEALTHY  # fatal, and not limited to a port


def _evidence(row: SxidRow, line: SxidLine) -> str:
    is_named_by_driver = row.scope is SxidScope.UNLISTED and line.fatal is not None and not line.is_companion
    meaning = line.detail if is_named_by_driver and line.detail else row.meaning
    link = f", link {line.link}" if line.link is not None else ""
    place = f"{meaning}: NVSwitch {line.switch} at {line.bus}{link}"
    if line.fatal is None:
        return f"{place}: {line.detail}" if line.detail else place
    return f"{place}, {'Fatal' if line.fatal else 'Non-fatal'}"
