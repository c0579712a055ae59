"""NVLink 5: rows and their numbers, both layouts of the words, and that nothing unknown is ever benign."""

from collections import Counter
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.gpu.xid.nvlink5 import CODES, UNITS, Nvlink5Status, Remedy, Unit, decode

U32: Final = st.integers(0, 2**32 - 1)
NEAR_A_ROW: Final = st.builds(
    lambda unit, high, bits: ((unit.v1 | high << 10) & 0xFFFFFFFF, sum({1 << bit for bit in bits})),
    st.sampled_from(UNITS),
    st.sampled_from((0, 1, 1 << 10, 0x26 << 10, 0x3F << 16)),
    st.lists(st.integers(0, 31), max_size=3),
)
LINK_DOWN: Final = next(unit for unit in UNITS if unit.name == "NETIR_LINK_DOWN")


def said(intr_info: int, error_status: int = 0, unit: str = "?") -> Nvlink5Status:
    return Nvlink5Status(unit, None, 0, intr_info, error_status)


@pytest.mark.parametrize(
    ("code", "benign", "follow", "reset"),
    [
        (144, 4, 0, 2),
        (145, 16, 8, 9),
        (146, 15, 0, 5),
        (147, 2, 0, 0),
        (148, 1, 0, 0),
        (149, 7, 0, 24),
        (150, 0, 0, 2),
    ],
)
def test_each_code_has_as_many_rows_as_the_catalogue(code: int, benign: int, follow: int, reset: int) -> None:
    rows = Counter(remedy for unit in UNITS if unit.code == code for remedy in unit.rows.values())
    assert rows == Counter({Remedy.NOTHING: benign, Remedy.FOLLOW_154: follow, Remedy.RESET: reset})


def test_no_word_of_one_layout_is_a_word_of_the_other() -> None:
    """So the number itself says how it is laid out, and the driver's version need not be known."""
    for unit in UNITS:
        for other in UNITS:
            if unit.code == other.code != 150:
                assert unit.v1 & 0x7F != other.v2


def test_a_word_names_one_unit_or_units_with_the_same_rows() -> None:
    for unit in UNITS:
        alike = [other for other in UNITS if other.code == unit.code and other.v1 == unit.v1]
        assert all(other.rows == unit.rows for other in alike)
        assert [other for other in UNITS if other.code == unit.code and other.v2 == unit.v2] == [unit]


def by_status(unit: Unit) -> bool:
    return unit is not LINK_DOWN and unit.name != "NETIR_INT"


@pytest.mark.parametrize("unit", [unit for unit in UNITS if by_status(unit)], ids=lambda unit: unit.name)
@pytest.mark.parametrize("noise", [0, 0b111111 << 26, 0x1F << 11], ids=["bare", "high bits", "link bits"])
def test_every_row_is_found_in_either_layout(unit: Unit, noise: int) -> None:
    for status, remedy in unit.rows.items():
        assert decode(unit.code, said(unit.v1 | noise, status)).remedy is remedy
        assert decode(unit.code, said(unit.v2 | noise, status)) == (remedy, unit.name, 0)


@pytest.mark.parametrize("reason", range(64))
def test_a_link_that_went_down_is_judged_by_its_reason(reason: int) -> None:
    wanted = LINK_DOWN.rows.get(reason, Remedy.UNKNOWN)
    for low in (LINK_DOWN.v1, LINK_DOWN.v2):
        for status in (0, 1, 0xFFFFFFFF):  # which the catalogue does not look at
            assert decode(149, said(reason << 20 | low, status)) == (wanted, "NETIR_LINK_DOWN", reason)


@pytest.mark.parametrize(
    ("code", "intr_info", "status", "remedy"),
    [  # as drivers wrote them
        (144, 0x00000001, 0x00000008, Remedy.NOTHING),
        (145, 0x0409A0C2, 0x00000008, Remedy.NOTHING),
        (149, 0x021425C6, 0x00000000, Remedy.RESET),
        (149, 0x0215E5C6, 0x00000000, Remedy.RESET),
        (149, 0x016415C6, 0x00000000, Remedy.RESET),
        (149, 0x025001C6, 0x00000000, Remedy.RESET),
        (149, 0x026001C6, 0x00000000, Remedy.NOTHING),
        (149, 0x000FE406, 0x00000000, Remedy.RESET),
    ],
)
def test_words_seen_in_the_field(code: int, intr_info: int, status: int, remedy: Remedy) -> None:
    assert decode(code, said(intr_info, status)).remedy is remedy


def test_of_several_bits_the_worst_counts() -> None:
    assert decode(145, said(4, 0x100 | 0x200)).remedy is Remedy.NOTHING
    assert decode(145, said(4, 0x100 | 0x1)).remedy is Remedy.FOLLOW_154
    assert decode(145, said(4, 0x100 | 0x40)).remedy is Remedy.RESET


def test_one_bit_that_no_row_has_spoils_a_benign_word_but_not_a_reset() -> None:
    assert decode(145, said(4, 0x100 | 0x400)).remedy is Remedy.UNKNOWN
    assert decode(145, said(4, 0x1 | 0x400)).remedy is Remedy.UNKNOWN
    assert decode(145, said(4, 0x40 | 0x400)).remedy is Remedy.RESET


def test_an_error_without_a_bit_is_not_benign() -> None:
    assert decode(144, said(1, 0)).remedy is Remedy.UNKNOWN


def test_the_flag_above_the_receive_pipe_turns_three_benign_bits_into_a_reset() -> None:
    pipe = next(unit for unit in UNITS if unit.name == "RLW_RXPIPE")
    for low, flag in ((pipe.v1, 1 << 10), (pipe.v2, 1 << 7)):
        for bit in (0x1, 0x2, 0x4):
            assert decode(145, said(low, bit)).remedy is Remedy.NOTHING
            assert decode(145, said(low | flag, bit)).remedy is Remedy.RESET
        for bit in (0x8, 0x80000000):
            assert decode(145, said(low | flag, bit)).remedy is Remedy.NOTHING


def test_a_reason_where_none_belongs_is_unknown() -> None:
    assert decode(144, said(1 << 20 | 1, 0x4)).remedy is Remedy.UNKNOWN


def test_what_the_line_calls_its_unit_is_told_where_no_row_knows_it() -> None:
    assert decode(145, said(0x3FF, 1, "RLW_NEW")) == (Remedy.UNKNOWN, "RLW_NEW", 0)


def test_a_code_of_another_kind_has_no_rows() -> None:
    assert 143 not in CODES
    assert decode(143, said(1, 1)).remedy is Remedy.UNKNOWN


@given(code=st.integers(143, 151), words=NEAR_A_ROW | st.tuples(U32, U32))
def test_whatever_the_words_are_only_a_row_makes_them_benign(code: int, words: tuple[int, int]) -> None:
    status = words[1]
    found = decode(code, said(*words))
    if found.remedy is Remedy.NOTHING:
        unit = next(unit for unit in UNITS if unit.code == code and unit.name == found.unit)
        if unit is LINK_DOWN:
            assert unit.rows[found.reason] is Remedy.NOTHING
        else:
            assert status in unit.rows or all(
                unit.rows[1 << bit] is Remedy.NOTHING for bit in range(32) if status >> bit & 1
            )
