"""grpclib with its edges closed: what a hostile, broken or stuck peer can do to a connection.

This is what both sides share; ``server.py``, ``channel.py`` and ``bare_channel.py`` have the rest, and
``data.py`` how lists are framed. Everything that needs grpclib's or h2's private parts is in these five.
They were written against grpclib 0.4.9 and h2 4.4; the requirements pin the first and bound the second.
Where grpclib fell short:

* a frame or event of a type that it does not know ended the connection (RFC 9113, 5.5: ignore it),
  and so did a header byte beyond ASCII;
* h2 buffered a frame of up to 16 MiB before it refused it as too long, and answers to pings and
  settings piled up without limit for a peer that sent them and read nothing;
* a message could be of any size, compressed (an "Internal Server Error"), or missing although the
  stream had ended (None where a request should be), and begun in a hundred streams of each connection;
* a request that failed before its handler ran got no answer, and one for an unknown method an
  answer that grpclib's own client does not take, for want of a content-type;
* one that was reset in the moment in which it came was kept for as long as its connection;
* a peer that reads nothing kept a closing connection, and its descriptor, open for ever;
* any number of connections and requests was taken, until there were no descriptors left for anybody;
* closing the server told the clients nothing, left connections open, and from Python 3.12 hung.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import h2.exceptions
from grpclib import protocol, server
from grpclib.const import Status
from grpclib.encoding.base import GRPC_CONTENT_TYPE
from grpclib.exceptions import GRPCError
from h2.config import H2Configuration
from h2.events import Event, ResponseReceived

from agent.serve.grpc.frames import PREFIX, frames, message_frames, take_window

Headers = list[tuple[str, str]]

REQUESTS_LIMIT: Final = 4 << 20
"""The most that all requests of a server may hold together, from the first byte to the answer [bytes]."""

REQUEST_LIMIT: Final = 64 << 10
"""The largest request that is read [bytes]. What we serve takes none that is not tiny."""

GRACE_S: Final = 0.2
"""How long a connection that is being closed may take to drain before it is aborted [s]."""

WRITE_LIMIT: Final = 1 << 20
"""The most that is written without a look at what the peer has left unread [bytes]."""
UNREAD_LIMIT: Final = 2 * WRITE_LIMIT
"""What a peer may leave unread in the write buffer [bytes]; twice what our own messages can fill."""


def h2_config(*, client_side: bool) -> H2Configuration:
    """grpclib's own settings, but for the encoding: Latin-1 decodes any byte, ASCII raises."""
    return H2Configuration(
        client_side=client_side,
        header_encoding="latin-1",
        validate_inbound_headers=False,
        validate_outbound_headers=False,
        normalize_inbound_headers=False,
        normalize_outbound_headers=False,
    )


class Room:
    """What requests hold that are read or answered now [bytes]. Of one server."""

    def __init__(self) -> None:
        self.held = 0


