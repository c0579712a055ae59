"""Counts of kernel messages: log lines that match one of the agent's patterns, and device events."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from agent.model.source_state import SourceSample


class LogLine(NamedTuple):
    """Kernel-log lines that match the same pattern with the same fields, counted."""

    pattern: int
    """Index of the lines' pattern in the agent's list of patterns."""
    times: int
    """Number of kernel-log lines that were counted together."""
    first_us: int
    """Time of the first line by the kernel log's clock [us]; close to CLOCK_MONOTONIC, not equal to it."""
    last_us: int
    first_text: str
    """First line, cut at 511 bytes; ``\\xNN`` replaces backslashes and bytes that are not printable ASCII."""
    text: str
    """Last of the counted lines, cut and escaped as ``first_text``."""
    seq: int
    """Sequence number of the last line in the kernel log."""


@dataclass(frozen=True, slots=True)
class LogSample:
    """Kernel-log lines that match a pattern, since boot or the oldest line in the kernel's buffer. Source:
    ``/dev/kmsg``."""

    lines: tuple[LogLine, ...]
    """Counted kernel-log lines, in the order of their first occurrence."""
    source: SourceSample
    """State of the log reader. STARTING until it has read the existing log once; ``lines`` is incomplete
    then."""
    lost: int = 0
    """Number of records that were overwritten before the agent read them, or too long to read."""


class Subsystem(StrEnum):
    """Kernel subsystem whose device events are counted. The values are the kernel's names."""

    CPU = "cpu"
    MEMORY = "memory"
    """Events of memory blocks."""
    NODE = "node"
    """Events of NUMA nodes."""
    PCI = "pci"
    EDAC = "edac"
    MACHINECHECK = "machinecheck"


@dataclass(frozen=True, slots=True)
class UeventCounts:
    """Number of device events (uevents) since the agent started. Source: NETLINK_KOBJECT_UEVENT, messages of
    the kernel only."""

    source: SourceSample
    """State of the event listener. ABSENT: the kernel sends no events; the sources read periodically
    instead."""
    changes: Mapping[Subsystem, int]
    """Number of events by subsystem; lost events count as one. When a number grows, the sources read the
    subsystem again."""
