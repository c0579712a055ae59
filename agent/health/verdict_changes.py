"""Comparison of reports: on which devices the verdict changed between two of them, and in which periods the
agent observed the devices."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from agent.model.claim import DeviceRef
from agent.model.health import Cause, DeviceHealth, Severity
from agent.model.report import Report
from agent.model.time import Instant
from agent.model.verdict_history import (
    CAUSES_MAX,
    GONE,
    STATE_OF_SEVERITY,
    ObservedPeriod,
    RecordedCause,
    RecordedState,
    RecordedVerdict,
    VerdictChange,
)


class SeenVerdict(NamedTuple):
    """Verdict (health and causes) on a device in the last report, and the part that the history records."""

    severity: Severity
    causes: tuple[Cause, ...]
    verdict: RecordedVerdict


SeenVerdicts = Mapping[DeviceRef, SeenVerdict]
"""Verdicts of the last report, by device."""


def recorded_verdict(device: DeviceHealth) -> RecordedVerdict:
    """Return the part of a device's verdict that the history records: state, and causes above INFO."""
    causes = [cause for cause in device.causes if cause.severity > Severity.INFO]
    return RecordedVerdict(
        STATE_OF_SEVERITY[device.severity],
        tuple(RecordedCause(cause.code, cause.severity, cause.evidence) for cause in causes[:CAUSES_MAX]),
    )


def see_devices(last: SeenVerdicts, devices: Iterable[DeviceHealth]) -> dict[DeviceRef, SeenVerdict]:
    """Return the verdicts of a new report by device; a device without a change keeps its object of `last`.

    Args:
        last: Verdicts of the report before.
        devices: Devices of the new report.
    """
    seen: dict[DeviceRef, SeenVerdict] = {}
    for device in devices:
        ref = DeviceRef(*device.key)
        before = last.get(ref)
        if before and before.severity is device.severity and before.causes == device.causes:
            seen[ref] = before
        else:
            seen[ref] = SeenVerdict(device.severity, device.causes, recorded_verdict(device))
    return seen


def changed_verdicts(
    last: Mapping[DeviceRef, RecordedVerdict], now: Mapping[DeviceRef, RecordedVerdict]
) -> Iterator[tuple[DeviceRef, RecordedVerdict]]:
    """Yield each device whose verdict changed between two reports, with its verdict in the second report.

    The verdict is GONE for a device that the second report no longer has.

    Args:
        last: Verdicts of the first report, by device.
        now: Verdicts of the second report, by device.
    """
    for ref, verdict in now.items():
        if not verdict.is_same(last.get(ref)):
            yield ref, verdict
    for ref, verdict in last.items():
        if ref not in now and verdict.state is not RecordedState.ABSENT:
            yield ref, GONE


