"""Samples of GPUs: readings from NVML (through the C core), sysfs and procfs.

The module also has the wake conditions: changes of readings at which the C core wakes the engine loop.
The health rules define these conditions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntFlag, StrEnum, auto
from typing import Final, NamedTuple

from agent.model.reading import NEVER_READ, Missing, Reading, SourceSample

WHOLE_GPU: Final = 0xFFFFFFFF
"""Number in place of a GPU or compute instance: the fault concerns the whole GPU, not a MIG instance."""


class NvmlReturnCode:
    """NVML return codes that the rules use. Source: ``nvmlReturn_t``."""

    OK: Final = 0
    UNINITIALIZED: Final = 1
    INVALID_ARGUMENT: Final = 2
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
    VGPU_ECC_NOT_SUPPORTED: Final = 22
    ARGUMENT_MISMATCH: Final = 25
    DEPRECATED: Final = 26
    GPU_NOT_FOUND: Final = 28
    UNKNOWN: Final = 999


UNSUPPORTED_CODES: Final = frozenset(
    {
        NvmlReturnCode.INVALID_ARGUMENT,
        NvmlReturnCode.NOT_SUPPORTED,
        NvmlReturnCode.FUNCTION_NOT_FOUND,
        NvmlReturnCode.VGPU_ECC_NOT_SUPPORTED,
        NvmlReturnCode.ARGUMENT_MISMATCH,
        NvmlReturnCode.DEPRECATED,
    }
)
"""NVML return codes of calls that the GPU or its driver does not support, as in the C core.

Older drivers return INVALID_ARGUMENT and ARGUMENT_MISMATCH for newer field ids and structures.
"""


class GpuField(StrEnum):
    """Kind of reading of a GPU.

    The values are the names in the C core. ``drahealth.h`` lists the NVML source of each
    reading.
    """

    __hash__ = str.__hash__  # readings are looked up often, and that of Enum is a function in Python

    RECOVERY_ACTION = "recovery_action"
    ECC_UNCORRECTABLE = "ecc_uncorrectable"
    """Number of uncorrectable ECC errors of all memories since the driver was loaded."""
    ECC_CORRECTABLE = "ecc_correctable"
    REMAP_CORRECTABLE = "remap_correctable"
    """Number of memory rows remapped because of correctable errors."""
    REMAP_UNCORRECTABLE = "remap_uncorrectable"
    REMAP_PENDING = "remap_pending"
    REMAP_FAILURE = "remap_failure"
    CHANNEL_REPAIR_PENDING = "channel_repair_pending"
    TPC_REPAIR_PENDING = "tpc_repair_pending"
    UNREPAIRABLE_MEMORY = "unrepairable_memory"
    RETIRED_SBE = "retired_sbe"
    """Number of memory pages retired because of single-bit errors (GPUs before Ampere)."""
    RETIRED_DBE = "retired_dbe"
    RETIRED_PENDING = "retired_pending"
    PCIE_REPLAY = "pcie_replay"
    MEM_TEMP = "mem_temp"
    """Memory temperature [C]; all temperatures are in degrees Celsius."""
    SLOWED_SW_POWER = "slowed_sw_power"
    """Accumulated time of clock throttling for this cause [ns]; the three fields below are such times too."""
    SLOWED_SW_THERMAL = "slowed_sw_thermal"
    SLOWED_HW_THERMAL = "slowed_hw_thermal"
    SLOWED_HW_BRAKE = "slowed_hw_brake"
    TEMP = "temp"
    MARGIN = "margin"
    """Margin to the thermal limit [C]; negative: above the limit."""
    CLOCK_REASONS = "clock_reasons"
    LINKS_UP = "links_up"
    """Active NVLinks, as a bit set."""
    ECC_MODE = "ecc_mode"
    ECC_MODE_PENDING = "ecc_mode_pending"
    ECC_UNCORRECTABLE_LIFE = "ecc_uncorrectable_life"
    """Number of uncorrectable ECC errors over the GPU's lifetime."""
    ECC_CORRECTABLE_LIFE = "ecc_correctable_life"
    ECC_UNCORRECTABLE_DRAM = "ecc_uncorrectable_dram"
    ECC_UNCORRECTABLE_SRAM = "ecc_uncorrectable_sram"
    ECC_CORRECTABLE_DRAM = "ecc_correctable_dram"
    ECC_CORRECTABLE_SRAM = "ecc_correctable_sram"
    ECC_UNCORRECTABLE_DRAM_LIFE = "ecc_uncorrectable_dram_life"
    ECC_UNCORRECTABLE_SRAM_LIFE = "ecc_uncorrectable_sram_life"
    ECC_CORRECTABLE_DRAM_LIFE = "ecc_correctable_dram_life"
    ECC_CORRECTABLE_SRAM_LIFE = "ecc_correctable_sram_life"
    SRAM_PARITY = "sram_parity"
    """Uncorrectable SRAM errors since the driver was loaded that parity detected."""
    SRAM_SECDED = "sram_secded"
    """Uncorrectable SRAM errors since the driver was loaded that SEC-DED codes detected."""
    SRAM_THRESHOLD = "sram_threshold"
    LINK_REPLAY = "link_replay"
    """Error count summed over the GPU's NVLinks; the six fields below are such sums too."""
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
    """GPU utilization [%]."""
    PERSISTENCE = "persistence"
    MIG_MODE = "mig_mode"
    AER_CORRECTABLE = "aer_correctable"
    """Number of correctable PCIe errors since boot, from sysfs."""
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
    """NVML event types that the C core counts."""

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
    """Identity of one MIG instance."""

    gi: int
    """Number of the GPU instance that the MIG instance belongs to."""
    ci: int
    """Number of the compute instance within its GPU instance."""
    uuid: str


