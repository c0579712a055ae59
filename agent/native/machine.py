"""Open, start, read and stop the thread that watches machine state that changes rarely; decode its records.

Owns the thread; rules evaluate the values elsewhere.
"""

import errno
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from agent.errors import ConfigError, ProbeError
from agent.model.machine import CoreSample, DimmSample, MachineSample, NumaSample, PressureSample
from agent.model.reading import Reading
from agent.model.source import SourceSample
from agent.model.time import NS
from agent.native._core import ffi, lib
from agent.native.publication import CachedDecoder, CopiedBytes, Publication, RecordTable
from agent.native.records import escaped, failure_text, reading, source

_HEAD_SIZE: Final = ffi.sizeof("struct dh_machine_head")
_DIMM: Final = struct.Struct(f"=QQIIiIQQ{lib.DH_LABEL_LEN}s{lib.DH_LABEL_LEN}s")
_NUMA: Final = struct.Struct("=QQIi4Q")
_CORE: Final = struct.Struct("=QQIi5Q")

for _layout, _record in ((_DIMM, "dimm"), (_NUMA, "numa"), (_CORE, "core")):
    if _layout.size != ffi.sizeof(f"struct dh_{_record}"):
        raise ImportError(
            f"struct dh_{_record} has {ffi.sizeof(f'struct dh_{_record}')} bytes, not {_layout.size}"
        )

_SOURCE_NAMES: Final = {
    lib.DH_MACHINE_EDAC: "edac",
    lib.DH_MACHINE_MEMORY: "memory",
    lib.DH_MACHINE_CORES: "cores",
    lib.DH_MACHINE_PRESSURE: "pressure",
}

S = TypeVar("S")


def field_name(field: int) -> str:
    """Return the kernel's name of the file, or of the line in a file, that a field is read from."""
    name = lib.dh_machine_field_name(field)
    return f"field {field}" if name == ffi.NULL else ffi.string(name).decode()


