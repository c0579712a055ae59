"""The kubelet's device health API: ``NodeWatchResources`` of v1 and v1alpha1, from one implementation.

A stream receives the full list when it opens (or when there is one), and then what is pending for it, for
as long as both sides run. Our side ends it only when the agent ends, because the end of a stream makes the
kubelet forget the driver's health.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpclib.const
import grpclib.server

from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.serve.grpc.codec import UnreadRequest
from agent.serve.grpc.hardened import send_message_nowait
from agent.serve.health.feed import EncodeDevices, Feed, devices_for
from agent.system.threads.latest import Latest

HealthStream = grpclib.server.Stream[Any, bytes]

METHODS: Final = (
    "/v1.DRAResourceHealth/NodeWatchResources",
    "/v1alpha1.DRAResourceHealth/NodeWatchResources",
)

EXTRA_S: Final = 2
"""Time that is added to the leases of every second stream [s]. Not 1: a delayed report has leases that are
a second longer or shorter than before, and one change must not undo the other."""


class HealthPublisher:
    """Publisher of each newest report to the subscribers of each driver's socket."""

    def __init__(self, latest: Latest[Report], encode: EncodeDevices, drivers: Sequence[str]) -> None:
        self._latest = latest
        self._subscribers = {driver: SubscriberSet(encode) for driver in drivers}

    def subscribers_of(self, driver: str) -> "SubscriberSet":
        """Return the subscribers of one driver's socket."""
        return self._subscribers[driver]

    async def run(self) -> None:
        """Publish each newest report until cancelled.

        Raises:
            ValueError: A report names a device twice, which is a mistake of its producer.
        """
        version = 0
        while True:
            version, report = await self._latest.wait_newer(version)
            for driver, subscribers in self._subscribers.items():
                subscribers.publish(devices_for(report, driver))


class SubscriberSet:
    """Health streams of one socket, and the devices that are pending for each. Event loop only.

    A stream that waits and has room is written to at once; other streams find what is pending when they
    have sent what they are sending. So a slow reader skips lists and delays no other stream.
    """

    def __init__(self, encode: EncodeDevices) -> None:
        self._feed = Feed(encode)
        self._waiting: dict[_HealthSubscriber, asyncio.Future[None]] = {}
        self._muted = False
        self._repeats = 0

    def publish(self, devices: Sequence[DeviceHealth]) -> None:
        """Publish the newest devices to every stream. Raises ValueError if a device appears twice."""
        self._feed.publish(devices)
        if not self._muted:
            self._push_all()

    def mute(self) -> None:
        """Send nothing more on any stream; the streams stay open while another instance sends."""
        self._muted = True

    def resend_all(self) -> None:
        """Send all devices once more on every stream, and unmute."""
        self._muted = False
        self._repeats += 1
        self._push_all()

    def _push_all(self) -> None:
        for subscriber, wake in tuple(self._waiting.items()):
            if not self._push(subscriber) and not wake.done():
                wake.set_result(None)

    async def serve(self, stream: HealthStream, extra_s: int = 0) -> None:
        """Send one stream everything that is pending for it, until cancelled.

        ``extra_s`` is added to each lease [s] (see :class:`HealthService`).
        """
        subscriber = _HealthSubscriber(stream, extra_s)
        while True:
            number, repeats = self._feed.number, self._repeats
            for message in self._pending(subscriber):
                await stream.send_message(message)
                await asyncio.sleep(0)  # a peer that reads everything at once must not occupy the loop
            subscriber.number, subscriber.repeats = number, repeats
            if (number, repeats) == (self._feed.number, self._repeats):
                await self._wait_pending(subscriber)

    def _pending(self, subscriber: "_HealthSubscriber") -> tuple[bytes, ...]:
        if self._muted:
            return ()
        since = subscriber.number if subscriber.repeats == self._repeats else 0
        return self._feed.pending_for(since, subscriber.extra_s)

    async def _wait_pending(self, subscriber: "_HealthSubscriber") -> None:
        """Wait until devices are pending for the subscriber that could not be sent at once."""
        wake = self._waiting[subscriber] = asyncio.get_running_loop().create_future()
        try:
            await wake
        finally:
            del self._waiting[subscriber]

    def _push(self, subscriber: "_HealthSubscriber") -> bool:
        messages = self._pending(subscriber)
        if len(messages) > 1 or (messages and not send_message_nowait(subscriber.stream, messages[0])):
            return False
        subscriber.number, subscriber.repeats = self._feed.number, self._repeats
        return True


class _HealthSubscriber:
    """Health stream, with the number of the last publication that it received in full (0: none), and of the
    last :meth:`SubscriberSet.resend_all`.
    """

    def __init__(self, stream: HealthStream, extra_s: int) -> None:
        self.stream = stream
        self.extra_s = extra_s
        self.number = 0
        self.repeats = 0


class HealthService:
    """Health service of one socket, in both versions of the API; their messages are the same bytes.

    A kubelet that crashed loads the last verdicts, finds them expired, and shows Unknown. If the first list
    of its next stream equals the last list of the stream before, the kubelet sees no change, and its pods
    stay Unknown until their next sync. So the leases of a stream differ from those of the stream that ended
    last: longer by :data:`EXTRA_S`, or not. They differ for the whole stream, because a change with the
    second list would sync every pod again.
    """

    def __init__(self, subscribers: SubscriberSet) -> None:
        self.streams = 0
        """Number of open health streams."""
        self._extra_s = 0
        """Seconds that are added to the leases of the next stream."""
        self._subscribers = subscribers

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """Return the handlers of the methods by path, for grpclib. A request has no fields, and the native
        core has encoded the lists.
        """
        handler = grpclib.const.Handler(
            self._watch, grpclib.const.Cardinality.UNARY_STREAM, UnreadRequest, bytes
        )
        return dict.fromkeys(METHODS, handler)

    async def _watch(self, stream: HealthStream) -> None:
        await stream.recv_message()
        await stream.send_initial_metadata()  # the stream is open now, even if the list takes long
        with self._counted() as extra_s:
            await self._subscribers.serve(stream, extra_s)

    @contextmanager
    def _counted(self) -> Iterator[int]:
        """Count a stream while it is open; yield the seconds that are added to its leases."""
        self.streams += 1
        extra_s = self._extra_s
        try:
            yield extra_s
        finally:
            self.streams -= 1
            self._extra_s = EXTRA_S - extra_s
