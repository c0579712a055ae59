"""One look in the making: what the rules answer moves the tracks, and the held tracks become causes."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.health import state_machine as machine
from agent.health.catalog import Row, Rule, unreadable_of
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, Unreadable
from agent.health.state_machine import Condition, Phase, advance, worst_first
from agent.model.health import Cause, Finding, NotApplicable, Severity
from agent.model.settings import Settings
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

Subject = str
"""A device's name, or ``group:<id>``."""
Conditions = Mapping[tuple[Subject, str], Condition]
"""By subject and code."""


class CachedOk(NamedTuple):
    """A subject of which no rule found anything, and what judging it left behind."""

    view: object
    not_applicable: tuple[NotApplicable, ...]
    not_evaluated: tuple[NotApplicable, ...]
    due_in_ns: tuple[int, ...]
    """When to look again, from each look on."""
    sources: Set[str]
    """Those that there were: a rule whose source nobody reads is not judged."""


@dataclass(slots=True)
class Evaluation:
    """Filled while the devices are judged, then read."""

    settings: Settings
    before: Conditions
    sources: Mapping[str, SourceSample]
    now: Instant
    known: Mapping[Subject, CachedOk] = field(default_factory=dict)
    """What was quiet in the last look..."""
    quiet: dict[Subject, CachedOk] = field(default_factory=dict)
    """...and in this one."""
    tracks: dict[tuple[Subject, str], Condition] = field(default_factory=dict)
    not_applicable: list[NotApplicable] = field(default_factory=list)
    not_evaluated: list[NotApplicable] = field(default_factory=list)
    due_ns: list[int] = field(default_factory=list)
    _codes: dict[Subject, list[str]] = field(default_factory=dict)
    """Those that were tracked before this look..."""
    _tracks: dict[Subject, dict[str, Condition]] = field(default_factory=dict)
    """...and what became of them and of others: most subjects have none, and cost nothing."""
    _moving: set[Subject] = field(default_factory=set)
    """Those with a track that another look would move, though it were the same look."""
    _accused: set[Subject] = field(default_factory=set)
    """Those of which a rule found something, though its source stood still and nothing came of it."""

    def __post_init__(self) -> None:
        for subject, code in self.before:
            self._codes.setdefault(subject, []).append(code)

    def judge(
        self, subject: Subject, rule: Rule, answer: RuleResult, source: SourceSample | None = None
    ) -> None:
        """Move the tracks of one rule and of its unreadability by one answer.

        Args:
            source: Whose pass was looked at; None: that of the rule's own source.
        """
        if isinstance(answer, RuleNotApplicable):
            self.not_applicable.append(NotApplicable(subject, rule.code, answer.reason))
            return
        if rule.counter:  # a rate is judged by looks that are not too far apart
            window_s = rule.window_s or self.settings.throttle_window_s
            self.due_ns.append(self.now.mono_ns + window_s * NS // 2)
        if isinstance(answer, RuleNotEvaluated):
            self.not_evaluated.append(NotApplicable(subject, rule.code, answer.reason))
        quiet = answer is OK or isinstance(answer, RuleNotEvaluated)
        if not quiet:
            self._accused.add(subject)
        if not quiet or subject in self._codes:
            self._judged(subject, rule, answer, source or self.sources[rule.source])

    def judge_all(self, subject: Subject, rules: Iterable[Rule], view: object) -> None:
        """Move the tracks of each rule by what it says to a view, but of those whose source nobody reads."""
        for rule in rules:
            if rule.source in self.sources:
                self.judge(subject, rule, rule.judge(view))

    def judge_view(self, subject: Subject, rules: Iterable[Rule], view: object) -> None:
        """The same of a subject that always has these rules, and is remembered while it is quiet.

        Rules are functions of their view: what they found nothing in they find nothing in again.
        """
        known, was_tracked = self.known.get(subject), subject in self._codes
        if known and not was_tracked and known.view == view and known.sources == self.sources.keys():
            self.not_applicable += known.not_applicable
            self.not_evaluated += known.not_evaluated
            self.due_ns += [self.now.mono_ns + in_ns for in_ns in known.due_in_ns]
            self.quiet[subject] = known
            return
        not_applicable, not_evaluated, due_ns = self.extent()
        self.judge_all(subject, rules, view)
        if not was_tracked and subject not in self._accused:
            self.quiet[subject] = CachedOk(
                view,
                tuple(self.not_applicable[not_applicable:]),
                tuple(self.not_evaluated[not_evaluated:]),
                tuple(at_ns - self.now.mono_ns for at_ns in self.due_ns[due_ns:]),
                frozenset(self.sources),
            )

    def _judged(self, subject: Subject, rule: Rule, answer: RuleResult, source: SourceSample) -> None:
        unreadable = unreadable_of(rule)
        if isinstance(answer, Unreadable):
            finding = Finding(unreadable.code, Severity.UNKNOWN, f"{answer.what}: {answer.why}")
            self.track(subject, unreadable, finding, source)
            self.track(subject, rule, None, source, seen=False)
            return
        self.track(subject, unreadable, None, source)
        if isinstance(answer, RuleNotEvaluated):
            self.track(subject, rule, None, source, seen=False)
        else:
            assert not isinstance(answer, RuleNotApplicable), "it has nothing to be tracked"
            self.track(subject, rule, answer, source, blind=rule.blind)

    def track(
        self,
        subject: Subject,
        row: Row,
        finding: Finding | None,
        source: SourceSample,
        *,
        seen: bool = True,
        blind: bool = False,
        since: Instant | None = None,
    ) -> None:
        """Move one track by one finding; None if the look was good.

        Args:
            seen: False if nobody could look.
            blind: It is known though the source stands still.
            since: When it began, if that is known better than by when it was looked at.
        """
        seen = seen and (blind or source.state is not SourceState.STALLED)
        before = self.before.get((subject, row.code))
        track = advance(before, finding, row, source.passes, self.now, seen=seen)
        if track is None:
            return
        if since is not None and finding is not None:
            track = track._replace(since=since)
        self.tracks[subject, row.code] = track
        self._tracks.setdefault(subject, {})[row.code] = track
        if not seen or finding is None or track.phase is not Phase.RAISED:
            self._moving.add(subject)
        if not seen:  # time alone moves nothing that nobody can see
            return
        due = machine.due_ns(track, row, source.period_ns, self.now.mono_ns)
        if due is not None:
            self.due_ns.append(due)

    def extent(self) -> tuple[int, int, int]:
        """How much was said so far: rules not applicable, rules not evaluated, times to look again."""
        return len(self.not_applicable), len(self.not_evaluated), len(self.due_ns)

    def raised(self, subject: Subject) -> tuple[str, ...] | None:
        """The codes of what is wrong with a subject, and stays so while the same is found; None: it moves."""
        return None if subject in self._moving else tuple(self._tracks.get(subject, ()))

    def again(self, subject: Subject, code: str, passes: int) -> None:
        """The same was found once more of what was raised, in a pass of its source."""
        track = self.before[subject, code]._replace(seen_pass=passes)
        self.tracks[subject, code] = track
        self._tracks.setdefault(subject, {})[code] = track

    def codes_of(self, subject: Subject) -> list[str]:
        """The codes that were tracked before this look."""
        return self._codes.get(subject, [])

    def causes(self, subject: Subject, row_of: Callable[[str], Row], parent: Subject = "") -> list[Cause]:
        """The held causes of a subject, worst first.

        Args:
            row_of: The row of a code.
            parent: What is wrong with this one is wrong with the subject, too, if it is more than a word;
                of the same code the worse counts.
        """
        found = dict(self._tracks.get(subject, {}))
        for code, track in self._tracks.get(parent, {}).items():
            own = found.get(code)
            worse = own is None or not own.held or own.finding.severity < track.finding.severity
            if track.held and worse and track.finding.severity > Severity.INFO:
                found[code] = track
        if not found:
            return []
        held = [(row_of(code), track) for code, track in worst_first(found.items())]
        held.sort(key=lambda item: (-item[1].finding.severity, not item[0].leads))
        return [_cause(row, track) for row, track in held]


def row_among(rules: Iterable[Rule], code: str) -> Row:
    """The row of a code that one of the rules raised."""
    return next(row for rule in rules for row in (rule, unreadable_of(rule)) if row.code == code)


def _cause(row: Row, track: Condition) -> Cause:
    finding = track.finding
    return Cause(
        row.code,
        finding.severity,
        finding.blame or row.blame,
        finding.evidence,
        finding.advice or row.advice,
        track.since,
    )
