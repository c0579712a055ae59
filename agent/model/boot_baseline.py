"""Baseline of a boot: values of the machine that rules call "at start", read first in the running boot.

The agent stores them, so that a fault does not end because the agent is restarted.
"""

from dataclasses import dataclass
from typing import NamedTuple


class CpusBaseline(NamedTuple):
    """CPUs of one NUMA node that were online at the agent's start."""

    numa_node: int
    online: str
    """Online CPUs of the NUMA node, in the kernel's list format."""


class FrequencyBaseline(NamedTuple):
    """CPUs that had the same maximum frequency at the agent's start."""

    khz: int
    cpus: str


class MemoryBaseline(NamedTuple):
    """Number of memory blocks of one NUMA node that were online at the agent's start."""

    numa_node: int
    blocks_online: int


class HugepagePoolBaseline(NamedTuple):
    """Size of a hugepage pool at the agent's start."""

    device: str
    """Device name of the pool, ``hugepages-2mi-node0``."""
    pages: int
    """Number of persistent pages at start; -1: the configuration sets the expected number."""
    max_seen: int
    """Largest number of persistent pages since start."""


class PciBaseline(NamedTuple):
    """Values of a PCI function when it was first seen on the bus."""

    address: str
    vendor: int
    device: int
    driver: str
    """Kernel driver that was bound to the PCI function; empty: none."""
    width: int
    """Number of lanes of the PCIe link; -1: unknown."""


class NicPortBaseline(NamedTuple):
    """Best state of one port of a NIC since the agent's start."""

    number: int
    first_ns: int
    """CLOCK_MONOTONIC of the port's first reading [ns]."""
    was_active: bool
    rate_mbps: int
    """Highest data rate of the port [Mb/s]; -1: unknown."""
    width: int
    """Highest number of lanes of the port; -1: unknown."""


class NicBaseline(NamedTuple):
    """Declared NIC that exists or existed since the agent's start, with the best state of its ports."""

    declared_pci: str
    declared_rdma: str
    name: str
    address: str
    guid: str
    ports: tuple[NicPortBaseline, ...]


class GpuBaseline(NamedTuple):
    """Features of a GPU since the agent's start: NVLinks that were up, ECC, a running fabric manager."""

    uuid: str
    links_up: int
    """Bit set of the NVLinks that were up."""
    ecc: bool
    fabric_manager: bool


@dataclass(frozen=True, slots=True)
class BootBaseline:
    """Baseline: values of the machine when an agent first read them in the running boot.

    The default is the state before the first reading.
    """

    boot_id: str = ""
    """Boot ID of the kernel when the values were read; empty: unknown."""
    cpus: tuple[CpusBaseline, ...] = ()
    isolated: str | None = None
    """CPUs that were isolated, in the kernel's list format; None: not read."""
    smt: int | None = None
    """State of simultaneous multithreading, 1: on, 0: off; None: not read."""
    frequencies: tuple[FrequencyBaseline, ...] = ()
    memory: tuple[MemoryBaseline, ...] = ()
    pools: tuple[HugepagePoolBaseline, ...] = ()
    pci: tuple[PciBaseline, ...] = ()
    nics: tuple[NicBaseline, ...] = ()
    gpus: tuple[GpuBaseline, ...] = ()
