"""gRPC clients' connections to unix sockets. A message above the size limit is refused before it is read.

:class:`UnixChannel` is for calls; :class:`RawChannel` is for the conformance checks of a driver's server.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import h2.exceptions
from grpclib import client, protocol
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import StreamTerminatedError
from h2.errors import ErrorCodes
from h2.events import Event
from h2.settings import SettingCodes
from hyperframe.frame import Frame, GoAwayFrame

from agent.serve.grpc.codec import Codec
from agent.serve.grpc.hardened import HardenedProtocol, HardenedStream, h2_config

RESPONSE_LIMIT: Final = 4 << 20
"""Largest message that a client reads [bytes]; the kubelet has the same limit."""
KUBELET_RESPONSE_LIMIT: Final = 16 << 20
"""Largest message that a client of the kubelet reads [bytes]; Kubernetes' own clients of the podresources API
have the same limit."""
WINDOW: Final = 4 << 20
"""Flow control window of a raw channel's streams [bytes], grpclib's default, unless it is set to zero."""


class ResponseTooLarge(Exception):
    """A server's message is larger than the client's limit; the message was not read."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the answer is {size} bytes, limit {limit}")
        self.size = size


class ClientStream(HardenedStream):
    """Stream of a gRPC client that refuses a response above :data:`RESPONSE_LIMIT` with a GRPCError."""

    limit = RESPONSE_LIMIT
    compressed = Status.INTERNAL
    _empty_is_a_message = False


class SizeReportingStream(ClientStream):
    """Stream of a gRPC client that refuses a response above the limit with :class:`ResponseTooLarge`."""

    async def recv_data(self, size: int) -> bytes:
        """Return the next ``size`` bytes of a gRPC message's prefix or body. Raises ResponseTooLarge."""
        if not self._at_prefix and size > self.limit:
            raise ResponseTooLarge(size, self.limit)
        return await super().recv_data(size)


class KubeletClientStream(SizeReportingStream):
    """Stream of a client of the kubelet, whose answers list all pods of the Kubernetes node."""

    limit = KUBELET_RESPONSE_LIMIT


class _ClientProtocol(HardenedProtocol):
    stream_class = ClientStream
    on_data: Callable[[int], None] | None = None

    def data_received(self, data: bytes) -> None:
        if self.on_data is not None:
            self.on_data(len(data))
        super().data_received(data)


class UnixChannel(client.Channel):
    """Connection of a gRPC client to a unix socket; ``stream_class`` has the size limit of responses."""

    def __init__(self, path: str, stream_class: type[ClientStream] = ClientStream) -> None:
        super().__init__(path=path, codec=Codec())
        self._h2_config = h2_config(client_side=True)
        self._stream_class = stream_class
        self.received_bytes = 0
        """Number of bytes that the server has sent; if it grows, the server still works on an answer."""

    async def __connect__(self) -> protocol.H2Protocol:
        connected = await super().__connect__()
        if connected.connection.is_closing():  # grpclib would raise AttributeError
            raise StreamTerminatedError("connection to the server lost")
        return connected

    def _protocol_factory(self) -> protocol.H2Protocol:
        made = _ClientProtocol(client.Handler(), self._config, self._h2_config)
        made.stream_class = self._stream_class
        made.on_data = self._count_received
        return made

    def _count_received(self, size: int) -> None:
        self.received_bytes += size


# --- for conformance checks of servers ----------------------------------------------------------------------


class _BytesCodec(CodecBase):
    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: type[bytes]) -> bytes:
        return message

    def decode(self, data: bytes, message_type: type[bytes]) -> bytes:
        return data


class _RawStream(SizeReportingStream):
    def reset_nowait(self, error_code: ErrorCodes = ErrorCodes.CANCEL) -> None:
        """Reset the gRPC stream with the code CANCEL, as grpc-go's client does."""
        super().reset_nowait(error_code)


class _RawProtocol(HardenedProtocol):
    stream_class = _RawStream
    goaway = ""
    """Code and text of the server's GOAWAY frame; empty: the server sent none."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # h2 accepts nothing more from a server after GOAWAY, not even the ping that follows. grpc-go
        # continues the open streams for as long as the server does.
        self.connection._connection._frame_dispatch_table[GoAwayFrame] = self._record_goaway

    def _record_goaway(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        code = next((known.name for known in ErrorCodes if known == frame.error_code), str(frame.error_code))
        text = (frame.additional_data or b"").decode(errors="replace")
        self.goaway = f"{code} {text}".rstrip()
        return [], []


class RawChannel(UnixChannel):
    """Connection of a gRPC client for conformance checks, whose messages are not decoded.

    The caller can read the server's GOAWAY frame and close the flow control window. A response above
    :data:`RESPONSE_LIMIT` raises :class:`ResponseTooLarge`.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._codec = _BytesCodec()

    async def connect(self) -> None:
        """Connect to the server's socket. Raises OSError or StreamTerminatedError."""
        await self.__connect__()

    @property
    def goaway(self) -> str:
        """Code and text of the GOAWAY frame with which the server ends the connection; empty: none."""
        return self._protocol.goaway if isinstance(self._protocol, _RawProtocol) else ""

    def set_window(self, size: int) -> None:
        """Set the flow control window of all streams; zero is that of a client that stops reading."""
        if self._protocol is None or self._protocol.connection.is_closing():
            return
        try:
            self._protocol.connection._connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: size})
        except h2.exceptions.ProtocolError:  # the connection has ended; its streams report that
            return
        self._protocol.connection.flush()

    def _protocol_factory(self) -> protocol.H2Protocol:
        return _RawProtocol(client.Handler(), self._config, self._h2_config)
