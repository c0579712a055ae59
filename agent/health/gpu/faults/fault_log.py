"""Fault log: all latched GPU faults, which NVML or the kernel log reports once and no reading shows.

Four modules of this package update the fault log, in this order: ingest (new reports), match_reports
(several reports of one fault), decide_severity, checkpoint (end of faults, state for a restart).

The module also has the table of latched faults other than XIDs and SXids: NVML events and kernel log lines
that no reading shows. NVML events for ECC errors, repartitions and recovery actions are not in the table,
because rules evaluate readings of the same state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from agent.health.gpu.xid.decisions import FaultDecision
from agent.health.gpu.xid.log_lines import SxidLine, XidLine
from agent.health.rules import XID_PREFIX
from agent.model.gpu import WHOLE_GPU, GpuEvent, MigSample
from agent.model.health import Blame, Repair, Severity
from agent.model.machine_samples import LogLine
from agent.model.persistent_faults import Cure, KnownGpu
from agent.model.time import NS, Instant

SHARED: Final = -1
"""GPU number of faults that all GPUs share, such as faults of NVSwitches."""
UNLISTED: Final = -2
"""GPU number of faults of a GPU at an unknown PCI address."""
LOST_CODE: Final = f"{XID_PREFIX}79"
"""Finding code of the XID "GPU has fallen off the bus"."""
DAY_NS: Final = 86_400 * NS


def recurrence_ns(code: str) -> int:
    """Return the time within which several bursts of a fault are a recurrence [ns]: 30 days for a lost GPU,
    else a day. Neither a reboot, a reset nor the end of the fault in between changes it."""
    return 30 * DAY_NS if code == LOST_CODE else DAY_NS


def number_in_code(code: str) -> int:
    """Return the number of the XID or SXid with a finding code; 0 for a code without a number."""
    digits = code.rpartition(".")[2]
    return int(digits) if digits.isdecimal() else 0


class FaultKey(NamedTuple):
    """Identity of a latched fault (kept until resolved): its GPU or MIG instance, and its finding code."""

    gpu_number: int
    """Number of the GPU that has the fault; SHARED: all GPUs have it."""
    code: str
    """Finding code of the fault, for example ``gpu.xid.48``."""
    gi: int = WHOLE_GPU
    """GPU instance (MIG) that has the fault; WHOLE_GPU: not a single instance."""
    ci: int = WHOLE_GPU
    """Compute instance (MIG) that has the fault; WHOLE_GPU: not a single instance."""

    def affects_only(self, mig: MigSample) -> bool:
        """Return whether the fault affects this MIG instance and not the whole GPU."""
        return self.gi == mig.gi and self.ci in (mig.ci, WHOLE_GPU)


class FaultChannel(IntEnum):
    """Channel that reports a fault. Reports by several channels within 5 s count as one occurrence."""

    NVML = 0
    LOG = 1
    COMPANION_LINE = 2
    """Log line that accompanies the line of a fault.

    It is "GPU has fallen off the bus" with XID 79, and "Severity" and "Data" with an SXid.
    """


class Burst(NamedTuple):
    """Occurrences of a fault that are less than a minute apart; for a lost GPU, those of one loss."""

    start: Instant
    pid: int | None
    """PID of the first process that a log line of the burst names; None: not known."""


ReportCounts = tuple[int, int, int]
"""Number of reports of one fault: by NVML, by log lines and by companion lines."""
NO_REPORTS: Final[ReportCounts] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """State of one latched GPU fault: its occurrences, its log lines, and the time of its end."""

    xid: int
    """Number of the XID or SXid of the fault; 0 for an NVML event."""
    first: Instant
    last: Instant
    times: int = 0
    """Number of occurrences; of several reporters in one series of reports, the largest count is added."""
    recent_reports: ReportCounts = NO_REPORTS
    """Number of reports in the newest series (less than 5 s apart), by reporter."""
    log_us: int = 0
    """Kernel log time of the fault's newest counted line [us]; 0: no line."""
    log_read_ns: int = 0
    """Time at which the newest counted line was read, as :attr:`Occurrence.read_ns` [ns]; 0: no line."""
    lines: tuple[XidLine | SxidLine, ...] = ()
    texts: tuple[str, ...] = ()
    bursts: tuple[Burst, ...] = ()
    """Newest bursts that were less than recurrence_ns() before the last, also those of earlier boots."""
    followers: frozenset[int] = frozenset()
    """Numbers of later XIDs that report the end of this XID."""
    has_root: bool = False
    """Whether another XID of the GPU occurred close to the last occurrence, and may be its cause."""
    before_start: bool = False
    """Whether the fault occurred before the agent's start, so that its end may have been missed."""
    boot_id: str = ""
    """Boot ID of the kernel when the fault last occurred."""
    resolved: Instant | None = None
    """Time at which the fault was resolved; None: it is not resolved."""
    last_decision: FaultDecision | None = None
    """Decision on the fault when it was resolved, or from the checkpoint; None: neither."""

    @property
    def was_info(self) -> bool:
        """Whether the fault had a severity of at most INFO when it was resolved; True if the severity is not
        known."""
        return self.last_decision is None or self.last_decision.severity <= Severity.INFO

    @property
    def switch_line(self) -> SxidLine | None:
        """First of the most severe NVSwitch log lines of the fault; None: the fault has no such line."""
        lines = [line for line in self.lines if isinstance(line, SxidLine)]
        return max(lines, key=lambda line: (line.rank, not line.is_companion), default=None)

    @property
    def xid_lines(self) -> tuple[XidLine, ...]:
        """Parsed kernel log lines that reported the fault as an XID."""
        return tuple(line for line in self.lines if isinstance(line, XidLine))


