"""Messages of the kernel: log lines that match a pattern, and device events, counted."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from agent.model.source import SourceSample


class LogLine(NamedTuple):
    """Equal kernel-log lines: the same pattern with the same fields."""

    pattern: int
    """Index of the pattern in the agent's list of patterns."""
    times: int
    first_us: int
    """Time of the first line by the kernel log's clock [us]; close to CLOCK_MONOTONIC, not equal to it."""
    last_us: int
    first_text: str
    """First line, cut at 511 bytes; ``\\xNN`` replaces backslashes and bytes that are not printable ASCII."""
    text: str
    """Last line, cut and escaped as ``first_text``."""
    seq: int
    """Sequence number of the last line in the log."""


@dataclass(frozen=True, slots=True)
class LogSample:
    """Kernel log since boot, as far as the kernel still has it. Source: ``/dev/kmsg``."""

    lines: tuple[LogLine, ...]
    """Lines in the order of their first occurrence."""
    source: SourceSample
    """State of the reader. STARTING, with incomplete ``lines``, until the existing log is read once."""
    lost: int = 0
    """Number of records that were overwritten before the agent read them, or too long to read."""


class Subsystem(StrEnum):
    """Kernel subsystem whose events are counted. The values are the kernel's names."""

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
    """Device events since the agent started. Source: NETLINK_KOBJECT_UEVENT, messages of the kernel only."""

    source: SourceSample
    """State of the listener. ABSENT if the kernel sends no events; sources then read periodically."""
    changes: Mapping[Subsystem, int]
    """Events by subsystem, plus one for each loss. When they grow, sources read the subsystem again."""
