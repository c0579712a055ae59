"""Recorder of Kubernetes events, which combines, counts and limits them as client-go does.

Events of one object, type and reason with many different messages are combined into one event; an event with
the same message is counted up; and one object gets 25 events at once and one in five minutes afterwards. All
limits use the monotonic clock.
"""

from collections import OrderedDict
from typing import Any, Final, NamedTuple, TypeVar

from agent.errors import ApiError
from agent.model.time import NS, Instant, rfc3339
from agent.serve.kube_api.api_server import NOT_FOUND, ApiServer, path_of

SOURCE: Final = "drahealth"
"""Name of the component that reports the events, in their ``source``."""
COMBINE_MESSAGES: Final = 10
"""Number of different messages from which events of one object, type and reason are combined into one."""
COMBINE_S: Final = 600.0
"""Time without an event of one object, type and reason after which its messages are forgotten [s]."""
COMBINED: Final = "(combined from similar events): "
OBJECT_BURST: Final = 25
"""Number of events that may be written about one object at once."""
OBJECT_EVENT_S: Final = 300.0
"""Time after which one further event may be written about an object [s]."""
NODE_BURST: Final = 50
"""Number of events that may be written about all objects of the node at once."""
NODE_EVENT_S: Final = 3.0
"""Time after which one further event may be written about any object of the node [s]."""
CACHE_MAX: Final = 4096
"""Largest number of objects, of combined events and of counted events that are remembered."""
MESSAGE_CHARS: Final = 1024
"""Longest message of an event [characters]."""

K = TypeVar("K")
V = TypeVar("V")


class EventObject(NamedTuple):
    """Kubernetes object, the Node or a pod, that an event concerns."""

    kind: str
    name: str
    uid: str
    namespace: str = ""
    """Namespace of the object; empty: it has none, and its events are in ``default``."""


class DeviceEvent(NamedTuple):
    """Kubernetes event to record: its object, type, reason and message."""

    object: EventObject
    type: str
    """Type of the Kubernetes event: ``Normal`` or ``Warning``."""
    reason: str
    message: str


class TokenBucket:
    """Rate limit of events: a burst of tokens at once, and one further token per interval."""

    def __init__(self, burst: int, interval_s: float) -> None:
        self._burst, self._interval_ns = burst, round(interval_s * NS)
        self._tokens = float(burst)
        self._filled_ns: int | None = None

    def has_token(self, now: Instant) -> bool:
        """Return whether the rate limit allows an event now: a token is left."""
        if self._filled_ns is not None:
            gained = (now.mono_ns - self._filled_ns) / self._interval_ns
            self._tokens = min(float(self._burst), self._tokens + gained)
        self._filled_ns = now.mono_ns
        return self._tokens >= 1.0

    def take(self) -> None:
        """Take a token for an event that was written, after :meth:`has_token`."""
        self._tokens -= 1.0


class _Written(NamedTuple):
    """Event that was written to the API server, by its path."""

    path: str
    times: int
    """Number of occurrences of the event, its ``count``."""


class _Messages(NamedTuple):
    """Different messages of the events of one object, type and reason, and time of the newest."""

    texts: frozenset[str]
    at_ns: int


class EventRecorder:
    """Recorder of the Kubernetes events of one node, with limits on their rate. For one thread."""

    def __init__(self, api: ApiServer, node: str) -> None:
        """Create a recorder of the node with this name; the API server is not called yet."""
        self.sent = 0
        """Number of events and of their repetitions that were written."""
        self._api = api
        self._node = node
        self._all = TokenBucket(NODE_BURST, NODE_EVENT_S)
        self._objects: OrderedDict[EventObject, TokenBucket] = OrderedDict()
        self._messages: OrderedDict[DeviceEvent, _Messages] = OrderedDict()
        self._written: OrderedDict[DeviceEvent, _Written] = OrderedDict()

    def may_record(self, obj: EventObject, now: Instant) -> bool:
        """Return whether the rate limits of the object and of the node allow an event now."""
        bucket = _remembered(self._objects, obj)
        return (bucket is None or bucket.has_token(now)) and self._all.has_token(now)

    def record(self, event: DeviceEvent, now: Instant) -> None:
        """Write an event, or raise the count of an earlier event.
        Blocks up to 10 s for the connect and each read.

        Called only after :meth:`may_record`.

        Raises:
            ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`. The limits count successes
            only.
        """
        bucket = _remembered(self._objects, event.object)
        if bucket is None:
            bucket = TokenBucket(OBJECT_BURST, OBJECT_EVENT_S)
            bucket.has_token(now)
            _remember(self._objects, event.object, bucket)
        key, event = self._combined(event._replace(message=event.message[:MESSAGE_CHARS]), now)
        written = _remembered(self._written, key)
        if written is not None and self._try_repeat(written, event, now):
            _remember(self._written, key, written._replace(times=written.times + 1))
        else:
            _remember(self._written, key, _Written(self._create(event, now), 1))
        bucket.take()
        self._all.take()
        self.sent += 1

    def _combined(self, event: DeviceEvent, now: Instant) -> tuple[DeviceEvent, DeviceEvent]:
        """Return the event under which repetitions are counted, and the event to write.

        Both are ``event``, unless its object, type and reason had many different messages: those are counted
        as one event without a message, and the written message says so.
        """
        group = event._replace(message="")
        known = _remembered(self._messages, group)
        if known is None or now.mono_ns - known.at_ns > COMBINE_S * NS:
            known = _Messages(frozenset(), now.mono_ns)
        texts = known.texts if len(known.texts) >= COMBINE_MESSAGES else known.texts | {event.message}
        _remember(self._messages, group, _Messages(texts, now.mono_ns))
        if len(texts) < COMBINE_MESSAGES:
            return event, event
        return group, event._replace(message=f"{COMBINED}{event.message}"[:MESSAGE_CHARS])

    def _try_repeat(self, written: _Written, event: DeviceEvent, now: Instant) -> bool:
        """Raise the count of an event that was written; return False if the API server has it no longer."""
        change = {
            "count": written.times + 1,
            "lastTimestamp": rfc3339(now.wall_s),
            "message": event.message,
        }
        try:
            self._api.call("PATCH", written.path, change)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return False
        return True

    def _create(self, event: DeviceEvent, now: Instant) -> str:
        """Create an event at the API server; return its path."""
        obj, stamp = event.object, rfc3339(now.wall_s)
        namespace = obj.namespace or "default"
        name = f"{obj.name[:220].rstrip('-.')}.{max(0, round(now.wall_s * NS)):x}.{self.sent:x}"
        reference = {"apiVersion": "v1", "kind": obj.kind, "name": obj.name, "uid": obj.uid}
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": reference | ({"namespace": obj.namespace} if obj.namespace else {}),
            "type": event.type,
            "reason": event.reason,
            "message": event.message,
            "source": {"component": SOURCE, "host": self._node},
            "reportingComponent": SOURCE,
            "reportingInstance": self._node,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        collection = path_of("api", "v1", "namespaces", namespace, "events")
        self._api.call("POST", collection, body)
        return f"{collection}{path_of(name)}"


def _remembered(cache: "OrderedDict[K, V]", key: K) -> V | None:
    """Return the value of a key in a cache, and mark the key as recently used; None: no such key."""
    if key in cache:
        cache.move_to_end(key)
    return cache.get(key)


def _remember(cache: "OrderedDict[K, V]", key: K, value: V) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > CACHE_MAX:
        cache.popitem(last=False)
