"""Service of the kubelet's device health API: ``NodeWatchResources`` of v1 and v1alpha1.

A stream sends all devices first, and later only the devices that are pending (defined below). The agent ends
a stream only when it exits, because at the end of a stream the kubelet forgets the driver's health.

The module also selects the devices that each health stream must send next. This part is pure.

The kubelet keeps a device's verdict until its lease (health_check_timeout_seconds) ends. A list must not
repeat an old verdict, because that would renew the lease although no sensor was read. A device is pending for
a subscriber (an open stream) if one of three things happened since the subscriber's last list: the agent read
the device's sources again, the verdict changed, or the device was reported Unknown.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from operator import itemgetter
from typing import Any, Final, NamedTuple

import grpclib.const
import grpclib.server

from agent.model.health import DeviceHealth, Health
from agent.model.report import Report
from agent.model.time import NS
from agent.serve.grpc.codec import EmptyRequest
from agent.serve.grpc.hardened import OBSERVER_HEADER, send_message_nowait, send_shared_message
from agent.serve.grpc.idle_streams import IdleStream, IdleStreams, idle_stream
from agent.system.threads.latest_value import LatestValue

HealthListEncoder = Callable[[Sequence[DeviceHealth], int], list[bytes]]
"""Function that encodes devices as health list messages within the size limit.

Its second argument is added to each device's lease [s].
"""
DEFAULT_LEASE_S: Final = 30
"""Lease that the kubelet uses for a device whose list entry has none [s]."""
DeviceKey = tuple[str, str, str]
"""Identity of a device: driver, pool and name."""
_key_of: Final[Callable[[DeviceHealth], DeviceKey]] = itemgetter(
    *map(DeviceHealth._fields.index, ("driver", "pool", "device"))
)
"""Getter of a device's key; faster than the property ``key``, because it runs for all devices of a report."""


def devices_of_socket(report: Report, driver: str) -> Sequence[DeviceHealth]:
    """Return the devices of a report that a driver's socket serves: those that the driver declared.

    The socket of a driver that has not declared any devices serves the host's own devices.
    """
    owner = driver if driver in report.declaring else ""
    return [device for device in report.devices if device.driver == owner]


