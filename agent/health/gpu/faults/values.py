"""Latched faults of GPUs: what somebody told of once, and that nobody can read again. Values only.

Beside this file: intake, how they are told of; joining, how tellings become faults; findings, what a fault is
worth; cures, what ends it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from agent.health.gpu.xid.facts import Decision
from agent.health.gpu.xid.lines import SxidLine, XidLine
from agent.model.faults import KnownGpu
from agent.model.gpu import WHOLE_GPU, GpuEvent, MigSample
from agent.model.health import Severity
from agent.model.log import LogLine
from agent.model.time import NS, Instant

SHARED: Final = -1
"""In place of a GPU's number: of what all GPUs share, the NVSwitches above all."""
XID: Final = "gpu.xid."
SXID: Final = "gpu.fabric.sxid."
LOST_XID: Final = 79
LOST: Final = f"{XID}{LOST_XID}"
DAY_NS: Final = 86_400 * NS


class Key(NamedTuple):
    """One fault of one GPU or instance."""

    number: int
    """Of the GPU, or SHARED."""
    code: str
    """Of the cause, ``gpu.xid.48``."""
    gi: int = WHOLE_GPU
    ci: int = WHOLE_GPU

    def names(self, mig: MigSample) -> bool:
        """Whether it is a fault of this instance alone, of a GPU that is partitioned."""
        return self.gi == mig.gi and self.ci in (mig.ci, WHOLE_GPU)


class FaultReporter(IntEnum):
    """Who tells of a fault. What two of them tell within a moment is the same."""

    NVML = 0
    LOG = 1
    COMPANION_LINE = 2
    """A line of the log that comes with another one: a GPU that fell off the bus, beside its XID 79."""


ReportCounts = tuple[int, int, int]
"""How often each teller told of it."""
NO_REPORTS: Final[ReportCounts] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is known of one latched fault."""

    xid: int
    """Or the SXid's number; 0 for an event of NVML's."""
    first: Instant
    last: Instant
    times: int = 0
    """How often it came: in each run of news the largest that a teller counts."""
    run: ReportCounts = NO_REPORTS
    """What each told in the present run of news."""
    log_us: int = 0
    """Of the newest line that is counted."""
    lines: tuple[XidLine | SxidLine, ...] = ()
    texts: tuple[str, ...] = ()
    pids: frozenset[int] = frozenset()
    bursts: tuple[Instant, ...] = ()
    """When each burst of the last day began."""
    followers: frozenset[int] = frozenset()
    """Codes that came since and say something about it."""
    before_us: bool = False
    """It came while the agent was away: nobody saw what happened since."""
    boot_id: str = ""
    """Of the boot in which it came last."""
    earlier_boots: int = 0
    """In how many boots before that it came, too."""
    healed: Instant | None = None
    """Since when it is over."""
    judged: Decision | None = None
    """What it was worth when it ended, or to the agent's last life."""

    @property
    def is_word(self) -> bool:
        """Whether it was no more than worth knowing when it ended."""
        return self.judged is None or self.judged.severity <= Severity.INFO

    @property
    def switch_line(self) -> SxidLine | None:
        """The line of an NVSwitch that told of it; of several the first that is fatal."""
        lines = [line for line in self.lines if isinstance(line, SxidLine)]
        return max(lines, key=lambda line: line.fatal, default=None)

    @property
    def xid_lines(self) -> tuple[XidLine, ...]:
        """The XIDs among its lines."""
        return tuple(line for line in self.lines if isinstance(line, XidLine))


class Occurrence(NamedTuple):
    """News of a fault from one of the tellers."""

    key: Key
    xid: int
    times: int
    first: Instant
    last: Instant
    seen_ns: int
    """When the agent learned of it."""
    teller: FaultReporter
    log_us: int = 0
    text: str = ""
    line: XidLine | SxidLine | None = None
    before_us: bool = False


class Counted(NamedTuple):
    """How far a line of the log, or of what NVML tells, is counted."""

    times: int
    since: int
    """When it first came: another number says that it was forgotten meanwhile, and counts anew."""


@dataclass(frozen=True, slots=True)
class FaultLog:
    """All latched faults, and how far the tellers have been heard."""

    boot_id: str = ""
    faults: Mapping[Key, Fault] = field(default_factory=dict)
    held: tuple[Occurrence, ...] = ()
    """Lines that wait for NVML to name an instance."""
    started_ns: int = 0
    roll: tuple[KnownGpu, ...] = ()
    """The GPUs that the faults are of."""
    nvml_read: Mapping[tuple[int, int, int, int], Counted] = field(default_factory=dict)
    """By index, code, instance."""
    events_read: Mapping[tuple[int, GpuEvent], int] = field(default_factory=dict)
    """How many are counted."""
    lines: tuple[LogLine, ...] = ()
    """As they were read last."""
    lines_read: Mapping[tuple[int, int, str], int] = field(default_factory=dict)
    """By pattern, first time and first text: how many are counted."""
    unclaimed: frozenset[tuple[int, int, str]] = frozenset()
    """Of these, lines about a GPU that nobody has counted yet; they are asked again when one appears..."""
    buses: frozenset[str] = frozenset()
    """...besides these."""
    before_ns: int = 0
    """When the last look was at which the newest of the lines were not there."""
    old_us: int | None = None
    """The newest line of before the agent, by the log's clock; None until all of them were read."""
    kept_us: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """By number and code: lines up to this were counted by an earlier life of the agent."""


def near(fault: Fault, moment: Instant, within_ns: int) -> bool:
    """Whether the fault last came within so long of a moment."""
    return abs(fault.last.mono_ns - moment.mono_ns) <= within_ns
