"""What was said last, for everybody who asks: streams, prepare handlers, the driver. From any thread."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Health
from agent.model.prepare import DriverFault
from agent.model.report import Report
from agent.system.threads.latest import Latest


class ReportHub:
    """The newest report. Who asks for it waits for nobody."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._report: Report | None = None
        self._health: tuple[Report | None, Mapping[DeviceRef, DeviceHealth]] = (None, {})
        """By device, and of which report: made when somebody asks for a device."""
        self._readers: list[Latest[Report]] = []

    @property
    def report(self) -> Report | None:
        """None: nobody has looked yet."""
        return self._report

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        """What the newest report says of a device; None: nothing."""
        report, (of, health) = self._report, self._health
        if report is not None and report is not of:
            health = {DeviceRef(*known.key): known for known in report.devices}
            self._health = report, health
        return health.get(device)

    def publish(self, report: Report) -> None:
        """A newer report, for all who read along."""
        with self._news:
            self._report = report
            for latest in self._readers:
                latest.publish(report)
            self._news.notify_all()

    def notify(self) -> None:
        """Something else has changed that somebody may wait for."""
        with self._news:
            self._news.notify_all()

    def subscribe(self) -> Latest[Report]:
        """All reports from now on, the newest first."""
        latest: Latest[Report] = Latest()
        with self._news:
            if self._report is not None:
                latest.publish(self._report)
            self._readers.append(latest)
        return latest

    def unsubscribe(self, latest: Latest[Report]) -> None:
        """No more of them; for one that gets none, nothing changes."""
        with self._news:
            if latest in self._readers:
                self._readers.remove(latest)

    def wait_until(self, claim: Callable[[], bool], timeout_s: float) -> bool:
        """Blocks until something comes true that a report or a nudge can bring about; whether it did."""
        with self._news:
            return self._news.wait_for(claim, timeout_s)

    def wait_delivered(
        self, told: Iterable[DriverFault], timeout_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Blocks until a report says it of these devices, and all who follow have taken it; whether they did.

        Args:
            told: Those that are excused are not waited for.
            is_over: No report will come any more.
        """
        end_s = time.monotonic() + timeout_s
        awaited = [fault for fault in told if not fault.excused_wall_s]

        def is_said() -> bool:
            found = [(self.health_of(fault.device), fault.health) for fault in awaited]
            return all(known and known.health in {health, Health.UNHEALTHY} for known, health in found)

        self.wait_until(lambda: is_said() or is_over(), timeout_s)
        return is_said() and self._wait_taken(end_s)

    def _wait_taken(self, end_s: float) -> bool:
        with self._news:
            readers = list(self._readers)
        return all(latest.wait_taken(max(0.0, end_s - time.monotonic())) for latest in readers)
