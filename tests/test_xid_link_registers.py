"""NVLink 4 and older: bits of XID 74 that are benign, consequences of another fault, or hardware faults."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.gpu.xid.log_lines import BENIGN_BITS, SYMPATHETIC_BITS, Nvlink4Grade, grade_registers


def registers_with_bit(register: int, bit: int) -> list[int]:
    return [1 << bit if index == register else 0 for index in range(7)]


@pytest.mark.parametrize(("register", "bit"), [(0, 0), (0, 23), (0, 30), (4, 20), (4, 23), (4, 26), (4, 29)])
def test_ignorable_bits_are_benign(register: int, bit: int) -> None:
    assert grade_registers(registers_with_bit(register, bit)) is Nvlink4Grade.BENIGN


@pytest.mark.parametrize(("register", "bit"), [(0, 1), (0, 20), (3, 16), (3, 17)])
def test_bits_of_consequential_faults_are_sympathetic(register: int, bit: int) -> None:
    assert grade_registers(registers_with_bit(register, bit)) is Nvlink4Grade.SYMPATHETIC


@pytest.mark.parametrize(
    ("register", "bit"),
    [
        *((0, bit) for bit in (4, 5, 8, 9, 12, 16, 17, 21, 22, 24, 27, 28, 29)),
        *((2, bit) for bit in (0, 1, 2, 6, 13, 16, 17, 18, 19)),
        (3, 18),  # an echo, too, but the fabric must be reset
        *((4, bit) for bit in (18, 19, 21, 22, 24, 25, 27, 28)),
    ],
)
def test_hardware_bits_of_catalog_are_hardware(register: int, bit: int) -> None:
    assert grade_registers(registers_with_bit(register, bit)) is Nvlink4Grade.HARDWARE


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_unexplained_bit_is_hardware(registers: list[int]) -> None:
    explained = all(
        not value & ~(BENIGN_BITS.get(index, 0) | SYMPATHETIC_BITS.get(index, 0))
        for index, value in enumerate(registers)
    )
    assert (grade_registers(registers) is Nvlink4Grade.HARDWARE) == (not explained)


def test_no_bits_are_graded_none() -> None:
    assert grade_registers([0] * 7) is Nvlink4Grade.NONE
    assert grade_registers([]) is Nvlink4Grade.NONE


def test_worst_bit_counts_in_any_register() -> None:
    assert grade_registers([1 << 0, 0, 0, 1 << 16, 0]) is Nvlink4Grade.SYMPATHETIC
    assert grade_registers([1 << 1, 0, 0, 0, 1 << 20]) is Nvlink4Grade.SYMPATHETIC
    assert grade_registers([1 << 1, 0, 1 << 13, 0, 0]) is Nvlink4Grade.HARDWARE
    assert grade_registers([1 << 0 | 1 << 4, 0, 0, 0, 0]) is Nvlink4Grade.HARDWARE
