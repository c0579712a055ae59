"""Types of health rules: the catalog row that describes a rule, and the possible results of a rule.

A rule is a function of its input, the parameter ``view``, for one device, one cgroup or the machine. The
input has current samples, values at the agent's start, and the growth of counters. Rules read no clock and no
file. The input states which readings are missing. A rule also lists the readings whose change makes the
native sampler wake the evaluation engine.

The module also has functions that build results for many rules, and applies the operator's changes of rules:
which rules are off, and their severity, probation (how long an ended fault is still reported) and limit, by
code and device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from agent.model.gpu import GpuWakeCondition, SamplerField, WakeCondition
from agent.model.health import Blame, Cause, Finding, Repair, Severity, XidOverride
from agent.model.reading import Missing, Reading, is_absent
from agent.model.settings import RuleOverride
from agent.model.time import NS, Instant

XID_PREFIX: Final = "gpu.xid."
"""First part of the code of a fault that an XID reports; its number follows."""
SXID_PREFIX: Final = "gpu.fabric.sxid."
"""First part of the code of a fault that an SXid reports; its number follows."""


@lru_cache(64)
def format_duration(seconds: float) -> str:
    """Format a duration in the largest unit that keeps it a whole number: ``90 s``, ``2 min``, ``1 h``."""
    for factor, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:g} {unit}"
    return f"{seconds:g} s"


def format_at_least(count: int) -> str:
    """Format a growing count as text that rarely changes: ``7``, or from ten on ``at least 100``. Numbers
    from ten on are rounded down to a power of ten."""
    return str(count) if count < 10 else f"at least {10 ** (len(str(count)) - 1)}"


class RuleNotApplicable(NamedTuple):
    """Rule result: the rule has nothing to evaluate. The machine or device does not have the hardware or file
    that the rule reads."""

    reason: str


class RuleInconclusive(NamedTuple):
    """Rule result: the rule cannot decide yet, for example because its counter was read too recently."""

    reason: str


class RuleInputUnreadable(NamedTuple):
    """Rule result: a file or counter that could be read before can no longer be read."""

    name: str
    """Name of the file or counter that can no longer be read."""
    reading: Missing


OK: Final = None
RuleResult = Finding | RuleNotApplicable | RuleInconclusive | RuleInputUnreadable | None
"""Result of a rule. Finding: the rule found a fault; None (``OK``): it was evaluated and found no fault."""


class CounterGrowth(NamedTuple):
    """Growth of a counter within a sliding window that ends with the newest reading."""

    events: Reading
    """Growth of the counter within the last ``span_s`` seconds; Missing if the counter cannot be read."""
    span_s: float
    """Time for which the growth is known [s]; less than the window while the counter's history is short."""


def missing_reading_result(name: str, reading: Missing, reason: str) -> RuleResult:
    """Return the rule result for a missing reading. The result is RuleNotApplicable with ``reason`` if the
    machine does not have the file or counter ``name``. It is RuleInputUnreadable if reading the file or
    counter failed."""
    return RuleNotApplicable(reason) if is_absent(reading) else RuleInputUnreadable(name, reading)


def counter_limit_result(
    growth: CounterGrowth, limit: int, window_s: int, found: Finding, *, counter: str, reason: str
) -> RuleResult:
    """Return the result of a rule that compares the growth of one counter with a limit.

    Args:
        growth: Growth of the counter within the window of ``window_s`` seconds.
        limit: Smallest growth for which the result is ``found``.
        counter: Name of the file or counter, for the result if it cannot be read.
        reason: Reason for the result if the machine does not have the counter.
    """
    if isinstance(growth.events, Missing):
        return missing_reading_result(counter, growth.events, reason)
    if growth.events >= limit:
        return found
    return (
        RuleInconclusive(f"needs {format_duration(window_s)} of history") if growth.span_s < window_s else OK
    )


