"""grpclib streams and connections, for servers and clients, with limits for a hostile, broken or stuck peer.

Only this module, ``server.py`` and ``channel.py`` use private parts of grpclib and h2, as of grpclib 0.4.9
and h2 4.4; the requirements pin the version of grpclib and bound that of h2. These modules correct the
following deficiencies of grpclib and h2:

* a frame or event of an unknown type ended the connection (RFC 9113, 5.5: ignore it), and so did a header
  byte beyond ASCII;
* h2 buffered a frame of up to 16 MiB before it refused it as too long, and answers to pings and settings
  piled up without limit for a peer that sent them and read nothing;
* a message could have any size; a compressed one was an "Internal Server Error", a missing one None; each
  connection could begin a hundred messages at once;
* an empty DATA frame ended a message;
* a request that failed before its handler ran got no answer, and a request for an unknown method got an
  answer without a content-type, which grpclib's own client refuses;
* a request that was reset at its arrival was kept for as long as its connection;
* a peer that reads nothing kept a closing connection, and its descriptor, open without end;
* a call that ended early left a cancellation in its task, at which a later timeout of that task failed;
* each stream that its client closed, the only way to end a health stream, left a line in the server's log;
* a peer could ping, reset requests or send empty and unknown frames ten thousands of times a second without
  a consequence;
* any number of connections and requests was accepted, until no descriptors were left, and stayed open without
  end although its peer sent nothing;
* closing the server informed no client, left connections open, and from Python 3.12 hung.
"""

import asyncio
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Final

