"""Sampler: the C core's thread that reads CPUs, hugepages and cgroups, and the decoder of its snapshots.

Decoded samples share no memory with the C core.
"""

import errno
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap
from pathlib import Path
from typing import Any, Final

from agent.errors import ConfigError, ProbeError
from agent.model.cpuset import CpuSet
from agent.model.gpu import SamplerField, WakeCondition
from agent.model.reading import DURATION_BOUNDS_S, Missing, PassDurations, SourceSample, return_code_text
from agent.model.snapshot import (
    CgroupKind,
    CgroupSample,
    CpuSetsSample,
    CpuThrottleSample,
    HugepagePoolSample,
    HugetlbSample,
    NativeCoreStats,
    NumaCpuSample,
    Snapshot,
)
from agent.model.time import NS
from agent.native._core import ffi, lib
from agent.native.published_tables import (
    SOURCE_STATES,
    CopiedBytes,
    CoreThread,
    RecordTable,
    StampedRecordTable,
    check_record_size,
    failure_text,
    missing_member,
    pass_durations_by_source,
    reading_of_member,
)

_CPU_BYTES: Final = lib.DH_CPU_WORDS * 8
_GROUP_CPU_BYTES: Final = lib.DH_GROUP_CPU_WORDS * 8
_HEAD_SIZE: Final = ffi.sizeof("struct dh_snapshot")
_HEAD: Final = struct.Struct("=6I10Q2QiI")
_CPUS_AT: Final = ffi.offsetof("struct dh_snapshot", "cpu_valid")
_CPUS: Final = struct.Struct("=QQiI" + f"{_CPU_BYTES}s" * 3)
_SOURCES_AT: Final = ffi.offsetof("struct dh_snapshot", "source")
_SOURCE: Final = struct.Struct("=IIiI4Q")
_NODE: Final = struct.Struct(f"=QQIiQQ{_CPU_BYTES}s")
_THROTTLE: Final = struct.Struct("=QQIi2Q")
_POOL: Final = struct.Struct("=QQQii5Q")
_HUGETLB_WORDS: Final = ffi.sizeof("struct dh_hugetlb") // 8
_GROUP: Final = struct.Struct(
    f"=3QIIIi{lib.DH_UID_LEN}s{lib.DH_NAME_LEN}s10Q{_GROUP_CPU_BYTES}s{lib.DH_HP_MAX * _HUGETLB_WORDS}Q"
)
_HUGETLB_INDEX: Final = 20  # of the first hugetlb[] member in a record that _GROUP unpacked

_LAYOUTS: Final = {
    "dh_source": _SOURCE,
    "dh_node": _NODE,
    "dh_throttle": _THROTTLE,
    "dh_pool": _POOL,
    "dh_group": _GROUP,
}
for _record, _layout in _LAYOUTS.items():
    check_record_size(_record, _layout)
if (_HEAD.size - _CPUS.size + 3 * _CPU_BYTES, _CPUS_AT + _CPUS.size) != (_CPUS_AT, _SOURCES_AT):
    raise ImportError(
        f"C core: struct dh_snapshot: unexpected offsets {_CPUS_AT} of CPUs and {_SOURCES_AT} of sources: "
        "rebuild it"
    )

if tuple(lib.dh_duration_bound(i) for i in range(lib.DH_DURATION_NUM - 1)) != tuple(
    round(bound * NS) for bound in DURATION_BOUNDS_S[:-1]
):
    raise ImportError("C core: unexpected bounds of durations: rebuild it")
SOURCE_NAMES: Final = ("cpus", "throttle", "hugepages", "cgroups")
_CPU_FIELDS: Final = (lib.DH_CPU_PRESENT, lib.DH_CPU_ONLINE, lib.DH_CPU_ISOLATED)
_KINDS: Final = {lib.DH_GROUP_POD: CgroupKind.POD, lib.DH_GROUP_CONTAINER: CgroupKind.CONTAINER}


def field_name(field: int) -> str:
    """Return the kernel's name of the file, or of the key in it, that a sampler field is read from."""
    name = lib.dh_field_name(field)
    return f"field {field}" if name == ffi.NULL else ffi.string(name).decode()


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii", "replace")


