"""Decisions on XIDs and SXids: severity and advice, from table rows, readings and the configuration. Pure.

If the severity of an XID depends on occurrences and readings, its row in agent.health.gpu.xid.xid_table names
an XidCondition. For each XidCondition, one function decides the severity. A recovery action that the driver
requests outranks the table. A missing reading never counts as a good reading.

Decisions are repeated in every evaluation. An SXid gets one decision for all GPUs, by the scope in its table
row and the severity in its log line:

    scope           Fatal                           no severity   Non-fatal
    fabric-wide     UNHEALTHY                       UNHEALTHY     DEGRADED: the driver contradicts the table
    one port        DEGRADED: its link is lost      DEGRADED      INFO
    switch          DEGRADED if it names a link,    DEGRADED      INFO
                    else UNHEALTHY
    non-fatal       as switch                       INFO          INFO
    not listed      as switch                       DEGRADED      INFO

The kernel log has a main line for an SXid, and companion lines that accompany it. If the main line was
overwritten and only a companion line is known, the SXid is UNHEALTHY only if it is fatal and fabric-wide.
The reason is that companion lines do not state whether an error is limited to one link.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from agent.health.gpu.xid.log_lines import (
    Nvlink4Grade,
    Nvlink5Status,
    RequiredAction,
    SxidLine,
    XidLine,
    decode_nvlink5,
    grade_registers,
)
from agent.health.gpu.xid.sxid_table import RENUMBERED_SXIDS, SxidRow, SxidScope, unlisted_sxid_row
from agent.health.gpu.xid.xid_table import (
    ENDED_XIDS,
    RecoveryAction,
    XidAdvice,
    XidCondition,
    XidEffect,
    XidRow,
)
from agent.model.health import Blame, Finding, Repair, Severity, XidOverride, repair_for_severity
from agent.model.persistent_faults import Cure


class XidOccurrences(NamedTuple):
    """Occurrences of one XID (GPU error) on one GPU or MIG instance, from NVML and the kernel log."""

    times: int = 1
    bursts: int = 1
    """Number of bursts (occurrences less than a minute apart) within the last day, or 30 days for XID 79."""
    lines: tuple[XidLine, ...] = ()
    """Some of the kernel log lines that report the XID, newest last; empty: only NVML reported it."""
    processes: int = 0
    """Number of different processes that began ``bursts``, of those that the kernel log names."""
    followers: frozenset[int] = frozenset()
    """Numbers of later XIDs that report the end of this XID."""


class XidReadings(NamedTuple):
    """Readings of a GPU that decide the severity of its XIDs; None: the GPU has no such reading, or it
    failed."""

    action: RecoveryAction | None = None
    """Recovery action that NVML field 230 requests for the GPU."""
    has_action: bool = False
    """Whether driver and GPU have NVML field 230, even if it cannot be read now."""
    announced: RecoveryAction | None = None
    """Recovery action that the newest kernel log line of XID 154 announces; None: no such line."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    page_pending: bool | None = None
    """Whether retired pages wait for a reset (before Ampere)."""
    sram_threshold: bool | None = None
    links_down: bool | None = None
    """Whether NVLinks are down that were up before."""
    replays_growing: bool = False
    """Whether the PCIe link repeats (replays) packets."""
    ecc_on: bool | None = None
    has_root: bool = False
    """Whether another XID of the same GPU occurred close to this one and may be its cause."""

    @property
    def requested_action(self) -> RecoveryAction | None:
        """Recovery action that the driver requests, from NVML field 230 or else from XID 154; None: not
        known."""
        return self.announced if self.action is None else self.action


class FaultDecision(NamedTuple):
    """Decision on a GPU fault: its severity, evidence, advice and repair, and the cure (the event that ends
    it)."""

    severity: Severity
    evidence: str
    advice: str
    blame: Blame
    cure: Cure
    repair: Repair

    def finding(self, code: str) -> Finding:
        """Return the finding that reports the fault, with a finding code such as ``gpu.xid.79``."""
        return Finding(code, self.severity, self.evidence, self.advice, self.blame, repair=self.repair)


def announced_action(lines: Sequence[XidLine]) -> RecoveryAction | None:
    """Return the recovery action in the newest XID 154 line; None: no line contains an action."""
    return next((line.action for line in reversed(lines) if line.action is not None), None)


MIN_BURSTS: Final = 2
"""Number of bursts of an XID from which on the XID counts as recurring."""
MIN_STORM_ERRORS: Final = 10
"""Number of contained memory errors from which on the GPU is Unhealthy, even in one burst."""


