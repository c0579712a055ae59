"""Rules: their rows in the catalogue, their results, and results that many rules share.

A rule is a function of a view. A view is the input of the rules for one device, cgroup or node: current
samples, values at the agent's start, and the growth of counters. Rules read no clock and no file; a missing
reading is also a value of the view. What a rule reads also decides for which changes the native sampler wakes
the engine.

The catalog rows are defined next to their rule functions, in agent.health.host, agent.health.gpu and
agent.health.declared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from agent.model.health import Blame, Cause, Finding, Severity
from agent.model.reading import Missing, Reading, is_absent
from agent.model.time import NS, Instant
from agent.model.wake import GpuWake, SamplerField, Wake


def duration(seconds: float) -> str:
    """Format a duration in the largest unit that keeps it a whole number: ``90 s``, ``2 min``, ``1 h``."""
    for factor, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:g} {unit}"
    return f"{seconds:g} s"


def at_least(count: int) -> str:
    """Format a growing count so that the text rarely changes: exact below ten, then rounded down to a power
    of ten.
    """
    return str(count) if count < 10 else f"at least {10 ** (len(str(count)) - 1)}"


class RuleNotApplicable(NamedTuple):
    """Result of a rule that has nothing to evaluate on this machine."""

    reason: str


class RuleNotEvaluated(NamedTuple):
    """Result of a rule that cannot be evaluated yet, for example because a window is still short."""

    reason: str


class Unreadable(NamedTuple):
    """Result of a rule whose reading was available before and can no longer be read."""

    name: str
    reading: Missing


OK: Final = None
RuleResult = Finding | RuleNotApplicable | RuleNotEvaluated | Unreadable | None
"""Result of a rule. None (``OK``): the rule was evaluated and found no fault."""


class Growth(NamedTuple):
    """Number of events that a counter has counted within a sliding window."""

    events: Reading
    """Number of events within the window, or within ``span_s`` if that is shorter."""
    span_s: float
    """Part of the window in which the counter was read [s]."""


def missing_result(name: str, reading: Missing, reason: str) -> RuleResult:
    """Return the rule result for a missing reading: not applicable for ``reason`` if the reading never
    existed, else unreadable.
    """
    return RuleNotApplicable(reason) if is_absent(reading) else Unreadable(name, reading)


def counter_result(
    grown: Growth, limit: int, window_s: int, found: Finding, *, counter: str, reason: str
) -> RuleResult:
    """Return the result of a rule that compares one counter with a limit.

    Args:
        limit: Smallest number of events within the window for which the result is ``found``.
        counter: Name of the file or counter that is read.
        reason: Reason for which a machine may not have the counter.
    """
    if isinstance(grown.events, Missing):
        return missing_result(counter, grown.events, reason)
    if grown.events >= limit:
        return found
    return RuleNotEvaluated(f"needs {duration(window_s)} of history") if grown.span_s < window_s else OK


CLEAN_PASSES: Final = 3
"""Number of passes of the source without a finding after which a cause clears, if they span CLEAN_MIN_NS."""
CLEAN_MIN_NS: Final = NS
"""Shortest time without a finding after which a cause clears; prevents flapping with fast passes."""
CLEAN_NS: Final = 10 * NS
"""Time without a finding after which a cause clears with fewer passes. One pass without a finding never
suffices."""

STALLED: Final = "source.stalled"
STALLED_ADVICE: Final = (
    "a read hangs in the kernel: see /proc/<pid>/task/*/stack of the agent, then restart it"
)
UNREADABLE_ADVICE: Final = (
    "read the file by hand: an error there too is the kernel's; otherwise restart the agent"
)
GPU_UNREADABLE_ADVICE: Final = (
    "run nvidia-smi -q: an error there too is the NVIDIA driver's; otherwise restart the agent"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRow:
    """Catalog row of a rule: one possible cause of a verdict, its meaning, and how long it takes to raise and
    to clear."""

    code: str
    severity: Severity
    blame: Blame
    source: str
    """Source whose passes count as evaluations; ``gpu`` stands for the source of the evaluated GPU."""
    threshold: str
    """Limit with its unit, as text for operators."""
    why: str
    advice: str
    try_it: str = ""
    """Instructions to provoke the cause."""
    raise_after: int = 1
    """Number of consecutive passes with a finding before the cause is raised; 1 for explicit facts."""
    raise_ns: int = 0
    """Shortest time for which passes must have a finding before the cause is raised [ns]."""
    clear_after: int = CLEAN_PASSES
    clear_ns: int = CLEAN_NS
    """Time without a finding after which the cause clears even with fewer passes than ``clear_after``
    [ns]."""
    probation_ns: int = 0
    """Time for which a cleared cause is still reported [ns]."""
    listed_first: bool = False
    """Whether the cause is listed before other causes of the same severity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(CatalogRow):
    """Catalog row with the function that evaluates it from readings."""

    reads: tuple[SamplerField | Wake, ...] = ()
    """Fields of the native sampler that the rule reads. A field wakes the engine when it changes or, for a
    ``counter``, when it grew by the configured number of throttle events; a Wake defines its own condition.
    """
    gpu_reads: tuple[GpuWake, ...] = ()
    """Readings of a GPU that the rule reads, and their changes that wake the engine."""
    evaluate: Callable[[Any], RuleResult]
    """Function that returns the rule's result for a view, the rule's input."""
    counter: bool = False
    """Whether the rule evaluates the growth of counters over a window."""
    window_s: int = 0
    """Window of a counter [s]; 0: the configured window of throttle events."""
    valid_when_stalled: bool = False
    """Whether findings count although the source is stalled, for example the finding that a GPU does not
    answer."""


@cache
def unreadable_row(rule: Rule) -> CatalogRow:
    """Return the catalog row of the cause that this rule's readings can no longer be read."""
    return CatalogRow(
        code=f"{rule.code}.unreadable",
        severity=Severity.UNKNOWN,
        blame=Blame.AGENT,
        source=rule.source,
        threshold="it could be read before",
        why=rule.why,
        advice=GPU_UNREADABLE_ADVICE if rule.gpu_reads else UNREADABLE_ADVICE,
    )


def cause_from_row(row: CatalogRow, evidence: str, since: Instant) -> Cause:
    """Return a cause that is raised and cleared without counts or dwell times."""
    return Cause(row.code, row.severity, row.blame, evidence, row.advice, since)
