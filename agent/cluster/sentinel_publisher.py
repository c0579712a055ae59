"""Publisher of the devices' health to NVSentinel's platform connector, in a thread of its own.

The platform connector is the service on a node that receives health events for NVSentinel, a system that
repairs nodes.

The newest health of each device is compared with what was sent last. There is no queue: a platform connector
that was not reachable gets the newest state once.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent.devices.taints import UNKNOWN_NS
from agent.errors import AgentUnreachable
from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.reading import unlisted_sources
from agent.model.report import Report, SentinelStatus
from agent.model.time import NS, Instant
from agent.serve.platform_connector import entities_of, health_event, send_health_events
from agent.store.state_files import write_and_rename
from agent.system.files import ReadError, read_bounded
from agent.system.output import LogRateLimiter, get_logger
from agent.system.threads.thread_start import DaemonThread
from agent.system.timing import random_fraction, read_clocks

DEVICE_S: Final = 30.0
"""Shortest time between two events about a device [s]: the limit for a device that flaps."""
MISSING_S: Final = 600.0
"""Time from the agent's start until a faulty device of its former run that no report has counts as removed
[s]: its driver may not have declared it yet."""
DEBOUNCE_S: Final = 1.0
"""Delay after a changed report [s], so that several changes are sent together."""
RETRY_S: Final = 1.0
"""Pause after the first failed send to the platform connector, doubled after each further failure [s].
The pause is multiplied by a random number from 0.5 to 1.5."""
RETRY_MAX_S: Final = 60.0
"""Longest pause after failed sends to the platform connector, before the random factor [s]."""
DEVICES_FILE: Final = "nvsentinel-devices.json"
"""File in the state directory with the devices whose last event to NVSentinel was about a fault."""
DEVICES_BYTES: Final = 1 << 20
"""Largest accepted size of DEVICES_FILE [bytes]."""
IDLE_S: Final = 3600.0
"""Longest wait of the publisher's thread for a changed report [s]."""

log = get_logger(__name__)


class _SentHealth(NamedTuple):
    """Health of a device that was last sent to NVSentinel's platform connector."""

    device: DeviceHealth
    facts: tuple[object, ...]
    at_ns: int
    """Monotonic time at which it was sent; of a restored device that of the agent's start [ns]."""
    node: str
    """Name of the Node in the event; in a former run of the agent it may have been another one."""
    is_restored: bool = False
    """True: a former run of the agent sent it, and the device was not reported in this run."""


class _SavedDevice(msgspec.Struct):
    """Device of a file of :data:`DEVICES_FILE`: its last event to NVSentinel was about a fault."""

    pool: str
    device: str
    kind: str
    driver: str
    attributes: tuple[tuple[str, str], ...]
    node: str = ""
    """Name of the Node in the event; empty: not stored, so the name that the Node has now."""


