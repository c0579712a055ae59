"""grpclib server with limits on its clients' connections, requests and memory, and on its shutdown time."""

import asyncio
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Final

from grpclib import protocol, server
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import decode_timeout
from h2.errors import ErrorCodes

from agent.serve.grpc.codec import Codec
from agent.serve.grpc.hardened import (
    CONTROL_FRAMES_BURST,
    CONTROL_FRAMES_PER_S,
    GRACE_S,
    OBSERVER_HEADER,
    ControlFrameBudget,
    HardenedProtocol,
    HardenedStream,
    Headers,
    OpenRequestBytes,
    TooManyControlFrames,
    UnsentMessages,
    h2_config,
)
from agent.serve.sockets import (
    ACCEPT_LIMIT,
    close_server,
    connection_limit,
    largest_peers,
    peer_credentials,
    set_backlog,
)
from agent.system.output import LogRateLimiter, get_logger

CLOSING_LIMIT: Final = 16
"""Largest number of connections in the process of closing for a new one to be accepted."""
HANDSHAKE_S: Final = 10.0
"""Time after which a connection is closed whose client has not sent the HTTP/2 preface [s]."""
IDLE_S: Final = 3600.0
"""Time after which a connection without a request is closed [s].

A client of grpc-go, such as the kubelet, closes such a connection itself after 30 minutes. The server must
not end a connection of the kubelet, which counts that as a loss of the driver.
"""
REQUEST_COUNT_LIMIT: Final = 1024
"""Maximum number of open requests on all connections of one socket; each holds 15 KiB while it waits."""

log = get_logger(__name__)

_KEEP_FILE: Final[dict[str, Any]] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}

# With HTTP/2's smallest windows the server buffers at most 64 KiB per connection. Keepalive is off, because
# on a unix socket the kernel reports the end of the peer at once.
_SERVER_CONFIG: Final = Configuration(
    _keepalive_time=None, http2_connection_window_size=(1 << 16) - 1, http2_stream_window_size=(1 << 16) - 1
)

# All other metadata are dropped, because grpclib raises an exception for a "-bin" header that is no base64.
_REQUEST_HEADERS: Final = frozenset({":method", ":path", "te", "content-type", OBSERVER_HEADER})
_PSEUDO_HEADERS: Final = frozenset({":method", ":path"})

_SAFE_TO_RETRY: Final = ErrorCodes.REFUSED_STREAM  # gRPC: UNAVAILABLE, and the request was not processed
_TIMEOUT_HEADER: Final = "grpc-timeout"
_TIMEOUT: Final = re.compile(r"[0-9]{1,8}[HMSmun]")


class _ServerProtocol(HardenedProtocol):
    def __init__(self, handler: "_ConnectionHandler", config: Configuration, owner: "HardenedServer") -> None:
        super().__init__(handler, config, h2_config(client_side=False))
        self.stream_class = owner.stream_class
        self.memory = owner.memory
        self.unsent = owner.unsent
        self.requests = handler
        handler.connection = self
        self.lost = asyncio.get_running_loop().create_future()
        self.ends = False
        """True: the server has begun to close the connection."""
        self._awaits_close = False
        self._owner = owner
        self._budget = ControlFrameBudget(partial(owner.log_control_frames, self))
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with suppress(OSError):
            self.uid = peer_credentials(transport.get_extra_info("socket")).uid
        super().connection_made(transport)
        self._budget.limit(self.connection._connection)
        if not self._owner.admit_connection(self):
            self.transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._check_handshake)

    def _check_handshake(self) -> None:
        """Abort the connection if the client has not sent the HTTP/2 preface within HANDSHAKE_S."""
        if self.connection._connection.incoming_buffer._preamble_len:
            self._owner.log_silent(self)
            self.transport.abort()
        else:
            self._check_idle()

    def _check_idle(self) -> None:
        """Close the connection if it has had no request for IDLE_S, else check again at the earliest end."""
        loop, idle_s = asyncio.get_running_loop(), 0.0
        if self.requests.is_idle:
            idle_s = loop.time() - self.requests.idle_since_s
        if idle_s < IDLE_S:
            self._timer = loop.call_later(IDLE_S - idle_s, self._check_idle)
            return
        log.info(
            "%s: no request of uid %d in %g s: connection closed",
            _socket_name(self.transport), self.uid, IDLE_S,
        )  # fmt: skip
        self.send_goaway()

    def charge_reset(self) -> None:
        """Charge a request that the server resets to the client's budget; close the connection at its end."""
        try:
            self._budget.charge()
        except TooManyControlFrames as error:
            self.send_goaway(error.error_code)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._owner.connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        if not self._awaits_close:
            super().data_received(data)

    def send_goaway(self, code: ErrorCodes = ErrorCodes.NO_ERROR, *, awaits_close: bool = False) -> None:
        """Send GOAWAY, and close the connection after the write buffer is sent. `awaits_close`: the client
        closes it, because it may drop the status of its streams unread if one of its writes fails."""
        self.ends = True
        if not self.transport.is_closing():
            self.connection._connection.close_connection(code)
            self.connection.flush()
            if not awaits_close:
                self.processor.close("the server is closing")
            self._awaits_close = awaits_close


