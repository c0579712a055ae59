"""Facts about the processes that a node's health hangs on, through psutil. Cold path: for ``scan`` only.

Facts, no judgement: no rule reads them. A process that ends while it is looked at, or that this user may not
look at, is normal and left out.
"""

from pathlib import Path
from typing import Final, NamedTuple

import psutil

from agent.sources.procfs import procfs

NAMES: Final = frozenset({"kubelet", "containerd", "crio", "dockerd"})
AGENT: Final = "drahealth"


class ProcessFacts(NamedTuple):
    """One process at one moment."""

    name: str
    """``kubelet``, ``containerd``, ``crio``, ``dockerd``, or ``drahealth`` for an agent that runs."""
    pid: int
    since_s: float
    """When it started [s since 1970]."""
    cpu_s: float
    """User and system time since then [s]."""
    rss_bytes: int
    threads: int


def role_of(name: str, cmdline: list[str]) -> str:
    """What a process is to a node; empty for all the others.

    An agent is an interpreter of some name, so it is known by its arguments: ``drahealth run`` or
    ``python -m agent run``.
    """
    if name in NAMES:
        return name
    words = [Path(word).name for word in cmdline[:5]]
    for called in ((AGENT, "run"), ("-m", "agent", "run")):
        if any(tuple(words[i : i + len(called)]) == called for i in range(3)):
            return AGENT
    return ""


def read_processes(procfs_root: Path) -> list[ProcessFacts]:
    """The processes of :data:`NAMES` and the agents that run, by name and pid; none where no procfs is."""
    facts: list[ProcessFacts] = []
    with procfs(procfs_root):
        for process in _listed():
            try:
                with process.oneshot():
                    if process.status() == psutil.STATUS_ZOMBIE:
                        continue
                    name = process.name()
                    # Only an interpreter or an entry script can be an agent: spare the others a read.
                    may_be_agent = name.startswith(("python", AGENT))
                    role = role_of(name, process.cmdline() if may_be_agent else [])
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
            except psutil.Error:  # vanished, or not ours to look at
                continue
    return sorted(facts)


def _listed() -> list[psutil.Process]:
    try:
        return list(psutil.process_iter())
    except (OSError, IndexError):  # no such directory; in one without processes psutil looks for the first
        return []
