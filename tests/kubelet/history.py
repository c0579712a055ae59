"""Observations and actions of the fake kubelet, in order. Tests assert on these entries."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import grpc


class Registered(NamedTuple):
    """A plugin was registered and notified."""

    driver: str
    endpoint: str
    services: tuple[str, ...]


class RegistrationFailed(NamedTuple):
    """A registration failed. The kubelet retries it from the start later."""

    socket: str
    error: str


class Deregistered(NamedTuple):
    """A plugin was removed: its registration socket is gone or was created again, or its notification
    failed.
    """

    driver: str
    endpoint: str


class Connected(NamedTuple):
    """The connection to an endpoint was established."""

    driver: str
    endpoint: str


class Disconnected(NamedTuple):
    """The connection to an endpoint was lost."""

    driver: str
    endpoint: str


class SlicesWiped(NamedTuple):
    """All ResourceSlices of a driver on this node were deleted. An empty name means all drivers."""

    driver: str


class StreamOpened(NamedTuple):
    """The kubelet called NodeWatchResources."""

    driver: str
    endpoint: str
    service: str


class StreamRefused(NamedTuple):
    """The kubelet could not call NodeWatchResources for lack of a connection. The cache is not cleared."""

    driver: str
    endpoint: str


class Message(NamedTuple):
    """A health list arrived."""

    driver: str
    endpoint: str
    devices: tuple[Any, ...]
    """DeviceHealth messages of Google's protobuf."""


class HealthChanged(NamedTuple):
    """A health list changed devices in the cache. The kubelet writes its file and notifies pods."""

    driver: str
    count: int
    """The number of changes, two or more for a device that the list contains twice."""


class Changed(NamedTuple):
    """A device changed in the cache."""

    driver: str
    pool: str
    device: str
    health: str
    message: str


class StreamEnded(NamedTuple):
    """A health stream ended."""

    driver: str
    endpoint: str
    code: grpc.StatusCode
    details: str
    logged: bool
    """Whether the kubelet logs it as an error, as it does when it cancels the stream itself."""


class Cleared(NamedTuple):
    """A driver's entries were removed from the cache, without notifying pods."""

    driver: str


class PodsNotified(NamedTuple):
    """Pods are queued for a sync because the health of their devices changed."""

    pods: frozenset[str]


class NotificationDropped(NamedTuple):
    """Pods were not queued for a sync, because the queue held 100 notifications."""

    pods: frozenset[str]


class Called(NamedTuple):
    """NodePrepareResources or NodeUnprepareResources ended."""

    method: str
    driver: str
    endpoint: str
    service: str
    claims: tuple[str, ...]
    """The uids of the claims in the request."""
    error: str
    """The error of the call itself, else empty. The response contains the errors of single claims."""
    response: Any
    """The protobuf message, or None."""
    took_s: float


class UnprepareFailed(NamedTuple):
    """The claims of a deleted pod could not be unprepared. The kubelet retries."""

    pod: str
    error: str


class PodSynced(NamedTuple):
    """The kubelet synced a pod and wrote its status."""

    pod: str
    phase: str


class EventWritten(NamedTuple):
    """An event was created, or its count increased."""

    pod: str
    reason: str
    message: str
    count: int


Entry = (
    Registered
    | RegistrationFailed
    | Deregistered
    | Connected
    | Disconnected
    | SlicesWiped
    | StreamOpened
    | StreamRefused
    | Message
    | HealthChanged
    | Changed
    | StreamEnded
    | Cleared
    | PodsNotified
    | NotificationDropped
    | Called
    | UnprepareFailed
    | PodSynced
    | EventWritten
)
E = TypeVar("E")


class TimedEntry(NamedTuple):
    """An entry and its time."""

    mono_s: float
    """Time on the monotonic clock [s]."""
    entry: Entry


class History:
    """All entries, oldest first. The kubelet's threads write them and the test reads them."""

    def __init__(self) -> None:
        self._entries: list[TimedEntry] = []
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[Entry]:
        return iter([timed_entry.entry for timed_entry in self.timed_entries()])

    def __len__(self) -> int:
        return len(self.timed_entries())

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        with self._changed:
            self._entries.append(TimedEntry(time.monotonic(), entry))
            self._changed.notify_all()

    def timed_entries(self) -> list[TimedEntry]:
        """Return all entries with their times."""
        with self._changed:
            return list(self._entries)

    def of(self, kind: type[E], *, since: int = 0) -> list[E]:
        """Return the entries of one type, without the first ``since`` entries of the history."""
        return [
            timed_entry.entry
            for timed_entry in self.timed_entries()[since:]
            if isinstance(timed_entry.entry, kind)
        ]

    def times(self, kind: type[Any]) -> list[float]:
        """Return the times of the entries of one type, on the monotonic clock [s]."""
        return [
            timed_entry.mono_s for timed_entry in self.timed_entries() if isinstance(timed_entry.entry, kind)
        ]

    def wait(self, condition: Callable[[], E], event: str, timeout_s: float) -> E:
        """Wait until a condition is true and return its value. It is evaluated after each entry and every
        10 ms.

        Raises:
            AssertionError: the condition did not become true in time. The text lists the last entries.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline_s:
                last = "\n  ".join(map(repr, list(self)[-20:]))
                raise AssertionError(f"not within {timeout_s} s: {event}; last:\n  {last}")
            with self._changed:
                self._changed.wait(0.01)
        return found