class _ConnectionHandler(server.Handler):
    """Handler of all requests on one connection; counts them against the server's limit."""

    connection: _ServerProtocol | None = None
    """Connection whose requests the object handles; None: not made yet."""
    _refusal: GRPCError | None = None

    def __init__(self, owner: "HardenedServer", mapping: dict[str, Any], codec: Any, dispatch: Any) -> None:
        super().__init__(mapping, codec, None, dispatch)
        self._owner = owner
        self._open: dict[protocol.Stream, None] = {}
        """Open requests that the server has not ended, the oldest first; grpclib also keeps ended ones."""
        self.idle_since_s = asyncio.get_running_loop().time()
        """Time of the event loop at which the connection's last request ended, or the connection opened."""

    @property
    def is_idle(self) -> bool:
        """True if the connection has no open request."""
        return not self._open

    @property
    def count(self) -> int:
        """Number of open requests on the connection."""
        return len(self._open)

    def end_newest(self, error: GRPCError) -> bool:
        """End the newest request on the connection that has begun; return False if there is none."""
        stream = next((stream for stream in reversed(self._open) if stream.wrapper is not None), None)
        if stream is None or stream.wrapper is None:
            return False
        del self._open[stream]
        stream.wrapper.cancel(error)
        return True

    def accept(self, stream: protocol.Stream, headers: Headers, release_stream: Callable[[], None]) -> None:
        if self._refusal is not None:
            _reset(stream, _SAFE_TO_RETRY)
            release_stream()
            return
        assert self.connection is not None
        if not {name for name, _ in headers} >= _PSEUDO_HEADERS:  # a KeyError in grpclib; h2 accepts it
            _reset(stream, ErrorCodes.PROTOCOL_ERROR)
            release_stream()
            self.connection.charge_reset()
            return
        if not self._owner.admit_request(self.connection):
            _reset(stream, ErrorCodes.ENHANCE_YOUR_CALM)  # gRPC: RESOURCE_EXHAUSTED
            release_stream()
            self.connection.charge_reset()
            return
        timeouts = [value for name, value in headers if name == _TIMEOUT_HEADER]
        kept_headers = [(name, value) for name, value in headers if name in _REQUEST_HEADERS]
        if not all(map(_TIMEOUT.fullmatch, timeouts)):
            kept_headers.append((_TIMEOUT_HEADER, ""))  # grpclib refuses the request
        elif timeouts:
            assert isinstance(stream, HardenedStream)
            stream.set_deadline(min(map(decode_timeout, timeouts)))
        super().accept(stream, kept_headers, lambda: None)  # _release() handles the end
        self._open[stream] = None
        # A task that is cancelled before it begins runs no code, so grpclib would not release its stream.
        self._tasks[stream].add_done_callback(partial(self._release, stream, release_stream))

    def cancel(self, stream: protocol.Stream) -> None:
        """End a request that its client has reset, unless it has already ended."""
        if stream in self._tasks:
            super().cancel(stream)

    def _release(
        self, stream: protocol.Stream, release_stream: Callable[[], None], task: "asyncio.Task[None]"
    ) -> None:
        """Stop counting a request that has ended, and reset its stream if the request got no answer."""
        assert isinstance(stream, HardenedStream)
        self._open.pop(stream, None)
        # grpclib keeps ended tasks until the connection's tenth request
        self._tasks.pop(stream, None)
        self._cancelled.discard(task)
        self._owner.requests -= 1
        self.idle_since_s = asyncio.get_running_loop().time()
        stream.release()
        never_begun = self._refusal is not None and stream.wrapper is None
        _reset(stream, _SAFE_TO_RETRY if never_begun else ErrorCodes.NO_ERROR)
        release_stream()
        if stream.wrapper is not None:
            stream.wrapper._error = None  # the frames of its traceback hold the message that was not sent

    def refuse(self, error: GRPCError) -> list["asyncio.Task[None]"]:
        """Refuse new requests on the connection and end all open ones with ``error``.

        Returns the tasks of requests that still run.
        """
        self._refusal = error
        for stream, task in self._tasks.items():
            if stream.wrapper is not None:
                stream.wrapper.cancel(error)
            else:  # not started
                task.cancel()
        return [task for task in self._tasks.values() if not task.done()]


