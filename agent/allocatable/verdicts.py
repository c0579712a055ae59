"""What is read of cgroups, and what is said of it: verdicts, and what comes of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from agent.allocatable.expected import GroupRef
from agent.allocatable.knobs import Knob, KnobId
from agent.allocatable.values import Expected
from agent.model.reading import Reading


@dataclass(frozen=True, slots=True)
class Actual:
    """What one cgroup says."""

    values: Mapping[KnobId, Reading] = field(default_factory=dict)
    """Limits in bytes and microseconds, NO_LIMIT if there is none; sets of CPUs as such, bit by bit."""
    controllers: frozenset[str] | None = None
    """Those that are enabled for it; None: nobody has looked."""
    vanished: bool = False
    """It was gone, and still was when it was read again."""
    changed_s: float | None = None
    """Since its container, or one of its pod, was started or resized [s]; None: long ago, or nobody knows."""


class Verdict(StrEnum):
    """How one knob compares."""

    MATCH = "match"
    ROUNDED = "rounded"
    """It is what becomes of the right value when it is written."""
    LOWER = "lower"
    HIGHER = "higher"
    UNLIMITED = "unlimited"
    """...where it should be limited."""
    LIMITED = "limited"
    """...where it should not."""
    PARENT_TIGHTER = "parent-tighter"
    """The pod has less than its containers."""
    MISSING = "missing"
    """The controller or the file is not there, or cannot be read."""
    NOT_MISSED = "not-missed"
    """The file is not there, as on older kernels, and nothing depends on it."""
    VANISHED = "vanished"
    """The cgroup is gone: its container or pod has ended."""
    QUIET = "quiet"
    """It is wrong, but too soon to tell."""
    UNKNOWN = "unknown"
    """Nobody knows what it should be, or nobody has read it."""


CONCERNS: Final = frozenset(
    {
        Verdict.LOWER,
        Verdict.HIGHER,
        Verdict.UNLIMITED,
        Verdict.LIMITED,
        Verdict.PARENT_TIGHTER,
        Verdict.MISSING,
    }
)
"""Verdicts by which a promise is not kept."""

_LESS: Final = {
    Knob.WEIGHT: "when the node is busy it gets less CPU time than it was given",
    Knob.QUOTA: "it is throttled before it has used what it was given",
    Knob.PERIOD: "it is throttled more often, each time more briefly",
    Knob.MEMORY: "its processes are killed before they have used what they were given",
    Knob.PAGES: "touching pages that it was given ends in SIGBUS",
    Knob.RESERVED: "mapping pages that it was given fails with ENOMEM",
    Knob.CPUS: "it is kept from CPUs that it was given",
    Knob.EFFECTIVE: "it cannot run on CPUs that it was given",
}
_MORE: Final = {
    Knob.WEIGHT: "when the node is busy it takes CPU time from others",
    Knob.QUOTA: "it can use CPU time that was given to others",
    Knob.PERIOD: "it is throttled less often, each time for longer",
    Knob.MEMORY: "it can use memory that was given to others",
    Knob.PAGES: "it can use pages that were given to others",
    Knob.RESERVED: "it can reserve pages that were given to others",
    Knob.CPUS: "it may run on CPUs that were given to others",
    Knob.EFFECTIVE: "it runs on CPUs that were given to others",
}
RISKS: Final[Mapping[Verdict, Mapping[Knob, str]]] = {
    Verdict.LOWER: _LESS,
    Verdict.LIMITED: _LESS,
    Verdict.HIGHER: _MORE,
    Verdict.UNLIMITED: _MORE,
    Verdict.PARENT_TIGHTER: {
        Knob.QUOTA: "the pod is throttled before its containers have used what they were given",
        Knob.MEMORY: "the pod runs out of memory before its containers have used what they were given",
        Knob.PAGES: "the pod runs out of pages before its containers have used what they were given",
        Knob.RESERVED: "the pod cannot reserve the pages that its containers were given",
    },
    Verdict.MISSING: dict.fromkeys(Knob, "nothing keeps it to what it was given, or gives it that"),
}
"""What comes of it, by verdict and knob."""


class Compared(NamedTuple):
    """The verdict on one knob."""

    group: GroupRef
    expected: Expected
    actual: Reading
    verdict: Verdict
    why: str
    """The numbers that were compared, and how the expected one came about. Stable while they are."""
    risk: str
    """What comes of it; empty if nothing does."""

    @property
    def knob(self) -> KnobId:
        """Which knob."""
        return self.expected.knob