import h2.exceptions
from grpclib import protocol, server
from grpclib.const import Status
from grpclib.encoding.base import GRPC_CONTENT_TYPE
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.metadata import Deadline
from grpclib.utils import Wrapper
from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, ResponseReceived
from h2.exceptions import ProtocolError
from h2.stream import StreamInputs
from hyperframe.frame import (
    AltSvcFrame,
    DataFrame,
    ExtensionFrame,
    Frame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from agent.serve.sockets import abort_transport, is_lost, longest_wait_of_largest_peer
from agent.system.output import LogRateLimiter, get_logger

OBSERVER_HEADER: Final = "drahealth-observer"
"""Header of a health stream's request whose client is not the kubelet, such as `drahealth watch`."""

log = get_logger(__name__)

# --- DATA frames --------------------------------------------------------------------------------------------
# h2 makes the frames of a message for each stream, and copies the data three times. Here they are made
# once for all streams with the same number; reserve_window() updates h2's state as h2's send_data does.

DATA: Final = 0
"""Type number of an HTTP/2 DATA frame."""
_HEAD: Final = struct.Struct(">HBBBI")
"""Layout of the header of an HTTP/2 frame: length in 24 bits, type, flags, stream."""
PREFIX: Final = struct.Struct(">BI")
"""Layout of the prefix of a gRPC message: compressed flag and length."""


def reserve_window(connection: H2Connection, stream_id: int, size: int) -> bool:
    """Reserve `size` bytes in the flow control windows of a stream and its connection, if both have room.

    Returns True if the caller must send the bytes now; False if a window lacks room, the stream has ended or
    GOAWAY was received: nothing was reserved.
    """
    stream = connection.streams.get(stream_id)
    if stream is None:
        return False
    if size > min(connection.outbound_flow_control_window, stream.outbound_flow_control_window):
        return False
    try:
        connection.state_machine.process_input(ConnectionInputs.SEND_DATA)
        stream.state_machine.process_input(StreamInputs.SEND_DATA)
    except ProtocolError:
        return False
    connection.outbound_flow_control_window -= size
    stream.outbound_flow_control_window -= size
    return True


def data_frames(data: bytes, stream_id: int, limit: int) -> bytes:
    """Return `data` as HTTP/2 DATA frames of a stream, each with at most `limit` bytes of data."""
    chunks = (data[offset : offset + limit] for offset in range(0, len(data), limit))
    return b"".join(
        _HEAD.pack(len(chunk) >> 8, len(chunk) & 0xFF, DATA, 0, stream_id) + chunk for chunk in chunks
    )


@lru_cache(maxsize=2)  # most health streams are the first of their connection, and send one of two lists
def message_frames(message: bytes, stream_id: int, limit: int) -> bytes:
    """Return an encoded gRPC message with its prefix as DATA frames of at most `limit` bytes of data."""
    return data_frames(PREFIX.pack(0, len(message)) + message, stream_id, limit)


Headers = list[tuple[str, str]]

CONTROL_FRAMES_BURST: Final = 2048
"""Number of control frames that a peer may send at once: a full socket's requests, all cancelled, and as many
pings."""
CONTROL_FRAMES_PER_S: Final = 100
"""Number of control frames that a peer may send for long [1/s]; a kubelet sends less than one."""

REQUESTS_LIMIT: Final = 4 << 20
"""Largest size of all open requests of one server together [bytes]."""
USER_REQUESTS_LIMIT: Final = REQUESTS_LIMIT * 3 // 4
"""Largest size of all open requests of one uid at one server [bytes]; the rest is for other users."""
ALL_REQUESTS_LIMIT: Final = 4 * REQUESTS_LIMIT
"""Largest size of all open requests on all sockets together [bytes]."""
RECEIVE_S: Final = 10.0
"""Time after which a request ends whose message has not arrived [s]."""

REQUEST_LIMIT: Final = 64 << 10
"""Largest size of one request, unless a stream class sets another limit [bytes]."""

GRACE_S: Final = 0.2
"""Time that a closing connection has to send its remaining data before it is aborted [s]."""

WRITE_LIMIT: Final = 256 << 10
"""Amount of data that a stream writes at once [bytes]; then the peer's unread data are checked."""
HEAD_SIZE: Final = (16 << 10) - PREFIX.size
"""Size of a message's first part [bytes], which is copied to be sent together with the prefix."""
UNREAD_LIMIT: Final = 2 << 20
"""Amount of data in the write buffer at which the connection to a peer that does not read is aborted
[bytes]."""
UNSENT_LIMIT: Final = 24 << 20
"""Maximum size of all data of gRPC servers with one :class:`UnsentMessages` that wait for clients to read
[bytes]: a sixteenth of the memory limit in the systemd unit.

The gRPC servers of the agent share one such object, and so do those of a driver instance. The agent's HTTP
server has its own limit of the same size, because its clients must not end the streams of the kubelet.
"""


def h2_config(*, client_side: bool) -> H2Configuration:
    """Return grpclib's h2 settings with Latin-1 headers instead of ASCII, because Latin-1 decodes any
    byte."""
    return H2Configuration(
        client_side=client_side,
        header_encoding="latin-1",
        validate_inbound_headers=False,
        validate_outbound_headers=False,
        normalize_inbound_headers=False,
        normalize_outbound_headers=False,
    )


class OpenRequestBytes:
    """Counter of the bytes of all open requests on one socket; each stream adds and subtracts its bytes."""

    def __init__(self, sockets: "list[OpenRequestBytes] | None" = None) -> None:
        """Create the counter and add it to ``sockets``, those of all sockets; None: the only socket."""
        self._sockets = sockets if sockets is not None else []
        self._sockets.append(self)
        self.used_bytes = 0
        self.of_uid: Counter[int] = Counter()
        """Bytes of the open requests of each uid."""

    def reserve(self, uid: int, size: int) -> str:
        """Add the bytes of a request of a uid. Returns why they are refused; empty: they are added."""
        if size and self.of_uid[uid] + size > USER_REQUESTS_LIMIT:
            return (
                f"other requests of uid {uid} hold {self.of_uid[uid]} bytes, limit {USER_REQUESTS_LIMIT} "
                "for a user"
            )
        if size and self.used_bytes + size > REQUESTS_LIMIT:
            return f"other requests hold {self.used_bytes} bytes, limit {REQUESTS_LIMIT} together"
        if size and (used := sum(socket.used_bytes for socket in self._sockets)) + size > ALL_REQUESTS_LIMIT:
            return f"requests on all sockets hold {used} bytes, limit {ALL_REQUESTS_LIMIT} together"
        self.of_uid[uid] += size
        self.used_bytes += size
        return ""

    def release(self, uid: int, size: int) -> None:
        """Subtract the bytes of a request of a uid."""
        self.used_bytes -= size
        self.of_uid[uid] -= size
        if not self.of_uid[uid]:
            del self.of_uid[uid]


class UnsentMessages:
    """Messages that servers cannot send until a client reads, with a limit on their memory.

    Streams that wait to send the same bytes object share its memory. Above the limit, of the streams of the
    uid that holds most bytes, the one that has waited longest is ended first. Used only in the event loop of
    the servers.
    """

    def __init__(self, limit_bytes: int = UNSENT_LIMIT) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: dict[HardenedStream, tuple[tuple[bytes, ...], float]] = {}
        """Waiting messages and start of the wait [s] by stream; the longest wait is first."""
        self._log_limit = LogRateLimiter()

    def add(self, stream: "HardenedStream", *messages: bytes) -> None:
        """Count the messages of a stream that waits for its client to read.

        If the messages exceed UNSENT_LIMIT, streams of the uid that holds most bytes are ended, the longest
        wait first. Call :meth:`discard` after the wait.
        """
        now_s = asyncio.get_running_loop().time()
        self._waiting[stream] = messages, now_s
        while (used := self._used_bytes(self._waiting)) > self._limit_bytes and len(self._waiting) > 1:
            slowest = longest_wait_of_largest_peer(self._waiting, lambda stream: stream.uid, self._used_bytes)
            _, since_s = self._waiting.pop(slowest)
            text = (
                f"the client has not read for {now_s - since_s:.1f} s, and data that wait for clients take "
                f"{used} bytes, limit {self._limit_bytes}"
            )
            slowest.end_unread(
                GRPCError(Status.RESOURCE_EXHAUSTED, f"{text}; connect again, and read faster")
            )
            if count := self._log_limit.tick():
                log.warning(
                    "gRPC stream of uid %d: ended: %s; %d streams ended since the last line; their clients "
                    "must connect again",
                    slowest.uid,
                    text,
                    count,
                )

    def discard(self, stream: "HardenedStream") -> None:
        """Stop counting the messages of a stream, whose wait for its client has ended."""
        self._waiting.pop(stream, None)

    def _used_bytes(self, streams: "Iterable[HardenedStream]") -> int:
        """Return the size of the messages and write buffers of waiting streams together [bytes]."""
        messages, transports = dict[int, int](), set[asyncio.Transport]()
        for stream in streams:
            waiting, _ = self._waiting[stream]
            messages.update((id(message), len(message)) for message in waiting)
            transports.add(stream.write_buffer)
        return sum(messages.values()) + sum(transport.get_write_buffer_size() for transport in transports)


class ClientGone(GRPCError, StreamTerminatedError):
    """Error that ends a request whose client has reset the request or closed the connection.

    The class is also a GRPCError, because grpclib logs every other StreamTerminatedError.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(Status.CANCELLED, reason)


def end_without_log(stream: server.Stream[Any, Any]) -> None:
    """End a request of a grpclib server without a log line if its client is gone.

    The request ends with :class:`ClientGone`. Call this function in the request's task when the task is
    cancelled.
    """
    wrapper = stream._stream.wrapper
    if wrapper is not None and isinstance(wrapper._error, StreamTerminatedError):
        wrapper._error = ClientGone(str(wrapper._error))


class LentStream(ABC):
    """Interface to a stream on whose connection another thread may send: see ``idle_streams.py``."""

    @abstractmethod
    def lend(self) -> None:
        """Lend the stream again, if it still waits for a message and nothing waits to be sent."""

    @abstractmethod
    def take_back(self) -> None:
        """Take the stream back, so that the event loop can use its connection."""


class HardenedStream(protocol.Stream):
    """HTTP/2 stream that refuses messages above a size limit, and can send a message without waiting."""

    _transport: "_LendingTransport"
    limit = REQUEST_LIMIT
    compressed = Status.UNIMPLEMENTED
    memory: OpenRequestBytes | None = None
    """Counter of the size of the server's open requests; None: a client's stream."""
    unsent: UnsentMessages | None = None
    """Messages of the server that wait for clients to read; None: a client's stream."""
    uid = -1
    """User id of the client's process; -1: not known, or a client's stream."""
    deadline: Deadline | None = None
    """Time at which the server ends the request; None: the client has set none, or is this process."""
    _held = 0
    _receive_timer: asyncio.TimerHandle | None = None
    _deadline_timer: asyncio.TimerHandle | None = None

    _at_prefix = True
    """True: grpclib reads the 5-byte prefix of a gRPC message next. False: it reads the body."""
    _empty_is_a_message = True
    """True: a stream that ends without data is an empty message, as before a request."""

    async def recv_data(self, size: int) -> bytes:
        """Return the next ``size`` bytes of a message's prefix or body; no bytes at the end of the stream.

        Raises:
            GRPCError: UNIMPLEMENTED for a compressed request, INTERNAL for a compressed response;
                RESOURCE_EXHAUSTED for a message above ``limit``, or if all open requests together are above
                :data:`REQUESTS_LIMIT`; INTERNAL if the stream ends in the middle of a message;
                DEADLINE_EXCEEDED if a request's message does not arrive within :data:`RECEIVE_S`.
        """
        if self.memory is not None and self._receive_timer is None:
            text = f"the message of the request has not arrived within {RECEIVE_S:g} s; send it at once"
            self._receive_timer = asyncio.get_running_loop().call_later(RECEIVE_S, self._end_late, text)
        if not self._at_prefix:
            self._reserve_memory(size)
        try:
            data = await super().recv_data(size)
        except AssertionError:  # raised by grpclib if the stream has ended
            raise GRPCError(Status.INTERNAL, "the gRPC stream ended in the middle of a message") from None
        if not self._at_prefix and len(data) < size:
            raise GRPCError(Status.INTERNAL, "the gRPC stream ended in the middle of a message")
        if self._at_prefix and data and data[0]:
            raise GRPCError(
                self.compressed, "compressed messages are not supported; send grpc-encoding: identity"
            )
        if self._at_prefix and not data and self._empty_is_a_message:
            data = bytes(size)
        self._empty_is_a_message = False
        self._at_prefix = not self._at_prefix
        if self._at_prefix and self._receive_timer is not None:  # the message is complete
            self._receive_timer.cancel()
        return data

    def set_deadline(self, timeout_s: float) -> None:
        """End a server's request with DEADLINE_EXCEEDED after a time [s], unless it has ended before.

        grpclib answers UNKNOWN, and logs a traceback, if the time is over before it handles the request.
        """
        self.deadline = Deadline.from_timeout(timeout_s)
        loop = asyncio.get_running_loop()
        self._deadline_timer = loop.call_later(timeout_s, self._end_late, "deadline exceeded")

    def _end_late(self, text: str) -> None:
        """End a server's request that has exceeded a limit of time."""
        if self.wrapper is not None:
            self.wrapper.cancel(GRPCError(Status.DEADLINE_EXCEEDED, text))

    def _reserve_memory(self, size: int) -> None:
        if size > self.limit:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, f"message is {size} bytes, limit {self.limit}; refused unread"
            )
        if self.memory is None:
            return
        if reason := self.memory.reserve(self.uid, size):
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"message is {size} bytes, and {reason}; refused unread; retry later",
            )
        self._held += size

    def __terminated__(self, reason: str) -> None:
        """End a request of a server with :class:`ClientGone`, because its client is gone."""
        if self.wrapper is None or self.memory is None:
            super().__terminated__(reason)
        else:
            self.wrapper.cancel(ClientGone(reason))

    def release(self) -> None:
        """End the limits of an ended request: of its time, and of the size of the server's open requests."""
        for timer in (self._receive_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        if self.memory is not None:
            self.memory.release(self.uid, self._held)
            self._held = 0

    async def send_headers(self, headers: Headers, end_stream: bool = False) -> None:
        """Send headers or trailers; add the content-type if an answer lacks it."""
        await super().send_headers(_with_content_type(headers), end_stream=end_stream)

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send all data; wait for the peer to read if its window has no room.

        A server's data are counted while they wait. Raises GRPCError if the peer reads too slowly: see
        :class:`UnsentMessages`.
        """
        if end_stream:
            await super().send_data(data, end_stream=True)
        elif len(data) > WRITE_LIMIT or not self.send_nowait(data):
            with self.counted_unsent(data):
                await self._send_parts(data)

    async def _send_parts(self, data: bytes, offset: int = 0) -> None:
        """Send all data from the offset on. Copies only the bytes that are sent at once."""
        assert self.id is not None
        while offset < len(data):
            await self.connection.write_ready.wait()
            self._transport.take_back_lent()
            window = self._h2_connection.local_flow_control_window(self.id)
            size = min(window, WRITE_LIMIT, len(data) - offset)
            if size > 0 and self.send_nowait(data[offset : offset + size]):
                offset += size
            else:
                self.window_updated.clear()
                await self.window_updated.wait()

    @contextmanager
    def counted_unsent(self, *messages: bytes) -> Iterator[None]:
        """Count a server's messages in ``unsent`` in a ``with`` block, which waits for the peer to read."""
        if self.unsent is None:
            yield
            return
        self.unsent.add(self, *messages)
        try:
            yield
        finally:
            self.unsent.discard(self)

    async def send_uncounted_message(self, message: bytes) -> None:
        """Send an encoded message with its prefix; the message is not copied while the peer does not read.

        Call it in a block of :meth:`counted_unsent`.
        """
        await self._send_parts(PREFIX.pack(0, len(message)) + message[:HEAD_SIZE])
        await self._send_parts(message, HEAD_SIZE)

    @property
    def write_buffer(self) -> asyncio.Transport:
        """Transport of the stream's connection, whose write buffer all streams of the connection share."""
        return self._transport

    @property
    def frame_size(self) -> int:
        """Largest size of the data in one frame to the peer [bytes]."""
        return self._h2_connection.max_outbound_frame_size

    @property
    def room(self) -> int:
        """Room in the flow control windows of the stream and its connection [bytes]."""
        assert self.id is not None
        return self._h2_connection.local_flow_control_window(self.id)

    @property
    def lent(self) -> LentStream | None:
        """Stream of the same connection on which another thread may send; None: there is none."""
        return self._transport.lent

    @lent.setter
    def lent(self, stream: LentStream | None) -> None:
        self._transport.lent = stream

    def is_idle(self) -> bool:
        """Return True if the stream can send data, and no other data wait to be sent on its connection."""
        if self.id is None or self._transport.is_closing():
            return False
        self.connection.flush()
        return not self._transport.get_write_buffer_size() and reserve_window(self._h2_connection, self.id, 0)

    def use_window(self, size: int) -> None:
        """Subtract the size of data that another thread has sent from the flow control windows [bytes]."""
        connection = self._h2_connection
        connection.outbound_flow_control_window -= size
        if self.id is not None and (stream := connection.streams.get(self.id)) is not None:
            stream.outbound_flow_control_window -= size

    def write_rest(self, rest: bytes) -> None:
        """Send the end of a frame whose beginning was sent by another thread."""
        if not self._transport.is_closing():
            self._transport.write(rest)

    def end_unread(self, error: GRPCError) -> None:
        """End a server's stream with a status; if the peer reads nothing at all, abort the connection."""
        if self._transport.get_write_buffer_size() or self.wrapper is None:
            self._transport.abort()
        else:
            self.wrapper.cancel(error)

    def send_nowait(self, data: bytes) -> bool:
        """Send all data if the peer's window and the write buffer have room for them.

        Returns False if nothing was sent.
        """
        return self._write_nowait(len(data), data_frames, data)

    def send_message_nowait(self, message: bytes) -> bool:
        """Send an encoded message with its prefix if the peer's window and the write buffer have room.

        Returns False if nothing was sent.
        """
        if len(message) > WRITE_LIMIT:
            return False
        return self._write_nowait(PREFIX.size + len(message), message_frames, message)

    def _write_nowait(self, size: int, make_frames: Callable[[bytes, int, int], bytes], data: bytes) -> bool:
        connection, stream_id = self._h2_connection, self.id
        if stream_id is None or self._transport.is_closing() or not self.connection.write_ready.is_set():
            return False
        self._transport.take_back_lent()
        if not reserve_window(connection, stream_id, size):
            return False
        before = connection.data_to_send()
        self._transport.write(before + make_frames(data, stream_id, connection.max_outbound_frame_size))
        return True


async def send_shared_message(
    stream: server.Stream[Any, Any], message: bytes, held: Sequence[bytes] = ()
) -> None:
    """Send an encoded message from the request's own task, and the initial metadata if they are not sent yet.

    Replaces ``stream.send_message()``, which copies the message. Streams that wait to send the same bytes
    object share its memory. Raises GRPCError if the client reads too slowly: see :class:`UnsentMessages`.

    Args:
        stream: Request.
        message: Encoded message.
        held: Other messages that the caller keeps during the wait, which are counted, too.
    """
    h2_stream = stream._stream
    if not isinstance(h2_stream, HardenedStream):  # a server of the driver
        await stream.send_message(message)
        return
    is_begun = stream._send_initial_metadata_done
    if not (is_begun and h2_stream.send_message_nowait(message)):
        with h2_stream.counted_unsent(message, *held):
            if not is_begun:
                await stream.send_initial_metadata()  # waits if the client does not read the socket
            await h2_stream.send_uncounted_message(message)
    stream._send_message_done = True  # grpclib refuses the status OK of a unary call without a message


def send_message_nowait(stream: server.Stream[Any, Any], message: bytes) -> bool:
    """Send an encoded message from a task other than the request's own, if the client's window has room.

    Call it only after the request's task has sent the initial metadata, and while that task sends nothing.
    Returns True if the message was sent; False: nothing was sent, and the request's task must send it.
    """
    h2_stream = stream._stream
    return isinstance(h2_stream, HardenedStream) and h2_stream.send_message_nowait(message)


def _with_content_type(headers: Headers) -> Headers:
    names = [name for name, _ in headers]
    if ":status" not in names or "content-type" in names:
        return headers
    return [*headers, ("content-type", GRPC_CONTENT_TYPE)]


def _cancel_waiting_tasks(wrapper: Wrapper, error: Exception) -> None:
    """Wake the tasks that wait within a wrapper of grpclib, which then raises `error` in them.

    Replaces Wrapper.cancel(), which leaves one more cancellation in Task.cancelling(): a later
    ``asyncio.timeout`` around the same task then raises CancelledError in place of TimeoutError.
    """
    tasks: set[asyncio.Task[Any]] = set(wrapper._tasks)
    Wrapper.cancel(wrapper, error)
    for task in tasks:
        task.uncancel()


class TooManyControlFrames(ProtocolError):
    """A peer has sent more frames without a message (ping, reset, settings, empty) than its budget allows."""

    error_code = ErrorCodes.ENHANCE_YOUR_CALM


class ControlFrameBudget:
    """Budget of one peer's control frames, which cost the server work and carry no message.

    The budget begins full and grows again with time. A message has no cost, so a busy peer keeps its
    connection.
    """

    COSTS: Final[dict[type[Frame], float]] = {
        PingFrame: 1.0,
        RstStreamFrame: 1.0,
        SettingsFrame: 1.0,
        PriorityFrame: 1.0,
        AltSvcFrame: 1.0,
        ExtensionFrame: 1.0,  # a frame of unknown type
        WindowUpdateFrame: 1 / 16,  # a peer that reads large reports sends many
        DataFrame: 1.0,  # only without data, which flow control does not limit
    }

    def __init__(
        self,
        on_exceeded: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
        *,
        burst: float = CONTROL_FRAMES_BURST,
        per_s: float = CONTROL_FRAMES_PER_S,
    ) -> None:
        """Create a full budget.

        Args:
            on_exceeded: Called before the peer's connection ends because the budget is used up.
            burst: Number of control frames that the peer may send at once.
            per_s: Number of control frames that the peer may send for long [1/s].
        """
        self._on_exceeded = on_exceeded
        self._clock = clock
        self._burst, self._per_s = burst, per_s
        self._left = float(burst)
        self._refilled_s = clock()

    def limit(self, connection: H2Connection, kinds: Iterable[type[Frame]] = COSTS) -> None:
        """Charge each control frame of these `kinds` on a connection to the budget, before h2 handles it."""
        table = connection._frame_dispatch_table
        for kind in kinds:
            table[kind] = partial(self.charge_frame, table[kind], self.COSTS[kind])

    def charge_frame(self, handle: Callable[[Frame], Any], cost: float, frame: Frame) -> Any:
        """Subtract the cost of a control frame from the budget, then handle the frame.

        Raises TooManyControlFrames if the budget is used up.
        """
        if not (isinstance(frame, DataFrame) and (frame.data or "END_STREAM" in frame.flags)):
            self.charge(cost)
        return handle(frame)

    def charge(self, cost: float = 1.0) -> None:
        """Subtract a cost from the budget. Raises TooManyControlFrames if the budget is used up."""
        self._left -= cost
        if self._left < 0:
            now_s = self._clock()
            refill = (now_s - self._refilled_s) * self._per_s
            self._left = min(self._burst, self._left + refill)
            self._refilled_s = now_s
            if self._left < 0:
                self._on_exceeded()
                raise TooManyControlFrames("the client sends too many HTTP/2 control frames")


class _LendingTransport(asyncio.Transport):
    """Transport of a connection, which takes a lent stream back before each use."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self.lent: LentStream | None = None

    def take_back_lent(self) -> None:
        """Take the stream of the connection back that another thread may use, if there is one."""
        if self.lent is not None:
            self.lent.take_back()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.take_back_lent()
        if not is_lost(self._transport):
            self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def close(self) -> None:
        self.take_back_lent()
        self._transport.close()

    def abort(self) -> None:
        self.take_back_lent()
        abort_transport(self._transport)


class _Connection(protocol.Connection):
    stream_class: type[HardenedStream] = HardenedStream
    memory: OpenRequestBytes | None = None
    unsent: UnsentMessages | None = None
    uid = -1

    def feed(self, data: bytes) -> list[Event]:
        """Return the HTTP/2 events in received ``data``.

        Raises FrameTooLargeError as soon as a frame's header announces too many bytes. The peer gets GOAWAY
        with the code of the error.
        """
        try:
            events = super().feed(data)
        except ProtocolError:
            self.flush()
            raise
        pending: bytearray = self._connection.incoming_buffer._data
        size, limit = int.from_bytes(pending[:3]), self._connection.max_inbound_frame_size
        if len(pending) >= 3 and size > limit:
            raise h2.exceptions.FrameTooLargeError(f"HTTP/2 frame has {size} bytes, limit {limit}")
        return events

    def create_stream(self, *, stream_id: int | None = None, wrapper: Any = None) -> HardenedStream:
        if wrapper is not None:
            wrapper.cancel = partial(_cancel_waiting_tasks, wrapper)
        stream = self.stream_class(
            self, self._connection, self._transport, stream_id=stream_id, wrapper=wrapper
        )
        stream.memory = self.memory
        stream.unsent = self.unsent
        stream.uid = self.uid
        return stream


class _Events(protocol.EventsProcessor):
    def __init__(
        self, handler: protocol.AbstractHandler, connection: _Connection, transport: asyncio.Transport
    ) -> None:
        super().__init__(handler, connection)
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def process(self, event: Event) -> None:
        """Handle an event of an HTTP/2 connection; an event type that grpclib does not know is ignored."""
        if event.__class__ in getattr(self, "processors", ()):
            super().process(event)

    def process_data_received(self, event: DataReceived) -> None:
        """Pass on received data; an empty frame is ignored, which grpclib takes for the end of the stream."""
        if event.flow_controlled_length:
            super().process_data_received(event)

    def process_response_received(self, event: ResponseReceived) -> None:
        """Add missing response headers before grpclib's client reads them, which would raise a KeyError."""
        headers: Headers = [(str(name), str(value)) for name, value in event.headers]
        if ":status" not in dict(headers):
            headers.append((":status", "none"))
        event.headers = _with_content_type(headers)  # type: ignore[assignment]  # h2 decodes, as configured
        super().process_response_received(event)

    def close(self, reason: str = "Connection closed") -> None:
        """Close an HTTP/2 connection; abort it if its data are not sent within :data:`GRACE_S`."""
        super().close(reason)
        self._loop.call_later(GRACE_S, self._transport.abort)


class HardenedProtocol(protocol.H2Protocol):
    """asyncio protocol of one gRPC connection, of a server or client, with the limits of this module."""

    stream_class: type[HardenedStream] = HardenedStream
    memory: OpenRequestBytes | None = None
    unsent: UnsentMessages | None = None
    uid = -1
    """User id of the peer's process; -1: not known."""
    transport: _LendingTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        transport = _LendingTransport(transport)
        connection = _Connection(self.connection._connection, transport, config=self.config)
        connection.stream_class = self.stream_class
        connection.memory = self.memory
        connection.unsent = self.unsent
        connection.uid = self.uid
        self.transport = transport
        self.connection = connection
        self.processor: protocol.EventsProcessor = _Events(self.handler, connection, transport)

    def data_received(self, data: bytes) -> None:
        """Handle data of the peer; a stream of the connection that is lent to another thread is taken back
        meanwhile, because the data may change the windows or end the stream."""
        lent = self.transport.lent
        if lent is not None:
            lent.take_back()
        super().data_received(data)
        if lent is not None:
            lent.lend()
        if self.transport.get_write_buffer_size() > UNREAD_LIMIT:
            self.transport.abort()

    def eof_received(self) -> None:
        """Close the connection, because its peer sends nothing more; abort it if its data are not sent within
        :data:`GRACE_S`."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(GRACE_S, self.transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the connection; no other thread may use its socket any more, which is closed next."""
        self.transport.take_back_lent()
        super().connection_lost(exc)