def _reset(stream: protocol.Stream, code: ErrorCodes) -> None:
    """Reset a request's stream unless its client has already reset it."""
    if stream.closable:
        stream.reset_nowait(code)


def _socket_name(transport: asyncio.BaseTransport) -> str:
    return str(transport.get_extra_info("sockname"))


class HardenedServer(server.Server):
    """grpclib server on a listening unix socket, with limits on its clients and its shutdown time.

    Args:
        services: gRPC services of the socket.
        codec: Codec of the messages; None: Codec without a limit on entries.
        stream_class: Class of the request streams, which has the size limit of a request.
        unsent: Messages that wait for clients, shared by servers of one event loop; None: not shared.
        memory: Bytes of the socket's open requests, with those of other sockets; None: the only socket.
        sockets: Number of sockets that the process serves, see :func:`connection_limit`.
    """

    def __init__(
        self,
        services: Collection[Any],
        *,
        codec: Codec | None = None,
        stream_class: type[HardenedStream] = HardenedStream,
        unsent: UnsentMessages | None = None,
        memory: OpenRequestBytes | None = None,
        sockets: int = 1,
    ) -> None:
        super().__init__(services, codec=codec or Codec(), config=_SERVER_CONFIG)
        self.stream_class = stream_class
        self.memory = memory or OpenRequestBytes()
        self.unsent = unsent or UnsentMessages()
        self.connection_limit = connection_limit(sockets)
        self.connections: dict[_ServerProtocol, None] = {}
        """Open connections of the socket, the oldest first."""
        self.requests = 0
        """Number of open requests on all connections, both unary calls and streams."""
        self.stopping = False
        self._closed, self._refused, self._calmed = LogRateLimiter(), LogRateLimiter(), LogRateLimiter()
        self._silent = LogRateLimiter()

    def _protocol_factory(self) -> _ServerProtocol:
        handler = _ConnectionHandler(self, self._mapping, self._codec, self.__dispatch__)
        return _ServerProtocol(handler, self._config, self)

    def admit_connection(self, connection: _ServerProtocol) -> bool:
        """Count a new connection; return False if the connection must be closed.

        The result is False if the server stops, or too many connections are open and no other connection can
        be ended instead, such as an idle one.
        """
        others = sum(not connection.ends for connection in self.connections)
        closing = len(self.connections) - others
        self.connections[connection] = None
        if self.stopping:
            connection.ends = True
            return False
        if others < self.connection_limit and closing < CLOSING_LIMIT:
            return True
        ended = connection if closing >= CLOSING_LIMIT else self._choose_connection_to_end(connection)
        ended.ends = True
        if ended is not connection:
            ended.send_goaway()
        if count := self._closed.tick():
            log.warning(
                "%s: limit of %d connections reached: closed %d connections, idle ones of the uid with most "
                "connections first, the last of uid %d; a client may leak them",
                _socket_name(connection.transport), self.connection_limit, count, ended.uid,
            )  # fmt: skip
        return ended is not connection

    def _choose_connection_to_end(self, new: _ServerProtocol) -> _ServerProtocol:
        """Return the connection to end because the limit of connections is reached; ``new``: refuse that one.

        Of the uids that have most connections, the result is the connection that has been idle longest. If
        none is idle, the result is the newest connection of these uids if the uid of ``new`` has at least two
        connections less; otherwise the result is ``new``.
        """
        served = [connection for connection in self.connections if not connection.ends]
        largest, most = largest_peers(served, lambda connection: connection.uid)
        idle = [connection for connection in largest if connection is not new and connection.requests.is_idle]
        if idle:
            return min(idle, key=lambda other: other.requests.idle_since_s)
        if most > sum(connection.uid == new.uid for connection in served) + 1:
            return largest[-1]
        return new

    def admit_request(self, connection: _ServerProtocol) -> bool:
        """Count a new request; return True if it is accepted, False if there are too many.

        If there are too many, a user gets a request from the user with most requests, whose newest one ends.
        """
        if self.requests >= REQUEST_COUNT_LIMIT:
            ended = self._choose_connection_to_end_request(connection)
            if count := self._refused.tick():
                log.warning(
                    "%s: limit of %d requests reached; refused or ended %d requests, the last of uid %d; a "
                    "client may leak them",
                    _socket_name(connection.transport), REQUEST_COUNT_LIMIT, count, ended.uid,
                )  # fmt: skip
            text = (
                f"limit of {REQUEST_COUNT_LIMIT} requests reached, and uid {ended.uid} has most; end "
                "requests, then try again"
            )
            error = GRPCError(Status.RESOURCE_EXHAUSTED, text)
            if ended is connection or not ended.requests.end_newest(error):
                return False
        self.requests += 1
        return True

    def _choose_connection_to_end_request(self, new: _ServerProtocol) -> _ServerProtocol:
        """Return the connection whose newest request ends because the limit of requests is reached.

        The result is the connection with most requests of the user with most requests, if the user of `new`
        has at least two requests less; otherwise it is `new`, whose request is refused.
        """
        numbers = Counter[int]()
        for connection in self.connections:
            numbers[connection.uid] += connection.requests.count
        uid, most = numbers.most_common(1)[0]
        if most <= numbers[new.uid] + 1:
            return new
        theirs = (connection for connection in self.connections if connection.uid == uid)
        return max(theirs, key=lambda connection: connection.requests.count)

    def log_silent(self, connection: _ServerProtocol) -> None:
        """Log that a connection is closed because its client has not sent the HTTP/2 preface."""
        if count := self._silent.tick():
            log.info(
                "%s: no HTTP/2 preface in %g s: %d connections closed, the last of uid %d",
                _socket_name(connection.transport), HANDSHAKE_S, count, connection.uid,
            )  # fmt: skip

    def log_control_frames(self, connection: _ServerProtocol) -> None:
        """Log that a connection is closed because of its client's control frames, at most once a minute."""
        connection.ends = True
        if count := self._calmed.tick():
            log.warning(
                "%s: connection of uid %d closed: control frames (PING, RST_STREAM and others) and refused "
                "requests exceed %d at once and %d/s; closed %d such connections; a client pings, cancels or "
                "retries too often",
                _socket_name(connection.transport), connection.uid,
                CONTROL_FRAMES_BURST, CONTROL_FRAMES_PER_S, count,
            )  # fmt: skip

    async def listen(self, sock: socket.socket) -> None:
        """Serve the listening socket; replaces the socket of an earlier call, whose connections stay open.

        The caller removes the socket's file.
        """
        former, loop = self._server, asyncio.get_running_loop()
        # Not start(): asyncio then loads its TLS code, to check that the socket is none of TLS.
        server = await loop.create_unix_server(
            self._protocol_factory, sock=sock, backlog=ACCEPT_LIMIT, **_KEEP_FILE
        )
        set_backlog(server, sock)
        self._server = server
        if former is not None:
            try:
                await close_server(former)
            finally:
                former.close()

    def serves(self, sock: socket.socket) -> bool:
        """Return whether the server accepts connections of a listening socket."""
        served = self._server.sockets if isinstance(self._server, asyncio.Server) else ()
        return sock.fileno() in {listener.fileno() for listener in served}

    async def stop(self, reason: str) -> None:
        """End all streams with UNAVAILABLE and ``reason``, and all connections with GOAWAY.

        Takes at most twice :data:`GRACE_S`: connections of clients that do not read or close are aborted.
        Does nothing before :meth:`listen` and in a second call.
        """
        if self._server is None or self.stopping:
            return
        self.stopping = True
        # Not wait_closed(): from Python 3.12 it waits for the connections, which are closed below.
        await close_server(self._server)
        refusal = GRPCError(Status.UNAVAILABLE, reason)
        ending = [task for connection in self.connections for task in connection.requests.refuse(refusal)]
        if ending:
            await asyncio.wait(ending, timeout=GRACE_S)
        closing = tuple(self.connections)
        for connection in closing:
            connection.send_goaway(awaits_close=connection.requests.is_idle)
        if closing:
            await asyncio.wait([connection.lost for connection in closing], timeout=GRACE_S)
            for connection in closing:
                connection.transport.abort()
            await asyncio.wait([connection.lost for connection in closing])  # abort() acts in the next turn