class SnapshotDecoder:
    """Decoder of the sampler's tables into snapshots; unchanged records keep their samples."""

    def __init__(self, roots: Mapping[int, Path]) -> None:
        """Create the decoder.

        Args:
            roots: Paths of sysfs and cgroupfs for error texts, by the C core's number for the root.
        """
        self._roots = roots
        self._cpus = RecordTable(_CPUS, _decode_cpus)
        self._nodes = RecordTable(_NODE, _decode_numa_node, lambda node: (node.numa_node,))
        self._throttle = RecordTable(_THROTTLE, _decode_throttle)
        self._pools = RecordTable(_POOL, _decode_hugepage_pool, _pool_sort_key)
        self._groups = StampedRecordTable(_GROUP, _decode_cgroup)

    @property
    def newest_stamp(self) -> int:
        """Highest stamp (change number) of the decoded cgroup records; only higher ones are new."""
        return self._groups.newest

    def decode(self, data: CopiedBytes) -> Snapshot:
        """Decode one copy of the sampler's tables made by ``dh_sampler_read()``."""
        _, _, nodes, pools, groups, dropped, seq, _, *counts, _, _, _, throttles = _HEAD.unpack_from(data)
        passes, reads, opens, descriptors, watches, kernel_bytes, unwatched, overflows = counts
        throttle_at = _HEAD_SIZE + nodes * _NODE.size
        pools_at = throttle_at + throttles * _THROTTLE.size
        groups_at = pools_at + pools * _POOL.size
        sources = _SOURCE.iter_unpack(data[_SOURCES_AT:_HEAD_SIZE])
        return Snapshot(
            seq=seq,
            cpus=self._cpus.samples(data, _CPUS_AT, _SOURCES_AT)[0],
            nodes=self._nodes.samples(data, _HEAD_SIZE, throttle_at),
            throttle=self._throttle.samples(data, throttle_at, pools_at),
            pools=self._pools.samples(data, pools_at, groups_at),
            groups=self._groups.samples(data, groups_at, groups),
            sources=tuple(starmap(self._source, zip(SOURCE_NAMES, sources, strict=True))),
            core=NativeCoreStats(
                passes=passes,
                wakes=seq,
                reads=reads,
                opens=opens,
                descriptors=descriptors,
                watches=watches,
                kernel_bytes=kernel_bytes,
                groups_dropped=dropped,
                overflows=overflows,
                unwatched=unwatched,
            ),
        )

    def _source(self, name: str, raw: tuple[int, ...]) -> SourceSample:
        state, err_field, err, _, passes, beat_ns, period_ns, failures = raw
        detail = failure_text(field_name(err_field), self._roots.get(err_field), err) if err else ""
        return SourceSample(name, SOURCE_STATES[state], beat_ns, period_ns, failures, detail, passes)


def _decode_cpus(raw: tuple[Any, ...]) -> CpuSetsSample:
    valid, seen, err, _, *sets = raw

    def cpu_set(words: bytes, field: int) -> CpuSet | Missing:
        return int.from_bytes(words, "little") if valid >> field & 1 else missing_member(seen, err, field)

    return CpuSetsSample._make(map(cpu_set, sets, _CPU_FIELDS))


def _decode_numa_node(raw: tuple[Any, ...]) -> NumaCpuSample:
    valid, seen, node, err, core, package, cpus = raw
    known = valid >> lib.DH_NODE_CPUS & 1
    return NumaCpuSample(
        numa_node=node,
        cpus=int.from_bytes(cpus, "little") if known else missing_member(seen, err, lib.DH_NODE_CPUS),
        throttle_core=reading_of_member(core, lib.DH_NODE_THROTTLE_CORE, valid, seen, err),
        throttle_package=reading_of_member(package, lib.DH_NODE_THROTTLE_PACKAGE, valid, seen, err),
    )


def _decode_throttle(raw: tuple[Any, ...]) -> CpuThrottleSample:
    valid, seen, cpu, err, core, package = raw
    return CpuThrottleSample(
        cpu=cpu,
        core=reading_of_member(core, lib.DH_NODE_THROTTLE_CORE, valid, seen, err),
        package=reading_of_member(package, lib.DH_NODE_THROTTLE_PACKAGE, valid, seen, err),
    )


_POOL_MEMBERS: Final = (
    *(lib.DH_POOL_NR, lib.DH_POOL_FREE, lib.DH_POOL_RESERVED, lib.DH_POOL_SURPLUS),
    lib.DH_POOL_OVERCOMMIT,
)
"""Numbers of the readings of a pool, in the order of the record and of HugepagePoolSample."""


