"""Decoder of the sampler's records into samples of the model, which share no memory with the C core.

Its helpers are used for the records of other threads as well.
"""

import errno
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import starmap
from pathlib import Path
from typing import Any, Final

from agent.model.cpuset import CpuSet
from agent.model.reading import (
    DURATION_BOUNDS_S,
    Absence,
    Missing,
    PassDurations,
    Reading,
    SourceSample,
    SourceState,
    error_text,
)
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
from agent.native.published_tables import CopiedBytes, RecordTable, StampedRecordTable, check_record_size

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

ABSENT: Final = Missing(Absence.ABSENT, errno.ENOENT)
SOURCE_NAMES: Final = ("cpus", "throttle", "hugepages", "cgroups")
_CPU_FIELDS: Final = (lib.DH_CPU_PRESENT, lib.DH_CPU_ONLINE, lib.DH_CPU_ISOLATED)
SOURCE_STATES: Final = {
    lib.DH_STATE_ABSENT: SourceState.ABSENT,
    lib.DH_STATE_OK: SourceState.OK,
    lib.DH_STATE_FAILING: SourceState.FAILING,
    lib.DH_STATE_STARTING: SourceState.STARTING,
}
_KINDS: Final = {lib.DH_GROUP_POD: CgroupKind.POD, lib.DH_GROUP_CONTAINER: CgroupKind.CONTAINER}


def field_name(field: int) -> str:
    """Return the kernel's name of the file, or of the key in it, that a sampler field is read from."""
    name = lib.dh_field_name(field)
    return f"field {field}" if name == ffi.NULL else ffi.string(name).decode()


def failure_text(name: str, root: Path | None, err: int) -> str:
    """Return the text of a failed read: ``nr_hugepages: I/O error`` or ``sysfs root /x: Not a directory``."""
    return f"{name} {root}: {error_text(err)}" if root else f"{name}: {error_text(err)}"


def _missing(seen: int, err: int, field: int) -> Missing:
    return Missing(Absence.UNREADABLE, err) if seen >> field & 1 else ABSENT


def reading_of_member(value: int, field: int, valid: int, seen: int, err: int) -> Reading:
    """Return a member's value, or Missing with the reason.

    Args:
        value: Value of the member in the record.
        field: Number of the member's bit in the masks.
        valid: Mask of the members that were read.
        seen: Mask of the members that exist, or existed before.
        err: Errno of an existing member that cannot be read.
    """
    return value if valid >> field & 1 else _missing(seen, err, field)


def printable_text(padded: bytes) -> str:
    """Decode zero-padded text, which the C core has made printable ASCII."""
    return padded.rstrip(b"\0").decode("ascii")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii", "replace")


class SnapshotDecoder:
    """Decoder of the sampler's tables into snapshots; unchanged records keep their samples."""

    def __init__(self, roots: Mapping[int, Path]) -> None:
        """Create the decoder.

        Args:
            roots: Paths of sysfs and cgroupfs for error texts, by the C core's field of the root.
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
        return int.from_bytes(words, "little") if valid >> field & 1 else _missing(seen, err, field)

    return CpuSetsSample._make(map(cpu_set, sets, _CPU_FIELDS))


def _decode_numa_node(raw: tuple[Any, ...]) -> NumaCpuSample:
    valid, seen, node, err, core, package, cpus = raw
    known = valid >> lib.DH_NODE_CPUS & 1
    return NumaCpuSample(
        numa_node=node,
        cpus=int.from_bytes(cpus, "little") if known else _missing(seen, err, lib.DH_NODE_CPUS),
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


def _decode_hugepage_pool(raw: tuple[Any, ...]) -> HugepagePoolSample:
    valid, seen, size_kib, node, err, nr, free, reserved, surplus, overcommit = raw
    return HugepagePoolSample(
        size_kib=size_kib,
        numa_node=None if node == lib.DH_MACHINE else node,
        nr=reading_of_member(nr, lib.DH_POOL_NR, valid, seen, err),
        free=reading_of_member(free, lib.DH_POOL_FREE, valid, seen, err),
        reserved=reading_of_member(reserved, lib.DH_POOL_RESERVED, valid, seen, err),
        surplus=reading_of_member(surplus, lib.DH_POOL_SURPLUS, valid, seen, err),
        overcommit=reading_of_member(overcommit, lib.DH_POOL_OVERCOMMIT, valid, seen, err),
    )


def _decode_cgroup(raw: tuple[Any, ...]) -> CgroupSample | None:
    _stamp, valid, seen, ident, kind, sizes, err, uid, name, *values = raw
    if not ident:
        return None
    # members and fields have the same order
    readings = [reading_of_member(values[i], lib.DH_GROUP_POPULATED + i, valid, seen, err) for i in range(9)]
    limit = reading_of_member(values[9], lib.DH_GROUP_MEM_LIMIT, valid, seen, err)
    has_cpus = valid >> lib.DH_GROUP_CPUS & 1
    cpus = int.from_bytes(values[10], "little") if has_cpus else _missing(seen, err, lib.DH_GROUP_CPUS)
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


def source_sample(record: Any, name: str, detail: str, *, vital: bool) -> SourceSample:
    """Convert a record with the members of ``struct dh_source`` to the sample of the source `name`.

    ``detail``: text of the last failure; ``vital``: whether no device can be evaluated without the source.
    """
    return SourceSample(
        name=name,
        state=SOURCE_STATES[record.state],
        beat_ns=record.heartbeat_ns,
        period_ns=record.period_ns,
        failures=record.failures,
        detail=detail,
        passes=record.passes,
        vital=vital,
    )


def pass_durations(record: Any) -> PassDurations:
    """Convert a ``struct dh_durations`` of the C core to a histogram of durations."""
    return PassDurations(tuple(record.count), record.sum_ns / NS)


def pass_durations_by_source(
    read: Callable[[Any], None], names: Sequence[str]
) -> Mapping[str, PassDurations]:
    """Return the durations of the passes of several sources, by the sources' names.

    ``read`` stores one ``struct dh_durations`` per name into its argument, in the order of ``names``.
    """
    records = ffi.new("struct dh_durations[]", len(names))
    read(records)
    return {name: pass_durations(record) for name, record in zip(names, records, strict=True)}
