"""HTTP server on Hypercorn: its listening sockets, and the limits of its connections.

The server runs in an event loop and a thread of its own, so that its clients delay neither a verdict nor the
kubelet's health streams. A client that does not read, or that sends nothing, is disconnected by the kernel or
after IDLE_S, or earlier if others need its place or its memory. Then the client gives way that has most
connections, or whose responses take most memory: one address, or one uid on a unix socket.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from errno import EADDRINUSE
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import h11
import hypercorn.protocol
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamReset
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Event, RawData, Updated
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from hypercorn.utils import wrap_app
from hyperframe.frame import DataFrame, PingFrame, RstStreamFrame, SettingsFrame

from agent.errors import ConfigError, DrahealthError, PermissionDeniedError, ResourceBusyError
from agent.model.socket_address import ListenAddress
from agent.serve.grpc.hardened import ControlFrameBudget
from agent.serve.sockets import (
    ACCEPT_LIMIT,
    ACCEPT_STEPS,
    BACKLOG,
    UnixListener,
    abort_transport,
    close_server,
    connection_limit,
    largest_peers,
    longest_wait_of_largest_peer,
    make_socket_directory,
    peer_credentials,
    set_backlog,
)
from agent.system.output import LogRateLimiter, get_logger

if TYPE_CHECKING:
    from agent.http.web_config import WebConfigFile

CLOSING_MAX: Final = ACCEPT_LIMIT * 8
"""Largest number of connections in the process of closing for a new one to be accepted: a closed one takes
a few steps of the event loop to end, and each step accepts up to ACCEPT_LIMIT."""
UNSENT_LIMIT: Final = 24 << 20
"""Largest size of all documents and buffers that wait for clients of the HTTP server to read [bytes]: a
sixteenth of the memory limit in the systemd unit. The gRPC servers have their own limit of the same size."""
WAITING_BYTES: Final = 96 << 10
"""Memory of a response that waits for its client, without its document [bytes]: Hypercorn's and the write
buffer."""
RECEIVE_NEW: Final = 512
"""Number of bytes that a new connection may send at once, whatever others send: one request [bytes]."""
RECEIVE_BURST: Final = 4 << 10
"""Number of bytes that one connection may send at once after a pause: a few requests [bytes]."""
RECEIVE_SHARED: Final = 64 << 10
"""Number of bytes that all connections together may send at once beyond their own [bytes]."""
RECEIVE_STEP: Final = 256
"""Number of bytes that the server reads from one connection before it serves the others [bytes]."""
RECEIVE_PER_S: Final = 32 << 10
"""Number of bytes per second that the server reads from all connections together for long: half is divided
equally among them, half is for those that ask first [bytes/s]."""
REQUEST_BYTES: Final = 256
"""Number of bytes that a request costs beyond its own, which HTTP/2 compresses to a few [bytes]."""
CONTROL_FRAMES_BURST: Final = 64
"""Number of HTTP/2 control frames that a client may send at once: a browser's cancelled requests."""
CONTROL_FRAMES_PER_S: Final = 1.0
"""Number of HTTP/2 control frames that a client may send for long [1/s]."""
CONTROL_FRAMES: Final = (RstStreamFrame, PingFrame, SettingsFrame, DataFrame)
"""Kinds of HTTP/2 frames that count as control frames; DATA only if it is empty."""
UNSENT_S: Final = 30
"""Time after which the kernel closes the connection of a TCP client that does not read [s]."""
IDLE_S: Final = 75.0
"""Time after which a connection is closed if no response begins, and no part of one is sent [s].

It is longer than the usual scrape interval, since a new connection costs as much as a scrape.
"""
HANDSHAKE_S: Final = 10
"""Time in which a client must finish the handshake of TLS [s]."""
CHECK_S: Final = 10.0
"""Interval of checks whether connections make progress, and whether the files of unix sockets exist [s]."""
log = get_logger(__name__)

Listener = socket.socket | UnixListener