class HealthFeed:
    """Newest health of one socket's devices, with the last publication in which each device was pending.

    A publication replaces the devices by those of a new report. A device is pending in a publication if its
    sources were read again, its verdict changed, or it is Unknown.

    Publications are numbered from 1. A subscriber remembers only the number of the last publication that it
    received, 0 if none. A subscriber that skips publications still receives every verdict that is current.
    """

    def __init__(self, encode: HealthListEncoder) -> None:
        self.number = 0
        """Number of the last publication, which a subscriber remembers; 0: none."""
        self._encode = encode
        self._devices: Sequence[DeviceHealth] = ()
        self._keys: list[DeviceKey] = []
        self._numbers: list[int] = []
        """Number of the last publication in which each device was pending."""
        self._encoded: dict[tuple[int, int], tuple[bytes, ...]] = {}
        self._lease_s: float | None = None
        """Smallest lease of the devices that are not Unknown [s]; None: not computed yet."""

    def publish(self, reported: Sequence[DeviceHealth]) -> int:
        """Replace the devices by those of the next report, and return the number of this publication.

        Raises:
            ValueError: The report names a device twice; the feed is unchanged.
        """
        number, keys = self.number + 1, list(map(_key_of, reported))
        before, numbers = self._devices, self._numbers
        if keys != self._keys:
            if len(set(keys)) < len(keys):
                _, pool, name = next(key for key, count in Counter(keys).items() if count > 1)
                raise ValueError(f"health report names device {name!r} of pool {pool!r} twice")
            known = dict(zip(self._keys, zip(before, numbers, strict=True), strict=True))
            new = [known.get(key, (device, number)) for key, device in zip(keys, reported, strict=True)]
            before, numbers = [device for device, _ in new], [last for _, last in new]
        self._numbers = [
            number
            if (
                now.verified.mono_ns != was.verified.mono_ns
                or now.health is Health.UNKNOWN
                or now.message != was.message
                or now.health is not was.health
                or now.timeout_s != was.timeout_s
            )
            else last
            for now, was, last in zip(reported, before, numbers, strict=True)
        ]
        self.number, self._devices, self._keys, self._lease_s = number, reported, keys, None
        self._encoded.clear()
        return number

    def pending_messages(
        self, since_number: int, extra_lease_s: int = 0, age_s: float = 0.0
    ) -> tuple[bytes, ...]:
        """Return the encoded lists for a subscriber that last received publication ``since_number``.

        The lists hold the devices that were read again, changed or Unknown since then, in the order of the
        report. Each lease (health_check_timeout_seconds) is ``extra_lease_s`` longer. The result is empty if
        there is no such device.

        A Healthy device is left out if half of its lease has passed, ``age_s`` seconds after the evaluation
        of the report: its lease would begin again although an engine loop that runs evaluates more often.
        """
        is_recent = age_s < RECENT_S or age_s < self._smallest_lease_s() / 2
        messages = self._encoded.get((since_number, extra_lease_s)) if is_recent else None
        if messages is None:
            numbered = zip(self._devices, self._numbers, strict=True)
            devices = [device for device, number in numbered if number > since_number]
            if not is_recent:
                devices = [
                    dev for dev in devices if dev.health is not Health.HEALTHY or age_s < _lease_s(dev) / 2
                ]
            messages = tuple(self._encode(devices, extra_lease_s)) if devices else ()
            if is_recent:
                self._encoded[since_number, extra_lease_s] = messages
        return messages

    def is_current(self, age_s: float) -> bool:
        """Return whether the last report may be sent to a new stream, ``age_s`` seconds after its evaluation.

        The report may be sent until the smallest lease (validity of a verdict) ends. Later, clients would
        take the old verdicts of a hanging engine loop for new ones. Unknown devices may always be sent.
        """
        return age_s < self._smallest_lease_s()

    def _smallest_lease_s(self) -> float:
        """Return the smallest lease of the devices that are not Unknown [s]; infinite if there are none."""
        if self._lease_s is None:
            known = (device for device in self._devices if device.health is not Health.UNKNOWN)
            self._lease_s = min(map(_lease_s, known), default=inf)
        return self._lease_s

    @property
    def unknown_lease_s(self) -> float | None:
        """Smallest lease if all devices are Unknown [s]; None: a device is not Unknown, or there is none."""
        if any(device.health is not Health.UNKNOWN for device in self._devices):
            return None
        return min(map(_lease_s, self._devices), default=None)

    def is_repeatable(self, age_s: float) -> bool:
        """Return whether the last report may be sent again, ``age_s`` seconds after its evaluation.

        The report may be sent again until half of the smallest lease (validity of a verdict) has passed.
        Clients take a repeated list as proof that the engine loop runs, and a longer silence as proof that it
        hangs.
        """
        return age_s < min(map(_lease_s, self._devices), default=0) / 2


def _lease_s(device: DeviceHealth) -> int:
    return device.timeout_s or DEFAULT_LEASE_S


HealthStream = grpclib.server.Stream[Any, bytes]

METHODS: Final = (
    "/v1.DRAResourceHealth/NodeWatchResources",
    "/v1alpha1.DRAResourceHealth/NodeWatchResources",
)

RECENT_S: Final = 1.0
"""Age below half of any lease, whose minimum is 3 s [s]."""
EXTRA_LEASE_S: Final = 2
"""Time that is added to the leases of every second stream [s]. It is not 1, because the leases of a delayed
report already differ by a second from those of the report before."""

REPEAT_S: Final = (0.1, 1.0)
"""Times after the end of a health stream at which the other streams get all devices again [s].

The kubelet forgets a driver's health when the stream of one instance ends, possibly a moment after that
stream's end here.
"""


