"""Lists of the pods and containers that have cgroups: from a snapshot of the C core, or read from cgroupfs.

Cgroups give UIDs and container ids, but no names. A static pod has the UID of its configuration, as in the
kubelet.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from agent.cgroup_audit.cgroup_paths import CgroupLevel, parse_path, qos_path
from agent.cgroup_audit.kubelet_config import CgroupDriver
from agent.cgroup_audit.pod_model import QosClass
from agent.model.claim_sources import ContainerCgroup, Origin, PodCgroup, Provenance, SourceAnswer
from agent.model.reading import Absence, Missing, Reading, SourceState
from agent.model.snapshot import CgroupKind, Snapshot
from agent.model.time import Instant

SOURCE: Final = "cgroups"


def live_pods_in_snapshot(snapshot: Snapshot, now: Instant) -> SourceAnswer[PodCgroup]:
    """Return the pods that have a cgroup in a snapshot, each with its containers.

    Args:
        snapshot: Snapshot of the C core.
        now: Time of the snapshot.
    """
    provenance = Provenance(Origin.CGROUPS, now)
    source = next((sample for sample in snapshot.sources if sample.name == SOURCE), None)
    if source is None or source.state is SourceState.ABSENT:
        reason = source.detail if source else "cgroups are not watched"
        return SourceAnswer(provenance, (), Absence.ABSENT, reason)
    if source.state in {SourceState.STARTING, SourceState.STALLED}:
        return SourceAnswer(provenance, (), Absence.UNREADABLE, f"the cgroup reader is {source.state}")
    running: dict[str, bool | None] = {}
    containers: dict[str, list[ContainerCgroup]] = {}
    for group in snapshot.groups:
        if group.kind is CgroupKind.POD:
            running[group.pod_uid] = _is_running(group.populated)
        else:
            found = ContainerCgroup(group.container, _is_running(group.populated))
            containers.setdefault(group.pod_uid, []).append(found)
    pods = tuple(
        PodCgroup(
            uid, running.get(uid), tuple(sorted(containers.get(uid, ()), key=lambda container: container.id))
        )
        for uid in sorted({*running, *containers})
    )
    problems = []
    if source.state is SourceState.FAILING:
        problems.append(f"some cgroups cannot be read: {source.detail}")
    if snapshot.core.groups_dropped:
        problems.append(f"{snapshot.core.groups_dropped} cgroups exceed the limit cgroups.max-groups")
    return SourceAnswer(provenance, pods, invalid=tuple(problems))


def _is_running(populated: Reading) -> bool | None:
    return None if isinstance(populated, Missing) else populated > 0


_MOUNTS: Final = ("", "unified", "memory", "cpu", "cpu,cpuacct", "pids", "hugetlb")
"""Directories of cgroup hierarchies below cgroupfs's root: v2, hybrid, and v1 controllers."""
PROBLEMS_MAX: Final = 4
"""Largest number of texts about unreadable directories; further ones are counted."""
_EVENTS_BYTES: Final = 256


def read_live_pods(cgroupfs_root: Path, kubelet_cgroup_root: str, now: Instant) -> SourceAnswer[PodCgroup]:
    """Return the pods that have a cgroup in cgroupfs, each with its containers. Blocks on the kernel.

    Args:
        cgroupfs_root: Mount point of the cgroup tree.
        kubelet_cgroup_root: The kubelet's ``--cgroup-root``.
        now: Current time.
    """
    walk = _CgroupTreeWalk(kubelet_cgroup_root)
    has_class = False
    for directory, path in qos_class_directories(cgroupfs_root, CgroupDriver, kubelet_cgroup_root):
        has_class |= walk.add_class(directory, path)
    provenance = Provenance(Origin.CGROUPS, now)
    if not has_class and walk.problems:
        return SourceAnswer(provenance, (), Absence.UNREADABLE, walk.problems[0])
    if not has_class:
        reason = f"{cgroupfs_root}: no kubelet has created cgroups below {kubelet_cgroup_root}"
        return SourceAnswer(provenance, (), Absence.ABSENT, reason)
    return SourceAnswer(provenance, tuple(walk.pods()), invalid=_limit_problems(walk.problems))


