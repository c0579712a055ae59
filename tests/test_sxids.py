"""NVSwitch errors: scopes in the table, and decisions on lines."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.gpu.xid.decisions import FaultDecision, decide_sxid
from agent.health.gpu.xid.log_lines import SxidLine, parse_line
from agent.health.gpu.xid.sxid_table import SXIDS, SxidRow, SxidScope, sxid_row
from agent.health.gpu.xid.xid_table import XidAdvice
from agent.model.health import Severity
from agent.model.persistent_faults import Cure

INFO, DEGRADED, UNHEALTHY = Severity.INFO, Severity.DEGRADED, Severity.UNHEALTHY


SWITCH_LINE = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): {}"


def line(code: int, *, fatal: bool | None, link: int | None = None, detail: str = "") -> SxidLine:
    return SxidLine(3, "0000:c1:00.0", code, fatal, link, detail)


def decision_on(text: str) -> FaultDecision:
    parsed = parse_line(SWITCH_LINE.format(text))
    assert isinstance(parsed, SxidLine)
    return decide_sxid(sxid_row(parsed.code), parsed)


def test_every_known_code_has_one_row_in_its_scope() -> None:
    assert len(SXIDS) == 173
    assert Counter(row.scope for row in SXIDS.values()) == {
        SxidScope.FABRIC: 26,
        SxidScope.PORT: 89,
        SxidScope.SWITCH: 22,
        SxidScope.NON_FATAL: 36,
    }
    assert list(SXIDS) == sorted(SXIDS)


@pytest.mark.parametrize("code", [11004, 12028, 19084])
def test_known_non_fatal_codes_have_non_fatal_scope(code: int) -> None:
    assert SXIDS[code].scope is SxidScope.NON_FATAL


@pytest.mark.parametrize(
    "row", [row for row in SXIDS.values() if row.states_severity], ids=lambda row: str(row.code)
)
def test_scope_and_line_severity_decide_every_row(row: SxidRow) -> None:
    fatal = decide_sxid(row, line(row.code, fatal=True, link=4)).severity
    non_fatal = decide_sxid(row, line(row.code, fatal=False, link=4)).severity
    expected = {
        SxidScope.FABRIC: (UNHEALTHY, DEGRADED),
        SxidScope.PORT: (DEGRADED, INFO),
        SxidScope.SWITCH: (DEGRADED, INFO),
        SxidScope.NON_FATAL: (DEGRADED, INFO),
    }
    assert (fatal, non_fatal) == expected[row.scope]


@pytest.mark.parametrize(
    ("text", "severity", "evidence"),
    [
        (
            "10006, TSENSE OVERT Threshold reached. Shutting Down",
            UNHEALTHY,
            "the switch shuts down: too hot: NVSwitch 0 at 0000:05:00.0: TSENSE OVERT Threshold reached. "
            "Shutting Down",
        ),
        (
            "10004, PMGR OVERT Threshold reached. Shutting Down",
            UNHEALTHY,
            "the switch shuts down: too hot: NVSwitch 0 at 0000:05:00.0: PMGR OVERT Threshold reached. "
            "Shutting Down",
        ),
        (
            "10004, NVSWITCH Temperature 95C | TSENSE WARN Threshold 90C",
            DEGRADED,
            "the switch is too hot and slows down: NVSwitch 0 at 0000:05:00.0: NVSWITCH Temperature 95C | "
            "TSENSE WARN Threshold 90C",
        ),
        (
            "26006, SOE HALTED",
            DEGRADED,
            "switch controller halted: NVSwitch 0 at 0000:05:00.0: SOE HALTED",
        ),
        (
            "27005, Module 3 faulty",
            DEGRADED,
            "cable module is faulty: NVSwitch 0 at 0000:05:00.0: Module 3 faulty",
        ),
        (
            "28003, OSFP Thermal Overt Activated",
            DEGRADED,
            "optical modules are above their highest temperature: NVSwitch 0 at 0000:05:00.0: OSFP Thermal "
            "Overt Activated",
        ),
        (
            "31999, of a driver to come",
            DEGRADED,
            "unknown to this version: NVSwitch 0 at 0000:05:00.0: of a driver to come",
        ),
        (
            "12021, Correctable, Link 07 ECC",
            INFO,
            "corrected one-bit ECC errors: NVSwitch 0 at 0000:05:00.0, link 7, Non-fatal",
        ),
        (
            "26003, Fatal, Failed to post command to SOE. Data {0x00000001}",
            UNHEALTHY,
            "switch controller takes no commands: NVSwitch 0 at 0000:05:00.0, Fatal",
        ),
    ],
)
def test_line_without_link_is_decided_by_row_and_severity(
    text: str, severity: Severity, evidence: str
) -> None:
    found = decision_on(text)
    assert (found.severity, found.evidence) == (severity, evidence)


def test_renumbered_code_with_severity_has_meaning_of_older_drivers() -> None:
    found = decision_on("28002, Fatal, Link 46 MC TS tag store ECC DBE")
    assert found.severity is DEGRADED
    assert found.evidence.startswith("Link 46 MC TS tag store ECC DBE: NVSwitch 0 at 0000:05:00.0, link 46")


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("12020, Severity 1 Engine instance 04 Sub-engine instance 00", UNHEALTHY),
        ("12033, Severity 1 Engine instance 00 Sub-engine instance 00", DEGRADED),
        ("12020, Severity 0 Engine instance 04 Sub-engine instance 00", DEGRADED),
        ("22013, Severity 0 Engine instance 60 Sub-engine instance 00", INFO),
        ("12020, Data {0x00000001, 0x00000000}", DEGRADED),
        ("20034, Data {0x00000001, 0x00000000}", DEGRADED),
    ],
)
def test_companion_line_alone_has_its_own_severity(text: str, severity: Severity) -> None:
    assert decision_on(text).severity is severity


def test_unlisted_fatal_error_without_port_is_unhealthy() -> None:
    for code in (28006, 20009):
        assert decide_sxid(sxid_row(code), line(code, fatal=True)).severity is UNHEALTHY
        assert decide_sxid(sxid_row(code), line(code, fatal=True, link=0)).severity is DEGRADED
        assert decide_sxid(sxid_row(code), line(code, fatal=False)).severity is INFO


def test_unlisted_code_has_evidence_from_driver_text() -> None:
    found = decide_sxid(sxid_row(28006), line(28006, fatal=False, link=46, detail="Link 46 MC TS crumbstore"))
    assert found.evidence == "Link 46 MC TS crumbstore: NVSwitch 3 at 0000:c1:00.0, link 46, Non-fatal"


def test_evidence_names_switch_link_and_severity() -> None:
    found = decide_sxid(sxid_row(20034), line(20034, fatal=True, link=30))
    assert found.evidence == "link training fault while up: NVSwitch 3 at 0000:c1:00.0, link 30, Fatal"
    assert found.advice == XidAdvice.CHECK_LINKS


def test_code_without_line_is_decided_by_scope() -> None:
    severities = {code: decide_sxid(sxid_row(code), None).severity for code in (12020, 20034, 20009, 28006)}
    assert severities == {12020: UNHEALTHY, 20034: DEGRADED, 20009: INFO, 28006: DEGRADED}


@given(
    st.integers(0, 99_999), st.none() | st.booleans(), st.none() | st.integers(0, 99), st.text(max_size=40)
)
def test_any_switch_line_gets_a_decision(
    code: int, fatal: bool | None, link: int | None, detail: str
) -> None:
    found = decide_sxid(sxid_row(code), line(code, fatal=fatal, link=link, detail=detail))
    assert found.severity in (INFO, DEGRADED, UNHEALTHY)
    assert (found.cure is Cure.EXPIRES) == (found.severity is INFO)
    assert not fatal or found.severity > INFO  # a fatal error is never silent
    assert found.advice