class HttpServer:
    """Listening sockets of the HTTP server; :meth:`run` serves an application on them."""

    def __init__(
        self,
        addresses: Sequence[ListenAddress],
        app: Any,
        *,
        web_config: Path | None = None,
        unsent_s: int = UNSENT_S,
        idle_s: float = IDLE_S,
        check_s: float = CHECK_S,
        connections_max: int | None = None,
        unsent_limit: int = UNSENT_LIMIT,
    ) -> None:
        """Create the listening sockets; if one cannot be created, the others are closed.

        Args:
            addresses: Addresses to listen on.
            app: ASGI application.
            web_config: File with TLS and passwords; None: neither.
            check_s: Interval of checks of connections and of the files of unix sockets [s].
            connections_max: Largest number of open connections, of all addresses together, also of those in a
                handshake of TLS; None: :func:`connection_limit` of one socket.
            idle_s: Time after which a connection without progress of a response is closed [s].
            unsent_limit: Largest size of what waits for clients, see :class:`UnsentResponses` [bytes].
            unsent_s: Time after which a TCP client that does not read is disconnected [s].

        Raises:
            ResourceBusyError: Another process listens on an address.
            ConfigError: An address is not one of this machine, a socket's directory cannot be used, or the
                web configuration is not valid.
            PermissionDeniedError: This process may not listen on an address.
        """
        self._web: WebConfigFile | None = None
        if web_config is not None:
            app, self._web = _with_web_config(app, web_config)
        self._hypercorn = _hypercorn_config()
        self._asgi = wrap_app(app, self._hypercorn.wsgi_max_body_size, "asgi")
        self._unsent_s = unsent_s
        self._idle_s = idle_s
        self._check_s = check_s
        self._file_complaints = LogRateLimiter()
        self._listeners: list[Listener] = []
        self._connections: dict[asyncio.Task[None], ResponseProgress] = {}
        self._complaints, self._error_complaints = LogRateLimiter(), LogRateLimiter()
        self._flood_complaints = LogRateLimiter()
        self._received = ReceiveBudget()
        self._unsent = UnsentResponses(unsent_limit)
        self.connections_max = connection_limit(1) if connections_max is None else connections_max
        """Largest number of open connections."""
        self.refused = 0
        """Number of connections that were closed because :attr:`connections_max` were open."""
        try:
            for address in addresses:
                self._listeners.append(self._listen(address))
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> tuple[Any, ...]:
        """Addresses of the listening sockets as ``socket.getsockname()`` returns them, in the order given."""
        return tuple(_socket_of(listener).getsockname() for listener in self._listeners)

    @property
    def connections(self) -> int:
        """Number of open connections of the HTTP server."""
        return sum(not connection.is_aborted for connection in self._connections.values())

    def close(self) -> None:
        """Close the listening sockets and remove the files of unix sockets."""
        for listener in self._listeners:
            listener.close()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve the application until cancelled; then disconnect all clients.

        Args:
            ready: Called when all sockets are served.
        """
        servers: dict[Listener, asyncio.Server] = {}
        try:
            for listener in self._listeners:
                servers[listener] = await self._start(listener)
            ready()
            while True:
                await asyncio.sleep(self._check_s)
                self._close_idle()
                await self._restore_files(servers)
        finally:
            await asyncio.gather(*map(close_server, servers.values()))
            for progress in self._connections.values():
                progress.abort()
            await asyncio.gather(*self._connections, return_exceptions=True)
            for _ in range(ACCEPT_STEPS):
                await asyncio.sleep(0)  # the transports close their sockets
            self.close()

    async def _start(self, listener: Listener) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, sock=_socket_of(listener), backlog=ACCEPT_LIMIT)
        set_backlog(server, _socket_of(listener))
        return server

    async def _restore_files(self, servers: dict[Listener, asyncio.Server]) -> None:
        """Create files of unix sockets again that another process removed. Open connections stay open."""
        for index, listener in enumerate(self._listeners):
            if not isinstance(listener, UnixListener):
                continue
            try:
                if listener.is_intact():
                    continue
                make_socket_directory(listener.path.parent, setting="--listen")
                new = UnixListener(listener.path)
                try:
                    servers[new] = await self._start(new)
                except BaseException:
                    new.close()
                    raise
                self._listeners[index] = new
                try:
                    await close_server(servers.pop(listener))
                finally:
                    listener.close()
                log.warning("socket %s: was removed by another process; created again", new.path)
            except (DrahealthError, OSError) as error:
                if count := self._file_complaints.tick():
                    log.warning(
                        "socket %s: removed by another process and not created again: %s; HTTP clients "
                        "cannot connect to it; %d attempts; will retry",
                        listener.path,
                        error,
                        count,
                    )

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for progress in self._connections.values():
            if progress.is_lost:
                progress.abort()  # it may wait for the right to read what its client has sent
        if len(self._connections) >= self.connections_max + CLOSING_MAX:
            abort_transport(writer.transport)
            self._count_closed()
            return
        paced = PacedReader(reader, lambda: writer.transport.is_closing(), self._received)
        progress = ResponseProgress(self._asgi, writer, self._unsent, paced)
        served = [connection for connection in self._connections.values() if not connection.is_aborted]
        if len(served) >= self.connections_max:
            self._choose_connection_to_end(served, progress).abort()
            self._count_closed()
        task = asyncio.get_running_loop().create_task(self._serve(paced, writer, progress))
        progress.task = task
        self._connections[task] = progress
        self._received.connections = len(self._connections)
        task.add_done_callback(self._forget)

    def _choose_connection_to_end(
        self, served: list["ResponseProgress"], new: "ResponseProgress"
    ) -> "ResponseProgress":
        """Return the connection to end because the limit of connections is reached, for a new one.

        It is one of the client with most connections: first one that sends too fast, then one without a
        response in progress, then the one without progress for the longest.
        """
        largest, _ = largest_peers([*served, new], lambda other: other.peer)
        return min(
            (connection for connection in largest if connection is not new),
            key=lambda other: (not other.paced.is_too_fast, other.is_responding, other.newest_s),
        )

    def _forget(self, task: "asyncio.Task[None]") -> None:
        del self._connections[task]
        self._received.connections = len(self._connections)

    def _close_idle(self) -> None:
        oldest_s = asyncio.get_running_loop().time() - self._idle_s
        for task, progress in self._connections.items():
            if progress.newest_s < oldest_s:
                if progress.unsent_bytes:  # the client does not read
                    progress.abort()
                else:
                    task.cancel()

    async def _serve(
        self, paced: "PacedReader", writer: asyncio.StreamWriter, progress: "ResponseProgress"
    ) -> None:
        tls = self._web.read().tls if self._web else None
        if tls is not None:
            try:
                # before any wait: no data of the handshake may reach the reader of the plain connection
                await writer.start_tls(tls, ssl_handshake_timeout=HANDSHAKE_S)
            except OSError:  # ssl.SSLError is one
                return
        try:
            loop, context = asyncio.get_running_loop(), ConnectionContext(self._log_flood)
            reader: Any = paced
            await HypercornConnection(progress.respond, loop, self._hypercorn, context, {}, reader, writer)
        except* (UnicodeDecodeError, OSError):
            pass  # Hypercorn does not check the method and path of an HTTP/2 request; the socket failed
        except* Exception:
            if count := self._error_complaints.tick():
                log.exception(
                    "http: %d connections to clients closed: internal error, the last one below; the server "
                    "continues",
                    count,
                )

    def _count_closed(self) -> None:
        """Count a connection that was closed because of the limit of open connections."""
        self.refused += 1
        if count := self._complaints.tick():
            log.warning(
                "http: limit of %d open connections reached: closed %d connections of the clients with most "
                "connections, first those that send too fast, then those without a response; a client may "
                "leak them",
                self.connections_max,
                count,
            )

    def _log_flood(self) -> None:
        """Log a connection that is closed because its client sends too many control frames."""
        if count := self._flood_complaints.tick():
            log.warning(
                "http: closed %d connections: their clients reset requests, ping or change settings more "
                "than %d times at once and %g times a second",
                count,
                CONTROL_FRAMES_BURST,
                CONTROL_FRAMES_PER_S,
            )

    def _listen(self, address: ListenAddress) -> Listener:
        if address.path:
            path = Path(address.path)
            make_socket_directory(path.parent, setting="--listen")
            return UnixListener(path)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # inherited by the connections
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._unsent_s * 1000)
            sock.bind((address.host, address.port))
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            reason = error.strerror or os.strerror(error.errno or 0)
            text = (
                f"http.listen: address {address}: cannot listen ({reason}); choose another address with "
                "--listen"
            )
            if isinstance(error, PermissionError):
                raise PermissionDeniedError(text) from error
            if error.errno == EADDRINUSE:
                raise ResourceBusyError(
                    f"http.listen: address {address}: another process listens there; stop it, or choose "
                    "another address with --listen"
                ) from error
            raise ConfigError(text) from error
        return sock


class UnsentResponses:
    """Responses of an HTTP server that wait for clients to read, with a limit on their memory.

    Above the limit, of the connections of the client whose responses take most memory, the one is aborted
    that has not read for the longest time. Used only in the event loop.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: dict[object, tuple[ResponseProgress, Any]] = {}
        """Connection and document of each response that waits; the longest wait is first."""
        self._log_limit = LogRateLimiter()

    async def send(self, progress: "ResponseProgress", send: Any, message: Any) -> None:
        """Send a part of a response through `send`; count it and its document while the client does not read.

        A part that is a memoryview is a part of the document that it refers to.
        """
        part = message.get("body", b"")
        wait = object()
        self._waiting[wait] = progress, part.obj if isinstance(part, memoryview) else part
        self._limit_memory()
        try:
            await send(message)
        finally:
            self._waiting.pop(wait, None)

    def _limit_memory(self) -> None:
        """Abort the connections that have waited longest, of the clients whose responses take most memory,
        until the others are within the limit."""
        while (used := _size_of(self._waiting.values())) > self._limit_bytes and len(self._waiting) > 1:
            waiting = self._waiting.values()
            slowest, _ = longest_wait_of_largest_peer(waiting, lambda entry: entry[0].peer, _size_of)
            self._waiting = {wait: entry for wait, entry in self._waiting.items() if entry[0] is not slowest}
            slowest.abort()
            if count := self._log_limit.tick():
                log.warning(
                    "http: closed %d connections whose clients do not read: responses that wait for clients "
                    "take %d bytes, limit %d; clients have to retry, and read faster",
                    count,
                    used,
                    self._limit_bytes,
                )


