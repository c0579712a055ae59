"""Plugin server of one instance of a DRA driver: prepare, health, registration and leader election.

The service socket has DRAPlugin v1 and v1beta1 and the health API v1 and v1alpha1. Through the registration
socket the kubelet finds the service socket.

The module also has the sockets of a driver's plugin server: their paths, creation, replacement after
removal, and shutdown.

The registration socket is created last and removed first: the kubelet uses the service socket as soon as it
sees the registration socket's file, and drops the driver when the file disappears. All files are accessed in
one worker thread, so that the event loop never waits for a disk.
"""

import asyncio
import hashlib
import os
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from agent.config.values import check_driver_name
from agent.errors import ConfigError, DrahealthError
from agent.model.report import Report
from agent.model.socket_address import SOCKET_PATH_LIMIT
from agent.serve.dra_plugin.instance_locks import LeaderElection
from agent.serve.dra_plugin.prepared_devices import UID, UID_LIMIT, WireMode
from agent.serve.dra_plugin.service import (
    ENTRIES_LIMIT,
    ClaimHandler,
    DraPluginService,
    SizeLimitedDraPluginStream,
)
from agent.serve.grpc.codec import Codec
from agent.serve.grpc.gen.registration_v1 import pluginregistration as wire
from agent.serve.grpc.hardened import UnsentMessages
from agent.serve.grpc.server import HardenedServer
from agent.serve.grpc_servers import encode_device_health
from agent.serve.health.embedded_service import SERVICES
from agent.serve.health.service import HealthPublisher, HealthService
from agent.serve.sockets import UnixListener, make_socket_directory
from agent.system.output import LogRateLimiter, get_logger
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.worker_threads import SerialWorker


class PluginPaths(NamedTuple):
    """Absolute paths of the directories and sockets of one instance of a driver."""

    plugin_dir: Path
    """Directory of the driver in the kubelet's directory, which its instances share."""
    service: Path
    """Path of the service socket, with the prepare and health services."""
    registry_dir: Path
    """Directory that the kubelet watches for registration sockets."""
    registration: Path
    """Path of the registration socket, through which the kubelet finds the service socket."""


def plugin_paths(
    driver: str,
    *,
    kubelet_dir: Path,
    plugin_dir: Path | None = None,
    registry_dir: Path | None = None,
    pod_uid: str = "",
) -> PluginPaths:
    """Return the paths of one instance of a driver, without access to any file.

    The file names are like those of Kubernetes' own drivers. They contain the UID of the driver's pod, if
    given. If a path would be too long, they contain a hash of the UID.

    Args:
        driver: Name of the driver.
        kubelet_dir: Kubelet's directory, as the kubelet sees it.
        plugin_dir: Directory of the service socket; None: ``plugins/<driver>`` in the kubelet's directory.
        registry_dir: Directory of the registration socket; None: ``plugins_registry`` in the kubelet's
            directory.
        pod_uid: UID of the driver's pod, if two instances run during an update; empty: only one runs.

    Raises:
        ConfigError: The driver's name or the uid is not valid; a directory is relative; the plugin directory
            is outside of the kubelet's directory, where the kubelet refuses sockets; a path is too long.
    """
    try:
        check_driver_name(driver)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if pod_uid and (len(pod_uid) > UID_LIMIT or not UID.fullmatch(pod_uid)):
        raise ConfigError(
            f"pod uid {pod_uid[:80]!r}: is not valid: has {len(pod_uid)} characters, limit {UID_LIMIT}; only "
            "letters, digits, '-', '_' and '.' are allowed, the first a letter or digit"
        )
    kubelet_dir = _absolute_path(kubelet_dir, "kubelet_dir")
    plugins = _absolute_path(plugin_dir or kubelet_dir / "plugins" / driver, "plugin_dir")
    registry = _absolute_path(registry_dir or kubelet_dir / "plugins_registry", "registry_dir")
    if not plugins.is_relative_to(kubelet_dir):
        raise ConfigError(
            f"plugin directory {plugins}: is not below {kubelet_dir}, where the kubelet expects it; change "
            "argument plugin_dir or kubelet_dir"
        )
    service = _first_fitting(plugins, _service_names(pod_uid), "plugin_dir")
    registration = _first_fitting(registry, _registration_names(driver, pod_uid), "registry_dir")
    return PluginPaths(plugins, service, registry, registration)