class MachineWatch:
    """Watch of machine state that changes rarely: memory, memory controllers, pressure, expensive files.

    Args:
        sysfs_root: ``/sys``, or a tree like it.
        procfs_root: ``/proc``, or a tree like it.
        wake_fd: An eventfd, to stay open until :meth:`stop`. Becomes readable when a value that a rule
            evaluates has changed.
        period_ns: Time between two reads of memory controllers: 10 ms to 1 h.
        slow_ns: Time between two reads of memory and pressure; at least a period.
        rare_ns: Time between two reads of expensive files; at least ``slow_ns``.

    Raises:
        ConfigError: a time is out of range, or a root too long.
        ProbeError: the kernel refused descriptors or memory.
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
            raise ConfigError(f"machine: periods {times}: the first is not in 10 ms to 1 h, or they fall")
        if code == -errno.ENAMETOOLONG:
            longest = max(roots, key=len)
            raise ConfigError(f"root {os.fsdecode(longest)!r} is {len(longest)} bytes, limit 200")
        if code:
            raise ProbeError(f"machine: {os.strerror(-code) if -code < 4096 else f'code {code}'}")
        self._machine = out[0]
        named = {lib.DH_MACHINE_SYSFS: sysfs_root, lib.DH_MACHINE_PROCFS: procfs_root}
        self._publication = Publication(
            lambda buffer, size: lib.dh_machine_read(self._machine, buffer, size),
            lib.dh_machine_size(self._machine),
            CachedDecoder(MachineDecoder(named).sample),
            wake_fd,
        )

    def start(self) -> None:
        """Start the thread; its first pass begins at once."""
        code = lib.dh_machine_start(self._machine)
        if code:
            raise ProbeError(f"machine thread: {os.strerror(-code)}")

    def rescan_fileno(self) -> int:
        """Return the eventfd for other threads to write to when CPUs, memory or NUMA nodes have changed."""
        return int(lib.dh_machine_rescan_fd(self._machine))

    def read(self) -> MachineSample | None:
        """Return the newest complete publication, or None before :meth:`start`.

        A source whose first pass has not ended is starting. While the writer is preempted in the middle of
        a copy, returns the publication before and wakes the reader again.
        """
        return self._publication.read()

    def run_pass(self) -> None:
        """Run one pass on this thread, instead of :meth:`start`. For benchmarks and tests."""
        if lib.dh_machine_pass(self._machine):
            raise ProbeError("machine: its thread runs already")

    def stop(self, timeout_s: float) -> bool:
        """End the thread. Returns True if it ended, False if it hangs in the kernel and is abandoned. Blocks
        up to ``timeout_s``."""
        machine, self._machine = self._machine, ffi.NULL
        return machine == ffi.NULL or int(lib.dh_machine_stop(machine, int(timeout_s * NS))) == 0


class MachineDecoder:
    """Decoder of copies of the machine watch's tables into samples. Equal bytes keep their sample."""

    def __init__(self, roots: Mapping[int, Path]) -> None:
        """Create the decoder. ``roots``: path of each field that stands for a root (sysfs, procfs)."""
        self._roots = roots
        self._dimms = RecordTable(_DIMM, _dimm, _dimm_key)
        self._numa = RecordTable(_NUMA, _numa, lambda numa: (numa.node,))
        self._cores = RecordTable(_CORE, _core, lambda core: (core.cpu,))

    def sample(self, data: CopiedBytes) -> MachineSample:
        """Decode one copy made by ``dh_machine_read()``."""
        head = ffi.from_buffer("struct dh_machine_head *", data)
        numa_at = _HEAD_SIZE + head.dimms * _DIMM.size
        cores_at = numa_at + head.numas * _NUMA.size

        def head_reading(value: int, field: int) -> Reading:
            return reading(value, field, head.valid, head.seen, head.err)

        return MachineSample(
            dimms=self._dimms.samples(data, _HEAD_SIZE, numa_at),
            numa=self._numa.samples(data, numa_at, cores_at),
            cores=self._cores.samples(data, cores_at, len(data)),
            pressure=PressureSample(
                cpu_some=head_reading(head.psi_cpu_some_us, lib.DH_PSI_CPU),
                memory_full=head_reading(head.psi_memory_full_us, lib.DH_PSI_MEMORY),
                io_full=head_reading(head.psi_io_full_us, lib.DH_PSI_IO),
            ),
            nodes_online=head_reading(head.nodes_online, lib.DH_NODES_ONLINE),
            nodes_memory=head_reading(head.nodes_memory, lib.DH_NODES_MEMORY),
            corrupted_kib=head_reading(head.corrupted_kib, lib.DH_MEM_CORRUPTED),
            surplus_failed=head_reading(head.surplus_failed, lib.DH_SURPLUS_FAILED),
            smt_active=head_reading(head.smt_active, lib.DH_SMT_ACTIVE),
            sources=tuple(self._source(head.source[i], name) for i, name in _SOURCE_NAMES.items()),
        )

    def _source(self, record: Any, name: str) -> SourceSample:
        field, err = record.err_field, record.err
        detail = failure_text(field_name(field), self._roots.get(field), err) if err else ""
        return source(
            record, name, detail, vital=False
        )  # without these sources everything else is still watched


def _dimm(raw: tuple[Any, ...]) -> DimmSample:
    valid, seen, controller, dimm, err, _, correctable, uncorrectable, label, location = raw
    return DimmSample(
        controller=controller,
        dimm=None if dimm == lib.DH_CONTROLLER else dimm,
        label=escaped(label),
        location=escaped(location),
        correctable=reading(correctable, lib.DH_DIMM_CE, valid, seen, err),
        uncorrectable=reading(uncorrectable, lib.DH_DIMM_UE, valid, seen, err),
    )


def _dimm_key(dimm: DimmSample) -> tuple[int, int]:
    return (dimm.controller, -1 if dimm.dimm is None else dimm.dimm)


def _numa(raw: tuple[Any, ...]) -> NumaSample:
    valid, seen, node, err, total_kib, poisoned, blocks, blocks_offline = raw
    return NumaSample(
        node=node,
        total_kib=reading(total_kib, lib.DH_NUMA_TOTAL, valid, seen, err),
        poisoned=reading(poisoned, lib.DH_NUMA_POISONED, valid, seen, err),
        blocks=reading(blocks, lib.DH_NUMA_BLOCKS, valid, seen, err),
        blocks_offline=reading(blocks_offline, lib.DH_NUMA_BLOCKS, valid, seen, err),
    )


def _core(raw: tuple[Any, ...]) -> CoreSample:
    valid, seen, cpu, err, *values = raw
    # members and fields have the same order
    return CoreSample(
        cpu, *(reading(value, lib.DH_CORE_CORE + i, valid, seen, err) for i, value in enumerate(values))
    )
