"""Recall and false alarms of the kernel-log patterns over lines of many kernels and drivers."""

import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from log_lines import match_pattern

from agent.health.gpu.xid import log_lines as gpu_lines
from agent.health.gpu.xid.log_lines import GPU_LOG_PATTERNS
from agent.health.kernel_log.facts import HOST_PATTERNS
from agent.health.kernel_log.parse import parse_host_line

PATH: Final = Path(__file__).parent / "data" / "kernel_lines.tsv"
ROWS: Final = [
    tuple(line.split("\t", 1)) for line in PATH.read_text().splitlines() if not line.startswith("#")
]
FAULTS: Final = [(code, text) for code, text in ROWS if code != "-"]
HARMLESS: Final = [text for code, text in ROWS if code == "-"]
LEAST_RECALL: Final = 0.95
GPU_CODES: Final = {
    gpu_lines.XidLine: "xid",
    gpu_lines.SxidLine: "sxid",
    gpu_lines.GpuLostLine: "gpu-lost",
    gpu_lines.InitFailedLine: "gpu-init-failed",
    gpu_lines.VersionMismatchLine: "gpu-mismatch",
    gpu_lines.LinkSetupFailedLine: "gpu-link-setup",
}


def code_of(text: str) -> str:
    """Return the code of the fault that the agent finds in a line of the kernel log; empty for no fault."""
    if any(match_pattern(pattern, text) is not None for pattern in GPU_LOG_PATTERNS):
        return GPU_CODES.get(type(gpu_lines.parse_line(text)), "")
    if any(match_pattern(pattern, text) is not None for pattern in HOST_PATTERNS):
        line = parse_host_line(text)
        return line.code.value if line else ""
    return ""


def recall_table() -> str:
    """Return a table of lines, recognized lines and harmless lines taken for it, by code."""
    lines = Counter(code for code, _ in FAULTS)
    found = Counter(code for code, text in FAULTS if code_of(text) == code)
    alarms = Counter(code for text in HARMLESS if (code := code_of(text)))
    rows = [f"{code:26} {found[code]:4} of {lines[code]:4}   {alarms[code]:4}" for code in sorted(lines)]
    total = f"{'all':26} {found.total():4} of {lines.total():4}   {alarms.total():4} of {len(HARMLESS)}"
    return "\n".join([*rows, total])


def test_collection_of_lines_is_large_enough() -> None:
    assert len(FAULTS) >= 300
    assert len(HARMLESS) >= 300
    assert len({text for _, text in ROWS}) == len(ROWS)


@pytest.mark.parametrize("code", sorted({code for code, _ in FAULTS}))
def test_lines_of_a_code_are_recognized(code: str) -> None:
    lines = [text for known, text in FAULTS if known == code]
    missed = [(text, code_of(text)) for text in lines if code_of(text) != code]
    assert len(missed) <= (1 - LEAST_RECALL) * len(lines), missed


def test_recall_over_all_lines_is_high() -> None:
    missed = [(code, text) for code, text in FAULTS if code_of(text) != code]
    assert len(missed) <= (1 - LEAST_RECALL) * len(FAULTS), missed


def test_no_harmless_line_is_recognized() -> None:
    assert [(text, code) for text in HARMLESS if (code := code_of(text))] == []


def test_quoted_lines_match_no_pattern() -> None:
    """Only the beginning of a message is its own. An access behind the end of a disk begins with the name of
    a task, so any word may precede it."""
    prefixes = ("audit: ", "kernel: ", "[  123.456792] ", "systemd[1]: Started echo ", "x: ")
    taken = [
        (prefix + text, code)
        for known, text in FAULTS
        for prefix in prefixes
        if known != "beyond-end" and (code := code_of(prefix + text))
    ]
    assert taken == []


if __name__ == "__main__":
    sys.stdout.write(f"{recall_table()}\n")