def _absolute_path(path: Path, argument: str) -> Path:
    if not path.is_absolute():
        raise ConfigError(f"path {path}: is relative; give argument {argument} an absolute path")
    return Path(os.path.normpath(path))


def _service_names(pod_uid: str) -> Sequence[str]:
    if not pod_uid:
        return ("dra.sock",)
    uid = _hash(pod_uid, 8)
    return (f"dra-{pod_uid}.sock", f"dra-{uid}.sock", f"{uid}.sock")


def _registration_names(driver: str, pod_uid: str) -> Sequence[str]:
    last = f"dra-{_hash(chr(0).join((driver, pod_uid)), 16)}-reg.sock"
    if not pod_uid:
        return (f"{driver}-reg.sock", last)
    return (f"{driver}-{pod_uid}-reg.sock", f"{driver}-{_hash(pod_uid, 8)}-reg.sock", last)


def _hash(text: str, size: int) -> str:
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:size]).rstrip(b"=").decode()


def _first_fitting(directory: Path, names: Sequence[str], argument: str) -> Path:
    """Return the first of several paths in a directory that is short enough for a unix socket.

    Raises ConfigError if all are too long; the error names the ``argument`` to change.
    """
    used = len(os.fsencode(directory)) + 1
    for name in names:
        if used + len(name) <= SOCKET_PATH_LIMIT:
            return directory / name
    raise ConfigError(
        f"socket path {directory / names[-1]}: {used + len(names[-1])} bytes, limit {SOCKET_PATH_LIMIT}; "
        f"choose a shorter directory with argument {argument}"
    )


log = get_logger(__name__)


class PluginSockets:
    """Service socket and registration socket of one instance of a driver, with servers.

    Used only in the event loop.
    """

    def __init__(
        self, paths: PluginPaths, service: HardenedServer, registration: HardenedServer, files: SerialWorker
    ) -> None:
        self._paths = paths
        self._files = files
        self._service = _ServedSocket(paths.service, service, files)
        self._registration = _ServedSocket(paths.registration, registration, files)
        self._log_limit = LogRateLimiter()

    async def open(self) -> None:
        """Create the driver's directory (mode 0750) and both sockets, and serve them.

        Raises:
            ResourceBusyError: Another process serves one of the sockets.
            ConfigError: The kubelet's registration directory does not exist, or a file that is not a socket
                has a socket's path.
            PermissionDeniedError: This process may not create the directory or a socket.
        """
        await self._files.call(self._make_directory)
        if not await self._files.call(self._paths.registry_dir.is_dir):
            raise ConfigError(
                f"registration directory {self._paths.registry_dir}: does not exist; in a pod, mount it "
                "from the host at the same path; elsewhere, set argument registry_dir or kubelet_dir"
            )
        await self._service.create_if_missing()
        await self._registration.create_if_missing()

    async def restore_missing(self) -> None:
        """Restore directories and sockets that another process removed; log a failure once a minute.

        After a new registration socket, the kubelet registers the driver again.
        """
        try:
            await self._files.call(self._make_directory)
            for socket in (self._service, self._registration):
                if await socket.create_if_missing():
                    log.warning("socket %s: was removed by another process; created again", socket.path)
        except (DrahealthError, OSError) as error:
            if count := self._log_limit.tick():
                log.warning(
                    "sockets %s and %s: removed by another process and not created again: %s; the kubelet "
                    "cannot reach the driver; %d attempts; will retry",
                    self._paths.service,
                    self._paths.registration,
                    error,
                    count,
                )

    async def unregister(self, reason: str) -> None:
        """Remove the registration socket, so that the kubelet drops the driver.

        All streams of the driver end with ``reason``.
        """
        await self._files.finish(self._registration.remove)
        await self._registration.server.stop(reason)

    async def close(self, reason: str) -> None:
        """Remove the service and the registration socket, and end all streams with ``reason``."""
        try:
            await self.unregister(reason)
            await self._service.server.stop(reason)
        finally:
            await self._files.finish(self._close)

    # --- file thread only -------------------------------------------------------------------------------

    def _make_directory(self) -> None:
        make_socket_directory(self._paths.plugin_dir, setting="argument plugin_dir")

    def _close(self) -> None:
        self._service.close()
        self._registration.close()