class HealthPublisher:
    """Task that publishes each new report to the health streams of every driver's socket.

    The thread that publishes a report also sends it, at once, to the streams that are lent to it
    (``idle_streams.py``). The event loop sends it to all others.
    """

    def __init__(
        self, latest: LatestValue[Report], encode: HealthListEncoder, drivers: Sequence[str]
    ) -> None:
        self._latest = latest
        self._lock = threading.RLock()
        self._published = 0
        """Version of the last report that was published to the streams."""
        self._subscribers = {driver: HealthSubscribers(encode, self._lock) for driver in drivers}

    def subscribers_of(self, driver: str) -> "HealthSubscribers":
        """Return the open health streams of one driver's socket."""
        return self._subscribers[driver]

    async def run(self) -> None:
        """Publish each new report to the health streams until cancelled.

        A report whose devices are all Unknown can be the last one, that of a failed core. So it is published
        again after half of its lease without a new report.

        Raises ValueError if a report names a device twice.
        """
        with self._latest.observed_by(self._publish_at_once):
            version, report = await self._latest.wait_newer(0)
            while True:
                self._publish(version, report)
                for subscribers in self._subscribers.values():
                    subscribers.send_to_waiting()
                leases = [lease for stream in self._subscribers.values() if (lease := stream.unknown_lease_s)]
                try:
                    async with asyncio.timeout(min(leases) / 2 if leases else None):
                        version, report = await self._latest.wait_newer(version)
                except TimeoutError:
                    self._publish(version, report, is_repeat=True)

    def _publish(self, version: int, report: Report, *, is_repeat: bool = False) -> None:
        """Publish a report to the streams, and send it on those that are lent, unless this was done before.
        Thread-safe."""
        with self._lock:
            if version > self._published or (is_repeat and version == self._published):
                for driver, subscribers in self._subscribers.items():
                    subscribers.publish(devices_of_socket(report, driver), report.at.mono_ns)
                self._published = version

    def _publish_at_once(self, version: int, report: Report) -> None:
        """Publish a report in the thread that publishes it, unless the event loop is busy with the streams.

        The event loop, which is woken next, publishes the report otherwise, and raises what fails here.
        """
        if self._lock.acquire(blocking=False):
            try:
                with suppress(Exception):
                    self._publish(version, report)
            finally:
                self._lock.release()


