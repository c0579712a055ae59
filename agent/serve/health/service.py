"""The kubelet's device health API: ``NodeWatchResources`` of v1 and v1alpha1, from one implementation.

A stream gets the full list when it opens (or when there is one), and from then on what it is owed,
for as long as both sides live. It never ends from our side but when the agent does: whatever ends
it makes the kubelet forget the driver's health.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpclib.const
import grpclib.server

from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.serve.grpc.codec import Unread
from agent.serve.grpc.hardened import send_message_nowait
from agent.serve.health.feed import Encode, Feed, devices_for
from agent.system.threads.latest import Latest

Stream = grpclib.server.Stream[Any, bytes]

METHODS: Final = (
    "/v1.DRAResourceHealth/NodeWatchResources",
    "/v1alpha1.DRAResourceHealth/NodeWatchResources",
)

EXTRA_S: Final = 2
"""What the leases of every second stream are longer by [s]. Not 1: a report that comes late has leases that
are a second longer or shorter than before, and one change must not undo the other."""


class HealthPublisher:
    """Takes each newest report to the audiences: one per driver's socket."""

    def __init__(self, latest: Latest[Report], encode: Encode, drivers: Sequence[str]) -> None:
        self._latest = latest
        self._audiences = {driver: SubscriberSet(encode) for driver in drivers}

    def of(self, driver: str) -> "SubscriberSet":
        """The streams of one driver's socket."""
        return self._audiences[driver]

    async def run(self) -> None:
        """Follows the reports until cancelled.

        Raises:
            ValueError: a report that cannot be told, which is a mistake of whoever made it.
        """
        version = 0
        while True:
            version, report = await self._latest.wait_newer(version)
            for driver, audience in self._audiences.items():
                audience.publish(devices_for(report, driver))


class SubscriberSet:
    """The streams of one socket, and what each of them is owed. Of one loop.

    A stream that waits and has room is written to right here; the others find what they are owed
    when they are through with what they send. So a slow reader skips lists and holds up nobody.
    """

    def __init__(self, encode: Encode) -> None:
        self._feed = Feed(encode)
        self._waiting: dict[_Subscriber, asyncio.Future[None]] = {}
        self._hushed = False
        self._repeats = 0

    def publish(self, devices: Sequence[DeviceHealth]) -> None:
        """Takes the newest devices into the feed, and brings every stream up to it. Raises ValueError."""
        self._feed.publish(devices)
        if not self._hushed:
            self._bring_up()

    def mute(self) -> None:
        """Says nothing more on any stream; they stay open, and somebody else speaks."""
        self._hushed = True

    def resend_all(self) -> None:
        """Tells everything once more on every stream, and speaks from now on if it was hushed."""
        self._hushed = False
        self._repeats += 1
        self._bring_up()

    def _bring_up(self) -> None:
        for subscriber, wake in tuple(self._waiting.items()):
            if not self._push(subscriber) and not wake.done():
                wake.set_result(None)

    async def tell(self, stream: Stream, extra_s: int = 0) -> None:
        """Tells one stream everything that it is owed, until it is cancelled.

        ``extra_s`` is added to each lease [s] (see :class:`HealthService`).
        """
        subscriber = _Subscriber(stream, extra_s)
        while True:
            number, repeats = self._feed.number, self._repeats
            for message in self._owed(subscriber):
                await stream.send_message(message)
                await asyncio.sleep(0)  # a peer that takes everything at once must not keep the loop
            subscriber.number, subscriber.repeats = number, repeats
            if (number, repeats) == (self._feed.number, self._repeats):
                await self._newer(subscriber)

    def _owed(self, subscriber: "_Subscriber") -> tuple[bytes, ...]:
        if self._hushed:
            return ()
        since = subscriber.number if subscriber.repeats == self._repeats else 0
        return self._feed.pending_for(since, subscriber.extra_s)

    async def _newer(self, subscriber: "_Subscriber") -> None:
        """Returns when there is something for the subscriber that could not be pushed."""
        wake = self._waiting[subscriber] = asyncio.get_running_loop().create_future()
        try:
            await wake
        finally:
            del self._waiting[subscriber]

    def _push(self, subscriber: "_Subscriber") -> bool:
        messages = self._owed(subscriber)
        if len(messages) > 1 or (messages and not send_message_nowait(subscriber.stream, messages[0])):
            return False
        subscriber.number, subscriber.repeats = self._feed.number, self._repeats
        return True


class _Subscriber:
    """A stream, the number of the last publication that it got in full (0: none), and of the last repeat."""

    def __init__(self, stream: Stream, extra_s: int) -> None:
        self.stream = stream
        self.extra_s = extra_s
        self.number = 0
        self.repeats = 0


class HealthService:
    """The service of one socket, in both versions; their messages are the same bytes.

    A kubelet that crashed loads what it was told before, finds it expired, and shows Unknown. If the
    first list of its next stream is the same as the last of the one before, that is no change to it,
    and its pods stay Unknown until it happens to look at them again. So the leases of a stream are
    other than those of the stream that ended last: longer by :data:`EXTRA_S`, or not. They are so for the
    whole stream, for to go back with the second list would be one more change, and sync every pod again.
    """

    def __init__(self, audience: SubscriberSet) -> None:
        self.streams = 0
        """How many streams are open."""
        self._extra_s = 0
        """What the next stream's leases are longer by [s]."""
        self._audience = audience

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """The methods by path, as grpclib asks for them. Nothing stands in a request, and lists go out as
        the native core has encoded them.
        """
        handler = grpclib.const.Handler(self._watch, grpclib.const.Cardinality.UNARY_STREAM, Unread, bytes)
        return dict.fromkeys(METHODS, handler)

    async def _watch(self, stream: Stream) -> None:
        await stream.recv_message()
        await stream.send_initial_metadata()  # the list may be long in coming, the stream is open now
        with self._counted() as extra_s:
            await self._audience.tell(stream, extra_s)

    @contextmanager
    def _counted(self) -> Iterator[int]:
        """Counts a stream while it lives; gives what its leases are longer by [s]."""
        self.streams += 1
        extra_s = self._extra_s
        try:
            yield extra_s
        finally:
            self.streams -= 1
            self._extra_s = EXTRA_S - extra_s
