"""A file system that is soon full, and a program that runs on it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S


def run_on_small_disk(program: str, directory: Path) -> list[str]:
    """Runs Python on a file system of 128 KiB of its own at the directory; returns the lines it printed."""
    mount = f"mount -t tmpfs -o size=128k none {directory}"
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        pytest.skip("mounting a file system needs root and unshare(1)")
    allowed = subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip(f"may not mount a file system here: {allowed.stderr.decode().strip()}")
    script = f'{mount} && exec "$0" -c "$1"'
    command = [unshare, "-m", "sh", "-c", script, sys.executable, program]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=Path(__file__).parent.parent, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=5 * PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output.splitlines()
