"""Program that runs on a small file system."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S


def run_on_small_disk(program: str, directory: Path) -> list[str]:
    """Run Python with a 128 KiB file system mounted at the directory, and return its output lines."""
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
            os.killpg(process.pid, signal.SIGKILL)  # with all its children
            output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output.splitlines()
