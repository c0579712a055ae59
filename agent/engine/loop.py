"""Engine loop: decides when to evaluate health and when to publish a report.

The loop evaluates when the snapshot source reports a change, when a waiting time of a fault ends, and at each
heartbeat. An evaluation of a change skips GPUs and parts of the host that have not changed, except once per
heartbeat interval. The loop publishes a report when devices or notes (causes that concern no device) changed,
and at each heartbeat. agent.engine.step computes the report.

After a stop of the agent (SIGSTOP, a frozen cgroup) or of the machine, the last readings of all sources are
old although no source hangs. So the loop reads the sources again before it reports a newly stalled source,
more often if the loop was late.

The module also has the queue of operators' requests to clear latched faults (``drahealth clear``), which the
loop answers, and the hub, which passes each report to its subscribers and waits for the delivery of faults.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter, itemgetter
from typing import Final, Protocol

import trio

from agent.engine.step import EngineState, StepOutcome, step, with_settings
from agent.health.gpu.responsiveness import NOT_ANSWERING
from agent.health.verdict import vital_stall_error
from agent.model.claim import DeviceRef
from agent.model.cleared_faults import ClearRequest, ClearResult, Operator
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.persistent_faults import PersistentState
from agent.model.prepare import DriverFault
from agent.model.reading import SourceState, sources_in_state
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.system.threads.latest_value import LatestValue

JITTER: Final = 0.1  # share by which heartbeats come early, so that nodes publish at different times
MAX_DUTY_CYCLE: Final = 4
"""Shortest pause after an evaluation, in multiples of its run time: 4 limits the loop to 20 % of a CPU."""

URGENT_PAUSE_S: Final = 0.2
"""Shortest pause between two wakes of a debounce, which a request can end [s]."""
REREAD_PAUSE_S: Final = 0.25
"""Pause before the sources are read again because one seems to be stalled [s]."""
LATE_REREADS: Final = 8
"""Largest number of times that the sources are read again if the loop itself was late."""
LATE_NS: Final = NS // 2
"""Delay of a wake after which the agent or the machine may have been stopped [ns]."""

Stall = tuple[str, Severity]
"""Name of a stalled source or of a GPU that does not answer, and the severity in the report."""

_causes: Final = attrgetter("causes")
_TIMES: Final = frozenset({"since", "verified"})
_visible_fields: Final = itemgetter(
    *(index for index, name in enumerate(DeviceHealth._fields) if name not in _TIMES)
)


RecordStep = Callable[[EngineState, Snapshot, Report, StepOutcome], None]
"""Function that records one evaluation: earlier state, snapshot, report, and the use of the report."""


class SnapshotSource(Protocol):
    """Interface to a source of snapshots (readings of all sources), which wakes the loop by an eventfd."""

    def fileno(self) -> int:
        """Return the file descriptor of an eventfd that is readable when readings for rules have changed."""

    def clear(self) -> None:
        """Reset the eventfd after a wake; the engine loop calls this before :meth:`read`."""

    def read(self) -> Snapshot | None:
        """Return the newest complete snapshot (readings of all sources); None: no complete one yet."""


@dataclass(frozen=True, slots=True)
class LoopTiming:
    """Intervals of the engine loop."""

    heartbeat_s: float
    """Longest time between two reports: without a change a heartbeat is published [s]."""
    debounce_ns: int
    """Shortest time between two reports of changes [ns]."""
    watchdog_s: float | None
    """Time without a notification after which systemd restarts the agent [s]; None: no watchdog."""

    @property
    def watchdog_period_ns(self) -> int | None:
        """Time between two watchdog notifications: half of ``watchdog_s``; None without a watchdog."""
        return int(self.watchdog_s * NS / 2) if self.watchdog_s else None


class PublicationReason(Enum):
    """Reason for which a report is published."""

    CHANGE = "change"
    """Clients wait for the report: devices or notes changed, or it answers a request."""
    HEARTBEAT = "heartbeat"
    """The report repeats the last one."""


class PublicationSchedule:
    """Schedule of evaluations and reports: decides when a report is published. Reads no clock."""

    def __init__(self, timing: LoopTiming, jitter: Callable[[], float]) -> None:
        """Create the schedule; `jitter` returns a random number from 0 to 1."""
        self.timing = timing
        self.heartbeat_ns = 0
        """Monotonic time of the next report without a change [ns]."""
        self.changed_ns = -(10**18)  # long ago: the first change is published at once
        """Monotonic time of the last report of a change [ns]."""
        self._jitter = jitter
        self._stalls: frozenset[Stall] = frozenset()
        """Stalls in the last evaluation."""
        self._published: tuple[object, ...] | None = None
        """Visible state (:func:`visible_state`) of the last published report; None before the first one."""
        self._full_ns = 0
        """Monotonic time from which the next evaluation is a full one [ns]."""
        self._has_skipped = False
        """Whether the last evaluation was not a full one."""

    @property
    def heartbeat_period_ns(self) -> int:
        """Longest time between two reports [ns]."""
        return int(self.timing.heartbeat_s * NS)

    def next_evaluation_ns(self, due_ns: int | None, publish_ns: int) -> int:
        """Return the time of the next evaluation, if no source wakes the loop earlier [ns].

        Args:
            due_ns: Time at which the engine's state needs an evaluation [ns]; None: no such time.
            publish_ns: Time of the next heartbeat report or, if earlier, watchdog notification [ns].
        """
        if self._has_skipped:  # the report of a change postpones the heartbeat, which would be a full one
            publish_ns = min(publish_ns, self._full_ns)
        return publish_ns if due_ns is None else min(publish_ns, due_ns)

    def is_full(self, now_ns: int, *, is_woken: bool) -> bool:
        """Return whether an evaluation includes everything; `is_woken`: a source woke the loop for it."""
        return not is_woken or now_ns >= self._full_ns

    def rereads(self, late_ns: int) -> int:
        """Return how many times to read the sources again before a new stall is reported.

        A stall is a source or GPU that gives no new readings. ``late_ns`` is the delay of the evaluation
        [ns].
        """
        return LATE_REREADS if late_ns > LATE_NS else 1

    def has_new_stall(self, report: Report) -> bool:
        """Return whether a report has a stalled source or GPU that was not stalled in the last evaluation."""
        return not stalls_of(report) <= self._stalls

    def postpone(self, now_ns: int) -> None:
        """Postpone the heartbeat report while the sources have not finished their first reading."""
        self.heartbeat_ns = now_ns + self.heartbeat_period_ns
        self._has_skipped = False

    def request_full(self, now_ns: int) -> None:
        """Make the next evaluation include everything, and publish its report even without a change."""
        self.heartbeat_ns, self._full_ns = now_ns, now_ns

    def handle_evaluation(self, report: Report, now_ns: int, *, is_full: bool) -> None:
        """Store which sources were stalled in an evaluation, and schedule the next full evaluation."""
        self._stalls, self._has_skipped = stalls_of(report), not is_full
        if is_full:
            self._full_ns = now_ns + self.heartbeat_period_ns

    def decide(self, report: Report, now_ns: int) -> PublicationReason | None:
        """Decide whether and why to publish a report; then plan the next heartbeat. None: do not publish."""
        visible = visible_state(report)
        changed = visible != self._published
        urgent = changed or bool(report.clear_results)
        if not urgent and now_ns < self.heartbeat_ns:
            return None
        self._published = visible
        self.heartbeat_ns = now_ns + int(self.timing.heartbeat_s * NS * (1 - JITTER * self._jitter()))
        if changed:
            self.changed_ns = now_ns
        return PublicationReason.CHANGE if urgent else PublicationReason.HEARTBEAT


class EngineLoop:
    """Loop that evaluates the machine's health repeatedly, and publishes the reports.

    Used only in the event loop.
    """

    def __init__(
        self,
        *,
        source: SnapshotSource,
        state: EngineState,
        timing: LoopTiming,
        clock: Callable[[], Instant],
        publish: Callable[[Report], None],
        save_state: Callable[[PersistentState], None],
        notify_watchdog: Callable[[], None],
        jitter: Callable[[], float],
        on_evaluated: Callable[[Report], None] = lambda _: None,
        repeat: Callable[[Report], None] | None = None,
        record: RecordStep | None = None,
        accept_clears: Callable[[Iterable[ClearResult]], frozenset[int]] = lambda _: frozenset(),
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a loop that has not evaluated yet.

        Args:
            source: Source of the snapshots, which also wakes the loop.
            state: State before the first evaluation.
            timing: Heartbeat, debounce and watchdog intervals.
            clock: Returns the time on the monotonic and the wall clock.
            publish: Called with each report to publish; must not block.
            save_state: Called with the state that a restart must keep, when it changes; must not block.
            notify_watchdog: Called after an evaluation in which no vital source was stalled; systemd restarts
                the agent if these calls stop.
            jitter: Returns a random number from 0 to 1.
            on_evaluated: Called with the report of each evaluation, published or not; must not block.
            repeat: Called instead of `publish` with a heartbeat report, which only repeats the last report.
                Default: `publish`.
            record: Called after each step; must not block. None: steps are not recorded.
            accept_clears: Called with the answers to requests to clear faults, before the evaluation takes
                effect. Returns the numbers of requests that were withdrawn during the evaluation, which is
                then repeated without them.
            is_urgent: Returns whether the source has something whose sender waits, so that no further changes
                are awaited.
        """
        self._source = source
        self._state = state
        self._schedule = PublicationSchedule(timing, jitter)
        self._clock = clock
        self._publish = publish
        self._repeat = repeat or publish
        self._save_state = save_state
        self._notify_watchdog = notify_watchdog
        self._on_evaluated = on_evaluated
        self._record = record
        self._accept_clears = accept_clears
        self._is_urgent = is_urgent
        self._saved_state = state.checkpoint
        self._throttled_until_ns = 0
        self._watchdog_ns = 0

    async def run(self) -> None:
        """Evaluate and publish until cancelled."""
        self._schedule.heartbeat_ns = self._watchdog_ns = self._clock().mono_ns
        while True:
            wake_ns = self._schedule.next_evaluation_ns(self._state.due_ns, self._next_publish_ns())
            is_woken = await self._wait(wake_ns)
            if is_woken:
                await self._debounce()
            await self.evaluate(wake_ns, is_woken=is_woken)

    async def evaluate(self, wake_ns: int, *, is_woken: bool) -> None:
        """Read the newest snapshot, evaluate it and publish the report.

        Args:
            wake_ns: Monotonic time at which the evaluation was due at the latest [ns].
            is_woken: Whether a source woke the loop for the evaluation.
        """
        self._source.clear()
        snapshot = self._source.read()
        now = self._clock()
        if snapshot is None:
            self._postpone(now)
        else:
            rereads = self._schedule.rereads(now.mono_ns - wake_ns)
            is_full = self._schedule.is_full(now.mono_ns, is_woken=is_woken)
            await self._evaluate(snapshot, now, rereads, is_full=is_full)

    def reconfigure(self, settings: EngineSettings, timing: LoopTiming) -> None:
        """Replace settings and intervals of the loop between two evaluations.

        The next evaluation follows at once.
        """
        now = self._clock()
        self._state = with_settings(self._state, settings, now)
        self._schedule.timing = timing
        self._schedule.request_full(now.mono_ns)
        os.eventfd_write(self._source.fileno(), 1)

    def set_record(self, record: RecordStep | None) -> None:
        """Replace the function that records evaluations; None: evaluations are not recorded."""
        self._record = record

    def _postpone(self, now: Instant) -> None:
        """Postpone heartbeat and watchdog while the sources have not finished their first reading."""
        self._schedule.postpone(now.mono_ns)
        self._watchdog_ns = now.mono_ns + (self._schedule.timing.watchdog_period_ns or 0)

    async def _evaluate(self, snapshot: Snapshot, now: Instant, rereads: int, *, is_full: bool) -> None:
        """Evaluate a snapshot and publish the report.

        If the report has a newly stalled source or GPU, the report is discarded and a newer snapshot is
        evaluated, up to `rereads` times.
        """
        before = self._state
        state, report = step(before, snapshot, now, is_full=is_full)
        while rereads and self._schedule.has_new_stall(report):
            rereads -= 1
            if self._record:
                self._record(before, snapshot, report, StepOutcome.DISCARDED)
            await trio.sleep(REREAD_PAUSE_S)
            self._source.clear()
            snapshot, now, before = self._source.read() or snapshot, self._clock(), self._state
            state, report, is_full = *step(before, snapshot, now), True
        while report.clear_results and (withdrawn := self._accept_clears(report.clear_results)):
            if self._record:
                self._record(before, snapshot, report, StepOutcome.DISCARDED)
            open_requests = tuple(req for req in snapshot.clear_requests if req.number not in withdrawn)
            snapshot = replace(snapshot, clear_requests=open_requests)
            state, report = step(before, snapshot, now, is_full=is_full)
        self._state = state
        self._schedule.handle_evaluation(report, now.mono_ns, is_full=is_full)
        if report.starting:
            self._postpone(now)
            if self._record:
                self._record(before, snapshot, report, StepOutcome.SILENT)
            return
        if self._state.checkpoint is not self._saved_state:
            self._saved_state = self._state.checkpoint
            self._save_state(self._saved_state)
        publication = self._schedule.decide(report, now.mono_ns)
        if publication is not None:
            (self._publish if publication is PublicationReason.CHANGE else self._repeat)(report)
        self._on_evaluated(report)
        if self._record:
            self._record(
                before, snapshot, report, StepOutcome.PUBLISHED if publication else StepOutcome.SILENT
            )
        is_alive = not vital_stall_error(report.sources, now)
        period_ns = self._schedule.timing.watchdog_period_ns
        if period_ns is not None and now.mono_ns >= self._watchdog_ns:
            self._watchdog_ns = now.mono_ns + period_ns
            if is_alive:
                self._notify_watchdog()
        self._throttled_until_ns = now.mono_ns + (MAX_DUTY_CYCLE + 1) * (self._clock().mono_ns - now.mono_ns)

    async def _wait(self, until_ns: int) -> bool:
        """Wait until the source wakes the loop (True) or the next evaluation is due (False)."""
        with trio.move_on_after(self._remaining_s(until_ns)):
            await trio.lowlevel.wait_readable(self._source.fileno())
            return True
        return False

    async def _debounce(self) -> None:
        """Sleep, so that further changes are in the same report and evaluations use at most 20 % of a CPU."""
        while True:
            debounce_ns = 0 if self._is_urgent() else self._schedule.timing.debounce_ns
            until_ns = max(self._schedule.changed_ns + debounce_ns, self._throttled_until_ns)
            remaining_s = self._remaining_s(until_ns := min(until_ns, self._next_publish_ns()))
            if not remaining_s:
                return
            await trio.sleep(min(remaining_s, URGENT_PAUSE_S))
            if remaining_s > URGENT_PAUSE_S:
                self._source.clear()  # before the check: a later request wakes the wait
                if not self._is_urgent():
                    await self._wait(until_ns)

    def _next_publish_ns(self) -> int:
        """Return the monotonic time of the next heartbeat or watchdog notification [ns]."""
        if self._schedule.timing.watchdog_period_ns is None:
            return self._schedule.heartbeat_ns
        return min(self._schedule.heartbeat_ns, self._watchdog_ns)

    def _remaining_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns - self._clock().mono_ns) / NS)


