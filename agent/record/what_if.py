"""Comparison of recorded device health with that under another configuration, and with real incidents.

A record is replayed with the other settings. The recorded and the replayed verdicts each give the intervals
in which a rule reported a cause for a device, and in which a device was Unhealthy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import zip_longest
from math import comb, sqrt
from typing import Final, NamedTuple, TypeVar

from agent.engine.step import StepOutcome
from agent.errors import DrahealthError
from agent.health.host.pod import host_device_of
from agent.model.health import Health, Severity
from agent.model.time import CLOCK_STEP_S, NS
from agent.record.events import Verdicts
from agent.record.replay import CgroupsMatter, ChangeSettings, Replay, ReplayedVerdicts
from agent.record.segment_file import RecordPath, SegmentReader

GAP_S: Final = 180.0
"""Longest time between two recorded evaluations that counts as observed: three longest heartbeats [s]."""
MOVED_S: Final = 1.0
"""Smallest difference of a time in an interval that is reported as a change [s]."""
Z_95: Final = 1.959963984540054
"""Quantile of the normal distribution for confidence intervals of 95 %."""

K = TypeVar("K")

CauseKey = tuple[str, str]
"""Name of a device, and the code of a cause."""


class FaultInterval(NamedTuple):
    """Time in which a rule reported a cause for a device, or a device was Unhealthy [s since 1970]."""

    begin_s: float
    end_s: float
    severity: int = int(Severity.UNHEALTHY)
    """Severity of the cause at its start."""
    later: tuple[tuple[float, int], ...] = ()
    """Time and new severity of each later change of the severity, the oldest first."""

    def overlaps(self, other: "FaultInterval") -> bool:
        """Return whether this interval and another one have a moment in common."""
        return self.begin_s <= other.end_s and other.begin_s <= self.end_s


@dataclass
class HealthIntervals:
    """Health of devices over the time of a record, by one of the two configurations that are compared."""

    causes: dict[CauseKey, list[FaultInterval]] = field(default_factory=dict)
    """Intervals in which each cause was raised, by device and code, the oldest first."""
    unhealthy: dict[str, list[FaultInterval]] = field(default_factory=dict)
    """Intervals in which a device was Unhealthy, by device."""
    pods: set[str] = field(default_factory=set)
    """Names of pods that used a device while it was Unhealthy."""
    _open_causes: dict[CauseKey, list[tuple[float, int]]] = field(default_factory=dict)
    _open_unhealthy: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    _last: Verdicts = ()

    def observe(self, at_s: float, verdicts: Verdicts, replayed: ReplayedVerdicts) -> None:
        """Add the verdicts that devices have from the time ``at_s`` on, until the next call.

        The pods are those of `replayed`, which the recorded and the other verdicts share.
        """
        if verdicts != self._last:
            causes = {(new.subject, code): severity for new in verdicts for code, severity in new.causes}
            bad = {new.subject: int(Severity.UNHEALTHY) for new in verdicts if new.health == Health.UNHEALTHY}
            _update(self._open_causes, causes, self.causes, at_s)
            _update(self._open_unhealthy, bad, self.unhealthy, at_s)
            self._last = verdicts
        if self._open_unhealthy and (pods := replayed.pods) is not None:
            for uid, devices in pods.uses.items():
                names = {host_device_of(ref, replayed.declaring, replayed.settings) for ref in devices}
                if not self._open_unhealthy.keys().isdisjoint(names.union(map(str, devices))):
                    self.pods.add(pods.names.get(uid, uid))

    def close(self, at_s: float) -> None:
        """End all open intervals at the time ``at_s``, because the time after it was not observed."""
        _update(self._open_causes, {}, self.causes, at_s)
        _update(self._open_unhealthy, {}, self.unhealthy, at_s)
        self._last = ()

    @property
    def unhealthy_s(self) -> float:
        """Sum over all devices of the time in which they were Unhealthy [s]."""
        return sum(span.end_s - span.begin_s for found in self.unhealthy.values() for span in found)


def _update(
    opened: dict[K, list[tuple[float, int]]],
    now: Mapping[K, int],
    closed: dict[K, list[FaultInterval]],
    at_s: float,
) -> None:
    """End the open intervals of causes that are no longer raised, and begin those of new causes.

    A cause whose severity changes from or to INFO begins another interval, because INFO reports no fault.

    Args:
        opened: Severities of each open interval, each with the time from which on the cause had it.
        now: Severity of each cause, or Unhealthy device, from ``at_s`` on.
        closed: Receives the ended intervals.
        at_s: Time of the change [s since 1970].
    """
    ended = [
        key
        for key, steps in opened.items()
        if key not in now or (now[key] > Severity.INFO) != (steps[-1][1] > Severity.INFO)
    ]
    for key in ended:
        (begin_s, severity), *later = opened.pop(key)
        closed.setdefault(key, []).append(FaultInterval(begin_s, at_s, severity, tuple(later)))
    for key, severity in now.items():
        steps = opened.setdefault(key, [])
        if not steps or steps[-1][1] != severity:
            steps.append((at_s, severity))


class ChangeKind(StrEnum):
    """Kind of difference between a cause's recorded interval and its interval with another configuration."""

    APPEARS = "appears"
    VANISHES = "vanishes"
    MOVES = "moves"
    """The cause starts or ends at another time."""
    SEVERITY = "severity"
    """The cause has another severity, or changes its severity at another time."""


