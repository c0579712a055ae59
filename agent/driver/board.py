"""What was said last, for everybody who asks: streams, prepare handlers, the driver. From any thread."""

import threading
import time
from collections.abc import Callable, Mapping

from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.serve.rpc.latest import Latest


class Board:
    """The newest report. Who asks for it waits for nobody."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._report: Report | None = None
        self._health: Mapping[DeviceRef, DeviceHealth] = {}
        self._readers: list[Latest[Report]] = []

    @property
    def report(self) -> Report | None:
        """None: nobody has looked yet."""
        return self._report

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        """What the newest report says of a device; None: nothing."""
        return self._health.get(device)

    def post(self, report: Report) -> None:
        """A newer report, for all who read along."""
        health = {DeviceRef(*device.key): device for device in report.devices}
        with self._news:
            self._report, self._health = report, health
            for latest in self._readers:
                latest.publish(report)
            self._news.notify_all()

    def nudge(self) -> None:
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

    def wait_taken(self, timeout_s: float) -> bool:
        """Blocks until all who follow have taken the newest report; whether they did."""
        end_s = time.monotonic() + timeout_s
        with self._news:
            readers = list(self._readers)
        return all(latest.wait_taken(max(0.0, end_s - time.monotonic())) for latest in readers)
