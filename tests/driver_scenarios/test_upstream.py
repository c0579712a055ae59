"""The table of upstream's cases is what the tests say of themselves."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from driver_scenarios.upstream import COVERED, ELSEWHERE


def cases_of(docstring: str | None) -> set[str]:
    """What a test says that it covers."""
    found = re.search(r"e2e_node: (.*?)(\n\n|$)", docstring or "", re.DOTALL)
    return {" ".join(case.split()) for case in found[1].split(";")} if found else set()


@pytest.mark.parametrize("case", COVERED)
def test_a_case_that_is_covered_has_a_test_that_says_so(case: str) -> None:
    module, name = COVERED[case]
    test = getattr(import_module(f"driver_scenarios.{module}"), name)
    assert case in cases_of(test.__doc__)


def test_what_tests_say_that_they_cover_is_in_the_table() -> None:
    said = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        module = import_module(f"driver_scenarios.{path.stem}")
        tests = [one for name, one in vars(module).items() if name.startswith("test_")]
        said |= {case for test in tests for case in cases_of(test.__doc__)}
    assert said == set(COVERED)
    assert not said & ELSEWHERE.keys()
