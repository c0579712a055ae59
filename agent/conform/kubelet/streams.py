"""The kubelets that listen to a driver's health, and what they hear. Judges nothing.

Up to five connections at a time: a kubelet of 1.37 (v1), one of 1.36 (v1alpha1), one that leaves, one that
stops to read, and one that comes and goes. Nothing is asked of the driver that changes anything.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from agent.conform.kubelet.calls import CALL_S, Clock, ask
from agent.conform.kubelet.recorder import StreamRecorder, end, path_of
from agent.conform.observed import V1, V1ALPHA1, Answer, Key, Reopening, Stopped, Stream, Watch
from agent.serve.grpc.bare_channel import BareChannel

RETRY_S: Final = 5.0
"""How long after a stream's end the kubelet opens it again [s]."""
SETTLE_S: Final = 2.0
"""What a stream gets to say something first [s]: one that was not ready, and v1 before v1alpha1."""

LEAVES_AT: Final = 0.45
"""After what part of the time the second kubelet leaves..."""
RESUMES_AT: Final = 0.6
"""...and the stopped reader reads again."""
REOPENINGS: Final = ("close", "cancel") * 3
PAUSE_PART: Final = 0.02
"""Of the time, between one of them and the next."""

UNKNOWN_METHODS: Final = (
    "/v1.DRAResourceHealth/DrahealthConform",
    "/v1.DrahealthConform/NodeWatchResources",
)
"""A method that a known service does not have, and a service that nobody has."""


class Heard(NamedTuple):
    """What all of them heard."""

    watches: tuple[Watch, ...]
    leaver: Stream | None
    stopped: Stopped | None
    reopenings: tuple[Reopening, ...]
    unknown: tuple[Answer, ...]