class EventCount(NamedTuple):
    """Number of events of one type since monitoring of the GPU started."""

    times: int
    last_ns: int
    """CLOCK_MONOTONIC of the last event [ns]."""
    data: int
    """NVML event data of the last event, such as the XID."""


class XidCount(NamedTuple):
    """Number of NVML events with one XID (NVIDIA's error number) on one GPU."""

    code: int
    gi: int
    """Number of the GPU instance that the XID names; WHOLE_GPU: the XID concerns the whole GPU."""
    ci: int
    """Number of the compute instance that the XID names; WHOLE_GPU: the XID concerns the whole GPU."""
    times: int
    first_ns: int
    last_ns: int


@dataclass(frozen=True, slots=True)
class GpuSample:
    """NVML readings and NVML events of one GPU."""

    index: int
    """Index among the GPUs seen since the agent started; unchanged when NVML renumbers the GPUs."""
    uuid: str
    """UUID of the GPU; empty, as bus, name and serial are: the GPU never answered."""
    bus: str
    """PCI address of the GPU, ``0000:3b:00.0``."""
    name: str
    serial: str
    status: int
    """NVML return code of the last reading, as in :class:`NvmlReturnCode`."""
    passes: int
    """Number of finished readings of the GPU (passes)."""
    beat_ns: int
    """CLOCK_MONOTONIC at the end of the last pass over the GPU [ns]."""
    period_ns: int
    call: str = ""
    """NVML call in progress on the GPU; empty: none."""
    call_ns: int = 0
    """CLOCK_MONOTONIC when the call in progress started [ns]; 0: none is in progress."""
    slow_passes: int = 0
    handles: int = 1
    """Number of NVML handles opened so far: grows when a lost GPU returns and when the driver is reloaded."""
    changes: int = 0
    """Number of passes whose changes woke the engine loop; NVML events are not counted."""
    overdue: int = 0
    failures: int = 0
    probe_p50_ns: int = 0
    """Median duration of the last 15 NVML field readings [ns]; 0: none succeeded."""
    readings: Mapping[GpuField, Reading] = field(default_factory=dict)
    """Readings of the GPU by field; a missing key: never read."""
    links: int = 0
    """Number of NVLinks that the GPU has, active or not."""
    link_errors: tuple[int, ...] = ()
    """Number of errors since the driver was loaded, by NVLink."""
    migs: tuple[MigSample, ...] = ()
    events: Mapping[GpuEvent, EventCount] = field(default_factory=dict)
    event_mask: int = 0
    """NVML event types that the C core has registered for on this GPU, as a bit set."""
    xids: tuple[XidCount, ...] = ()
    xids_forgotten: int = 0
    """Number of oldest ``xids`` that were dropped for lack of room."""

    def __getitem__(self, name: GpuField) -> Reading:
        return self.readings.get(name, NEVER_READ)


@dataclass(frozen=True, slots=True)
class NvmlSample:
    """State of the NVML library, and samples of all GPUs that it lists."""

    gpus: tuple[GpuSample, ...]
    nvml: SourceSample
    """State of the NVML library; ABSENT: the machine has none. ``detail``: why it cannot be used."""
    events: SourceSample
    """State of the thread that waits for NVML events; ABSENT: NVML supports no events."""
    err: int = 0
    """NVML return code behind ``nvml.detail``; 0: no error."""
    generation: int = 0
    """Number of loads of the driver since the start; without ``module``, of initializations of NVML."""
    module: int = 0
    """Number of the loaded kernel module, which each load changes; 0: unknown."""
    count: int = 0
    """Number of GPUs that NVML last reported."""
    driver: str = ""
    """Version of the NVIDIA driver, ``570.86.15``."""
    library: str = ""
    """Version of the NVML library."""
    call: str = ""
    """NVML call in progress that concerns no single GPU, such as nvmlInit; empty: none."""
    call_ns: int = 0
    process: str = ""
    """How the process that calls NVML ended; empty: it runs, or NVML is called by the agent itself."""


