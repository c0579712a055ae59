"""Availability of devices, computed from the verdict history: time in each state, faults, flapping, rules.

All periods in which the agent ran are placed on one time axis that ends now. Within a boot, the time between
two periods is measured on the clock since boot. Over a reboot, it is measured on the wall clock as set at the
end of each period, and is at least zero; no boot ends before an earlier one. So a change of the wall clock
makes no interval negative or longer, and counts no interval twice.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final, NamedTuple

from agent.model.claim import DeviceRef
from agent.model.history import (
    USABLE,
    ClockReading,
    ObservedPeriod,
    RecordedState,
    RecordedVerdict,
    StoredVerdicts,
    VerdictChange,
)

FLAP_WINDOW_S: Final = 3600.0
FLAP_COUNT: Final = 3
"""A device flaps if it stopped being usable so often within FLAP_WINDOW_S."""


class VerdictSpan(NamedTuple):
    """Interval between two changes of a device's verdict (its state and causes)."""

    change: VerdictChange
    """Change of the verdict with which the span begins."""
    begin_s: float
    end_s: float
    """Start and end of the span by the present setting of the wall clock [s since 1970]."""
    is_newest: bool
    """True: the device still has this verdict, as far as known."""

    @property
    def verdict(self) -> RecordedVerdict:
        """Verdict that the device had in the interval."""
        return self.change.verdict


class DeviceAvailability(NamedTuple):
    """Availability of one device in a window of time."""

    device: DeviceRef
    begin_s: float
    """Start of the window of time [s since 1970], or the device's first record if that is later."""
    end_s: float
    state: RecordedState
    """Newest state of the device's health."""
    observed_s: Mapping[RecordedState, float]
    """Observed time in each state of health [s]."""
    not_observed_s: float
    """Time in which the agent did not observe the device, because it did not run [s]."""
    changes: int
    """Number of changes of the device's verdict in the window."""
    faults: int
    """Number of faults that began: the device became Unhealthy, and had been usable since the last one."""
    mean_between_faults_s: float | None
    """Time in which the device was usable, for each fault that began [s]; None: no fault."""
    mean_to_recover_s: float | None
    """Mean time from the start of a fault until the device was usable [s]; None: no fault has ended.

    It includes time that was not observed, such as that of a reboot.
    """
    interruptions: int
    """Largest number of times within FLAP_WINDOW_S that the device stopped being usable."""

    @property
    def is_flapping(self) -> bool:
        """Whether the device is flapping: it stopped being usable FLAP_COUNT times within FLAP_WINDOW_S."""
        return self.interruptions >= FLAP_COUNT

    @property
    def lost_s(self) -> float:
        """Time for which the device was Unhealthy [s]."""
        return self.observed_s[RecordedState.UNHEALTHY]

    @property
    def total_s(self) -> float:
        """Length of the window [s]: the sum of all observed times and the time that was not observed."""
        return self.end_s - self.begin_s


class RuleActivity(NamedTuple):
    """Activity of one health rule in a window of time."""

    code: str
    raised: int
    """Number of times that the rule's finding became a cause of a device's verdict."""
    active_s: float
    """Observed time for which devices had a cause of this rule, summed over devices [s]."""
    devices: tuple[DeviceRef, ...]


class AvailabilitySummary(NamedTuple):
    """Availability of all devices in a window of time, and the activity of all rules."""

    devices: tuple[DeviceAvailability, ...]
    """Devices, the device with the greatest loss of time first."""
    rules: tuple[RuleActivity, ...]
    """Health rules, the rule that was raised most often first."""


