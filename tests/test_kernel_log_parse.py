"""Parser of kernel-log lines about the host: all forms of lines, and lines that are none of them."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_lines import CASES, SILENT, match_pattern

from agent.health.kernel_log.facts import HOST_PATTERNS, KernelLogCode
from agent.health.kernel_log.parse import TEXT_MAX, HostLogLine, parse_host_line

TEXTS: Final = st.text(max_size=300) | st.builds(
    lambda text, cut, tail: text[:cut] + tail,
    st.sampled_from([text for text, _ in CASES] + SILENT),
    st.integers(0, 160),
    st.text(alphabet="0123456789abcdefx:.,()[]|={} CPUEnodeBank#-\\", max_size=40),
)


@pytest.mark.parametrize(("text", "line"), CASES, ids=range(len(CASES)))
def test_line_is_parsed_to_its_facts(text: str, line: HostLogLine) -> None:
    assert parse_host_line(text) == line


@pytest.mark.parametrize("text", SILENT)
def test_unrelated_line_parses_to_none(text: str) -> None:
    assert parse_host_line(text) is None


def test_every_log_code_has_an_example() -> None:
    assert {line.code for _, line in CASES} == set(KernelLogCode)


@given(TEXTS)
def test_parser_accepts_only_lines_of_the_patterns(text: str) -> None:
    text = text.encode("ascii", "backslashreplace").decode()
    if parse_host_line(text) is not None:
        assert any(match_pattern(pattern, text) is not None for pattern in HOST_PATTERNS)


@given(TEXTS, st.sampled_from(["a", " ", "task=,", ": Machine Check", "0000:3b:00.0: ", "("]))
def test_parser_reads_a_bounded_prefix(text: str, junk: str) -> None:
    """The prefix bounds the time of regular expressions on long lines."""
    long = text + junk * (100_000 // len(junk))
    assert parse_host_line(long) == parse_host_line(long[:TEXT_MAX])
