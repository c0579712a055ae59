"""What was read of GPUs: the samples of the NVML watch, as its threads saw them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from typing import Final, NamedTuple

from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.source import SourceSample

WHOLE_GPU: Final = 0xFFFFFFFF
"""GPU and compute instance of a fault that names none."""


class Status:
    """What a GPU, or the library, answers as a whole: NVML's return codes that mean something here."""

    OK: Final = 0
    UNINITIALIZED: Final = 1
    NOT_SUPPORTED: Final = 3
    NO_PERMISSION: Final = 4
    NOT_FOUND: Final = 6
    DRIVER_NOT_LOADED: Final = 9
    TIMEOUT: Final = 10
    LIBRARY_NOT_FOUND: Final = 12
    FUNCTION_NOT_FOUND: Final = 13
    LOST: Final = 15
    RESET_REQUIRED: Final = 16
    MISMATCH: Final = 18
    GPU_NOT_FOUND: Final = 28
    UNKNOWN: Final = 999


class GpuField(StrEnum):
    """What is read of a GPU. The values are the native core's names; its header gives the sources."""

    RECOVERY_ACTION = "recovery_action"
    ECC_UNCORRECTABLE = "ecc_uncorrectable"
    """Count since the driver was loaded, all memories of the GPU; so is the next."""
    ECC_CORRECTABLE = "ecc_correctable"
    REMAP_CORRECTABLE = "remap_correctable"
    """Rows that were replaced for correctable errors."""
    REMAP_UNCORRECTABLE = "remap_uncorrectable"
    REMAP_PENDING = "remap_pending"
    REMAP_FAILURE = "remap_failure"
    RETIRED_SBE = "retired_sbe"
    """Pages retired before Ampere: for single-bit errors, for double-bit errors."""
    RETIRED_DBE = "retired_dbe"
    RETIRED_PENDING = "retired_pending"
    PCIE_REPLAY = "pcie_replay"
    MEM_TEMP = "mem_temp"
    """Degrees Celsius, as all temperatures."""
    SLOWED_SW_POWER = "slowed_sw_power"
    """Nanoseconds for which clocks were held down, as the next three; accumulated."""
    SLOWED_SW_THERMAL = "slowed_sw_thermal"
    SLOWED_HW_THERMAL = "slowed_hw_thermal"
    SLOWED_HW_BRAKE = "slowed_hw_brake"
    TEMP = "temp"
    MARGIN = "margin"
    """Degrees to the limit; negative is beyond it."""
    CLOCK_REASONS = "clock_reasons"
    LINKS_UP = "links_up"
    """Bit set of NVLinks that are active."""
    ECC_MODE = "ecc_mode"
    ECC_MODE_PENDING = "ecc_mode_pending"
    ECC_UNCORRECTABLE_LIFE = "ecc_uncorrectable_life"
    """Over the GPU's life."""
    ECC_CORRECTABLE_LIFE = "ecc_correctable_life"
    ECC_UNCORRECTABLE_DRAM = "ecc_uncorrectable_dram"
    ECC_UNCORRECTABLE_SRAM = "ecc_uncorrectable_sram"
    ECC_CORRECTABLE_DRAM = "ecc_correctable_dram"
    ECC_CORRECTABLE_SRAM = "ecc_correctable_sram"
    ECC_UNCORRECTABLE_DRAM_LIFE = "ecc_uncorrectable_dram_life"
    ECC_UNCORRECTABLE_SRAM_LIFE = "ecc_uncorrectable_sram_life"
    ECC_CORRECTABLE_DRAM_LIFE = "ecc_correctable_dram_life"
    ECC_CORRECTABLE_SRAM_LIFE = "ecc_correctable_sram_life"
    SRAM_THRESHOLD = "sram_threshold"
    LINK_REPLAY = "link_replay"
    """Errors summed over the GPU's NVLinks, as the next six."""
    LINK_RECOVERY = "link_recovery"
    LINK_CRC = "link_crc"
    LINK_RECEIVE_ERRORS = "link_receive_errors"
    LINK_RECOVERY_FAILED = "link_recovery_failed"
    LINK_EFFECTIVE_ERRORS = "link_effective_errors"
    LINK_SYMBOL_ERRORS = "link_symbol_errors"
    FABRIC_STATE = "fabric_state"
    FABRIC_STATUS = "fabric_status"
    FABRIC_HEALTH = "fabric_health"
    FABRIC_SUMMARY = "fabric_summary"
    PCIE_WIDTH = "pcie_width"
    PCIE_GEN = "pcie_gen"
    PSTATE = "pstate"
    UTILIZATION = "utilization"
    """Percent of the time in which the GPU was busy."""
    PERSISTENCE = "persistence"
    MIG_MODE = "mig_mode"
    AER_CORRECTABLE = "aer_correctable"
    """PCIe errors since boot, from sysfs."""
    AER_NONFATAL = "aer_nonfatal"
    AER_FATAL = "aer_fatal"
    TEMP_SHUTDOWN = "temp_shutdown"
    TEMP_SLOWDOWN = "temp_slowdown"
    TEMP_GPU_MAX = "temp_gpu_max"
    TEMP_MEM_MAX = "temp_mem_max"
    PCIE_WIDTH_MAX = "pcie_width_max"
    PCIE_GEN_MAX = "pcie_gen_max"
    ARCHITECTURE = "architecture"


