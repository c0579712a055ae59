"""One evaluation of the health rules, from rule results to causes (faults that count in a device's health).

Each rule result updates a condition: a fault that is raised, or that is pending (found, but not in enough
passes yet). Raised conditions become causes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from agent.health.rules import (
    NO_CHANGE,
    OK,
    CatalogRow,
    Rule,
    RuleChange,
    RuleChanges,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
    evaluate_rule,
    unreadable_row,
    with_probation,
    with_severity,
)
from agent.health.state_machine import (
    Condition,
    ConditionPhase,
    causes_worst_first,
    next_change_ns,
    next_condition,
)
from agent.model.health import Cause, Finding, NotApplicable, Severity, repair_for_severity
from agent.model.reading import SourceSample, SourceState
from agent.model.settings import EngineSettings
from agent.model.time import NS, Instant

RULE_OFF: Final = "turned off by the configuration"
"""Reason that is listed for a rule that the operator has turned off."""
READ_PERIODS: Final = 2
"""Number of periods after the last pass of a source for which a finding counts as confirmed."""
Subject = str
"""Name of the device that a condition concerns; ``group:<id>`` for a cgroup, ``node`` for the machine."""
Conditions = Mapping[tuple[Subject, str], Condition]
"""Conditions (raised or pending faults) by subject and finding code."""


class CachedOkResults(NamedTuple):
    """Results of a device's rules without a finding, reused while the input of the rules stays equal."""

    view: object
    not_applicable: tuple[NotApplicable, ...]
    not_evaluated: tuple[NotApplicable, ...]
    due_in_ns: tuple[int, ...]
    """Delays after the cached evaluation when the rules must be evaluated again [ns]."""
    sources: Set[str]
    """Names of the sources that existed when the results were cached; only rules of these sources ran."""


@dataclass(slots=True)
class SubjectConditions:
    """Conditions (raised or pending faults) of one device or cgroup, before and after an evaluation. A
    pending fault is found, but not in enough passes of its source yet."""

    previous_codes: list[str] = field(default_factory=list)
    """Finding codes of the subject's conditions before this evaluation."""
    current: dict[str, Condition] = field(default_factory=dict)
    """Conditions of the subject after this evaluation, by finding code."""
    is_changing: bool = False
    """True: equal rule results in the next evaluation would still change a condition, such as clear it."""
    has_finding: bool = False
    """True: a rule returned a finding or RuleInputUnreadable.

    It may have raised nothing because the source is stalled.
    """