def stalls_of(report: Report) -> frozenset[Stall]:
    """Return the stalled sources and the GPUs that do not answer.

    A pause of the agent has the same effect, because all readings are old after it.
    """
    stalled = sources_in_state(report.sources, SourceState.STALLED)
    hung = [
        (device.device, cause.severity)
        for device in filter(_causes, report.devices)
        for cause in device.causes
        if cause.code == NOT_ANSWERING
    ]
    return frozenset([*((source.name, Severity.UNKNOWN) for source in stalled), *hung])


def visible_state(report: Report) -> tuple[object, ...]:
    """Return the fields of a report whose change is published at once: all except times, counters and costs.

    Only the names of stalled sources are included, because the devices' health shows all other failures of
    sources.
    """
    return (
        list(map(_visible_fields, report.devices)),
        report.declaring,
        report.notes,
        report.cleared,
        report.not_applicable,
        [source.name for source in sources_in_state(report.sources, SourceState.STALLED)],
    )


# --- requests to clear faults ------------------------------------------------------------------------------

Unanswered = tuple[ClearRequest, ...]


class ClearRequestQueue:
    """Queue of operators' unanswered requests to clear faults. Thread-safe. Never blocks."""

    def __init__(self, set_requests: Callable[[Unanswered], None]) -> None:
        """Create an empty queue; ``set_requests`` is called with all requests after each change."""
        self._set_requests: Final = set_requests
        self._lock = threading.Lock()
        self._last_number = 0
        self._open: dict[ClearRequest, Future[ClearResult]] = {}

    def submit(self, device: str, code: str, operator: Operator) -> Future[ClearResult]:
        """Add a request to clear faults of a device.

        The returned future gets the answer. Its method ``cancel`` returns True if it withdrew the request,
        and False if the request takes effect.
        """
        answer: Future[ClearResult] = Future()
        with self._lock:
            self._last_number += 1
            request = ClearRequest(self._last_number, device, code, operator)
            self._open[request] = answer
            self._set_requests(tuple(self._open))
        answer.add_done_callback(lambda _: self._remove({request.number}))
        return answer

    def accept(self, results: Iterable[ClearResult]) -> frozenset[int]:
        """Let requests take effect for certain; return the numbers of those that were withdrawn before."""
        futures = self._futures()
        withdrawn = set()
        for number in (result.number for result in results):
            future = futures.get(number)
            if future is None or not (future.running() or future.set_running_or_notify_cancel()):
                withdrawn.add(number)
        return frozenset(withdrawn)

    def answer(self, results: Iterable[ClearResult]) -> None:
        """Answer requests that :meth:`accept` let take effect."""
        futures = self._futures()
        for result in results:
            futures[result.number].set_result(result)

    def _futures(self) -> Mapping[int, Future[ClearResult]]:
        with self._lock:
            return {request.number: future for request, future in self._open.items()}

    def _remove(self, numbers: set[int]) -> None:
        with self._lock:
            self._open = {
                request: future for request, future in self._open.items() if request.number not in numbers
            }
            self._set_requests(tuple(self._open))


