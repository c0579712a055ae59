"""What was read of the machine that changes seldom: memory, what its controllers count, cores, pressure."""

from dataclasses import dataclass
from typing import NamedTuple

from agent.model.reading import Missing, Reading
from agent.model.source import SourceSample


class DimmSample(NamedTuple):
    """Errors of one memory module, or of a controller. Source: ``/sys/devices/system/edac/mc``."""

    controller: int
    """N of ``mc<N>``."""
    dimm: int | None
    """N of its ``dimm<N>`` or ``rank<N>``; None: the controller itself, whose counts include its modules'."""
    label: str
    """``CPU_SrcID#0_MC#0_Chan#0_DIMM#0``; of a controller its name. Empty if the firmware names none."""
    location: str
    """``channel 0 slot 1``; of a controller empty."""
    correctable: Reading
    """Errors since the EDAC driver was loaded, or since somebody reset the counters; so the next."""
    uncorrectable: Reading


class NumaSample(NamedTuple):
    """The memory of one NUMA node. Source: ``/sys/devices/system/node/node<N>``."""

    node: int
    total_kib: Reading
    """``MemTotal`` of its meminfo."""
    poisoned: Reading
    """Pages with hardware errors since boot: ``memory_failure/total``. Absent before Linux 6.4."""
    blocks: Reading
    """Memory blocks that it has."""
    blocks_offline: Reading


class CoreSample(NamedTuple):
    """What one CPU is. Source: ``/sys/devices/system/cpu/cpu<N>``, ``/proc/interrupts``."""

    cpu: int
    core: Reading
    """The lowest number among the CPUs that share its core; kept while it is offline."""
    package: Reading
    """``physical_package_id``; likewise."""
    max_khz: Reading
    """What it can: ``cpufreq/cpuinfo_max_freq``."""
    cap_khz: Reading
    """What it may: ``cpufreq/scaling_max_freq``."""
    machine_checks: Reading
    """Machine-check exceptions since boot: row ``MCE`` of ``/proc/interrupts``."""


class PressureSample(NamedTuple):
    """How long tasks have waited since boot [us]. Source: ``/proc/pressure``."""

    cpu_some: Reading
    """Some waited; of the next two, all did."""
    memory_full: Reading
    io_full: Reading


@dataclass(frozen=True, slots=True)
class MachineSample:
    """Everything that is read slowly. Parts of it are of different passes."""

    dimms: tuple[DimmSample, ...]
    """By controller, the controller itself first."""
    numa: tuple[NumaSample, ...]
    cores: tuple[CoreSample, ...]
    """By CPU; those that were ever online."""
    pressure: PressureSample
    nodes_online: int | Missing
    """Bit set of NUMA nodes: ``/sys/devices/system/node/online``."""
    nodes_memory: int | Missing
    """Those that have memory: ``has_memory``."""
    corrupted_kib: Reading
    """``HardwareCorrupted`` of ``/proc/meminfo``: pages that the kernel took out of use."""
    surplus_failed: Reading
    """``htlb_buddy_alloc_fail`` of ``/proc/vmstat``: hugepages that were looked for and not found."""
    smt_active: Reading
    """``/sys/devices/system/cpu/smt/active``: 0 or 1."""
    sources: tuple[SourceSample, ...]
    """``edac``, ``memory``, ``cores``, ``pressure``; none is vital."""
