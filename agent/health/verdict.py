"""Verdicts on devices, derived from the causes (confirmed faults) of each device.

A verdict has the health, the message for the kubelet, the time of the last change, and the lease (how long
the kubelet may use the verdict).

The module also detects stalled sources. A stalled source has not read its part of the machine lately, and its
last readings are no longer trusted.

The module also compares reports: which devices have another verdict in the second of two reports, and in
which periods the agent observed the devices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from agent.devices.inventory import InventoryDevice
from agent.health.evaluation import Evaluation
from agent.health.rules import CLEAN_PASSES, STALLED, STALLED_ADVICE
from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.model.claim import DeviceRef
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity, most_needed_first
from agent.model.history import (
    CAUSES_MAX,
    GONE,
    STATE_OF_SEVERITY,
    ObservedPeriod,
    RecordedCause,
    RecordedState,
    RecordedVerdict,
    VerdictChange,
)
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.time import NS, Instant, instant_at_mono

STALL_PERIODS: Final = 3
"""Number of periods without a pass after which a source is stalled."""
STALL_MIN_NS: Final = 2 * NS
"""Smallest age of a source's last pass at which it counts as stalled [ns].

On a busy machine a source that is read every 10 ms can be late by more than three periods.
"""
PAUSE_DELAY_NS: Final = NS
"""Delay of an evaluation above which the agent or the machine was stopped, or had no CPU time [ns]."""
HEARTBEAT_NS: Final = 10 * NS
"""Default time between two heartbeats, each with an evaluation [ns]."""
PAUSES_MAX: Final = 4
"""Number of pauses that are kept. A source that hangs is also found if the agent is often stopped."""

Pause = tuple[int, int]
"""Time in which the agent was stopped, from its last evaluation before to its first one after [ns]."""


class SourceStall(NamedTuple):
    """Source that has stopped reading, or that has finished fewer than ``CLEAN_PASSES`` readings since it
    resumed."""

    since: Instant
    passes: int
    """Number of passes that the source had finished when it was last seen stalled."""


def stall_limit_ns(source: SourceSample) -> int:
    """Return how old the last reading of a source may be before the source is stalled [ns]."""
    return source.limit_ns or max(STALL_PERIODS * source.period_ns, STALL_MIN_NS)


def is_stalled(source: SourceSample, now: Instant) -> bool:
    """Return True if the source's last reading is older than :func:`stall_limit_ns` allows."""
    return now.mono_ns - source.beat_ns > stall_limit_ns(source)


def vital_stall_error(sources: Iterable[SourceSample], now: Instant) -> str:
    """Return an error text if a vital source is stalled, or none has read recently; else an empty text.

    A source is vital if systemd or the kubelet must restart the agent when the source stalls.
    """
    vital = [source for source in sources if source.vital]
    stalled = [source.name for source in vital if source.state is SourceState.STALLED]
    if stalled or all(is_stalled(source, now) for source in vital):
        return f"vital sources are stalled: {', '.join(stalled) or 'all'}"
    return ""