CLEAN_PASSES: Final = 3
"""Number of consecutive source passes without a finding that clear a cause, if they span CLEAN_MIN_NS."""
CLEAN_MIN_NS: Final = NS
"""Shortest time without a finding that clears a cause [ns]; prevents flapping of sources with fast passes."""
CLEAN_NS: Final = 10 * NS
"""Time without a finding after which two passes clear a cause [ns]. One pass without a finding never does."""

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
    """Catalog row of a rule: finding code, severity, explanation and advice. The row also states in how many
    passes (readings of the source) or after how much time a fault is raised and cleared."""

    code: str
    severity: Severity
    blame: Blame
    source: str
    """Name of the source whose passes are counted; ``gpu`` stands for the source of the evaluated GPU."""
    threshold: str
    """Limit of the rule with its unit, as text for operators."""
    why: str
    """Consequence of the fault: why it matters to operators."""
    advice: str
    """Action with which the operator ends the fault."""
    repair: Repair
    """Repair that the advice describes."""
    try_it: str = ""
    """Instructions to provoke the fault, for operators."""
    raise_after: int = 1
    """Number of consecutive passes with a finding that raise the cause; 1: the first pass raises it."""
    raise_ns: int = 0
    """Shortest time with a finding that raises the cause [ns]."""
    clear_after: int = CLEAN_PASSES
    """Number of consecutive passes without a finding that clear the cause."""
    clear_ns: int = CLEAN_NS
    """Time without a finding [ns] after which two passes clear the cause, even if ``clear_after`` is larger.
    """
    probation_ns: int = 0
    """Time for which a cleared cause is still reported [ns]."""
    listed_first: bool = False
    """True: the cause is listed before other causes of the same severity."""

    def __hash__(self) -> int:
        return hash(self.code)  # rows are keys of caches, and a hash of all fields is slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(CatalogRow):
    """Health rule: a catalog row, the function that evaluates the rule, and the readings that it uses."""

    sampler_reads: tuple[SamplerField | WakeCondition, ...] = ()
    """Fields of the native sampler that the rule uses. A field wakes the engine when its value changes or, if
    ``counts_growth`` is True, when it grows by the configured number of throttle events. A WakeCondition sets
    another condition."""
    gpu_reads: tuple[GpuWakeCondition, ...] = ()
    """GPU readings that the rule uses, with the changes that wake the engine."""
    evaluate: Callable[[Any], RuleResult]
    """Function that returns the rule's result for its input."""
    counts_growth: bool = False
    """True: the rule evaluates the growth of a counter within a window of time."""
    window_s: int = 0
    """Length of the window of ``counts_growth`` [s]; 0: the configured window of throttle events."""
    limit_in_view: str = ""
    """Field of the rule's input that has the limit, such as ``throttle_events`` or ``limits.nic_errors``;
    empty: an operator cannot set a limit of the rule.
    """
    valid_when_stalled: bool = False
    """True: findings count although the source is stalled, for example that a GPU does not answer."""

    __hash__ = CatalogRow.__hash__


@cache
def unreadable_row(rule: Rule) -> CatalogRow:
    """Return the catalog row for the finding code ``<code>.unreadable``. It is reported if readings that the
    rule could use before can no longer be read."""
    return CatalogRow(
        code=f"{rule.code}.unreadable",
        severity=Severity.UNKNOWN,
        blame=Blame.AGENT,
        source=rule.source,
        threshold="it could be read before",
        why=rule.why,
        advice=GPU_UNREADABLE_ADVICE if rule.gpu_reads else UNREADABLE_ADVICE,
        repair=Repair.NONE,
    )


def cause_from_row(row: CatalogRow, evidence: str, since: Instant) -> Cause:
    """Return a cause (reported fault) with a catalog row's code, severity, advice and repair. The cause is
    not delayed until several readings have confirmed it."""
    return Cause(row.code, row.severity, row.blame, evidence, row.advice, since, repair=row.repair)


# --- changes of rules by the operator ----------------------------------------------------------------------

FAMILY: Final = ".*"
"""Suffix of a pattern of finding codes such as ``gpu.ecc.*``, which matches all codes with the prefix before
it.
"""
CHECKS: Final = "check:"
"""Prefix of the subject of causes that a driver's own checks of a device raise."""


class RuleChange(NamedTuple):
    """Changes that the operator's ``[[rules]]`` make to one rule for one device; None: no change to the
    catalog row."""

    is_off: bool = False
    severity: Severity | None = None
    probation_ns: int | None = None
    limit: int | None = None


NO_CHANGE: Final = RuleChange()


def matches_code(pattern: str, code: str) -> bool:
    """Return whether a finding code is ``pattern``, or belongs to a family of codes such as ``gpu.ecc.*``."""
    return pattern == code or (pattern.endswith(FAMILY) and code.startswith(pattern[:-1]))


