"""Program that runs on a small file system."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE_S
from private_mounts import within_mounts


def run_on_small_disk(program: str, directory: Path) -> list[str]:
    """Run Python with a 128 KiB file system mounted at the directory, and return its output lines."""
    mount = 'mount -t tmpfs -o size=128k,mode=700 none "$1"'
    command = [*within_mounts(mount, directory), sys.executable, "-c", program]
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
