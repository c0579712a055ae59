"""A client's connection for answers that list a whole node: those of the kubelet's own sockets."""

from typing import Final

from grpclib import client, protocol

from agent.serve.grpc.channel import Channel, SizedStream
from agent.serve.grpc.hardened import Protocol

LIMIT: Final = 16 << 20
"""The largest message that is read [bytes]; what Kubernetes' own clients of podresources take."""


class _Stream(SizedStream):
    limit = LIMIT


class _Protocol(Protocol):
    stream_class = _Stream


class WideChannel(Channel):
    """One connection to a unix socket; a message above :data:`LIMIT` raises TooLarge."""

    def _protocol_factory(self) -> protocol.H2Protocol:
        return _Protocol(client.Handler(), self._config, self._h2_config)
