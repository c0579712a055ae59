"""Model of the kubelet's cache of device health, fed by the agent's real selection of devices to send.

The cache follows the kubelet of 1.36 (``healthinfo.go``): an entry is valid for health_check_timeout_seconds
(its lease) from its receipt, then reads as Unknown; the end of a stream deletes the entries of its driver.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from agent.model.health import DeviceHealth, Health
from agent.model.report import Report
from agent.model.time import NS
from agent.serve.health.feed import DEFAULT_LEASE_S, HealthFeed, devices_of_socket

EXTRA_LEASE_S: Final = 2
"""Time that every second stream adds to its leases, as in agent.serve.health.service [s]."""


def subject_of(device: DeviceHealth) -> str:
    """Return a device's name in the simulation: declared devices with driver and pool."""
    return f"{device.driver}/{device.pool}/{device.device}" if device.driver else device.device


class CacheEntry(NamedTuple):
    """Health of one device in the kubelet's cache."""

    health: Health
    message: str
    lease_s: int
    received_ns: int
    """Time of the receipt, on the clock of the script [ns]."""

    def read(self, t_ns: int) -> Health:
        """Return the health that pods get: Unknown after health_check_timeout_seconds (the lease)."""
        is_expired = t_ns - self.received_ns > self.lease_s * NS
        return Health.UNKNOWN if is_expired else self.health


class KubeletModel:
    """Model of the kubelet's health cache, and of the agent's end of one health stream per driver."""

    def __init__(self, drivers: Sequence[str], note_sent: Callable[[DeviceHealth, int, bool], None]) -> None:
        """Create a kubelet without streams.

        Args:
            drivers: Drivers whose sockets the agent serves.
            note_sent: Called with each sent device, the time, and whether a new stream sends it.
        """
        self.entries: dict[str, CacheEntry] = {}
        self.changes = 0
        """Number of changes that the kubelet has passed on to pods."""
        self.is_running = True
        self._is_agent_stopped = False
        self._published_ns = 0
        self._note_sent = note_sent
        self._extra_lease_s = 0
        self._sent: list[DeviceHealth] = []
        self._drivers = tuple(drivers)
        self._feeds: dict[str, HealthFeed] = {}
        self._numbers: dict[str, int] = {}
        """Number of the last publication that each stream has sent; 0: the stream is new."""

    def start_agent(self) -> None:
        """Connect to an agent that has just started, and has not published yet."""
        self._is_agent_stopped = False
        self._feeds = {driver: HealthFeed(self._encode) for driver in self._drivers}
        self._numbers = dict.fromkeys(self._drivers, 0)

    def stop_agent(self) -> None:
        """End the streams, because the agent has ended: the cache of its drivers is deleted."""
        self._feeds.clear()
        self.entries.clear()

    def pause_agent(self) -> None:
        """Send nothing, because the agent's process is stopped; the streams stay open."""
        self._is_agent_stopped = True

    def continue_agent(self, t_ns: int) -> None:
        """Let the agent's process continue: a stream that was opened meanwhile gets its first list."""
        self._is_agent_stopped = False
        for driver in self._feeds:
            self._send(driver, t_ns)

    def stop(self, *, is_crash: bool) -> None:
        """End the kubelet. Only after a crash its file still has the entries."""
        self.is_running = False
        if not is_crash:
            self.entries.clear()

    def start(self, t_ns: int) -> None:
        """Start the kubelet again, whose new streams get all devices at once."""
        self.is_running = True
        self._extra_lease_s = EXTRA_LEASE_S - self._extra_lease_s
        self._numbers = dict.fromkeys(self._drivers, 0)
        for driver in self._feeds:
            self._send(driver, t_ns)

    def publish(self, report: Report, t_ns: int) -> None:
        """Publish a report on all streams."""
        self._published_ns = t_ns
        for driver, feed in self._feeds.items():
            feed.publish(devices_of_socket(report, driver))
            self._send(driver, t_ns)

    def read(self, subject: str, t_ns: int) -> Health:
        """Return the health of a device that pods get; Unknown without an entry."""
        entry = self.entries.get(subject)
        return Health.UNKNOWN if entry is None else entry.read(t_ns)

    def _encode(self, devices: Sequence[DeviceHealth], extra_lease_s: int) -> list[bytes]:
        self._sent = list(devices)
        return [b"list"]

    def _send(self, driver: str, t_ns: int) -> None:
        feed, since = self._feeds[driver], self._numbers[driver]
        if not self.is_running or self._is_agent_stopped or not feed.number:
            return
        if since == 0 and not feed.is_current((t_ns - self._published_ns) / NS):
            return
        self._sent = []
        feed.pending_messages(since, self._extra_lease_s)
        for device in self._sent:
            self._note_sent(device, t_ns, since == 0)
            self._receive(device, t_ns)
        self._numbers[driver] = feed.number

    def _receive(self, device: DeviceHealth, t_ns: int) -> None:
        lease_s = (device.timeout_s or DEFAULT_LEASE_S) + self._extra_lease_s
        entry = CacheEntry(device.health, device.message, lease_s, t_ns)
        before = self.entries.get(subject_of(device))
        if before is None or before[:3] != entry[:3]:
            self.changes += 1
        self.entries[subject_of(device)] = entry
