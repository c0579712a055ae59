"""State of the sources, each of which reads one part of the machine."""

from enum import StrEnum
from typing import NamedTuple


class SourceState(StrEnum):
    """State of a source after its last pass."""

    OK = "ok"
    ABSENT = "absent"
    """The machine does not have what the source reads."""
    FAILING = "failing"
    """At least one existing file or interface cannot be read."""
    STARTING = "starting"
    """The first pass is not finished."""
    STALLED = "stalled"
    """No pass finished for too long. Only the core loop, which has a clock, sets this state."""


class SourceSample(NamedTuple):
    """State of one source."""

    name: str
    state: SourceState
    beat_ns: int
    """CLOCK_MONOTONIC of the last finished pass, or of the start [ns]."""
    period_ns: int
    """Time between two passes [ns]."""
    failures: int
    detail: str
    """Text of the last failure, or the reason why the source is absent; empty: no failure."""
    passes: int = 0
    """Finished passes since start."""
    vital: bool = True
    """True: the watchdog restarts the agent when the source stalls. False, for example, for NVML: a restarted
    agent would hang in the same driver, and GPU rules report the stall."""
    limit_ns: int = 0
    """Age of the last pass at which the source is stalled [ns]; 0: the default number of periods."""