class Occurrence(NamedTuple):
    """Report of one or more new occurrences of a fault, by NVML or by the kernel log."""

    key: FaultKey
    xid: int
    times: int
    first: Instant
    last: Instant
    read_ns: int
    """Monotonic time at which the agent read the report of the occurrence [ns]; for a line from before the
    agent's start, the time of the line."""
    reporter: FaultChannel
    log_us: int = 0
    text: str = ""
    line: XidLine | SxidLine | None = None
    first_text: str = ""
    first_line: XidLine | None = None
    """Kernel log line of the first of several occurrences, if it differs from ``line``; None: not known."""
    before_start: bool = False


class NvmlEventCount(NamedTuple):
    """Number of NVML events of one XID that are already counted as occurrences."""

    times: int
    since: int
    """Time of NVML's first event [ns]; if it changes, NVML counts from zero again."""


@dataclass(frozen=True, slots=True)
class FaultLog:
    """All latched GPU faults, and the numbers of reports that are already counted as occurrences."""

    boot_id: str = ""
    faults: Mapping[FaultKey, Fault] = field(default_factory=dict)
    waiting: tuple[Occurrence, ...] = ()
    """Log lines for which NVML has yet to name the MIG instance, and ends of faults that are not reported
    yet."""
    started_ns: int = 0
    registry: tuple[KnownGpu, ...] = ()
    """GPUs that the agent knows, with the stable numbers that the faults name."""
    nvml_counted: Mapping[tuple[int, int, int, int], NvmlEventCount] = field(default_factory=dict)
    """Number of counted XIDs by NVML index, XID number, GPU instance and compute instance."""
    events_counted: Mapping[tuple[int, GpuEvent], int] = field(default_factory=dict)
    """Number of counted NVML events by index of the GPU in NVML and kind of event."""
    lines: tuple[LogLine, ...] = ()
    """Kernel log lines of the last snapshot."""
    lines_counted: Mapping[tuple[int, int, str], int] = field(default_factory=dict)
    """Number of counted kernel log lines by pattern, first time and first text."""
    unclaimed: frozenset[tuple[int, int, str]] = frozenset()
    """Lines in ``lines_counted`` whose GPU is not known; counted again when ``buses`` changes."""
    unlisted: Mapping[tuple[int, int, str], tuple[str, str]] = field(default_factory=dict)
    """PCI address and finding code of each line in ``unclaimed``."""
    buses: frozenset[str] = frozenset()
    """PCI addresses of the known GPUs when the lines were last counted."""
    previous_evaluation_ns: int = 0
    """Time of the last evaluation before the newest log lines appeared [ns]."""
    newest_before_start_us: int | None = None
    """Log time of the newest line from before the agent's start [us]; None: log not read to its end yet."""
    checkpoint_us: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """Log time up to which lines were counted before a restart [us], by GPU number and finding code."""


def occurred_near(fault: Fault, moment: Instant, within_ns: int) -> bool:
    """Return whether the last occurrence of a fault is at most ``within_ns`` before or after ``moment``."""
    return abs(fault.last.mono_ns - moment.mono_ns) <= within_ns


