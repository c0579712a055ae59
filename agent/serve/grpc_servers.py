"""gRPC servers of the agent on the sockets in its runtime directory.

``drivers/<driver>.sock`` serves the kubelet's health API, v1 and v1alpha1, and the driver link.
``agent.sock`` serves the agent's own API to the command line.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from agent.config.config import DRIVERS
from agent.config.values import check_driver_names
from agent.errors import ConfigError, DrahealthError, ProbeError
from agent.model.health import DeviceHealth
from agent.model.report import PartsStatus, Report, SocketSubscriberCounts
from agent.native.health_encoder import HealthColumns, encode_health_columns
from agent.native.kernel_events import watch_directory
from agent.serve.agent_api.service import AgentService, ClearRequests
from agent.serve.driver_link.handler_interface import DriverLinkHandler
from agent.serve.driver_link.service import DriverLinkService, SizeLimitedDriverLinkStream
from agent.serve.grpc.hardened import OpenRequestBytes, UnsentMessages
from agent.serve.grpc.server import HardenedServer
from agent.serve.health.service import HealthListEncoder, HealthPublisher, HealthService
from agent.serve.sockets import UnixListener, check_path_length, make_socket_directory, remove_stale_sockets
from agent.system.files import DirectoryLock, LockHeld
from agent.system.output import LogRateLimiter, get_logger
from agent.system.threads.latest_value import LatestValue

SHUTTING_DOWN: Final = "agent shutting down"
"""Text of the UNAVAILABLE status with which streams end when the agent ends."""

AGENT_SOCKET: Final = "agent.sock"

LEASE_LIMIT_S: Final = 86_400
"""Longest lease that is sent [s]: one that overflows the kubelet's 64-bit nanoseconds would end at once."""

CHECK_S: Final = 60.0
"""Interval of checks whether the sockets' files exist, in addition to the checks after a change [s]."""
UNWATCHED_CHECK_S: Final = 10.0
"""Interval of checks whether the sockets' files exist while their directory is not watched [s].

It also applies while a removed file could not be created again.
"""
DEBOUNCE_S: Final = 0.5
"""Pause after a change of the sockets' directory before the next check of its files [s]."""

log = get_logger(__name__)


def encode_device_health(devices: Sequence[DeviceHealth], extra_lease_s: int = 0) -> list[bytes]:
    """Encode devices as NodeWatchResourcesResponse messages of at most 1 MiB each, with the C extension.

    Each lease (health_check_timeout_seconds) gets ``extra_lease_s`` more, up to :data:`LEASE_LIMIT_S`.
    """
    if not devices:
        return []
    pools, names, _, healths, _, texts, _, verified, leases, *_ = zip(*devices, strict=True)
    longer = {lease_s: min(lease_s + extra_lease_s, LEASE_LIMIT_S) for lease_s in set(leases)}
    return encode_health_columns(
        HealthColumns(
            pools,
            names,
            healths,
            [int(at.wall_s) for at in verified],
            [longer[lease_s] for lease_s in leases],
            texts,
        )
    )


def socket_names(drivers: Sequence[str]) -> tuple[str, ...]:
    """Return the sockets' paths below the runtime directory.

    There is one path per driver, in the order of the drivers, followed by the path of the agent's socket.

    Raises:
        ConfigError: A driver's name is not valid, or is given twice.
    """
    try:
        check_driver_names(tuple(drivers))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return (*(f"{DRIVERS}/{name}.sock" for name in drivers), AGENT_SOCKET)


