"""All sockets of the agent with their services, and their common shutdown.

In the runtime directory: ``drivers/<driver>.sock``, each with the kubelet's own health API in both versions
and the driver link, and ``agent.sock``, the agent's API for the command line.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from agent.config.config import DRIVERS
from agent.config.values import check_drivers
from agent.errors import ConfigError
from agent.model.health import DeviceHealth
from agent.model.report import Report, Subscribers
from agent.native.encode import WireHealth, encode_health
from agent.serve.agent_api.service import AgentService
from agent.serve.driver_link.service import DriverLinkService, DriverLinkStream
from agent.serve.driver_link.types import DriverLinkHandler
from agent.serve.grpc.server import Server
from agent.serve.health.feed import EncodeDevices
from agent.serve.health.service import HealthPublisher, HealthService
from agent.serve.sockets import UnixListener, check_length, make_directory, remove_leftovers
from agent.system.threads.latest import Latest

SHUTTING_DOWN: Final = "agent shutting down"
"""Text for clients when the agent ends; the status is UNAVAILABLE."""

AGENT_SOCKET: Final = "agent.sock"


LEASE_LIMIT_S: Final = 86_400
"""Longest lease that is sent [s]. The kubelet counts in 64-bit nanoseconds; a lease that overflows would
end at once."""


def encode_devices(devices: Sequence[DeviceHealth], extra_s: int = 0) -> list[bytes]:
    """Return the health list as the kubelet reads it, in messages of at most 1 MiB; encoded by the native
    core.

    Each lease is ``extra_s`` longer than the device's, and :data:`LEASE_LIMIT_S` at most.
    """
    return encode_health(
        [
            WireHealth(
                device.pool,
                device.device,
                device.health,
                int(device.verified.wall_s),
                min(device.timeout_s + extra_s, LEASE_LIMIT_S),
                device.message,
            )
            for device in devices
        ]
    )


def socket_names(drivers: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the sockets below the runtime directory: one per driver in the given order, and the
    agent's.

    Raises:
        ConfigError: A name is not a driver name, or is given twice.
    """
    try:
        check_drivers(tuple(drivers))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return (*(f"{DRIVERS}/{name}.sock" for name in drivers), AGENT_SOCKET)


class Servers:
    """Bound sockets, and their services once :meth:`run` runs in a loop."""

    def __init__(
        self,
        latest: Latest[Report],
        *,
        runtime_dir: Path,
        drivers: Sequence[str],
        version: str,
        encode: EncodeDevices = encode_devices,
        open_handler: Callable[[str], DriverLinkHandler] | None = None,
    ) -> None:
        """Create the directories that are missing (0750) and all sockets, or none.

        Removes the sockets that an earlier agent left for drivers that are no longer configured. The caller
        holds the runtime directory's lock. ``open_handler`` returns the handler of a driver's calls; it is
        called in a thread when the driver first calls. Without it the drivers' sockets serve health alone.

        Raises:
            Busy: Another process serves one of the sockets.
            ConfigError: A name is not a driver name, or a socket's path is too long, or is not a socket.
            PermissionDenied: A directory or a socket may not be created.
        """
        self._latest = latest
        self._drivers = tuple(drivers)
        self._version = version
        self._encode = encode
        self._open_handler = open_handler
        self._listeners: dict[str, UnixListener] = {}
        names = socket_names(drivers)
        for name in names:
            check_length(runtime_dir / name, base=runtime_dir, flag="--runtime-dir")
        try:
            for name in names:
                make_directory((runtime_dir / name).parent, flag="--runtime-dir")
                self._listeners[name] = UnixListener(runtime_dir / name)
            remove_leftovers(runtime_dir / DRIVERS, keep=self.paths)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the sockets: one per driver in the given order, and the agent's."""
        return tuple(listener.path for listener in self._listeners.values())

    def close(self) -> None:
        """Remove the sockets. :meth:`run` does so at its end; needed only if it never ran."""
        for listener in self._listeners.values():
            listener.close()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve in the running loop until cancelled; then end every client's streams and remove the
        sockets.

        ``ready`` is called when all sockets are served. The shutdown takes less than a second, whatever the
        clients do.

        Raises:
            ValueError: A report is not valid (see :class:`~agent.serve.health.service.HealthPublisher`).
        """
        publisher = HealthPublisher(self._latest, self._encode, self._drivers)
        services: dict[str, HealthService | AgentService] = {}

        def subscribers() -> tuple[Subscribers, ...]:
            return tuple(Subscribers(name, service.streams) for name, service in services.items())

        for driver, name in zip(self._drivers, self._listeners, strict=False):
            services[name] = HealthService(publisher.subscribers_of(driver))
        services[AGENT_SOCKET] = AgentService(self._latest, version=self._version, subscribers=subscribers)
        links: dict[str, DriverLinkService] = {}
        if self._open_handler is not None:
            for driver, name in zip(self._drivers, self._listeners, strict=False):
                links[name] = DriverLinkService(driver, partial(self._open_handler, driver))
        servers = {
            name: Server([service, links[name]], stream_class=DriverLinkStream)
            if name in links
            else Server([service])
            for name, service in services.items()
        }
        try:
            for name, server in servers.items():
                await server.listen(self._listeners[name].sock)
            ready()
            await publisher.run()
        finally:
            await asyncio.gather(*(server.stop(SHUTTING_DOWN) for server in servers.values()))
            await asyncio.gather(*(link.close() for link in links.values()))
            self.close()
