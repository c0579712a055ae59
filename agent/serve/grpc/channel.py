"""The client side: a connection to a unix socket that believes no server blindly."""

from typing import Final

from grpclib import client, protocol
from grpclib.const import Status
from grpclib.exceptions import StreamTerminatedError

from agent.serve.grpc.codec import Codec
from agent.serve.grpc.hardened import Protocol, Stream, h2_config

RESPONSE_LIMIT: Final = 4 << 20
"""The largest message that our client reads [bytes]; the kubelet's own limit is the same."""


class ClientStream(Stream):
    """The same for responses, of which there may well be none."""

    limit = RESPONSE_LIMIT
    compressed = Status.INTERNAL
    _empty_is_a_message = False


class TooLarge(Exception):
    """A message above the limit; nothing of it was read."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the answer is {size} bytes, limit {limit}")
        self.size = size


class SizedStream(ClientStream):
    """Likewise, but says of what size a message is that it does not take: raises :class:`TooLarge`."""

    async def recv_data(self, size: int) -> bytes:
        """The next ``size`` bytes of a message's prefix or body."""
        if not self._at_prefix and size > self.limit:
            raise TooLarge(size, self.limit)
        return await super().recv_data(size)


class _ClientProtocol(Protocol):
    stream_class = ClientStream


class Channel(client.Channel):
    """A client's connection to a unix socket, with a limit on what it takes."""

    def __init__(self, path: str) -> None:
        super().__init__(path=path, codec=Codec())
        self._h2_config = h2_config(client_side=True)

    async def __connect__(self) -> protocol.H2Protocol:
        found = await super().__connect__()
        if found.connection.is_closing():  # grpclib would look for its transport, which is gone
            raise StreamTerminatedError("Connection lost")
        return found

    def _protocol_factory(self) -> protocol.H2Protocol:
        return _ClientProtocol(client.Handler(), self._config, self._h2_config)
