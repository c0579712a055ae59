"""What was read of the kernel log: the lines that somebody asked for, counted."""

from dataclasses import dataclass
from typing import NamedTuple

from agent.model.source import SourceSample


class LogLine(NamedTuple):
    """Lines that say the same: one pattern matched them, and all its fields were equal."""

    pattern: int
    """Index of the pattern."""
    times: int
    first_us: int
    """When the first was written, by the log's own clock: near CLOCK_MONOTONIC, not equal to it [us]."""
    last_us: int
    first_text: str
    """Cut at 511 bytes; ``\\xNN`` stands for what is not printable ASCII, and for a backslash."""
    text: str
    """The last one's."""
    seq: int
    """The last one's number in the log."""


@dataclass(frozen=True, slots=True)
class LogSample:
    """The kernel log since boot, or as far back as the kernel had it. Source: ``/dev/kmsg``."""

    lines: tuple[LogLine, ...]
    """In the order of their first."""
    source: SourceSample
    """STARTING until everything that the log held was read once; the lines may be some of them till then."""
    lost: int = 0
    """Records that were overwritten before they could be read, or too long to be."""
