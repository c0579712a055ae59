"""NVLink 4 and older: which bits of XID 74 are benign, which echo another fault, which are a fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.gpu.xid.nvlink4 import BENIGN, SYMPATHETIC, Bits, grade


def one(register: int, bit: int) -> list[int]:
    return [1 << bit if index == register else 0 for index in range(7)]


@pytest.mark.parametrize(("register", "bit"), [(0, 0), (0, 23), (0, 30), (4, 20), (4, 23), (4, 26), (4, 29)])
def test_bits_that_may_be_ignored_are_benign(register: int, bit: int) -> None:
    assert grade(one(register, bit)) is Bits.BENIGN


@pytest.mark.parametrize(("register", "bit"), [(0, 1), (0, 20), (3, 16), (3, 17)])
def test_bits_that_echo_another_fault_are_sympathetic(register: int, bit: int) -> None:
    assert grade(one(register, bit)) is Bits.SYMPATHETIC


@pytest.mark.parametrize(
    ("register", "bit"),
    [
        *((0, bit) for bit in (4, 5, 8, 9, 12, 16, 17, 21, 22, 24, 27, 28, 29)),
        *((2, bit) for bit in (0, 1, 2, 6, 13, 16, 17, 18, 19)),
        (3, 18),  # an echo, too, but the fabric must be reset
        *((4, bit) for bit in (18, 19, 21, 22, 24, 25, 27, 28)),
    ],
)
def test_bits_that_the_catalogue_calls_hardware_are_hardware(register: int, bit: int) -> None:
    assert grade(one(register, bit)) is Bits.HARDWARE


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_a_bit_that_nobody_explains_is_hardware(registers: list[int]) -> None:
    explained = all(
        not value & ~(BENIGN.get(index, 0) | SYMPATHETIC.get(index, 0))
        for index, value in enumerate(registers)
    )
    assert (grade(registers) is Bits.HARDWARE) == (not explained)


def test_no_bit_explains_nothing() -> None:
    assert grade([0] * 7) is Bits.NONE
    assert grade([]) is Bits.NONE


def test_the_worst_bit_counts_wherever_it_is() -> None:
    assert grade([1 << 0, 0, 0, 1 << 16, 0]) is Bits.SYMPATHETIC
    assert grade([1 << 1, 0, 0, 0, 1 << 20]) is Bits.SYMPATHETIC
    assert grade([1 << 1, 0, 1 << 13, 0, 0]) is Bits.HARDWARE
    assert grade([1 << 0 | 1 << 4, 0, 0, 0, 0]) is Bits.HARDWARE
