"""What must be known of this node to say what its cgroups should hold, by what is there.

The kubelet's configuration is not read: its period of quotas, and whether it enforces them, are taken to be
the defaults.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from agent.allocatable.cgroups import Level, parse_path, pod_path, qos_path
from agent.allocatable.facts import CgroupDriver, NodeFacts
from agent.allocatable.pod import Pod, Qos
from agent.errors import PermissionDenied, ProbeError
from agent.native.cgroup_knobs import KnobReader
from agent.sources.cgroup_tree import class_directories

_SIZE: Final = re.compile(r"hugepages-([1-9][0-9]{0,15})kB", re.ASCII)
_VERSION: Final = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})(?:[.+-].*)?", re.ASCII)
_COUNTS_FROM: Final = (1, 37)


def read_sizes(sysfs_root: Path) -> tuple[int, ...]:
    """Sizes of hugepages that the kernel has [KiB], ascending.

    Raises:
        ProbeError: They cannot be listed.
        PermissionDenied: This user may not.
    """
    top = sysfs_root / "kernel/mm/hugepages"
    try:
        names = os.listdir(top)
    except FileNotFoundError:
        return ()  # a kernel without hugepages
    except OSError as error:
        raise _unlisted(top, error) from None
    return tuple(sorted(int(match[1]) for match in map(_SIZE.fullmatch, names) if match))


def read_facts(
    reader: KnobReader, sizes_kib: tuple[int, ...], root: str, pods: Iterable[Pod], kubelet_version: str
) -> NodeFacts | None:
    """The node; None: no kubelet has made cgroups below the root.

    Args:
        reader: Of its cgroups.
        sizes_kib: As of :func:`read_sizes`.
        root: The kubelet's ``--cgroup-root``.
        pods: Of the node. If there are trees of both namings, that is in use which has more of them.
        kubelet_version: ``1.37.1``; empty: not known, and taken to count what claims give.

    Raises:
        ValueError: That is no version.
        ProbeError: A cgroup is there and cannot be opened.
        PermissionDenied: This user may not.
    """
    drivers = [one for one in CgroupDriver if reader.read(qos_path(Qos.GUARANTEED, one, root)) is not None]
    if not drivers:
        return None

    def pods_of(driver: CgroupDriver) -> int:
        paths = (pod_path(pod.cgroup_uid, pod.qos, driver, root) for pod in pods)
        return sum(reader.read(path) is not None for path in paths)

    return NodeFacts(
        version=reader.version,
        driver=drivers[0] if len(drivers) == 1 else max(drivers, key=pods_of),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        hugepages_kib=sizes_kib,
        counts_claims=counts_claims(kubelet_version),
    )


def counts_claims(kubelet_version: str) -> bool:
    """Whether a kubelet of that version can add what claims give to the cgroups of pods.

    Raises:
        ValueError: That is no version.
    """
    if not kubelet_version:
        return True
    match = _VERSION.fullmatch(kubelet_version)
    if match is None:
        raise ValueError(f"{kubelet_version[:64]!r} is no version of a kubelet, such as 1.37 or v1.36.2")
    return (int(match[1]), int(match[2])) >= _COUNTS_FROM


def pods_there(cgroupfs_root: Path, driver: CgroupDriver, root: str) -> frozenset[str]:
    """UIDs of the pods that have cgroups, as the kubelet has them.

    Raises:
        ProbeError: A directory that is there cannot be listed.
        PermissionDenied: This user may not.
    """
    return frozenset(_pods_there(cgroupfs_root, driver, root))


def _pods_there(cgroupfs_root: Path, driver: CgroupDriver, root: str) -> Iterator[str]:
    for directory, path in class_directories(cgroupfs_root, (driver,), root):
        try:
            names = os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _unlisted(directory, error) from None
        for name in names:
            place = parse_path(f"{path}/{name}", root)
            if place is not None and place.level is Level.POD:
                yield place.pod_uid


def _unlisted(path: Path | str, error: OSError) -> ProbeError | PermissionDenied:
    kind = PermissionDenied if isinstance(error, PermissionError) else ProbeError
    return kind(f"{path}: {error.strerror}")