class GpuEvent(IntFlag):
    """NVML's event types that are counted."""

    SINGLE_BIT_ECC = 0x1
    DOUBLE_BIT_ECC = 0x2
    XID = 0x8
    MIG_CONFIG = 0x100
    SINGLE_BIT_ECC_STORM = 0x200
    DRAM_RETIREMENT = 0x400
    DRAM_RETIREMENT_FAILURE = 0x800
    NON_FATAL_POISON = 0x1000
    FATAL_POISON = 0x2000
    UNAVAILABLE = 0x4000
    RECOVERY_ACTION = 0x8000


class MigSample(NamedTuple):
    """One MIG instance."""

    gi: int
    ci: int
    uuid: str


class EventCount(NamedTuple):
    """Events of one type since the watch began."""

    times: int
    last_ns: int
    """CLOCK_MONOTONIC of the last."""
    data: int
    """Of the last."""


class XidCount(NamedTuple):
    """One XID of one GPU, as NVML's events told it."""

    code: int
    gi: int
    """WHOLE_GPU if the fault names no instance; so ``ci``."""
    ci: int
    times: int
    first_ns: int
    last_ns: int


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU."""

    index: int
    """Its place among the GPUs since start; it keeps it when NVML counts anew."""
    uuid: str
    """Empty if it never answered; so are the next three."""
    bus: str
    """PCI address, ``0000:3b:00.0``."""
    name: str
    serial: str
    status: int
    """NVML's return code of the last pass as a whole; see :class:`Status`."""
    passes: int
    beat_ns: int
    """CLOCK_MONOTONIC at the end of the last pass."""
    period_ns: int
    call: str = ""
    """The call of NVML that is under way; empty if none."""
    call_ns: int = 0
    """Since when."""
    slow_passes: int = 0
    handles: int = 1
    """How often a handle was had: it grows when a lost GPU is found again, and when the driver came anew."""
    overdue: int = 0
    failures: int = 0
    probe_p50_ns: int = 0
    """Median time of the last 15 readings of its fields; 0: none was answered [ns]."""
    readings: Mapping[GpuField, Reading] = field(default_factory=dict)
    """Every field; a field that is not there counts as never read."""
    links: int = 0
    """NVLinks that it has."""
    link_errors: tuple[int, ...] = ()
    """Errors of each link since the driver was loaded."""
    migs: tuple[MigSample, ...] = ()
    events: Mapping[GpuEvent, EventCount] = field(default_factory=dict)
    event_mask: int = 0
    """Event types that it is registered for."""
    xids: tuple[XidCount, ...] = ()
    xids_forgotten: int = 0
    """Entries that made room for others: those not heard of for longest. The events' source tells of them."""

    def __getitem__(self, which: GpuField) -> Reading:
        return self.readings.get(which, NEVER_READ)


@dataclass(frozen=True, slots=True)
class GpuSet:
    """All GPUs and the library they are read through."""

    gpus: tuple[GpuSample, ...]
    nvml: SourceSample
    """The library: ABSENT means that there is none; ``detail`` says why it cannot be used."""
    events: SourceSample
    """The event waiter; ABSENT where NVML has no events."""
    err: int = 0
    """NVML's return code behind ``nvml.detail``, 0 if all is well."""
    generation: int = 0
    """How often the library was initialised: it grows when the driver was loaded anew."""
    count: int = 0
    """GPUs that NVML counted last."""
    driver: str = ""
    """Version, ``570.86.15``."""
    library: str = ""
    """Version of NVML."""
    call: str = ""
    """What the library is asked for now; empty if nothing."""
    call_ns: int = 0


class GpuAttributes(NamedTuple):
    """What a GPU is, from the inventory; empty or None where nobody could tell."""

    uuid: str
    bus: str
    serial: str = ""
    product: str = ""
    driver: str = ""
    vbios: str = ""
    architecture: str = ""
    numa_node: int | None = None
    profiles: tuple[tuple[str, str], ...] = ()
    """MIG instances: UUID and profile, ``1g.10gb``."""


class StuckProcess(NamedTuple):
    """A process that the kernel holds inside the GPU driver."""

    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class GpuHost:
    """What the host knows of its GPUs beside NVML; read rarely. Source: psutil, sysfs."""

    inventory: tuple[GpuAttributes, ...] = ()
    bus_gpus: tuple[str, ...] | Missing = NEVER_READ
    """PCI addresses of NVIDIA GPUs, in order. Source: /sys/bus/pci/devices/*/{vendor,class}."""
    fabric_manager: bool | Missing = NEVER_READ
    """Whether nv-fabricmanager runs."""
    stuck: tuple[StuckProcess, ...] | Missing = ()
    """Processes in uninterruptible sleep in the driver, seen so in several looks; Missing where the agent may
    not look into other processes."""
    boot_id: str = ""
