"""What an SXid means for the fabric.

An NVSwitch belongs to no GPU, so its errors are judged once, for the fabric. The table says how far an error
reaches, and the line's own word whether it is one:

    reach           Fatal                                       Non-fatal
    fabric-wide     UNHEALTHY                                   DEGRADED: the driver contradicts the table
    one port        DEGRADED: its link is lost                  INFO
    non-fatal       DEGRADED if it names a link, else UNHEALTHY INFO
    not listed      likewise                                    INFO
"""

from typing import Final

from agent.health.gpu.xid.lines import SxidLine
from agent.health.gpu.xid.rules import Decision
from agent.health.gpu.xid.sxids import Scope, SxidRow
from agent.health.gpu.xid.words import Advice
from agent.model.faults import Cure
from agent.model.health import Blame, Severity

_WORTH: Final = {
    Scope.FABRIC: Severity.UNHEALTHY,
    Scope.PORT: Severity.DEGRADED,
    Scope.NON_FATAL: Severity.INFO,
    Scope.UNLISTED: Severity.DEGRADED,
}
"""By its row alone."""
_ADVICE: Final = {Severity.UNHEALTHY: Advice.RESET_FABRIC, Severity.DEGRADED: Advice.CHECK_LINKS}


def decide_sxid(row: SxidRow, line: SxidLine | None) -> Decision:
    """What an SXid means for the fabric.

    Args:
        row: Of the code, from :func:`agent.health.gpu.xid.sxids.row_of`.
        line: The line that told of it; the evidence names its switch and its link. None: what the code is
            worth by its row alone.
    """
    severity = _WORTH[row.scope] if line is None else _severity(row.scope, line)
    return Decision(
        severity=severity,
        evidence=row.what if line is None else _evidence(row, line),
        advice=_ADVICE.get(severity, Advice.WATCH),
        blame=Blame.HARDWARE,
        cure=Cure.EXPIRES if severity <= Severity.INFO else Cure.RESET,
    )


def _severity(scope: Scope, line: SxidLine) -> Severity:
    if scope is Scope.FABRIC:
        return Severity.UNHEALTHY if line.fatal else Severity.DEGRADED
    if not line.fatal:
        return Severity.INFO
    if scope is Scope.PORT or line.link is not None:
        return Severity.DEGRADED
    return Severity.UNHEALTHY  # fatal, and of no port: it may be everybody's


def _evidence(row: SxidRow, line: SxidLine) -> str:
    what = line.detail if row.scope is Scope.UNLISTED and line.detail else row.what
    link = f", link {line.link}" if line.link is not None else ""
    word = "Fatal" if line.fatal else "Non-fatal"
    return f"{what}: NVSwitch {line.switch} at {line.bus}{link}, {word}"
