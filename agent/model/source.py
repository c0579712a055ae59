"""How the sources are doing: each reads one thing, and says how that went."""

from enum import StrEnum
from typing import NamedTuple


class SourceState(StrEnum):
    """What a source could do in its last pass."""

    OK = "ok"
    ABSENT = "absent"
    """The machine does not have what the source reads."""
    FAILING = "failing"
    """At least one thing that is there cannot be read."""
    STARTING = "starting"
    """Its first pass has not been published: nobody has looked yet."""
    STALLED = "stalled"
    """The source has not finished a pass for too long; only the core's clock can tell."""


class SourceSample(NamedTuple):
    """How one source is doing."""

    name: str
    state: SourceState
    beat_ns: int
    """CLOCK_MONOTONIC of its last finished pass, before the first that of its start [ns]."""
    period_ns: int
    """How often it is read [ns]."""
    failures: int
    detail: str
    """The last failure in words, or why it is absent; empty if there was none."""
    passes: int = 0
    """Finished passes since start."""
    vital: bool = True
    """Whether the agent is of use without it. One that is not may stand still and nobody restarts the agent
    for it: a GPU's driver hangs, the rest is watched. What its silence means a rule of its own says."""
    limit_ns: int = 0
    """It stands still when its last pass is older than this; 0: as many periods as for all [ns]."""
