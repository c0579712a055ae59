"""Report of the node, complete at one moment, and status of the agent's process."""

from dataclasses import dataclass, field
from typing import NamedTuple

from agent.model.health import DeviceHealth, NotApplicable, Note, Severity
from agent.model.snapshot import CoreStats
from agent.model.source import SourceSample
from agent.model.time import Instant


@dataclass(frozen=True, slots=True)
class Report:
    """Complete state of the Kubernetes node. Each report replaces the one before."""

    node: str
    at: Instant
    devices: tuple[DeviceHealth, ...] = ()
    """CPUs, GPUs with their MIG instances, memory, hugepages by size, then declared devices."""
    notes: tuple[Note, ...] = ()
    not_applicable: tuple[NotApplicable, ...] = ()
    not_evaluated: tuple[NotApplicable, ...] = ()
    """Rules that were not evaluated, because they need more history."""
    sources: tuple[SourceSample, ...] = ()
    core: CoreStats = field(default_factory=CoreStats)
    groups: int = 0
    """Number of watched cgroups of pods and containers."""
    declaring: tuple[str, ...] = ()
    """Drivers that have declared devices since the agent started; their sockets report only these devices."""
    starting: bool = False
    """True: the report is incomplete, since a source has not finished its first pass but still has time."""


class Subscribers(NamedTuple):
    """Number of health streams that are open on one socket."""

    socket: str
    """Path of the socket below the runtime directory."""
    streams: int


class Tally(NamedTuple):
    """Number of devices with one severity."""

    severity: Severity
    devices: int


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The agent's process and its newest report at one moment."""

    version: str
    pid: int
    started_wall_s: float
    """Time when the process started [s since 1970]."""
    cpu_s: float
    """User and system time of the process since its start [s]."""
    rss_bytes: int
    threads: int
    descriptors: int
    """Open file descriptors."""
    node: str = ""
    """Node name. Empty before the first report, as are all fields below except ``subscribers``."""
    at: Instant | None = None
    """Time of the newest report."""
    publications: int = 0
    """Number of reports so far."""
    tallies: tuple[Tally, ...] = ()
    """Devices by severity, worst first, without zero counts."""
    sources: tuple[SourceSample, ...] = ()
    core: CoreStats = field(default_factory=CoreStats)
    groups: int = 0
    """Number of watched cgroups of pods and containers."""
    subscribers: tuple[Subscribers, ...] = ()
    """Number of streams of every socket, including sockets without streams."""