# --- hub of reports ----------------------------------------------------------------------------------------


class ReportHub:
    """Hub that holds the newest health report, and passes it to health streams and drivers. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._report: Report | None = None
        self._health: tuple[Report | None, Mapping[DeviceRef, DeviceHealth]] = (None, {})
        """Health of each device by its reference, with the report that it is from.
        Updated at the first query after a new report."""
        self._subscribers: list[LatestValue[Report]] = []
        self._evaluated: Report | None = None

    @property
    def report(self) -> Report | None:
        """Newest health report; None: the first evaluation has not finished."""
        return self._report

    @property
    def evaluated(self) -> Report | None:
        """Report of the newest evaluation, even if it was not published; None: no evaluation was stored."""
        return self._evaluated

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        """Return a device's health in the newest report; None: the report does not have the device."""
        report, (indexed, health) = self._report, self._health
        if report is not None and report is not indexed:
            health = {DeviceRef(*known.key): known for known in report.devices}
            self._health = report, health
        return health.get(device)

    def publish(self, report: Report) -> None:
        """Replace the newest report, and pass it to all subscribers."""
        with self._changed:
            self._report = report
            for subscriber in self._subscribers:
                subscriber.publish(report)
            self._changed.notify_all()

    def handle_evaluation(self, report: Report) -> None:
        """Replace the report of the newest evaluation, and wake callers of :meth:`wait_until`."""
        with self._changed:
            self._evaluated = report
            self._changed.notify_all()

    def notify(self) -> None:
        """Wake callers of :meth:`wait_until`, because something other than the report has changed."""
        with self._changed:
            self._changed.notify_all()

    def subscribe(self) -> LatestValue[Report]:
        """Add a subscriber; return its cell (holder of one value), which always has the newest report."""
        latest: LatestValue[Report] = LatestValue()
        with self._changed:
            if self._report is not None:
                latest.publish(self._report)
            self._subscribers.append(latest)
        return latest

    def unsubscribe(self, latest: LatestValue[Report]) -> None:
        """Remove the subscriber whose cell is ``latest``; an unknown cell is ignored."""
        with self._changed:
            if latest in self._subscribers:
                self._subscribers.remove(latest)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Block until ``condition`` returns True; return False after ``timeout_s``.

        ``condition`` is called after each report, each evaluation and each :meth:`notify`.
        """
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def wait_delivered(
        self,
        faults: Iterable[DriverFault],
        timeout_s: float,
        has_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Block until every subscriber has read a report with these faults; returns False on timeout or stop.

        Args:
            faults: Driver-reported faults; expired ones are ignored.
            has_stopped: Returns True if no further report will come.
        """
        end_s = time.monotonic() + timeout_s
        awaited = [fault for fault in faults if not fault.expired_wall_s]

        def is_reported() -> bool:
            found = [(self.health_of(fault.device), fault.health) for fault in awaited]
            return all(known and known.health in {health, Health.UNHEALTHY} for known, health in found)

        self.wait_until(lambda: is_reported() or has_stopped(), timeout_s)
        return is_reported() and self._wait_delivered(end_s)

    def _wait_delivered(self, end_s: float) -> bool:
        with self._changed:
            subscribers = list(self._subscribers)
        return all(latest.wait_delivered(max(0.0, end_s - time.monotonic())) for latest in subscribers)