class GpuAttributes(NamedTuple):
    """Static attributes of a GPU, such as serial number and product name; empty or None: unknown."""

    uuid: str
    bus: str
    serial: str = ""
    product: str = ""
    driver: str = ""
    vbios: str = ""
    architecture: str = ""
    numa_node: int | None = None
    profiles: tuple[tuple[str, str], ...] = ()
    """MIG instances as (UUID, profile such as ``1g.10gb``)."""


class StuckProcess(NamedTuple):
    """A process that hangs (uninterruptible sleep) inside the GPU driver."""

    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class GpuOsSample:
    """State of the GPUs as procfs and sysfs show it; NVML does not report this state."""

    inventory: tuple[GpuAttributes, ...] = ()
    bus_gpus: tuple[str, ...] | Missing = NEVER_READ
    """PCI addresses of NVIDIA GPUs, sorted. Source: /sys/bus/pci/devices/*/{vendor,class}."""
    fabric_manager: bool | Missing = NEVER_READ
    """True: the process nv-fabricmanager runs. False: it does not run."""
    stuck: tuple[StuckProcess, ...] | Missing = ()
    """Processes that hang inside the GPU driver in several consecutive reads; Missing: the agent may not
    inspect other processes."""
    boot_id: str = ""
    """Id of the machine's boot: ``/proc/sys/kernel/random/boot_id``."""
    bound_gpus: tuple[str, ...] = ()
    """PCI addresses of those GPUs that are bound to the driver ``nvidia``. Source: ``driver`` in the same
    directory; empty while the bus cannot be read."""


# --- wake conditions ---------------------------------------------------------------------------------------


class SamplerField(Enum):
    """Reading of the machine that the C core can watch for changes.

    In the names, NODE means a NUMA node, POOL a hugepage pool, and GROUP a cgroup. The names are those of the
    C core.
    """

    CPU_ONLINE = auto()
    CPU_ISOLATED = auto()
    NODE_CPUS = auto()
    NODE_THROTTLE_CORE = auto()
    NODE_THROTTLE_PACKAGE = auto()
    POOL_NR = auto()
    POOL_FREE = auto()
    POOL_RESERVED = auto()
    POOL_SURPLUS = auto()
    POOL_OVERCOMMIT = auto()
    GROUP_SET = auto()
    GROUP_POPULATED = auto()
    GROUP_FROZEN = auto()
    GROUP_MEM_HIGH = auto()
    GROUP_MEM_MAX = auto()
    GROUP_MEM_OOM = auto()
    GROUP_MEM_OOM_KILL = auto()
    GROUP_MEM_FAILCNT = auto()
    GROUP_CPU_PERIODS = auto()
    GROUP_CPU_THROTTLED = auto()
    GROUP_CPUS = auto()
    GROUP_HT_EVENTS = auto()
    GROUP_HT_RSVD_FAILED = auto()


class WakeCondition(NamedTuple):
    """Condition at which the C core wakes the engine loop: a change of the reading ``field``.

    If a threshold is set, the reading must grow by the threshold within the window. A reading that becomes
    readable or unreadable always wakes the engine loop.
    """

    field: SamplerField
    threshold: int = 0
    window_ns: int = 0


class GpuWakeMode(Enum):
    """Kind of change of a GPU reading that wakes the engine loop.

    The names are those of the C core.
    """

    CHANGE = auto()
    """The engine wakes if the reading changed."""
    RISE = auto()
    """The engine wakes if the reading grew by ``threshold`` within the window, or its counter was reset."""
    OVER = auto()
    """The engine wakes if the reading reached the reading of the field ``limit``, or fell below it again."""
    BELOW = auto()
    """The engine wakes if the reading fell below ``threshold``, or rose to it again."""
    BITS = auto()
    """The engine wakes if one of the reading's bits that are set in ``threshold`` changed."""


class GpuWakeCondition(NamedTuple):
    """Condition at which a GPU reading wakes the engine loop.

    A reading that becomes readable or unreadable always wakes the loop.
    """

    field: GpuField
    mode: GpuWakeMode = GpuWakeMode.CHANGE
    threshold: int = 0
    window_ns: int = 0
    limit: GpuField | None = None


class NvmlCallCost(NamedTuple):
    """Cost of the measured NVML calls of one kind.

    The agent measures about two readings of all GPUs in each ``gpu.slow-period``, and all calls that open the
    library or wait for events.
    """

    kind: str
    """First function of the kind, such as ``nvmlDeviceGetFieldValues``."""
    calls: int
    cpu_s: float
    """CPU time of the calling threads in the calls [s]."""
    duration_s: float
    """Duration of the calls [s]; for ``nvmlEventSetWait`` also the time until an event."""


class NvmlCosts(NamedTuple):
    """Costs of the calls to NVML, counted since the threads that make the calls started."""

    cpu_s: float
    """CPU time of the threads that read GPUs [s]."""
    switches: int
    """Context switches of these threads."""
    period_s: float
    """Longest time between two passes over a GPU that is in force, because of ``gpu.cpu-budget`` [s]."""
    calls: tuple[NvmlCallCost, ...] = ()
    """Costs by kind of call; kinds without a measured call are left out."""
