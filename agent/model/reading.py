"""Numbers read from the machine, or the reason why a number is missing.

The module also has the state of the agent's sources. A source reads one part of the machine periodically; a
pass is one such reading.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Final, NamedTuple

NATIVE_CORE_ERRORS: Final = {
    -4096: "the C core and the Python package have different versions; reinstall drahealth",  # DH_EABI
    -4097: "text cannot be parsed",  # DH_EPARSE
    -4099: "more data than the buffer holds",  # DH_EFULL
}
"""Text of each error code that the C core defines itself."""


def error_text(code: int) -> str:
    """Return the text of an error code: a positive errno, or a negative code of the native C core."""
    return os.strerror(code) if code > 0 else NATIVE_CORE_ERRORS.get(code, f"unknown C core error {code}")


def return_code_text(code: int) -> str:
    """Return the text of a negative return code of the C core.

    The code is -errno, or a code that the C core defines.
    """
    return error_text(code if code <= max(NATIVE_CORE_ERRORS) else -code)


class Absence(StrEnum):
    """Reason why a reading (a number from a file or counter) is missing."""

    ABSENT = "absent"
    """The machine lacks the source of the reading: the file did not exist at start."""
    UNREADABLE = "unreadable"
    """The reading was available before and cannot be read now."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Reason why a number could not be read.

    Health rules never treat a missing number as 0, Healthy or Unhealthy.
    """

    absence: Absence
    errno: int = 0
    """errno of the failed read; 0: unknown; negative: a code of the C core."""

    def __str__(self) -> str:
        return error_text(self.errno) if self.errno else str(self.absence)


Reading = int | Missing
"""Number read from the machine, or the reason why it is missing."""

NEVER_READ: Final = Missing(Absence.ABSENT)
"""Value of a reading before the first read, and of a reading that the machine does not have."""


def is_absent(reading: Reading) -> bool:
    """Return True if the machine does not have the reading.

    The result is False for a number and for a reading that cannot be read now.
    """
    return isinstance(reading, Missing) and reading.absence is Absence.ABSENT


# --- state of sources --------------------------------------------------------------------------------------


class SourceState(StrEnum):
    """State of a source after its last pass.

    A source reads one part of the machine periodically; a pass is one such reading.
    """

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
    """State of one source, which reads one part of the machine periodically, with the times of its readings
    (passes)."""

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


source_name: Final = attrgetter("name")
_source_state: Final = attrgetter("state")


def sources_in_state(sources: Collection[SourceSample], state: SourceState) -> Iterator[SourceSample]:
    """Return an iterator over the sources in ``state``; the usual case, that there are none, costs little."""
    if state not in map(_source_state, sources):
        return iter(())
    return (source for source in sources if source.state is state)


GPU_LIBRARY: Final = "nvml"
"""Name of the source that lists the GPUs."""


def unlisted_sources(sources: Iterable[SourceSample]) -> tuple[str, ...]:
    """Return the names of the sources that have not listed their devices yet.

    A report lacks the devices of these sources.
    """
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
