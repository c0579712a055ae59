"""The conditions of the XID table: what each makes of a fault and of its device's state.

One function each, named as the condition is; agent.health.gpu.xid.words says what they are for.

The driver's recovery action outranks the table wherever the table leaves room. It is field 230 or, where that
cannot be read, what the newest XID 154 announced. A reading that is missing never counts as good news.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from agent.health.gpu.xid import nvlink4, nvlink5
from agent.health.gpu.xid.facts import XidFacts, XidFault, announced
from agent.health.gpu.xid.nvlink4 import Bits
from agent.health.gpu.xid.nvlink5 import Nvlink5Status, Remedy
from agent.health.gpu.xid.recovery import RecoveryAction
from agent.health.gpu.xid.table import CANCELS
from agent.health.gpu.xid.words import Advice, Condition, Mark, XidRow
from agent.model.faults import Cure
from agent.model.health import Blame, Severity

REPEATS: Final = 2
"""Bursts within a day that are more than chance."""
STORM: Final = 10
"""Contained memory errors that are too many, in however few bursts."""


class Ruling(NamedTuple):
    """What a condition makes of it; None: as the row says."""

    severity: Severity
    why: str = ""
    advice: str | None = None
    blame: Blame | None = None
    cure: Cure | None = None


_INFO, _DEGRADED, _UNHEALTHY = Severity.INFO, Severity.DEGRADED, Severity.UNHEALTHY


def _by_action(facts: XidFacts, asked: Severity, none: Severity, unknown: Severity) -> Ruling:
    """By the recovery action: one is asked for, none is, nobody can say."""
    action = facts.asked
    if action is None:
        return Ruling(unknown, f"recovery action {'unreadable' if facts.has_action else 'not supported'}")
    if action is RecoveryAction.NONE:
        return Ruling(none, "no recovery action is asked for")
    return Ruling(asked, f"recovery action: {action.text}", action.advice)


def _plain(row: XidRow, _: XidFault, __: XidFacts) -> Ruling:
    return Ruling(_UNHEALTHY if row.mark is Mark.ALWAYS else _INFO)


def _warns(_: XidRow, __: XidFault, ___: XidFacts) -> Ruling:
    return Ruling(_DEGRADED)


def _not_expected(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    # an action that is asked for is a finding of its own: the code alone makes no device Unhealthy
    return _by_action(facts, asked=_DEGRADED, none=_INFO, unknown=_DEGRADED)


def _follower(_: XidRow, fault: XidFault, __: XidFacts) -> Ruling:
    roots = sorted({line.root for line in fault.details if line.root})
    return Ruling(_INFO, "after XID " + ", ".join(map(str, roots)) if roots else "")


def _defers(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    return _by_action(facts, asked=_UNHEALTHY, none=_INFO, unknown=_DEGRADED)


def _asks(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    return _by_action(facts, asked=_DEGRADED, none=_INFO, unknown=_INFO)


def _announces(_: XidRow, fault: XidFault, facts: XidFacts) -> Ruling:
    if facts.action is not None:
        return Ruling(_INFO, f"recovery action: {facts.action.text}")
    action = announced(fault.details)
    if action is None:
        return Ruling(_DEGRADED, "which one is not known")
    return _by_action(XidFacts(announced=action), asked=_UNHEALTHY, none=_INFO, unknown=_DEGRADED)


def _stuck(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    return _by_action(
        facts, asked=_UNHEALTHY, none=_INFO, unknown=_DEGRADED if facts.has_action else _UNHEALTHY
    )


def _suspect(why: str) -> Ruling:
    """What looks like a program's fault may be the hardware's."""
    return Ruling(_DEGRADED, why, Advice.DIAGNOSE, Blame.HARDWARE)


def _same_place(_: XidRow, fault: XidFault, __: XidFacts) -> Ruling:
    places = {line.place for line in fault.details if line.place}
    if fault.bursts < REPEATS or len(places) != 1:
        return Ruling(_INFO)
    place = places.pop()
    return _suspect(f"each time on GPC {place.gpc}, TPC {place.tpc}")


def _across_workloads(_: XidRow, fault: XidFault, __: XidFacts) -> Ruling:
    if fault.bursts < REPEATS or len(fault.pids) < REPEATS:
        return Ruling(_INFO)
    return _suspect("different processes met it within a day")


def _with_replays(_: XidRow, fault: XidFault, facts: XidFacts) -> Ruling:
    if fault.bursts < REPEATS or not facts.replays_growing:
        return Ruling(_INFO)
    return _suspect("it comes back, and the PCIe link replays packets")


def _on_repeat(_: XidRow, fault: XidFault, __: XidFacts) -> Ruling:
    if fault.bursts < REPEATS:
        return Ruling(_INFO)
    return _suspect("it came back within a day")


def _remap_pending(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    if not (facts.remap_pending or facts.page_pending):
        return Ruling(_DEGRADED)
    ruling = _by_action(facts, asked=_UNHEALTHY, none=_DEGRADED, unknown=_DEGRADED)
    return ruling._replace(why=f"replacement pending, {ruling.why}")


def _contained(_: XidRow, fault: XidFault, facts: XidFacts) -> Ruling:
    if facts.remap_pending:
        return Ruling(_UNHEALTHY, "a row waits for its replacement")
    if facts.asked:
        return _by_action(facts, asked=_UNHEALTHY, none=_DEGRADED, unknown=_DEGRADED)
    if fault.bursts >= REPEATS or fault.times >= STORM:
        return Ruling(_UNHEALTHY, "it comes again and again")
    return Ruling(_DEGRADED, advice=Advice.WATCH)


def _remap_failed(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    if not facts.remap_failed:
        return Ruling(_UNHEALTHY)
    return Ruling(_UNHEALTHY, "rows can no longer be replaced", Advice.REPLACE, cure=Cure.REPLACE)


def _lost_again(_: XidRow, fault: XidFault, __: XidFacts) -> Ruling:
    if fault.bursts < REPEATS:
        return Ruling(_UNHEALTHY)
    return Ruling(_UNHEALTHY, "it came back within a day", Advice.CHECK_SEATING)


def _link_registers(_: XidRow, fault: XidFault, facts: XidFacts) -> Ruling:
    links = [line.nvlink4 for line in fault.details if line.nvlink4]
    worst = max(links, key=lambda link: nvlink4.grade(link.registers), default=None)
    if worst and nvlink4.grade(worst.registers) is Bits.HARDWARE:
        registers = " ".join(f"{register:#x}" for register in worst.registers)
        return Ruling(_UNHEALTHY, f"link {worst.link}, registers {registers}")
    if facts.links_down:
        return Ruling(_UNHEALTHY, "links are down")
    if worst is None or nvlink4.grade(worst.registers) is Bits.NONE:
        return _by_action(facts, asked=_UNHEALTHY, none=_DEGRADED, unknown=_DEGRADED)
    if nvlink4.grade(worst.registers) is Bits.SYMPATHETIC and not facts.has_root:
        return Ruling(_UNHEALTHY, f"link {worst.link}, the echo of a fault that was not seen")
    return Ruling(_INFO, f"link {worst.link}, benign")


def _link_words(row: XidRow, fault: XidFault, facts: XidFacts) -> Ruling:
    rulings = [_one_link_word(row, line.nvlink5, facts) for line in fault.details if line.nvlink5]
    if rulings:
        return max(rulings, key=lambda ruling: ruling.severity)
    if row.mark is Mark.NEVER:
        return Ruling(_INFO)
    ruling = _by_action(facts, asked=_UNHEALTHY, none=_no_row(row), unknown=_no_row(row))
    return ruling._replace(why=f"no line of the kernel log tells which error, {ruling.why}")


def _one_link_word(row: XidRow, status: Nvlink5Status, facts: XidFacts) -> Ruling:
    decoded = nvlink5.decode(row.code, status)
    what = f"{decoded.unit}, reason {decoded.reason}" if decoded.reason else decoded.unit
    what += f" on link {status.link}" if status.link >= 0 else ""
    if status.fatal:  # the driver's own word, even where the row asks for nothing
        return Ruling(_UNHEALTHY, f"{what}, fatal")
    if decoded.remedy is Remedy.RESET:
        return Ruling(_UNHEALTHY, f"{what}, error {status.error_status:#x} asks for a reset")
    if decoded.remedy is Remedy.UNKNOWN:
        words = f"{status.intr_info:#x} {status.error_status:#x}"
        return Ruling(_no_row(row), f"{what}, unknown words {words}")
    if decoded.remedy is Remedy.FOLLOW_154 and (facts.has_action or facts.asked):
        ruling = _by_action(facts, asked=_UNHEALTHY, none=_INFO, unknown=_DEGRADED)
        return ruling._replace(why=f"{what}, {ruling.why}")
    return Ruling(_INFO, f"{what}, benign", Advice.NOTHING)


def _no_row(row: XidRow) -> Severity:
    """What an error without a row is worth: most rows of XID 149 take the link down, of the others few do."""
    return _UNHEALTHY if row.code == 149 else _DEGRADED


def _links_down(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    if facts.links_down is None:
        return Ruling(_DEGRADED, "the links cannot be read")
    if facts.links_down:
        return Ruling(_UNHEALTHY, "links are down")
    return Ruling(_INFO, "every link is up")


def _reset_pending(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    if facts.remap_pending or facts.page_pending or facts.asked is None:
        return Ruling(_UNHEALTHY, "its reset has not been seen")
    return _by_action(facts, asked=_UNHEALTHY, none=_INFO, unknown=_UNHEALTHY)


def _dram_of_48(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    return _detail_of_48(facts, bool(facts.remap_pending or facts.remap_failed), "a row is not replaced yet")


def _sram_of_48(_: XidRow, __: XidFault, facts: XidFacts) -> Ruling:
    return _detail_of_48(facts, bool(facts.sram_threshold), "SRAM has more errors than it may")


def _detail_of_48(facts: XidFacts, worse: bool, why: str) -> Ruling:
    if worse:
        return Ruling(_UNHEALTHY, why)
    if facts.has_root:
        return Ruling(_INFO, "detail of another XID", Advice.FIND_ROOT)
    return _by_action(facts, asked=_UNHEALTHY, none=_DEGRADED, unknown=_DEGRADED)


def _capacity_cut(row: XidRow, fault: XidFault, facts: XidFacts) -> Ruling:
    ruling = _defers(row, fault, facts)
    return ruling._replace(advice=Advice.FOLLOW_ACTION) if facts.ecc_on and ruling.advice is None else ruling


def _cancelled(row: XidRow, fault: XidFault, _: XidFacts) -> Ruling:
    if any(CANCELS.get(code) == row.code for code in fault.followers):
        return Ruling(_INFO, "over since", Advice.NOTHING)
    return Ruling(_DEGRADED)


_Condition = Callable[[XidRow, XidFault, XidFacts], Ruling]
RULINGS: Final[dict[Condition, _Condition]] = {
    Condition.PLAIN: _plain,
    Condition.WARNS: _warns,
    Condition.RETIRED: _not_expected,
    Condition.UNLISTED: _not_expected,
    Condition.FOLLOWER: _follower,
    Condition.DEFERS: _defers,
    Condition.ASKS: _asks,
    Condition.ANNOUNCES: _announces,
    Condition.STUCK: _stuck,
    Condition.SAME_PLACE: _same_place,
    Condition.ACROSS_WORKLOADS: _across_workloads,
    Condition.WITH_REPLAYS: _with_replays,
    Condition.ON_REPEAT: _on_repeat,
    Condition.REMAP_PENDING: _remap_pending,
    Condition.CONTAINED: _contained,
    Condition.REMAP_FAILED: _remap_failed,
    Condition.LOST_AGAIN: _lost_again,
    Condition.LINK_REGISTERS: _link_registers,
    Condition.LINK_WORDS: _link_words,
    Condition.LINKS_DOWN: _links_down,
    Condition.RESET_PENDING: _reset_pending,
    Condition.DRAM_OF_48: _dram_of_48,
    Condition.SRAM_OF_48: _sram_of_48,
    Condition.CAPACITY_CUT: _capacity_cut,
    Condition.CANCELLED: _cancelled,
}
"""By condition; every one is here."""