class RuleChanges:
    """Lookup of the changes that operators make to rules (``[[rules]]``), with a cache by code, for one
    evaluation."""

    def __init__(self, overrides: Sequence[RuleOverride]) -> None:
        self._overrides = overrides
        self._by_code: dict[str, tuple[RuleOverride, ...]] = {}

    def of(self, subject: str, code: str) -> RuleChange:
        """Return the operator's changes of the rule with a finding code, for one device or other subject.

        Several entries of ``[[rules]]`` can match. For each property (off, severity, probation, limit), the
        last entry that sets the property counts.
        """
        if not self._overrides:
            return NO_CHANGE
        if subject.startswith(CHECKS):
            code = code.partition("/")[2] or code  # without the name of the check
        entries = self._by_code.get(code)
        if entries is None:
            entries = tuple(entry for entry in self._overrides if matches_code(entry.code, code))
            self._by_code[code] = entries
        change, name = NO_CHANGE, subject.removeprefix(CHECKS)
        for entry in entries:
            if entry.device and not fnmatchcase(name, entry.device):
                continue
            change = RuleChange(
                change.is_off if entry.off is None else entry.off,
                change.severity if entry.severity is None else entry.severity,
                change.probation_ns if entry.probation_s is None else entry.probation_s * NS,
                change.limit if entry.limit is None else entry.limit,
            )
        return change


def evaluate_rule(rule: Rule, view: Any, limit: int | None) -> RuleResult:
    """Return the result of a health rule for its input ``view``.

    Args:
        limit: Limit that the operator sets, which replaces the limit in the input; None: not replaced.
    """
    if limit is None or not rule.limit_in_view:
        return rule.evaluate(view)
    *of_limits, name = rule.limit_in_view.split(".")
    if of_limits:
        return rule.evaluate(view._replace(limits=replace(view.limits, **{name: limit})))
    return rule.evaluate(view._replace(**{name: limit}))


@lru_cache(1024)
def with_probation(row: CatalogRow, probation_ns: int) -> CatalogRow:
    """Return a row of the rule catalog with another probation time.

    Args:
        probation_ns: Time for which an ended fault is still reported [ns].
    """
    return replace(row, probation_ns=probation_ns)


def with_severity(finding: Finding, severity: Severity | None, row: CatalogRow) -> Finding:
    """Return a finding with the severity that the operator set for its rule; None: the severity is not
    changed. A finding about unreadable data keeps the severity UNKNOWN. A finding that only informs about
    another device (the fault of a MIG instance, listed for its GPU) keeps the severity INFO."""
    only_informs = finding.severity is Severity.INFO and row.severity is not Severity.INFO
    if severity is None or finding.severity is Severity.UNKNOWN or only_informs:
        return finding
    return finding._replace(severity=severity)


_XID_SEVERITIES: Final = {
    Severity.INFO: XidOverride.INFO,
    Severity.DEGRADED: XidOverride.DEGRADED,
    Severity.UNHEALTHY: XidOverride.UNHEALTHY,
}


def xid_overrides(overrides: Iterable[RuleOverride]) -> dict[int, XidOverride]:
    """Return the severities that entries of ``[[rules]]`` set for single XIDs on all devices, by XID. As with
    ``[gpu.xids]``, such a severity replaces the severity that follows from the GPU's readings."""
    found: dict[int, XidOverride] = {}
    for entry in overrides:
        number = entry.code.removeprefix(XID_PREFIX)
        if entry.device or number == entry.code or not number.isdecimal():
            continue
        if entry.off:
            found[int(number)] = XidOverride.IGNORE
        elif entry.severity is not None:
            found[int(number)] = _XID_SEVERITIES[entry.severity]
    return found


def lowest_limit(overrides: Iterable[RuleOverride], code: str, limit: int) -> int:
    """Return the growth of a rule's counter at which the C core must wake the engine.

    The result is the lowest of ``limit`` and the limits that operators set.

    Args:
        overrides: Entries of ``[[rules]]``.
        code: Finding code of the rule.
        limit: Limit without these entries.
    """
    set_limits = (
        entry.limit for entry in overrides if entry.limit is not None and matches_code(entry.code, code)
    )
    return min([limit, *set_limits])
