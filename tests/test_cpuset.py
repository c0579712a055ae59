"""Parsing and formatting of CPU lists, in the kernel's format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.cpuset import cpu_numbers, format_cpus, parse_cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,3", [0, 1, 3]), ("8191", [8191]), ("0,2,4-5", [0, 2, 4, 5])],
)
def test_cpu_list_is_parsed_and_formatted_like_the_kernels(text: str, cpus: list[int]) -> None:
    assert list(cpu_numbers(parse_cpus(text))) == cpus
    assert format_cpus(parse_cpus(text)) == text


def test_empty_set_is_formatted_as_none_and_parsed_from_empty() -> None:
    assert format_cpus(0) == "none"
    assert parse_cpus("") == 0
    assert parse_cpus("\n") == 0


def test_order_overlap_and_blanks_are_accepted() -> None:
    assert format_cpus(parse_cpus(" 4, 0-2,1 ,2-3\n")) == "0-4"


@given(st.sets(st.integers(0, 300)))
def test_formatted_set_parses_back(cpus: set[int]) -> None:
    bits = sum(1 << cpu for cpu in cpus)
    assert set(cpu_numbers(bits)) == cpus
    assert parse_cpus(format_cpus(bits) if bits else "") == bits


@pytest.mark.parametrize("part", ["a", "1-", "-1", "1-a", "0x1", "1.5", "1-2-3", "1 2", "²"])
def test_invalid_cpu_or_range_is_refused_with_its_text(part: str) -> None:
    with pytest.raises(ValueError, match="is not a CPU number or range") as raised:
        parse_cpus(f"0,{part}")
    assert repr(part) in str(raised.value)


@pytest.mark.parametrize("part", ["3-1", "8192", "0-8192"])
def test_empty_range_and_cpu_above_8191_are_refused(part: str) -> None:
    with pytest.raises(ValueError, match="is empty or exceeds CPU 8191") as raised:
        parse_cpus(part)
    assert repr(part) in str(raised.value)