class HealthSubscribers:
    """Health streams of one socket, and the devices that each stream must send next.

    Used only in the event loop, except :meth:`publish`.

    A client that reads slowly skips lists, and delays no other stream.
    """

    def __init__(self, encode: HealthListEncoder, lock: "threading.RLock | None" = None) -> None:
        """Create an empty set of streams; ``lock`` guards what two threads use."""
        self._feed = HealthFeed(encode)
        self._lock = lock or threading.RLock()
        self._lent = IdleStreams(self._lock)
        self._waiting: dict[HealthSubscriber, asyncio.Future[None]] = {}
        self._muted = False
        self._resend_count = 0
        self._evaluated_ns = 0
        self.lists = 0
        """Number of device lists sent on all streams of the socket."""
        self.sent_bytes = 0
        """Size of the device lists sent on all streams of the socket [bytes]."""

    def publish(self, devices: Sequence[DeviceHealth], evaluated_ns: int) -> None:
        """Replace the devices by those of a new report, and send the changed ones on all lent streams.

        Devices that were read again or are Unknown count as changed. :meth:`send_to_waiting` sends them on
        all other streams. Thread-safe.

        Args:
            devices: Devices of the report.
            evaluated_ns: Monotonic time of the report [ns]; the report may be published later.

        Raises:
            ValueError: A device appears twice.
        """
        with self._lock:
            since, number = self._feed.number, self._feed.publish(devices)
            self._evaluated_ns = evaluated_ns
            if self._muted or not self._lent.table:
                return
            age_s = self._age_s()
            for extra_lease_s in (0, EXTRA_LEASE_S):
                if not self._lent.table.has_group(extra_lease_s):
                    continue
                messages = self._feed.pending_messages(since, extra_lease_s, age_s)
                if len(messages) <= 1:
                    message = messages[0] if messages else b""
                    count = self._lent.table.send(message, group=extra_lease_s, since=since, number=number)
                    if message:
                        self.lists += count
                        self.sent_bytes += count * len(message)

    @property
    def unknown_lease_s(self) -> float | None:
        """Smallest lease if all devices are Unknown [s]; None: a device is not Unknown, or there is none."""
        with self._lock:
            return self._feed.unknown_lease_s

    def mute(self) -> None:
        """Send no devices on any stream until :meth:`resend_all`; the streams stay open."""
        with self._lock:
            self._muted = True

    def resend_all(self) -> None:
        """Send all devices again on every stream, and end the effect of :meth:`mute`."""
        with self._lock:
            self._muted = False
            self._resend_count += 1
        self._send_to(tuple(self._waiting))

    def repeat_fresh(self) -> None:
        """Send all devices again on every stream, unless streams are muted or the last report is too old."""
        with self._lock:
            is_repeatable = not self._muted and self._feed.is_repeatable(self._age_s())
        if is_repeatable:
            self.resend_all()

    def _age_s(self) -> float:
        return (time.monotonic_ns() - self._evaluated_ns) / NS

    def send_to_waiting(self) -> None:
        """Send the devices of the last report on the streams that have not got them yet."""
        with self._lock:
            if self._muted:
                return
            number = self._feed.number
            if len(self._lent.table) == len(self._waiting) and not self._lent.table.count_behind(number):
                return
        self._send_to([stream for stream in self._waiting if not stream.is_lent or stream.is_behind(number)])

    def _send_to(self, subscribers: "Sequence[HealthSubscriber]") -> None:
        for subscriber in subscribers:
            subscriber.take_back()
            wake = self._waiting[subscriber]
            if self._send_at_once(subscriber):
                self._lend(subscriber)
            elif not wake.done():
                wake.set_result(None)

    async def serve(self, subscriber: "HealthSubscriber") -> None:
        """Send a stream its changed devices until cancelled.

        Devices that were read again or are Unknown count as changed.
        """
        while True:
            pending = self._pending_lists(subscriber)
            if pending.messages is None:
                await self._wait_pending(subscriber)
                continue
            for message in pending.messages:
                subscriber.has_sent = True
                await send_shared_message(subscriber.stream, message, pending.messages)
                self._count(message)
                await asyncio.sleep(0)  # a peer that reads everything at once must not occupy the loop
            subscriber.number, subscriber.resend_count = pending.number, pending.resend_count
            if self._is_current(subscriber):
                await self._wait_pending(subscriber)

    def _count(self, message: bytes) -> None:
        with self._lock:
            self.lists += 1
            self.sent_bytes += len(message)

    def _is_current(self, subscriber: "HealthSubscriber") -> bool:
        """Return whether a stream was sent the last report, and all devices as often as was required."""
        with self._lock:
            return (subscriber.number, subscriber.resend_count) == (self._feed.number, self._resend_count)

    def _pending_lists(self, subscriber: "HealthSubscriber") -> "PendingLists":
        """Return the lists that a stream must send now."""
        with self._lock:
            number, resend_count = self._feed.number, self._resend_count
            messages: tuple[bytes, ...] | None = ()
            if not self._muted:
                since = subscriber.number if subscriber.resend_count == resend_count else 0
                age_s = self._age_s()
                messages = None
                if since or self._feed.is_current(age_s):
                    messages = self._feed.pending_messages(since, subscriber.extra_lease_s, age_s)
            return PendingLists(number, resend_count, messages)

    async def _wait_pending(self, subscriber: "HealthSubscriber") -> None:
        """Wait until a stream has devices that could not be sent at once."""
        wake = self._waiting[subscriber] = asyncio.get_running_loop().create_future()
        self._lend(subscriber)
        try:
            await wake
        finally:
            subscriber.take_back()
            del self._waiting[subscriber]

    def _lend(self, subscriber: "HealthSubscriber") -> None:
        """Lend a waiting stream to the thread that publishes reports, if it was sent the last report."""
        with self._lock:
            if subscriber.number and self._is_current(subscriber):
                subscriber.lend(self._lent)

    def _send_at_once(self, subscriber: "HealthSubscriber") -> bool:
        """Send the devices that a stream must send if its client's flow control window has room.

        Returns True if no device of the last report remains to be sent.
        """
        pending = self._pending_lists(subscriber)
        messages = pending.messages
        if messages is None:
            return True
        if len(messages) > 1 or (messages and not send_message_nowait(subscriber.stream, messages[0])):
            return False
        if messages:
            subscriber.has_sent = True
            self._count(messages[0])
        subscriber.number, subscriber.resend_count = pending.number, pending.resend_count
        return True


class PendingLists(NamedTuple):
    """Lists that a stream must send, and the publication up to which it is current afterwards."""

    number: int
    """Publication up to which the stream is current when the lists are sent."""
    resend_count: int
    """Number of times that all devices were sent again, when the lists are sent."""
    messages: tuple[bytes, ...] | None
    """Encoded lists; None: the stream must send all devices, but the last report is too old; the next report
    has them."""


