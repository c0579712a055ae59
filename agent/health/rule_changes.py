"""Operator's changes of rules: which rules are off, and their severity, probation and limit, by code and
device."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final, NamedTuple

from agent.health.gpu.faults.fault_log import XID_PREFIX
from agent.health.rules import CatalogRow, Rule, RuleResult
from agent.model.health import Finding, Severity, XidOverride
from agent.model.settings import RuleOverride
from agent.model.time import NS

FAMILY: Final = ".*"
"""Suffix of a pattern of finding codes such as ``gpu.ecc.*``, which matches all codes with the prefix before
it.
"""
CHECKS: Final = "check:"
"""Prefix of the subject of causes that a driver's own checks of a device raise."""


class RuleChange(NamedTuple):
    """Changes that the operator's ``[[rules]]`` make to one rule for one device; None: as in the catalog."""

    is_off: bool = False
    severity: Severity | None = None
    probation_ns: int | None = None
    limit: int | None = None


NO_CHANGE: Final = RuleChange()


def matches_code(pattern: str, code: str) -> bool:
    """Return whether a finding code is ``pattern``, or belongs to the family ``pattern``, such as
    ``gpu.ecc.*``.
    """
    return pattern == code or (pattern.endswith(FAMILY) and code.startswith(pattern[:-1]))


class RuleChanges:
    """Lookup of the operator's changes of rules (``[[rules]]``), with a cache by code, for one evaluation."""

    def __init__(self, overrides: Sequence[RuleOverride]) -> None:
        self._overrides = overrides
        self._by_code: dict[str, tuple[RuleOverride, ...]] = {}

    def of(self, subject: str, code: str) -> RuleChange:
        """Return the operator's changes of the rule with a finding code, for one device or other subject.

        If several entries of ``[[rules]]`` match, the last one that sets a property (off, severity,
        probation, limit) decides that property.
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
        limit: Limit of the operator, which replaces the limit in the input; None: not replaced.
    """
    if limit is None or not rule.limit_in_view:
        return rule.evaluate(view)
    *of_limits, name = rule.limit_in_view.split(".")
    if of_limits:
        return rule.evaluate(view._replace(limits=replace(view.limits, **{name: limit})))
    return rule.evaluate(view._replace(**{name: limit}))


@lru_cache(1024)
def with_probation(row: CatalogRow, probation_ns: int) -> CatalogRow:
    """Return a catalog row with another probation, for which an ended fault is reported [ns]."""
    return replace(row, probation_ns=probation_ns)


def with_severity(finding: Finding, severity: Severity | None, row: CatalogRow) -> Finding:
    """Return a finding with the severity that the operator set for its rule; None: unchanged.

    A finding about unreadable data stays UNKNOWN. A finding that only informs about another device (the fault
    of a MIG instance, listed for its GPU) stays INFO.
    """
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
    """Return the severities that entries of ``[[rules]]`` set for single XIDs on all devices, by XID.

    Such a severity replaces the decision from the GPU's readings, as does ``[gpu.xids]``.
    """
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
    """Return the growth of a rule's counter at which the native core must wake the engine.

    Args:
        overrides: Entries of ``[[rules]]``.
        code: Finding code of the rule.
        limit: Limit without these entries; the result is the lowest limit of both.
    """
    set_limits = (
        entry.limit for entry in overrides if entry.limit is not None and matches_code(entry.code, code)
    )
    return min([limit, *set_limits])
