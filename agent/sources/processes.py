"""Reader of the kubelet's, container runtimes' and agents' processes, for ``scan`` only; no rule uses them.

psutil is imported late, because it takes 0.6 MiB.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import psutil


@contextmanager
def psutil_procfs_root(root: Path) -> Iterator[None]:
    """Make psutil read processes from the procfs at `root` while the context is open."""
    import psutil

    before = psutil.PROCFS_PATH
    if before == str(root):
        yield
        return
    psutil.PROCFS_PATH = str(root)
    psutil.process_iter.cache_clear()  # a pid names another process there
    try:
        yield
    finally:
        psutil.PROCFS_PATH = before
        psutil.process_iter.cache_clear()


RUNTIME_PROCESS_NAMES: Final = frozenset({"kubelet", "containerd", "crio", "dockerd"})
AGENT_PROCESS_NAME: Final = "drahealth"


class ProcessFacts(NamedTuple):
    """Identity and resource use of one process of the kubelet, a container runtime or an agent."""

    name: str
    """Role of the process: ``kubelet``, ``containerd``, ``crio``, ``dockerd``, or ``drahealth`` (an
    agent).
    """
    pid: int
    since_s: float
    """Start time of the process [s since 1970]."""
    cpu_s: float
    """User and system CPU time that the process has used [s]."""
    rss_bytes: int
    """Resident memory [bytes]."""
    threads: int


def process_role(name: str, cmdline: list[str]) -> str:
    """Return the role of a process: ``kubelet``, ``containerd``, ``crio``, ``dockerd`` or ``drahealth``.

    Empty: another process. An agent runs in an interpreter, so it is recognized by its arguments: ``drahealth
    run`` or ``python -m agent run``.
    """
    if name in RUNTIME_PROCESS_NAMES:
        return name
    args = [Path(arg).name for arg in cmdline[:5]]
    for command in ((AGENT_PROCESS_NAME, "run"), ("-m", "agent", "run")):
        if any(tuple(args[i : i + len(command)]) == command for i in range(3)):
            return AGENT_PROCESS_NAME
    return ""


def read_node_processes(procfs_root: Path) -> list[ProcessFacts]:
    """Read the kubelet, container runtimes and running agents, sorted by name; empty without procfs."""
    import psutil

    facts: list[ProcessFacts] = []
    with psutil_procfs_root(procfs_root):
        for process in _list_processes():
            try:
                with process.oneshot():
                    if process.status() == psutil.STATUS_ZOMBIE:
                        continue
                    name = process.name()
                    # only an interpreter or entry script can be an agent: no need to read other command lines
                    may_be_agent = name.startswith(("python", AGENT_PROCESS_NAME))
                    role = process_role(name, process.cmdline() if may_be_agent else [])
                    if role:
                        cpu = process.cpu_times()
                        facts.append(
                            ProcessFacts(
                                name=role,
                                pid=process.pid,
                                since_s=process.create_time(),
                                cpu_s=cpu.user + cpu.system,
                                rss_bytes=process.memory_info().rss,
                                threads=process.num_threads(),
                            )
                        )
            except psutil.Error:  # ended meanwhile, or no permission
                continue
    return sorted(facts)


def _list_processes() -> list["psutil.Process"]:
    import psutil

    try:
        return list(psutil.process_iter())
    except (OSError, IndexError):  # no procfs; psutil fails on a directory without processes
        return []
