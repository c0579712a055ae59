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
    commands = _output("make", "--dry-run", "--no-print-directory", target)
    assert commands
    _output("bash", "-n", "/dev/stdin", text=commands)


def _output(*command: str, text: str = "") -> str:
    done = subprocess.run(
        command, input=text, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
