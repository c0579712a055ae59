"""Pod events, as client-go counts, combines and rate-limits them before it sends them to the API server.

It follows ``client-go/tools/record/events_cache.go`` with its defaults, which the kubelet uses. client-go
keeps the 4,096 keys used last; this copy keeps all.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kubelet.history import EventWritten, History
from kubelet.pace import NS, Pace

SIMILAR: Final = 10
"""The number of different texts with one reason from which on client-go combines them."""
SIMILAR_NS: Final = 600 * NS
BURST: Final = 25
"""The limit for one object: 25 events at once, then one every five minutes, ``Pace.event_refill_s``."""
LIFE_NS: Final = 3600 * NS
"""The API server deletes an event one hour after the last write."""


class Event(NamedTuple):
    """An event as the API server stores it."""

    pod: str
    """The uid of the pod that the event is about."""
    reason: str
    message: str
    count: int
    first_ns: int
    last_ns: int


class EventStore:
    """The API server's events. They survive a restart of the kubelet."""

    def __init__(self, now_ns: Callable[[], int], history: History) -> None:
        self._now_ns = now_ns
        self._history = history
        self._lock = threading.Lock()
        self._events: dict[object, Event] = {}

    def write(self, key: object, event: Event) -> None:
        """Create or replace an event."""
        with self._lock:
            self._events[key] = event
        self._history.add(EventWritten(event.pod, event.reason, event.message, event.count))

    def all(self) -> list[Event]:
        """Return the events that have not expired, in the order of their creation."""
        with self._lock:
            now_ns = self._now_ns()
            return [event for event in self._events.values() if now_ns - event.last_ns <= LIFE_NS]


@dataclass(slots=True)
class _Similar:
    texts: set[str] = field(default_factory=set)
    last_ns: int = 0


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_ns: int


class Recorder:
    """The kubelet's event recorder. A restart of the kubelet resets its counts."""

    def __init__(self, store: EventStore, now_ns: Callable[[], int], pace: Pace) -> None:
        self._store = store
        self._now_ns = now_ns
        self._refill_ns = pace.event_refill_s * NS
        self._lock = threading.Lock()
        self._similar: dict[tuple[str, str], _Similar] = {}
        self._counts: dict[tuple[str, ...], tuple[int, int]] = {}
        self._buckets: dict[str, _Bucket] = {}

    def warn(self, pod: str, reason: str, message: str) -> None:
        """Record a Warning event for a pod."""
        with self._lock:
            now_ns = self._now_ns()
            key, message = self._combine_event(pod, reason, message, now_ns)
            count, first_ns = self._counts.get(key, (0, now_ns))
            self._counts[key] = count + 1, first_ns  # events that are not written count too
            if self._may_write(pod, now_ns):
                event = Event(pod, reason, message, count + 1, first_ns, now_ns)
                self._store.write((self, key), event)  # a restarted kubelet creates new events

    def _combine_event(self, pod: str, reason: str, message: str, now_ns: int) -> tuple[tuple[str, ...], str]:
        similar = self._similar.setdefault((pod, reason), _Similar())
        if now_ns - similar.last_ns > SIMILAR_NS:
            similar.texts.clear()
        similar.texts.add(message)
        similar.last_ns = now_ns
        if len(similar.texts) < SIMILAR:
            return (pod, reason, message), message
        similar.texts.pop()
        return (pod, reason), f"(combined from similar events): {message}"

    def _may_write(self, pod: str, now_ns: int) -> bool:
        bucket = self._buckets.setdefault(pod, _Bucket(BURST, now_ns))
        bucket.tokens = min(BURST, bucket.tokens + (now_ns - bucket.filled_ns) / self._refill_ns)
        bucket.filled_ns = now_ns
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True
