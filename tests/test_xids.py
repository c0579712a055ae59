"""Table of XIDs: it is complete, its columns are consistent, and its lists match published ones."""

from typing import Final

import pytest

from agent.health.gpu.xid.xid_table import (
    ALWAYS,
    CONDITIONAL,
    ENDED_XIDS,
    NEVER,
    RETIRED,
    XIDS,
    CatalogAnswer,
    XidAdvice,
    XidCondition,
    XidEffect,
    XidRow,
    parse_repairs,
    xid_row,
)
from agent.model.health import Blame
from agent.model.persistent_faults import Cure

UNHEALTHY: Final = {46, 48, 54, 62, 64, 79, 95, 110, 119, 120, 136, 140, 143, 150, 151, 158, 167, 169, 173}
DEPENDS: Final = {63, 74, 94, 109, 142, 144, 145, 146, 149, 154, 155, 156, 159, 166, 168, 170, 171, 172}
DEVICE_PLUGIN_SKIPS: Final = {13, 31, 43, 45, 68, 109}
"""XIDs that NVIDIA's plugins never mark; of these, only 109 is conditional here."""


def codes(rows: tuple[XidRow, ...]) -> set[int]:
    return {row.code for row in rows}


def test_every_code_from_1_to_173_has_one_row() -> None:
    assert list(XIDS) == list(range(1, 174))
    assert len(ALWAYS) + len(CONDITIONAL) + len(NEVER) + len(RETIRED) == 173  # none is in two parts
    assert all(code == row.code for code, row in XIDS.items())


def test_table_parts_have_expected_lengths() -> None:
    assert (len(ALWAYS), len(CONDITIONAL), len(NEVER), len(RETIRED)) == (19, 18, 73, 63)
    assert codes(ALWAYS) == UNHEALTHY
    assert codes(CONDITIONAL) == DEPENDS


def test_each_table_part_has_its_mark() -> None:
    assert {row.effect for row in ALWAYS} == {XidEffect.ALWAYS}
    assert {row.effect for row in CONDITIONAL + RETIRED} == {XidEffect.CONDITIONAL}
    assert {row.effect for row in NEVER} == {XidEffect.NEVER}


def test_xids_skipped_by_vendor_are_never_marked_except_109() -> None:
    assert {code for code in DEVICE_PLUGIN_SKIPS if XIDS[code].effect is not XidEffect.NEVER} == {109}


def test_retired_codes_are_the_unused_ones() -> None:
    assert codes(RETIRED) == {row.code for row in XIDS.values() if row.condition is XidCondition.RETIRED}
    assert {row.condition for row in RETIRED} == {XidCondition.RETIRED}


@pytest.mark.parametrize("row", XIDS.values(), ids=lambda row: str(row.code))
def test_row_is_complete_and_fits_a_line(row: XidRow) -> None:
    assert xid_row(row.code) is row
    assert row.meaning == row.meaning.strip(" .")
    assert 0 < len(row.meaning) <= 60
    assert row.advice
    assert row.blame is not Blame.AGENT


def test_fault_ended_by_program_restart_blames_workload() -> None:
    restart = {row.code for row in NEVER if row.repairs.app_restart is CatalogAnswer.YES}
    assert {row.blame for row in NEVER if row.code in restart} == {Blame.WORKLOAD}
    assert {row.blame for row in ALWAYS} <= {Blame.HARDWARE, Blame.DRIVER}


def test_always_marked_xids_do_not_expire() -> None:
    assert Cure.EXPIRES not in {row.cure for row in ALWAYS + CONDITIONAL + RETIRED}


def test_xid_that_needs_more_than_reset_is_not_cured_by_reset() -> None:
    not_enough = {row.code for row in ALWAYS if row.repairs.gpu_reset is CatalogAnswer.NO}
    assert {XIDS[code].cure for code in not_enough} == {Cure.REBOOT}
    assert XIDS[79].cure is Cure.REBOOT
    assert XIDS[151].cure is Cure.REBOOT


def test_cancelling_xid_is_not_a_fault() -> None:
    for code, cancelled in ENDED_XIDS.items():
        assert XIDS[code].effect is XidEffect.NEVER
        assert XIDS[code].condition is XidCondition.PLAIN
        assert XIDS[cancelled].condition is XidCondition.CANCELLED


def test_unlisted_code_is_not_benign() -> None:
    row = xid_row(999)  # NVML's own "unknown"
    assert row.code == 999
    assert row.effect is XidEffect.CONDITIONAL
    assert row.condition is XidCondition.UNLISTED
    assert row.advice is XidAdvice.FOLLOW_ACTION


def test_four_letters_are_parsed_as_repairs() -> None:
    assert parse_repairs("nmy-") == (
        CatalogAnswer.NO,
        CatalogAnswer.MAYBE,
        CatalogAnswer.YES,
        CatalogAnswer.NOT_NEEDED,
    )
    assert parse_repairs("?t?t") == (
        CatalogAnswer.UNKNOWN,
        CatalogAnswer.BY_TEXT,
        CatalogAnswer.UNKNOWN,
        CatalogAnswer.BY_TEXT,
    )
    with pytest.raises(KeyError):
        parse_repairs("nnnx")
    with pytest.raises(ValueError, match="not enough values"):
        parse_repairs("nny")


def test_engines_of_one_kind_are_numbered_in_order() -> None:
    copy_engines = [39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)]
    assert [XIDS[code].meaning for code in copy_engines] == [f"copy engine {n} fault" for n in range(20)]
    assert [XIDS[code].meaning for code in (68, 83, 84, 88, 89, 96, 97, 98)] == [
        f"video decoder {n} fault" for n in range(8)
    ]
    assert [XIDS[code].meaning for code in (82, *range(99, 106))] == [
        f"JPEG engine {n} fault" for n in range(8)
    ]