class CauseChange(NamedTuple):
    """Cause of a device that another configuration would have reported differently."""

    kind: ChangeKind
    node: str
    device: str
    code: str
    recorded: FaultInterval | None
    other: FaultInterval | None


@dataclass
class RecordComparison:
    """Comparison of the verdicts in one record with those of another configuration."""

    node: str
    observed_s: float
    """Time that the record covers, without gaps [s]."""
    recorded: HealthIntervals
    other: HealthIntervals
    steps: int
    problems: list[str]

    @classmethod
    def empty(cls, *problems: str) -> "RecordComparison":
        """Return the comparison of a record without evaluations, with the problems of reading the record."""
        return cls("", 0.0, HealthIntervals(), HealthIntervals(), 0, list(problems))

    def changes(self) -> Iterator[CauseChange]:
        """Yield the causes that differ between both configurations, by device, code and time."""
        for key in sorted({*self.recorded.causes, *self.other.causes}):
            device, code = key
            pairs = match_intervals(self.recorded.causes.get(key, []), self.other.causes.get(key, []))
            for before, after in pairs:
                if kind := change_kind(before, after):
                    yield CauseChange(kind, self.node, device, code, before, after)


def match_intervals(
    recorded: Sequence[FaultInterval], other: Sequence[FaultInterval]
) -> list[tuple[FaultInterval | None, FaultInterval | None]]:
    """Pair the recorded intervals of a cause with overlapping ones of the other configuration.

    Each interval is used once; one without a partner is paired with None.
    """
    left = list(other)
    pairs: list[tuple[FaultInterval | None, FaultInterval | None]] = []
    for interval in recorded:
        partner = next((candidate for candidate in left if candidate.overlaps(interval)), None)
        if partner is not None:
            left.remove(partner)
        pairs.append((interval, partner))
    return [*pairs, *((None, interval) for interval in left)]


def change_kind(recorded: FaultInterval | None, other: FaultInterval | None) -> ChangeKind | None:
    """Return how a fault's interval differs from the recorded one; None: the difference is too small."""
    if recorded is None:
        return ChangeKind.APPEARS
    if other is None:
        return ChangeKind.VANISHES
    shift_s = max(abs(recorded.begin_s - other.begin_s), abs(recorded.end_s - other.end_s))
    if shift_s >= MOVED_S:
        return ChangeKind.MOVES
    steps = zip_longest(recorded.later, other.later, fillvalue=(0.0, 0))
    is_same = recorded.severity == other.severity and all(
        a == b and abs(a_s - b_s) < MOVED_S for (a_s, a), (b_s, b) in steps
    )
    return None if is_same else ChangeKind.SEVERITY