def _size_of(waiting: Collection[tuple["ResponseProgress", Any]]) -> int:
    """Return the size of the documents and buffers of waiting responses together [bytes]."""
    documents = {id(document): len(document) for _, document in waiting}
    return sum(documents.values()) + len(waiting) * WAITING_BYTES


class ResponseProgress:
    """Wrapper of an application that stores when a response on one connection last made progress."""

    def __init__(
        self, app: Any, writer: asyncio.StreamWriter, unsent: UnsentResponses, paced: "PacedReader"
    ) -> None:
        """Wrap the application `app`, which creates the responses; Hypercorn calls the wrapper instead."""
        self._app = app
        self.paced = paced
        """Reader of the connection, which each request is charged to."""
        self._loop = asyncio.get_running_loop()
        self._unsent = unsent
        self.writer = writer
        self.peer = _peer_of(writer)
        """Client of the connection: its address, or the uid of its process on a unix socket."""
        self._socket = writer.transport
        """Transport below that of TLS, which seems empty while this one still has to send."""
        self.newest_s = self._loop.time()
        """Time of the begin of the connection or of a response, or of the last part that was sent [s]."""
        self.task: asyncio.Task[None] | None = None
        """Task that serves the connection; None: not started yet."""
        self.is_aborted = False
        """True: the connection is being closed, whatever its client does."""
        self._responses = 0

    @property
    def is_lost(self) -> bool:
        """True: the connection is closed and all that the client gets is sent, but its task may not have
        ended."""
        return self._socket.is_closing() and not self.unsent_bytes

    @property
    def is_responding(self) -> bool:
        """True: a response on the connection is in progress."""
        return self._responses > 0 or self.unsent_bytes > 0

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that wait for the client to read [bytes]."""
        return self._socket.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection without sending what waits for its client."""
        self.is_aborted = True
        if self.task is not None:
            self.task.cancel()
        abort_transport(self._socket)

    async def respond(self, scope: Any, receive: Any, send: Any, sync_spawn: Any, call_soon: Any) -> None:
        """Respond to a request through the wrapped application, with Hypercorn's arguments."""

        async def send_and_note(message: Any) -> None:
            await self._unsent.send(self, send, message)
            self.newest_s = self._loop.time()

        self.newest_s = self._loop.time()
        self.paced.charge(REQUEST_BYTES)
        self._responses += 1
        try:
            await self._app(scope, receive, send_and_note, sync_spawn, call_soon)
        finally:
            self._responses -= 1


