"""NVLink 5: the rows, both layouts of the error words, and values that no row explains."""

from collections import Counter
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.gpu.xid.log_lines import (
    NVLINK5_CODES,
    NVLINK5_UNITS,
    Nvlink5Status,
    Nvlink5Unit,
    RequiredAction,
    decode_nvlink5,
)

U32: Final = st.integers(0, 2**32 - 1)
NEAR_A_ROW: Final = st.builds(
    lambda unit, high, bits: ((unit.v1 | high << 10) & 0xFFFFFFFF, sum({1 << bit for bit in bits})),
    st.sampled_from(NVLINK5_UNITS),
    st.sampled_from((0, 1, 1 << 10, 0x26 << 10, 0x3F << 16)),
    st.lists(st.integers(0, 31), max_size=3),
)
LINK_DOWN: Final = next(unit for unit in NVLINK5_UNITS if unit.name == "NETIR_LINK_DOWN")


def status_of(intr_info: int, error_status: int = 0, unit: str = "?") -> Nvlink5Status:
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
def test_each_code_has_as_many_rows_as_the_catalog(code: int, benign: int, follow: int, reset: int) -> None:
    rows = Counter(remedy for unit in NVLINK5_UNITS if unit.code == code for remedy in unit.rows.values())
    assert rows == Counter(
        {RequiredAction.NOTHING: benign, RequiredAction.FOLLOW_154: follow, RequiredAction.RESET: reset}
    )


def test_no_value_is_valid_in_both_layouts() -> None:
    """The value itself shows its layout, so the driver's version is not needed."""
    for unit in NVLINK5_UNITS:
        for other in NVLINK5_UNITS:
            if unit.code == other.code != 150:
                assert unit.v1 & 0x7F != other.v2


def test_value_names_one_unit_or_units_with_equal_rows() -> None:
    for unit in NVLINK5_UNITS:
        alike = [other for other in NVLINK5_UNITS if other.code == unit.code and other.v1 == unit.v1]
        assert all(other.rows == unit.rows for other in alike)
        assert [other for other in NVLINK5_UNITS if other.code == unit.code and other.v2 == unit.v2] == [unit]


def has_rows_by_status(unit: Nvlink5Unit) -> bool:
    return unit is not LINK_DOWN and unit.name != "NETIR_INT"


@pytest.mark.parametrize(
    "unit", [unit for unit in NVLINK5_UNITS if has_rows_by_status(unit)], ids=lambda unit: unit.name
)
@pytest.mark.parametrize("noise", [0, 0b111111 << 26, 0x1F << 11], ids=["bare", "high bits", "link bits"])
def test_every_row_is_found_in_both_layouts(unit: Nvlink5Unit, noise: int) -> None:
    for status, remedy in unit.rows.items():
        assert decode_nvlink5(unit.code, status_of(unit.v1 | noise, status)).required is remedy
        assert decode_nvlink5(unit.code, status_of(unit.v2 | noise, status)) == (remedy, unit.name, 0)


@pytest.mark.parametrize("reason", range(64))
def test_link_down_is_decoded_by_reason(reason: int) -> None:
    wanted = LINK_DOWN.rows.get(reason, RequiredAction.UNKNOWN)
    for low in (LINK_DOWN.v1, LINK_DOWN.v2):
        for status in (0, 1, 0xFFFFFFFF):  # which the catalog does not look at
            assert decode_nvlink5(149, status_of(reason << 20 | low, status)) == (
                wanted,
                "NETIR_LINK_DOWN",
                reason,
            )


@pytest.mark.parametrize(
    ("code", "intr_info", "status", "remedy"),
    [  # as drivers wrote them
        (144, 0x00000001, 0x00000008, RequiredAction.NOTHING),
        (145, 0x0409A0C2, 0x00000008, RequiredAction.NOTHING),
        (149, 0x021425C6, 0x00000000, RequiredAction.RESET),
        (149, 0x0215E5C6, 0x00000000, RequiredAction.RESET),
        (149, 0x016415C6, 0x00000000, RequiredAction.RESET),
        (149, 0x025001C6, 0x00000000, RequiredAction.RESET),
        (149, 0x026001C6, 0x00000000, RequiredAction.NOTHING),
        (149, 0x000FE406, 0x00000000, RequiredAction.RESET),
    ],
)
def test_published_lines_are_decoded(code: int, intr_info: int, status: int, remedy: RequiredAction) -> None:
    assert decode_nvlink5(code, status_of(intr_info, status)).required is remedy


def test_worst_of_several_bits_counts() -> None:
    assert decode_nvlink5(145, status_of(4, 0x100 | 0x200)).required is RequiredAction.NOTHING
    assert decode_nvlink5(145, status_of(4, 0x100 | 0x1)).required is RequiredAction.FOLLOW_154
    assert decode_nvlink5(145, status_of(4, 0x100 | 0x40)).required is RequiredAction.RESET


def test_unknown_bit_outranks_benign_bits_but_not_reset() -> None:
    assert decode_nvlink5(145, status_of(4, 0x100 | 0x400)).required is RequiredAction.UNKNOWN
    assert decode_nvlink5(145, status_of(4, 0x1 | 0x400)).required is RequiredAction.UNKNOWN
    assert decode_nvlink5(145, status_of(4, 0x40 | 0x400)).required is RequiredAction.RESET


def test_error_without_bits_is_not_benign() -> None:
    assert decode_nvlink5(144, status_of(1, 0)).required is RequiredAction.UNKNOWN


def test_rxpipe_flag_turns_benign_bits_into_reset() -> None:
    pipe = next(unit for unit in NVLINK5_UNITS if unit.name == "RLW_RXPIPE")
    for low, flag in ((pipe.v1, 1 << 10), (pipe.v2, 1 << 7)):
        for bit in (0x1, 0x2, 0x4):
            assert decode_nvlink5(145, status_of(low, bit)).required is RequiredAction.NOTHING
            assert decode_nvlink5(145, status_of(low | flag, bit)).required is RequiredAction.RESET
        for bit in (0x8, 0x80000000):
            assert decode_nvlink5(145, status_of(low | flag, bit)).required is RequiredAction.NOTHING


def test_unexpected_reason_is_unknown() -> None:
    assert decode_nvlink5(144, status_of(1 << 20 | 1, 0x4)).required is RequiredAction.UNKNOWN


def test_unlisted_unit_keeps_name_from_line() -> None:
    assert decode_nvlink5(145, status_of(0x3FF, 1, "RLW_NEW")) == (RequiredAction.UNKNOWN, "RLW_NEW", 0)


def test_other_code_has_no_rows() -> None:
    assert 143 not in NVLINK5_CODES
    assert decode_nvlink5(143, status_of(1, 1)).required is RequiredAction.UNKNOWN


@given(code=st.integers(143, 151), words=NEAR_A_ROW | st.tuples(U32, U32))
def test_any_values_are_benign_only_by_a_row(code: int, words: tuple[int, int]) -> None:
    status = words[1]
    found = decode_nvlink5(code, status_of(*words))
    if found.required is RequiredAction.NOTHING:
        unit = next(unit for unit in NVLINK5_UNITS if unit.code == code and unit.name == found.unit)
        if unit is LINK_DOWN:
            assert unit.rows[found.reason] is RequiredAction.NOTHING
        else:
            assert status in unit.rows or all(
                unit.rows[1 << bit] is RequiredAction.NOTHING for bit in range(32) if status >> bit & 1
            )
