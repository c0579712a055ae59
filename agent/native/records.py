"""Bytes of the core's records to samples of the model, in one step and with nothing shared."""

import errno
import struct
from collections.abc import Iterator
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

_CPU_BYTES: Final = lib.DH_CPU_WORDS * 8
_GROUP_CPU_BYTES: Final = lib.DH_GROUP_CPU_WORDS * 8
_HEAD_SIZE: Final = ffi.sizeof("struct dh_snapshot")
_NODE: Final = struct.Struct(f"=QQIiQQ{_CPU_BYTES}s")
_THROTTLE: Final = struct.Struct("=QQIi2Q")
_POOL: Final = struct.Struct("=QQQii5Q")
_GROUP: Final = struct.Struct(
    f"=3QIIIi{lib.DH_UID_LEN}s{lib.DH_NAME_LEN}s12Q{_GROUP_CPU_BYTES}s{lib.DH_HP_MAX * 9}Q"
)
_HUGETLB_AT: Final = 22  # where the members of hugetlb[] begin in a record that _GROUP unpacked

for _layout, _record in ((_NODE, "node"), (_THROTTLE, "throttle"), (_POOL, "pool"), (_GROUP, "group")):
    if _layout.size != ffi.sizeof(f"struct dh_{_record}"):
        raise ImportError(
            f"struct dh_{_record} has {ffi.sizeof(f'struct dh_{_record}')} bytes, not {_layout.size}"
        )

ABSENT: Final = Missing(Absence.ABSENT, errno.ENOENT)
_SOURCE_NAMES: Final = {
    lib.DH_SOURCE_CPUS: "cpus",
    lib.DH_SOURCE_THROTTLE: "throttle",
    lib.DH_SOURCE_HUGEPAGES: "hugepages",
    lib.DH_SOURCE_CGROUPS: "cgroups",
}
SOURCE_STATES: Final = {
    lib.DH_STATE_ABSENT: SourceState.ABSENT,
    lib.DH_STATE_OK: SourceState.OK,
    lib.DH_STATE_FAILING: SourceState.FAILING,
    lib.DH_STATE_STARTING: SourceState.STARTING,
}
_KINDS: Final = {lib.DH_GROUP_POD: GroupKind.POD, lib.DH_GROUP_CONTAINER: GroupKind.CONTAINER}


def field_name(field: int) -> str:
    """The kernel's name of what a field of the core is read from."""
    name = lib.dh_field_name(field)
    return f"field {field}" if name == ffi.NULL else ffi.string(name).decode()


def failure_text(field: int, err: int) -> str:
    """A failed read in words: ``nr_hugepages: Input/output error``. Empty if there was none."""
    if not err:
        return ""
    return f"{field_name(field)}: {error_text(err)}"


def _missing(seen: int, err: int, field: int) -> Missing:
    return Missing(Absence.UNREADABLE, err) if seen >> field & 1 else ABSENT


def reading(value: int, field: int, valid: int, seen: int, err: int) -> Reading:
    """A member of a record, or why it has none; ``err`` says why one that is there could not be read."""
    return value if valid >> field & 1 else _missing(seen, err, field)


def escaped(padded: bytes) -> str:
    """Text that the core has made printable ASCII, filled up with zeros."""
    return padded.rstrip(b"\0").decode("ascii")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii", "replace")


class Decoder:
    """Turns copies of the core's tables into snapshots.

    A group whose bytes are those of the last time keeps its sample: with a thousand groups, and a
    change in one, one is decoded.
    """

    def __init__(self) -> None:
        self._groups: dict[int, tuple[bytes, GroupSample | None]] = {}

    def snapshot(self, data: bytes) -> Snapshot:
        """One copy, as ``dh_sampler_read()`` made it."""
        head = ffi.from_buffer("struct dh_snapshot *", data)
        nodes_at = _HEAD_SIZE
        throttle_at = nodes_at + head.nodes * _NODE.size
        pools_at = throttle_at + head.throttles * _THROTTLE.size
        groups_at = pools_at + head.pools * _POOL.size
        for slot in range(head.groups, len(self._groups)):
            del self._groups[slot]  # the table became shorter
        groups = (self._group(data, groups_at, slot) for slot in range(head.groups))
        return Snapshot(
            seq=head.seq,
            cpus=_cpus(head),
            nodes=tuple(sorted(_nodes(data[nodes_at:throttle_at]))),
            throttle=tuple(_throttle(data[throttle_at:pools_at])),
            pools=tuple(sorted(_pools(data[pools_at:groups_at]), key=_pool_key)),
            groups=tuple(group for group in groups if group is not None),
            sources=tuple(_source(head.source[i], name) for i, name in _SOURCE_NAMES.items()),
            core=CoreStats(
                passes=head.passes,
                wakes=head.seq,
                reads=head.reads,
                opens=head.opens,
                descriptors=head.descriptors,
                watches=head.watches,
                kernel_bytes=head.kernel_bytes,
                groups_dropped=head.dropped,
                overflows=head.overflows,
                unwatched=head.unwatched,
            ),
        )

    def _group(self, data: bytes, groups_at: int, slot: int) -> GroupSample | None:
        raw = data[groups_at + slot * _GROUP.size : groups_at + (slot + 1) * _GROUP.size]
        known = self._groups.get(slot)
        if known is None or known[0] != raw:
            known = self._groups[slot] = (raw, _group(_GROUP.unpack(raw)))
        return known[1]


