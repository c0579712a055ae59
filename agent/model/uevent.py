"""That the kernel said something of devices that come, go and change."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from agent.model.source import SourceSample


class Subsystem(StrEnum):
    """Whose events are counted. The values are the kernel's names."""

    CPU = "cpu"
    MEMORY = "memory"
    """Memory blocks."""
    NODE = "node"
    """NUMA nodes."""
    PCI = "pci"
    EDAC = "edac"
    MACHINECHECK = "machinecheck"


@dataclass(frozen=True, slots=True)
class UeventSample:
    """Device events since start, counted. Source: NETLINK_KOBJECT_UEVENT, messages of the kernel itself."""

    source: SourceSample
    """ABSENT where the kernel sends none: then everything that events would tell is looked at by time."""
    changes: Mapping[Subsystem, int]
    """Events per subsystem, and one for each loss: whoever follows a subsystem looks again when it grew."""
