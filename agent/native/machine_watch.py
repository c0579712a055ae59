"""Watch of machine state that changes rarely: the C core's thread, and the decoder of its records."""

import errno
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from agent.errors import ConfigError, ProbeError
from agent.model.machine_samples import (
    DimmSample,
    MachineSample,
    NumaMemorySample,
    PerCpuSample,
    PressureSample,
)
from agent.model.reading import PassDurations, Reading, SourceSample, return_code_text
from agent.model.time import NS
from agent.native._core import ffi, lib
from agent.native.published_tables import (
    CopiedBytes,
    CoreThread,
    RecordTable,
    UnchangedBytesCache,
    check_record_size,
    failure_text,
    pass_durations_by_source,
    printable_text,
    reading_of_member,
    source_sample,
)

_HEAD_SIZE: Final = ffi.sizeof("struct dh_machine_head")
_HEAD_READINGS: Final = struct.Struct("=i10Q")
_HEAD_READINGS_AT: Final = slice(
    ffi.offsetof("struct dh_machine_head", "err"), ffi.offsetof("struct dh_machine_head", "wakes")
)
_DIMM: Final = struct.Struct(f"=QQIIiIQQ{lib.DH_LABEL_LEN}s{lib.DH_LABEL_LEN}s")
_NUMA: Final = struct.Struct("=QQIi4Q")
_CORE: Final = struct.Struct("=QQIi5Q")

if _HEAD_READINGS_AT.stop - _HEAD_READINGS_AT.start != _HEAD_READINGS.size:
    raise ImportError("C core: struct dh_machine_head: unexpected offsets: rebuild it")
for _record, _layout in (("dh_dimm", _DIMM), ("dh_numa", _NUMA), ("dh_core", _CORE)):
    check_record_size(_record, _layout)

_SOURCE_NAMES: Final = {
    lib.DH_MACHINE_EDAC: "edac",
    lib.DH_MACHINE_MEMORY: "memory",
    lib.DH_MACHINE_CORES: "cores",
    lib.DH_MACHINE_PRESSURE: "pressure",
}

S = TypeVar("S")


def field_name(field: int) -> str:
    """Return the kernel's name of the file, or of the line in it, that a machine field is read from."""
    name = lib.dh_machine_field_name(field)
    return f"field {field}" if name == ffi.NULL else ffi.string(name).decode()


class MachineWatch(CoreThread[MachineSample]):
    """Watch of memory, memory controllers (EDAC), pressure (PSI) and CPU cores, read rarely by one thread.

    Args:
        sysfs_root: ``/sys``, or a tree like it.
        procfs_root: ``/proc``, or a tree like it.
        wake_fd: An eventfd, to stay open until :meth:`stop`. Becomes readable when a value that a rule
            evaluates has changed.
        period_ns: Time between two reads of memory controllers [ns]: 10 ms to 1 h.
        slow_ns: Time between two reads of memory and pressure [ns]; at least ``period_ns``.
        rare_ns: Time between two reads of expensive files [ns]; at least ``slow_ns``.

    Raises:
        ConfigError: A time is out of range, or a root too long.
        ProbeError: The kernel refused descriptors or memory.
    """

    def __init__(
        self,
        sysfs_root: Path,
        procfs_root: Path,
        wake_fd: int,
        period_ns: int = NS,
        slow_ns: int = 10 * NS,
        rare_ns: int = 60 * NS,
    ) -> None:
        options = ffi.new(
            "struct dh_machine_options *",
            {
                "size": ffi.sizeof("struct dh_machine_options"),
                "version": lib.DH_VERSION,
                "period_ns": period_ns,
                "slow_ns": slow_ns,
                "rare_ns": rare_ns,
            },
        )
        out = ffi.new("struct dh_machine **")
        roots = (os.fsencode(sysfs_root), os.fsencode(procfs_root))
        code = lib.dh_machine_open(options, *roots, wake_fd, out)
        if code == -errno.EINVAL:
            times = ", ".join(f"{ns / NS:g} s" for ns in (period_ns, slow_ns, rare_ns))
            raise ConfigError(
                f"machine watch: periods {times} are not valid: each must be 10 ms to 1 h, and none shorter "
                "than the one before"
            )
        if code == -errno.ENAMETOOLONG:
            longest = max(roots, key=len)
            raise ConfigError(
                f"machine watch: root path {os.fsdecode(longest)!r} is {len(longest)} bytes, limit 200"
            )
        if code:
            raise ProbeError(f"machine watch: cannot be opened: {return_code_text(code)}")
        named = {lib.DH_MACHINE_SYSFS: sysfs_root, lib.DH_MACHINE_PROCFS: procfs_root}
        decode = UnchangedBytesCache(MachineDecoder(named).decode)
        super().__init__("machine", "machine thread", out[0], lib.dh_machine_size(out[0]), decode, wake_fd)

    def rescan_fileno(self) -> int:
        """Return the eventfd to which other threads write when CPUs, memory or NUMA nodes have changed."""
        return int(lib.dh_machine_rescan_fd(self._handle))

    def pass_durations(self) -> Mapping[str, PassDurations]:
        """Return how long the readings of each source took. Any thread may call it until :meth:`stop`."""
        return pass_durations_by_source(
            lambda records: lib.dh_machine_durations(self._handle, records), tuple(_SOURCE_NAMES.values())
        )

    def run_pass(self) -> None:
        """Read memory, EDAC, pressure and CPU cores once on the caller's thread, without :meth:`start`.

        For benchmarks and tests.
        """
        if lib.dh_machine_pass(self._handle):
            raise ProbeError(
                "machine watch: files not read: the watch's own thread reads them; stop the watch first"
            )