class HealthSubscriber:
    """Health stream, and the number of the last published report that it sent in full; 0: none."""

    def __init__(self, stream: HealthStream, extra_lease_s: int = 0, is_observer: bool = False) -> None:
        """Create the subscriber of a stream, which sends each lease (validity) `extra_lease_s` longer [s]."""
        self.stream = stream
        self.extra_lease_s = extra_lease_s
        self.is_observer = is_observer
        """Whether the request has :data:`OBSERVER_HEADER`: the client is not the kubelet."""
        self.has_sent = False
        """Whether a list was sent, or its sending has begun."""
        self.number = 0
        self.resend_count = 0
        self._idle: IdleStream | None = None

    @property
    def is_lent(self) -> bool:
        """True while the thread that publishes reports may send on the stream."""
        return self._idle is not None and self._idle.is_lent

    def is_behind(self, number: int) -> bool:
        """Return whether a lent stream has not got a publication in full."""
        return self._idle is not None and self._idle.is_behind(number)

    def lend(self, streams: IdleStreams) -> None:
        """Lend the stream to the thread that publishes reports, if no data wait on its connection."""
        if self._idle is None:
            self._idle = idle_stream(streams, self.stream, self, self.extra_lease_s)
        if self._idle is not None:
            self._idle.lend()

    def take_back(self) -> None:
        """Take the stream back if it is lent."""
        if self._idle is not None:
            self._idle.take_back()

    def mark_sent(self, number: int, lists: int) -> None:
        """Note that the stream got publication ``number`` and ``lists`` lists while it was lent."""
        self.number = number
        self.has_sent = self.has_sent or lists > 0


class HealthService:
    """Health service of one socket, for v1 and v1alpha1, whose encoded messages are identical.

    After a crash of the kubelet, the kubelet loads its last verdicts, finds them expired, and shows Unknown.
    If the first list of the new stream equals the last list of the stream before, the kubelet sees no change,
    and its pods stay Unknown until their next sync. So each stream has other leases
    (health_check_timeout_seconds) than the stream that ended last: with or without :data:`EXTRA_LEASE_S`, for
    the whole stream, because a change of the lease would sync every pod again. For the same reason it has the
    leases of a stream that is still open, such as that of the driver's other instance in a rolling update:
    the kubelet has one record for both. So all open streams have the same leases, and a kubelet whose stream
    is open has not crashed since it opened, even if nothing was sent on it yet. Streams of observers do not
    count if their request has :data:`OBSERVER_HEADER`; other clients than the kubelet should send it.
    """

    def __init__(self, subscribers: HealthSubscribers, *, repeats_after_end: bool = False) -> None:
        """Create the service of one socket.

        Args:
            subscribers: Streams of the socket.
            repeats_after_end: Whether the remaining streams get all devices again when one has ended. Set it
                for a socket whose streams belong to instances of one driver.
        """
        self._open: list[HealthSubscriber] = []
        self.subscribers = subscribers
        """Open health streams of the socket, with counts of the lists that they were sent."""
        self._extra_lease_s = 0
        """Time that is added to the leases of the next stream, unless a stream of the kubelet is open [s]."""
        self._repeats_after_end = repeats_after_end
        self._repeats_left = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def streams(self) -> int:
        """Number of open health streams."""
        return len(self._open)

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """Return the handlers of the health API's methods by gRPC path. They send encoded messages."""
        handler = grpclib.const.Handler(
            self._watch, grpclib.const.Cardinality.UNARY_STREAM, EmptyRequest, bytes
        )
        return dict.fromkeys(METHODS, handler)

    async def _watch(self, stream: HealthStream) -> None:
        await stream.recv_message()
        await stream.send_initial_metadata()  # opens the stream before the first list is ready
        is_observer = OBSERVER_HEADER in (stream.metadata or ())
        open_extra_s = (other.extra_lease_s for other in self._open if not other.is_observer)
        subscriber = HealthSubscriber(stream, next(open_extra_s, self._extra_lease_s), is_observer)
        self._open.append(subscriber)
        try:
            await self.subscribers.serve(subscriber)
        finally:
            self._open.remove(subscriber)
            if subscriber.has_sent and not is_observer:  # else the kubelet has the leases of before
                self._extra_lease_s = EXTRA_LEASE_S - subscriber.extra_lease_s
            if self._repeats_after_end and self.streams:
                self._repeats_left = len(REPEAT_S)
                self._schedule_repeat()

    def _schedule_repeat(self) -> None:
        """Schedule that all devices are sent again on the open streams, unless this is scheduled already.

        If many streams end, the devices are sent again at most once a second.
        """
        if self._timer is None:
            delay_s = REPEAT_S[-self._repeats_left]
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._repeat)

    def _repeat(self) -> None:
        self._timer = None
        self._repeats_left -= 1
        self.subscribers.repeat_fresh()
        if self._repeats_left:
            self._schedule_repeat()
