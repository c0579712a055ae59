"""The table of XIDs: it is whole, its columns agree with each other, and its lists are those of the field."""

from typing import Final

import pytest

from agent.health.gpu.xid.table import ALWAYS, CANCELS, CONDITIONAL, NEVER, RETIRED, XIDS, row_of
from agent.health.gpu.xid.words import Advice, Answer, Condition, Grade, Mark, XidClass, XidRow, mends
from agent.model.faults import Cure
from agent.model.health import Blame

UNHEALTHY: Final = {46, 48, 54, 62, 64, 79, 95, 110, 119, 120, 136, 140, 143, 150, 151, 158, 167, 169, 173}
DEPENDS: Final = {63, 74, 94, 109, 142, 144, 145, 146, 149, 154, 155, 156, 159, 166, 168, 170, 171, 172}
DEVICE_PLUGIN_SKIPS: Final = {13, 31, 43, 45, 68, 109}
"""What NVIDIA's own plugins never mark; 109 alone depends on the driver here."""


def codes(rows: tuple[XidRow, ...]) -> set[int]:
    return {row.code for row in rows}


def test_every_code_from_1_to_173_has_one_row() -> None:
    assert list(XIDS) == list(range(1, 174))
    assert len(ALWAYS) + len(CONDITIONAL) + len(NEVER) + len(RETIRED) == 173  # none is in two parts
    assert all(code == row.code for code, row in XIDS.items())


def test_the_parts_of_the_table_are_as_long_as_the_field_knows_them() -> None:
    assert (len(ALWAYS), len(CONDITIONAL), len(NEVER), len(RETIRED)) == (19, 18, 73, 63)
    assert codes(ALWAYS) == UNHEALTHY
    assert codes(CONDITIONAL) == DEPENDS


def test_each_part_holds_its_mark() -> None:
    assert {row.mark for row in ALWAYS} == {Mark.ALWAYS}
    assert {row.mark for row in CONDITIONAL + RETIRED} == {Mark.CONDITIONAL}
    assert {row.mark for row in NEVER} == {Mark.NEVER}


def test_what_the_vendors_plugins_skip_is_never_marked_here_but_for_109() -> None:
    assert {code for code in DEVICE_PLUGIN_SKIPS if XIDS[code].mark is not Mark.NEVER} == {109}


def test_retired_codes_are_the_unused_ones() -> None:
    assert codes(RETIRED) == {row.code for row in XIDS.values() if row.what is XidClass.UNUSED}
    assert {row.condition for row in RETIRED} == {Condition.RETIRED}
    assert {row.grade for row in RETIRED} == {Grade.INFO}


@pytest.mark.parametrize("row", XIDS.values(), ids=lambda row: str(row.code))
def test_a_row_is_complete_and_fits_a_line(row: XidRow) -> None:
    assert row_of(row.code) is row
    assert row.meaning == row.meaning.strip(" .")
    assert 0 < len(row.meaning) <= 60
    assert row.advice
    assert row.blame is not Blame.AGENT


def test_a_program_that_may_simply_be_restarted_is_to_blame() -> None:
    restart = {row.code for row in NEVER if row.mends.app_restart is Answer.YES}
    assert {row.blame for row in NEVER if row.code in restart} == {Blame.WORKLOAD}
    assert {row.blame for row in ALWAYS} <= {Blame.HARDWARE, Blame.DRIVER}


def test_nothing_that_always_marks_a_device_just_expires() -> None:
    assert Cure.EXPIRES not in {row.cure for row in ALWAYS + CONDITIONAL + RETIRED}


def test_what_a_reset_does_not_mend_is_not_cured_by_one() -> None:
    not_enough = {row.code for row in ALWAYS if row.mends.gpu_reset is Answer.NO}
    assert {XIDS[code].cure for code in not_enough} == {Cure.REBOOT}
    assert XIDS[79].cure is Cure.REBOOT
    assert XIDS[151].cure is Cure.REBOOT


def test_a_code_that_cancels_another_is_no_fault_itself() -> None:
    for code, cancelled in CANCELS.items():
        assert XIDS[code].mark is Mark.NEVER
        assert XIDS[code].condition is Condition.PLAIN
        assert XIDS[cancelled].condition is Condition.CANCELLED


def test_a_code_without_a_row_is_not_silently_benign() -> None:
    row = row_of(999)  # NVML's own "unknown"
    assert row.code == 999
    assert row.mark is Mark.CONDITIONAL
    assert row.condition is Condition.UNLISTED
    assert row.advice is Advice.FOLLOW_ACTION


def test_four_letters_spell_what_is_enough() -> None:
    assert mends("nmy-") == (Answer.NO, Answer.MAYBE, Answer.YES, Answer.NOT_NEEDED)
    assert mends("?t?t") == (Answer.UNKNOWN, Answer.BY_TEXT, Answer.UNKNOWN, Answer.BY_TEXT)
    with pytest.raises(KeyError):
        mends("nnnx")
    with pytest.raises(ValueError, match="not enough values"):
        mends("nny")


def test_engines_of_one_kind_are_numbered_in_the_order_of_the_field() -> None:
    copy_engines = [39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)]
    assert [XIDS[code].meaning for code in copy_engines] == [f"copy engine {n} fault" for n in range(20)]
    assert [XIDS[code].meaning for code in (68, 83, 84, 88, 89, 96, 97, 98)] == [
        f"video decoder {n} fault" for n in range(8)
    ]
    assert [XIDS[code].meaning for code in (82, *range(99, 106))] == [
        f"JPEG engine {n} fault" for n in range(8)
    ]
