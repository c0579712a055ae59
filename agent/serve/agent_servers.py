"""gRPC servers of the agent on the sockets in its runtime directory.

``drivers/<driver>.sock`` serves the kubelet's health API, v1 and v1alpha1, and the driver link.
``agent.sock`` serves the agent's own API to the command line.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from agent.config.config import DRIVERS
from agent.config.values import check_driver_names
from agent.errors import ConfigError
from agent.model.health import DeviceHealth
from agent.model.report import Report, SocketSubscribers
from agent.native.health_encoder import WireHealth, encode_health_lists
from agent.serve.agent_api.service import AgentService, ClearRequests
from agent.serve.driver_link.handler import DriverLinkHandler
from agent.serve.driver_link.service import DriverLinkRequestStream, DriverLinkService
from agent.serve.grpc.hardened import UnsentMessages
from agent.serve.grpc.server import HardenedServer
from agent.serve.health.feed import HealthListEncoder
from agent.serve.health.service import HealthPublisher, HealthService
from agent.serve.sockets import UnixListener, check_path_length, make_socket_directory, remove_stale_sockets
from agent.system.threads.latest_value import LatestValue

SHUTTING_DOWN: Final = "agent shutting down"
"""Text of the UNAVAILABLE status with which streams end when the agent ends."""

AGENT_SOCKET: Final = "agent.sock"

LEASE_LIMIT_S: Final = 86_400
"""Longest lease that is sent [s]: one that overflows the kubelet's 64-bit nanoseconds would end at once."""


def encode_device_health(devices: Sequence[DeviceHealth], extra_lease_s: int = 0) -> list[bytes]:
    """Encode devices as NodeWatchResourcesResponse messages of at most 1 MiB each, in the C core.

    Each lease is ``extra_lease_s`` longer than the device's, and :data:`LEASE_LIMIT_S` at most.
    """
    return encode_health_lists(
        [
            WireHealth(
                device.pool,
                device.device,
                device.health,
                int(device.verified.wall_s),
                min(device.timeout_s + extra_lease_s, LEASE_LIMIT_S),
                device.message,
            )
            for device in devices
        ]
    )


def socket_names(drivers: Sequence[str]) -> tuple[str, ...]:
    """Return the sockets' paths below the runtime directory: one per driver, in their order, then the
    agent's.

    Raises:
        ConfigError: A driver's name is not valid, or is given twice.
    """
    try:
        check_driver_names(tuple(drivers))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return (*(f"{DRIVERS}/{name}.sock" for name in drivers), AGENT_SOCKET)


class AgentServers:
    """Sockets of the agent; :meth:`run` serves them."""

    def __init__(
        self,
        latest: LatestValue[Report],
        *,
        runtime_dir: Path,
        drivers: Sequence[str],
        version: str,
        encode_list: HealthListEncoder = encode_device_health,
        open_handler: Callable[[str], DriverLinkHandler] | None = None,
        clear_requests: ClearRequests | None = None,
    ) -> None:
        """Create the missing directories (mode 0750) and all sockets; after an exception no socket remains.

        Removes the sockets of drivers that are no longer configured. The caller holds the runtime
        directory's lock.

        Args:
            latest: Reports to serve.
            runtime_dir: Directory of the sockets.
            drivers: Names of the drivers.
            version: Version of the agent.
            encode_list: Encoder of health lists.
            open_handler: Returns the handler of a driver's calls; called in a thread at the driver's first
                call. None: the drivers' sockets have no driver link.
            clear_requests: Queue of requests of operators to clear faults; None: faults cannot be cleared.

        Raises:
            ResourceBusy: Another process serves one of the sockets.
            ConfigError: A driver's name is not valid, a socket's path is too long, or a file that is not a
                socket is there.
            PermissionDenied: This process may not create a directory or a socket.
        """
        self._latest = latest
        self._drivers = tuple(drivers)
        self._version = version
        self._encode = encode_list
        self._open_handler = open_handler
        self._clear_requests = clear_requests
        self._listeners: dict[str, UnixListener] = {}
        names = socket_names(drivers)
        for name in names:
            check_path_length(runtime_dir / name, flag="--runtime-dir")
        try:
            for name in names:
                make_socket_directory((runtime_dir / name).parent, flag="--runtime-dir")
                self._listeners[name] = UnixListener(runtime_dir / name)
            remove_stale_sockets(runtime_dir / DRIVERS, keep=self.paths)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the sockets: one per driver, in their order, then the agent's."""
        return tuple(listener.path for listener in self._listeners.values())

    def close(self) -> None:
        """Remove the sockets. Needed only if :meth:`run` was never called, which removes them at its end."""
        for listener in self._listeners.values():
            listener.close()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve all sockets until cancelled; then end all streams and remove the sockets.

        ``ready`` is called when all sockets are served. The shutdown takes less than a second, even if a
        client does not read. Event loop only.

        Raises:
            ValueError: A report names a device twice.
        """
        publisher = HealthPublisher(self._latest, self._encode, self._drivers)
        services: dict[str, HealthService | AgentService] = {}
        servers: dict[str, HardenedServer] = {}

        def subscribers() -> tuple[SocketSubscribers, ...]:
            return tuple(
                SocketSubscribers(name, service.streams, len(servers[name].connections))
                for name, service in services.items()
            )

        for driver, name in zip(self._drivers, self._listeners, strict=False):
            services[name] = HealthService(publisher.subscribers_of(driver), repeats_after_end=True)
        services[AGENT_SOCKET] = AgentService(
            self._latest,
            version=self._version,
            subscribers=subscribers,
            clear_requests=self._clear_requests,
        )
        links: dict[str, DriverLinkService] = {}
        if self._open_handler is not None:
            for driver, name in zip(self._drivers, self._listeners, strict=False):
                links[name] = DriverLinkService(driver, partial(self._open_handler, driver))
        open_server = partial(HardenedServer, unsent=UnsentMessages(), sockets=len(services))
        for name, service in services.items():
            servers[name] = (
                open_server([service, links[name]], stream_class=DriverLinkRequestStream)
                if name in links
                else open_server([service])
            )
        try:
            for name, server in servers.items():
                await server.listen(self._listeners[name].sock)
            ready()
            await publisher.run()
        finally:
            await asyncio.gather(*(server.stop(SHUTTING_DOWN) for server in servers.values()))
            await asyncio.gather(*(link.close() for link in links.values()))
            self.close()
