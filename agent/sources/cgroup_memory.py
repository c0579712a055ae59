"""Reader of the memory settings of single cgroups that the C core does not read: memory QoS, swap limit, and
the OOM score of a container's first process.

These files are read on demand for the audit only. Blocks on the kernel.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent.model.cgroup import NO_LIMIT, CgroupSettings
from agent.model.reading import NEVER_READ, Absence, Missing, Reading
from agent.system.files import ReadError, read_bounded

_NUMBER_BYTES: Final = 64
_PROCESSES_BYTES: Final = 1 << 20
_STAT_BYTES: Final = 4096
_START_FIELD: Final = 19
"""Index of a process's start time in ``/proc/<pid>/stat``, among the fields after the name."""
_PROCESSES_MAX: Final = 64
"""Largest number of processes of a container among which the oldest is searched, its own cgroup's first."""
_DEPTH_MAX: Final = 3
"""Number of levels of cgroups below a container's that are searched for processes.

crun uses one level, a nested systemd several.
"""


class CgroupMemoryReader:
    """Reader of the memory QoS settings, the swap limit and the OOM score of cgroups.

    Args:
        cgroupfs_root: ``/sys/fs/cgroup``, or a tree like it.
        procfs_root: ``/proc`` of the pid namespace in which the processes of containers are visible.
        cgroup_version: Version of the cgroups of pods, 1 or 2.
    """

    def __init__(self, cgroupfs_root: Path, procfs_root: Path, cgroup_version: int) -> None:
        self._mounts = (
            [cgroupfs_root / "memory"] if cgroup_version == 1 else [cgroupfs_root, cgroupfs_root / "unified"]
        )
        self._procfs_root = procfs_root
        self._is_v2 = cgroup_version == 2
        self.has_hidden_processes = False
        """True: the processes of a container are not in procfs, because it shows another pid namespace."""

    def add_memory(self, settings: CgroupSettings, path: str, *, with_oom_score: bool) -> CgroupSettings:
        """Return the settings of a cgroup with memory QoS, swap limit and OOM score added.

        Args:
            settings: Settings that the C core read.
            path: Path of the cgroup below the mounts.
            with_oom_score: Also read the OOM score of the cgroup's oldest process.
        """
        places = [mount / path.lstrip("/") for mount in self._mounts]
        directory = next((place for place in places if place.is_dir()), places[0])
        score = self._oom_score(directory) if with_oom_score else NEVER_READ
        if not self._is_v2:
            return replace(
                settings, swap=_read_limit(directory / "memory.memsw.limit_in_bytes"), oom_score=score
            )
        return replace(
            settings,
            high=_read_limit(directory / "memory.high"),
            min=_read_limit(directory / "memory.min"),
            low=_read_limit(directory / "memory.low"),
            swap=_read_limit(directory / "memory.swap.max"),
            oom_score=score,
        )

    def _oom_score(self, directory: Path) -> Reading:
        """Return the OOM score of the oldest process in a cgroup; ABSENT: it has no visible process."""
        found: list[tuple[int, int]] = []
        for pid in _processes(directory, _DEPTH_MAX):
            if not pid:
                self.has_hidden_processes = True
                return NEVER_READ
            if (start := self._start_time(pid)) is not None:
                found.append((start, pid))
            if len(found) == _PROCESSES_MAX:
                break
        for _, pid in sorted(found):
            score = _read_number(self._procfs_root / str(pid) / "oom_score_adj")
            if isinstance(score, int):
                return score
        return NEVER_READ

    def _start_time(self, pid: int) -> int | None:
        try:
            stat = read_bounded(self._procfs_root / str(pid) / "stat", _STAT_BYTES).data
            return int(stat.rpartition(b")")[2].split()[_START_FIELD])
        except (ReadError, ValueError, IndexError):
            return None  # the process has ended


def _processes(directory: Path, depth: int) -> Iterator[int]:
    """Yield the PIDs of the processes in a cgroup, then those in the cgroups below.

    Args:
        directory: Directory of the cgroup.
        depth: Number of levels below it that are searched.
    """
    try:
        yield from map(int, read_bounded(directory / "cgroup.procs", _PROCESSES_BYTES).data.split())
        children = sorted(
            entry.path for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)
        )
    except (ReadError, OSError, ValueError):
        return  # the cgroup was removed
    for child in children if depth else ():
        yield from _processes(Path(child), depth - 1)


def _read_limit(path: Path) -> Reading:
    reading = _read_number(path)
    return NO_LIMIT if isinstance(reading, int) and reading < 0 else reading


def _read_number(path: Path) -> Reading:
    try:
        text = read_bounded(path, _NUMBER_BYTES).data.strip()
        return NO_LIMIT if text == b"max" else int(text)
    except ReadError as error:
        return NEVER_READ if error.absence is Absence.ABSENT else Missing(Absence.UNREADABLE, error.errno)
    except ValueError:
        return Missing(Absence.UNREADABLE, errno.EINVAL)