def _cpus(head: Any) -> CpuSample:
    def one(words: Any, field: int) -> CpuSet | Missing:
        if head.cpu_valid >> field & 1:
            return int.from_bytes(ffi.buffer(words)[:], "little")
        return _missing(head.cpu_seen, head.cpu_err, field)

    return CpuSample(
        present=one(head.cpu_present, lib.DH_CPU_PRESENT),
        online=one(head.cpu_online, lib.DH_CPU_ONLINE),
        offline=one(head.cpu_offline, lib.DH_CPU_OFFLINE),
        isolated=one(head.cpu_isolated, lib.DH_CPU_ISOLATED),
    )


def _nodes(data: bytes) -> Iterator[NodeSample]:
    for valid, seen, node, err, core, package, cpus in _NODE.iter_unpack(data):
        known = valid >> lib.DH_NODE_CPUS & 1
        yield NodeSample(
            node=node,
            cpus=int.from_bytes(cpus, "little") if known else _missing(seen, err, lib.DH_NODE_CPUS),
            throttle_core=reading(core, lib.DH_NODE_THROTTLE_CORE, valid, seen, err),
            throttle_package=reading(package, lib.DH_NODE_THROTTLE_PACKAGE, valid, seen, err),
        )


def _throttle(data: bytes) -> Iterator[ThrottleSample]:
    for valid, seen, cpu, err, core, package in _THROTTLE.iter_unpack(data):
        yield ThrottleSample(
            cpu=cpu,
            core=reading(core, lib.DH_NODE_THROTTLE_CORE, valid, seen, err),
            package=reading(package, lib.DH_NODE_THROTTLE_PACKAGE, valid, seen, err),
        )


def _pools(data: bytes) -> Iterator[PoolSample]:
    for valid, seen, size_kib, node, err, nr, free, reserved, surplus, overcommit in _POOL.iter_unpack(data):
        yield PoolSample(
            size_kib=size_kib,
            node=None if node == lib.DH_MACHINE else node,
            nr=reading(nr, lib.DH_POOL_NR, valid, seen, err),
            free=reading(free, lib.DH_POOL_FREE, valid, seen, err),
            reserved=reading(reserved, lib.DH_POOL_RESERVED, valid, seen, err),
            surplus=reading(surplus, lib.DH_POOL_SURPLUS, valid, seen, err),
            overcommit=reading(overcommit, lib.DH_POOL_OVERCOMMIT, valid, seen, err),
        )


def _group(raw: tuple[Any, ...]) -> GroupSample | None:
    valid, seen, _born, ident, kind, sizes, err, uid, name, *values = raw
    if not ident:
        return None
    # the members stand in the order of their fields
    readings = [reading(values[i], lib.DH_GROUP_POPULATED + i, valid, seen, err) for i in range(11)]
    limit = reading(values[11], lib.DH_GROUP_MEM_LIMIT, valid, seen, err)
    has_cpus = valid >> lib.DH_GROUP_CPUS & 1
    cpus = int.from_bytes(values[12], "little") if has_cpus else _missing(seen, err, lib.DH_GROUP_CPUS)
    ends = range(_HUGETLB_AT + 9, _HUGETLB_AT + 9 * sizes + 9, 9)
    hugetlb = tuple(_hugetlb(raw[end - 9 : end], err) for end in ends)
    return GroupSample._make((ident, _KINDS[kind], _text(uid), _text(name), *readings, limit, cpus, hugetlb))


def _hugetlb(raw: tuple[Any, ...], err: int) -> HugetlbSample:
    size_kib, current, limit, rsvd_current, rsvd_limit, events, rsvd_failed, valid, seen = raw
    return HugetlbSample(
        size_kib=size_kib,
        current=reading(current, lib.DH_GROUP_HT_CURRENT, valid, seen, err),
        max=reading(limit, lib.DH_GROUP_HT_MAX, valid, seen, err),
        rsvd_current=reading(rsvd_current, lib.DH_GROUP_HT_RSVD_CURRENT, valid, seen, err),
        rsvd_max=reading(rsvd_limit, lib.DH_GROUP_HT_RSVD_MAX, valid, seen, err),
        events_max=reading(events, lib.DH_GROUP_HT_EVENTS, valid, seen, err),
        rsvd_failed=reading(rsvd_failed, lib.DH_GROUP_HT_RSVD_FAILED, valid, seen, err),
    )


def _pool_key(pool: PoolSample) -> tuple[int, int]:
    return (pool.size_kib, -1 if pool.node is None else pool.node)


def source(record: Any, name: str, detail: str, *, vital: bool) -> SourceSample:
    """How a source is doing, by a record that has its members."""
    return SourceSample(
        name=name,
        state=SOURCE_STATES[record.state],
        beat_ns=record.beat_ns,
        period_ns=record.period_ns,
        failures=record.failures,
        detail=detail,
        passes=record.passes,
        vital=vital,
    )


def _source(record: Any, name: str) -> SourceSample:
    return source(record, name, failure_text(record.err_field, record.err), vital=True)
