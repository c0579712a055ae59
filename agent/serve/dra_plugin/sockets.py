"""Sockets of a driver's plugin server: their paths, creation, replacement after removal, and shutdown.

The registration socket is created last and removed first: the kubelet uses the service socket as soon as it
sees the registration socket's file, and drops the driver when the file disappears. All files are accessed in
one worker thread, so that the event loop never waits for a disk.
"""

import hashlib
import logging
import os
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from agent.config.values import check_driver_name
from agent.errors import ConfigError, DrahealthError
from agent.model.socket_address import SOCKET_PATH_LIMIT
from agent.serve.dra_plugin.request_checks import UID, UID_LIMIT
from agent.serve.grpc.server import HardenedServer
from agent.serve.sockets import UnixListener, make_socket_directory
from agent.system.threads.worker_pool import SerialWorker
from agent.system.timing import LogRateLimiter


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

    The names are those of Kubernetes' own drivers. They contain the uid of the driver's pod, if given, or
    its hash, if a path would be too long.

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
    kubelet_dir = _absolute_path(kubelet_dir, "--kubelet-dir")
    plugins = _absolute_path(plugin_dir or kubelet_dir / "plugins" / driver, "--plugin-dir")
    registry = _absolute_path(registry_dir or kubelet_dir / "plugins_registry", "--registry-dir")
    if not plugins.is_relative_to(kubelet_dir):
        raise ConfigError(
            f"plugin directory {plugins}: is not below {kubelet_dir}, where the kubelet expects it; change "
            "it with --plugin-dir or --kubelet-dir"
        )
    service = _first_fitting(plugins, _service_names(pod_uid), "--plugin-dir")
    registration = _first_fitting(registry, _registration_names(driver, pod_uid), "--registry-dir")
    return PluginPaths(plugins, service, registry, registration)


def _absolute_path(path: Path, flag: str) -> Path:
    if not path.is_absolute():
        raise ConfigError(f"path {path}: is relative; give {flag} an absolute path")
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


def _first_fitting(directory: Path, names: Sequence[str], flag: str) -> Path:
    """Return the first of several paths in a directory that is short enough for a unix socket.

    Raises ConfigError if none is.
    """
    used = len(os.fsencode(directory)) + 1
    for name in names:
        if used + len(name) <= SOCKET_PATH_LIMIT:
            return directory / name
    raise ConfigError(
        f"socket path {directory / names[-1]}: {used + len(names[-1])} bytes, limit {SOCKET_PATH_LIMIT}; "
        f"choose a shorter one with {flag}"
    )


log = logging.getLogger(__name__)


class PluginSockets:
    """Service socket and registration socket of one instance of a driver, with servers. Event loop only."""

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
                f"registration directory {self._paths.registry_dir}: does not exist; set the kubelet's "
                "directory with --registry-dir or --kubelet-dir"
            )
        await self._service.ensure_exists()
        await self._registration.ensure_exists()

    async def restore_missing(self) -> None:
        """Create a directory or socket again that another process removed; log a failure once a minute.

        After a new registration socket, the kubelet registers the driver again.
        """
        try:
            await self._files.call(self._make_directory)
            for socket in (self._service, self._registration):
                if await socket.ensure_exists():
                    log.warning("socket %s: was removed by another process; created again", socket.path)
        except (DrahealthError, OSError) as error:
            if count := self._log_limit.tick():
                log.warning(
                    "plugin sockets: removed by another process and not created again: %s; the kubelet "
                    "cannot reach the driver; %d attempts; will retry",
                    error,
                    count,
                )

    async def unregister(self, reason: str) -> None:
        """Remove the registration socket, so that the kubelet drops the driver; end its streams with
        ``reason``."""
        await self._files.finish(self._registration.remove)
        await self._registration.server.stop(reason)

    async def close(self, reason: str) -> None:
        """Remove the service and the registration socket, and end all streams with ``reason``."""
        try:
            await self.unregister(reason)
            await self._service.server.stop(reason)
        finally:
            await self._files.finish(self._close)

    # --- in the thread ---------------------------------------------------------------------------------

    def _make_directory(self) -> None:
        make_socket_directory(self._paths.plugin_dir, flag="--plugin-dir")

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

    async def ensure_exists(self) -> bool:
        """Create the socket if its file is missing; return True if it was missing."""
        listener = await self._files.call(self._create)
        if listener is not None:
            await self.server.listen(listener.sock)  # in place of the socket whose file was removed
        return listener is not None

    # --- in the thread ---------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove the socket's file. Open connections stay open."""
        if self._listener is not None:
            self._listener.remove()

    def close(self) -> None:
        """Close the socket and remove its file."""
        if self._listener is not None:
            self._listener.close()

    def _create(self) -> UnixListener | None:
        if self._listener is not None and self._listener.is_intact():
            return None
        self._listener = UnixListener(self.path)
        return self._listener
