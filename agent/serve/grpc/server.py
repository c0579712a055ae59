"""The server side: a grpclib server whose clients can neither fill it nor keep it from ending."""

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

from grpclib import protocol, server
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import decode_timeout
from h2.errors import ErrorCodes

from agent.serve.grpc.codec import Codec
from agent.serve.grpc.hardened import GRACE_S, Headers, Protocol, Room, Stream, h2_config
from agent.system.rate_limit import RateLimiter

CONNECTION_LIMIT: Final = 128
"""How many connections one socket serves at a time. The kubelet holds one, and 64 readers are many;
four full sockets take half of the 1,024 descriptors that a process has by default."""
REQUEST_COUNT_LIMIT: Final = 1024
"""How many requests one socket has open at a time, in all its connections: 15 KiB each while they wait."""

log = logging.getLogger(__name__)

# The smallest windows HTTP/2 has: a peer cannot make us buffer more than 64 KiB per connection.
# No keepalive: on a unix socket the kernel says at once that the peer is gone.
_SERVER_CONFIG: Final = Configuration(
    _keepalive_time=None, http2_connection_window_size=(1 << 16) - 1, http2_stream_window_size=(1 << 16) - 1
)

# Requests carry no metadata that we read. Dropping the rest here keeps it from grpclib's decoder,
# which raises on a "-bin" header that is no base64.
_REQUEST_HEADERS: Final = frozenset({":method", ":path", "te", "content-type", "grpc-timeout"})


_SAFE_TO_REPEAT: Final = ErrorCodes.REFUSED_STREAM  # gRPC: UNAVAILABLE, and nothing was done
_TIMEOUT: Final = re.compile(r"[0-9]{1,8}[HMSmun]")
LEAST_S: Final = 0.001
"""What a request has at least, whatever its client says [s]."""


class _ServerProtocol(Protocol):
    def __init__(self, handler: "_Handler", config: Configuration, owner: "Server") -> None:
        super().__init__(handler, config, h2_config(client_side=False))
        self.stream_class = owner.stream_class
        self.room = owner.room
        self.requests = handler
        self.lost = asyncio.get_running_loop().create_future()
        self._owner = owner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._owner.admit(self):
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._owner.connections.discard(self)
        super().connection_lost(exc)
        self.lost.set_result(None)

    def say_goodbye(self) -> None:
        """Sends GOAWAY and closes; what is in the write buffer still goes out."""
        if not self.transport.is_closing():
            self.connection._connection.close_connection()
            self.connection.flush()
            self.processor.close("the server is closing")


class _Handler(server.Handler):
    """The requests of one connection."""

    _refusal: GRPCError | None = None

    def __init__(self, owner: "Server", mapping: dict[str, Any], codec: Any, dispatch: Any) -> None:
        super().__init__(mapping, codec, None, dispatch)
        self._owner = owner

    def accept(self, stream: protocol.Stream, headers: Headers, release_stream: Callable[[], None]) -> None:
        if self._refusal is not None:
            _reset(stream, _SAFE_TO_REPEAT)
            release_stream()
            return
        if not self._owner.admit_request(stream._transport):
            _reset(stream, ErrorCodes.ENHANCE_YOUR_CALM)  # gRPC: RESOURCE_EXHAUSTED
            release_stream()
            return
        known = [(name, _tenable(value) if name == "grpc-timeout" else value)
                 for name, value in headers if name in _REQUEST_HEADERS]  # fmt: skip
        super().accept(stream, known, _nothing)
        # Not by grpclib, in the task: one that is cancelled before it begins runs nothing.
        self._tasks[stream].add_done_callback(partial(self._release, stream, release_stream))

    def cancel(self, stream: protocol.Stream) -> None:
        """Ends a request that its client has reset; one that has ended already is released just now."""
        if stream in self._tasks:
            super().cancel(stream)

    def _release(self, stream: protocol.Stream, release_stream: Callable[[], None], _: object) -> None:
        """Makes room, and resets what was left without an answer, so that no client waits for one."""
        assert isinstance(stream, Stream)
        self._owner.requests -= 1
        stream.give_back()
        never_begun = self._refusal is not None and stream.wrapper is None
        _reset(stream, _SAFE_TO_REPEAT if never_begun else ErrorCodes.NO_ERROR)
        release_stream()

    def refuse(self, error: GRPCError) -> list["asyncio.Task[None]"]:
        """Ends every request with ``error`` in its trailers, takes no more; returns those that end."""
        self._refusal = error
        for stream, task in self._tasks.items():
            if stream.wrapper is not None:
                stream.wrapper.cancel(error)
            else:  # not even started
                task.cancel()
        return [task for task in self._tasks.values() if not task.done()]


