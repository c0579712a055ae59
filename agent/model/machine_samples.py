"""Samples of memory, memory controllers, CPUs and pressure, which sources read less often than others."""

from dataclasses import dataclass
from typing import NamedTuple

from agent.model.reading import Missing, Reading
from agent.model.source_state import SourceSample


class DimmSample(NamedTuple):
    """Error counts of one memory module, or of one memory controller. Source:
    ``/sys/devices/system/edac/mc``."""

    controller: int
    """Number N of the memory controller ``mc<N>`` in EDAC's directory."""
    dimm: int | None
    """Number N of the module's EDAC directory ``dimm<N>`` or ``rank<N>``.

    None: the sample is that of the controller, whose counts include its modules.
    """
    label: str
    """Label of the module, ``CPU_SrcID#0_MC#0_Chan#0_DIMM#0``, or name of the controller; empty: unknown."""
    location: str
    """Location of the memory module, ``channel 0 slot 1``; empty for a controller."""
    correctable: Reading
    """Correctable errors since the EDAC driver was loaded or the counters were reset."""
    uncorrectable: Reading


class NumaMemorySample(NamedTuple):
    """Memory of one NUMA node. Source: ``/sys/devices/system/node/node<N>``."""

    numa_node: int
    total_kib: Reading
    """Memory of the NUMA node, ``MemTotal`` in its meminfo [KiB]."""
    poisoned: Reading
    """Pages with hardware errors since boot: ``memory_failure/total``. Absent before Linux 6.4."""
    blocks: Reading
    """Number of memory blocks of the NUMA node, online or not."""
    blocks_offline: Reading


class PerCpuSample(NamedTuple):
    """Topology, frequency limits and machine-check count of one CPU. Source:
    ``/sys/devices/system/cpu/cpu<N>``, ``/proc/interrupts``."""

    cpu: int
    core: Reading
    """Id of the physical core: the lowest CPU number on it; kept while the CPU is offline."""
    package: Reading
    """Socket of the CPU, ``physical_package_id``; kept while the CPU is offline."""
    max_khz: Reading
    """Highest supported frequency: ``cpufreq/cpuinfo_max_freq`` [kHz]."""
    cap_khz: Reading
    """Highest frequency that the operator allows: ``cpufreq/scaling_max_freq`` [kHz]."""
    machine_checks: Reading
    """Machine-check exceptions since boot: row ``MCE`` of ``/proc/interrupts``."""


class PressureSample(NamedTuple):
    """Total time in which tasks waited for a resource since boot [us]. Source: ``/proc/pressure``."""

    cpu_some: Reading
    """Time in which at least one task waited for a CPU [us]."""
    memory_full: Reading
    """Time in which all tasks waited for memory [us]; ``io_full``: for I/O."""
    io_full: Reading


@dataclass(frozen=True, slots=True)
class MachineSample:
    """Newest samples of memory, CPUs and pressure; the sources read them at different times."""

    dimms: tuple[DimmSample, ...]
    """Samples of memory modules and controllers, by controller, the controller first."""
    numa: tuple[NumaMemorySample, ...]
    cores: tuple[PerCpuSample, ...]
    """CPUs that were online at least once since boot, by number."""
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
    """State of simultaneous multithreading (``cpu/smt/active``): 1: on; 0: off."""
    sources: tuple[SourceSample, ...]
    """State of the sources ``edac``, ``memory``, ``cores`` and ``pressure``."""
