"""Everything that the agent serves, put together: which socket, which service, and one end for all.

In the runtime directory: ``drivers/<driver>.sock``, each the kubelet's own health API in both
versions and what the driver says to the agent, and ``agent.sock``, the agent's API for the command line.
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
from agent.model.report import Report
from agent.model.status import Subscribers
from agent.native.encode import WireHealth, encode_health
from agent.serve.agent_api.service import AgentService
from agent.serve.driver_link.service import DriverLinkService, Link, LinkStream
from agent.serve.grpc.server import Server
from agent.serve.health.feed import Encode
from agent.serve.health.service import HealthPublisher, HealthService
from agent.serve.sockets import UnixListener, check_length, make_directory, remove_leftovers
from agent.system.threads.latest import Latest

SHUTTING_DOWN: Final = "agent shutting down"
"""What clients read when the agent ends; the status is UNAVAILABLE."""

AGENT_SOCKET: Final = "agent.sock"


LEASE_LIMIT_S: Final = 86_400
"""The longest lease that is sent [s]. The kubelet counts in 64-bit nanoseconds, and a longer one than those
can hold would be over at once, for good."""


def encode_devices(devices: Sequence[DeviceHealth], extra_s: int = 0) -> list[bytes]:
    """The list as the kubelet reads it, in messages of at most 1 MiB; encoded by the native core.

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
    """The sockets below the runtime directory: one per driver in the order given, and the agent's.

    Raises:
        ConfigError: a name is no driver's, or is given twice.
    """
    try:
        check_drivers(tuple(drivers))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return (*(f"{DRIVERS}/{name}.sock" for name in drivers), AGENT_SOCKET)


class Servers:
    """The sockets, bound, and what is served on them once :meth:`run` runs in some loop."""

    def __init__(
        self,
        latest: Latest[Report],
        *,
        runtime_dir: Path,
        drivers: Sequence[str],
        version: str,
        encode: Encode = encode_devices,
        link: Callable[[str], Link] | None = None,
    ) -> None:
        """Makes the directories that are missing (0750) and all sockets, or none.

        Removes the sockets that an earlier agent left to drivers that are not named any more. Whoever
        calls this holds the runtime directory's lock. ``link`` opens a driver's link when the driver first
        calls, in a thread; without it the drivers' sockets serve health alone.

        Raises:
            Busy: somebody serves one of the sockets.
            ConfigError: a name is no driver's, or a socket's path is too long, or taken by no socket.
            PermissionDenied: we may not make a directory or a socket.
        """
        self._latest = latest
        self._drivers = tuple(drivers)
        self._version = version
        self._encode = encode
        self._link = link
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
        """Where the sockets are: one per driver in the order given, and the agent's."""
        return tuple(listener.path for listener in self._listeners.values())

    def close(self) -> None:
        """Removes the sockets. :meth:`run` has done so when it ends; needed only if it never ran."""
        for listener in self._listeners.values():
            listener.close()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serves in the running loop until cancelled, then tells every client and removes the sockets.

        ``ready`` is called when all of them are served. The end takes less than a second, whatever
        the clients do.

        Raises:
            ValueError: a report that cannot be told (see :class:`~agent.serve.health.service.Publications`).
        """
        publications = HealthPublisher(self._latest, self._encode, self._drivers)
        services: dict[str, HealthService | AgentService] = {}

        def subscribers() -> tuple[Subscribers, ...]:
            return tuple(Subscribers(name, service.streams) for name, service in services.items())

        for driver, name in zip(self._drivers, self._listeners, strict=False):
            services[name] = HealthService(publications.of(driver))
        services[AGENT_SOCKET] = AgentService(self._latest, version=self._version, subscribers=subscribers)
        links: dict[str, DriverLinkService] = {}
        if self._link is not None:
            for driver, name in zip(self._drivers, self._listeners, strict=False):
                links[name] = DriverLinkService(driver, partial(self._link, driver))
        servers = {
            name: Server([service, links[name]], stream_class=LinkStream)
            if name in links
            else Server([service])
            for name, service in services.items()
        }
        try:
            for name, server in servers.items():
                await server.listen(self._listeners[name].sock)
            ready()
            await publications.run()
        finally:
            await asyncio.gather(*(server.stop(SHUTTING_DOWN) for server in servers.values()))
            await asyncio.gather(*(link.close() for link in links.values()))
            self.close()