def _tenable(timeout: str) -> str:
    """A deadline that grpclib can keep: one that is over before the request is looked at, and one of more
    digits than gRPC allows, are an "Internal Server Error" to it, with a traceback each.
    """
    if not _TIMEOUT.fullmatch(timeout):
        return ""  # which it refuses as what it is
    return timeout if decode_timeout(timeout) >= LEAST_S else f"{LEAST_S * 1000:.0f}m"


def _reset(stream: protocol.Stream, code: ErrorCodes) -> None:
    """Ends it without an answer, unless it has ended: a reset that came with it was seen before it."""
    if stream.closable:
        stream.reset_nowait(code)


def _where(transport: asyncio.BaseTransport) -> str:
    return str(transport.get_extra_info("sockname"))


def _nothing() -> None:
    """What grpclib may do with a stream when its request ends."""


class Server(server.Server):
    """A grpclib server on a listening socket, with an end that is bounded in time.

    Args:
        services: What is served.
        codec: Decodes the requests.
        stream_class: One with another limit on requests, where 64 KiB are too few.
    """

    def __init__(
        self, services: Collection[Any], *, codec: Codec | None = None, stream_class: type[Stream] = Stream
    ) -> None:
        super().__init__(services, codec=codec or Codec(), config=_SERVER_CONFIG)
        self.stream_class = stream_class
        self.room = Room()
        self.connections: set[_ServerProtocol] = set()
        self.requests = 0
        """Those that are answered now, or told of every change."""
        self.stopping = False
        self._closed, self._refused = RateLimiter(), RateLimiter()

    def _protocol_factory(self) -> _ServerProtocol:
        handler = _Handler(self, self._mapping, self._codec, self.__dispatch__)
        return _ServerProtocol(handler, self._config, self)

    def admit(self, connection: _ServerProtocol) -> bool:
        """Counts a new connection in, and says whether it may stay."""
        full = len(self.connections) >= CONNECTION_LIMIT
        self.connections.add(connection)  # one that may not stay is here until it is lost, too
        if full and (count := self._closed.tick()):
            log.warning(
                "%s: %d connections are open, %d more closed at once; does a client leak them?",
                _where(connection.transport), CONNECTION_LIMIT, count,
            )  # fmt: skip
        return not (full or self.stopping)  # stopping: accepted before the server stopped, made after it

    def admit_request(self, transport: asyncio.Transport) -> bool:
        """Counts a new request in, unless there are too many."""
        full = self.requests >= REQUEST_COUNT_LIMIT
        self.requests += not full
        if full and (count := self._refused.tick()):
            log.warning(
                "%s: %d requests are open, %d more refused; does a client leak them?",
                _where(transport), REQUEST_COUNT_LIMIT, count,
            )  # fmt: skip
        return not full

    async def listen(self, sock: socket.socket) -> None:
        """Serves the bound socket from now on. The socket's file stays the caller's to remove.

        Called again, with another socket, it serves that one instead; connections that were made
        through the one before stay.
        """
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.start(sock=sock)

    async def stop(self, reason: str) -> None:
        """Ends every stream with UNAVAILABLE and ``reason``, and every connection with GOAWAY.

        A peer that does not read is cut off: this takes twice :data:`GRACE_S` at most. Repeating it,
        or calling it before :meth:`listen`, does nothing.
        """
        if self._server is None or self.stopping:
            return
        self.stopping = True
        # Not wait_closed(): from Python 3.12 it waits for connections, and these we end ourselves.
        self._server.close()
        refusal = GRPCError(Status.UNAVAILABLE, reason)
        ending = [task for one in self.connections for task in one.requests.refuse(refusal)]
        if ending:
            await asyncio.wait(ending, timeout=GRACE_S)
        closing = tuple(self.connections)
        for one in closing:
            one.say_goodbye()
        if closing:
            await asyncio.wait([one.lost for one in closing], timeout=GRACE_S)
            for one in closing:
                one.transport.abort()
            await asyncio.wait([one.lost for one in closing])  # takes effect in the loop's next turn
