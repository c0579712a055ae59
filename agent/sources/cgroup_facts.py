"""Reader of machine facts on which expected cgroup settings depend: cgroup version and driver, page sizes,
memory, swap space and CPUs.

The module also has the reader of the memory settings of single cgroups that the C core does not read: memory
QoS, swap limit, and the OOM score of a container's first process.

These files are read on demand for the audit only. Blocks on the kernel.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from agent.cgroup_audit.cgroup_paths import CgroupLevel, parse_path, pod_path, qos_path
from agent.cgroup_audit.kubelet_config import PERIOD_US, CgroupDriver, KubeletConfig, NodeFacts
from agent.cgroup_audit.pod_model import Pod, QosClass
from agent.errors import PermissionDeniedError, ProbeError
from agent.model.cpuset import cpu_numbers, parse_cpus
from agent.model.pod_findings import NO_LIMIT, CgroupSettings
from agent.model.reading import NEVER_READ, Absence, Missing, Reading
from agent.native.cgroup_settings import CgroupSettingReader
from agent.sources.pod_cgroups import qos_class_directories
from agent.system.files import ReadError, read_bounded

_SIZE: Final = re.compile(r"hugepages-([1-9][0-9]{0,15})kB", re.ASCII)
_VERSION: Final = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})(?:[.+-].*)?", re.ASCII)
_MEMINFO: Final = re.compile(r"^(MemTotal|SwapTotal): +([0-9]{1,15}) kB$", re.ASCII | re.MULTILINE)
_TEXT_BYTES: Final = 1 << 16
_CLAIMS_GATE: Final = "DRANodeAllocatableResources"
_CHANGED_IN: Final = (1, 37)
"""First kubelet version (1.37) that counts claims in pods' cgroups.

It also no longer sums the limits of sidecars to find a missing limit.
"""


def read_hugepage_sizes(sysfs_root: Path) -> tuple[int, ...]:
    """Read the sizes of hugepages that the kernel supports [KiB], ascending.

    Raises:
        ProbeError: The sizes cannot be listed.
        PermissionDeniedError: This user may not list them.
    """
    top = sysfs_root / "kernel/mm/hugepages"
    try:
        names = os.listdir(top)
    except FileNotFoundError:
        return ()  # a kernel without hugepages
    except OSError as error:
        raise _list_error(top, error) from None
    return tuple(sorted(int(match[1]) for match in map(_SIZE.fullmatch, names) if match))


class MachineSize(NamedTuple):
    """Size of the machine: memory, swap space and CPUs; None or empty: unknown."""

    memory_bytes: int | None = None
    swap_bytes: int | None = None
    cpu_counts: tuple[int, ...] = ()
    """Numbers of online and of present CPUs, without duplicates."""


def read_machine_size(procfs_root: Path, sysfs_root: Path) -> MachineSize:
    """Read memory, swap space and number of CPUs of the machine from procfs and sysfs."""
    found = dict(_MEMINFO.findall(_read_text(procfs_root / "meminfo")))
    counts = [_count_cpus(sysfs_root / "devices/system/cpu" / name) for name in ("online", "present")]
    memory, swap = found.get("MemTotal"), found.get("SwapTotal")
    return MachineSize(
        int(memory) * 1024 if memory else None,
        int(swap) * 1024 if swap else None,
        tuple(dict.fromkeys(filter(None, counts))),
    )


def _count_cpus(path: Path) -> int:
    """Return the number of CPUs in a file with the kernel's list of CPUs; 0: it is unreadable."""
    try:
        return len(list(cpu_numbers(parse_cpus(_read_text(path)))))
    except ValueError:
        return 0


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path, _TEXT_BYTES).data.decode("ascii", "replace")
    except ReadError:
        return ""