def _decode_hugepage_pool(raw: tuple[Any, ...]) -> HugepagePoolSample:
    valid, seen, size_kib, node, err, *values = raw
    readings = [
        value if valid >> member & 1 else missing_member(seen, err, member)
        for member, value in zip(_POOL_MEMBERS, values, strict=True)
    ]
    return HugepagePoolSample(size_kib, None if node == lib.DH_MACHINE else node, *readings)


def _decode_cgroup(raw: tuple[Any, ...]) -> CgroupSample | None:
    _stamp, valid, seen, ident, kind, sizes, err, uid, name, *values = raw
    if not ident:
        return None
    # members and fields have the same order
    readings = [reading_of_member(values[i], lib.DH_GROUP_POPULATED + i, valid, seen, err) for i in range(9)]
    limit = reading_of_member(values[9], lib.DH_GROUP_MEM_LIMIT, valid, seen, err)
    has_cpus = valid >> lib.DH_GROUP_CPUS & 1
    cpus = int.from_bytes(values[10], "little") if has_cpus else missing_member(seen, err, lib.DH_GROUP_CPUS)
    hugetlb = _decode_hugetlbs(raw[_HUGETLB_INDEX : _HUGETLB_INDEX + _HUGETLB_WORDS * sizes], err)
    return CgroupSample._make((ident, _KINDS[kind], _text(uid), _text(name), *readings, limit, cpus, hugetlb))


@lru_cache(64)  # most groups use no hugepages and share one value
def _decode_hugetlbs(raw: tuple[int, ...], err: int) -> tuple[HugetlbSample, ...]:
    starts = range(0, len(raw), _HUGETLB_WORDS)
    return tuple(_decode_hugetlb(raw[at : at + _HUGETLB_WORDS], err) for at in starts)


def _decode_hugetlb(raw: tuple[Any, ...], err: int) -> HugetlbSample:
    size_kib, limit, rsvd_limit, events, rsvd_failed, valid, seen = raw
    return HugetlbSample(
        size_kib=size_kib,
        max=reading_of_member(limit, lib.DH_GROUP_HT_MAX, valid, seen, err),
        rsvd_max=reading_of_member(rsvd_limit, lib.DH_GROUP_HT_RSVD_MAX, valid, seen, err),
        events_max=reading_of_member(events, lib.DH_GROUP_HT_EVENTS, valid, seen, err),
        rsvd_failed=reading_of_member(rsvd_failed, lib.DH_GROUP_HT_RSVD_FAILED, valid, seen, err),
    )


def _pool_sort_key(pool: HugepagePoolSample) -> tuple[int, int]:
    return (pool.size_kib, -1 if pool.numa_node is None else pool.numa_node)


# --- the sampler -------------------------------------------------------------------------------------------