class XidConditionResult(NamedTuple):
    """Severity, advice and cure (the event that ends the fault) that the XidCondition of an XID decides. None
    in a field: the value in the XID's table row counts."""

    severity: Severity
    why: str = ""
    advice: str | None = None
    blame: Blame | None = None
    cure: Cure | None = None
    repair: Repair | None = None
    """Repair that ``advice`` describes; None if ``advice`` is an XidAdvice, which has its own repair."""


_ConditionFunction = Callable[[XidRow, XidOccurrences, XidReadings], XidConditionResult]
_INFO, _DEGRADED, _UNHEALTHY = Severity.INFO, Severity.DEGRADED, Severity.UNHEALTHY


def _for_action(
    facts: XidReadings, requested: Severity, none: Severity, unknown: Severity
) -> XidConditionResult:
    """Return the severity that follows from the recovery action which the driver requests for the GPU.

    Args:
        requested: Severity if the driver requests an action.
        none: Severity if the driver requests no action.
        unknown: Severity if the requested action is not known.
    """
    action = facts.requested_action
    if action is None:
        return XidConditionResult(
            unknown, f"recovery action {'unreadable' if facts.has_action else 'not supported'}"
        )
    if action is RecoveryAction.NONE:
        return XidConditionResult(none, "no recovery action is requested")
    return XidConditionResult(
        requested, f"recovery action: {action.text}", action.advice, repair=action.repair
    )


def _plain(row: XidRow, _: XidOccurrences, __: XidReadings) -> XidConditionResult:
    return XidConditionResult(_UNHEALTHY if row.effect is XidEffect.ALWAYS else _INFO)


def _by_action(requested: Severity, none: Severity, unknown: Severity) -> _ConditionFunction:
    return lambda _, __, facts: _for_action(facts, requested, none, unknown)


def _follower(_: XidRow, fault: XidOccurrences, __: XidReadings) -> XidConditionResult:
    roots = sorted({line.root for line in fault.lines if line.root})
    return XidConditionResult(_INFO, "after XID " + ", ".join(map(str, roots)) if roots else "")


