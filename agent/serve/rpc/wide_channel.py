"""A client's connection for answers that list a whole node: those of the kubelet's own sockets."""

from typing import Final

from grpclib import client, protocol

from agent.serve.rpc.channel import Channel, ClientStream
from agent.serve.rpc.hardened import Protocol

LIMIT: Final = 16 << 20
"""The largest message that is read [bytes]; what Kubernetes' own clients of podresources take."""


class TooLarge(Exception):
    """A message above the limit; nothing of it was read."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the answer is {size} bytes, limit {LIMIT}")


class _Stream(ClientStream):
    async def recv_data(self, size: int) -> bytes:
        if not self._at_prefix and size > self.limit:
            raise TooLarge(size)
        return await super().recv_data(size)

    limit = LIMIT


class _Protocol(Protocol):
    stream_class = _Stream


class WideChannel(Channel):
    """One connection to a unix socket; a message above :data:`LIMIT` raises :class:`TooLarge`."""

    def _protocol_factory(self) -> protocol.H2Protocol:
        return _Protocol(client.Handler(), self._config, self._h2_config)