_FIELDS: Final = {field: getattr(lib, f"DH_{field.name}") for field in SamplerField}


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Options of a sampler: root directories, periods, and value changes that wake the reader."""

    sysfs_root: Path = Path("/sys")
    cgroupfs_root: Path = Path("/sys/fs/cgroup")
    kubelet_cgroup_root: str = "/"
    period_ns: int = NS
    """Time between two passes over the files that are read in every pass [ns]: 10 ms to 1 h."""
    sweep_ns: int = 10 * NS
    """Time in which every cgroup's counters that the kernel does not notify about are read once [ns].

    At least `period_ns`. Counters that do not change are read once in six times this time.
    """
    resync_ns: int = 300 * NS
    """Time in which every file is read once, whether or not the kernel notified [ns]."""
    group_max: int = 4096
    """Largest number of cgroups that the sampler watches: 1 to 65536."""
    held_bytes: int = 4 << 20
    """Kernel memory for descriptors of cgroup files that stay open between two reads [bytes]; 0: none stay
    open. Fewer stay open if RLIMIT_NOFILE is low."""
    wakes: Sequence[WakeCondition] = ()


class Sampler(CoreThread[Snapshot]):
    """Sampler: one thread that reads CPUs, hugepages and cgroups periodically, and its newest snapshot.

    Until the first pass (reading of all files) has ended, the snapshot counts 0 passes, and every source's
    state is "starting".

    Raises:
        ConfigError: An option is out of range, or a root too long.
        ProbeError: The kernel refused descriptors or memory.
    """

    def __init__(self, options: SamplerOptions) -> None:
        sweep_ns = max(options.sweep_ns, options.period_ns)
        record = ffi.new(
            "struct dh_options *",
            {
                "size": ffi.sizeof("struct dh_options"),
                "version": lib.DH_VERSION,
                "period_ns": options.period_ns,
                "sweep_ns": sweep_ns,
                "resync_ns": max(options.resync_ns, sweep_ns),
                "group_max": options.group_max,
                "held_bytes": options.held_bytes,
            },
        )
        wakes = ffi.new(
            "struct dh_wake[]",
            [
                {
                    "field": _FIELDS[wake.field],
                    "mode": lib.DH_WAKE_RISE if wake.threshold else lib.DH_WAKE_CHANGE,
                    "threshold": wake.threshold,
                    "window_ns": wake.window_ns,
                }
                for wake in options.wakes
            ],
        )
        out = ffi.new("struct dh_sampler **")
        code = lib.dh_sampler_open(
            record,
            os.fsencode(options.sysfs_root),
            os.fsencode(options.cgroupfs_root),
            os.fsencode(options.kubelet_cgroup_root),
            wakes,
            len(wakes),
            out,
        )
        if code:
            raise _open_error(code, options)
        self._fd: int = lib.dh_sampler_eventfd(out[0])
        decoder = SnapshotDecoder({lib.DH_SYSFS: options.sysfs_root, lib.DH_CGROUPFS: options.cgroupfs_root})
        super().__init__(
            "sampler",
            "sampler thread",
            out[0],
            lib.dh_sampler_size(out[0]),
            decoder.decode,
            self._fd,
            lambda buffer, size: lib.dh_sampler_read(self._handle, decoder.newest_stamp, buffer, size),
        )

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a value that a rule evaluates has changed."""
        return self._fd

    def rescan_fileno(self) -> int:
        """Return the eventfd to which other threads write when CPUs, memory or NUMA nodes have changed."""
        return int(lib.dh_sampler_rescan_fd(self._handle))

    def last_wake_ns(self) -> int:
        """Return when the sampler last woke the reader [ns, CLOCK_MONOTONIC]; 0: never. For benchmarks."""
        return int(lib.dh_sampler_notified_ns(self._handle))

    def clear(self) -> None:
        """Reset the wake-up descriptor; call this before :meth:`read`. Never blocks."""
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return

    def pass_durations(self) -> Mapping[str, PassDurations]:
        """Return how long the readings of each source took. Any thread may call it until :meth:`stop`."""
        return pass_durations_by_source(
            lambda records: lib.dh_sampler_durations(self._handle, records), SOURCE_NAMES
        )

    def run_pass(self) -> None:
        """Read all files once on the caller's thread, without :meth:`start`. For benchmarks and tests."""
        if lib.dh_sampler_pass(self._handle):
            raise ProbeError(
                "sampler: files not read: the sampler's own thread reads them; stop the sampler first"
            )

    def run_sweep(self) -> int:
        """Read, on the caller's thread, the cgroups' counters for which the kernel sends no notification.

        Returns the number of cgroups that were read. For benchmarks and tests.
        """
        return int(lib.dh_sampler_sweep(self._handle))

    def run_lower_bound(self, *, sweep: bool, opens: bool = False) -> int:
        """Repeat only the system calls of a pass (reading of all files); return the number of reads.

        For benchmarks.

        ``sweep``: also repeat the calls of :meth:`run_sweep`. ``opens``: open every file of the pass, also
        those whose descriptors stay open.
        """
        swept = lib.DH_BARE_OPENS if opens else lib.DH_BARE_SWEEP
        return int(lib.dh_sampler_lower_bound(self._handle, swept if sweep else lib.DH_BARE_PASS))


def _open_error(code: int, options: SamplerOptions) -> Exception:
    if code == -errno.EINVAL:
        return ConfigError(
            f"sampler: period {options.period_ns / 1e6:g} ms is not in 10 ms to 1 h, "
            f"or the cgroup limit {options.group_max} is not in 1 to 65536"
        )
    if code == -errno.ENAMETOOLONG:
        roots = (str(options.sysfs_root), str(options.cgroupfs_root), options.kubelet_cgroup_root)
        longest = max(roots, key=lambda root: len(os.fsencode(root)))
        return ConfigError(f"sampler: root path {longest!r} is {len(os.fsencode(longest))} bytes, limit 200")
    return ProbeError(f"sampler: cannot be opened: {return_code_text(code)}")