class ObservationLog:
    """Changes of verdicts and periods of observation of one run of the agent, in memory. Reads no clock."""

    def __init__(self, run_id: str, boot_id: str, silence_s: float, *, rows: int) -> None:
        """Create an empty log.

        Args:
            run_id: First part of the periods' ids, unique over all runs.
            boot_id: Boot of the machine; empty: unknown.
            silence_s: Time without a report after which the time since the last one is not observed [s].
            rows: Largest number of queued changes; or the number of devices, if that is greater.
        """
        self.run_id = run_id
        self.period: ObservedPeriod | None = None
        """Present period; None: the next report begins one."""
        self.periods: dict[str, ObservedPeriod] = {}
        """Periods to write, by id."""
        self.pending: list[VerdictChange] = []
        """Changes to write, the oldest first."""
        self.dropped = 0
        """Changes that were dropped, because too many waited."""
        self.seen: dict[DeviceRef, SeenVerdict] = {}
        """Verdicts of the last report."""
        self.now = Instant(0, 0)
        """Time of the last report."""
        self._boot_id = boot_id
        self._silence_s = silence_s
        self._rows = rows
        self._last: dict[DeviceRef, RecordedVerdict] = {}
        self._period_count = 0
        self._change_count = 0

    def note_report(self, report: Report, boot_s: float) -> None:
        """Queue the changes of verdicts between the last report and this one.

        Args:
            boot_s: CLOCK_BOOTTIME now [s].
        """
        seen = see_devices(self.seen, report.devices)
        if self.dropped:
            self.dropped += sum(1 for _ in changed_verdicts(_verdicts(self.seen), _verdicts(seen)))
            self.seen, self.now = seen, report.at
            return
        period = self.period
        is_first = period is None or not 0 <= boot_s - _end_boot_s(period) <= self._silence_s
        now = _verdicts(seen)
        changed = list(changed_verdicts(self._last, now)) if is_first or seen != self.seen else []
        if len(self.pending) + len(changed) > max(self._rows, len(seen)) and self.pending:
            self.dropped = len(changed)
            self.seen, self.now = seen, report.at
            return
        if is_first:
            self._begin_period(report.at, boot_s)
        self._queue(changed, report.at, boot_s, is_first=is_first)
        self.seen, self._last, self.now = seen, now, report.at

    def end_period(self, boot_s: float) -> None:
        """Extend the present period of observation up to the run's end, unless reports were missing."""
        if self.period is None or self.dropped:
            return
        later_s = boot_s - self.period.began_boot_s - self.period.lasted_s
        if 0 <= later_s <= self._silence_s:
            self._extend_period(self.now.wall_s + later_s, boot_s)

    def changes_after(self, stored: Mapping[DeviceRef, VerdictChange]) -> Iterator[VerdictChange]:
        """Yield the queued changes as the continuation of those of earlier runs.

        A device of the first report that has the verdict of an earlier run gets no change. A device that only
        an earlier run had gets the change GONE.

        Args:
            stored: Newest change of each device of earlier runs.
        """
        first = next(one for one in self.periods.values() if one.id.startswith(self.run_id))
        reported = {one.device for one in self.pending if one.period == first.id and one.before is None}
        newest = {ref: one.verdict for ref, one in stored.items()}
        for number, ref in enumerate(sorted(newest), 1):
            if ref not in reported:
                at_s = first.ended_s - first.lasted_s
                yield VerdictChange(first.id, -number, ref, newest[ref].state, GONE, at_s, 0.0)
                newest[ref] = GONE
        for one in self.pending:  # the first report of each period has all devices
            known = newest.get(one.device) if one.before is None else None
            newest[one.device] = one.verdict
            if known is None:
                yield one
            elif not one.verdict.is_same(known):
                yield one._replace(before=known.state)

    def _queue(
        self,
        changed: Iterable[tuple[DeviceRef, RecordedVerdict]],
        at: Instant,
        boot_s: float,
        *,
        is_first: bool,
    ) -> None:
        period = self._extend_period(at.wall_s, boot_s)
        for ref, verdict in changed:
            before = self._last.get(ref)
            state = before.state if before else None if is_first else RecordedState.ABSENT
            offset_s = 0.0 if is_first else period.lasted_s
            self.pending.append(
                VerdictChange(period.id, self._change_count, ref, state, verdict, at.wall_s, offset_s)
            )
            self._change_count += 1

    def _begin_period(self, at: Instant, boot_s: float) -> None:
        self._period_count += 1
        self._change_count = 0
        id_ = f"{self.run_id}-{self._period_count}"
        self.period = ObservedPeriod(id_, self._boot_id, boot_s, 0.0, at.wall_s)
        self.periods[id_] = self.period

    def _extend_period(self, wall_s: float, boot_s: float) -> ObservedPeriod:
        assert self.period is not None
        lasted_s = boot_s - self.period.began_boot_s
        self.period = self.period._replace(lasted_s=lasted_s, ended_s=wall_s)
        self.periods[self.period.id] = self.period
        return self.period


def _verdicts(seen: SeenVerdicts) -> dict[DeviceRef, RecordedVerdict]:
    return {ref: one.verdict for ref, one in seen.items()}


def _end_boot_s(period: ObservedPeriod) -> float:
    return period.began_boot_s + period.lasted_s
