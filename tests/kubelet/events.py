"""Events on pods, as client-go counts, combines and withholds them before the API server has them.

Source: ``client-go/tools/record/events_cache.go`` with its defaults, as the kubelet has it. Its caches forget
the least used of 4,096 keys; that is left out.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kubelet.history import EventWritten, History
from kubelet.pace import NS

SIMILAR: Final = 10
"""So many different texts with one reason are combined, the last of them and all that follow."""
SIMILAR_NS: Final = 600 * NS
BURST: Final = 25
REFILL_NS: Final = 300 * NS
"""Of one object: 25 at once, then one in five minutes."""
LIFE_NS: Final = 3600 * NS
"""The API server forgets an event an hour after it was last written."""


class Event(NamedTuple):
    """As the API server has it."""

    pod: str
    """The uid of the pod it is about."""
    reason: str
    message: str
    count: int
    first_ns: int
    last_ns: int


class EventStore:
    """The API server's part: outlives the kubelet."""

    def __init__(self, now_ns: Callable[[], int], history: History) -> None:
        self._now_ns = now_ns
        self._history = history
        self._lock = threading.Lock()
        self._events: dict[object, Event] = {}

    def write(self, key: object, event: Event) -> None:
        """Creates or replaces it."""
        with self._lock:
            self._events[key] = event
        self._history.add(EventWritten(event.pod, event.reason, event.message, event.count))

    def all(self) -> list[Event]:
        """Those that have not expired, in the order in which they were created."""
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
    """The kubelet's part: forgets with it what it has counted."""

    def __init__(self, store: EventStore, now_ns: Callable[[], int]) -> None:
        self._store = store
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._similar: dict[tuple[str, str], _Similar] = {}
        self._counts: dict[tuple[str, ...], tuple[int, int]] = {}
        self._buckets: dict[str, _Bucket] = {}

    def warn(self, pod: str, reason: str, message: str) -> None:
        """A Warning on that pod."""
        with self._lock:
            now_ns = self._now_ns()
            key, message = self._combined(pod, reason, message, now_ns)
            count, first_ns = self._counts.get(key, (0, now_ns))
            self._counts[key] = count + 1, first_ns  # counted, be it written or not
            if self._may_write(pod, now_ns):
                event = Event(pod, reason, message, count + 1, first_ns, now_ns)
                self._store.write((self, key), event)  # another life's events are others

    def _combined(self, pod: str, reason: str, message: str, now_ns: int) -> tuple[tuple[str, ...], str]:
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
        bucket.tokens = min(BURST, bucket.tokens + (now_ns - bucket.filled_ns) / REFILL_NS)
        bucket.filled_ns = now_ns
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True
