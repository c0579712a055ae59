"""State and resource use of one process, from its file ``stat`` in procfs, and how a process ended.

An agent reads them while it runs, and psutil takes 1.2 MiB of it.
"""

import os
import signal
from pathlib import Path
from typing import Final, NamedTuple

UNINTERRUPTIBLE: Final = "D"
"""State of a process that waits in the kernel and does not react to signals."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessStat(NamedTuple):
    """State and resource use of one process at one moment."""

    name: str
    """Name of the program, cut to 15 bytes by the kernel."""
    state: str
    """State in one letter, see proc_pid_stat(5)."""
    cpu_s: float
    """User and system CPU time that the process has used [s]."""
    threads: int
    started_s: float
    """Start time [s since boot]; distinguishes processes with the same pid."""
    rss_bytes: int
    """Resident memory [bytes]."""


def read_process_stat(process: Path) -> ProcessStat:
    """Read the file ``stat`` of a process; ``process`` is its directory in procfs.

    Raises:
        OSError: The process has ended, or the file cannot be read.
        ValueError: The file has another form.
    """
    text = (process / "stat").read_bytes().decode(errors="replace")
    begin, end = text.find("("), text.rfind(")")  # the name may have blanks and parentheses
    fields = text[end + 1 :].split()
    if begin < 0 or end < begin or len(fields) < 22:
        raise ValueError(f"{process}/stat: {text[:80]!r} is no process status")
    user, system, threads, started, pages = (int(fields[at]) for at in (11, 12, 17, 19, 21))
    return ProcessStat(
        name=text[begin + 1 : end],
        state=fields[0],
        cpu_s=(user + system) / _TICKS_PER_S,
        threads=threads,
        started_s=started / _TICKS_PER_S,
        rss_bytes=pages * _PAGE_BYTES,
    )


def read_boot_time(procfs_root: Path) -> int:
    """Return the time of the boot [s since 1970] from procfs. Raises OSError, or ValueError without it."""
    for line in (procfs_root / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return int(line.split()[1])
    raise ValueError(f"{procfs_root}/stat has no line btime")


def describe_exit(wait_status: int) -> str:
    """Return how a process ended, such as ``was killed by SIGSEGV``, from its status of waitpid(2)."""
    return describe_exit_code(os.waitstatus_to_exitcode(wait_status))


def describe_exit_code(code: int) -> str:
    """Return how a process ended from its exit code, or the negative number of the signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
