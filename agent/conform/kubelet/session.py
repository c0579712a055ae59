"""Session with a DRA driver: acts as the kubelet towards it, and records what it does.

asyncio, for a process that does nothing else. The driver is not trusted: whatever it sends or omits becomes
a record, and every wait ends. Except for :attr:`SessionOptions.refuse` a session is harmless to a driver in
use: it opens health streams, calls GetInfo, reports the driver as registered, and has it prepare no claims.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from agent.conform.kubelet.calls import SessionClock, connect_error
from agent.conform.kubelet.registry import check_endpoint, find_plugins, refuse_registration, register_plugin
from agent.conform.kubelet.streams import SimulatedKubelets, StreamRecords
from agent.conform.observed import (
    PluginEndpoint,
    RegistrationFile,
    RegistrationRecord,
    RegistryRecord,
    SessionRecord,
)
from agent.conform.registering import PLUGIN_TYPE
from agent.conform.verdicts import shorten
from agent.errors import AgentUnreachable, UsageError, suggestion
from agent.model.sockets import PATH_LIMIT
from agent.serve.sockets import NO_SERVER, NO_SOCKET

SUFFIX: Final = ".sock"


class SessionOptions(NamedTuple):
    """Driver to test, and duration of the session. Paths are absolute."""

    socket: str
    """Path of the service socket; empty: the endpoint that the registration names."""
    plugin_dir: str
    """Directory of registration sockets; empty: registration is not tested."""
    driver: str
    """Name of the driver among the drivers that are registered in the directory; empty: the only driver."""
    kubelet_dir: str
    window_s: float
    refuse: bool
    """Whether to report once to the driver that its registration failed."""


async def run_session(options: SessionOptions, on_begin: Callable[[str], None]) -> SessionRecord:
    """Act as the kubelet for ``window_s`` and up to ten seconds more, with ``refuse`` twenty.

    ``on_begin`` is called with the service socket when the health streams begin, if the socket can be used.

    Raises:
        AgentUnreachable: No process serves the socket, or the directory has none.
        PermissionDenied: A socket or the directory may not be opened.
        UsageError: The directory does not exist, or has several drivers and no choice was made.
    """
    asyncio.get_running_loop().set_exception_handler(_handle_loop_error)
    clock, began_wall_s = SessionClock(), time.time()
    if options.socket and _fits(options.socket) and (error := await connect_error(options.socket)):
        question = "; is the driver running?" if error in {NO_SOCKET, NO_SERVER} else ""
        raise AgentUnreachable(f"{options.socket}: {error}{question}")
    chosen = await _find(options, clock) if options.plugin_dir else ()
    endpoints = [await check_endpoint(file, options.kubelet_dir) for file in chosen]
    socket = options.socket or _newest(chosen, endpoints)
    registering = asyncio.gather(
        *(register_plugin(*pair, clock) for pair in zip(chosen, endpoints, strict=True))
    )
    connects = socket == options.socket or any(
        endpoint and endpoint.path == socket and not endpoint.error for endpoint in endpoints
    )
    usable = bool(socket) and connects and _fits(socket)
    if usable:
        on_begin(socket)
    recording = _record(socket if usable else "", options.window_s)
    streams, registrations = await asyncio.gather(recording, registering)
    if options.refuse:
        registrations = [await _refuse(registration, clock) for registration in registrations]
    directory = RegistryRecord(options.plugin_dir, options.kubelet_dir, tuple(registrations))
    return SessionRecord(
        socket=socket,
        socket_size=len(os.fsencode(socket)),
        window_s=options.window_s if streams else 0.0,
        began_wall_s=began_wall_s,
        directory=directory if options.plugin_dir else None,
        **(streams._asdict() if streams else {}),
    )


def _handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore errors that a server causes in grpclib's callbacks: they end its connection, which is
    recorded."""
    if "protocol" not in context:
        loop.default_exception_handler(context)


def _fits(path: str) -> bool:
    return len(os.fsencode(path)) <= PATH_LIMIT


async def _find(options: SessionOptions, clock: SessionClock) -> tuple[RegistrationFile, ...]:
    """Return the registration files of the driver under test."""
    found = await find_plugins(options.plugin_dir, clock)
    if not found and not options.socket:
        raise AgentUnreachable(f"{options.plugin_dir}: no registration socket in it; is the driver running?")
    return choose(found, options.socket, options.driver, options.plugin_dir)


def _newest(chosen: Sequence[RegistrationFile], endpoints: Sequence[PluginEndpoint | None]) -> str:
    """Return the path of the endpoint that was registered last, which the kubelet prefers; empty: no
    endpoint."""
    known = [
        (file.made_ns, endpoint.path)
        for file, endpoint in zip(chosen, endpoints, strict=True)
        if endpoint is not None
    ]
    return max(known, default=(0, ""))[1]


async def _record(socket: str, window_s: float) -> StreamRecords | None:
    """Record the health streams of a socket; None if no socket can be used."""
    return await SimulatedKubelets(socket, window_s).record() if socket else None


async def _refuse(registration: RegistrationRecord, clock: SessionClock) -> RegistrationRecord:
    if registration.file.info is None:
        return registration
    return registration._replace(refused=await refuse_registration(registration.file.path, clock))


# --- files of the driver ------------------------------------------------------------------------------------


def choose(
    found: Sequence[RegistrationFile], socket: str, driver: str, directory: str
) -> tuple[RegistrationFile, ...]:
    """Return the registration files of one driver: files whose answer names the driver, and files without an
    answer whose file name begins with its name.

    The directory is shared by the drivers of devices and storage. If no plugin of the right type answered,
    all sockets count, and all files that are named like one.

    Args:
        found: All files of the directory.
        socket: Service socket from the command line; empty: none.
        driver: Driver from the command line; empty: none.
        directory: Path of the directory, for errors.

    Raises:
        UsageError: The directory has several drivers, or none of that name; lists the drivers.
    """
    plugins = [file for file in found if file.info is not None and file.info.type == PLUGIN_TYPE]
    names = sorted({file.info.name for file in plugins if file.info})
    known = ", ".join(repr(shorten(name)) for name in names) or "none"
    if driver:
        chosen = _files_of(driver, found)
        if not chosen:
            near = suggestion(driver, map(shorten, names))
            raise UsageError(f"{directory}: no driver {driver!r}{near}; there are: {known}")
        return chosen
    at_socket = {
        file.info.name for file in plugins if file.info and (file.info.endpoint or file.path) == socket
    }
    if len(at_socket) == 1:
        return _files_of(at_socket.pop(), found)
    if len(names) > 1:
        raise UsageError(f"{directory}: several drivers, choose one with --driver: {known}")
    if names:
        return _files_of(names[0], found)
    return tuple(file for file in found if file.is_socket or file.path.endswith(SUFFIX))


def _files_of(driver: str, found: Sequence[RegistrationFile]) -> tuple[RegistrationFile, ...]:
    return tuple(
        file
        for file in found
        if (file.info.name == driver if file.info else _is_named_like(driver, file.path))
    )


def _is_named_like(driver: str, path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.lstrip(".").startswith(driver) and name.endswith(SUFFIX)
