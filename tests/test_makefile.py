"""Commands that ``make`` would run for its targets."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_runs_commands_with_valid_syntax(target: str) -> None:
    """A variable that a target lacks leaves a redirection without a file."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # make runs lines with $(MAKE) even now: they must not add to what this run of make test has skipped
    files = ("SKIPPED_BEFORE=/dev/null", "NATIVE_LOG=/dev/null")
    commands = _output("make", "--dry-run", "--no-print-directory", *files, target)
    assert commands
    _output("bash", "-n", "/dev/stdin", text=commands)


def test_skips_of_the_c_tests_are_listed_once(tmp_path: Path) -> None:
    """The same program runs with two sanitizers. Pytest's last line has what the file lists."""
    lines = ["test_map: 7 checks, 0 failed", "test_text: 5 checks, 0 failed"]
    lines += ["test_cgroups: skipped: no user namespace"] * 2
    done = _native_test(tmp_path, 0, *lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [lines[-1], "2 programs: 12 checks, 0 failed"]
    listed = (tmp_path / "skipped").read_text().splitlines()
    assert [line for line in listed if "test_" in line] == ["test_cgroups: no user namespace"]


def test_failed_c_test_prints_all_lines(tmp_path: Path) -> None:
    lines = ["test_map.c:9: 1 == 2", "test_map: 7 checks, 1 failed"]
    done = _native_test(tmp_path, 2, *lines)
    assert done.returncode == 2
    assert done.stdout.splitlines()[1:] == lines


def _native_test(directory: Path, status: int, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run the target with C tests that print the lines and end with the status."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    tests = directory / "tests"
    tests.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), f"exit {status}\n"]))
    tests.chmod(0o755)
    paths = [f"MAKE={tests}", f"NATIVE_LOG={directory}/log", f"SKIPPED_BEFORE={directory}/skipped"]
    command = ["make", "--no-print-directory", "native-test", *paths]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def _output(*command: str, text: str = "") -> str:
    done = subprocess.run(
        command, input=text, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