class Kubelets:
    """All that listen to one socket.

    Args:
        socket: The service socket.
        window_s: How long to listen, from now on.
    """

    def __init__(self, socket: str, window_s: float) -> None:
        self._socket = socket
        self._clock = Clock()
        self._window_s = window_s
        self._tapes: dict[str, list[StreamRecorder]] = {V1: [], V1ALPHA1: []}
        self._tried: set[str] = set()
        """The versions whose first stream has ended."""
        self._news = asyncio.Event()
        self._leaver: Stream | None = None
        self._stopped: Stopped | None = None
        self._reopenings: list[Reopening] = []

    async def listen(self) -> Heard:
        """Listens for as long as was asked for, and a little longer to one that was not ready at first.

        Raises:
            PermissionDenied: the socket may not be opened.
        """
        unknown, *_ = await asyncio.gather(
            self._ask_unknown(), self._watch(V1), self._watch(V1ALPHA1), self._visit()
        )
        watches = tuple(
            Watch(version, tuple(tape.observed() for tape in tapes)) for version, tapes in self._tapes.items()
        )
        return Heard(watches, self._leaver, self._stopped, tuple(self._reopenings), unknown)

    async def _ask_unknown(self) -> tuple[Answer, ...]:
        return tuple([(await ask(self._socket, self._clock, method))[0] for method in UNKNOWN_METHODS])

    # --- the kubelets that stay -----------------------------------------------------------------------------

    async def _watch(self, version: str) -> None:
        """Opens the stream of that version, and again 5 s after each end but UNIMPLEMENTED."""
        until_s = self._window_s
        while True:
            tape = StreamRecorder(self._clock, self._news.set)
            self._tapes[version].append(tape)
            await self._hear(tape, version, until_s)
            if version not in self._tried and not tape.lists:
                until_s = max(until_s, self._clock.now_s() + RETRY_S + SETTLE_S)
            self._tried.add(version)
            self._news.set()
            is_over = tape.ended is None or tape.ended.status == "UNIMPLEMENTED" or tape.ended.flooded
            if is_over or self._clock.now_s() + RETRY_S >= until_s:
                return
            await asyncio.sleep(RETRY_S)

    async def _hear(self, tape: StreamRecorder, version: str, until_s: float) -> None:
        """Listens until then, on a connection of its own."""
        channel = BareChannel(self._socket)
        try:
            await self._within(until_s, tape.listen(channel, path_of(version)))
        finally:
            channel.close()

    async def _within(self, until_s: float, work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - self._clock.now_s())):
                await work

    # --- those that come and go -----------------------------------------------------------------------------

    async def _visit(self) -> None:
        """What is tried on streams of a version that has something to say, once it has said it."""
        await self._within(min(SETTLE_S, self._window_s), self._until(lambda: self._is_clear(V1)))
        await self._within(self._window_s, self._until(lambda: self._is_clear(V1, V1ALPHA1)))
        version = next((one for one in (V1, V1ALPHA1) if self._has_told(one)), None)
        if version is not None:
            await asyncio.gather(self._leave(version), self._stop_reading(version), self._reopen(version))

    def _is_clear(self, *versions: str) -> bool:
        """Whether one of them has told something, or none of them has at its first try."""
        return any(map(self._has_told, versions)) or self._tried >= set(versions)

    def _has_told(self, version: str) -> bool:
        return any(tape.lists for tape in self._tapes[version])

    async def _until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self._news.clear()
            await self._news.wait()

    def _at(self, part: float) -> float:
        """When so much of the time that is left will be over."""
        now_s = self._clock.now_s()
        return now_s + max(0.0, self._window_s - now_s) * part

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._clock.now_s()))

    async def _leave(self, version: str) -> None:
        """Not before it has heard something, if that ever happens."""
        tape, channel = StreamRecorder(self._clock), BareChannel(self._socket)
        listening = asyncio.ensure_future(tape.listen(channel, path_of(version)))
        leaves_s = self._at(LEAVES_AT)
        try:
            await self._within(self._window_s, _until_first(tape))
            await self._sleep_until(leaves_s)
        finally:
            await end(listening)
            channel.close()
        self._leaver = tape.observed()

    async def _stop_reading(self, version: str) -> None:
        tape, channel = StreamRecorder(self._clock), BareChannel(self._socket)
        listening = asyncio.ensure_future(tape.listen(channel, path_of(version)))
        stopped_s = resumed_s = None
        try:
            await self._within(self._window_s, _until_first(tape))
            if tape.lists and tape.ended is None:
                stopped_s = self._clock.now_s()
                channel.shut()
                await self._sleep_until(self._at(RESUMES_AT))
                resumed_s = self._clock.now_s()
                channel.reopen()
            await self._sleep_until(self._window_s)
        finally:
            await end(listening)
            channel.close()
        if stopped_s is not None and resumed_s is not None:
            self._stopped = Stopped(tape.observed(), stopped_s, resumed_s)

    async def _reopen(self, version: str) -> None:
        """Opens streams on new connections, and each time, once it is cancelled, another on the same one."""
        channel = BareChannel(self._socket)
        try:
            for after in REOPENINGS:
                await asyncio.sleep(self._window_s * PAUSE_PART)
                if self._clock.now_s() >= self._window_s:
                    return
                if after == "close" or channel.goaway:
                    channel.close()
                    channel = BareChannel(self._socket)
                self._reopenings.append(Reopening(after, await self._once(channel, version)))
        finally:
            channel.close()

    async def _once(self, channel: BareChannel, version: str) -> Stream:
        """One stream, until it has told everything or :data:`CALL_S` are over."""
        tape = StreamRecorder(self._clock)
        listening = asyncio.ensure_future(tape.listen(channel, path_of(version)))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALL_S):
                    while tape.ended is None and not (tape.lists and self._told(version) <= tape.told):
                        await tape.wait_news()
        finally:
            await end(listening)
        return tape.observed()

    def _told(self, version: str) -> set[Key]:
        """The devices that the kubelet that stays was told of."""
        return set().union(*(tape.told for tape in self._tapes[version]))


async def _until_first(tape: StreamRecorder) -> None:
    """Returns when it has told something, or has ended."""
    while tape.ended is None and not tape.lists:
        await tape.wait_news()
