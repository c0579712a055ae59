"""Values of latched GPU faults: faults that NVML or the kernel log reports once and that no reading shows.

The other modules of this package are the steps, in order: ingest, correlate, evaluate, recovery, checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from agent.health.gpu.xid.conditions import FaultDecision
from agent.health.gpu.xid.lines import SxidLine, XidLine
from agent.model.faults import KnownGpu
from agent.model.gpu import WHOLE_GPU, GpuEvent, MigSample
from agent.model.health import Severity
from agent.model.kernel_messages import LogLine
from agent.model.time import NS, Instant

SHARED: Final = -1
"""GPU number of faults that all GPUs share, such as faults of NVSwitches."""
XID: Final = "gpu.xid."
SXID: Final = "gpu.fabric.sxid."
LOST_XID: Final = 79
LOST: Final = f"{XID}{LOST_XID}"
DAY_NS: Final = 86_400 * NS


class FaultKey(NamedTuple):
    """Identity of a latched fault: the code of its cause, and its GPU or MIG instance."""

    number: int
    """Number of the GPU, or SHARED."""
    code: str
    """Code of the cause, ``gpu.xid.48``."""
    gi: int = WHOLE_GPU
    ci: int = WHOLE_GPU

    def affects_only(self, mig: MigSample) -> bool:
        """Return whether the fault affects this MIG instance and not the whole GPU."""
        return self.gi == mig.gi and self.ci in (mig.ci, WHOLE_GPU)


class FaultReporter(IntEnum):
    """Channel that reports a fault. Reports by several channels within a short time are one fault."""

    NVML = 0
    LOG = 1
    COMPANION_LINE = 2
    """A log line that accompanies an XID: "GPU has fallen off the bus", logged with XID 79."""


ReportCounts = tuple[int, int, int]
"""Number of reports by each FaultReporter."""
NO_REPORTS: Final[ReportCounts] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """State of one latched fault."""

    xid: int
    """Number of the XID or SXid; 0 for an NVML event."""
    first: Instant
    last: Instant
    times: int = 0
    """Number of occurrences; for each series of reports the largest count of one reporter is added."""
    recent_reports: ReportCounts = NO_REPORTS
    """Number of reports in the current series, by reporter."""
    log_us: int = 0
    """Kernel log time of the newest line that is counted [us]; 0: no line."""
    lines: tuple[XidLine | SxidLine, ...] = ()
    texts: tuple[str, ...] = ()
    pids: frozenset[int] = frozenset()
    bursts: tuple[Instant, ...] = ()
    """Start of each burst within the last day."""
    followers: frozenset[int] = frozenset()
    """Later XIDs that report the end of this XID."""
    before_start: bool = False
    """Whether the fault occurred while no agent ran, so that a later recovery may have been missed."""
    boot_id: str = ""
    """ID of the boot in which the fault last occurred."""
    earlier_boots: int = 0
    """Number of earlier boots in which the fault occurred."""
    resolved: Instant | None = None
    """Time when the fault was resolved; None: unresolved."""
    last_decision: FaultDecision | None = None
    """Decision at the time of the resolution, or in the checkpoint; None: no decision was kept."""

    @property
    def was_info(self) -> bool:
        """Whether the fault had at most severity INFO when it was resolved; also true without a decision."""
        return self.last_decision is None or self.last_decision.severity <= Severity.INFO

    @property
    def switch_line(self) -> SxidLine | None:
        """NVSwitch log line that reported the fault, preferably the first fatal line; None: no line."""
        lines = [line for line in self.lines if isinstance(line, SxidLine)]
        return max(lines, key=lambda line: line.fatal, default=None)

    @property
    def xid_lines(self) -> tuple[XidLine, ...]:
        """XID lines that reported the fault."""
        return tuple(line for line in self.lines if isinstance(line, XidLine))


class Occurrence(NamedTuple):
    """New occurrences of a fault, from one reporter."""

    key: FaultKey
    xid: int
    times: int
    first: Instant
    last: Instant
    seen_ns: int
    """Time when the agent read the report [ns]."""
    reporter: FaultReporter
    log_us: int = 0
    text: str = ""
    line: XidLine | SxidLine | None = None
    before_start: bool = False


class CountedEvents(NamedTuple):
    """Number of NVML events that are already counted as occurrences."""

    times: int
    since: int
    """Time of the first event in NVML's count; a change means that NVML's count started again from zero."""


@dataclass(frozen=True, slots=True)
class FaultLog:
    """All latched faults, and the reports of faults that are already counted."""

    boot_id: str = ""
    faults: Mapping[FaultKey, Fault] = field(default_factory=dict)
    waiting: tuple[Occurrence, ...] = ()
    """Occurrences from log lines that wait for NVML to name the MIG instance."""
    started_ns: int = 0
    registry: tuple[KnownGpu, ...] = ()
    """Known GPUs, to which the faults belong."""
    nvml_counted: Mapping[tuple[int, int, int, int], CountedEvents] = field(default_factory=dict)
    """Counted XIDs by NVML index, code, GPU instance and compute instance."""
    events_counted: Mapping[tuple[int, GpuEvent], int] = field(default_factory=dict)
    """Number of counted NVML events by NVML index and event."""
    lines: tuple[LogLine, ...] = ()
    """Log lines of the last snapshot."""
    lines_counted: Mapping[tuple[int, int, str], int] = field(default_factory=dict)
    """Number of counted log lines by pattern, first time and first text."""
    unclaimed: frozenset[tuple[int, int, str]] = frozenset()
    """Keys of ``lines_counted`` whose GPU is not known; retried when ``buses`` changes."""
    buses: frozenset[str] = frozenset()
    """PCI addresses of the known GPUs when the lines were last read."""
    previous_evaluation_ns: int = 0
    """Time of the last evaluation before the newest log lines appeared."""
    newest_before_start_us: int | None = None
    """Time of the newest log line from before the agent's start; None until the log was read to its end."""
    checkpoint_us: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """Log time up to which an earlier agent counted the lines, by GPU number and code."""


def is_near(fault: Fault, moment: Instant, within_ns: int) -> bool:
    """Return whether the fault last occurred within ``within_ns`` of ``moment``."""
    return abs(fault.last.mono_ns - moment.mono_ns) <= within_ns