# --- faults other than XIDs and SXids ----------------------------------------------------------------------

INIT_FAILED: Final = "gpu.init_failed"
LINK_SETUP_FAILED: Final = "gpu.nvlink.setup_failed"
API_MISMATCH: Final = "gpu.driver.api_mismatch"


class EventFaultRow(NamedTuple):
    """Table row of a latched fault (kept until resolved) that an NVML event or a kernel log line reports."""

    code: str
    event: GpuEvent | None
    """NVML event that reports the fault; None: a kernel log line reports it."""
    severity: Severity
    blame: Blame
    cure: Cure
    """Event, such as a reset, that ends the fault."""
    meaning: str
    why: str
    advice: str
    repair: Repair


# fmt: off
EVENT_FAULT_ROWS: Final = (
    EventFaultRow("gpu.unavailable", GpuEvent.UNAVAILABLE, Severity.UNHEALTHY, Blame.HARDWARE, Cure.ACTION,
                  "NVML announced that the GPU is not available",
                  "programs on the GPU fail, and new ones cannot start",
                  "drain the GPU and reset it (nvidia-smi --gpu-reset), else reboot the node",
                  Repair.RESET_DEVICE),
    EventFaultRow("gpu.poison.fatal", GpuEvent.FATAL_POISON, Severity.UNHEALTHY, Blame.HARDWARE, Cure.RESET,
                  "corrupt data was not contained",
                  "results of every program on the GPU may be wrong",
                  "drain the GPU and reset it (nvidia-smi --gpu-reset)",
                  Repair.RESET_DEVICE),
    EventFaultRow("gpu.poison.contained", GpuEvent.NON_FATAL_POISON,
                  Severity.DEGRADED, Blame.HARDWARE, Cure.ACTION,
                  "corrupt data was contained: only the program that read it was ended",
                  "a part of the memory is failing",
                  "reset the GPU when its work has ended, so that the row is replaced",
                  Repair.RESET_DEVICE),
    EventFaultRow("gpu.retirement.failed", GpuEvent.DRAM_RETIREMENT_FAILURE,
                  Severity.UNHEALTHY, Blame.HARDWARE, Cure.RESET,
                  "bad memory could not be retired",
                  "the next access to it fails again",
                  "drain the GPU and reset it; replace it if the fault recurs",
                  Repair.RESET_DEVICE),
    EventFaultRow("gpu.retirement", GpuEvent.DRAM_RETIREMENT, Severity.INFO, Blame.HARDWARE, Cure.EXPIRES,
                  "bad memory was retired",
                  "the number of retirements shows how the memory ages",
                  "nothing to do",
                  Repair.NONE),
    EventFaultRow(INIT_FAILED, None, Severity.UNHEALTHY, Blame.DRIVER, Cure.RESET,
                  "the driver could not initialize the GPU (RmInitAdapter failed)",
                  "no program can open the GPU",
                  "reset the GPU, else reboot the node; read the NVRM lines before it in the kernel log",
                  Repair.RESET_DEVICE),
    EventFaultRow(LINK_SETUP_FAILED, None, Severity.DEGRADED, Blame.HARDWARE, Cure.RESET,
                  "the driver cannot determine which NVLinks are up",
                  "if it repeats, NVML calls begin to hang",
                  "check nv-fabricmanager and the NVSwitches, then reset the GPUs",
                  Repair.RESET_DEVICE),
    EventFaultRow(API_MISMATCH, None, Severity.INFO, Blame.CONFIGURATION, Cure.EXPIRES,
                  "a program's driver library does not match the loaded kernel module",
                  "that program cannot use a GPU; other programs can",
                  "restart the program, or its container, with the node's driver libraries",
                  Repair.RESTART_WORKLOAD),
    EventFaultRow("gpu.ecc.storm", GpuEvent.SINGLE_BIT_ECC_STORM,
                  Severity.DEGRADED, Blame.HARDWARE, Cure.EXPIRES,
                  "a storm of correctable memory errors in the last 10 min",
                  "corrections slow the workload, and such memory fails earlier",
                  "drain the GPU and run a diagnostic; replace the GPU if the storm recurs",
                  Repair.INSPECT_HARDWARE),
)
# fmt: on

ROW_BY_EVENT: Final = {row.event: row for row in EVENT_FAULT_ROWS if row.event}
ROW_BY_CODE: Final = {row.code: row for row in EVENT_FAULT_ROWS}
