"""State that the agent stores on disk: GPU faults, and values of the machine at the agent's start (baseline).
A stored GPU fault lasts until a GPU reset, a reboot or a replacement of the GPU. The baseline lasts until
a reboot.

The baseline has the values that an agent read first in the running boot. Health rules compare later values
with it.

The agent stores the faults, so that a fault does not end because the agent is restarted.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.cleared_faults import ClearedFault
from agent.model.gpu import MigSample
from agent.model.health import Blame, Repair, Severity


class CpusBaseline(NamedTuple):
    """CPUs of one NUMA node that were online at the agent's start."""

    numa_node: int
    online: str
    """Online CPUs of the NUMA node, in the kernel's list format."""


class NumaCpusBaseline(NamedTuple):
    """CPUs of one NUMA node, those that went offline included: the kernel lists the online CPUs only."""

    numa_node: int
    cpus: str
    """CPUs of the NUMA node, in the kernel's list format."""


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
    repaired_ns: int = 0
    """CLOCK_MONOTONIC at which an operator cleared faults that lines of the kernel log report [ns]."""


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
    """Baseline of a boot: the values that an agent first read from the machine after the boot.

    Health rules compare later readings with these values. The default values mean that nothing was read yet.
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
    numa_cpus: tuple[NumaCpusBaseline, ...] = ()


# --- faults ------------------------------------------------------------------------------------------------


class Cure(StrEnum):
    """Event that ends a stored GPU fault.

    A reboot ends every fault except those with REPLACE; a GPU reset ends the faults with LINKS_UP, ACTION,
    NOTHING_PENDING or RESET.
    """

    EXPIRES = "expires"
    """The fault ends with time: it is reported for ten minutes."""
    LINKS_UP = "links-up"
    """The fault ends when all NVLinks that were up before are up again."""
    ACTION = "action"
    """The fault ends after some time in which the driver requested no action and no row remap was pending."""
    NOTHING_PENDING = "nothing-pending"
    """The fault ends when the reset that the driver requested was done."""
    RESET = "reset"
    """The fault ends when the GPU was reset."""
    REBOOT = "reboot"
    """The fault ends when the machine was rebooted."""
    REPLACE = "replace"
    """The fault ends when another GPU is in the slot."""


class KnownGpu(NamedTuple):
    """A GPU that the machine has or had, with its stable number."""

    number: int
    """Stable number of the GPU, as in the device name ``gpu-<number>``."""
    uuid: str
    bus: str
    name: str
    migs: tuple[MigSample, ...] = ()
    """MIG instances of the GPU when it was last seen."""


class PersistentFault(NamedTuple):
    """A stored fault of one GPU, or of the NVLink fabric."""

    uuid: str
    """UUID of the GPU; empty: the fault concerns the NVLink fabric."""
    code: str
    """Code of the cause, ``gpu.xid.79``."""
    gi: int
    """Number of the GPU instance with the fault (MIG); WHOLE_GPU: the fault concerns the whole GPU."""
    ci: int
    """Number of the compute instance with the fault (MIG); WHOLE_GPU: the fault concerns the whole GPU."""
    times: int
    """Number of occurrences of the fault."""
    first_wall_s: float
    last_wall_s: float
    log_us: int
    """Time in the kernel log of boot ``boot_id`` up to which lines are already counted [us]."""
    boot_id: str
    cure: Cure
    healed: bool
    """True: resolved, and stored only so that old kernel-log lines do not raise it again. False: active."""
    evidence: str
    advice: str
    severity: int
    """Number of the fault's severity in :class:`agent.model.health.Severity`."""
    texts: tuple[str, ...] = ()
    """Newest kernel-log lines that reported the fault, the newest last."""
    pids: tuple[int, ...] = ()
    """PID of each burst in ``bursts_wall_s``; 0: not known."""
    bursts_wall_s: tuple[float, ...] = ()
    """Start times of the bursts that may be a recurrence, also those of earlier boots [s since 1970]."""
    earlier_boots: int = 0
    """Not used: release 0.1 counted earlier boots with the fault here."""
    healed_wall_s: float = 0.0
    """Time when the fault was resolved [s since 1970]; 0: not resolved."""
    blame: Blame = Blame.HARDWARE
    before_us: bool = False
    """True: the fault occurred while no agent ran, so that the agent may have missed its recovery."""
    action: int = 0
    """Recovery action that the driver last requested for the GPU; -1: NVML returned RESET_REQUIRED."""
    counters: tuple[int, ...] = ()
    """Last readings of the GPU counters that a reset clears; -1: not available. Of the NVLink fabric: for
    each GPU, the number as in ``action`` (-2: it was reset since the fault), and these readings."""
    first_ns: int = 0
    """CLOCK_MONOTONIC of boot ``boot_id`` at ``first_wall_s`` [ns]; 0: not known."""
    last_ns: int = 0
    """CLOCK_MONOTONIC of boot ``boot_id`` at ``last_wall_s`` [ns]; 0: not known."""
    healed_ns: int = 0
    """CLOCK_MONOTONIC of boot ``boot_id`` at ``healed_wall_s`` [ns]; 0: not resolved, or not known."""
    bursts_ns: tuple[int, ...] = ()
    """CLOCK_MONOTONIC of boot ``boot_id`` at each time in ``bursts_wall_s`` [ns]; empty: not known."""


class PersistentCondition(NamedTuple):
    """Stored condition: a raised fault that the first readings of the agent's next start do not show. A
    driver's health check found it, it makes a GPU Unhealthy, a counter grows, or it is in its probation."""

    device: str
    """Name of the device: ``driver/pool/name``, or that of a GPU, a MIG instance or the host's device."""
    check: str
    """Name of the health check; empty: a rule found the fault."""
    code: str
    severity: Severity
    evidence: str
    advice: str
    blame: Blame | None
    repair: Repair | None
    since_ns: int
    """CLOCK_MONOTONIC at which the fault began [ns]."""
    since_wall_s: float
    ended_ns: int = 0
    """CLOCK_MONOTONIC at which the fault ended and its probation began [ns]; 0: it has not ended."""


class DriverModule(NamedTuple):
    """Kernel module of the GPU driver that was loaded when NVML was last initialized."""

    boot_id: str = ""
    """Boot ID of the kernel that loaded the module; empty: unknown."""
    number: int = 0
    """Number of the module, which each load changes; 0: unknown."""


NO_MODULE: Final = DriverModule()


@dataclass(frozen=True, slots=True)
class PersistentState:
    """GPUs, GPU faults, raised conditions and baseline values that the agent stores.

    The default values are those at the agent's first start.
    """

    gpus: tuple[KnownGpu, ...] = ()
    faults: tuple[PersistentFault, ...] = ()
    cleared: tuple[ClearedFault, ...] = ()
    """Faults that operators cleared within a day, the oldest first."""
    start: BootBaseline = field(default_factory=BootBaseline)
    conditions: tuple[PersistentCondition, ...] = ()
    """Conditions of drivers' health checks and of rules, raised in the boot of ``start``."""
    runs: int = 0
    """Number of times that the agent has started with this state file."""
    module: DriverModule = NO_MODULE

    @property
    def gpu_part(self) -> "PersistentState":
        """Part of the stored state that concerns GPUs: the GPUs and the GPU faults, without conditions
        and without the baseline."""
        return PersistentState(self.gpus, self.faults, self.cleared, module=self.module)