class _ServedSocket:
    """Unix socket with its gRPC server; its file is accessed in the worker thread only."""

    def __init__(self, path: Path, server: HardenedServer, files: SerialWorker) -> None:
        self.path = path
        self.server = server
        self._files = files
        self._listener: UnixListener | None = None  # only for the thread

    async def create_if_missing(self) -> bool:
        """Create the socket if its file is missing; return True if it was missing."""
        created = await self._files.call(self._create)
        if created is None:
            return False
        listener, removed = created
        try:
            await self.server.listen(listener.sock)  # in place of the socket whose file was removed
        except OSError:
            await self._files.call(partial(self._discard, listener, removed))
            raise
        if removed is not None:
            await self._files.call(removed.close)
        return True

    # --- file thread only -------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove the socket's file. Open connections stay open."""
        if self._listener is not None:
            self._listener.remove()

    def close(self) -> None:
        """Close the socket and remove its file."""
        if self._listener is not None:
            self._listener.close()

    def _create(self) -> tuple[UnixListener, UnixListener | None] | None:
        """Create the socket, unless its file is there; return the new and the former one."""
        removed = self._listener
        if removed is not None and removed.is_intact():
            return None
        self._listener = UnixListener(self.path)
        return self._listener, removed

    def _discard(self, listener: UnixListener, removed: UnixListener | None) -> None:
        """Close a new socket that cannot be served; the former socket stays until another replaces it."""
        self._listener = removed
        listener.close()


# --- the server --------------------------------------------------------------------------------------------

PLUGIN_TYPE: Final = "DRAPlugin"

SUPPORTED: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", *SERVICES)
"""gRPC services of a driver for its registration. The kubelet uses the first plugin service that it knows, so
the newest is first, and requests health, since 1.37, only if the list has a health service."""

OnRegistration = Callable[[bool, str], None]
"""Callback after a registration with True, or with False and the kubelet's error text. Must not block."""


class RegistrationService(wire.RegistrationBase):
    """Service ``pluginregistration.Registration`` of a driver's registration socket.

    The driver is registered while the socket's file exists. Never blocks: the kubelet waits one second for
    the first answer.

    Args:
        driver: Name of the driver.
        endpoint: Path of the driver's service socket.
        on_status: Called with the result of each registration.
    """

    def __init__(self, driver: str, endpoint: str, on_status: OnRegistration | None = None) -> None:
        self._info = wire.PluginInfo(PLUGIN_TYPE, driver, endpoint, list(SUPPORTED))
        self._on_status = on_status
        self.is_registered = False
        """Whether the kubelet has registered the driver at least once."""

    async def get_info(self, info_request: wire.InfoRequest) -> wire.PluginInfo:
        """Answer the kubelet with the driver's name, the path of its service socket, and its services."""
        return self._info

    async def notify_registration_status(
        self, registration_status: wire.RegistrationStatus
    ) -> wire.RegistrationStatusResponse:
        """Log the result of a registration and call the callback.

        The kubelet itself retries after a failure.
        """
        registered, error = registration_status.plugin_registered, registration_status.error
        self.is_registered |= registered
        if registered:
            log.info("driver %s: registered with the kubelet", self._info.name)
        else:
            log.warning(
                "driver %s: registration failed: %s; the kubelet will retry",
                self._info.name,
                error or "no reason given",
            )
        if self._on_status is not None:
            try:
                self._on_status(registered, error)
            except BaseException:  # also SystemExit, which would end the server
                log.exception("driver %s: callback on_status raised an exception; ignored", self._info.name)
        return wire.RegistrationStatusResponse()


SHUTTING_DOWN: Final = "driver shutting down"
"""Text of the UNAVAILABLE status with which streams end when the driver ends."""

SOCKETS: Final = 2
"""Number of sockets of an instance: the service and the registration."""
CHECK_S: Final = 2.0
"""Interval of checks of the driver's sockets and its other instances [s]."""
CHECK_WITH_OTHERS_S: Final = 1.0
"""Shorter interval of these checks while another instance of the driver runs [s].

When that instance ends, the kubelet forgets the driver's health.
"""


