"""Decisions on XIDs: every row in every state of the driver, and each condition at its limit."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.gpu.xid.decisions import (
    CONDITION_FUNCTIONS,
    MIN_BURSTS,
    MIN_STORM_ERRORS,
    FaultDecision,
    XidOccurrences,
    XidReadings,
    announced_action,
    decide_xid,
)
from agent.health.gpu.xid.log_lines import XidLine, parse_line
from agent.health.gpu.xid.xid_table import XIDS, RecoveryAction, XidAdvice, XidCondition, XidEffect, xid_row
from agent.model.health import Blame, Severity, XidOverride
from agent.model.persistent_faults import Cure

INFO, DEGRADED, UNHEALTHY = Severity.INFO, Severity.DEGRADED, Severity.UNHEALTHY
LETTERS: Final = {"I": INFO, "D": DEGRADED, "U": UNHEALTHY}

CALM: Final = XidReadings(
    action=RecoveryAction.NONE,
    has_action=True,
    remap_pending=False,
    remap_failed=False,
    page_pending=False,
    sram_threshold=False,
    links_down=False,
    ecc_on=False,
)
ASKED: Final = CALM._replace(action=RecoveryAction.GPU_RESET)
OLD: Final = XidReadings()
"""A driver without field 230, and nothing else can be read either."""
BLIND: Final = XidReadings(has_action=True)
"""Field 230 is there, and cannot be read now."""

SEEN_ONCE: Final = {
    # one fault that only NVML reported: the driver requests nothing, a reset, is OLD, is BLIND
    **dict.fromkeys((38, 44, 68), "IDII"),
    **dict.fromkeys((157, 161, 163, 164, 165), "DDDD"),
    63: "DDDD",
    **dict.fromkeys((74, 94, 144, 145, 146, 171, 172), "DUDD"),
    109: "IUUD",
    **dict.fromkeys((142, 159, 166, 168, 170), "IUDD"),
    149: "UUUU",
    154: "IIDD",
    155: "IIDD",
    156: "IUUU",
}
BY_MARK: Final = {XidEffect.ALWAYS: "UUUU", XidEffect.CONDITIONAL: "IDDD", XidEffect.NEVER: "IIII"}


def decide_for(
    code: int,
    facts: XidReadings = CALM,
    *texts: str,
    times: int = 1,
    bursts: int = 1,
    processes: int = 0,
    followers: frozenset[int] = frozenset(),
) -> FaultDecision:
    """Return the decision on one XID; ``texts`` are the details of its kernel log lines."""
    return decide_xid(
        xid_row(code), XidOccurrences(times, bursts, lines(code, *texts), processes, followers), facts
    )


def lines(code: int, *texts: str) -> tuple[XidLine, ...]:
    found = [parse_line(f"NVRM: Xid (PCI:0000:3b:00): {code}, {text}") for text in texts]
    return tuple(line for line in found if isinstance(line, XidLine))


@pytest.mark.parametrize("code", XIDS)
def test_every_row_has_expected_severities(code: int) -> None:
    row = xid_row(code)
    letters = SEEN_ONCE.get(code) or BY_MARK[row.effect]
    found = [decide_for(code, facts).severity for facts in (CALM, ASKED, OLD, BLIND)]
    assert found == [LETTERS[letter] for letter in letters]


def test_every_condition_has_a_function_and_a_row() -> None:
    assert set(CONDITION_FUNCTIONS) == set(XidCondition)
    assert {row.condition for row in XIDS.values()} | {XidCondition.UNLISTED} == set(XidCondition)


@pytest.mark.parametrize("code", [0, 174, 999])
def test_unlisted_code_is_degraded_unless_action_is_none(code: int) -> None:
    found = [decide_for(code, facts).severity for facts in (CALM, ASKED, OLD, BLIND)]
    assert found == [INFO, DEGRADED, DEGRADED, DEGRADED]


FACTS: Final = st.builds(
    XidReadings,
    action=st.none() | st.sampled_from(RecoveryAction) | st.builds(RecoveryAction, st.integers(8, 99)),
    has_action=st.booleans(),
    announced=st.none() | st.sampled_from(RecoveryAction),
    remap_pending=st.none() | st.booleans(),
    remap_failed=st.none() | st.booleans(),
    page_pending=st.none() | st.booleans(),
    sram_threshold=st.none() | st.booleans(),
    links_down=st.none() | st.booleans(),
    replays_growing=st.booleans(),
    ecc_on=st.none() | st.booleans(),
    has_root=st.booleans(),
)
DETAILS: Final = st.sampled_from(
    [
        "",
        "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)",
        "SAW_MVB Fatal XC0 i0 Link 04 (0x00000001 0x00000002)",
        "RLW_REMAP Nonfatal XC0 i0 Link -1 (0x00000004 0x00000001)",
        "NETIR_LINK_DOWN Nonfatal XC0 i0 Link 00 (0x3f000011 0x00000000)",
        "NVLink: fatal error detected on link 14(0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
        "pid=7, name=a, Graphics SM Warp Exception on (GPC 7, TPC 2, SM 0): Out Of Range Address",
        "pid=7, name=a, Ch 00000001 caused by previous Xid 149",
    ]
)
FAULTS: Final = st.tuples(
    st.integers(1, 175), st.lists(DETAILS, max_size=4), st.integers(1, 10_000), st.integers(1, 50)
)


@given(FAULTS, FACTS, st.none() | st.sampled_from(XidOverride))
def test_decision_is_complete_for_any_facts(
    seen: tuple[int, list[str], int, int], facts: XidReadings, override: XidOverride | None
) -> None:
    code, texts, times, bursts = seen
    row = xid_row(code)
    fault = XidOccurrences(times, bursts, lines(code, *texts), 2, frozenset({45}))
    found = decide_xid(row, fault, facts, override)
    assert found.evidence.startswith(row.meaning)
    assert found.advice
    assert (found.cure is Cure.EXPIRES) == (found.severity <= INFO)
    if override is None:
        assert found.severity in (INFO, DEGRADED, UNHEALTHY)
        assert found.severity is UNHEALTHY or row.effect is not XidEffect.ALWAYS
        assert found.severity is not UNHEALTHY or row.effect is not XidEffect.NEVER
        assert found.severity is not UNHEALTHY or row.condition is not XidCondition.RETIRED


@given(st.integers(1, 175), FACTS, st.integers(MIN_STORM_ERRORS, 10_000))
def test_evidence_is_independent_of_number_of_occurrences(code: int, facts: XidReadings, times: int) -> None:
    assert decide_for(code, facts, times=times) == decide_for(code, facts, times=times + 1)


@pytest.mark.parametrize("override", XidOverride)
@pytest.mark.parametrize("code", [31, 45, 79, 57, 999])
def test_configured_severity_wins_and_is_named(code: int, override: XidOverride) -> None:
    wanted = {"ignore": Severity.OK, "info": INFO, "degraded": DEGRADED, "unhealthy": UNHEALTHY}
    found = decide_xid(xid_row(code), XidOccurrences(bursts=9), ASKED, override)
    assert found.severity is wanted[override]
    assert f"{override} by configuration" in found.evidence


# --- the recovery action


def test_retired_code_alone_is_never_unhealthy() -> None:
    assert decide_for(57, ASKED).severity is DEGRADED
    assert "gpu reset" in decide_for(57, ASKED).evidence


def test_advice_is_that_of_requested_action() -> None:
    found = decide_for(142, CALM._replace(action=RecoveryAction.NODE_REBOOT))
    assert found.advice == RecoveryAction.NODE_REBOOT.advice


def test_action_of_newer_driver_counts_as_requested() -> None:
    assert decide_for(142, CALM._replace(action=RecoveryAction(31))).severity is UNHEALTHY


def test_announced_action_replaces_unreadable_field() -> None:
    assert decide_for(142, BLIND._replace(announced=RecoveryAction.GPU_RESET)).severity is UNHEALTHY
    assert decide_for(142, BLIND._replace(announced=RecoveryAction.NONE)).severity is INFO


def test_readable_field_outranks_announced_action() -> None:
    assert decide_for(142, CALM._replace(announced=RecoveryAction.GPU_RESET)).severity is INFO


def test_unreadable_action_is_not_none() -> None:
    assert decide_for(142, BLIND).severity > decide_for(142, CALM).severity
    assert decide_for(109, OLD).severity is UNHEALTHY  # a driver without the field is taken at its worst


# --- XID 154

TO_REBOOT: Final = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
TO_NONE: Final = "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)"


def test_xid_154_has_severity_of_its_action() -> None:
    found = decide_for(154, OLD, TO_REBOOT)
    assert found.severity is UNHEALTHY
    assert found.advice == RecoveryAction.NODE_REBOOT.advice
    assert found.cure is Cure.ACTION


def test_xid_154_none_clears_earlier_action_only() -> None:
    assert decide_for(154, OLD, TO_REBOOT, TO_NONE).severity is INFO
    assert decide_for(154, OLD, TO_NONE, TO_REBOOT).severity is UNHEALTHY
    assert announced_action(lines(154, TO_REBOOT, TO_NONE)) is RecoveryAction.NONE
    assert announced_action(()) is None


def test_xid_154_is_info_while_field_is_readable() -> None:
    for facts in (CALM, ASKED):
        found = decide_for(154, facts, TO_REBOOT)
        assert found.severity is INFO
        assert facts.action is not None
        assert facts.action.text in found.evidence


def test_xid_154_with_unknown_text_is_degraded() -> None:
    assert decide_for(154, OLD, "something else").severity is DEGRADED


# --- followers


@pytest.mark.parametrize("facts", [CALM, ASKED, OLD, BLIND, CALM._replace(has_root=True)])
def test_xid_45_is_always_info(facts: XidReadings) -> None:
    assert decide_for(45, facts, times=672, bursts=40).severity is INFO


def test_xid_45_names_its_root() -> None:
    text = "pid=1, name=a, Ch 1 caused by previous Xid 149"
    assert decide_for(45, CALM, text).evidence.endswith("after XID 149")


def test_xids_171_and_172_follow_48() -> None:
    root = ASKED._replace(has_root=True)
    assert decide_for(171, root).severity is INFO
    assert decide_for(172, root).severity is INFO
    assert decide_for(171, root._replace(remap_pending=True)).severity is UNHEALTHY
    assert decide_for(171, CALM._replace(remap_failed=True)).severity is UNHEALTHY
    assert decide_for(172, root._replace(sram_threshold=True)).severity is UNHEALTHY
    assert decide_for(172, CALM).severity is DEGRADED  # alone it is a memory error still


def test_xid_162_ends_163() -> None:
    assert decide_for(163).severity is DEGRADED
    assert decide_for(163, followers=frozenset({162})).severity is INFO
    assert decide_for(163, followers=frozenset({164})).severity is DEGRADED


# --- program faults that hardware may cause

PLACE: Final = "pid=1, name=a, Graphics SM Warp Exception on (GPC {}, TPC {}, SM 0): Out Of Range Address"
ESR: Final = "pid=1, name=a, Graphics Exception: ESR 0x57c730=0xc04000b 0x57c734=0x24"


def test_xid_13_is_suspect_at_same_location() -> None:
    found = decide_for(13, CALM, PLACE.format(7, 2), ESR, PLACE.format(7, 2), bursts=MIN_BURSTS)
    assert (found.severity, found.blame, found.advice) == (DEGRADED, Blame.HARDWARE, XidAdvice.DIAGNOSE)
    assert "GPC 7, TPC 2" in found.evidence
    assert found.cure is Cure.RESET  # not forgotten in ten minutes


def test_xid_13_otherwise_blames_program() -> None:
    here, there = PLACE.format(7, 2), PLACE.format(7, 3)
    for found in (
        decide_for(13, CALM, here, here, bursts=MIN_BURSTS - 1),
        decide_for(13, CALM, here, there, bursts=MIN_BURSTS),
        decide_for(13, CALM, ESR, bursts=MIN_BURSTS),
        decide_for(13, CALM, bursts=MIN_BURSTS),
    ):
        assert (found.severity, found.blame, found.cure) == (INFO, Blame.WORKLOAD, Cure.EXPIRES)


def test_xid_31_is_suspect_only_for_several_processes_and_bursts() -> None:
    assert decide_for(31, CALM, bursts=MIN_BURSTS, processes=2).severity is DEGRADED
    assert decide_for(31, CALM, bursts=MIN_BURSTS, processes=1).severity is INFO
    assert decide_for(31, CALM, bursts=MIN_BURSTS - 1, processes=2).severity is INFO
    assert decide_for(31, CALM, bursts=MIN_BURSTS).severity is INFO  # the processes are not known


def test_xid_32_is_suspect_only_if_repeated_with_replays() -> None:
    replays = CALM._replace(replays_growing=True)
    assert decide_for(32, replays, bursts=MIN_BURSTS).severity is DEGRADED
    assert decide_for(32, replays, bursts=MIN_BURSTS - 1).severity is INFO
    assert decide_for(32, CALM, bursts=MIN_BURSTS).severity is INFO


def test_xid_80_is_suspect_if_repeated() -> None:
    assert decide_for(80, bursts=MIN_BURSTS - 1).severity is INFO
    assert decide_for(80, bursts=MIN_BURSTS).severity is DEGRADED


def test_repeated_plain_program_faults_stay_info() -> None:
    assert decide_for(43, ASKED, times=10_000, bursts=50).severity is INFO


# --- memory


def test_xid_63_needs_pending_remap_and_requested_action() -> None:
    for facts, severity in ((ASKED, UNHEALTHY), (CALM, DEGRADED), (OLD, DEGRADED)):
        assert decide_for(63, facts._replace(remap_pending=True)).severity is severity
        assert decide_for(63, facts._replace(page_pending=True)).severity is severity


def test_xid_64_needs_replacement_if_remapping_failed() -> None:
    assert decide_for(64).cure is Cure.RESET
    found = decide_for(64, CALM._replace(remap_failed=True))
    assert (found.severity, found.advice, found.cure) == (UNHEALTHY, XidAdvice.REPLACE, Cure.REPLACE)


def test_xid_with_advice_to_replace_the_gpu_ends_with_a_replacement() -> None:
    found = {code: row.cure for code, row in XIDS.items() if row.advice is XidAdvice.PLAN_REPLACE}
    assert found == dict.fromkeys((157, 161, 164, 165), Cure.REPLACE)


def test_xid_94_is_unhealthy_if_pending_requested_or_repeated() -> None:
    assert decide_for(94, CALM).severity is DEGRADED
    assert decide_for(94, CALM._replace(remap_pending=True)).severity is UNHEALTHY
    assert decide_for(94, ASKED).severity is UNHEALTHY
    assert decide_for(94, CALM, bursts=MIN_BURSTS).severity is UNHEALTHY
    assert decide_for(94, CALM, times=MIN_STORM_ERRORS).severity is UNHEALTHY
    assert decide_for(94, CALM, times=MIN_STORM_ERRORS - 1).severity is DEGRADED


def test_xid_156_is_unhealthy_until_reset() -> None:
    assert decide_for(156, CALM).severity is INFO
    assert decide_for(156, CALM._replace(remap_pending=True)).severity is UNHEALTHY
    assert decide_for(156, BLIND).severity is UNHEALTHY
    assert decide_for(156, BLIND).cure is Cure.NOTHING_PENDING


def test_xid_168_advises_ecc_if_off() -> None:
    assert decide_for(168, CALM).advice == XidAdvice.ENABLE_ECC
    assert decide_for(168, CALM._replace(ecc_on=True)).advice == XidAdvice.FOLLOW_ACTION
    assert decide_for(168, ASKED).advice == RecoveryAction.GPU_RESET.advice


def test_repeated_gpu_loss_is_suspect() -> None:
    assert decide_for(79).advice == XidAdvice.REBOOT
    assert decide_for(79, bursts=MIN_BURSTS).advice == XidAdvice.CHECK_SEATING
    assert decide_for(79, bursts=MIN_BURSTS).cure is Cure.REBOOT


# --- links

REGISTERS: Final = "NVLink: fatal error detected on link 14({}, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"


def test_xid_74_is_decided_by_registers() -> None:
    assert decide_for(74, CALM, REGISTERS.format("0x10")).severity is UNHEALTHY
    assert decide_for(74, CALM, REGISTERS.format("0x1")).severity is INFO
    assert decide_for(74, CALM, REGISTERS.format("0x0")).severity is DEGRADED  # explains nothing
    assert decide_for(74, CALM, REGISTERS.format("0x1"), REGISTERS.format("0x10")).severity is UNHEALTHY
    assert "registers 0x10 0x0" in decide_for(74, CALM, REGISTERS.format("0x10")).evidence


def test_sympathetic_xid_74_is_benign_only_with_root() -> None:
    echo = REGISTERS.format("0x2")
    assert decide_for(74, CALM, echo).severity is UNHEALTHY
    assert decide_for(74, CALM._replace(has_root=True), echo).severity is INFO


def test_xid_74_is_unhealthy_while_links_are_down() -> None:
    assert decide_for(74, CALM._replace(links_down=True), REGISTERS.format("0x1")).severity is UNHEALTHY
    assert decide_for(74, CALM._replace(links_down=True)).severity is UNHEALTHY


def test_xid_155_is_info_when_links_are_up() -> None:
    assert decide_for(155, CALM._replace(links_down=True)).severity is UNHEALTHY
    assert decide_for(155, CALM._replace(links_down=True)).cure is Cure.LINKS_UP
    assert decide_for(155, CALM).severity is INFO
    assert decide_for(155, CALM._replace(links_down=None)).severity is DEGRADED


def words(unit: str, word: str, intr_info: int, status: int) -> str:
    return f"{unit} {word} XC0 i0 Link 04 ({intr_info:#010x} {status:#010x} 0x00000000)"


@pytest.mark.parametrize(
    ("code", "text", "severity"),
    [
        (144, words("SAW_MVB", "Nonfatal", 0x1, 0x8), INFO),
        (144, words("SAW_MVB", "Fatal", 0x1, 0x2), UNHEALTHY),
        (144, words("SAW_MVB", "Nonfatal", 0x1, 0x2), UNHEALTHY),  # the row asks for a reset
        (144, words("SAW_MVB", "Fatal", 0x1, 0x8), UNHEALTHY),  # the line says Fatal
        (144, words("SAW_NEW", "Nonfatal", 0x7F, 0x8), DEGRADED),
        (145, words("RLW_RXPIPE", "Nonfatal", 0x0409A0C2, 0x8), INFO),
        (146, words("TLW_CTRL", "Nonfatal", 0x9, 0x4), UNHEALTHY),
        (146, words("TLW_CTRL", "Nonfatal", 0x9, 0x100), DEGRADED),
        (147, words("TREX", "Nonfatal", 0xE, 0x1), INFO),
        (147, words("TREX", "Nonfatal", 0xE, 0x2), DEGRADED),  # no row; its code is never Unhealthy
        (147, words("TREX", "Fatal", 0xE, 0x1), DEGRADED),
        (148, words("NVLPW", "Nonfatal", 0xF, 0x80000000), INFO),
        (149, words("NETIR_LINK_EVT", "Fatal", 0x021425C6, 0x0), UNHEALTHY),
        (149, words("NETIR_BER_EVENT", "Nonfatal", 0x13, 0x1), INFO),
        (149, words("NETIR_LINK_EVT", "Fatal", 0x026001C6, 0x0), UNHEALTHY),  # benign row, fatal word
        (149, words("NETIR_NEW", "Nonfatal", 0x7F, 0x0), UNHEALTHY),
        (149, "in an unknown form", UNHEALTHY),
        (150, words("MSE_WATCHDOG", "Nonfatal", 0x0, 0x0), UNHEALTHY),
    ],
)
def test_nvlink5_line_has_expected_severity(code: int, text: str, severity: Severity) -> None:
    assert decide_for(code, CALM, text).severity is severity


def test_row_that_follows_154_uses_its_action() -> None:
    text = words("RLW_REMAP", "Nonfatal", 0x4, 0x1)
    assert decide_for(145, CALM, text).severity is INFO
    assert decide_for(145, ASKED, text).severity is UNHEALTHY
    assert decide_for(145, BLIND, text).severity is DEGRADED
    assert decide_for(145, BLIND._replace(announced=RecoveryAction.NODE_REBOOT), text).severity is UNHEALTHY
    assert decide_for(145, OLD, text).severity is INFO  # no 154 came with it


def test_worst_of_several_nvlink_errors_counts() -> None:
    benign, reset = words("SAW_MVB", "Nonfatal", 0x1, 0x8), words("SAW_MVB", "Nonfatal", 0x1, 0x2)
    for texts in ((benign, reset), (reset, benign)):
        found = decide_for(144, CALM, *texts)
        assert found.severity is UNHEALTHY
        assert "0x2" in found.evidence
