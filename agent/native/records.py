"""Decode the records of the sampler into samples of the model, which share no memory with the core."""

import errno
import struct
from collections.abc import Mapping
from functools import lru_cache
from itertools import starmap
from pathlib import Path
from typing import Any, Final

from agent.model.cpuset import CpuSet
from agent.model.reading import Absence, Missing, Reading, error_text
from agent.model.snapshot import (
    CoreStats,
    CpuSample,
    GroupKind,
    GroupSample,
    HugetlbSample,
    NodeSample,
    PoolSample,
    Snapshot,
    ThrottleSample,
)
from agent.model.source import SourceSample, SourceState
from agent.native._core import ffi, lib
from agent.native.publication import CopiedBytes, RecordTable, StampedRecordTable

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
    "source": _SOURCE,
    "node": _NODE,
    "throttle": _THROTTLE,
    "pool": _POOL,
    "group": _GROUP,
}
for _record, _layout in _LAYOUTS.items():
    if _layout.size != ffi.sizeof(f"struct dh_{_record}"):
        raise ImportError(
            f"struct dh_{_record} has {ffi.sizeof(f'struct dh_{_record}')} bytes, not {_layout.size}"
        )
if (_HEAD.size - _CPUS.size + 3 * _CPU_BYTES, _CPUS_AT + _CPUS.size) != (_CPUS_AT, _SOURCES_AT):
    raise ImportError(f"struct dh_snapshot has its CPUs at {_CPUS_AT} and its sources at {_SOURCES_AT}")

ABSENT: Final = Missing(Absence.ABSENT, errno.ENOENT)
_SOURCE_NAMES: Final = ("cpus", "throttle", "hugepages", "cgroups")
_CPU_FIELDS: Final = (lib.DH_CPU_PRESENT, lib.DH_CPU_ONLINE, lib.DH_CPU_ISOLATED)
SOURCE_STATES: Final = {
    lib.DH_STATE_ABSENT: SourceState.ABSENT,
    lib.DH_STATE_OK: SourceState.OK,
    lib.DH_STATE_FAILING: SourceState.FAILING,
    lib.DH_STATE_STARTING: SourceState.STARTING,
}
_KINDS: Final = {lib.DH_GROUP_POD: GroupKind.POD, lib.DH_GROUP_CONTAINER: GroupKind.CONTAINER}


def field_name(field: int) -> str:
    """Return the kernel's name of the file or key that a field is read from."""
    name = lib.dh_field_name(field)
    return f"field {field}" if name == ffi.NULL else ffi.string(name).decode()


def failure_text(name: str, root: Path | None, err: int) -> str:
    """Return the text of a failed read: ``nr_hugepages: I/O error``, ``sysfs root /x: Not a directory``."""
    return f"{name} {root}: {error_text(err)}" if root else f"{name}: {error_text(err)}"


def _missing(seen: int, err: int, field: int) -> Missing:
    return Missing(Absence.UNREADABLE, err) if seen >> field & 1 else ABSENT


def reading(value: int, field: int, valid: int, seen: int, err: int) -> Reading:
    """Return the value of a record's member, or Missing with the reason. ``err``: why an existing member
    cannot be read."""
    return value if valid >> field & 1 else _missing(seen, err, field)


def escaped(padded: bytes) -> str:
    """Decode zero-padded text that the core has made printable ASCII."""
    return padded.rstrip(b"\0").decode("ascii")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii", "replace")


