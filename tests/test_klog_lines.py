"""Lines of the kernel log about the host: every shape that the kernel writes, and what is none of them."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_lines import CASES, SILENT

from agent.health.kernel_log.parse import TEXT_MAX, HostLine, parse
from agent.health.kernel_log.patterns import HOST_PATTERNS
from agent.health.kernel_log.values import LogCode
from agent.native.kmsg import match

TEXTS: Final = st.text(max_size=300) | st.builds(
    lambda text, cut, tail: text[:cut] + tail,
    st.sampled_from([text for text, _ in CASES] + SILENT),
    st.integers(0, 160),
    st.text(alphabet="0123456789abcdefx:.,()[]|={} CPUEnodeBank#-\\", max_size=40),
)


@pytest.mark.parametrize(("text", "line"), CASES, ids=range(len(CASES)))
def test_a_line_says_what_it_says(text: str, line: HostLine) -> None:
    assert parse(text) == line


@pytest.mark.parametrize("text", SILENT)
def test_a_line_that_says_nothing_of_the_host_is_none(text: str) -> None:
    assert parse(text) is None


def test_every_kind_of_line_has_an_example() -> None:
    assert {line.code for _, line in CASES} == set(LogCode)


@given(TEXTS)
def test_nothing_is_understood_that_the_reader_does_not_take(text: str) -> None:
    text = text.encode("ascii", "backslashreplace").decode()
    if parse(text) is not None:
        assert any(match(pattern, text) is not None for pattern in HOST_PATTERNS)


@given(TEXTS, st.sampled_from(["a", " ", "task=,", ": Machine Check", "0000:3b:00.0: ", "("]))
def test_only_so_much_of_a_line_is_looked_at(text: str, junk: str) -> None:
    """So that no expression has a hundred thousand characters to go through, again and again."""
    long = text + junk * (100_000 // len(junk))
    assert parse(long) == parse(long[:TEXT_MAX])