class Stream(protocol.Stream):
    """An HTTP/2 stream that takes no message above a limit, and can send without waiting."""

    limit = REQUEST_LIMIT
    compressed = Status.UNIMPLEMENTED
    room: Room | None = None
    """The server's; a client reads what it has asked for."""
    _held = 0

    # grpclib reads the 5-byte prefix of a message and its body in turns.
    _at_prefix = True
    _empty_is_a_message = True  # a request whose stream ends without a body is the empty request

    async def recv_data(self, size: int) -> bytes:
        """The next ``size`` bytes of a message's prefix or body; none at the end of the stream.

        Raises:
            GRPCError: UNIMPLEMENTED for a compressed request (INTERNAL for a response, which nobody
                asked to compress), RESOURCE_EXHAUSTED for a message above the limit, or for which there
                is no room now (nothing of it is read), INTERNAL if the stream ends in the middle of one.
        """
        if not self._at_prefix:
            self._admit(size)
        try:
            data = await super().recv_data(size)
        except AssertionError:  # how grpclib says it
            raise GRPCError(Status.INTERNAL, "stream ended in the middle of a message") from None
        if not self._at_prefix and len(data) < size:
            raise GRPCError(Status.INTERNAL, "stream ended in the middle of a message")
        if self._at_prefix and data and data[0]:
            raise GRPCError(
                self.compressed, "compressed messages are not supported; send grpc-encoding: identity"
            )
        if self._at_prefix and not data and self._empty_is_a_message:
            data = bytes(size)
        self._empty_is_a_message = False
        self._at_prefix = not self._at_prefix
        return data

    def _admit(self, size: int) -> None:
        if size > self.limit:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, f"message is {size} bytes, limit {self.limit}; refused unread"
            )
        if self.room is None:
            return
        if size and self.room.held + size > REQUESTS_LIMIT:
            others = f"and {self.room.held} bytes of others are held, limit {REQUESTS_LIMIT}"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"message is {size} bytes, {others}; refused unread")
        self.room.held += size
        self._held += size

    def give_back(self) -> None:
        """The request is answered, or nobody wants an answer any more: there is room for others."""
        if self.room is not None:
            self.room.held -= self._held
            self._held = 0

    async def send_headers(self, headers: Headers, end_stream: bool = False) -> None:
        """Sends headers or trailers; an answer gets the content-type that gRPC wants in every one."""
        await super().send_headers(_with_content_type(headers), end_stream=end_stream)

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Sends all of it: in one write, if it is not too large and there is room, else as the peer reads."""
        last = max(0, len(data) - 1) // WRITE_LIMIT * WRITE_LIMIT
        for at in range(0, last + 1, WRITE_LIMIT):
            piece, ends = data[at : at + WRITE_LIMIT], end_stream and at == last
            if ends or not self.send_nowait(piece):
                await super().send_data(piece, end_stream=ends)

    def send_nowait(self, data: bytes) -> bool:
        """Sends all of it if the peer's window and the write buffer have room, else nothing.

        Returns:
            Whether it was sent. A stream that has ended has no room.
        """
        return self._write_nowait(len(data), frames, data)

    def send_message_nowait(self, message: bytes) -> bool:
        """The same of an encoded message, with what goes before it."""
        return self._write_nowait(PREFIX.size + len(message), message_frames, message)

    def _write_nowait(self, size: int, framed: Callable[[bytes, int, int], bytes], data: bytes) -> bool:
        connection, stream_id = self._h2_connection, self.id
        if stream_id is None or not self.connection.write_ready.is_set():
            return False
        if not take_window(connection, stream_id, size):
            return False
        before = connection.data_to_send()
        self._transport.write(before + framed(data, stream_id, connection.max_outbound_frame_size))
        return True


def send_message_nowait(stream: server.Stream[Any, Any], message: bytes) -> bool:
    """Sends an encoded message from outside the request's task, if it can go out at once.

    Only while that task sends nothing itself, and after it has sent the initial metadata.

    Returns:
        Whether it was sent. If not, nothing was, and the request's task should send it.
    """
    h2_stream = stream._stream
    return isinstance(h2_stream, Stream) and h2_stream.send_message_nowait(message)


def _with_content_type(headers: Headers) -> Headers:
    names = [name for name, _ in headers]
    if ":status" not in names or "content-type" in names:
        return headers
    return [*headers, ("content-type", GRPC_CONTENT_TYPE)]


class _Connection(protocol.Connection):
    stream_class: type[Stream] = Stream
    room: Room | None = None

    def feed(self, data: bytes) -> list[Event]:
        """The events in ``data``; refuses an overlong frame at its header, not after its body."""
        events = super().feed(data)
        begun: bytearray = self._connection.incoming_buffer._data
        size, limit = int.from_bytes(begun[:3]), self._connection.max_inbound_frame_size
        if len(begun) >= 3 and size > limit:
            raise h2.exceptions.FrameTooLargeError(f"frame of {size} bytes, limit {limit}")
        return events

    def create_stream(self, *, stream_id: int | None = None, wrapper: Any = None) -> Stream:
        stream = self.stream_class(
            self, self._connection, self._transport, stream_id=stream_id, wrapper=wrapper
        )
        stream.room = self.room
        return stream


class _Events(protocol.EventsProcessor):
    def __init__(
        self, handler: protocol.AbstractHandler, connection: _Connection, transport: asyncio.Transport
    ) -> None:
        super().__init__(handler, connection)
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def process(self, event: Event) -> None:
        """Acts on an event; one of a kind that grpclib has no use for changes nothing."""
        if event.__class__ in getattr(self, "processors", ()):
            super().process(event)

    def process_response_received(self, event: ResponseReceived) -> None:
        """Completes headers that grpclib's client would stumble over: a KeyError is no answer."""
        headers: Headers = [(str(name), str(value)) for name, value in event.headers]
        if ":status" not in dict(headers):
            headers.append((":status", "none"))
        event.headers = _with_content_type(headers)  # type: ignore[assignment]  # h2 decodes, as configured
        super().process_response_received(event)

    def close(self, reason: str = "Connection closed") -> None:
        """Closes the connection, and aborts it if it has not drained within the grace."""
        super().close(reason)
        self._loop.call_later(GRACE_S, self._transport.abort)


class Protocol(protocol.H2Protocol):
    """One connection, of either side."""

    stream_class: type[Stream] = Stream
    room: Room | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        connection = _Connection(self.connection._connection, transport, config=self.config)
        connection.stream_class = self.stream_class
        connection.room = self.room
        self.transport = transport
        self.connection = connection
        self.processor: protocol.EventsProcessor = _Events(self.handler, connection, transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_write_buffer_size() > UNREAD_LIMIT:
            self.transport.abort()