class SnapshotDecoder:
    """Decoder of copies of the sampler's tables into snapshots.

    Records with unchanged bytes keep their samples: after a change in one of a thousand cgroups, one cgroup
    is decoded.
    """

    def __init__(self, roots: Mapping[int, Path]) -> None:
        """Create the decoder. ``roots``: path of each field that stands for a root (sysfs, procfs,
        cgroupfs)."""
        self._roots = roots
        self._cpus = RecordTable(_CPUS, _cpus)
        self._nodes = RecordTable(_NODE, _node, lambda node: (node.node,))
        self._throttle = RecordTable(_THROTTLE, _throttle)
        self._pools = RecordTable(_POOL, _pool, _pool_key)
        self._groups = StampedRecordTable(_GROUP, _group)

    @property
    def since(self) -> int:
        """Stamp to pass to ``dh_sampler_read()`` for the next copy."""
        return self._groups.newest

    def snapshot(self, data: CopiedBytes) -> Snapshot:
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
            sources=tuple(starmap(self._source, zip(_SOURCE_NAMES, sources, strict=True))),
            core=CoreStats(
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


def _cpus(raw: tuple[Any, ...]) -> CpuSample:
    valid, seen, err, _, *sets = raw

    def cpu_set(words: bytes, field: int) -> CpuSet | Missing:
        return int.from_bytes(words, "little") if valid >> field & 1 else _missing(seen, err, field)

    return CpuSample._make(map(cpu_set, sets, _CPU_FIELDS))


def _node(raw: tuple[Any, ...]) -> NodeSample:
    valid, seen, node, err, core, package, cpus = raw
    known = valid >> lib.DH_NODE_CPUS & 1
    return NodeSample(
        node=node,
        cpus=int.from_bytes(cpus, "little") if known else _missing(seen, err, lib.DH_NODE_CPUS),
        throttle_core=reading(core, lib.DH_NODE_THROTTLE_CORE, valid, seen, err),
        throttle_package=reading(package, lib.DH_NODE_THROTTLE_PACKAGE, valid, seen, err),
    )


def _throttle(raw: tuple[Any, ...]) -> ThrottleSample:
    valid, seen, cpu, err, core, package = raw
    return ThrottleSample(
        cpu=cpu,
        core=reading(core, lib.DH_NODE_THROTTLE_CORE, valid, seen, err),
        package=reading(package, lib.DH_NODE_THROTTLE_PACKAGE, valid, seen, err),
    )


def _pool(raw: tuple[Any, ...]) -> PoolSample:
    valid, seen, size_kib, node, err, nr, free, reserved, surplus, overcommit = raw
    return PoolSample(
        size_kib=size_kib,
        node=None if node == lib.DH_MACHINE else node,
        nr=reading(nr, lib.DH_POOL_NR, valid, seen, err),
        free=reading(free, lib.DH_POOL_FREE, valid, seen, err),
        reserved=reading(reserved, lib.DH_POOL_RESERVED, valid, seen, err),
        surplus=reading(surplus, lib.DH_POOL_SURPLUS, valid, seen, err),
        overcommit=reading(overcommit, lib.DH_POOL_OVERCOMMIT, valid, seen, err),
    )


def _group(raw: tuple[Any, ...]) -> GroupSample | None:
    _stamp, valid, seen, ident, kind, sizes, err, uid, name, *values = raw
    if not ident:
        return None
    # members and fields have the same order
    readings = [reading(values[i], lib.DH_GROUP_POPULATED + i, valid, seen, err) for i in range(9)]
    limit = reading(values[9], lib.DH_GROUP_MEM_LIMIT, valid, seen, err)
    has_cpus = valid >> lib.DH_GROUP_CPUS & 1
    cpus = int.from_bytes(values[10], "little") if has_cpus else _missing(seen, err, lib.DH_GROUP_CPUS)
    hugetlb = _hugetlbs(raw[_HUGETLB_INDEX : _HUGETLB_INDEX + _HUGETLB_WORDS * sizes], err)
    return GroupSample._make((ident, _KINDS[kind], _text(uid), _text(name), *readings, limit, cpus, hugetlb))


@lru_cache(64)  # most groups use no hugepages and share one value
def _hugetlbs(raw: tuple[int, ...], err: int) -> tuple[HugetlbSample, ...]:
    starts = range(0, len(raw), _HUGETLB_WORDS)
    return tuple(_hugetlb(raw[at : at + _HUGETLB_WORDS], err) for at in starts)


def _hugetlb(raw: tuple[Any, ...], err: int) -> HugetlbSample:
    size_kib, limit, rsvd_limit, events, rsvd_failed, valid, seen = raw
    return HugetlbSample(
        size_kib=size_kib,
        max=reading(limit, lib.DH_GROUP_HT_MAX, valid, seen, err),
        rsvd_max=reading(rsvd_limit, lib.DH_GROUP_HT_RSVD_MAX, valid, seen, err),
        events_max=reading(events, lib.DH_GROUP_HT_EVENTS, valid, seen, err),
        rsvd_failed=reading(rsvd_failed, lib.DH_GROUP_HT_RSVD_FAILED, valid, seen, err),
    )


def _pool_key(pool: PoolSample) -> tuple[int, int]:
    return (pool.size_kib, -1 if pool.node is None else pool.node)


def source(record: Any, name: str, detail: str, *, vital: bool) -> SourceSample:
    """Return the state of a source from a record that has the members of ``struct dh_source``."""
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