def _announces(_: XidRow, fault: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    if facts.action is not None:
        return XidConditionResult(_INFO, f"recovery action: {facts.action.text}")
    action = announced_action(fault.lines)
    if action is None:
        return XidConditionResult(_DEGRADED, "the action is not known")
    return _for_action(XidReadings(announced=action), requested=_UNHEALTHY, none=_INFO, unknown=_DEGRADED)


def _stuck(_: XidRow, __: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    return _for_action(
        facts, requested=_UNHEALTHY, none=_INFO, unknown=_DEGRADED if facts.has_action else _UNHEALTHY
    )


def _if_recurring(fault: XidOccurrences, why: str, *, is_suspect: bool = True) -> XidConditionResult:
    """Return the result for an XID that programs usually cause: Degraded if it recurs and the hardware
    probably caused it, else Info.

    Args:
        why: Reason for the suspicion, which becomes part of the evidence.
        is_suspect: Whether the other conditions for the suspicion are met.
    """
    if fault.bursts < MIN_BURSTS or not is_suspect:
        return XidConditionResult(_INFO)
    return XidConditionResult(_DEGRADED, why, XidAdvice.DIAGNOSE, Blame.HARDWARE)


def _same_place(_: XidRow, fault: XidOccurrences, __: XidReadings) -> XidConditionResult:
    places = {f"GPC {line.location.gpc}, TPC {line.location.tpc}" for line in fault.lines if line.location}
    return _if_recurring(fault, f"always on {'; '.join(places)}", is_suspect=len(places) == 1)


def _across_workloads(_: XidRow, fault: XidOccurrences, __: XidReadings) -> XidConditionResult:
    is_suspect = fault.processes >= MIN_BURSTS
    return _if_recurring(fault, "different processes caused it within a day", is_suspect=is_suspect)


def _with_replays(_: XidRow, fault: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    why = "it recurs, and the PCIe link replays packets"
    return _if_recurring(fault, why, is_suspect=facts.replays_growing)


def _remap_pending(_: XidRow, __: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    if not (facts.remap_pending or facts.page_pending):
        return XidConditionResult(_DEGRADED)
    result = _for_action(facts, requested=_UNHEALTHY, none=_DEGRADED, unknown=_DEGRADED)
    return result._replace(why=f"remapping pending, {result.why}")


def _contained(_: XidRow, fault: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    if facts.remap_pending:
        return XidConditionResult(_UNHEALTHY, "a row remapping is pending")
    if facts.requested_action:
        return _for_action(facts, requested=_UNHEALTHY, none=_DEGRADED, unknown=_DEGRADED)
    if fault.bursts >= MIN_BURSTS or fault.times >= MIN_STORM_ERRORS:
        return XidConditionResult(_UNHEALTHY, "it recurs")
    return XidConditionResult(_DEGRADED, advice=XidAdvice.WATCH)


def _remap_failed(_: XidRow, __: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    if not facts.remap_failed:
        return XidConditionResult(_UNHEALTHY)
    return XidConditionResult(
        _UNHEALTHY, "rows can no longer be remapped", XidAdvice.REPLACE, cure=Cure.REPLACE
    )


def _lost_again(_: XidRow, fault: XidOccurrences, __: XidReadings) -> XidConditionResult:
    if fault.bursts < MIN_BURSTS:
        return XidConditionResult(_UNHEALTHY)
    return XidConditionResult(_UNHEALTHY, "it recurred within 30 days", XidAdvice.CHECK_SEATING)


def _link_registers(_: XidRow, fault: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    links = [line.nvlink4 for line in fault.lines if line.nvlink4]
    worst = max(links, key=lambda link: grade_registers(link.registers), default=None)
    if worst and grade_registers(worst.registers) is Nvlink4Grade.HARDWARE:
        registers = " ".join(f"{register:#x}" for register in worst.registers)
        return XidConditionResult(_UNHEALTHY, f"link {worst.link}, registers {registers}")
    if facts.links_down:
        return XidConditionResult(_UNHEALTHY, "links are down")
    if worst is None or grade_registers(worst.registers) is Nvlink4Grade.NONE:
        return _for_action(facts, requested=_UNHEALTHY, none=_DEGRADED, unknown=_DEGRADED)
    if grade_registers(worst.registers) is Nvlink4Grade.SYMPATHETIC and not facts.has_root:
        return XidConditionResult(_UNHEALTHY, f"link {worst.link}, the consequence of an unknown fault")
    return XidConditionResult(_INFO, f"link {worst.link}, benign")


def _link_words(row: XidRow, fault: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    results = [_nvlink5_result(row, line.nvlink5, facts) for line in fault.lines if line.nvlink5]
    if results:
        return max(results, key=lambda result: result.severity)
    if row.effect is XidEffect.NEVER:
        return XidConditionResult(_INFO)
    result = _for_action(
        facts, requested=_UNHEALTHY, none=_unlisted_severity(row), unknown=_unlisted_severity(row)
    )
    return result._replace(why=f"the kernel log has no line with the error, {result.why}")


def _nvlink5_result(row: XidRow, status: Nvlink5Status, facts: XidReadings) -> XidConditionResult:
    decoded = decode_nvlink5(row.code, status)
    unit_text = f"{decoded.unit}, reason {decoded.reason}" if decoded.reason else decoded.unit
    unit_text += f" on link {status.link}" if status.link >= 0 else ""
    if status.fatal:  # outranks the row
        return XidConditionResult(_UNHEALTHY, f"{unit_text}, fatal")
    if decoded.required is RequiredAction.RESET:
        return XidConditionResult(_UNHEALTHY, f"{unit_text}, error {status.error_status:#x} requires a reset")
    if decoded.required is RequiredAction.UNKNOWN:
        words = f"{status.intr_info:#x} {status.error_status:#x}"
        return XidConditionResult(_unlisted_severity(row), f"{unit_text}, unknown words {words}")
    if decoded.required is RequiredAction.FOLLOW_154 and (facts.has_action or facts.requested_action):
        result = _for_action(facts, requested=_UNHEALTHY, none=_INFO, unknown=_DEGRADED)
        return result._replace(why=f"{unit_text}, {result.why}")
    return XidConditionResult(_INFO, f"{unit_text}, benign", XidAdvice.NOTHING)


def _unlisted_severity(row: XidRow) -> Severity:
    """Return the severity of an NVLink 5 error (XID 144 to 150) without a row in the table of the decoder."""
    return _UNHEALTHY if row.code == 149 else _DEGRADED  # most errors of XID 149 take the link down


def _links_down(_: XidRow, __: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    if facts.links_down is None:
        return XidConditionResult(_DEGRADED, "the links cannot be read")
    if facts.links_down:
        return XidConditionResult(_UNHEALTHY, "links are down")
    return XidConditionResult(_INFO, "no link that the GPU uses is down")


def _reset_pending(_: XidRow, __: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    if facts.remap_pending or facts.page_pending or facts.requested_action is None:
        return XidConditionResult(_UNHEALTHY, "the GPU was not reset yet")
    return _for_action(facts, requested=_UNHEALTHY, none=_INFO, unknown=_UNHEALTHY)


def _dram_of_48(_: XidRow, __: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    return _detail_of_48(facts, bool(facts.remap_pending or facts.remap_failed), "a row is not remapped yet")


def _sram_of_48(_: XidRow, __: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    return _detail_of_48(facts, bool(facts.sram_threshold), "SRAM errors exceed the limit")


def _detail_of_48(facts: XidReadings, worse: bool, why: str) -> XidConditionResult:
    if worse:
        return XidConditionResult(_UNHEALTHY, why)
    if facts.has_root:
        return XidConditionResult(_INFO, "another XID reports the same error", XidAdvice.FIND_ROOT)
    return _for_action(facts, requested=_UNHEALTHY, none=_DEGRADED, unknown=_DEGRADED)


def _capacity_cut(_: XidRow, __: XidOccurrences, facts: XidReadings) -> XidConditionResult:
    result = _for_action(facts, requested=_UNHEALTHY, none=_INFO, unknown=_DEGRADED)
    return (
        result._replace(advice=XidAdvice.FOLLOW_ACTION) if facts.ecc_on and result.advice is None else result
    )


def _cancelled(row: XidRow, fault: XidOccurrences, _: XidReadings) -> XidConditionResult:
    if any(ENDED_XIDS.get(code) == row.code for code in fault.followers):
        return XidConditionResult(_INFO, "its end was reported", XidAdvice.NOTHING)
    return XidConditionResult(_DEGRADED)


CONDITION_FUNCTIONS: Final[dict[XidCondition, _ConditionFunction]] = {
    XidCondition.PLAIN: _plain,
    XidCondition.ALWAYS_DEGRADED: lambda *_: XidConditionResult(_DEGRADED),
    # a requested action is a finding of its own, so such an XID does not make the device Unhealthy
    XidCondition.RETIRED: _by_action(requested=_DEGRADED, none=_INFO, unknown=_DEGRADED),
    XidCondition.UNLISTED: _by_action(requested=_DEGRADED, none=_INFO, unknown=_DEGRADED),
    XidCondition.FOLLOWER: _follower,
    XidCondition.RECOVERY_ACTION: _by_action(requested=_UNHEALTHY, none=_INFO, unknown=_DEGRADED),
    XidCondition.REQUESTED_ONLY: _by_action(requested=_DEGRADED, none=_INFO, unknown=_INFO),
    XidCondition.ANNOUNCES: _announces,
    XidCondition.STUCK: _stuck,
    XidCondition.SAME_PLACE: _same_place,
    XidCondition.ACROSS_WORKLOADS: _across_workloads,
    XidCondition.WITH_REPLAYS: _with_replays,
    XidCondition.ON_REPEAT: lambda _, fault, __: _if_recurring(fault, "it recurred within a day"),
    XidCondition.REMAP_PENDING: _remap_pending,
    XidCondition.CONTAINED: _contained,
    XidCondition.REMAP_FAILED: _remap_failed,
    XidCondition.LOST_AGAIN: _lost_again,
    XidCondition.LINK_REGISTERS: _link_registers,
    XidCondition.LINK_WORDS: _link_words,
    XidCondition.LINKS_DOWN: _links_down,
    XidCondition.RESET_PENDING: _reset_pending,
    XidCondition.DRAM_OF_48: _dram_of_48,
    XidCondition.SRAM_OF_48: _sram_of_48,
    XidCondition.CAPACITY_CUT: _capacity_cut,
    XidCondition.CANCELLED: _cancelled,
}
"""Function that decides the severity of an XID, by the XidCondition in the XID's table row."""

_OVERRIDES: Final = {
    XidOverride.IGNORE: Severity.OK,
    XidOverride.INFO: Severity.INFO,
    XidOverride.DEGRADED: Severity.DEGRADED,
    XidOverride.UNHEALTHY: Severity.UNHEALTHY,
}


def decide_xid(
    row: XidRow, fault: XidOccurrences, facts: XidReadings, override: XidOverride | None = None
) -> FaultDecision:
    """Decide the severity, evidence, advice, repair and cure (the end) of one XID on one GPU or MIG instance.

    Args:
        override: Severity that the configuration sets for the XID, which outranks all else; None: not set.

    Returns:
        Decision. With severity OK, the configuration ignores the XID. The evidence has no counts and no
        times, so that it does not change with each occurrence.
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
    """Return the advice on an XID and the repair of the XID.

    If the repair is a reset, a reload of the driver or a reboot, a recovery action that the driver requests
    replaces it. Other repairs, such as a replacement of the hardware, stay.
    """
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
    """Decide the severity, evidence, advice, repair and end of an SXid. The decision is for all GPUs.

    Args:
        line: Kernel log line of the SXid; None: the line was overwritten.
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
