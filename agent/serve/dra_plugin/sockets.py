"""The two sockets of a driver: made, watched over, and made again if somebody removed them.

The registration socket is made last and removed first: when the kubelet sees its file, the service must
answer already, and when the file goes, the kubelet lets go of the service.

Files are touched in a thread of their own alone: whoever is served must not wait for the kubelet's disk.
"""

import logging
from pathlib import Path

from agent.errors import ConfigError, DrahealthError
from agent.serve.dra_plugin.paths import PluginPaths
from agent.serve.grpc.server import Server
from agent.serve.sockets import UnixListener, make_directory
from agent.system.rate_limit import RateLimiter
from agent.system.threads.serial_worker import SerialWorker

log = logging.getLogger(__name__)


class PluginSockets:
    """The sockets of one instance of a driver, and what is served on them. Of one loop."""

    def __init__(
        self, paths: PluginPaths, service: Server, registration: Server, files: SerialWorker
    ) -> None:
        self._paths = paths
        self._files = files
        self._service = _Place(paths.service, service, files)
        self._registration = _Place(paths.registration, registration, files)
        self._complaints = RateLimiter()

    async def open(self) -> None:
        """Makes the driver's directory (0750) and both sockets, in their order; serves them.

        Raises:
            Busy: somebody serves one of the sockets.
            ConfigError: the kubelet's registry is not there, or a path is taken by no socket.
            PermissionDenied: we may not make the directory or a socket.
        """
        await self._files.call(self._make_directory)
        if not await self._files.call(self._paths.registry_dir.is_dir):
            raise ConfigError(
                f"{self._paths.registry_dir}: no such directory; is it the one that the kubelet watches? "
                "See --registry-dir and --kubelet-dir"
            )
        await self._service.look()
        await self._registration.look()

    async def look(self) -> None:
        """Makes again what is not there any more: a directory that was wiped, a socket that was removed.

        A new registration socket makes the kubelet register the driver anew. What cannot be made now is left
        for the next look, and told of once a minute.
        """
        try:
            await self._files.call(self._make_directory)
            for place in (self._service, self._registration):
                if await place.look():
                    log.warning("%s: was not there any more, and is made again", place.path)
        except (DrahealthError, OSError) as error:
            if count := self._complaints.tick():
                log.warning("%s; looked %d times", error, count)

    async def unregister(self, reason: str) -> None:
        """Removes the registration socket: the kubelet lets go of the driver."""
        await self._files.finish(self._registration.remove)
        await self._registration.end(reason)

    async def close(self, reason: str) -> None:
        """Ends every stream with ``reason``, and removes what is left of the sockets."""
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


class _Place:
    """One socket, and who serves it."""

    def __init__(self, path: Path, server: Server, files: SerialWorker) -> None:
        self.path = path
        self._server = server
        self._files = files
        self._listener: UnixListener | None = None  # the thread's

    async def look(self) -> bool:
        """Makes it if it is not there; returns whether it did."""
        listener = await self._files.call(self._make)
        if listener is not None:
            await self._server.listen(listener.sock)  # and no longer the one before, whose file is gone
        return listener is not None

    async def end(self, reason: str) -> None:
        """Ends what is served."""
        await self._server.stop(reason)

    # --- in the thread ---------------------------------------------------------------------------------

    def remove(self) -> None:
        """Removes the file. Connections stay."""
        if self._listener is not None:
            self._listener.remove()

    def close(self) -> None:
        """Removes the file, and closes a socket that nobody came to serve."""
        if self._listener is not None:
            self._listener.close()

    def _make(self) -> UnixListener | None:
        if self._listener is not None and self._listener.is_there():
            return None
        self._listener = UnixListener(self.path)
        return self._listener
