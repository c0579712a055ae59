"""Python code that reads the files which the C core polls, and psutil: the alternatives in benchmarks.

KeptDescriptorReader is what a careful author writes (``good Python`` in reports): descriptors opened once,
``os.pread``, ``int()``. ReopeningReader (``plain Python``) opens, reads and parses each file each time.
Suites compare the values of both with those of the C core before they time anything.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from agent.bench.file_trees import CgroupTree
from agent.model.cpuset import parse_cpus
from agent.model.snapshot import CgroupSample, Snapshot

FileParser = Callable[[bytes], object]
ValueKey = tuple[str, ...]
"""Identity of a value in a file, such as ``("2048", "0", "nr")``.

For a cgroup it is ``(uid, container, "mem_failcnt")``, then a page size if any.
"""
ReadFile = tuple[ValueKey, Path, FileParser]
"""Identity of a value, path of the file that contains it, and parser of the file's text."""
ReadValues = dict[ValueKey, object]

POOL_FILES: Final = {"nr": "nr_hugepages", "surplus": "surplus_hugepages"}


class KeptDescriptorReader:
    """Reader that opens each file once, keeps the descriptors, and reads all values with each call."""

    def __init__(self, files: Sequence[ReadFile]) -> None:
        self._open: list[tuple[ValueKey, int, FileParser]] = []
        try:
            for key, path, parse in files:
                self._open.append((key, os.open(path, os.O_RDONLY | os.O_CLOEXEC), parse))
        except OSError:
            self.close()
            raise

    def __call__(self) -> ReadValues:
        return {key: parse(os.pread(fd, 4096, 0)) for key, fd, parse in self._open}

    def close(self) -> None:
        """Close the descriptors of all files."""
        for _, fd, _ in self._open:
            os.close(fd)


class ReopeningReader:
    """Reader that opens, reads and closes each file with each call, as most scripts do."""

    def __init__(self, files: Sequence[ReadFile]) -> None:
        self._files = files

    def __call__(self) -> ReadValues:
        values: ReadValues = {}
        for key, path, parse in self._files:
            with open(path, "rb") as file:
                values[key] = parse(file.read())
        return values


def parse_cpu_list(text: bytes) -> object:
    """Parse a CPU list such as ``0-3,8``."""
    return parse_cpus(text.decode())


def key_value_parser(wanted: Mapping[bytes, str]) -> FileParser:
    """Return a parser of ``key value`` lines that keeps the keys of ``wanted``, renamed to its values."""

    def parse(text: bytes) -> object:
        found = {}
        for line in text.splitlines():
            key, _, value = line.partition(b" ")
            if key in wanted:
                found[wanted[key]] = int(value)
        return found

    return parse


# --- the machine ------------------------------------------------------------------------------------------


def machine_files(sysfs: Path) -> list[ReadFile]:
    """Return the files that the C core reads in each pass (reading of the polled files).

    They are the list of online CPUs, and the hugepage pools of NUMA nodes: of a pool without pages one file.
    """
    files: list[ReadFile] = [(("cpus", "online"), sysfs / "devices/system/cpu/online", parse_cpu_list)]
    for pool in sorted(sysfs.glob("devices/system/node/node[0-9]*/hugepages/hugepages-*kB")):
        size = pool.name.removeprefix("hugepages-").removesuffix("kB")
        node = pool.parents[1].name.removeprefix("node")
        pages = int((pool / POOL_FILES["nr"]).read_text())
        members = POOL_FILES if pages else {"nr": POOL_FILES["nr"]}
        files += [((size, node, member), pool / name, int) for member, name in members.items()]
    return files


def machine_values(snapshot: Snapshot) -> ReadValues:
    """Return the values of the files of :func:`machine_files` from a snapshot of the C core."""
    values: ReadValues = {("cpus", "online"): snapshot.cpus.online}
    for pool in snapshot.pools:
        if pool.numa_node is not None:
            size, node = str(pool.size_kib), str(pool.numa_node)
            members = POOL_FILES if pool.nr else ("nr",)
            values |= {(size, node, member): getattr(pool, member) for member in members}
    return values


def psutil_machine() -> int:
    """Read CPU count, CPU times and memory with psutil, which knows neither hugepages nor CPU lists.
    Return the CPU count."""
    psutil.cpu_times(percpu=True)
    psutil.virtual_memory()
    return psutil.cpu_count() or 0


# --- cgroups ----------------------------------------------------------------------------------------------

CPU_STAT: Final = {b"nr_periods": "cpu_periods", b"nr_throttled": "cpu_throttled"}

# Counters whose changes the kernel does not report; a sweep reads them.
SWEPT: Final[Mapping[str, Mapping[str, tuple[str, FileParser]]]] = {
    "memory": {
        "memory.failcnt": ("mem_failcnt", int),
        "memory.oom_control": ("", key_value_parser({b"oom_kill": "mem_oom_kill"})),
    },
    "cpu": {"cpu.stat": ("", key_value_parser(CPU_STAT))},
    "v2": {"cpu.stat": ("", key_value_parser(CPU_STAT))},
    "hugetlb": {},
}
SWEPT_SIZE: Final = {"hugetlb": {"hugetlb.{}.failcnt": "events_max"}}


def format_page_size(size_kib: int) -> str:
    """Format a page size as in the file names of the hugetlb controller: ``2MB``."""
    for unit, kib in (("GB", 1 << 20), ("MB", 1 << 10)):
        if size_kib >= kib:
            return f"{size_kib // kib}{unit}"
    return f"{size_kib}KB"


def sweep_files(tree: CgroupTree, snapshot: Snapshot) -> list[ReadFile]:
    """Return the cgroup files that the C core reads in one sweep (reading of all cgroups).

    The files are those for the page sizes of this machine.
    """
    sizes = [
        pool.size_kib for pool in snapshot.pools if pool.numa_node is None and (pool.nr or pool.overcommit)
    ]
    v1_cpu = "cpu" in tree.hierarchies
    files: list[ReadFile] = []
    for group in tree.groups:
        for hierarchy in tree.hierarchies:
            directory = tree.path(hierarchy, *group)
            wanted: dict[str, tuple[str, FileParser]] = {}
            if not (hierarchy == "v2" and v1_cpu):
                wanted |= SWEPT[hierarchy]
            for name, (member, parse) in wanted.items():
                files.append(((*group, member or name), directory / name, parse))
            for pattern, member in SWEPT_SIZE.get(hierarchy, {}).items():
                for kib in sizes:
                    file = directory / pattern.format(format_page_size(kib))
                    files.append(((*group, member, str(kib)), file, int))
    return [file for file in files if file[1].exists()]


def flatten_values(values: ReadValues) -> ReadValues:
    """Return all values with one key each: a file with several values gives one key per member."""
    out: ReadValues = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out |= {(*key[:-1], member): inner for member, inner in value.items()}
        else:
            out[key] = value
    return out


def sweep_values(snapshot: Snapshot, wanted: ReadValues) -> ReadValues:
    """Return the values in a snapshot of the C core that have the keys of ``wanted``.

    A value of None means that the snapshot does not have the cgroup.
    """
    groups = {(group.pod_uid, group.container): group for group in snapshot.groups}
    return {key: _cgroup_value(groups.get((key[0], key[1])), *key[2:]) for key in wanted}


def _cgroup_value(group: CgroupSample | None, member: str, size_kib: str = "") -> object:
    if group is None or not size_kib:
        return getattr(group, member, None)
    return next(
        (getattr(counter, member) for counter in group.hugetlb if counter.size_kib == int(size_kib)), None
    )