def longest_wait_ns(lease_s: int) -> int:
    """Return the longest time between two evaluations of an agent that runs [ns]: heartbeats come at least
    three times in a lease."""
    return max(lease_s * NS // 3, HEARTBEAT_NS) + PAUSE_DELAY_NS


def next_pauses(
    pauses: tuple[Pause, ...], evaluated: Instant, due_ns: int | None, lease_s: int, now: Instant
) -> tuple[Pause, ...]:
    """Return the newest pauses of the agent, with one that ends now if this evaluation is later than `due_ns`
    (time at which the last evaluation needed it; None: no such time) or a heartbeat after `evaluated`.

    The agent may have been stopped since `evaluated`. If the last evaluation was late, too, the machine is
    busy rather than stopped: only the delay counts, so that a hang is found and pending faults are raised.
    """
    begin_ns, end_ns = evaluated.mono_ns, now.mono_ns
    expected_ns = begin_ns + longest_wait_ns(lease_s) - PAUSE_DELAY_NS
    if due_ns is not None and begin_ns < due_ns:
        expected_ns = min(expected_ns, due_ns)
    if end_ns - expected_ns <= PAUSE_DELAY_NS:
        return pauses
    was_late = bool(pauses) and pauses[-1][1] == begin_ns
    return (*pauses, (expected_ns if was_late else begin_ns, end_ns))[-PAUSES_MAX:]


def paused_ns(pauses: Iterable[Pause], beat_ns: int, limit_ns: int) -> int:
    """Return for how much of the time since a reading at `beat_ns` the agent was stopped [ns], while the
    reading was not older than `limit_ns`; in whole seconds, because a text can contain it."""
    lost_ns = 0
    for begin_ns, end_ns in pauses:
        if begin_ns <= beat_ns + limit_ns + lost_ns:
            lost_ns += max(0, end_ns - max(begin_ns, beat_ns))
    return -(-lost_ns // NS) * NS


def with_pauses(source: SourceSample, pauses: Sequence[Pause]) -> SourceSample:
    """Return a source with a stall limit that is later by the time in which the agent was stopped."""
    if source.beat_ns >= pauses[-1][1]:
        return source  # the usual case, at little cost
    limit_ns = stall_limit_ns(source)
    lost_ns = 0 if source.state is SourceState.ABSENT else paused_ns(pauses, source.beat_ns, limit_ns)
    return source._replace(limit_ns=limit_ns + lost_ns) if lost_ns else source


def find_stalls(
    previous: Mapping[str, SourceStall], sources: Sequence[SourceSample], now: Instant
) -> dict[str, SourceStall]:
    """Return the stalled sources (those that have stopped reading), by name.

    An absent source is never stalled. A source that resumes stays in the result until it has finished
    ``CLEAN_PASSES`` passes (readings).

    Args:
        previous: Result of the last evaluation.
    """
    found: dict[str, SourceStall] = {}
    now_ns = now.mono_ns
    for source in sources:
        is_recent = now_ns - source.beat_ns <= (source.limit_ns or STALL_MIN_NS)
        if is_recent and not previous:
            continue  # the usual case, at little cost
        stall = previous.get(source.name)
        if source.state is SourceState.ABSENT:
            continue
        if not is_recent and is_stalled(source, now):
            found[source.name] = SourceStall(stall.since if stall else now, source.passes)
        elif stall and source.passes < stall.passes + CLEAN_PASSES:
            found[source.name] = stall
    return found


def with_stall(source: SourceSample, stalled: Mapping[str, SourceStall]) -> SourceSample:
    """Return the source with the state STALLED if its name is in ``stalled``, else unchanged."""
    if source.name not in stalled:
        return source
    detail = f"no pass for more than {stall_limit_ns(source) / NS:g} s"
    return source._replace(state=SourceState.STALLED, detail=detail)


def stall_cause(source: SourceSample, stalled: Mapping[str, SourceStall], now: Instant) -> Cause:
    """Return the cause that makes a device Unknown because a source of its readings is stalled."""
    evidence = f"{source.name}: {with_stall(source, stalled).detail}"
    since = stalled[source.name].since if source.name in stalled else now
    return Cause(STALLED, Severity.UNKNOWN, Blame.AGENT, evidence, STALLED_ADVICE, since)


_beat_ns: Final = attrgetter("beat_ns")
_period_ns: Final = attrgetter("period_ns")

# --- verdicts ----------------------------------------------------------------------------------------------

MAX_MESSAGE_BYTES: Final = 1024
"""Maximum size of a device's message [bytes]: the kubelet cuts longer ones, even within a character
(KEP-4680).
"""
_ELLIPSIS: Final = "..."


def truncate_utf8(text: str, limit: int = MAX_MESSAGE_BYTES) -> str:
    """Return ``text`` as valid UTF-8 of at most ``limit`` bytes; a truncated text ends in ``...``."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - len(_ELLIPSIS)].decode("utf-8", "ignore") + _ELLIPSIS


def kubelet_message(causes: Sequence[Cause]) -> str:
    """Return a device's message for the kubelet; empty if the device has no cause above ``info``. The message
    has code and evidence of each cause above ``info``, worst first, and the advice for the worst repair."""
    urgent = most_needed_first(causes)
    if not urgent:
        return ""
    facts = "; ".join(f"{cause.code}: {cause.evidence}" for cause in causes if cause.severity > Severity.INFO)
    return truncate_utf8(f"{facts}. Advice: {urgent[0].advice}" if urgent[0].advice else facts)


class VerdictContext(NamedTuple):
    """Input of new verdicts, except rule results: the last verdicts, stalled sources, and an addition to
    leases."""

    started: Instant
    """Time of the agent's first evaluation."""
    evaluated: Instant | None = None
    """Time of the last evaluation; None during the first evaluation."""
    devices: Mapping[str, DeviceHealth] = {}
    """Verdicts of the last evaluation, by device."""
    stalls: Mapping[str, SourceStall] = {}
    """Sources that are stalled, or that resumed too recently to be trusted, by name of the source."""
    lease_salt_s: int = 0
    """Seconds added to every lease, 0 or 1: lets the first report after a gap differ from the last report."""


def make_verdict(
    evaluation: Evaluation,
    previous: VerdictContext,
    device: InventoryDevice,
    severity: Severity,
    causes: Sequence[Cause],
    verified: Instant,
    timeout_s: int,
    attributes: tuple[tuple[str, str], ...] = (),
) -> DeviceHealth:
    """Return the verdict on a device. Without causes and changes, it is the last verdict with a new lease.

    Args:
        severity: Severity of the device's worst cause, or a higher severity.
        causes: Causes, worst first.
        verified: Time at which the device's sources last finished a pass (reading).
        timeout_s: Lease (how long the kubelet trusts the verdict) before ``lease_salt_s`` is added [s].
        attributes: Attributes of the device as (name, value).
    """
    last = previous.devices.get(device.subject)
    if last and not causes and _is_unchanged_ok(last, device, severity, attributes):
        return last.with_verification(verified, timeout_s + previous.lease_salt_s)
    health, text = HEALTH_OF_SEVERITY[severity], kubelet_message(causes)
    return DeviceHealth(
        driver=device.driver,
        pool=device.pool or evaluation.settings.node,
        device=device.name,
        kind=device.kind,
        health=health,
        severity=severity,
        message=text,
        since=_begin_of_health(previous, last, (health, severity, text), causes, evaluation.now),
        verified=verified,
        timeout_s=timeout_s + previous.lease_salt_s,
        causes=tuple(causes),
        attributes=attributes,
    )


def _is_unchanged_ok(
    last: DeviceHealth, device: InventoryDevice, severity: Severity, attributes: tuple[tuple[str, str], ...]
) -> bool:
    return (
        not last.causes
        and last.severity is severity
        and last.kind == device.kind
        and last.attributes == attributes
    )


def replace_causes(
    evaluation: Evaluation,
    previous: VerdictContext,
    device: InventoryDevice,
    base: DeviceHealth,
    causes: Iterable[Cause],
) -> DeviceHealth:
    """Return the verdict ``base`` with the causes ``causes`` in place of its own.

    Args:
        causes: All causes, including those of ``base``; causes of equal severity stay in this order.
    """
    worst_first = sorted(causes, key=lambda cause: -cause.severity)
    severity = max([base.severity, *(cause.severity for cause in worst_first)])
    lease_s = base.timeout_s - previous.lease_salt_s
    return make_verdict(
        evaluation, previous, device, severity, worst_first, base.verified, lease_s, base.attributes
    )


def add_minor_causes(
    evaluation: Evaluation,
    previous: VerdictContext,
    device: InventoryDevice,
    base: DeviceHealth,
    causes: Iterable[Cause],
) -> DeviceHealth:
    """Return the verdict ``base`` with additional causes of severity ``degraded`` or lower. The added causes
    follow the causes that make the device Unknown or Unhealthy."""
    more = tuple(causes)
    ranked = sorted([*base.causes, *more], key=lambda cause: -min(cause.severity, Severity.UNKNOWN))
    severity = max([base.severity, *(cause.severity for cause in more)])
    lease_s = base.timeout_s - previous.lease_salt_s
    return make_verdict(
        evaluation, previous, device, severity, ranked, base.verified, lease_s, base.attributes
    )


def _begin_of_health(
    previous: VerdictContext,
    last: DeviceHealth | None,
    shown: tuple[Health, Severity, str],
    causes: Iterable[Cause],
    now: Instant,
) -> Instant:
    """Return when the present health, severity and message of a device, given in ``shown``, began.

    If the last verdict has the same values, the time is taken from it. Otherwise, it is the begin of the
    newest cause, or now if that cause is older than the last evaluation.
    """
    if last is not None and (last.health, last.severity, last.message) == shown:
        return last.since
    newest = max((cause.since for cause in causes if cause.severity > Severity.INFO), default=now)
    return newest if previous.evaluated is None or newest > previous.evaluated else now


def oldest_pass_time(sources: Iterable[SourceSample], now: Instant) -> Instant:
    """Return the time up to which all of a device's sources were read: the time of the oldest of their last
    passes."""
    return instant_at_mono(min(map(_beat_ns, sources), default=now.mono_ns), now)


def lease_seconds(evaluation: Evaluation, sources: Iterable[SourceSample]) -> int:
    """Return the lease of a verdict: the time for which the kubelet trusts it [s]. The lease is the
    configured one, but at least three periods of the slowest source, so that the verdict does not expire
    between two passes (readings)."""
    slowest_ns, lease_s = max(map(_period_ns, sources), default=0), evaluation.settings.lease_s
    return lease_s if 3 * slowest_ns <= lease_s * NS else -(-3 * slowest_ns // NS)


# --- comparison of reports ---------------------------------------------------------------------------------


class SeenVerdict(NamedTuple):
    """Verdict (health and causes) on a device in the last report, and the part of it that the history
    records."""

    severity: Severity
    causes: tuple[Cause, ...]
    verdict: RecordedVerdict


SeenVerdicts = Mapping[DeviceRef, SeenVerdict]
"""Verdicts of the last report, by device."""


def recorded_verdict(device: DeviceHealth) -> RecordedVerdict:
    """Return the part of a verdict that the history records: the state, and the causes above INFO."""
    causes = [cause for cause in device.causes if cause.severity > Severity.INFO]
    return RecordedVerdict(
        STATE_OF_SEVERITY[device.severity],
        tuple(RecordedCause(cause.code, cause.severity, cause.evidence) for cause in causes[:CAUSES_MAX]),
    )


def verdicts_by_device(last: SeenVerdicts, devices: Iterable[DeviceHealth]) -> dict[DeviceRef, SeenVerdict]:
    """Return the verdicts of a new report by device. A device without a change keeps its object of `last`.

    Args:
        last: Verdicts of the report before the new report.
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

    The verdict is GONE for a device that is not in the second report.

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


class VerdictChangeLog:
    """Log in memory of one run of the agent: changes of verdicts, and periods of observation.

    Reads no clock.
    """

    def __init__(self, run_id: str, boot_id: str, silence_s: float, *, rows: int) -> None:
        """Create an empty log.

        Args:
            run_id: First part of the periods' ids, unique over all runs.
            boot_id: Boot of the machine; empty: unknown.
            silence_s: Longest time between two reports that counts as observed [s].
            rows: Largest number of queued changes, or the number of devices if that number is greater.
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
        self._silence_s = self._next_silence_s = silence_s
        self._rows = rows
        self._last: dict[DeviceRef, RecordedVerdict] = {}
        self._period_count = 0
        self._change_count = 0

    def set_silence_limit(self, silence_s: float) -> None:
        """Set the longest time between two reports that counts as observed, `silence_s` [s]. A lower limit
        begins after the next report, which may still come at the former interval."""
        self._silence_s, self._next_silence_s = max(self._silence_s, silence_s), silence_s

    def handle_report(self, report: Report, boot_s: float) -> None:
        """Queue the changes of verdicts between the last report and `report`.

        Args:
            boot_s: CLOCK_BOOTTIME now [s].
        """
        seen = verdicts_by_device(self.seen, report.devices)
        if self.dropped:
            self.dropped += sum(1 for _ in changed_verdicts(_verdicts(self.seen), _verdicts(seen)))
            self.seen, self.now = seen, report.at
            return
        period = self.period
        is_first = (
            period is None or not 0 <= boot_s - period.began_boot_s - period.lasted_s <= self._silence_s
        )
        self._silence_s = self._next_silence_s
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
        """Extend the current period of observation to the run's end, unless reports were missing."""
        if self.period is None or self.dropped:
            return
        later_s = boot_s - self.period.began_boot_s - self.period.lasted_s
        if 0 <= later_s <= self._silence_s:
            self._extend_period(self.now.wall_s + later_s, boot_s)

    def changes_after(self, stored: Mapping[DeviceRef, VerdictChange]) -> Iterator[VerdictChange]:
        """Yield the queued changes, as a continuation of the changes of earlier runs.

        A device gets no change if its verdict in the first report is equal to its last verdict in an earlier
        run. A device that only an earlier run had gets the change GONE, unless it was GONE there.

        Args:
            stored: Newest change of each device in earlier runs.
        """
        first = next(period for period in self.periods.values() if period.id.startswith(self.run_id))
        reported = {new.device for new in self.pending if new.period == first.id and new.before is None}
        newest = {ref: old.verdict for ref, old in stored.items()}
        for number, ref in enumerate(sorted(newest), 1):
            if ref not in reported and newest[ref] != GONE:
                at_s = first.ended_s - first.lasted_s
                yield VerdictChange(first.id, -number, ref, newest[ref].state, GONE, at_s, 0.0)
                newest[ref] = GONE
        for change in self.pending:  # the first report of each period has all devices
            known = newest.get(change.device) if change.before is None else None
            newest[change.device] = change.verdict
            if known is None:
                yield change
            elif not change.verdict.is_same(known):
                yield change._replace(before=known.state)

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
    return {ref: entry.verdict for ref, entry in seen.items()}
