"""Samples of the machine: memory and its controllers, CPUs, pressure, PCI functions, network adapters (NICs),
and counts of kernel messages.

The agent reads them less often than GPUs and cgroups. The PCI functions are GPUs and those that DRA drivers
declare as devices; the NICs are those that drivers declare. A kernel message is a log line that matches one
of the agent's patterns, or a device event.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.reading import Missing, Reading, SourceSample


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
    """Total time since boot in which tasks waited for a resource (pressure stall information) [us].

    Source: ``/proc/pressure``.
    """

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


# --- PCI functions -----------------------------------------------------------------------------------------

NVIDIA_DRIVER: Final = "nvidia"
"""Kernel driver through which NVML reaches a GPU."""
PASSTHROUGH_DRIVER: Final = "vfio-pci"
"""Kernel driver of PCI functions passed through to a virtual machine; NVML does not list such GPUs."""


class PciSample(NamedTuple):
    """State of one PCI function. Source: ``/sys/bus/pci/devices/<address>``."""

    address: str
    """PCI address, ``0000:3b:00.0``."""
    vendor: int
    """PCI vendor id of the function; -1 if it cannot be read."""
    device: int
    """PCI device id of the function; -1 if it cannot be read."""
    driver: str
    """Kernel driver that is bound to the PCI function; empty: none."""
    model: str
    """Model name of the device from the hardware database; empty: unknown."""
    width: Reading
    """Current number of lanes of the PCIe link."""
    width_max: Reading
    """Largest number of PCIe lanes that the PCI function supports."""
    aer_nonfatal: Reading
    """Non-fatal errors since boot, the total of ``aer_dev_nonfatal``. Absent without AER."""
    aer_fatal: Reading
    aer_correctable: Reading
    upstream_bridge: str = ""
    """PCI address of the upstream bridge, under which the kernel logs link events; empty: on a root bus."""


# --- network adapters --------------------------------------------------------------------------------------

DISABLED: Final = 3
"""Physical state of an InfiniBand port that is disabled; an Ethernet port without a carrier has it too."""
LINK_UP: Final = 5
"""Physical state of a port whose link is up."""
_STATES: Final = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_ACTIVE_STATES: Final = (4, 5)
_PHYSICAL_STATES: Final = (
    "unknown",
    "Sleep",
    "Polling",
    "Disabled",
    "PortConfigurationTraining",
    "LinkUp",
    "LinkErrorRecovery",
    "Phy Test",
)


class LinkLayer(StrEnum):
    """Link layer of a port; it decides which files count the link's errors."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"
    """Ethernet (RoCE): the network interface's counters count errors, those of InfiniBand do not."""
    UNKNOWN = ""


class NicPortSample(NamedTuple):
    """State of one port of a NIC. Source: ``/sys/class/infiniband/<name>/ports/<number>``."""

    number: int
    link_layer: LinkLayer
    state: Reading
    """Logical state of the port, from 1 (DOWN) to 5 (ACTIVE_DEFER)."""
    phys_state: Reading
    """Physical state of the port; 5: LinkUp."""
    rate_mbps: Reading
    """Data rate of the port [Mb/s]."""
    width: Reading
    """Number of lanes of the port's link."""
    link_downs: Reading
    """Times that the link went down: ``link_downed`` (InfiniBand), ``carrier_down_count`` (Ethernet)."""
    link_ups: Reading
    """Times that the link came up since boot: ``carrier_up_count``; absent for InfiniBand."""
    symbol_errors: Reading
    """Symbol errors of an InfiniBand port, from its file ``symbol_error``; absent for Ethernet."""
    receive_errors: Reading
    """``port_rcv_errors`` (InfiniBand), ``rx_crc_errors`` of the network interface (Ethernet)."""
    integrity_errors: Reading
    """Physical errors above an InfiniBand link's limit: ``local_link_integrity_errors``; Ethernet: absent."""
    buffer_overruns: Reading
    """Overflows of an InfiniBand receive buffer: ``excessive_buffer_overrun_errors``; Ethernet: absent."""
    interface: str = ""
    """Network interface of an Ethernet port; empty: none, or InfiniBand."""
    is_interface_up: bool = True
    """False: the network interface is set down (``ip link set down``)."""
    working_bond: str = ""
    """Bond that the interface is a slave of, if the bond has a carrier; else empty."""

    @property
    def is_active(self) -> bool:
        """True if the port's logical state is ACTIVE."""
        return self.state in _ACTIVE_STATES

    @property
    def is_disabled(self) -> bool:
        """True if the port is disabled by configuration, so that it cannot have a link."""
        if self.link_layer is LinkLayer.ETHERNET:
            return not self.is_interface_up
        return self.phys_state == DISABLED

    @property
    def label(self) -> str:
        """Name of the port in texts: ``port 1``, or with its interface ``port 1 (eth0)``."""
        return f"port {self.number} ({self.interface})" if self.interface else f"port {self.number}"


