"""What an XID means for the device that reported it.

Owns how a row's mark, its condition and the operator's word become one decision; the conditions themselves
are agent.health.gpu.xid.conditions. Reads no clock and remembers nothing: what was seen is counted and kept
by the caller, and the facts are looked at anew each time. So a decision follows them, to worse and to better.
"""

from typing import Final

from agent.health.gpu.xid.conditions import RULINGS, Ruling
from agent.health.gpu.xid.facts import Decision, XidFacts, XidFault, announced
from agent.health.gpu.xid.words import Mark, XidRow
from agent.model.faults import Cure
from agent.model.health import Severity, XidOverride

__all__ = ["Decision", "XidFacts", "XidFault", "announced", "decide"]

_OVERRIDES: Final = {
    XidOverride.IGNORE: Severity.OK,
    XidOverride.INFO: Severity.INFO,
    XidOverride.DEGRADED: Severity.DEGRADED,
    XidOverride.UNHEALTHY: Severity.UNHEALTHY,
}


def decide(row: XidRow, fault: XidFault, facts: XidFacts, override: XidOverride | None = None) -> Decision:
    """What one XID of one device means now.

    Args:
        row: Of the code, from :func:`agent.health.gpu.xid.table.row_of`.
        fault: What was seen of it.
        facts: What else is known of the device.
        override: What the operator makes of the code; it outranks everything, and the evidence names it.

    Returns:
        A code that its row never marks is at most DEGRADED. The evidence holds no counts and no times: it
        is the same while the facts are. OK means that the operator wants to hear nothing of it.
    """
    if override is None:
        ruling = RULINGS[row.condition](row, fault, facts)
        severity = min(ruling.severity, Severity.DEGRADED) if row.mark is Mark.NEVER else ruling.severity
    else:
        severity = _OVERRIDES[override]
        ruling = Ruling(severity, f"{override} by configuration")
    cure = ruling.cure or row.cure
    if severity <= Severity.INFO:
        cure = Cure.EXPIRES
    elif cure is Cure.EXPIRES:
        cure = Cure.RESET  # a suspicion stays until the GPU was seen to, or its bursts are a day old
    return Decision(
        severity=severity,
        evidence=f"{row.meaning}: {ruling.why}" if ruling.why else row.meaning,
        advice=row.advice if ruling.advice is None else ruling.advice,
        blame=ruling.blame or row.blame,
        cure=cure,
    )
