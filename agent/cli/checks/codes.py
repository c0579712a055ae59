"""XIDs and SXids as checks: how bad each may be, and when, in words. Pure.

Owns those words, and nothing of the judgement: a test holds them to agent.health.gpu.xid.rules.
"""

from typing import Final

from agent.cli.checks.check import Check
from agent.health.gpu.faults.values import SXID, XID
from agent.health.gpu.xid.sxid_rules import decide_sxid
from agent.health.gpu.xid.sxids import Scope, SxidRow
from agent.health.gpu.xid.words import Answer, Condition, Mark, XidRow
from agent.model.health import Severity

_WORST: Final[dict[Condition, tuple[Severity, str]]] = {
    Condition.WARNS: (Severity.DEGRADED, "whenever it comes"),
    Condition.RETIRED: (Severity.DEGRADED, "unless the driver says that no recovery is needed"),
    Condition.UNLISTED: (Severity.DEGRADED, "unless the driver says that no recovery is needed"),
    Condition.FOLLOWER: (Severity.INFO, "whenever it comes: it is the echo of another XID"),
    Condition.DEFERS: (
        Severity.UNHEALTHY,
        "if the driver asks for a recovery action; degraded if it does not say",
    ),
    Condition.ASKS: (Severity.DEGRADED, "if the driver asks for a recovery action"),
    Condition.ANNOUNCES: (
        Severity.UNHEALTHY,
        "if its text asks for an action and the driver has no field to read it from",
    ),
    Condition.STUCK: (
        Severity.UNHEALTHY,
        "if the driver asks for a recovery action, or is too old to ask; degraded if it does not say",
    ),
    Condition.SAME_PLACE: (Severity.DEGRADED, "if the same GPC and TPC report it again within a day"),
    Condition.ACROSS_WORKLOADS: (Severity.DEGRADED, "if different processes meet it within a day"),
    Condition.WITH_REPLAYS: (
        Severity.DEGRADED,
        "if it comes back within a day while the PCIe link replays packets",
    ),
    Condition.ON_REPEAT: (Severity.DEGRADED, "if it comes back within a day"),
    Condition.REMAP_PENDING: (
        Severity.UNHEALTHY,
        "if a replacement waits and the driver asks for a recovery action; else degraded",
    ),
    Condition.CONTAINED: (
        Severity.UNHEALTHY,
        "if a row waits for its replacement, the driver asks for a recovery action, or it comes again; "
        "else degraded",
    ),
    Condition.REMAP_FAILED: (Severity.UNHEALTHY, "whenever it comes"),
    Condition.LOST_AGAIN: (
        Severity.UNHEALTHY,
        "whenever it comes; twice within a day points to seat or hardware",
    ),
    Condition.LINK_REGISTERS: (
        Severity.UNHEALTHY,
        "if the registers in its line point to hardware, links are down, or the driver asks for a recovery "
        "action; degraded without registers",
    ),
    Condition.LINK_WORDS: (
        Severity.UNHEALTHY,
        "if its line says fatal, or its error status asks for a reset; degraded if it is not known",
    ),
    Condition.LINKS_DOWN: (Severity.UNHEALTHY, "while links are down; degraded if they cannot be read"),
    Condition.RESET_PENDING: (Severity.UNHEALTHY, "until its reset was done"),
    Condition.CAPACITY_CUT: (
        Severity.UNHEALTHY,
        "if the driver asks for a recovery action; degraded if it does not say",
    ),
    Condition.DRAM_OF_48: (
        Severity.UNHEALTHY,
        "if a row is not replaced yet, or the driver asks for a recovery action; else degraded, unless it "
        "came with another XID",
    ),
    Condition.SRAM_OF_48: (
        Severity.UNHEALTHY,
        "if SRAM has more errors than it may, or the driver asks for a recovery action; else degraded, "
        "unless it came with another XID",
    ),
    Condition.CANCELLED: (Severity.DEGRADED, "until XID 162 says that it is over"),
}
"""How bad an XID may be, and when; what is not so bad is told of, and leaves the device Healthy."""

_PLAIN: Final = {
    Mark.ALWAYS: (Severity.UNHEALTHY, "whenever it comes"),
    Mark.NEVER: (Severity.INFO, "whenever it comes"),
}

_FATAL: Final[dict[Scope, str]] = {
    Scope.FABRIC: "if its line says fatal; else degraded",
    Scope.PORT: "if its line says fatal: a link is lost; else told of",
    Scope.NON_FATAL: "unless its line says fatal",
    Scope.UNLISTED: "if its line says fatal; unhealthy if it names no link with that; else told of",
}


def of_xid(row: XidRow) -> Check:
    """An XID; what would be why it matters is what is enough to mend it."""
    severity, when = _PLAIN[row.mark] if row.condition is Condition.PLAIN else _WORST[row.condition]
    if row.mark is Mark.NEVER:
        severity = min(severity, Severity.DEGRADED)
    return Check(
        f"{XID}{row.code}",
        severity,
        row.blame,
        "nvml-events, kmsg",
        row.meaning,
        f"{severity.name.lower()} {when}",
        _enough(row),
        row.advice.value,
        f"gpu 0 xid {row.code}",
    )


def _enough(row: XidRow) -> str:
    """The mildest measure that is enough."""
    steps = (
        ("restart of the program", row.mends.app_restart),
        ("GPU reset", row.mends.gpu_reset),
        ("reboot", row.mends.reboot),
    )
    if row.mends.app_restart is Answer.NOT_NEEDED and row.mends.gpu_reset is Answer.NOT_NEEDED:
        return "nothing is needed"
    for step, answer in steps:
        if answer is Answer.YES:
            return step
    for step, answer in steps:
        if answer is Answer.MAYBE:
            return f"perhaps a {step}"
    if row.mends.app_restart is Answer.BY_TEXT:
        return "its text says"
    return "a repair" if row.mends.hardware is Answer.YES else "not known"


def of_sxid(row: SxidRow) -> Check:
    """An SXid; what would be why it matters is how far it reaches."""
    told = decide_sxid(row, None)
    line = f"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): {row.code}, Fatal, Link 32 {row.what}"
    return Check(
        f"{SXID}{row.code}",
        told.severity,
        told.blame,
        "kmsg",
        row.what,
        f"{told.severity.name.lower()} {_FATAL[row.scope]}",
        row.scope.value,
        told.advice,
        f'echo "{line}" > /dev/kmsg',
    )
