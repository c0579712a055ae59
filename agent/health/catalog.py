"""What a row of the catalogue holds: what a rule reads, its limits, who is to blame and what to do.

The rows themselves stand beside their rules, in agent.health.host and agent.health.gpu. What a row reads also
tells the native core what to wake for: a reading that no rule looks at wakes nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from agent.health.rules import RuleResult
from agent.model.health import Blame, Cause, Severity
from agent.model.time import NS, Instant
from agent.model.wake import Field, GpuWake, Wake

CLEAN_PASSES: Final = 3
"""Clearing takes this many clean passes of the source, and..."""
CLEAN_MIN_NS: Final = NS
"""...this long without a bad one: with fast passes, what comes and goes would be told each time it does..."""
CLEAN_NS: Final = 10 * NS
"""...or only this long, if passes are rarer. One clean pass is never enough."""

STALLED: Final = "source.stalled"
STALLED_ADVICE: Final = (
    "a read hangs in the kernel: look at /proc/<pid>/task/*/stack of the agent, then restart it"
)
UNREADABLE_ADVICE: Final = "read the file by hand; an error there too is the kernel's, else restart the agent"
GPU_UNREADABLE_ADVICE: Final = (
    "ask nvidia-smi -q for it; an error there too is the driver's, else restart the agent"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One possible cause: what it means, and how long it takes to raise and to clear."""

    code: str
    severity: Severity
    blame: Blame
    source: str
    """Source whose pass is a look at it; ``gpu`` stands for that of the GPU at hand."""
    threshold: str
    """The limit with its unit, for people."""
    why: str
    advice: str
    try_it: str = ""
    """How to see it happen."""
    raise_after: int = 1
    """Bad passes in a row before the cause is raised; 1 for explicit facts."""
    raise_ns: int = 0
    """And bad for so long without a good pass [ns]."""
    clear_after: int = CLEAN_PASSES
    clear_ns: int = CLEAN_NS
    """Or good for so long, where passes are rare [ns]."""
    probation_ns: int = 0
    """How long a cause that has cleared is still held [ns]."""
    leads: bool = False
    """It is told before others that are as severe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Row):
    """A row that a function judges from readings."""

    reads: tuple[Field | Wake, ...] = ()
    """Of the sampler. A field wakes the core when it changes, or, of a ``counter``, when it grew by the
    configured number of throttle events; a Wake says itself when."""
    gpu_reads: tuple[GpuWake, ...] = ()
    """Of a GPU, and what of them the core must be woken for."""
    judge: Callable[[Any], RuleResult]
    """Takes the view of the rule's table below."""
    counter: bool = False
    """It reads counters and judges their growth over a window."""
    window_s: int = 0
    """The window of a counter [s]; 0: the configured one of throttle events."""
    blind: bool = False
    """It judges that a GPU does not answer, or what is known without the GPU's answer."""


@cache
def unreadable_of(rule: Rule) -> Row:
    """The row for "what this rule reads can no longer be read"."""
    return Row(
        code=f"{rule.code}.unreadable",
        severity=Severity.UNKNOWN,
        blame=Blame.AGENT,
        source=rule.source,
        threshold="it was readable before",
        why=rule.why,
        advice=GPU_UNREADABLE_ADVICE if rule.gpu_reads else UNREADABLE_ADVICE,
    )


def cause_of(row: Row, evidence: str, since: Instant) -> Cause:
    """What is told in the words of a row without a track: it is so, or it is not."""
    return Cause(row.code, row.severity, row.blame, evidence, row.advice, since)
