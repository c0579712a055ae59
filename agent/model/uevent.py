"""What the kernel said of devices that come, go and change."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.source import SourceSample


class Subsystem(StrEnum):
    """Whose events are kept. The values are the kernel's names."""

    CPU = "cpu"
    MEMORY = "memory"
    """Memory blocks."""
    NODE = "node"
    """NUMA nodes."""
    PCI = "pci"
    EDAC = "edac"
    MACHINECHECK = "machinecheck"


class Action(StrEnum):
    """What happened to a device. The values are the kernel's words."""

    ADD = "add"
    REMOVE = "remove"
    CHANGE = "change"
    MOVE = "move"
    ONLINE = "online"
    OFFLINE = "offline"
    BIND = "bind"
    UNBIND = "unbind"


class Uevent(NamedTuple):
    """The newest event of one device."""

    subsystem: Subsystem
    action: Action
    path: str
    """Below the root of sysfs: ``devices/pci0000:3a/0000:3b:00.0``; cut at 255 bytes."""
    name: str
    """The last part of the path; of a PCI device its address."""
    driver: str
    """The driver that is bound to it, as the event says; empty if it says nothing."""
    times: int
    """Events of this device since start."""
    last_ns: int
    """When this one was read, CLOCK_MONOTONIC [ns]."""


@dataclass(frozen=True, slots=True)
class UeventSample:
    """Device events since start. Source: NETLINK_KOBJECT_UEVENT, messages of the kernel itself."""

    events: tuple[Uevent, ...]
    """In the order of their ``last_ns``; bounded, those seen longest ago are forgotten first."""
    source: SourceSample
    """ABSENT where the kernel sends none: then everything that events would tell is looked at by time."""
    changes: Mapping[Subsystem, int] = field(default_factory=dict)
    """Events per subsystem, and one for each loss: whoever follows a subsystem looks again when it grew."""
    lost: int = 0
    """Times that the kernel had to throw events away."""
    foreign: int = 0
    """Messages of other senders, which do not count."""
