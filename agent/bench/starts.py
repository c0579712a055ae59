"""One Python program from start to end, in a process of its own: how long, and how much memory."""

import re
import subprocess
import sys
import time
from collections.abc import Container
from typing import Final, NamedTuple

from agent.bench.result import Unmeasured

# What the kernel tells of a child that has ended includes what its parent had when it forked; this does not.
_TELL: Final = "import atexit; atexit.register(lambda: print('\\n' + open('/proc/self/status').read()))"
_PEAK: Final = re.compile(r"^VmHWM:\s+(\d+) kB$", re.M)
_MAIN: Final = "import sys; sys.argv[1:] = {}; from agent.cli.main import main; sys.exit(main())"


class Started(NamedTuple):
    """How one process went."""

    took_ns: int
    rss: int
    """Bytes, at most."""
    output: str


def command(*arguments: object) -> str:
    """What ``drahealth`` does, with these arguments. It ends as Python does, to tell of its memory then."""
    return _MAIN.format([str(one) for one in arguments])


def start(code: str, exits: Container[int] = (0,)) -> Started:
    """Run a program to its end.

    Raises:
        Unmeasured: It ended with another status.
    """
    start_ns = time.monotonic_ns()
    done = subprocess.run(
        [sys.executable, "-c", f"{_TELL}\n{code}"], capture_output=True, text=True, check=False
    )
    took_ns = time.monotonic_ns() - start_ns
    peak = _PEAK.search(done.stdout)
    if done.returncode not in exits or peak is None:
        raise Unmeasured(f"{code}: exit {done.returncode}: {done.stderr[-1000:]}")
    return Started(took_ns, int(peak[1]) * 1024, done.stdout)
