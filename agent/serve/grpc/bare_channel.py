"""A client's connection that hides nothing: raw messages, their size, GOAWAY, and a window that can be shut.

For whoever judges a server. It believes it as little as :class:`~agent.serve.grpc.channel.Channel` does.
"""

import asyncio
from typing import Final

import h2.exceptions
from grpclib import client, protocol
from grpclib.encoding.base import CodecBase
from h2.errors import ErrorCodes
from h2.events import Event
from h2.settings import SettingCodes
from hyperframe.frame import Frame, GoAwayFrame

from agent.serve.grpc.channel import Channel, SizedStream
from agent.serve.grpc.hardened import Protocol

WINDOW: Final = 4 << 20
"""What a stream may send unread, but while it is shut [bytes]; grpclib's own."""


class _Bytes(CodecBase):
    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: type[bytes]) -> bytes:
        return message

    def decode(self, data: bytes, message_type: type[bytes]) -> bytes:
        return data


class _Stream(SizedStream):
    def reset_nowait(self, error_code: ErrorCodes = ErrorCodes.CANCEL) -> None:
        """As grpc-go's client ends what it has no use for any more."""
        super().reset_nowait(error_code)


class _Protocol(Protocol):
    stream_class = _Stream
    goaway = ""
    """What the server's GOAWAY said; empty: it sent none."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # h2 takes nothing more from a server that has said GOAWAY, not even the ping that follows it. grpc-go
        # goes on with the streams that are open, for as long as the server does.
        self.connection._connection._frame_dispatch_table[GoAwayFrame] = self._note_goaway

    def _note_goaway(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        code = next((one.name for one in ErrorCodes if one == frame.error_code), str(frame.error_code))
        words = (frame.additional_data or b"").decode(errors="replace")
        self.goaway = f"{code} {words}".rstrip()
        return [], []


class BareChannel(Channel):
    """One connection to a unix socket; requests and responses are bytes.

    A message above :data:`~agent.serve.grpc.channel.RESPONSE_LIMIT` raises
    :class:`~agent.serve.grpc.channel.TooLarge`.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._codec = _Bytes()

    async def connect(self) -> None:
        """Connects now. Raises OSError, or StreamTerminatedError."""
        await self.__connect__()

    @property
    def goaway(self) -> str:
        """What the server's GOAWAY said; empty: it sent none. It takes no more streams after one."""
        return self._protocol.goaway if isinstance(self._protocol, _Protocol) else ""

    def shut(self) -> None:
        """Leaves the server no room to send on any stream, as a client does that stops to read."""
        self._set_window(0)

    def reopen(self) -> None:
        """Gives the room back."""
        self._set_window(WINDOW)

    def _set_window(self, size: int) -> None:
        if self._protocol is None or self._protocol.connection.is_closing():
            return
        try:
            self._protocol.connection._connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: size})
        except h2.exceptions.ProtocolError:  # the connection has ended, and its streams say so
            return
        self._protocol.connection.flush()

    def _protocol_factory(self) -> protocol.H2Protocol:
        return _Protocol(client.Handler(), self._config, self._h2_config)
