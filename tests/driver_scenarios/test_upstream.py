"""The table of upstream's cases is what the tests say of themselves."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from driver_scenarios.upstream import COVERED, ELSEWHERE


def cases_of(docstring: str | None) -> set[str]:
    """Return the cases that a test's docstring names."""
    found = re.search(r"e2e_node: (.*?)(\n\n|$)", docstring or "", re.DOTALL)
    return {" ".join(case.split()) for case in found[1].split(";")} if found else set()


@pytest.mark.parametrize("case", COVERED)
def test_every_covered_case_has_a_marked_test(case: str) -> None:
    module, name = COVERED[case]
    test = getattr(import_module(f"driver_scenarios.{module}"), name)
    assert case in cases_of(test.__doc__)


def test_every_marked_case_is_in_the_table() -> None:
    covered = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        module = import_module(f"driver_scenarios.{path.stem}")
        tests = [variable for name, variable in vars(module).items() if name.startswith("test_")]
        covered |= {case for test in tests for case in cases_of(test.__doc__)}
    assert covered == set(COVERED)
    assert not covered & ELSEWHERE.keys()