def compare_record(paths: Sequence[RecordPath], change: ChangeSettings) -> RecordComparison:
    """Compare one node's record with its replay under other settings. Blocks on the disk or the network.

    ``paths`` are the segments (files) of the record, the oldest first.

    What cannot be read or compared is left out, and named in the result.
    """
    try:
        try:
            return _compare_record(paths, change, with_cgroups=False)
        except CgroupsMatter:
            return _compare_record(paths, change, with_cgroups=True)
    except Exception as error:  # the other records are compared
        return left_out(paths, error)


def left_out(paths: Sequence[RecordPath], error: Exception) -> RecordComparison:
    """Return the comparison of a record that is left out because of ``error``."""
    record = paths[0] if len(paths) == 1 else paths[0].parent
    return RecordComparison.empty(f"record {record}: left out: {type(error).__name__}: {error}")


def _compare_record(
    paths: Sequence[RecordPath], change: ChangeSettings, *, with_cgroups: bool
) -> RecordComparison:
    """Compare one node's record with its replay under other settings, with or without cgroups.

    Raises CgroupsMatter if cgroups are left out but may change verdicts.
    """
    replay = Replay(change)
    result = RecordComparison.empty()
    last_s: float | None = None
    base_s, boot_id = 0.0, None
    for path in paths:
        try:
            reader = SegmentReader(path)
            if reason := reader.state()[1]:
                result.problems.append(f"{path}: begins without the recorded state: {reason}")
        except DrahealthError as error:
            result.problems.append(str(error))
            continue
        if reader.head.lost:
            result.problems.append(f"{path}: {reader.head.lost} snapshots right before it were not recorded")
        if result.node not in ("", reader.head.node):
            result.problems.append(f"{path}: is of node {reader.head.node}, compared as node {result.node}")
        result.node = result.node or reader.head.node
        for replayed in reader.until_invalid(replay.verdicts(reader, with_cgroups=with_cgroups)):
            step = replayed.recorded
            offset_s = step.now.wall_s - step.now.mono_ns / NS
            # the monotonic clock begins again, or the wall clock was set; the boot's id may be unknown
            if boot_id != reader.head.boot_id or abs(offset_s - base_s) > CLOCK_STEP_S:
                base_s, boot_id = offset_s, reader.head.boot_id
            result.steps += 1
            if step.use is StepOutcome.DISCARDED or replayed.starting:
                continue
            at_s = base_s + step.now.mono_ns / NS
            if last_s is not None and not 0 <= at_s - last_s <= GAP_S:
                result.recorded.close(last_s)
                result.other.close(last_s)
            elif last_s is not None:
                result.observed_s += at_s - last_s
            last_s = at_s
            result.recorded.observe(at_s, step.verdicts, replayed)
            result.other.observe(at_s, replayed.verdicts, replayed)
        if reader.problem:
            result.problems.append(str(reader.problem))
    if last_s is not None:
        result.recorded.close(last_s)
        result.other.close(last_s)
    return result


# --- labelled incidents -------------------------------------------------------------------------------------


class Incident(NamedTuple):
    """Fault that really happened, as an operator describes it for the scores of rules."""

    device: str
    """Name of the faulty device, or a pattern with ``*``, ``?`` and ``[...]``."""
    begin_s: float
    end_s: float
    node: str = "*"
    codes: tuple[str, ...] = ("*",)
    """Codes, or patterns of codes, of the rules that should report the incident."""

    def concerns(self, node: str, device: str) -> bool:
        """Return whether the incident was a fault of this device on this node."""
        return fnmatchcase(node, self.node) and fnmatchcase(device, self.device)

    def expects(self, code: str) -> bool:
        """Return whether the rule with this code should report the incident."""
        return any(fnmatchcase(code, pattern) for pattern in self.codes)