class DriverInstanceServer:
    """Plugin server of one instance of a driver; :meth:`run` starts the server."""

    def __init__(
        self,
        latest: LatestValue[Report],
        claims: ClaimHandler,
        *,
        driver: str,
        paths: PluginPaths,
        pod_uid: str = "",
        wire: WireMode = WireMode.NONE,
        on_status: OnRegistration | None = None,
    ) -> None:
        self.drain_s = 0.0
        """Time that the shutdown waits for open calls of the kubelet and for claims in progress [s]."""
        self.has_drained = True
        """Whether all calls and claims had ended in this time; True before the shutdown."""
        self._latest = latest
        self._claims = claims
        self._driver = driver
        self._paths = paths
        self._pod_uid = pod_uid
        self._wire = wire
        self._on_status = on_status

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until cancelled; then unregister the driver, wait for open calls, and remove the sockets.

        ``ready`` is called when the kubelet can find the driver. The shutdown takes at most :attr:`drain_s`
        and two seconds more, even if a disk hangs.

        Raises:
            ResourceBusyError: Another instance serves one of the sockets.
            ConfigError: A directory or socket cannot be used.
            PermissionDeniedError: This process may not create a directory or socket.
            ValueError: A report names a device twice.
        """
        make_socket_directory(self._paths.plugin_dir, setting="argument plugin_dir")
        election = LeaderElection(self._paths.plugin_dir, self._pod_uid, counts=False)
        files = SerialWorker()
        try:
            await self._serve(election, files, ready)
        finally:
            try:
                await files.finish(election.leave)
            finally:
                files.close()

    async def _serve(self, election: LeaderElection, files: SerialWorker, ready: Callable[[], None]) -> None:
        publisher = HealthPublisher(self._latest, encode_device_health, [self._driver])
        health = HealthService(publisher.subscribers_of(self._driver))
        plugin = DraPluginService(self._claims, self._wire)
        registration = RegistrationService(self._driver, str(self._paths.service), self._on_status)
        open_server = partial(HardenedServer, sockets=SOCKETS, unsent=UnsentMessages())
        sockets = PluginSockets(
            self._paths,
            open_server(
                [plugin, health],
                codec=Codec(ENTRIES_LIMIT),
                stream_class=SizeLimitedDraPluginStream,
            ),
            open_server([registration]),
            files,
        )
        try:
            await sockets.open()
            ready()
            leadership = _Leadership(self._driver, election, files, health, registration)
            await asyncio.gather(publisher.run(), self._run_checks(sockets, leadership))
        finally:
            try:
                await sockets.unregister(SHUTTING_DOWN)
                self.has_drained = await plugin.close(SHUTTING_DOWN, self.drain_s)
                if not self.has_drained:
                    log.warning(
                        "driver %s: shutdown: calls of the kubelet not finished within %g s; the calls were "
                        "cancelled, and threads of the driver that still run were abandoned",
                        self._driver,
                        self.drain_s,
                    )
            finally:  # also if the wait for the calls is cancelled
                await sockets.close(SHUTTING_DOWN)

    async def _run_checks(self, sockets: PluginSockets, leadership: "_Leadership") -> None:
        while True:
            await sockets.restore_missing()
            await asyncio.sleep(await leadership.check())


class _Leadership:
    """Periodic leader check, which mutes the health streams of a driver instance that is not the leader."""

    def __init__(
        self,
        driver: str,
        election: LeaderElection,
        files: SerialWorker,
        health: HealthService,
        registration: RegistrationService,
    ) -> None:
        self._driver = driver
        self._election = election
        self._files = files
        self._health = health
        self._registration = registration
        self._was_leader = True
        self._repeats = 0
        self._log_limit = LogRateLimiter()

    async def check(self) -> float:
        """Check the driver's other instances; return the time until the next check [s].

        The health streams are muted if this instance is not the leader. They send all devices again if this
        instance has become the leader, or another instance has ended.
        """
        try:
            # until the kubelet uses this instance, it mutes no other: it may never be registered
            is_used = self._registration.is_registered or self._health.streams > 0
            state = await self._files.call(partial(self._election.check_instances, counts=is_used))
        except OSError as error:
            if count := self._log_limit.tick():
                log.warning(
                    "driver %s: other instances cannot be checked: %s; this instance keeps its role; "
                    "%d failures; will retry",
                    self._driver,
                    error,
                    count,
                )
            return CHECK_WITH_OTHERS_S
        if state.is_leader and (state.has_any_ended or not self._was_leader):
            # The kubelet forgets the driver's health when the other instance's stream ends, possibly a moment
            # after this check. So all devices are sent now and at the next check.
            self._repeats = 2
        if not state.is_leader:
            if self._was_leader:
                log.info("driver %s: a newer instance leads; this instance sends no health", self._driver)
            self._repeats = 0
            self._health.subscribers.mute()
        elif self._repeats:
            self._repeats -= 1
            self._health.subscribers.resend_all()
        self._was_leader = state.is_leader
        return CHECK_WITH_OTHERS_S if state.other_count or self._repeats else CHECK_S
