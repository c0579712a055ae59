"""How the agent itself is doing, as ``agent.sock`` tells it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from agent.model.health import Severity
from agent.model.snapshot import CoreStats
from agent.model.source import SourceSample
from agent.model.time import Instant


class Subscribers(NamedTuple):
    """How many streams read from one socket."""

    socket: str
    """The socket's path below the runtime directory."""
    streams: int


class Tally(NamedTuple):
    """How many devices are that bad."""

    severity: Severity
    devices: int


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The agent's process and what it last published, at one moment."""

    version: str
    pid: int
    started_wall_s: float
    """When the process started [s since 1970]."""
    cpu_s: float
    """User and system time of the process since then [s]."""
    rss_bytes: int
    threads: int
    descriptors: int
    """Open file descriptors."""
    node: str = ""
    """Empty while nothing was published, as is all that follows but ``subscribers``."""
    at: Instant | None = None
    """When the newest report was made."""
    publications: int = 0
    """How many reports there have been."""
    tallies: tuple[Tally, ...] = ()
    """Worst first; severities that no device has are left out."""
    sources: tuple[SourceSample, ...] = ()
    core: CoreStats = field(default_factory=CoreStats)
    groups: int = 0
    """Cgroups of pods and containers that are watched."""
    subscribers: tuple[Subscribers, ...] = ()
    """One per socket, those without a reader included."""