class ReceiveBudget:
    """Number of bytes that the connections of a server may still send, with the rate at which it grows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.connections = 0
        """Number of open connections, which share the rate."""
        self._left = float(RECEIVE_SHARED)
        self._refilled_s = clock()

    @property
    def own_per_s(self) -> float:
        """Number of bytes per second that each connection has of its own [bytes/s]."""
        return RECEIVE_PER_S / 2 / max(1, self.connections)

    def take(self, wanted: float) -> float:
        """Take up to `wanted` bytes from what all connections share; return their number."""
        now_s = self.clock()
        self._left = min(RECEIVE_SHARED, self._left + (now_s - self._refilled_s) * RECEIVE_PER_S / 2)
        self._refilled_s = now_s
        taken = min(wanted, self._left)
        self._left -= taken
        return taken


class PacedReader:
    """Reader of a connection that limits how fast the client's data reach Hypercorn.

    Hypercorn limits neither control frames nor requests. A client that sends faster has to wait.
    """

    def __init__(
        self, reader: asyncio.StreamReader, is_closing: Callable[[], bool], budget: ReceiveBudget
    ) -> None:
        """Wrap a reader.

        Args:
            reader: Reader of the connection.
            is_closing: Returns True if the connection is being closed; what is not read then is ignored.
            budget: Budget that all connections share.
        """
        self._reader = reader
        self._is_closing = is_closing
        self._budget = budget
        self._left = float(RECEIVE_NEW)
        self._earned_s = budget.clock()
        self.is_too_fast = False
        """True: the client had to wait, and not all that it has sent is read."""

    def at_eof(self) -> bool:
        """Return True if no data are left and the client sends no more, or the connection is being closed."""
        return self._reader.at_eof() or self._is_closing()

    def charge(self, size: int) -> None:
        """Count `size` bytes as if the client had sent them."""
        self._left -= size

    async def read(self, size: int) -> bytes:
        """Return the next data of the client, at most `size` bytes; no bytes at the end."""
        await asyncio.sleep(0)  # other connections first, and requests that the last data began
        if self._left <= 0:
            now_s, per_s = self._budget.clock(), self._budget.own_per_s
            self._left = min(RECEIVE_BURST, self._left + (now_s - self._earned_s) * per_s)
            self._earned_s = now_s
            if self._left <= 0:
                self._left += self._budget.take(RECEIVE_STEP - self._left)
            if self._left <= 0:
                self.is_too_fast = True
                await asyncio.sleep(-self._left / per_s)
        size = min(size, RECEIVE_STEP)
        data = await self._reader.read(size)
        self._left -= len(data)
        if len(data) < size:
            self.is_too_fast = False
        return data


class ConnectionContext(WorkerContext):
    """Context that Hypercorn passes to the protocol of one connection."""

    def __init__(self, on_flood: Callable[[], object]) -> None:
        """Begin with a function that is called if the client sends too many control frames."""
        super().__init__(None)
        self.on_flood = on_flood


class LimitedH11Protocol(H11Protocol):
    """HTTP/1 connection of Hypercorn that answers a request to upgrade as any other.

    RFC 9113 deprecates the upgrade to h2c; Hypercorn does not check its settings. The preface begins HTTP/2.
    No endpoint has WebSockets.
    """

    async def _check_protocol(self, event: h11.Request) -> None:
        if (event.method, event.target, event.http_version) == (b"PRI", b"*", b"2.0"):
            raise H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])

    async def _create_stream(self, request: h11.Request) -> None:
        kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
        method, target, version = request.method, request.target, request.http_version
        await super()._create_stream(
            h11.Request(method=method, headers=kept, target=target, http_version=version)
        )


class LimitedH2Protocol(H2Protocol):
    """HTTP/2 connection of Hypercorn that ends with GOAWAY if the client sends too many control frames.

    The client's priorities, which RFC 9113 deprecates, are ignored: Hypercorn would walk the tree of all
    prioritized streams for each frame.
    """

    context: ConnectionContext

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        budget = ControlFrameBudget(
            self.context.on_flood, burst=CONTROL_FRAMES_BURST, per_s=CONTROL_FRAMES_PER_S
        )
        budget.limit(self.connection, CONTROL_FRAMES)

    async def _handle_events(self, events: list[Any]) -> None:
        """Handle the events of received data.

        A request that the client has already reset does not begin, nor does a tunnel (CONNECT). Data for a
        request that is already answered are ignored, which is a KeyError in Hypercorn.
        """
        reset = {event.stream_id for event in events if isinstance(event, StreamReset)}
        for event in events:
            if isinstance(event, RequestReceived) and event.stream_id in reset:
                continue
            if isinstance(event, DataReceived) and event.stream_id not in self.streams:
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                continue
            method = dict(event.headers).get(b":method", b"") if isinstance(event, RequestReceived) else b""
            if method.upper() == b"CONNECT":  # Hypercorn ignores the case of a method
                self.connection.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
                continue
            await super()._handle_events([event])
        await self._flush()

    async def _priority_updated(self, event: Any) -> None:
        pass


hypercorn.protocol.H11Protocol = LimitedH11Protocol  # type: ignore[attr-defined]
hypercorn.protocol.H2Protocol = LimitedH2Protocol  # type: ignore[attr-defined, assignment]


class HypercornConnection(TCPServer):
    """Connection of Hypercorn that is closed as soon as the client closes it, without a timer of its own.

    Hypercorn's timer ends when HTTP/2 begins and when an HTTP/2 client resets a stream, and ignores clients
    that accept no data.
    """

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData) and self.writer.transport.is_closing():
            return  # asyncio would log each write
        if not isinstance(event, Updated):  # it starts or stops the timer
            await super().protocol_send(event)

    async def _idle_timeout(self) -> None:
        pass


def _with_web_config(app: Any, path: Path) -> tuple[Any, "WebConfigFile"]:
    """Return the application with basic authentication, and the web configuration.

    Raises ConfigError.
    """
    try:
        from agent.http.web_config import BasicAuthentication, WebConfigFile  # bcrypt, only if configured
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"http.web-config: the package {error.name} is not installed; install drahealth[http]"
        ) from None
    web = WebConfigFile(path)
    return BasicAuthentication(app, web), web


def _socket_of(listener: Listener) -> socket.socket:
    return listener.sock if isinstance(listener, UnixListener) else listener


def _peer_of(writer: asyncio.StreamWriter) -> str:
    """Return the client of a connection: its address, or the uid of its process on a unix socket."""
    connection = writer.get_extra_info("socket")
    if connection.family != socket.AF_UNIX:
        host, *_ = writer.get_extra_info("peername") or ("unknown",)  # None: it is closed already
        return str(host)
    try:
        return f"uid {peer_credentials(connection).uid}"
    except OSError:
        return "unknown"


def _hypercorn_config() -> HypercornConfig:
    config = HypercornConfig()
    config.errorlog = logging.getLogger("hypercorn.error")  # to the agent's own log
    config.include_server_header = False
    config.h2_max_concurrent_streams = 8
    # At this limit Hypercorn begins a request of HTTP/2 and closes h2's connection: none is answered.
    config.keep_alive_max_requests = 1 << 62
    return config