class SentinelPublisher:
    """Publisher of devices' health to NVSentinel's platform connector. Thread-safe, except :meth:`step`."""

    def __init__(
        self,
        socket: Path,
        node: str,
        *,
        remediate: bool,
        state_dir: Path | None = None,
        clock: Callable[[], Instant] = read_clocks,
        jitter: Callable[[], float] = random_fraction,
    ) -> None:
        """Create the publisher; nothing is sent yet. Blocks on the disk.

        Args:
            socket: Socket of the platform connector.
            node: Name of the Node.
            remediate: True: NVSentinel may act on the events. False: it stores them only.
            state_dir: Directory of DEVICES_FILE; None: faulty devices are not stored.
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
        self._seen: object = None
        self._is_changed = False
        self._stopping = False
        # --- used by the thread only ---
        self._path = None if state_dir is None else state_dir / DEVICES_FILE
        self._saved_rows: list[_SavedDevice] | None = None
        self._unsaved = LogRateLimiter()
        self._sent = {DeviceRef(*sent.device.key): sent for sent in self._load_devices()}
        self._unknown_ns: dict[DeviceRef, int] = {}
        """Monotonic time since which each Unknown device is Unknown [ns]."""
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

    def handle_report(self, report: Report) -> None:
        """Store a published report; changed devices or unlisted sources wake the thread. Never blocks."""
        if report.starting:
            return
        with self._changed:
            self._report = report
            seen = unlisted_sources(report.sources), list(map(_facts, report.devices))
            if seen != self._seen:
                self._seen, self._is_changed = seen, True
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
        unknown = [ref for ref, device in found.items() if device.health is Health.UNKNOWN]
        self._unknown_ns = {ref: self._unknown_ns.get(ref, now.mono_ns) for ref in unknown}
        changed = self._changed_devices(found, is_listed=not unlisted_sources(report.sources))
        due = {ref: device for ref, device in changed.items() if self._wait_s(ref, found, now) <= 0}
        if due:
            try:
                self._send(due, found, now)
            except AgentUnreachable as error:
                return self._handle_failure(str(error), now)
            except Exception:  # a bug here must end neither the thread nor the agent
                if self._error != "internal error":
                    log.exception(
                        "nvsentinel: health events not sent: unexpected error, see the traceback; will retry"
                    )
                return self._handle_failure("internal error", now)
            self._handle_success(due, found, now)
        rest = changed.keys() - due.keys()
        return min((self._wait_s(ref, found, now) for ref in rest), default=IDLE_S)

    def _changed_devices(
        self, found: Mapping[DeviceRef, DeviceHealth], *, is_listed: bool
    ) -> dict[DeviceRef, DeviceHealth]:
        """Return the devices whose health differs from that sent last, and the removed devices.

        Host devices do not count as removed while a source has not listed its devices yet.
        """
        changed = {
            ref: device
            for ref, device in found.items()
            if ref not in self._sent or self._sent[ref].facts != _facts(device)
        }
        for ref in self._sent.keys() - found.keys():
            if ref.driver or is_listed:
                changed[ref] = self._sent[ref].device
        return changed

    def _wait_s(self, ref: DeviceRef, found: Mapping[DeviceRef, DeviceHealth], now: Instant) -> float:
        """Return the time until an event about a device may be sent [s]; 0 or less: now."""
        sent, due_ns = self._sent.get(ref), now.mono_ns
        if sent is not None and not (sent.is_restored and ref in found):
            due_ns = sent.at_ns + round((MISSING_S if sent.is_restored else DEVICE_S) * NS)
        if ref in self._unknown_ns:
            due_ns = max(due_ns, self._unknown_ns[ref] + UNKNOWN_NS)
        return (due_ns - now.mono_ns) / NS

    def _send(
        self, due: Mapping[DeviceRef, DeviceHealth], found: Mapping[DeviceRef, DeviceHealth], now: Instant
    ) -> None:
        """Send the events about devices, with healthy events about removed devices and former hardware.

        A GPU that a driver declares is two devices of one hardware. While one of them is faulty, healthy
        events about the other lack the hardware, because they would end the fault.
        """
        devices = [device for ref, device in due.items() if ref in found and _is_faulty(device)]
        devices += [
            sent.device
            for ref, sent in self._sent.items()
            if ref not in due and (sent.is_restored or (ref in found and _is_faulty(sent.device)))
        ]
        faulty = {entity for device in devices for entity in entities_of(device)}
        events = []
        for ref, device in sorted(due.items()):
            states, before = [(device, self._node)] if ref in found else [], self._sent.get(ref)
            if before and (before.node != self._node or not states or _is_replaced(before.device, device)):
                text = "the device is no longer reported with this name and hardware"
                former = before.device._replace(
                    health=Health.HEALTHY, severity=Severity.OK, causes=(), message=text
                )
                states.insert(0, (former, before.node))
            for state, node in states:
                is_shared = node == self._node and not _is_faulty(state)
                entities = [entity for entity in entities_of(state) if not (is_shared and entity in faulty)]
                if entities:
                    events.append(health_event(state, node, entities, now.wall_s, remediate=self._remediate))
        asyncio.run(send_health_events(self._socket, events))

    def _handle_success(
        self, due: Mapping[DeviceRef, DeviceHealth], found: Mapping[DeviceRef, DeviceHealth], now: Instant
    ) -> None:
        self._events += len(due)
        for ref, device in due.items():
            if ref in found:
                attributes = dict(self._sent[ref].device.attributes) if ref in self._sent else {}
                attributes |= dict(device.attributes)  # a lost GPU may lack its UUID for now
                sent = device._replace(attributes=tuple(attributes.items()))
                self._sent[ref] = _SentHealth(sent, _facts(device), now.mono_ns, self._node)
            else:
                del self._sent[ref]
        self._save_devices()
        if self._error:
            log.info(
                "nvsentinel: platform connector at %s answers after %d failed calls",
                self._socket,
                self._streak,
            )
        self._error, self._streak = "", 0
        self._status = SentinelStatus(str(self._socket), self._events, self._failures)

    def _load_devices(self) -> list[_SentHealth]:
        """Return the devices in the file of a former run, as healthy; none if it is absent or unusable."""
        if self._path is None:
            return []
        try:
            data = read_bounded(self._path, DEVICES_BYTES).data
            found = msgspec.json.decode(data, type=list[_SavedDevice])
        except (ReadError, ValueError, RecursionError):
            return []
        at = self._clock()
        return [
            _SentHealth(
                DeviceHealth(
                    row.pool, row.device, row.kind, Health.HEALTHY, Severity.OK, "", at, at, 0,
                    attributes=row.attributes, driver=row.driver,
                ),
                (), at.mono_ns, row.node or self._node, is_restored=True,
            )
            for row in found
        ]  # fmt: skip

    def _save_devices(self) -> None:
        """Write the devices whose last event was about a fault, if they changed. Blocks on the disk."""
        rows = [
            _SavedDevice(*sent.device[:3], sent.device.driver, sent.device.attributes, sent.node)
            for _, sent in sorted(self._sent.items())
            if sent.is_restored or _is_faulty(sent.device)
        ]
        if self._path is None or rows == self._saved_rows:
            return
        try:
            temporary = self._path.with_name(f".{self._path.name}.new")
            write_and_rename(self._path, msgspec.json.encode(rows), temporary=temporary, mode=0o600)
            self._saved_rows = rows
        except OSError as error:
            if self._unsaved.tick():
                log.warning(
                    "nvsentinel: file of faulty devices %s: not written: %s; after a restart NVSentinel "
                    "keeps the fault of a GPU that is replaced meanwhile",
                    self._path,
                    error.strerror,
                )

    def _handle_failure(self, error: str, now: Instant) -> float:
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
    """Return the values of a device whose change causes a health event; a changed message causes none."""
    return (
        device.key,
        device.health,
        device.severity,
        tuple(cause.code for cause in device.causes),
        device.repair,
        tuple(entities_of(device)),
    )


def _is_faulty(device: DeviceHealth) -> bool:
    return device.severity > Severity.INFO or device.health is not Health.HEALTHY


def _is_replaced(before: DeviceHealth, device: DeviceHealth) -> bool:
    """Return whether a device has another identifier of its hardware; a missing identifier is ignored."""
    known = dict(entities_of(device))
    return any(known.get(kind, value) != value for kind, value in entities_of(before))
