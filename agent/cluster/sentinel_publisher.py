"""Publisher of the devices' health to NVSentinel's platform connector, in a thread of its own.

The platform connector is the service on a node that receives health events for NVSentinel, a system that
repairs nodes.

The newest health of each device is compared with what was sent last. There is no queue: a platform connector
that was not reachable gets the newest state once.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import AgentUnreachable
from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report, SentinelStatus
from agent.model.time import NS, Instant
from agent.serve.platform_connector import health_event, send_health_events
from agent.system.threads.loop_thread import set_thread_name
from agent.system.threads.thread_start import DaemonThread
from agent.system.timing import random_fraction, read_clocks

DEVICE_S: Final = 30.0
"""Shortest time between two events about a device [s]: the limit for a device that flaps."""
DEBOUNCE_S: Final = 1.0
"""Delay after a changed report [s], so that several changes are sent together."""
RETRY_S: Final = 1.0
"""Pause after the first failed send to the platform connector, doubled after each further failure [s].
The pause is multiplied by a random number from 0.5 to 1.5."""
RETRY_MAX_S: Final = 60.0
"""Longest pause after failed sends to the platform connector, before the random factor [s]."""
IDLE_S: Final = 3600.0
"""Longest wait of the publisher's thread for a changed report [s]."""

log = logging.getLogger(__name__)


class _SentHealth(NamedTuple):
    """Health of a device that was last sent to NVSentinel's platform connector."""

    device: DeviceHealth
    facts: tuple[object, ...]
    at_ns: int


class SentinelPublisher:
    """Publisher of devices' health to NVSentinel's platform connector. Thread-safe, except :meth:`step`."""

    def __init__(
        self,
        socket: Path,
        node: str,
        *,
        remediate: bool,
        clock: Callable[[], Instant] = read_clocks,
        jitter: Callable[[], float] = random_fraction,
    ) -> None:
        """Create the publisher; nothing is sent yet.

        Args:
            socket: Socket of the platform connector.
            node: Name of the Node.
            remediate: True: NVSentinel may act on the events. False: it stores them only.
            clock: Returns the current time.
            jitter: Returns a random number from 0 to 1.
        """
        self._socket = socket
        self._node = node
        self._remediate = remediate
        self._clock = clock
        self._jitter = jitter
        self._changed = threading.Condition()
        # --- guarded by the condition ---
        self._report: Report | None = None
        self._is_changed = False
        self._stopping = False
        # --- the thread's own ---
        self._sent: dict[DeviceRef, _SentHealth] = {}
        self._retry_ns = 0
        self._streak = 0
        self._events = 0
        self._failures = 0
        self._error = ""
        self._status = SentinelStatus(str(socket))
        self._thread = DaemonThread(self._run, "dh-nvsentinel")

    @property
    def status(self) -> SentinelStatus:
        """State of the publisher after its last attempt to send. Never blocks."""
        return self._status

    def note_report(self, report: Report) -> None:
        """Store a published report, and wake the thread if the health of a device changed. Never blocks."""
        if report.starting:
            return
        with self._changed:
            before, self._report = self._report, report
            if before is None or list(map(_facts, before.devices)) != list(map(_facts, report.devices)):
                self._is_changed = True
                self._changed.notify_all()

    def start(self) -> None:
        """Start the publisher's thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stop the publisher's thread. Blocks up to ``timeout_s``; returns True if the thread has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        set_thread_name("dh-nvsentinel")
        pause_s = IDLE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._is_changed, pause_s)
                if not self._stopping and self._is_changed:
                    self._changed.wait_for(lambda: self._stopping, DEBOUNCE_S)
                if self._stopping:
                    return
            pause_s = self.step()

    def step(self) -> float:
        """Send the health events that are due; return the time until the next call is due [s].
        Called by the publisher's thread or by a test. Blocks up to 10 s."""
        with self._changed:
            report, self._is_changed = self._report, False
        now = self._clock()
        if report is None:
            return IDLE_S
        if now.mono_ns < self._retry_ns:
            return (self._retry_ns - now.mono_ns) / NS
        found = {DeviceRef(*device.key): device for device in report.devices}
        changed = self._changed_devices(found)
        due = {ref: device for ref, device in changed.items() if self._wait_s(ref, now) <= 0}
        if due:
            try:
                self._send(due, now)
            except AgentUnreachable as error:
                return self._note_failure(str(error), now)
            except Exception:  # a bug here must end neither the thread nor the agent
                if self._error != "internal error":
                    log.exception(
                        "nvsentinel: health events not sent: unexpected error, see the traceback; will retry"
                    )
                return self._note_failure("internal error", now)
            self._note_success(due, found, now)
        return min((self._wait_s(ref, now) for ref in changed.keys() - due.keys()), default=IDLE_S)

    def _changed_devices(self, found: Mapping[DeviceRef, DeviceHealth]) -> dict[DeviceRef, DeviceHealth]:
        """Return the devices whose health differs from that sent last; removed devices count as healthy."""
        changed = {
            ref: device
            for ref, device in found.items()
            if ref not in self._sent or self._sent[ref].facts != _facts(device)
        }
        for ref in self._sent.keys() - found.keys():
            changed[ref] = self._sent[ref].device._replace(
                health=Health.HEALTHY,
                severity=Severity.OK,
                causes=(),
                message="the device is no longer reported",
            )
        return changed

    def _wait_s(self, ref: DeviceRef, now: Instant) -> float:
        """Return the time until an event about a device may be sent [s]; 0 or less: now."""
        sent = self._sent.get(ref)
        return DEVICE_S - (now.mono_ns - sent.at_ns) / NS if sent else 0.0

    def _send(self, due: Mapping[DeviceRef, DeviceHealth], now: Instant) -> None:
        events = [
            health_event(device, self._node, now.wall_s, remediate=self._remediate)
            for _, device in sorted(due.items())
        ]
        asyncio.run(send_health_events(self._socket, events))

    def _note_success(
        self, due: Mapping[DeviceRef, DeviceHealth], found: Mapping[DeviceRef, DeviceHealth], now: Instant
    ) -> None:
        self._events += len(due)
        for ref, device in due.items():
            if ref in found:
                self._sent[ref] = _SentHealth(device, _facts(device), now.mono_ns)
            else:
                del self._sent[ref]
        if self._error:
            log.info(
                "nvsentinel: platform connector at %s answers after %d failed calls",
                self._socket,
                self._streak,
            )
        self._error, self._streak = "", 0
        self._status = SentinelStatus(str(self._socket), self._events, self._failures)

    def _note_failure(self, error: str, now: Instant) -> float:
        pause_s = min(RETRY_S * (1 << min(self._streak, 10)), RETRY_MAX_S) * (0.5 + self._jitter())
        self._streak += 1
        self._failures += 1
        if error != self._error:
            log.warning("nvsentinel: health events not sent: %s; will retry", error)
        self._error = error
        self._retry_ns = now.mono_ns + round(pause_s * NS)
        self._status = SentinelStatus(str(self._socket), self._events, self._failures, error)
        return pause_s


def _facts(device: DeviceHealth) -> tuple[object, ...]:
    """Return the values of a device whose change causes a health event: health, severity, codes and repair.

    A changed message causes no event.
    """
    return (
        device.key,
        device.health,
        device.severity,
        tuple(cause.code for cause in device.causes),
        device.repair,
    )
