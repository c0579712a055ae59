"""Samples that are read rarely: memory, memory controllers, cores, pressure."""

from dataclasses import dataclass
from typing import NamedTuple

from agent.model.reading import Missing, Reading
from agent.model.source import SourceSample


class DimmSample(NamedTuple):
    """Error counts of one memory module or controller. Source: ``/sys/devices/system/edac/mc``."""

    controller: int
    """Number N of ``mc<N>``."""
    dimm: int | None
    """Number N of ``dimm<N>`` or ``rank<N>``; None: the controller, whose counts include its modules."""
    label: str
    """Label, ``CPU_SrcID#0_MC#0_Chan#0_DIMM#0``, or the controller's name; empty if the firmware has none."""
    location: str
    """Location, ``channel 0 slot 1``; empty for a controller."""
    correctable: Reading
    """Correctable errors since the EDAC driver was loaded or the counters were reset."""
    uncorrectable: Reading


class NumaSample(NamedTuple):
    """Memory of one NUMA node. Source: ``/sys/devices/system/node/node<N>``."""

    node: int
    total_kib: Reading
    """``MemTotal`` of the NUMA node's meminfo [KiB]."""
    poisoned: Reading
    """Pages with hardware errors since boot: ``memory_failure/total``. Absent before Linux 6.4."""
    blocks: Reading
    """Number of memory blocks."""
    blocks_offline: Reading


class CoreSample(NamedTuple):
    """Topology, frequency and machine checks of one CPU. Source: ``/sys/devices/system/cpu/cpu<N>``,
    ``/proc/interrupts``."""

    cpu: int
    core: Reading
    """Lowest number of the CPUs that share the core; kept while the CPU is offline."""
    package: Reading
    """``physical_package_id``; kept while the CPU is offline."""
    max_khz: Reading
    """Highest supported frequency: ``cpufreq/cpuinfo_max_freq`` [kHz]."""
    cap_khz: Reading
    """Highest allowed frequency: ``cpufreq/scaling_max_freq`` [kHz]."""
    machine_checks: Reading
    """Machine-check exceptions since boot: row ``MCE`` of ``/proc/interrupts``."""


class PressureSample(NamedTuple):
    """Total stall time of tasks since boot [us]. Source: ``/proc/pressure``."""

    cpu_some: Reading
    """Time in which at least one task waited; memory and I/O: time in which all tasks waited."""
    memory_full: Reading
    io_full: Reading


@dataclass(frozen=True, slots=True)
class MachineSample:
    """All slow readings of the machine. Different sources may have read them at different times."""

    dimms: tuple[DimmSample, ...]
    """Memory modules by controller, the controller first."""
    numa: tuple[NumaSample, ...]
    cores: tuple[CoreSample, ...]
    """CPUs that were ever online, by number."""
    pressure: PressureSample
    nodes_online: int | Missing
    """Online NUMA nodes as a bit set: ``/sys/devices/system/node/online``."""
    nodes_memory: int | Missing
    """NUMA nodes with memory as a bit set: ``has_memory``."""
    corrupted_kib: Reading
    """``HardwareCorrupted`` of ``/proc/meminfo``: memory that the kernel took out of use [KiB]."""
    surplus_failed: Reading
    """``htlb_buddy_alloc_fail`` of ``/proc/vmstat``: failed hugepage allocations."""
    smt_active: Reading
    """``/sys/devices/system/cpu/smt/active``: 0 or 1."""
    sources: tuple[SourceSample, ...]
    """Sources ``edac``, ``memory``, ``cores`` and ``pressure``; none is vital."""
