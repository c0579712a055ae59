"""NVSwitch errors: scopes in the table, and decisions on lines."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.gpu.xid.decisions import decide_sxid
from agent.health.gpu.xid.log_lines import SxidLine
from agent.health.gpu.xid.row_types import XidAdvice
from agent.health.gpu.xid.sxid_table import SXIDS, SxidRow, SxidScope, sxid_row
from agent.model.health import Severity
from agent.model.persistent_faults import Cure

INFO, DEGRADED, UNHEALTHY = Severity.INFO, Severity.DEGRADED, Severity.UNHEALTHY


def line(code: int, *, fatal: bool, link: int | None = None, detail: str = "") -> SxidLine:
    return SxidLine(3, "0000:c1:00.0", code, fatal, link, detail)


def test_every_known_code_has_one_row_in_its_scope() -> None:
    assert len(SXIDS) == 92
    assert Counter(row.scope for row in SXIDS.values()) == {
        SxidScope.FABRIC: 21,
        SxidScope.PORT: 45,
        SxidScope.NON_FATAL: 26,
    }
    assert list(SXIDS) == sorted(SXIDS)


@pytest.mark.parametrize("code", [11004, 12028, 19084])
def test_known_non_fatal_codes_have_non_fatal_scope(code: int) -> None:
    assert SXIDS[code].scope is SxidScope.NON_FATAL


@pytest.mark.parametrize("row", SXIDS.values(), ids=lambda row: str(row.code))
def test_scope_and_line_severity_decide_every_row(row: SxidRow) -> None:
    fatal = decide_sxid(row, line(row.code, fatal=True, link=4)).severity
    non_fatal = decide_sxid(row, line(row.code, fatal=False, link=4)).severity
    expected = {
        SxidScope.FABRIC: (UNHEALTHY, DEGRADED),
        SxidScope.PORT: (DEGRADED, INFO),
        SxidScope.NON_FATAL: (DEGRADED, INFO),
    }
    assert (fatal, non_fatal) == expected[row.scope]


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


@given(st.integers(0, 99_999), st.booleans(), st.none() | st.integers(0, 99), st.text(max_size=40))
def test_any_switch_line_gets_a_decision(code: int, fatal: bool, link: int | None, detail: str) -> None:
    found = decide_sxid(sxid_row(code), line(code, fatal=fatal, link=link, detail=detail))
    assert found.severity in (INFO, DEGRADED, UNHEALTHY)
    assert (found.cure is Cure.EXPIRES) == (found.severity is INFO)
    assert not fatal or found.severity > INFO  # a fatal error is never silent
    assert found.advice