class GrpcServers:
    """Unix sockets of the agent with their gRPC servers; :meth:`run` serves them."""

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
        parts: Callable[[], PartsStatus] = PartsStatus,
        locks: Sequence[DirectoryLock] = (),
        sockets: int = 0,
    ) -> None:
        """Create the missing directories (mode 0750) and all sockets; after an exception no socket remains.

        Removes the sockets of drivers that are no longer configured.

        Args:
            latest: Reports to serve.
            runtime_dir: Directory of the sockets.
            drivers: Names of the drivers.
            version: Version of the agent.
            encode_list: Encoder of health lists.
            open_handler: Returns the handler of a driver's calls; called in a thread at the driver's first
                call. None: the drivers' sockets have no driver link.
            clear_requests: Queue of requests of operators to clear faults; None: faults cannot be cleared.
            parts: Returns the status of the agent's parts, such as NVML.
            locks: Locks of the agent's directories, which the caller holds. Their files are created again,
                like the sockets, if another process removes them.
            sockets: Number of sockets that the process serves, with those of other servers; 0: these alone.

        Raises:
            ResourceBusyError: Another process serves one of the sockets.
            ConfigError: A driver's name is not valid, a socket's path is too long, or a file that is not a
                socket is there.
            PermissionDeniedError: This process may not create a directory or a socket.
        """
        self._latest = latest
        self._drivers = tuple(drivers)
        self._version = version
        self._encode = encode_list
        self._open_handler = open_handler
        self._clear_requests = clear_requests
        self._parts = parts
        self._runtime_dir = runtime_dir
        self._locks = tuple(locks)
        self._sockets = sockets
        self._log_limit = LogRateLimiter()
        self._listeners: dict[str, UnixListener] = {}
        self._served: tuple[tuple[str, HealthService | AgentService, HardenedServer], ...] = ()
        """Each socket with its service and server, while :meth:`run` serves them."""
        names = socket_names(drivers)
        for name in names:
            check_path_length(runtime_dir / name, flag="--runtime-dir")
        try:
            self._make_directories()
            for name in names:
                self._listeners[name] = UnixListener(runtime_dir / name)
            remove_stale_sockets(runtime_dir / DRIVERS, keep=self.paths)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the sockets: one per driver, in the order of the drivers, then the agent's socket."""
        return tuple(listener.path for listener in self._listeners.values())

    def subscribers(self) -> tuple[SocketSubscriberCounts, ...]:
        """Return the numbers of open streams and connections of each socket. Thread-safe."""
        return tuple(
            SocketSubscriberCounts(
                name,
                service.streams,
                len(server.connections),
                service.subscribers.lists if isinstance(service, HealthService) else None,
                service.subscribers.sent_bytes if isinstance(service, HealthService) else 0,
            )
            for name, service, server in self._served
        )

    def close(self) -> None:
        """Close and remove the sockets if :meth:`run` was never called; :meth:`run` removes them itself."""
        for listener in self._listeners.values():
            listener.close()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve all sockets until cancelled; then end all streams and remove the sockets.

        ``ready`` is called when all sockets are served. The shutdown takes less than a second, even if a
        client does not read. Used only in the event loop.

        Raises:
            ValueError: A report names a device twice.
        """
        publisher = HealthPublisher(self._latest, self._encode, self._drivers)
        services: dict[str, HealthService | AgentService] = {}
        servers: dict[str, HardenedServer] = {}
        for driver, name in zip(self._drivers, self._listeners, strict=False):
            services[name] = HealthService(publisher.subscribers_of(driver), repeats_after_end=True)
        services[AGENT_SOCKET] = AgentService(
            self._latest,
            version=self._version,
            subscribers=self.subscribers,
            clear_requests=self._clear_requests,
            parts=self._parts,
        )
        links: dict[str, DriverLinkService] = {}
        if self._open_handler is not None:
            for driver, name in zip(self._drivers, self._listeners, strict=False):
                links[name] = DriverLinkService(driver, partial(self._open_handler, driver))
        open_server = partial(HardenedServer, unsent=UnsentMessages(), sockets=self._sockets or len(services))
        counters = list[OpenRequestBytes]()
        for name, service in services.items():
            memory = OpenRequestBytes(counters)
            servers[name] = (
                open_server([service, links[name]], memory=memory, stream_class=SizeLimitedDriverLinkStream)
                if name in links
                else open_server([service], memory=memory)
            )
        self._served = tuple((name, service, servers[name]) for name, service in services.items())
        try:
            for name, server in servers.items():
                await server.listen(self._listeners[name].sock)
            ready()
            keeper = asyncio.create_task(self._keep_files(servers))
            try:
                await asyncio.gather(publisher.run(), keeper)
            finally:
                keeper.cancel()
        finally:
            await asyncio.gather(*(server.stop(SHUTTING_DOWN) for server in servers.values()))
            await asyncio.gather(*(link.close() for link in links.values()))
            self.close()

    # --- the files while the agent runs ---------------------------------------------------------------------

    def _make_directories(self) -> None:
        """Create the missing directories of the sockets; check that no other user can replace their files."""
        make_socket_directory(self._runtime_dir, setting="--runtime-dir")
        if self._drivers:
            make_socket_directory(self._runtime_dir / DRIVERS, setting="--runtime-dir", accepts_link=False)

    async def _keep_files(self, servers: dict[str, HardenedServer]) -> None:
        """Restore sockets and lock files that another process removes, until cancelled."""
        while True:
            await self._restore_files(servers)  # first: a directory that is missing cannot be watched
            with self._watched_directories() as (changed, is_watched):
                is_complete = await self._restore_files(servers)  # removed before the watch
                with suppress(TimeoutError):
                    await asyncio.wait_for(
                        changed.wait(), CHECK_S if is_watched and is_complete else UNWATCHED_CHECK_S
                    )
            if changed.is_set():
                await asyncio.sleep(DEBOUNCE_S)

    @contextmanager
    def _watched_directories(self) -> Iterator[tuple[asyncio.Event, bool]]:
        """Watch the directories of the sockets and locks in a ``with`` block.

        Yields an event, which each moved or removed entry sets (each heartbeat writes a file), and a flag,
        which is False if a directory cannot be watched.
        """
        loop, changed, watches = asyncio.get_running_loop(), asyncio.Event(), list[int]()
        is_watched = False
        directories = {listener.path.parent for listener in self._listeners.values()}
        directories |= {lock.path.parent for lock in self._locks}
        try:
            with suppress(ProbeError, OSError):  # OSError: the watches of this user's epoll are used up
                for directory in directories:
                    watches.append(watch_directory(directory, includes_writes=False))
                    loop.add_reader(watches[-1], changed.set)
                is_watched = True
            yield changed, is_watched
        finally:
            for watch in watches:
                loop.remove_reader(watch)
                os.close(watch)

    async def _restore_files(self, servers: dict[str, HardenedServer]) -> bool:
        """Restore removed sockets and lock files.

        Returns False if a file could not be created. The failure is logged once a minute.
        """
        try:
            if not all(listener.is_intact() for listener in self._listeners.values()):
                self._make_directories()
            self._restore_locks(is_runtime=True)
            for name, listener in self._listeners.items():
                if not listener.is_intact():
                    new = UnixListener(listener.path)
                    try:
                        await servers[name].listen(new.sock)
                    finally:  # also if it is cancelled while the former socket closes
                        is_served = servers[name].serves(new.sock)
                        self._listeners[name] = new if is_served else listener
                        (listener if is_served else new).close()
                    log.warning("socket %s: was removed by another process; created again", listener.path)
        except (DrahealthError, LockHeld, OSError, ValueError) as error:
            if count := self._log_limit.tick():
                log.warning(
                    "sockets in %s: removed by another process and not created again: %s; clients cannot "
                    "connect; %d attempts; will retry",
                    self._runtime_dir, error, count,
                )  # fmt: skip
            return False
        try:
            self._restore_locks(is_runtime=False)
        except (LockHeld, OSError, ValueError) as error:
            if count := self._log_limit.tick():
                log.warning(
                    "state directory: lock file removed by another process and not created again: %s; a "
                    "second agent with this state is not detected; %d attempts; will retry",
                    error, count,
                )  # fmt: skip
            return False
        return True

    def _restore_locks(self, *, is_runtime: bool) -> None:
        """Restore the removed lock file of the runtime directory, or of the state directory."""
        for lock in self._locks:
            if (lock.path.parent == self._runtime_dir) == is_runtime and lock.relock_if_replaced():
                log.warning("lock file %s: was removed by another process; created again", lock.path)
