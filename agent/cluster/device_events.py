"""Kubernetes events that the newest report requires, about the Node and pods that use a faulty device.

The wanted events follow from the report alone, so that no queue grows while the API server is away: a fault
that came and went meanwhile has no event, and one that lasts has one. A fault that ends and returns has
another event only EVENT_S after its last one.

The module also has the recorder of Kubernetes events, which combines, counts and limits them as client-go
does.

Events of one object, type and reason with many different messages are combined into one event; an event with
the same message is counted up; and one object gets 25 events at once and one in five minutes afterwards. All
limits use the monotonic clock.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from agent.cluster.node_objects import UNKNOWN_S, device_name
from agent.devices.consumers.consumer_queries import affected_pods, health_lookup
from agent.errors import ApiError
from agent.model.claim import DeviceRef
from agent.model.claim_sources import PodRef
from agent.model.consumers import ConsumerMap
from agent.model.health import Cause, DeviceHealth, Repair, Severity
from agent.model.report import Report
from agent.model.time import NS, Instant, rfc3339
from agent.serve.kube_api.api_server import NOT_FOUND, ApiServer, path_of

SOURCE: Final = "drahealth"
"""Name of the component that reports the events, in their ``source``."""
COMBINE_MESSAGES: Final = 10
"""Number of different messages from which events of one object, type and reason are combined into one."""
COMBINE_S: Final = 600.0
"""Time without an event of one object, type and reason after which its messages are dropped [s]."""
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
    """Event that was written to the API server, identified by its path."""

    path: str
    times: int
    """Number of occurrences of the event, its ``count``."""


class _Messages(NamedTuple):
    """Different messages of the events with the same object, type and reason, and time of the newest one."""

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
        bucket = _use_cached(self._objects, obj)
        return (bucket is None or bucket.has_token(now)) and self._all.has_token(now)

    def record(self, event: DeviceEvent, now: Instant) -> None:
        """Write an event, or raise the count of an earlier event.
        Blocks up to 10 s for the connect and each read.

        Called only after :meth:`may_record`.

        Raises:
            ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`. The limits count successes
            only.
        """
        bucket = _use_cached(self._objects, event.object)
        if bucket is None:
            bucket = TokenBucket(OBJECT_BURST, OBJECT_EVENT_S)
            bucket.has_token(now)
            _remember(self._objects, event.object, bucket)
        key, event = self._combine_event(event._replace(message=event.message[:MESSAGE_CHARS]), now)
        written = _use_cached(self._written, key)
        if written is not None and self._try_repeat(written, event, now):
            _remember(self._written, key, written._replace(times=written.times + 1))
        else:
            _remember(self._written, key, _Written(self._create(event, now), 1))
        bucket.take()
        self._all.take()
        self.sent += 1

    def _combine_event(self, event: DeviceEvent, now: Instant) -> tuple[DeviceEvent, DeviceEvent]:
        """Return the event under which repetitions are counted, and the event to write.

        Both results are ``event``, unless its object, type and reason had many different messages: these are
        counted as one event without a message, and the written message begins with COMBINED.
        """
        group = event._replace(message="")
        known = _use_cached(self._messages, group)
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


def _use_cached(cache: "OrderedDict[K, V]", key: K) -> V | None:
    """Return the value of a key in a cache, and mark the key as recently used; None: no such key."""
    if key in cache:
        cache.move_to_end(key)
    return cache.get(key)


def _remember(cache: "OrderedDict[K, V]", key: K, value: V) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > CACHE_MAX:
        cache.popitem(last=False)


# --- wanted events -----------------------------------------------------------------------------------------

EVENT_S: Final = 300.0
"""Shortest time between two events about the same object, device and finding code [s]."""
UNDECIDED_S: Final = 600.0
"""Longest time for which a fault lasts while its device is missing or Unknown, or its pod is not known [s].

All three happen for a moment when the agent or a driver restarts.
"""
RECOVERED: Final = ""
"""Value in place of a finding code, for events about the recovery of a device."""
REASONS: Final = {
    Severity.UNHEALTHY: "DeviceUnhealthy",
    Severity.UNKNOWN: "DeviceUnknown",
    Severity.DEGRADED: "DeviceDegraded",
}
"""Reason of a Kubernetes event about a fault, by the severity of the fault, worst first."""
RECOVERED_REASON: Final = "DeviceRecovered"
POD_SEVERITIES: Final = frozenset({Severity.UNHEALTHY, Severity.UNKNOWN})
"""Severities of faults that have an event on the pods, too.

A degraded device still works, so its faults have an event on the Node only.
"""


class EventKey(NamedTuple):
    """Identity of the events about one fault of a device on one object, which is the Node or a pod."""

    object: EventObject
    device: DeviceRef
    code: str


class WantedEvent(NamedTuple):
    """Kubernetes event that is due, with the identity of the fault that it reports."""

    key: EventKey
    event: DeviceEvent


class _Sent(NamedTuple):
    """Time of the last event about a fault on one object, and whether the fault still exists."""

    at_ns: int
    lasts: bool
    """True: the fault has been in every report since the event. False: it has ended."""


class SavedEvent(NamedTuple):
    """Event about a fault that was written to the API server, as the state file has it."""

    key: EventKey
    at_wall_s: float
    """Time at which the event was written [s since 1970]."""
    lasts: bool
    """True: the fault has been in every report since the event. False: it has ended."""


class SentDeviceEvents:
    """Record of the device faults about which Kubernetes events were written. For one thread."""

    def __init__(self) -> None:
        self._sent: dict[EventKey, _Sent] = {}
        self._announced: set[DeviceRef] = set()
        """Devices that have had an event about a fault on the Node, and none about their recovery."""
        self._undecided_ns: dict[EventKey, int] = {}
        """Monotonic time since which it is open whether a fault that had an event has ended [ns]."""
        self._unknown_ns: dict[EventKey, int] = {}
        """Monotonic time since which a device has been Unknown, by identity of the fault [ns]."""

    def restore(self, saved: Iterable[SavedEvent], now: Instant) -> None:
        """Continue with the events of the agent's former run, so that a restart repeats none."""
        for key, at_wall_s, lasts in saved:
            age_ns = round(min(max(now.wall_s - at_wall_s, 0.0), EVENT_S) * NS)
            self._sent[key] = _Sent(now.mono_ns - age_ns, lasts)
            if lasts and key.code != RECOVERED and key.object.kind == "Node":
                self._announced.add(key.device)

    def events_to_save(self, now: Instant) -> list[SavedEvent]:
        """Return the events to save, with which :meth:`restore` continues after a restart of the agent."""
        return [
            SavedEvent(key, now.wall_s - (now.mono_ns - sent.at_ns) / NS, sent.lasts)
            for key, sent in self._sent.items()
        ]

    def due(
        self,
        report: Report,
        consumers: ConsumerMap | None,
        served: Container[str],
        node: EventObject,
        now: Instant,
    ) -> list[WantedEvent]:
        """Return the events that are due, the most urgent first.

        Args:
            report: Newest report.
            consumers: Pods that use devices; None: not known.
            served: Drivers whose devices' health the agent serves to the kubelet.
            node: The Node.
            now: Current time.
        """
        wanted = {event.key: event for event in _wanted_events(report, consumers, served, node)}
        present = frozenset(wanted)
        unknown = {key for key, due in wanted.items() if due.event.reason == REASONS[Severity.UNKNOWN]}
        self._unknown_ns = {key: self._unknown_ns.get(key, now.mono_ns) for key in unknown}
        for key in unknown:
            if now.mono_ns - self._unknown_ns[key] < UNKNOWN_S * NS:
                del wanted[key]
        by_device = {DeviceRef(*device.key): device for device in report.devices}
        are_pods_known = consumers is not None and not consumers.missing_sources
        self._mark_undecided(present, by_device, are_pods_known=are_pods_known, now=now)
        self._announced &= by_device.keys() | {key.device for key in self._undecided_ns}
        for ref in sorted(self._announced & by_device.keys()):
            if by_device[ref].severity <= Severity.INFO:
                text = f"{device_name(by_device[ref])} is Healthy again"
                key = EventKey(node, ref, RECOVERED)
                wanted[key] = WantedEvent(key, DeviceEvent(node, "Normal", RECOVERED_REASON, text))
        self._forget(present | wanted.keys(), now)
        return [event for key, event in wanted.items() if key not in self._sent]

    def mark_sent(self, key: EventKey, now: Instant) -> None:
        """Remember that the Kubernetes event about a fault was written, or cannot be written."""
        self._sent[key] = _Sent(now.mono_ns, lasts=True)
        if key.code == RECOVERED:
            self._announced.discard(key.device)
        elif key.object.kind == "Node":
            self._announced.add(key.device)

    def _mark_undecided(
        self,
        present: Container[EventKey],
        by_device: Mapping[DeviceRef, DeviceHealth],
        *,
        are_pods_known: bool,
        now: Instant,
    ) -> None:
        """Store since when lasting faults are undecided: the report lacks them, but they may still exist.

        The device of such a fault is missing or Unknown, or its pod is not known.
        """
        before, self._undecided_ns = self._undecided_ns, {}
        for key, sent in self._sent.items():
            if not sent.lasts or key in present or key.code == RECOVERED:
                continue
            device = by_device.get(key.device)
            is_pod_missing = key.object.kind == "Pod" and not are_pods_known
            if (
                device is None
                or device.severity is Severity.UNKNOWN
                or (is_pod_missing and device.severity in POD_SEVERITIES)
            ):
                self._undecided_ns[key] = before.get(key, now.mono_ns)

    def _forget(self, wanted: Container[EventKey], now: Instant) -> None:
        """Forget faults that have ended, once EVENT_S have passed since their last event."""
        kept = {}
        for key, sent in self._sent.items():
            since_ns = self._undecided_ns.get(key)
            is_undecided = since_ns is not None and now.mono_ns - since_ns < UNDECIDED_S * NS
            lasts = sent.lasts and (key in wanted or is_undecided)
            if lasts or now.mono_ns - sent.at_ns < EVENT_S * NS:
                kept[key] = sent._replace(lasts=lasts)
        self._sent = kept


def _wanted_events(
    report: Report, consumers: ConsumerMap | None, served: Container[str], node: EventObject
) -> Iterator[WantedEvent]:
    """Yield an event for each fault in a report that is to have one, the most urgent first."""
    users = _users(report, consumers, served) if consumers is not None else {}
    for severity in REASONS:
        for device in report.devices:
            ref = DeviceRef(*device.key)
            for cause in _faults(device, severity):
                yield _fault_event(node, ref, device, cause)
                if severity in POD_SEVERITIES:
                    for pod in users.get(ref, ()):
                        obj = EventObject("Pod", pod.name, pod.uid, pod.namespace)
                        yield _fault_event(obj, ref, device, cause)


def _faults(device: DeviceHealth, severity: Severity) -> Iterable[Cause]:
    """Return the faults (causes) of a device that have a severity, one per finding code."""
    return {cause.code: cause for cause in reversed(device.causes) if cause.severity is severity}.values()


def _users(report: Report, consumers: ConsumerMap, served: Container[str]) -> dict[DeviceRef, list[PodRef]]:
    """Return the pods that certainly use a device and have not ended, by the device's key in the report."""
    health_of: Callable[[DeviceRef], DeviceHealth | None] = health_lookup(report, served)
    users: dict[DeviceRef, list[PodRef]] = {}
    for ref in consumers.devices:
        health = health_of(ref)
        if health is None or health.severity not in POD_SEVERITIES:
            continue
        pods = (use.pod for use in affected_pods(consumers, ref) if use.is_certain and not use.pod.has_ended)
        named = dict.fromkeys(pod.ref for pod in pods if pod.ref.namespace and pod.ref.name and pod.ref.uid)
        users.setdefault(DeviceRef(*health.key), []).extend(named)
    return users


def _fault_event(obj: EventObject, ref: DeviceRef, device: DeviceHealth, cause: Cause) -> WantedEvent:
    state = cause.severity.name.capitalize()
    name = device_name(device)
    subject = name if obj.kind == "Node" else f"device {name} of this pod"
    message = f"[{cause.code}] {subject} is {state}: {cause.evidence}"
    if cause.advice:
        message += f". Advice: {cause.advice}"
    if cause.repair is not Repair.NONE:
        message += f" (repair: {cause.repair})"
    event = DeviceEvent(obj, "Warning", REASONS[cause.severity], message)
    return WantedEvent(EventKey(obj, ref, cause.code), event)
