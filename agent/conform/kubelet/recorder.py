"""One health stream as a kubelet opens it, and what is said on it, as it comes.

A peer is not trusted: a stream ends, or whoever listens ends it, and what is kept of a flood is bounded.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError

from agent.conform.kubelet.calls import PEER_FAULTS, Clock, words_of
from agent.conform.observed import Device, HealthList, Key, Stream, StreamEnd
from agent.conform.reading import read_list
from agent.serve.grpc.bare_channel import BareChannel
from agent.serve.grpc.channel import TooLarge

TRAILERS_S: Final = 1.0
"""How long after the last message of a stream its status may take [s]."""
LISTS_LIMIT: Final = 20_000
"""Lists of one stream that are remembered..."""
DEVICES_LIMIT: Final = 100_000
"""...entries in all of them: ten minutes of 160 devices, told once a second..."""
BYTES_LIMIT: Final = 64 << 20
"""...and bytes that are read [bytes]."""


def path_of(version: str) -> str:
    """The health method of that version."""
    return f"/{version}.DRAResourceHealth/NodeWatchResources"


class _Flooded(Exception):
    """More was sent than is remembered."""


class StreamRecorder:
    """What one stream says. Of one task that listens, and others that look on.

    Args:
        clock: For the times.
        on_news: Called at each list, and at the end.
    """

    def __init__(self, clock: Clock, on_news: Callable[[], None] | None = None) -> None:
        self.lists: list[HealthList] = []
        self.told: set[Key] = set()
        """The devices that it has told of."""
        self.ended: StreamEnd | None = None
        self._clock = clock
        self._on_news = on_news
        self._opened_s = self._closed_s = clock.now_s()
        self._known: dict[bytes, Device] = {}
        self._goaway = ""
        self._devices = 0
        self._bytes = 0
        self._news = asyncio.Event()

    async def listen(self, channel: BareChannel, method: str) -> None:
        """Opens the stream and notes what it says, until it ends or this is cancelled."""
        try:
            await channel.connect()
            self._opened_s = self._clock.now_s()
            async with channel.request(method, Cardinality.UNARY_STREAM, bytes, bytes) as stream:
                await stream.send_message(b"", end=True)
                while (data := await stream.recv_message()) is not None:
                    self._take(data)
                async with asyncio.timeout(TRAILERS_S):
                    await stream.recv_trailing_metadata()
            self._end("OK", "")
        except TooLarge as error:
            self._end("", str(error), too_large=error.size)
        except _Flooded:
            self._end("", "more than is remembered", flooded=True)
        except TimeoutError:
            self._end("", f"no status within {TRAILERS_S:g} s of the last message")
        except GRPCError as error:
            self._end(error.status.name, error.message or "")
        except PEER_FAULTS as error:
            self._end("", words_of(error))
        finally:
            self._goaway = channel.goaway
            self._closed_s = self._clock.now_s()

    async def wait_news(self) -> None:
        """Returns at the next list, or at the end."""
        self._news.clear()
        await self._news.wait()

    def observed(self) -> Stream:
        """All of it, once nobody listens any more."""
        return Stream(self._opened_s, tuple(self.lists), self.ended, self._closed_s, self._goaway)

    def _take(self, data: bytes) -> None:
        """Raises _Flooded: there is no room for more."""
        found = read_list(data, self._clock.now_s(), self._known)
        self.lists.append(found)
        self.told.update(device.key for device in found.devices)
        self._devices += len(found.devices)
        self._bytes += len(data)
        self._tell()
        if len(self.lists) >= LISTS_LIMIT or self._devices >= DEVICES_LIMIT or self._bytes >= BYTES_LIMIT:
            raise _Flooded

    def _end(self, status: str, text: str, **how: Any) -> None:
        self.ended = StreamEnd(self._clock.now_s(), status, text, **how)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        if self._on_news is not None:
            self._on_news()


async def end(listening: asyncio.Future[None]) -> None:
    """Cancels a task that listens; returns when it has ended."""
    listening.cancel()
    await asyncio.wait({listening})
