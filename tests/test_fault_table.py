"""Table of injected faults: every fault has a test that exists, and docs/reliability.md is current."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from faults import Fault, markdown, read_faults

TESTS = Path(__file__).parent
THEMES = {
    "process", "thread", "file", "disk", "clock", "memory", "descriptors", "sockets", "protocol", "kubelet",
    "driver", "kernel events", "NVML helper",
}  # fmt: skip


@cache
def functions_of(file: str) -> frozenset[str]:
    """Return the names of the test functions in a file."""
    nodes = ast.walk(ast.parse((TESTS / file).read_text("utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.injected)
def test_injected_fault_has_a_promise_and_a_test(fault: Fault) -> None:
    assert fault.promise
    file, _, name = fault.test.partition("::")
    assert name in functions_of(file)


def test_table_has_a_hundred_different_faults_of_every_theme() -> None:
    faults = read_faults()
    assert len(faults) >= 100
    assert {fault.theme for fault in faults} == THEMES
    names = Counter((fault.theme, fault.injected) for fault in faults)
    assert [name for name, count in names.items() if count > 1] == []


def test_reliability_page_is_current() -> None:
    page = TESTS.parent / "docs/reliability.md"
    assert page.read_text("utf-8") == markdown(read_faults())