@dataclass(slots=True)
class Evaluation:
    """Rule results of one evaluation, and the conditions and causes that follow from them. A rule result
    raises, continues or ends a condition: a raised or pending fault of a device."""

    settings: EngineSettings
    previous: Conditions
    """Conditions (raised or pending faults) after the last evaluation."""
    sources: Mapping[str, SourceSample]
    now: Instant
    cached_ok: Mapping[Subject, CachedOkResults] = field(default_factory=dict)
    """Rule results without findings of the last evaluation, which may be reused."""
    next_cached_ok: dict[Subject, CachedOkResults] = field(default_factory=dict)
    """Rule results without findings of this evaluation, which the next evaluation may reuse."""
    conditions: dict[tuple[Subject, str], Condition] = field(default_factory=dict)
    """Conditions (raised or pending faults) after this evaluation."""
    not_applicable: list[NotApplicable] = field(default_factory=list)
    """Rules that do not apply to a device or cgroup, with the reason, for the report."""
    not_evaluated: list[NotApplicable] = field(default_factory=list)
    """Rules that could not decide yet, with the reason, for the report."""
    due_ns: list[int] = field(default_factory=list)
    """Monotonic times at which an evaluation is needed even if no source wakes the engine [ns]."""
    main_sources: dict[str, Any] = field(default_factory=dict)
    """Values that the devices of a kind have in common, by kind; ``agent.health.host.verdicts`` owns them."""
    rule_changes: RuleChanges = field(init=False)
    """Changes of rules that the operator has configured."""
    _subjects: dict[Subject, SubjectConditions] = field(default_factory=dict)
    """Record of each device and cgroup that has conditions or findings; the others have no record."""

    def __post_init__(self) -> None:
        self.rule_changes = RuleChanges(self.settings.rules)
        for subject, code in self.previous:
            self._record(subject).previous_codes.append(code)

    def _record(self, subject: Subject) -> SubjectConditions:
        record = self._subjects.get(subject)
        if record is None:
            record = self._subjects[subject] = SubjectConditions()
        return record

    def apply_result(
        self, subject: Subject, rule: Rule, result: RuleResult, source: SourceSample | None = None
    ) -> None:
        """Record the result of one rule for a subject (a device, a cgroup or the machine).

        The result updates the condition of the rule's finding code and the condition of
        ``<code>.unreadable``, or the rule is listed as not applicable or not evaluated.

        Args:
            source: Source whose pass (one reading) the rule evaluated; None: the source in the rule's catalog
                row.
        """
        if isinstance(result, RuleNotApplicable):
            self.not_applicable.append(NotApplicable(subject, rule.code, result.reason))
            return
        if rule.counts_growth:  # a rate needs readings that are not too far apart
            window_s = rule.window_s or self.settings.throttle_window_s
            self.due_ns.append(self.now.mono_ns + window_s * NS // 2)
        if isinstance(result, RuleInconclusive):
            self.not_evaluated.append(NotApplicable(subject, rule.code, result.reason))
        if result is OK or isinstance(result, RuleInconclusive):
            record = self._subjects.get(subject)
            if record is None or not record.previous_codes:
                return
        else:
            self._record(subject).has_finding = True
        self._update_conditions(subject, rule, result, source or self.sources[rule.source])

    def run_rules(self, subject: Subject, rules: Iterable[Rule], view: object) -> None:
        """Evaluate the rules whose sources exist, with ``view`` as their input, and apply their results."""
        had_conditions = bool(self.previous_codes(subject))
        for rule in rules:
            if rule.source in self.sources and (change := self.change_of(subject, rule)) is not None:
                result = evaluate_rule(rule, view, change.limit)
                if result is OK and not had_conditions and not rule.counts_growth:
                    continue  # the most frequent case, and nothing changes
                self.apply_result(subject, rule, result)

    def change_of(self, subject: Subject, rule: Rule) -> RuleChange | None:
        """Return the operator's changes of a rule for a subject (a device, a cgroup or the machine). None:
        the operator switched the rule off. The rule is then listed as not applicable."""
        if not self.settings.rules:
            return NO_CHANGE  # the usual case, at little cost
        change = self.rule_changes.of(subject, rule.code)
        if not change.is_off:
            return change
        self.not_applicable.append(NotApplicable(subject, rule.code, RULE_OFF))
        return None

    def run_cached_rules(self, subject: Subject, rules: Iterable[Rule], view: object) -> None:
        """Evaluate the rules as :meth:`run_rules` does, but reuse the last results if they had no finding.

        The results are reused only if ``view``, the input of the rules, has not changed. A subject must have
        the same rules in every evaluation.
        """
        cached, record = self.cached_ok.get(subject), self._subjects.get(subject)
        had_conditions = record is not None and bool(record.previous_codes)
        if cached and not had_conditions and cached.view == view and cached.sources == self.sources.keys():
            self.not_applicable += cached.not_applicable
            self.not_evaluated += cached.not_evaluated
            self.due_ns += [self.now.mono_ns + in_ns for in_ns in cached.due_in_ns]
            self.next_cached_ok[subject] = cached
            return
        not_applicable, not_evaluated, due = self.list_lengths()
        self.run_rules(subject, rules, view)
        record = self._subjects.get(subject)
        if not had_conditions and (record is None or not record.has_finding):
            self.next_cached_ok[subject] = CachedOkResults(
                view,
                tuple(self.not_applicable[not_applicable:]),
                tuple(self.not_evaluated[not_evaluated:]),
                tuple(at_ns - self.now.mono_ns for at_ns in self.due_ns[due:]),
                frozenset(self.sources),
            )

    def reuse_ok_results(self, subject: Subject) -> None:
        """Apply the last results of a subject's rules again, which had no finding. The caller schedules the
        next evaluation of the subject."""
        cached = self.next_cached_ok[subject] = self.cached_ok[subject]
        self.not_applicable += cached.not_applicable
        self.not_evaluated += cached.not_evaluated

    def has_conditions(self, subject: Subject) -> bool:
        """Return whether a subject had a condition (raised or pending fault) before, or has a finding now."""
        return subject in self._subjects

    def _update_conditions(
        self, subject: Subject, rule: Rule, result: RuleResult, source: SourceSample
    ) -> None:
        if not self._subjects[subject].previous_codes and not isinstance(result, RuleInputUnreadable):
            # the usual case of a new finding: no reading was unreadable before
            assert isinstance(result, Finding), "apply_result() returned before"
            self.update_condition(subject, rule, result, source, valid_when_stalled=rule.valid_when_stalled)
            return
        unreadable = unreadable_row(rule)
        if isinstance(result, RuleInputUnreadable):
            finding = Finding(unreadable.code, Severity.UNKNOWN, f"{result.name}: {result.reading}")
            self.update_condition(subject, unreadable, finding, source)
            self.update_condition(subject, rule, None, source, seen=False)
            return
        self.update_condition(subject, unreadable, None, source)
        if isinstance(result, RuleInconclusive):
            # a probation ends by time: after a restart, the counter's history may be too short for longer
            held = self.previous.get((subject, rule.code)) if rule.counts_growth else None
            seen = held is not None and held.phase is ConditionPhase.PROBATION
            self.update_condition(subject, rule, None, source, seen=seen)
        else:
            assert not isinstance(result, RuleNotApplicable), "apply_result() returned before"
            self.update_condition(subject, rule, result, source, valid_when_stalled=rule.valid_when_stalled)

    def update_condition(
        self,
        subject: Subject,
        row: CatalogRow,
        finding: Finding | None,
        source: SourceSample,
        *,
        seen: bool = True,
        valid_when_stalled: bool = False,
        since: Instant | None = None,
        equal_passes: int = 0,
    ) -> None:
        """Update the condition (raised or pending fault) of one subject and one finding code.

        Args:
            row: Catalog row of the code.
            finding: Finding of this evaluation; None: no fault was found.
            source: Source whose pass (one reading) was evaluated.
            seen: False if the rule could not be evaluated.
            valid_when_stalled: True: the finding counts although the source is stalled (has stopped reading).
            since: Time when the fault began, if known more exactly than the evaluation's time.
            equal_passes: Number of consecutive passes, up to the newest, with this result; 0: not known.
        """
        if self.settings.rules:
            change = self.rule_changes.of(subject, row.code)
            if change.is_off:
                return
            if change.probation_ns is not None:
                row = with_probation(row, change.probation_ns)
            if finding is not None:
                finding = with_severity(finding, change.severity, row)
        seen = seen and (valid_when_stalled or source.state is not SourceState.STALLED)
        previous = self.previous.get((subject, row.code))
        read_ns = None
        if finding is not None and not valid_when_stalled:
            read_ns = source.beat_ns + READ_PERIODS * source.period_ns
        condition = next_condition(
            previous,
            finding,
            row,
            source.passes,
            self.now,
            seen=seen,
            equal_passes=equal_passes,
            read_ns=read_ns,
        )
        if condition is None:
            return
        if finding is not None and condition.finding is finding:
            condition = condition._replace(since=since or finding.since or condition.since)
        self.conditions[subject, row.code] = condition
        record = self._record(subject)
        record.current[row.code] = condition
        if not seen or finding is None or condition.phase is not ConditionPhase.RAISED:
            record.is_changing = True
        if not seen:  # time alone does not change a condition that cannot be evaluated
            return
        due = next_change_ns(condition, row, source.period_ns, self.now.mono_ns)
        if due is not None:
            self.due_ns.append(due)

    def list_lengths(self) -> tuple[int, int, int]:
        """Return the lengths of ``not_applicable``, ``not_evaluated`` and ``due_ns``. A caller compares the
        lengths before and after the evaluation of a device to find what was added for it."""
        return len(self.not_applicable), len(self.not_evaluated), len(self.due_ns)

    def stable_codes(self, subject: Subject) -> tuple[str, ...] | None:
        """Return the finding codes of a subject's conditions (raised or pending faults), if all are stable.

        None: a condition is not stable. It would change in the next evaluation even if rule results are
        equal.
        """
        record = self._subjects.get(subject)
        if record is None:
            return ()
        return None if record.is_changing else tuple(record.current)

    def repeat_finding(self, subject: Subject, code: str, passes: int) -> None:
        """Keep a raised fault, because all readings up to pass number ``passes`` gave the same finding."""
        condition = self.previous[subject, code]._replace(last_pass=passes)
        self.conditions[subject, code] = condition
        self._record(subject).current[code] = condition

    def previous_codes(self, subject: Subject) -> list[str]:
        """Return the finding codes of the faults that a subject had before this evaluation."""
        record = self._subjects.get(subject)
        return record.previous_codes if record else []

    def causes(
        self, subject: Subject, row_of: Callable[[str], CatalogRow], parent: Subject = ""
    ) -> list[Cause]:
        """Return the causes (raised faults) of a subject, worst first.

        Args:
            row_of: Function that returns the catalog row of a finding code.
            parent: Second subject, whose causes above ``info`` are added, for example the whole GPU of a MIG
                instance. If the two subjects have a cause of the same code, the more severe cause is
                returned.
        """
        own, of_parent = self._subjects.get(subject), self._subjects.get(parent)
        found = dict(own.current) if own else {}
        for code, condition in of_parent.current.items() if of_parent else ():
            own_condition = found.get(code)
            is_worse = (
                own_condition is None
                or not own_condition.is_cause
                or own_condition.finding.severity < condition.finding.severity
            )
            if condition.is_cause and is_worse and condition.finding.severity > Severity.INFO:
                found[code] = condition
        if not found:
            return []
        held = [(row_of(code), condition) for code, condition in causes_worst_first(found.items())]
        held.sort(key=lambda item: (-item[1].finding.severity, not item[0].listed_first))
        return [_cause(row, condition) for row, condition in held]


def row_with_code(rules: Sequence[Rule], code: str) -> CatalogRow:
    """Return the catalog row of a finding code: a rule's own row, or the row of ``<code>.unreadable``."""
    for rule in rules:
        if rule.code == code:
            return rule
    return next(row for row in map(unreadable_row, rules) if row.code == code)


def _cause(row: CatalogRow, condition: Condition) -> Cause:
    finding = condition.finding
    return Cause(
        row.code,
        finding.severity,
        finding.blame or row.blame,
        finding.evidence,
        finding.advice or row.advice,
        condition.since,
        repair=repair_for_severity(finding.repair or row.repair, finding.severity),
    )
