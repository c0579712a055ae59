"""Hub that passes each health report to its subscribers, and waits for the delivery of faults."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Health
from agent.model.prepare import DriverFault
from agent.model.report import Report
from agent.system.threads.latest_value import LatestValue


class ReportHub:
    """Holder of the newest health report, which it passes to health streams and drivers. Thread-safe."""

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
        """Report of the newest evaluation, also if it was not published; None: none was noted."""
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

    def note_evaluation(self, report: Report) -> None:
        """Replace the report of the newest evaluation, and wake callers of :meth:`wait_until`."""
        with self._changed:
            self._evaluated = report
            self._changed.notify_all()

    def notify(self) -> None:
        """Wake callers of :meth:`wait_until`, because something other than the report has changed."""
        with self._changed:
            self._changed.notify_all()

    def subscribe(self) -> LatestValue[Report]:
        """Add a subscriber; return its cell, which always holds the newest report."""
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
        It is called after each report, each evaluation and each :meth:`notify`."""
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