def qos_class_directories(
    cgroupfs_root: Path, drivers: Iterable[CgroupDriver], kubelet_cgroup_root: str
) -> Iterator[tuple[str, str]]:
    """Yield the directory and the path in the hierarchy of each cgroup that a QoS class may have."""
    paths = [qos_path(qos, driver, kubelet_cgroup_root) for driver in drivers for qos in QosClass]
    for mount in _MOUNTS:
        for path in paths:
            yield f"{cgroupfs_root / mount / path.lstrip('/')}", path


class _CgroupTreeWalk:
    """Search of cgroupfs for the cgroups of pods; a cgroup in several v1 hierarchies counts once."""

    def __init__(self, kubelet_cgroup_root: str) -> None:
        self._root = kubelet_cgroup_root
        self._running: dict[str, dict[str, bool | None]] = {}
        """Whether a cgroup has processes (None: unreadable), by pod UID and container id (empty: the pod)."""
        self.problems: list[str] = []

    def add_class(self, directory: str, path: str) -> bool:
        """Add the pods whose cgroups are in the directory of a QoS class.

        Returns False if the directory does not exist.

        Args:
            directory: Directory in cgroupfs.
            path: Path of the cgroup below the hierarchy.
        """
        names = self._list_children(directory)
        for name in names or ():
            pod = self._add_cgroup(f"{directory}/{name}", f"{path}/{name}", CgroupLevel.POD)
            for container in (self._list_children(f"{directory}/{name}") or ()) if pod else ():
                self._add_cgroup(
                    f"{directory}/{name}/{container}", f"{path}/{name}/{container}", CgroupLevel.CONTAINER
                )
        return names is not None

    def _add_cgroup(self, directory: str, path: str, level: CgroupLevel) -> bool:
        """Add a cgroup if its name is that of a pod or container, as `level` requires.

        Returns whether the cgroup was added.
        """
        cgroup = parse_path(path, self._root)
        if cgroup is None or cgroup.level is not level:
            return False
        found = self._running.setdefault(cgroup.pod_uid, {})
        found[cgroup.container_id] = found.get(cgroup.container_id) or self._is_running(directory)
        return True

    def pods(self) -> Iterator[PodCgroup]:
        """Yield the cgroups of pods that were found, in the order of the pods' UIDs."""
        for uid, found in sorted(self._running.items()):
            containers = (ContainerCgroup(*item) for item in sorted(found.items()) if item[0])
            yield PodCgroup(uid, found[""], tuple(containers))

    def _list_children(self, directory: str) -> list[str] | None:
        """Return the names of a cgroup's children.

        None: its directory is absent, was just removed or is unreadable.
        """
        try:
            with os.scandir(directory) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.problems.append(f"cgroup directory {directory}: {error.strerror}")
            return None

    def _is_running(self, directory: str) -> bool | None:
        """Return whether a cgroup or one of its descendants has processes; None: unreadable."""
        try:
            events = _read_first_bytes(f"{directory}/cgroup.events")
        except FileNotFoundError:
            return self._has_processes(directory)  # version 1
        except OSError:
            return None
        return None if b"populated " not in events else b"populated 1" in events

    def _has_processes(self, directory: str) -> bool | None:
        try:
            if _read_first_bytes(f"{directory}/cgroup.procs"):
                return True
        except OSError:
            return None
        return any(
            self._has_processes(f"{directory}/{name}") for name in self._list_children(directory) or ()
        )


def _read_first_bytes(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _EVENTS_BYTES)
    finally:
        os.close(fd)


def _limit_problems(problems: list[str]) -> tuple[str, ...]:
    more = (
        [f"{len(problems) - PROBLEMS_MAX} more cgroup directories cannot be listed"]
        if len(problems) > PROBLEMS_MAX
        else []
    )
    return (*problems[:PROBLEMS_MAX], *more)