class NicSample(NamedTuple):
    """State of one NIC. Source: ``/sys/class/infiniband/<name>``."""

    name: str
    """RDMA name of the NIC, ``mlx5_0``."""
    address: str
    """PCI address of its function; empty: the NIC is not a PCI function itself (soft RoCE)."""
    guid: str
    """Node GUID of the NIC; empty: it cannot be read."""
    ports: tuple[NicPortSample, ...] | Missing
    """Ports of the NIC by number; Missing: they cannot be listed."""


def port_state_name(state: int) -> str:
    """Return the kernel's name of a port's logical state: ``DOWN`` for 1."""
    return _STATES[state] if 0 <= state < len(_STATES) else f"state {state}"


def physical_state_name(state: int) -> str:
    """Return the kernel's name of a port's physical state: ``Polling`` for 2."""
    return _PHYSICAL_STATES[state] if 0 <= state < len(_PHYSICAL_STATES) else f"state {state}"


# --- kernel messages ---------------------------------------------------------------------------------------


class LogLine(NamedTuple):
    """Group of kernel-log lines that match one pattern with equal fields, with their number."""

    pattern: int
    """Index of the lines' pattern in the agent's list of patterns."""
    times: int
    """Number of kernel-log lines that were counted together."""
    first_us: int
    """Time of the first line by the kernel log's clock [us]; close to CLOCK_MONOTONIC, not equal to it."""
    last_us: int
    first_text: str
    """First line, cut at 511 bytes; ``\\xNN`` replaces backslashes and bytes that are not printable ASCII."""
    text: str
    """Last of the counted lines, cut and escaped as ``first_text``."""
    seq: int
    """Sequence number of the last line in the kernel log."""


@dataclass(frozen=True, slots=True)
class LogSample:
    """Kernel-log lines that match a pattern, since boot or the oldest line in the kernel's buffer. Source:
    ``/dev/kmsg``."""

    lines: tuple[LogLine, ...]
    """Counted kernel-log lines, in the order of their first occurrence."""
    source: SourceSample
    """State of the log reader. STARTING until it has read the existing log once; ``lines`` is incomplete
    then."""
    lost: int = 0
    """Number of records that were overwritten before the agent read them, or too long to read."""
    is_complete: bool = False
    """True: every record since boot was read, and no line that matches a pattern was dropped."""


class Subsystem(StrEnum):
    """Kernel subsystem whose device events are counted. The values are the kernel's names."""

    CPU = "cpu"
    MEMORY = "memory"
    """Events of memory blocks."""
    NODE = "node"
    """Events of NUMA nodes."""
    PCI = "pci"
    EDAC = "edac"
    MACHINECHECK = "machinecheck"


@dataclass(frozen=True, slots=True)
class UeventCounts:
    """Number of device events (uevents) since the agent started. Source: NETLINK_KOBJECT_UEVENT, messages of
    the kernel only."""

    source: SourceSample
    """State of the event listener. ABSENT: the kernel sends no events; the sources read periodically
    instead."""
    changes: Mapping[Subsystem, int]
    """Number of events by subsystem; lost events count as one. When a number grows, the sources read the
    subsystem again."""
