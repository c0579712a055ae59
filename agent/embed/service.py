"""What a driver's own grpclib server needs of us: the health service, its codec, the names to register."""

from typing import Final

from agent.model.report import Report
from agent.serve.grpc.codec import Codec
from agent.serve.health.embedded_service import SERVICES, EmbeddedHealth, HostedCodec
from agent.serve.servers import encode_devices
from agent.system.threads.latest import Latest

SUPPORTED_SERVICES: Final = SERVICES
"""For the ``supported_versions`` of a registration, beside ``v1.DRAPlugin``; the newest first."""
STOPPED: Final = "health monitor stopped"
"""What clients read when the monitor ends; the status is UNAVAILABLE."""


def codec() -> Codec:
    """For :class:`grpclib.server.Server`. Lists that are encoded already go out as they are; messages of the
    driver's own services are coded by the library that they are of, Google's protobuf or betterproto.
    """
    return HostedCodec()


def open_service(latest: Latest[Report], driver: str) -> EmbeddedHealth:
    """A service of the driver's devices, for a server of grpclib's with :func:`codec`.

    It runs in the loop of the server that serves it; ``latest`` must be followed by nobody else.
    """
    return EmbeddedHealth(latest, encode_devices, driver)