def read_cgroup_facts(
    reader: CgroupSettingReader,
    sizes_kib: tuple[int, ...],
    root: str,
    pods: Iterable[Pod],
    kubelet_version: str,
    kubelet: KubeletConfig | None = None,
    machine: MachineSize | None = None,
) -> NodeFacts | None:
    """Read cgroup version, the kubelet's cgroup driver and page sizes; None: no kubelet has created cgroups.

    Args:
        reader: Reader of cgroup files.
        sizes_kib: Result of :func:`read_hugepage_sizes`.
        root: The kubelet's ``--cgroup-root``.
        pods: Pods of the node. If both cgroup drivers have cgroups, the one with more pods is in use.
        kubelet_version: Such as ``1.37.1``; empty: unknown, taken for 1.37 or newer.
        kubelet: Configuration of the kubelet; None: unknown, the period and enforcement of quotas are
            assumed to be the defaults.
        machine: Memory and CPUs of the machine; None: unknown.

    Raises:
        ValueError: ``kubelet_version`` is not a version.
        ProbeError: A cgroup exists and cannot be opened.
        PermissionDeniedError: This user may not open it.
    """
    drivers = [
        driver
        for driver in CgroupDriver
        if reader.read(qos_path(QosClass.GUARANTEED, driver, root)) is not None
    ]
    if not drivers:
        return None

    def pods_of(driver: CgroupDriver) -> int:
        paths = (pod_path(pod.cgroup_uid, pod.qos, driver, root) for pod in pods)
        return sum(reader.read(path) is not None for path in paths)

    size = machine or MachineSize()
    minor = _parse_version(kubelet_version)[1] if kubelet_version else None
    return NodeFacts(
        cgroup_version=reader.cgroup_version,
        cgroup_driver=drivers[0] if len(drivers) == 1 else max(drivers, key=pods_of),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        hugepages_kib=sizes_kib,
        period_us=kubelet.period_us if kubelet else PERIOD_US,
        enforces_quota=kubelet.enforces_quota if kubelet else True,
        are_quotas_known=kubelet is not None,
        counts_claims=_counts_claims(kubelet_version, kubelet),
        counts_earlier_sidecars=not kubelet_counts_claims(kubelet_version) if kubelet_version else None,
        kubelet=kubelet,
        kubelet_minor=minor,
        memory_bytes=size.memory_bytes,
        swap_bytes=size.swap_bytes,
        cpu_counts=size.cpu_counts,
    )


def _counts_claims(kubelet_version: str, kubelet: KubeletConfig | None) -> bool:
    """Return whether the kubelet may count claims in the settings of pods' cgroups.

    The answer depends on the kubelet's version and its feature gate, which is off by default in 1.37.
    """
    if kubelet is None or not kubelet_counts_claims(kubelet_version):
        return kubelet_counts_claims(kubelet_version)
    is_off = bool(kubelet_version) and _parse_version(kubelet_version) == _CHANGED_IN
    return True in kubelet.possible_gate(_CLAIMS_GATE, default=not is_off)


def kubelet_counts_claims(kubelet_version: str) -> bool:
    """Return whether kubelets of a version add resources of ResourceClaims to the cgroups of pods.

    Raises:
        ValueError: ``kubelet_version`` is not a version.
    """
    return not kubelet_version or _parse_version(kubelet_version) >= _CHANGED_IN


def _parse_version(kubelet_version: str) -> tuple[int, int]:
    match = _VERSION.fullmatch(kubelet_version)
    if match is None:
        raise ValueError(
            f"kubelet version {kubelet_version[:64]!r} is not a version, such as 1.37 or v1.36.2"
        )
    return int(match[1]), int(match[2])


def pod_uids_with_cgroups(cgroupfs_root: Path, driver: CgroupDriver, root: str) -> frozenset[str]:
    """Return the UIDs of pods that have cgroups; the UID of a static pod is that of its configuration.

    Raises:
        ProbeError: An existing directory cannot be listed.
        PermissionDeniedError: This user may not list it.
    """
    return frozenset(_iter_pod_uids(cgroupfs_root, driver, root))


def _iter_pod_uids(cgroupfs_root: Path, driver: CgroupDriver, root: str) -> Iterator[str]:
    for directory, path in qos_class_directories(cgroupfs_root, (driver,), root):
        try:
            names = os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _list_error(directory, error) from None
        for name in names:
            cgroup = parse_path(f"{path}/{name}", root)
            if cgroup is not None and cgroup.level is CgroupLevel.POD:
                yield cgroup.pod_uid


def _list_error(path: Path | str, error: OSError) -> ProbeError | PermissionDeniedError:
    kind = PermissionDeniedError if isinstance(error, PermissionError) else ProbeError
    return kind(f"{path}: {error.strerror}")


# --- memory settings ---------------------------------------------------------------------------------------

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
