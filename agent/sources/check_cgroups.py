"""Cgroups in which the commands of custom checks run, one for each run, with limits; removed after the run.

They are made in the agent's own cgroup, where the service manager has delegated it (``Delegate=yes``), and in
cgroup v2 only. Elsewhere a cgroup that another process manages would get children that it does not know.
"""

import errno
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent.system.files import ReadError, read_bounded

MOUNTS: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Mount points of cgroup v2, alone or next to v1."""
FILE_BYTES: Final = 65_536
CONTROLLERS: Final = ("memory", "pids")
OWN: Final = "agent"
"""Name of the child cgroup to which the agent's processes move.

A cgroup whose children have limits cannot have processes itself.
"""
PREFIX: Final = "check-"
DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""Extended attributes of a cgroup's directory with which systemd marks it as delegated."""
ENABLE_TRIES: Final = 10
"""Number of attempts to move all processes of the agent's cgroup; meanwhile the agent may start one."""
REMOVE_S: Final = 0.5
"""Longest wait for the end of a killed cgroup's processes before the cgroup is left [s]."""


class CheckCgroups:
    """Factory of the cgroups in which custom checks run. Thread-safe after :func:`open_check_cgroups`."""

    def __init__(self, base: Path, controllers: tuple[str, ...]) -> None:
        self._base = base
        self.controllers = controllers
        """Cgroup controllers whose limits apply to checks: ``memory`` and ``pids``, or fewer."""

    def cgroup(self, name: str, memory: int, processes: int) -> "CheckCgroup":
        """Return the cgroup of one run of a check; it is created later, by :meth:`CheckCgroup.create`.

        Args:
            name: Name of the run, unique among those that run now.
            memory: Limit of memory [bytes].
            processes: Limit of processes and threads.
        """
        limits: dict[str, str] = {}
        if "memory" in self.controllers:
            limits |= {"memory.max": str(memory), "memory.swap.max": "0", "memory.oom.group": "1"}
        if "pids" in self.controllers:
            limits["pids.max"] = str(processes)
        return CheckCgroup(self._base / f"{PREFIX}{name}", limits)


class CheckCgroup:
    """Cgroup of one run of a custom check's command."""

    def __init__(self, path: Path, limits: dict[str, str]) -> None:
        self._path = path
        self._limits = limits

    def create(self) -> int:
        """Create the cgroup with its limits; return a descriptor of ``cgroup.procs``. Raises OSError."""
        self._path.mkdir(exist_ok=True)
        for name, value in self._limits.items():
            with suppress(FileNotFoundError):  # a kernel without swap has no limit of swap
                (self._path / name).write_text(value)
        return os.open(self._path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def kill(self) -> bool:
        """Kill all processes of the cgroup. Returns False if this kernel (before 5.14) cannot."""
        try:
            (self._path / "cgroup.kill").write_text("1")
        except OSError:
            return False
        return True

    def exceeded_memory(self) -> str:
        """Return a text that the kernel killed the command at its memory limit; empty: it did not."""
        try:
            events = (self._path / "memory.events").read_text()
        except OSError:
            return ""
        kills = dict(line.split() for line in events.splitlines()).get("oom_kill", "0")
        limit = int(self._limits.get("memory.max", "0"))
        return "" if kills == "0" else f"the command exceeded its memory limit of {limit >> 20} MiB"

    def remove(self) -> None:
        """Remove the cgroup. Blocks up to 0.5 s while killed processes end.

        If they do not end in time, a later start of the agent removes the cgroup.
        """
        end_s = time.monotonic() + REMOVE_S
        while True:
            try:
                self._path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > end_s:
                    return
                time.sleep(0.01)
            else:
                return


def open_check_cgroups() -> tuple[CheckCgroups | None, str]:
    """Prepare the agent's cgroup, so that checks can run in child cgroups with limits.

    Child cgroups that an earlier agent left are removed.

    Returns:
        The factory of cgroups, or None; and the reason why there is none, or why some limits do not apply.
    """
    base = _delegated_cgroup()
    if base is None:
        return None, "the agent's cgroup is not delegated to it (Delegate=yes in its systemd unit)"
    try:
        for left in base.glob(f"{PREFIX}*"):
            rest = CheckCgroup(left, {})
            rest.kill()
            rest.remove()
        available = (base / "cgroup.controllers").read_text().split()
        wanted = tuple(name for name in CONTROLLERS if name in available)
        _enable(base, wanted)
        probe = CheckCgroup(base / f"{PREFIX}probe", {})
        os.close(probe.create())
        probe.remove()
    except OSError as error:
        return None, f"cgroup {base}: {error.strerror}"
    missing = [name for name in CONTROLLERS if name not in wanted]
    return CheckCgroups(base, wanted), f"no controller {' and '.join(missing)}" if missing else ""


def _delegated_cgroup() -> Path | None:
    """Return the directory of the cgroup that systemd has delegated to the agent; None: there is none.

    It is the agent's cgroup, or the one above it (``DelegateSubgroup=``).
    """
    try:
        lines = read_bounded(Path("/proc/self/cgroup"), FILE_BYTES).data.decode().splitlines()
    except ReadError:
        return None
    path = next((line.partition("::")[2] for line in lines if line.startswith("0::")), None)
    mount = next((mount for mount in MOUNTS if (mount / "cgroup.controllers").exists()), None)
    if path is None or mount is None:
        return None
    own = mount / path.lstrip("/")
    return next((place for place in (own, own.parent) if _is_delegated(place)), None)


def _is_delegated(cgroup: Path) -> bool:
    for name in DELEGATED:
        with suppress(OSError):
            if os.getxattr(cgroup, name) == b"1":
                return True
    return False


def _enable(base: Path, controllers: tuple[str, ...]) -> None:
    """Enable controllers for the children of a cgroup; its own processes are moved to a child first."""
    enabled = (base / "cgroup.subtree_control").read_text().split()
    missing = [name for name in controllers if name not in enabled]
    if not missing:
        return
    own = base / OWN
    own.mkdir(exist_ok=True)
    for attempt in range(1, ENABLE_TRIES + 1):
        for pid in (base / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (own / "cgroup.procs").write_text(pid)
        try:
            (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))
        except OSError as error:  # a process that was just started is still there
            if error.errno != errno.EBUSY or attempt == ENABLE_TRIES:
                raise
        else:
            return
