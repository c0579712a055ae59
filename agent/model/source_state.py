"""State of the agent's sources. A source reads one part of the machine periodically; a pass is one such
reading."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple


class SourceState(StrEnum):
    """State of a source after its last pass, one reading of its part of the machine."""

    OK = "ok"
    ABSENT = "absent"
    """The machine does not have the hardware or files that the source reads."""
    FAILING = "failing"
    """The source cannot read at least one existing file or interface."""
    STARTING = "starting"
    """The source has not finished its first pass over the machine."""
    STALLED = "stalled"
    """No pass finished for too long. The engine loop, which has a clock, sets this state."""


class SourceSample(NamedTuple):
    """State of one source, with the times of its passes."""

    name: str
    state: SourceState
    beat_ns: int
    """CLOCK_MONOTONIC at the end of the last finished pass; before the first one, at the source's start
    [ns]."""
    period_ns: int
    """Time between two passes of the source [ns]."""
    failures: int
    """Number of failed reads since the source started."""
    detail: str
    """Text of the last failure, or the reason why the source is absent; empty: no failure."""
    passes: int = 0
    """Number of passes that the source has finished since its start."""
    vital: bool = True
    """True: the watchdog restarts the agent when the source stalls. False, for example, for NVML: a restarted
    agent would hang in the same driver, and GPU rules report the stall."""
    limit_ns: int = 0
    """Age of the last finished pass at which the source is STALLED [ns]; 0: the default, some periods."""


GPU_LIBRARY: Final = "nvml"
"""Name of the source that lists the GPUs."""


def unlisted_sources(sources: Iterable[SourceSample]) -> tuple[str, ...]:
    """Return the names of the sources that have not listed their devices, which a report therefore lacks."""
    unread = (SourceState.STARTING, SourceState.STALLED)
    return tuple(
        source.name
        for source in sources
        if source.name == GPU_LIBRARY and source.state in unread and not source.passes
    )


DURATION_BOUNDS_S: Final = (
    0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, float("inf"),
)  # fmt: skip
"""Upper bounds of the buckets of PassDurations [s]; the C core has the same."""


class PassDurations(NamedTuple):
    """Histogram of the durations of one source's readings (passes) since the source started."""

    counts: tuple[int, ...]
    """Number of passes by bucket, one for each of DURATION_BOUNDS_S; a pass is in one bucket only."""
    sum_s: float
    """Sum of the durations [s]."""
