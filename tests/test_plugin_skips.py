"""The last line of a test run names what was skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_skips import skip_line

TESTS = """
import pytest
import trio

@pytest.mark.skip(reason="needs root")
def test_marked(): raise AssertionError

@pytest.mark.parametrize("n", [1, 2])
def test_called(n): pytest.skip(["no GPU here", "needs root"][n - 1])

@pytest.mark.trio
async def test_in_a_task():
    async with trio.open_nursery():
        pytest.skip("no FUSE")

def test_passed(): pass
"""
MODULE = """
import pytest

pytest.skip("no cgroups", allow_module_level=True)
"""


@pytest.fixture(params=["0", "2"], ids=["one-process", "two-workers"])
def last_line(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Run the tests above, and return the output."""
    (tmp_path / "test_inner.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "before").write_text("fuzzing: no clang\n")
    options = ["-p", "plugin_skips", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-n", request.param, str(tmp_path)]
    environ = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "SKIPPED_BEFORE": str(tmp_path / "before"),
    }
    done = subprocess.run(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_skips_of_all_steps_stand_in_the_last_line(last_line: str) -> None:
    reasons = "2 tests: needs root; 1 test: no FUSE; 1 test: no GPU here; 1 test: no cgroups"
    assert last_line == f"skipped: fuzzing: no clang; {reasons}"


def test_summary_without_skips_names_none() -> None:
    assert skip_line([], []) == "skipped: nothing"


def test_reason_of_several_lines_becomes_one_line() -> None:
    assert skip_line([], ["no\n  way"]) == "skipped: 1 test: no way"
