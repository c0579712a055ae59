"""Paths and sockets of a driver: created, monitored, and created again if another process removed them.

The registration socket is created last and removed first: when the kubelet sees its file, the service must
already answer, and when the file disappears, the kubelet drops the service.

Only one worker thread uses the files: the event loop must not wait for the kubelet's disk.
"""

import hashlib
import logging
import os
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from agent.config.values import check_driver
from agent.errors import ConfigError, DrahealthError
from agent.model.sockets import PATH_LIMIT
from agent.serve.dra_plugin.request_checks import UID, UID_LIMIT
from agent.serve.grpc.server import Server
from agent.serve.sockets import UnixListener, make_directory
from agent.system.threads.worker_pool import SerialWorker
from agent.system.timing import RateLimiter


class PluginPaths(NamedTuple):
    """Directories and sockets of one instance of a driver; absolute and clean."""

    plugin_dir: Path
    """Directory of the driver, shared by its instances."""
    service: Path
    registry_dir: Path
    """Directory that the kubelet watches for registration sockets."""
    registration: Path


def plugin_paths(
    driver: str,
    *,
    kubelet_dir: Path,
    plugin_dir: Path | None = None,
    registry_dir: Path | None = None,
    pod_uid: str = "",
) -> PluginPaths:
    """Return the paths of this instance's sockets. Reads no file.

    Names are those that Kubernetes' own drivers use. They contain the uid of the driver's pod if two
    instances run at the same time during an update, and hashes if a path would be too long.

    Args:
        driver: Name of the driver.
        kubelet_dir: Kubelet's directory, as the kubelet sees it.
        plugin_dir: Directory of the service socket; None: ``plugins/<driver>`` in the kubelet's directory.
        registry_dir: Directory of the registration socket; None: ``plugins_registry`` in the kubelet's
            directory.
        pod_uid: UID of the driver's pod; empty: there are no two instances at a time.

    Raises:
        ConfigError: The driver's name or the uid is not valid; a directory is relative; the service socket
            is outside of the kubelet's directory, where the kubelet would refuse it; a path is too long.
    """
    try:
        check_driver(driver)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if pod_uid and (len(pod_uid) > UID_LIMIT or not UID.fullmatch(pod_uid)):
        raise ConfigError(
            f"pod uid {pod_uid[:80]!r} of {len(pod_uid)} characters is not valid: letters, digits, '-', '_', "
            f"'.', at most {UID_LIMIT}"
        )
    kubelet_dir = _clean(kubelet_dir, "--kubelet-dir")
    plugins = _clean(plugin_dir or kubelet_dir / "plugins" / driver, "--plugin-dir")
    registry = _clean(registry_dir or kubelet_dir / "plugins_registry", "--registry-dir")
    if not plugins.is_relative_to(kubelet_dir):
        raise ConfigError(
            f"{plugins}: is not below {kubelet_dir}, where the kubelet expects a driver's socket; "
            "see --plugin-dir and --kubelet-dir"
        )
    service = _first_fitting(plugins, _service_names(pod_uid), "--plugin-dir")
    registration = _first_fitting(registry, _registration_names(driver, pod_uid), "--registry-dir")
    return PluginPaths(plugins, service, registry, registration)


def _clean(path: Path, flag: str) -> Path:
    if not path.is_absolute():
        raise ConfigError(f"{path}: is relative; {flag} takes an absolute path")
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
    """Return the path of the first of the names that is short enough for a unix socket."""
    used = len(os.fsencode(directory)) + 1
    for name in names:
        if used + len(name) <= PATH_LIMIT:
            return directory / name
    raise ConfigError(
        f"{directory / names[-1]}: is {used + len(names[-1])} bytes, a socket's limit is {PATH_LIMIT}; "
        f"{flag} uses {used} of them"
    )


log = logging.getLogger(__name__)


class PluginSockets:
    """Sockets of one instance of a driver, and their servers. Event loop only."""

    def __init__(
        self, paths: PluginPaths, service: Server, registration: Server, files: SerialWorker
    ) -> None:
        self._paths = paths
        self._files = files
        self._service = _ServedSocket(paths.service, service, files)
        self._registration = _ServedSocket(paths.registration, registration, files)
        self._log_limit = RateLimiter()

    async def open(self) -> None:
        """Create the driver's directory (0750) and both sockets, in their order; serve them.

        Raises:
            Busy: Another process serves one of the sockets.
            ConfigError: The kubelet's registry does not exist, or a path is taken by a file that is not a
                socket.
            PermissionDenied: The directory or a socket may not be created.
        """
        await self._files.call(self._make_directory)
        if not await self._files.call(self._paths.registry_dir.is_dir):
            raise ConfigError(
                f"{self._paths.registry_dir}: no such directory; is it the one that the kubelet watches? "
                "See --registry-dir and --kubelet-dir"
            )
        await self._service.ensure_exists()
        await self._registration.ensure_exists()

    async def restore_missing(self) -> None:
        """Create a directory or socket again that was removed.

        A new registration socket makes the kubelet register the driver again. A failure is
        logged once a minute, and the next call tries again.
        """
        try:
            await self._files.call(self._make_directory)
            for socket in (self._service, self._registration):
                if await socket.ensure_exists():
                    log.warning("%s: socket was removed by another process; created again", socket.path)
        except (DrahealthError, OSError) as error:
            if count := self._log_limit.tick():
                log.warning("sockets: cannot be restored: %s; %d attempts", error, count)

    async def unregister(self, reason: str) -> None:
        """Remove the registration socket: the kubelet drops the driver."""
        await self._files.finish(self._registration.remove)
        await self._registration.end(reason)

    async def close(self, reason: str) -> None:
        """End every stream with ``reason``, and remove what is left of the sockets."""
        try:
            await self.unregister(reason)
            await self._service.end(reason)
        finally:
            await self._files.finish(self._close)

    # --- in the thread ---------------------------------------------------------------------------------

    def _make_directory(self) -> None:
        make_directory(self._paths.plugin_dir, flag="--plugin-dir")

    def _close(self) -> None:
        self._service.close()
        self._registration.close()


class _ServedSocket:
    """Unix socket with its server."""

    def __init__(self, path: Path, server: Server, files: SerialWorker) -> None:
        self.path = path
        self._server = server
        self._files = files
        self._listener: UnixListener | None = None  # the thread's

    async def ensure_exists(self) -> bool:
        """Create the socket if its file is missing; return True if it was missing."""
        listener = await self._files.call(self._create)
        if listener is not None:
            await self._server.listen(listener.sock)  # replaces the socket whose file was removed
        return listener is not None

    async def end(self, reason: str) -> None:
        """Stop the server of the socket and end its streams with `reason`."""
        await self._server.stop(reason)

    # --- in the thread ---------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove the file of the socket. Connections continue."""
        if self._listener is not None:
            self._listener.remove()

    def close(self) -> None:
        """Remove the file of the socket, and close a socket that was never served."""
        if self._listener is not None:
            self._listener.close()

    def _create(self) -> UnixListener | None:
        if self._listener is not None and self._listener.is_intact():
            return None
        self._listener = UnixListener(self.path)
        return self._listener