class ObservedTimeAxis:
    """Time axis of the periods in which the agent observed the devices; it ends now."""

    def __init__(self, periods: Sequence[ObservedPeriod], now: ClockReading) -> None:
        """Place the observed periods, given oldest first, on the axis backwards from `now`."""
        ends, starts = [], []
        following = _Begin(now.wall_s, now.boot_s, now.boot_id)
        for period in reversed(_with_ordered_ends(periods, now.wall_s)):
            ends.append(following.axis_s - _gap_s(period, following))
            starts.append(ends[-1] - period.lasted_s)
            following = _Begin(starts[-1], period.began_boot_s, period.boot_id)
        self._starts, self._ends = starts[::-1], ends[::-1]
        self._index = {period.id: index for index, period in enumerate(periods)}
        self.now_s = now.wall_s
        """End of the axis [s since 1970]."""
        gaps = [start_s - end_s for end_s, start_s in zip(self._ends, self._starts[1:], strict=False)]
        self._unobserved_before = [0.0]
        for gap_s in gaps:
            self._unobserved_before.append(self._unobserved_before[-1] + gap_s)

    def position(self, change: VerdictChange) -> float:
        """Return the position of a verdict change on the time axis [s since 1970]. If the period of the
        change was deleted, the position is the start of the oldest stored period."""
        index = self._index.get(change.period)
        if index is None:
            return self._starts[0] if self._starts else self.now_s
        return min(self._starts[index] + change.offset_s, self._ends[index])

    def has_period(self, change: VerdictChange) -> bool:
        """Return whether the history has the period, and so the time, of a verdict change."""
        return change.period in self._index

    def unobserved_s(self, begin_s: float, end_s: float) -> float:
        """Return how much of the time from `begin_s` to `end_s` was not observed [s]."""
        return min(max(0.0, self._unobserved_until(end_s) - self._unobserved_until(begin_s)), end_s - begin_s)

    def gaps(self, begin_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """Yield the parts of `begin_s` to `end_s` in which the agent did not run, as (begin, end)."""
        gap_begins, gap_ends = [begin_s, *self._ends], [*self._starts, self.now_s]
        for gap_begin_s, gap_end_s in zip(gap_begins, gap_ends, strict=True):
            since_s, until_s = max(gap_begin_s, begin_s), min(gap_end_s, end_s)
            if until_s > since_s:
                yield since_s, until_s

    def _unobserved_until(self, time_s: float) -> float:
        index = bisect_right(self._starts, time_s) - 1
        if index < 0:
            return time_s - (self._starts[0] if self._starts else self.now_s)
        return self._unobserved_before[index] + max(0.0, time_s - self._ends[index])


class _Begin(NamedTuple):
    axis_s: float
    """Position on the time axis, which is right although the clock was wrong [s since 1970]."""
    boot_s: float
    boot_id: str


def _with_ordered_ends(periods: Sequence[ObservedPeriod], now_s: float) -> list[ObservedPeriod]:
    """Return the observed periods, with ends on the wall clock that are not before the ends of earlier boots.
    An end after `now_s` is wrong and is no limit for later boots."""
    ordered: list[ObservedPeriod] = []
    earliest_s, boot_id = -inf, ""
    for period in periods:
        if not period.boot_id or period.boot_id != boot_id:
            earliest_s = ordered[-1].ended_s if ordered and ordered[-1].ended_s <= now_s else -inf
        earliest_s, boot_id = earliest_s + period.lasted_s, period.boot_id
        ordered.append(period._replace(ended_s=max(earliest_s, period.ended_s)))
    return ordered


def _gap_s(period: ObservedPeriod, following: _Begin) -> float:
    """Return the time [s] from the end of an observed period to the start of the next one, `following`."""
    if period.boot_id and period.boot_id == following.boot_id:
        return max(0.0, following.boot_s - period.began_boot_s - period.lasted_s)
    return max(0.0, following.axis_s - period.ended_s)


def verdict_spans(stored: StoredVerdicts, timeline: ObservedTimeAxis) -> dict[DeviceRef, list[VerdictSpan]]:
    """Return the spans of each device: the intervals between two changes of its verdict. The spans of a
    device have no gaps and no overlaps, and its last span ends now."""
    changes: dict[DeviceRef, list[tuple[VerdictChange, float]]] = defaultdict(list)
    for change in stored.changes:
        known = changes[change.device]
        earliest_s = known[-1][1] if known else timeline.position(change)
        known.append((change, max(earliest_s, timeline.position(change))))
    return {
        device: [
            *(VerdictSpan(part, begin_s, end_s, False) for (part, begin_s), (_, end_s) in pairwise(known)),
            VerdictSpan(known[-1][0], known[-1][1], max(timeline.now_s, known[-1][1]), True),
        ]
        for device, known in changes.items()
    }


def summarize(
    spans: Mapping[DeviceRef, Sequence[VerdictSpan]], timeline: ObservedTimeAxis, since_s: float | None = None
) -> AvailabilitySummary:
    """Return the availability of devices from `since_s` [s since 1970] on. If `since_s` is None, the time
    begins at the first record of each device. Devices that were absent all the time are left out."""
    windows = {
        device: _Window(
            timeline, max(known[0].begin_s, known[0].begin_s if since_s is None else since_s), known
        )
        for device, known in spans.items()
    }
    present = {device: window for device, window in windows.items() if not window.is_absent}
    devices = [window.availability(device) for device, window in present.items()]
    return AvailabilitySummary(
        tuple(sorted(devices, key=lambda item: (-item.lost_s, -item.changes, item.device))),
        tuple(_rule_activity(present)),
    )


@dataclass(frozen=True)
class _Window:
    """Window of time from `begin_s` to now, with the verdict spans of one device."""

    timeline: ObservedTimeAxis
    begin_s: float
    spans: Sequence[VerdictSpan]

    @property
    def is_absent(self) -> bool:
        return all(part.verdict.state is RecordedState.ABSENT for part, _ in self.parts())

    def parts(self) -> Iterator[tuple[VerdictSpan, float]]:
        """Yield each span that reaches into the window, with the observed time inside the window [s]."""
        for span in self.spans:
            begin_s = max(span.begin_s, self.begin_s)
            if span.end_s > begin_s or span.is_newest:
                yield span, span.end_s - begin_s - self.timeline.unobserved_s(begin_s, span.end_s)

    def availability(self, device: DeviceRef) -> DeviceAvailability:
        observed_s, end_s = dict.fromkeys(RecordedState, 0.0), self.spans[-1].end_s
        for part, seconds in self.parts():
            observed_s[part.verdict.state] += seconds
        faults = list(_faults(self))
        begun = sum(begin_s is not None and begin_s >= self.begin_s for begin_s, _ in faults)
        recovered = [
            end_s - begin_s
            for begin_s, end_s in faults
            if begin_s is not None and end_s is not None and end_s >= self.begin_s
        ]
        usable_s = sum(observed_s[state] for state in USABLE)
        interrupted = [
            span.begin_s for span in self.spans if span.begin_s >= self.begin_s and _interrupts(span.change)
        ]
        return DeviceAvailability(
            device=device,
            begin_s=self.begin_s,
            end_s=end_s,
            state=self.spans[-1].verdict.state,
            observed_s=observed_s,
            not_observed_s=self.timeline.unobserved_s(self.begin_s, end_s),
            changes=sum(row.begin_s >= self.begin_s and row.change.before is not None for row in self.spans),
            faults=begun,
            mean_between_faults_s=usable_s / begun if begun else None,
            mean_to_recover_s=sum(recovered) / len(recovered) if recovered else None,
            interruptions=_most_within(interrupted, FLAP_WINDOW_S),
        )


def _faults(window: _Window) -> Iterator[tuple[float | None, float | None]]:
    """Yield the begin and the end of each fault of a device.

    A begin of None is unknown; an end of None means that the fault has not ended. A fault lasts from the
    state Unhealthy to the next usable state. In between, the device can also be Unknown or absent.
    """
    begin_s: float | None = None
    is_open = False
    for span in window.spans:
        state = span.verdict.state
        if state is RecordedState.UNHEALTHY and not is_open:
            is_open = True
            is_old = span.change.before in (None, RecordedState.UNHEALTHY)
            begin_s = None if is_old or not window.timeline.has_period(span.change) else span.begin_s
        elif state in USABLE and is_open:
            yield begin_s, span.begin_s
            is_open = False
    if is_open:
        yield begin_s, None


def _interrupts(change: VerdictChange) -> bool:
    """Return whether a verdict change interrupts the use of a device. The device was usable and became
    Unknown or Unhealthy, and the agent observed the change."""
    return (
        change.before in USABLE
        and change.offset_s > 0
        and change.verdict.state in {RecordedState.UNKNOWN, RecordedState.UNHEALTHY}
    )


def _most_within(times_s: Sequence[float], window_s: float) -> int:
    """Return the largest number of ``times_s`` (ascending) within one interval of `window_s` [s]."""
    return max(
        (bisect_right(times_s, begin_s + window_s) - index for index, begin_s in enumerate(times_s)),
        default=0,
    )


def _rule_activity(windows: Mapping[DeviceRef, _Window]) -> list[RuleActivity]:
    raised: dict[str, int] = defaultdict(int)
    active_s: dict[str, float] = defaultdict(float)
    devices: dict[str, dict[DeviceRef, None]] = defaultdict(dict)
    for device, window in windows.items():
        before: frozenset[str] = frozenset()
        observed_s = {_key(part): seconds for part, seconds in window.parts()}
        for span in window.spans:
            codes = frozenset(cause.code for cause in span.verdict.causes)
            for code in codes:
                if _key(span) in observed_s:
                    active_s[code] += observed_s[_key(span)]
                    devices[code][device] = None
                raised[code] += code not in before and span.begin_s >= window.begin_s
            before = codes
    found = [RuleActivity(code, raised[code], active_s[code], tuple(devices[code])) for code in devices]
    return sorted(found, key=lambda rule: (-rule.raised, -rule.active_s, rule.code))


def _key(span: VerdictSpan) -> tuple[str, int]:
    return span.change.period, span.change.number


def listed_changes(
    spans: Mapping[DeviceRef, Sequence[VerdictSpan]], since_s: float | None = None
) -> list[VerdictSpan]:
    """Return the changes of verdicts from `since_s` [s since 1970] on, newest first. Each change is returned
    as the span that begins with it. The first record of a device does not count as a change."""
    found = [
        change
        for known in spans.values()
        for change in known
        if change.change.before is not None and (since_s is None or change.begin_s >= since_s)
    ]
    return sorted(found, key=lambda fault: fault.begin_s, reverse=True)
