"""Time of the C core's polling: files of the machine, sweeps over 10 to 1,000 cgroups, and GPUs.

A pass reads the machine's files or GPUs once, and a sweep reads all cgroups once. Warm: passes back to back,
as in a profiler. In situ: one pass after 100 ms of sleep, the cost of an agent at 10 Hz; caches are cold, and
a pass takes two to nine times as long.
"""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Final

import psutil

from agent.bench.file_trees import CgroupTree, real_or_file_tree
from agent.bench.result import (
    PAUSE_S,
    ResultMismatch,
    ResultRow,
    ResultTable,
    RunSize,
    SuiteOutcome,
    row_from_ratio,
    rows_from_race,
)
from agent.bench.suites import poll_gpus
from agent.bench.timing import Contender, ContenderSamples, time_contenders
from agent.cgroup_audit.cgroup_settings import hugepage_size_name
from agent.model.cpuset import parse_cpus
from agent.model.snapshot import CgroupSample, Snapshot
from agent.model.time import NS
from agent.native.sampler import Sampler, SamplerOptions

SYSFS: Final = Path("/sys")
COLD_LIMIT_S: Final = 60.0
LOWER_BOUND: Final = "lower bound: bare system calls"
CALL_NOTE: Final = "core and lower bound include one call from Python each (0.2 us)"
DESCRIPTOR_BYTES: Final = os.sysconf("SC_PAGESIZE") + 512
"""Kernel memory of a descriptor after its first read, as the C core counts it [bytes]."""
HELD_ALL: Final = 64 << 20
"""Limit on the kernel memory of descriptors that is large enough to keep all cgroup files open [bytes]."""

FileParser = Callable[[bytes], object]
ValueKey = tuple[str, ...]
"""Identity of a value in a file, such as ``("2048", "0", "nr")``.

For a cgroup it is ``(uid, container, "mem_failcnt")``, then a page size if any.
"""
ReadFile = tuple[ValueKey, Path, FileParser]
"""Identity of a value, path of the file that contains it, and parser of the file's text."""
ReadValues = dict[ValueKey, object]

POOL_FILES: Final = {"nr": "nr_hugepages", "surplus": "surplus_hugepages"}


def run(run_size: RunSize) -> SuiteOutcome:
    """Time the reading of the machine's files, of cgroups and of GPUs.

    The machine's files and cgroups are read back to back and after pauses.
    """
    outcome = SuiteOutcome()
    _measure_machine(run_size, outcome)
    ratios: list[ResultRow] = []
    for count in run_size.groups:
        with real_or_file_tree(count) as (tree, reason):
            if reason:
                outcome.skipped.append(f"poll: {reason}; measured on {tree.backend}")
            ratios += _measure_cgroups(run_size, outcome, tree)
    if ratios:
        outcome.tables.append(ResultTable("sweeps of the core, in multiples of other sweeps", tuple(ratios)))
    poll_gpus.run(run_size, outcome)
    return outcome


def open_sampler(tree: CgroupTree | None, held_bytes: int = HELD_ALL) -> Sampler:
    """Return a C sampler that has read the machine's files once.

    The benchmark calls all further passes (readings of files) and sweeps (readings of all cgroups) itself.

    Args:
        tree: Cgroups to read; None: the sampler reads no cgroups.
        held_bytes: Limit of the kernel memory for descriptors of cgroup files, which the first sweep opens.
    """
    sampler = Sampler(
        SamplerOptions(
            sysfs_root=SYSFS,
            cgroupfs_root=tree.cgroupfs if tree else Path("/nonexistent"),
            kubelet_cgroup_root=tree.kubelet_root if tree else "/",
            period_ns=NS // 100,
            sweep_ns=3600 * NS,
            resync_ns=3600 * NS,
            held_bytes=held_bytes,
        )
    )
    sampler.run_pass()
    return sampler