class MachineDecoder:
    """Decoder of the C core's machine records into samples; unchanged records keep their sample."""

    def __init__(self, roots: Mapping[int, Path]) -> None:
        """Create the decoder.

        Args:
            roots: Paths of sysfs and procfs for error texts, by the C core's number for the root.
        """
        self._roots = roots
        self._dimms = RecordTable(
            _DIMM, _decode_dimm, lambda dimm: (dimm.controller, -1 if dimm.dimm is None else dimm.dimm)
        )
        self._numa = RecordTable(_NUMA, _decode_numa_node, lambda numa: (numa.numa_node,))
        self._head = UnchangedBytesCache(_decode_head)
        self._cores = RecordTable(_CORE, _decode_cpu_core, lambda core: (core.cpu,))

    def decode(self, data: CopiedBytes) -> MachineSample:
        """Decode one copy of all machine records, made by ``dh_machine_read()``."""
        head = ffi.from_buffer("struct dh_machine_head *", data)
        numa_at = _HEAD_SIZE + head.dimms * _DIMM.size
        cores_at = numa_at + head.numas * _NUMA.size
        pressure, nodes_online, nodes_memory, corrupted, surplus_failed, smt = self._head(
            data[_HEAD_READINGS_AT]
        )
        return MachineSample(
            self._dimms.samples(data, _HEAD_SIZE, numa_at),
            self._numa.samples(data, numa_at, cores_at),
            self._cores.samples(data, cores_at, len(data)),
            pressure,
            nodes_online,
            nodes_memory,
            corrupted,
            surplus_failed,
            smt,
            tuple([self._source(head.source[i], name) for i, name in _SOURCE_NAMES.items()]),
        )

    def _source(self, record: Any, name: str) -> SourceSample:
        field, err = record.err_field, record.err
        detail = failure_text(field_name(field), self._roots.get(field), err) if err else ""
        return source_sample(record, name, detail, vital=False)  # everything else is watched without these


class _HeadReadings(NamedTuple):
    """Readings in the head of the machine's record."""

    pressure: PressureSample
    nodes_online: Reading
    nodes_memory: Reading
    corrupted_kib: Reading
    surplus_failed: Reading
    smt_active: Reading


def _decode_head(data: CopiedBytes) -> _HeadReadings:
    err, valid, seen, *values = _HEAD_READINGS.unpack(data)
    members = (
        *(lib.DH_NODES_ONLINE, lib.DH_NODES_MEMORY, lib.DH_MEM_CORRUPTED, lib.DH_SURPLUS_FAILED),
        *(lib.DH_SMT_ACTIVE, lib.DH_PSI_CPU, lib.DH_PSI_MEMORY, lib.DH_PSI_IO),
    )
    online, memory, corrupted, failed, smt, *pressure = (
        reading_of_member(value, member, valid, seen, err)
        for value, member in zip(values, members, strict=True)
    )
    return _HeadReadings(PressureSample(*pressure), online, memory, corrupted, failed, smt)


def _decode_dimm(raw: tuple[Any, ...]) -> DimmSample:
    valid, seen, controller, dimm, err, _, correctable, uncorrectable, label, location = raw
    return DimmSample(
        controller=controller,
        dimm=None if dimm == lib.DH_CONTROLLER else dimm,
        label=printable_text(label),
        location=printable_text(location),
        correctable=reading_of_member(correctable, lib.DH_DIMM_CE, valid, seen, err),
        uncorrectable=reading_of_member(uncorrectable, lib.DH_DIMM_UE, valid, seen, err),
    )


def _decode_numa_node(raw: tuple[Any, ...]) -> NumaMemorySample:
    valid, seen, node, err, total_kib, poisoned, blocks, blocks_offline = raw
    return NumaMemorySample(
        numa_node=node,
        total_kib=reading_of_member(total_kib, lib.DH_NUMA_TOTAL, valid, seen, err),
        poisoned=reading_of_member(poisoned, lib.DH_NUMA_POISONED, valid, seen, err),
        blocks=reading_of_member(blocks, lib.DH_NUMA_BLOCKS, valid, seen, err),
        blocks_offline=reading_of_member(blocks_offline, lib.DH_NUMA_BLOCKS, valid, seen, err),
    )


def _decode_cpu_core(raw: tuple[Any, ...]) -> PerCpuSample:
    valid, seen, cpu, err, *values = raw
    # members and fields have the same order
    return PerCpuSample(
        cpu,
        *(reading_of_member(value, lib.DH_CORE_CORE + i, valid, seen, err) for i, value in enumerate(values)),
    )