class SuccessRate(NamedTuple):
    """Share of successes among trials, with its 95 % confidence interval (Wilson score interval)."""

    successes: int
    trials: int
    low: float
    high: float

    @property
    def value(self) -> float | None:
        """Share of successes, from 0 to 1; None: there were no trials."""
        return self.successes / self.trials if self.trials else None


class RuleScore(NamedTuple):
    """Score of one rule: how many of its reports were real incidents, and how many incidents it reported."""

    code: str
    """Code of the rule; ``*``: all rules together."""
    precision: SuccessRate
    """Share of the rule's reported intervals that belong to an incident."""
    recall: SuccessRate
    """Share of the incidents expected from the rule that it reported."""
    delay_s: tuple[float, float, float] | None
    """Median time to detection with its 95 % confidence interval: median, low, high [s]; None: none was
    detected."""


def success_rate(successes: int, trials: int) -> SuccessRate:
    """Return the share of successes with its 95 % confidence interval.

    Without trials, the interval is from 0 to 1.
    """
    if not trials:
        return SuccessRate(0, 0, 0.0, 1.0)
    share, squared = successes / trials, Z_95 * Z_95
    centre = (share + squared / (2 * trials)) / (1 + squared / trials)
    half = Z_95 / (1 + squared / trials) * sqrt(share * (1 - share) / trials + squared / (4 * trials**2))
    return SuccessRate(successes, trials, max(0.0, centre - half), min(1.0, centre + half))


def median_interval(values: Iterable[float]) -> tuple[float, float, float] | None:
    """Return the median of values, and the lower and upper end of its confidence interval (at least 95 %).

    The interval is by order statistics; with fewer than six values, the smallest and the largest value. None:
    ``values`` is empty.
    """
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return None
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    below, rank = 0.0, 0
    while rank < count // 2 and below + comb(count, rank) / 2**count <= 0.025:
        below += comb(count, rank) / 2**count
        rank += 1
    rank = max(rank - 1, 0)
    return middle, ordered[rank], ordered[count - 1 - rank]


def score_rules(
    sides: Sequence[tuple[str, HealthIntervals]], incidents: Sequence[Incident]
) -> list[RuleScore]:
    """Return the scores of all rules together, then of each rule that reported or was expected to report.

    Args:
        sides: Name of each node with its verdicts.
        incidents: What really happened on these nodes. Causes of severity INFO are no reports.
    """
    found: dict[str, list[tuple[str, str, FaultInterval]]] = {}
    for node, side in sides:
        for (device, code), intervals in side.causes.items():
            reports = [(node, device, span) for span in intervals if span.severity > Severity.INFO]
            if reports:
                found.setdefault(code, []).extend(reports)
    expected = {code for incident in incidents for code in incident.codes if not set(code) & set("*?[")}
    all_reports = [report for reports in found.values() for report in reports]
    scores = [_score("*", all_reports, incidents)]
    for code in sorted(found.keys() | expected):
        concerned = [incident for incident in incidents if incident.expects(code)]
        scores.append(_score(code, found.get(code, []), concerned))
    return scores


def _score(
    code: str, reports: Sequence[tuple[str, str, FaultInterval]], incidents: Sequence[Incident]
) -> RuleScore:
    detected: dict[Incident, float] = {}
    right = 0
    for node, device, interval in reports:
        hits = [
            incident
            for incident in incidents
            if incident.concerns(node, device)
            and interval.overlaps(FaultInterval(incident.begin_s, incident.end_s))
        ]
        right += bool(hits)
        for incident in hits:
            delay_s = max(0.0, interval.begin_s - incident.begin_s)
            detected[incident] = min(detected.get(incident, delay_s), delay_s)
    return RuleScore(
        code,
        success_rate(right, len(reports)),
        success_rate(len(detected), len(incidents)),
        median_interval(detected.values()),
    )
