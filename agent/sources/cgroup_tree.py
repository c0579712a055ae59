"""Which pods and containers there are, by one walk through the tree of cgroups.

For whoever looks once: the daemon has the same from the native core, see agent.sources.pod_cgroups. Names of
cgroups and whether somebody is in them are all that is read. A pod has the UID that the kubelet has for it.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from agent.allocatable.cgroups import Level, parse_path, qos_path
from agent.allocatable.facts import CgroupDriver
from agent.allocatable.pod import Qos
from agent.model.claim_sources import LiveContainer, LivePod, Origin, Provenance, SourceAnswer
from agent.model.reading import Absence
from agent.model.time import Instant

_MOUNTS: Final = ("", "unified", "memory", "cpu", "cpu,cpuacct", "pids", "hugetlb")
"""Where pods have cgroups, below the root: in v2, beside v1, in v1."""
_WRONG_MAX: Final = 4
_EVENTS_BYTES: Final = 256


def read_tree(cgroupfs_root: Path, kubelet_cgroup_root: str, now: Instant) -> SourceAnswer[LivePod]:
    """The pods that have a cgroup, or why nobody knows. Blocks on the kernel alone.

    Args:
        cgroupfs_root: Where cgroups are mounted.
        kubelet_cgroup_root: The kubelet's own ``--cgroup-root``.
        now: When that is.
    """
    walk = _Walk(kubelet_cgroup_root)
    is_there = False
    for directory, path in class_directories(cgroupfs_root, CgroupDriver, kubelet_cgroup_root):
        is_there |= walk.look(directory, path)
    witness = Provenance(Origin.CGROUPS, now)
    if not is_there and walk.wrong:
        return SourceAnswer(witness, (), Absence.UNREADABLE, walk.wrong[0])
    if not is_there:
        why = f"{cgroupfs_root}: no kubelet has made cgroups below {kubelet_cgroup_root}"
        return SourceAnswer(witness, (), Absence.ABSENT, why)
    return SourceAnswer(witness, tuple(walk.pods()), wrong=_few(walk.wrong))


def class_directories(
    cgroupfs_root: Path, drivers: Iterable[CgroupDriver], kubelet_cgroup_root: str
) -> Iterator[tuple[str, str]]:
    """Where pods have their cgroups, if they have any: directories of the QoS classes, each with its path
    in its hierarchy."""
    paths = [qos_path(qos, driver, kubelet_cgroup_root) for driver in drivers for qos in Qos]
    for mount in _MOUNTS:
        for path in paths:
            yield f"{cgroupfs_root / mount / path.lstrip('/')}", path


class _Walk:
    """What was found so far. The same cgroup in several hierarchies is one."""

    def __init__(self, kubelet_cgroup_root: str) -> None:
        self._root = kubelet_cgroup_root
        self._running: dict[str, dict[str, bool | None]] = {}
        """By the pod's UID and the container's id; of the pod itself that is empty."""
        self.wrong: list[str] = []

    def look(self, directory: str, path: str) -> bool:
        """Takes in the pods of a QoS class. False: it is not there."""
        names = self._below(directory)
        for name in names or ():
            pod = self._take(f"{directory}/{name}", f"{path}/{name}", Level.POD)
            for container in (self._below(f"{directory}/{name}") or ()) if pod else ():
                self._take(f"{directory}/{name}/{container}", f"{path}/{name}/{container}", Level.CONTAINER)
        return names is not None

    def _take(self, directory: str, path: str, level: Level) -> bool:
        """Takes in a cgroup, if it is one of that level."""
        place = parse_path(path, self._root)
        if place is None or place.level is not level:
            return False
        found = self._running.setdefault(place.pod_uid, {})
        found[place.container_id] = found.get(place.container_id) or self._is_running(directory)
        return True

    def pods(self) -> Iterator[LivePod]:
        """All of them, by UID."""
        for uid, found in sorted(self._running.items()):
            containers = (LiveContainer(*one) for one in sorted(found.items()) if one[0])
            yield LivePod(uid, found[""], tuple(containers))

    def _below(self, directory: str) -> list[str] | None:
        """The cgroups in one; None: it is not there, or no longer."""
        try:
            with os.scandir(directory) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.wrong.append(f"{directory}: {error.strerror}")
            return None

    def _is_running(self, directory: str) -> bool | None:
        """Whether there are processes in a cgroup, or in one below; None: it cannot be read."""
        try:
            events = _read(f"{directory}/cgroup.events")
        except FileNotFoundError:
            return self._has_processes(directory)  # version 1
        except OSError:
            return None
        return None if b"populated " not in events else b"populated 1" in events

    def _has_processes(self, directory: str) -> bool | None:
        try:
            if _read(f"{directory}/cgroup.procs"):
                return True
        except OSError:
            return None
        return any(self._has_processes(f"{directory}/{name}") for name in self._below(directory) or ())


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _EVENTS_BYTES)
    finally:
        os.close(fd)


def _few(wrong: list[str]) -> tuple[str, ...]:
    more = [f"{len(wrong) - _WRONG_MAX} more cannot be listed"] if len(wrong) > _WRONG_MAX else []
    return (*wrong[:_WRONG_MAX], *more)
