"""What the fake kubelet saw and did, in order: the facts that a test asserts on."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import grpc


class Registered(NamedTuple):
    """A plugin was registered and told so."""

    driver: str
    endpoint: str
    services: tuple[str, ...]


class RegistrationFailed(NamedTuple):
    """A registration failed; it is tried again from the start, later."""

    socket: str
    error: str


class Deregistered(NamedTuple):
    """A plugin's registration socket is gone or made anew, or it could not be told of its registration."""

    driver: str
    endpoint: str


class Connected(NamedTuple):
    """The one connection to an endpoint stands."""

    driver: str
    endpoint: str


class Disconnected(NamedTuple):
    """It does not any more."""

    driver: str
    endpoint: str


class SlicesWiped(NamedTuple):
    """All ResourceSlices of a driver on this node were deleted; of all drivers where the name is empty."""

    driver: str


class StreamOpened(NamedTuple):
    """A call of NodeWatchResources was sent."""

    driver: str
    endpoint: str
    service: str


class StreamRefused(NamedTuple):
    """No call could be sent: the connection cannot be made. Clears nothing."""

    driver: str
    endpoint: str


class Message(NamedTuple):
    """A health list came."""

    driver: str
    endpoint: str
    devices: tuple[Any, ...]
    """Google's protobuf messages DeviceHealth."""


class Changed(NamedTuple):
    """The cache took something as a change: its file is written, and pods are to be told."""

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
    """At error level: neither an orderly end nor the kubelet's own."""


class Cleared(NamedTuple):
    """All that was known of a driver's devices is forgotten, and no pod is told."""

    driver: str


class PodsNotified(NamedTuple):
    """Pods are to be synced because the health of their devices changed."""

    pods: frozenset[str]


class NotificationDropped(NamedTuple):
    """They will not be: 100 notifications wait already."""

    pods: frozenset[str]


class Called(NamedTuple):
    """NodePrepareResources or NodeUnprepareResources has ended."""

    method: str
    driver: str
    endpoint: str
    service: str
    claims: tuple[str, ...]
    """Their uids, as they stood in the request."""
    error: str
    """Of the whole call; of single claims see the response. Empty: there was none."""
    response: Any
    """Google's protobuf message, or None."""
    took_s: float


class UnprepareFailed(NamedTuple):
    """The claims of a pod that ends, or is gone, could not be unprepared; it is tried again."""

    pod: str
    error: str


class PodSynced(NamedTuple):
    """The kubelet looked at a pod, and wrote its status."""

    pod: str
    phase: str


class EventWritten(NamedTuple):
    """An event was created or counted up."""

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


class At(NamedTuple):
    """An entry, and when it was made."""

    mono_s: float
    """On the monotonic clock [s]."""
    entry: Entry


class History:
    """Every entry, oldest first. Written by the kubelet's threads and read by the test's."""

    def __init__(self) -> None:
        self._entries: list[At] = []
        self._news = threading.Condition()

    def __iter__(self) -> Iterator[Entry]:
        return iter([at.entry for at in self.timed()])

    def __len__(self) -> int:
        return len(self.timed())

    def add(self, entry: Entry) -> None:
        """Notes it."""
        with self._news:
            self._entries.append(At(time.monotonic(), entry))
            self._news.notify_all()

    def timed(self) -> list[At]:
        """All of them, with their times."""
        with self._news:
            return list(self._entries)

    def of(self, kind: type[E], *, since: int = 0) -> list[E]:
        """Those of a kind; of all entries but the first ``since``."""
        return [at.entry for at in self.timed()[since:] if isinstance(at.entry, kind)]

    def times(self, kind: type[Any]) -> list[float]:
        """When those of a kind were made, on the monotonic clock [s]."""
        return [at.mono_s for at in self.timed() if isinstance(at.entry, kind)]

    def wait(self, claim: Callable[[], E], what: str, timeout_s: float) -> E:
        """Returns what the claim gives once that is true; asked again with every entry, and now and then.

        Raises:
            AssertionError: it did not come true; with the last entries.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (found := claim()):
            if time.monotonic() > deadline_s:
                last = "\n  ".join(map(repr, list(self)[-20:]))
                raise AssertionError(f"not within {timeout_s} s: {what}; last:\n  {last}")
            with self._news:
                self._news.wait(0.01)
        return found
