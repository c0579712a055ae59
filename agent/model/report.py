"""The whole outward picture at one moment: what every subscriber, command and log is told."""

from dataclasses import dataclass, field

from agent.model.health import DeviceHealth, NotApplicable, Note
from agent.model.snapshot import CoreStats, SourceSample
from agent.model.time import Instant


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the agent says about the node. Whole each time; the newest wins."""

    node: str
    at: Instant
    devices: tuple[DeviceHealth, ...] = ()
    """CPUs before hugepages, by size, by NUMA node; at most one per (pool, device)."""
    notes: tuple[Note, ...] = ()
    not_applicable: tuple[NotApplicable, ...] = ()
    not_evaluated: tuple[NotApplicable, ...] = ()
    """Rules that need more history than there is yet."""
    sources: tuple[SourceSample, ...] = ()
    core: CoreStats = field(default_factory=CoreStats)
    groups: int = 0
    """Cgroups of pods and containers that are watched."""
