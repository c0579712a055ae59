"""The whole outward picture at one moment: what every subscriber, command and log is told."""

from dataclasses import dataclass, field

from agent.model.health import DeviceHealth, NotApplicable, Note
from agent.model.snapshot import CoreStats
from agent.model.source import SourceSample
from agent.model.time import Instant


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the agent says about the node. Whole each time; the newest wins."""

    node: str
    at: Instant
    devices: tuple[DeviceHealth, ...] = ()
    """CPUs, GPUs each with its MIG instances, memory, hugepages by size, then those that drivers declare."""
    notes: tuple[Note, ...] = ()
    not_applicable: tuple[NotApplicable, ...] = ()
    not_evaluated: tuple[NotApplicable, ...] = ()
    """Rules that need more history than there is yet."""
    sources: tuple[SourceSample, ...] = ()
    core: CoreStats = field(default_factory=CoreStats)
    groups: int = 0
    """Cgroups of pods and containers that are watched."""
    declaring: tuple[str, ...] = ()
    """Drivers that have declared devices since the agent started: each is told of its own alone."""
    starting: bool = False
    """Somebody has still to look for the first time, and may be in time: it is no picture yet."""
