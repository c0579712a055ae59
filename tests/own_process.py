"""Parts of tests that measure a whole process, run in a fresh process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from patience import PATIENCE_S


def run_in_own_process(function: Callable[..., None], *args: object) -> None:
    """Call a function of a test module with these arguments as text; what it raises fails the test."""
    program = (
        f"import sys; from {function.__module__} import {function.__name__} as part; part(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, *map(str, args)]
    limit_s = 5 * PATIENCE_S  # it waits for facts, too
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stderr


def resident() -> int:
    """Memory of this process that is of no file [B]."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10
