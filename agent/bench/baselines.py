"""Python readers of the files that the C core polls, and psutil, as alternatives to compare with.

GoodReader is what a careful author writes: descriptors opened once, ``os.pread``, ``int()``. PlainReader
opens, reads and parses each file each time. Both return the values, which suites compare with the core's
before they time anything.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from agent.bench.trees import CgroupTree
from agent.model.cpuset import parse_cpus
from agent.model.snapshot import GroupSample, Snapshot

Parse = Callable[[bytes], object]
Key = tuple[str, ...]
"""Key of a value, such as ``("2048", "0", "nr")``; for a cgroup ``(uid, container, "mem_failcnt")``, then a
page size if any."""
File = tuple[Key, Path, Parse]
"""Key of the value, path of the file, and parser of its text."""
Values = dict[Key, object]

POOL_FILES: Final = {"nr": "nr_hugepages", "surplus": "surplus_hugepages"}


class GoodReader:
    """Reader that keeps its descriptors open and reads each file from the start."""

    def __init__(self, files: Sequence[File]) -> None:
        self._open: list[tuple[Key, int, Parse]] = []
        try:
            for key, path, parse in files:
                self._open.append((key, os.open(path, os.O_RDONLY | os.O_CLOEXEC), parse))
        except OSError:
            self.close()
            raise

    def __call__(self) -> Values:
        return {key: parse(os.pread(fd, 4096, 0)) for key, fd, parse in self._open}

    def close(self) -> None:
        """Close the descriptors."""
        for _, fd, _ in self._open:
            os.close(fd)


class PlainReader:
    """Reader that opens each file each time, as most scripts do."""

    def __init__(self, files: Sequence[File]) -> None:
        self._files = files

    def __call__(self) -> Values:
        values: Values = {}
        for key, path, parse in self._files:
            with open(path, "rb") as file:
                values[key] = parse(file.read())
        return values


def parse_cpu_list(text: bytes) -> object:
    """Parse a CPU list such as ``0-3,8``."""
    return parse_cpus(text.decode())


def key_value_parser(wanted: Mapping[bytes, str]) -> Parse:
    """Return a parser of ``key value`` lines that keeps the keys in ``wanted`` and renames them."""

    def parse(text: bytes) -> object:
        found = {}
        for line in text.splitlines():
            key, _, value = line.partition(b" ")
            if key in wanted:
                found[wanted[key]] = int(value)
        return found

    return parse


# --- the machine ------------------------------------------------------------------------------------------


def machine_files(sysfs: Path) -> list[File]:
    """Return the files of a quiet pass: online CPUs, and sizes of the hugepage pools of NUMA nodes."""
    files: list[File] = [(("cpus", "online"), sysfs / "devices/system/cpu/online", parse_cpu_list)]
    for pool in sorted(sysfs.glob("devices/system/node/node[0-9]*/hugepages/hugepages-*kB")):
        size = pool.name.removeprefix("hugepages-").removesuffix("kB")
        node = pool.parents[1].name.removeprefix("node")
        files += [((size, node, member), pool / name, int) for member, name in POOL_FILES.items()]
    return files


def machine_values(snapshot: Snapshot) -> Values:
    """Return the values of :func:`machine_files` as the C core read them."""
    values: Values = {("cpus", "online"): snapshot.cpus.online}
    for pool in snapshot.pools:
        if pool.node is not None:
            size, node = str(pool.size_kib), str(pool.node)
            values |= {(size, node, member): getattr(pool, member) for member in POOL_FILES}
    return values


def psutil_machine() -> int:
    """Read the number of CPUs with psutil. psutil knows neither hugepages nor CPU lists."""
    psutil.cpu_times(percpu=True)
    psutil.virtual_memory()
    return psutil.cpu_count() or 0


# --- cgroups ----------------------------------------------------------------------------------------------

CPU_STAT: Final = {b"nr_periods": "cpu_periods", b"nr_throttled": "cpu_throttled"}

# Counters that the kernel never notifies of; a sweep reads them.
SWEPT: Final[Mapping[str, Mapping[str, tuple[str, Parse]]]] = {
    "memory": {
        "memory.failcnt": ("mem_failcnt", int),
        "memory.oom_control": ("", key_value_parser({b"oom_kill": "mem_oom_kill"})),
    },
    "cpu": {"cpu.stat": ("", key_value_parser(CPU_STAT))},
    "v2": {"cpu.stat": ("", key_value_parser(CPU_STAT))},
    "hugetlb": {},
}
SWEPT_SIZE: Final = {"hugetlb": {"hugetlb.{}.failcnt": "events_max"}}


def cgroup_size(size_kib: int) -> str:
    """Format a page size as in the file names of the hugetlb controller."""
    for unit, kib in (("GB", 1 << 20), ("MB", 1 << 10)):
        if size_kib >= kib:
            return f"{size_kib // kib}{unit}"
    return f"{size_kib}KB"


def sweep_files(tree: CgroupTree, snapshot: Snapshot) -> list[File]:
    """Return the files that a sweep reads, except for page sizes of which the machine has no pages."""
    sizes = [pool.size_kib for pool in snapshot.pools if pool.node is None and (pool.nr or pool.overcommit)]
    v1_cpu = "cpu" in tree.hierarchies
    files: list[File] = []
    for group in tree.groups:
        for hierarchy in tree.hierarchies:
            directory = tree.path(hierarchy, *group)
            wanted: dict[str, tuple[str, Parse]] = {}
            if not (hierarchy == "v2" and v1_cpu):
                wanted |= SWEPT[hierarchy]
            for name, (member, parse) in wanted.items():
                files.append(((*group, member or name), directory / name, parse))
            for pattern, member in SWEPT_SIZE.get(hierarchy, {}).items():
                for kib in sizes:
                    file = directory / pattern.format(cgroup_size(kib))
                    files.append(((*group, member, str(kib)), file, int))
    return [file for file in files if file[1].exists()]


def flatten(values: Values) -> Values:
    """Flatten a reader's result: give each value of a file with several values its own key."""
    out: Values = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out |= {(*key[:-1], member): inner for member, inner in value.items()}
        else:
            out[key] = value
    return out


def sweep_values(snapshot: Snapshot, wanted: Values) -> Values:
    """Return the values named in ``wanted`` as the core read them; None for a cgroup that the core lacks."""
    groups = {(group.pod_uid, group.container): group for group in snapshot.groups}
    return {key: _group_value(groups.get((key[0], key[1])), *key[2:]) for key in wanted}


def _group_value(group: GroupSample | None, member: str, size_kib: str = "") -> object:
    if group is None or not size_kib:
        return getattr(group, member, None)
    return next(
        (getattr(counter, member) for counter in group.hugetlb if counter.size_kib == int(size_kib)), None
    )