def cgroup_contenders(
    tree: CgroupTree, sampler: Sampler, files: Sequence[ReadFile], stack: contextlib.ExitStack
) -> list[Contender]:
    """Return the contenders (implementations) of a sweep over all cgroup files, to be timed in turns.

    A sweep reads all files once. The contenders are the C core with all, half or none of the files kept open;
    only the system calls of the first two; only the system calls of a sweep that opens each file again; and
    Python with all files kept open.

    Args:
        tree: Cgroups.
        sampler: Sampler over `tree` that may keep all files open; it has made a sweep.
        files: Files of the sweep.
        stack: Exit stack that closes the resources of the contenders.

    Raises:
        OSError: This process has too few descriptors for the Python contender.
    """
    half, none = (open_sampler(tree, held * DESCRIPTOR_BYTES) for held in (len(files) // 2, 0))
    for other in (half, none):
        stack.callback(other.stop, 1.0)
        other.run_sweep()
    good = KeptDescriptorReader(files)
    stack.callback(good.close)
    mib = len(files) * DESCRIPTOR_BYTES / (1 << 20)
    return [
        Contender("core", "core: a pass, and a sweep of held files", lambda: _pass_and_sweep(sampler)),
        Contender("floor", LOWER_BOUND, lambda: sampler.run_lower_bound(sweep=True)),
        Contender(
            "opens_floor",
            "bare system calls: openat, read and close of the same files",
            lambda: sampler.run_lower_bound(sweep=True, opens=True),
        ),
        Contender("half", "core: half of the files are held", lambda: _pass_and_sweep(half)),
        Contender("half_floor", "bare system calls of that", lambda: half.run_lower_bound(sweep=True)),
        Contender("none", "core: no file is held", lambda: _pass_and_sweep(none)),
        Contender(
            "good", f"good Python: {len(files)} kept descriptors ({mib:.1f} MiB of kernel memory)", good
        ),
    ]


def sum_of_halves(timed: Mapping[str, ContenderSamples]) -> ContenderSamples:
    """Return the times of half a sweep of held files and half a sweep that holds none, by round."""
    pairs = zip(timed["core"].medians(), timed["none"].medians(), strict=True)
    return ContenderSamples(tuple(((held + opened) / 2,) for held, opened in pairs), 1)


def _ratio_rows(key: str, workload: str, timed: Mapping[str, ContenderSamples]) -> Iterator[ResultRow]:
    """Yield the ratios of sweeps of the core to others that are not the lower bound."""
    if "good" in timed:
        label = f"{workload}, held files, to good Python"
        yield row_from_ratio(f"{key}.core_to_python", label, timed["core"], timed["good"])
        label = f"{workload}, bare system calls, to good Python: no reader can be below"
        yield row_from_ratio(f"{key}.floor_to_python", label, timed["floor"], timed["good"])
        label = f"{workload}, half of the files held, to half of both sweeps"
        yield row_from_ratio(f"{key}.half_to_sum", label, timed["half"], sum_of_halves(timed))


def _pass_and_sweep(sampler: Sampler) -> None:
    sampler.run_pass()
    sampler.run_sweep()


def read_snapshot(sampler: Sampler) -> Snapshot:
    """Return the newest snapshot of a C sampler that has read its files at least once."""
    snapshot = sampler.read()
    assert snapshot is not None, "open_sampler() makes the first pass"
    return snapshot


def check_equal(workload: str, core: ReadValues, other: ReadValues) -> None:
    """Raise ResultMismatch unless the C core and another reader read equal values.

    The error names the first value that differs.
    """
    for key in sorted(core.keys() | other.keys()):
        if core.get(key) != other.get(key):
            raise ResultMismatch(
                f"workload {workload}: value {'/'.join(key)}: the C core read {core.get(key)}, Python "
                f"{other.get(key)}"
            )


def _measure_machine(run_size: RunSize, outcome: SuiteOutcome) -> None:
    files = machine_files(SYSFS)
    with closing(KeptDescriptorReader(files)) as good:
        sampler = open_sampler(None)
        plain = ReopeningReader(files)
        before = read_snapshot(sampler)
        sampler.run_pass()
        snapshot = read_snapshot(sampler)
        reads = snapshot.core.reads - before.core.reads
        check_read_counts("global pass", reads, sampler.run_lower_bound(sweep=False), len(files))
        for reader in (good, plain):
            check_equal("global pass", machine_values(snapshot), reader())
        contenders = [
            Contender("core", "core: dh_sampler_pass", sampler.run_pass),
            Contender("floor", LOWER_BOUND, lambda: sampler.run_lower_bound(sweep=False)),
            Contender("good", "good Python: kept descriptors, pread, int", good),
            Contender("plain", "plain Python: open, read, parse", plain),
            Contender(
                "psutil",
                f"psutil {version('psutil')}: CPU count, times, memory; not these files",
                psutil_machine,
            ),
        ]
        notes = [f"{len(files)} values equal in core, good and plain Python; {reads} reads each", CALL_NOTE]
        _measure_warm_and_cold(
            run_size, outcome, "pass", f"global pass, {len(files)} files, /sys", "", contenders, notes
        )
        sampler.stop(1.0)


def check_read_counts(workload: str, core: int, lower_bound: int, files: int) -> None:
    """Raise ResultMismatch unless C core, lower bound and Python read equally many files."""
    if not core == lower_bound == files:
        raise ResultMismatch(
            f"workload {workload}: the C core reads {core} files, the lower bound {lower_bound}, Python "
            f"{files}"
        )


def _measure_cgroups(run_size: RunSize, outcome: SuiteOutcome, tree: CgroupTree) -> list[ResultRow]:
    """Time sweeps over the cgroups of a tree; return the ratios of the core's sweeps to others."""
    count = len(tree.groups)
    with raised_descriptor_limit(), contextlib.ExitStack() as stack:
        sampler = open_sampler(tree)
        stack.callback(sampler.stop, 1.0)
        before = read_snapshot(sampler)
        if len(before.groups) != count:
            raise ResultMismatch(f"sweep: {count} cgroups exist, the C core found {len(before.groups)}")
        files = sweep_files(tree, before)
        machine = machine_files(SYSFS)
        sampler.run_sweep()
        snapshot = read_snapshot(sampler)
        reads = snapshot.core.reads - before.core.reads
        check_read_counts("sweep", reads, sampler.run_lower_bound(sweep=True) - len(machine), len(files))
        plain = ReopeningReader(files)
        if (unique := len(plain())) != len(files):
            raise ResultMismatch(
                f"sweep: values of {len(files)} files have only {unique} keys; not all can be compared"
            )
        values = flatten_values(plain())
        check_equal("sweep", sweep_values(snapshot, values), values)
        if (held := snapshot.core.descriptors - before.core.descriptors) != len(files):
            outcome.skipped.append(f"poll: {count} cgroups: only {held} of {len(files)} files can be held")
            return []
        try:
            contenders = cgroup_contenders(tree, sampler, files, stack)
        except OSError as error:
            outcome.skipped.append(f"poll: {count} cgroups: {os.strerror(error.errno or 0)}")
            return []
        contenders.append(Contender("plain", "plain Python: open, read, parse", plain))
        notes = [
            f"{len(values)} values equal; {reads} reads, and {len(machine)} of the global pass",
            "psutil and pynvml do not read cgroups",
            "good and plain Python without the files of the global pass",
            CALL_NOTE,
        ]
        section = f"global pass and sweep, {tree.backend}"
        warm, cold = _measure_warm_and_cold(
            run_size, outcome, f"groups{count}", section, f"{count} cgroups, ", contenders, notes
        )
        return [
            *_ratio_rows(f"poll.groups{count}", f"{count} cgroups, warm", warm),
            *_ratio_rows(f"poll.groups{count}.situ", f"{count} cgroups, in situ", cold),
        ]


@contextlib.contextmanager
def raised_descriptor_limit() -> Iterator[None]:
    """Raise the descriptor limit of this process to the hard limit in a ``with`` block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _measure_warm_and_cold(
    run_size: RunSize,
    outcome: SuiteOutcome,
    key: str,
    section: str,
    workload: str,
    contenders: list[Contender],
    notes: list[str],
) -> tuple[Mapping[str, ContenderSamples], Mapping[str, ContenderSamples]]:
    """Time the contenders back to back and after pauses, add a table for each, and return the samples."""
    warm = time_contenders(contenders, rounds=run_size.warm_rounds, limit_s=run_size.warm_limit_s)
    cold_contenders = contenders if run_size.cold_baselines else contenders[:2]
    cold = time_contenders(
        cold_contenders, rounds=run_size.cold_rounds, limit_s=COLD_LIMIT_S, pause_s=PAUSE_S
    )
    outcome.reference_ns += warm.reference
    for name, timed, conditions in (
        ("warm", warm, "warm, back to back"),
        ("situ", cold, "in situ, 100 ms apart"),
    ):
        rows = rows_from_race(f"poll.{key}.{name}", timed, "floor")
        outcome.tables.append(
            ResultTable(f"{workload}{conditions}", rows, LOWER_BOUND, tuple(notes), section)
        )
    return warm.timed, cold.timed


# --- reading in Python --------------------------------------------------------------------------------------
#
# KeptDescriptorReader is what a careful author writes ("good Python" in reports): descriptors opened once,
# os.pread, int(). ReopeningReader ("plain Python") opens, reads and parses each file each time. The values of
# both are compared with those of the C core before anything is timed.


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


# --- files of the machine --------------------------------------------------------------------------------


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


# --- files of cgroups ------------------------------------------------------------------------------------

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
                    file = directory / pattern.format(hugepage_size_name(kib))
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
