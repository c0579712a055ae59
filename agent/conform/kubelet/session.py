"""Conformance session with a DRA driver: acts as the kubelet towards the driver, and records its behaviour.

Except for :attr:`SessionOptions.refuse` a session is harmless to a driver in use: it opens health streams,
calls GetInfo, reports the driver as registered, and calls NodePrepareResources without claims. Without a
kubelet on the node, that report may start a driver's work; :attr:`SessionOptions.notify` leaves it out.
With :attr:`SessionOptions.prepare` it then prepares and unprepares claims.

The module also acts as the kubelet's plugin watcher, which finds registration sockets and registers drivers.
"""

import asyncio
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, NamedTuple

from grpclib.exceptions import GRPCError

from agent.conform.kubelet.grpc_clients import (
    HealthStreamClients,
    SessionClock,
    StreamRecords,
    call_unary,
    connect_error,
)
from agent.conform.kubelet.prepare_session import READY_S, SERVICES, PrepareOptions, PrepareSession, omit_all
from agent.conform.outcomes import not_run, shorten
from agent.conform.registration_checks import PLUGIN_TYPE
from agent.conform.session_record import (
    FailedRegistrationRecord,
    PluginEndpoint,
    PluginInfo,
    RegistrationDirRecord,
    RegistrationFile,
    RegistrationRecord,
    SessionRecord,
    UnaryCallResult,
)
from agent.errors import AgentUnreachable, PermissionDeniedError, UsageError, suggestion
from agent.model.socket_address import SOCKET_PATH_LIMIT
from agent.serve.grpc.codec import Codec
from agent.serve.grpc.gen.registration_v1 import pluginregistration as wire
from agent.serve.sockets import NO_SERVER, NO_SOCKET

GET_INFO: Final = "/pluginregistration.Registration/GetInfo"
NOTIFY: Final = "/pluginregistration.Registration/NotifyRegistrationStatus"
PREPARE: Final = {name: f"/{service}/NodePrepareResources" for name, service in SERVICES.items()}
"""Path of the gRPC method NodePrepareResources by advertised plugin service."""

ENTRIES_LIMIT: Final = 64
"""Largest number of supported services that are read from a driver's answer to GetInfo."""
FILES_LIMIT: Final = 256
"""Largest number of files in the directory of registration sockets that are examined."""
REFUSAL_TEXT: Final = "test by drahealth conform: reports one failed registration"
"""Error text with which NotifyRegistrationStatus reports a failed registration to the driver."""


async def find_plugins(directory: str, clock: SessionClock) -> tuple[RegistrationFile, ...]:
    """Call GetInfo on every socket below the directory of registration sockets.

    Returns all files below the directory, with the answers of those that are sockets.

    Raises:
        UsageError: The directory does not exist.
        PermissionDeniedError: The directory, or a socket in it, may not be opened.
    """
    found = list(_list_files(directory))
    return tuple(await asyncio.gather(*(_get_info(path, status, clock) for path, status in found)))


async def connect_endpoint(file: RegistrationFile, kubelet_dir: str) -> PluginEndpoint | None:
    """Connect to the service socket that a driver's answer to GetInfo names; None: there was no answer.

    Raises PermissionDeniedError: the endpoint may not be opened.
    """
    if file.info is None:
        return None
    path = file.info.endpoint or file.path
    return PluginEndpoint(
        path=path,
        size=len(os.fsencode(path)),
        is_absolute=path.startswith(os.sep),
        is_in_kubelet_dir=_is_inside(path, kubelet_dir),
        error=await connect_error(path),
    )


def _is_inside(path: str, directory: str) -> bool:
    return os.path.normpath(path).startswith(os.path.join(os.path.normpath(directory), ""))


async def register_plugin(
    file: RegistrationFile, endpoint: PluginEndpoint | None, clock: SessionClock, *, notify: bool
) -> RegistrationRecord:
    """Register a driver that answered GetInfo, as the kubelet does; then call GetInfo again.

    Without `notify`, the driver gets no report of its registration.

    Meanwhile call NodePrepareResources without claims in each advertised version. Raises
    PermissionDeniedError if a socket may not be opened.
    """
    if file.info is None:
        return RegistrationRecord(file)
    versions = [version for version in PREPARE if version in file.info.versions]
    prepares = []
    if endpoint is not None and not endpoint.error:
        prepares = [call_unary(endpoint.path, clock, PREPARE[version]) for version in versions]
    answers = asyncio.gather(*prepares)
    notified = await _notify(file.path, clock, registered=True) if notify else None
    again = await _get_info(file.path, None, clock)
    prepared = tuple(zip(versions, (answer for answer, _ in await answers), strict=False))
    return RegistrationRecord(file, endpoint, notified, again, prepared)


async def refuse_registration(path: str, clock: SessionClock) -> FailedRegistrationRecord:
    """Report to a driver that its registration failed, call GetInfo, then report that it succeeded.

    Raises PermissionDeniedError if the socket may not be opened.
    """
    refused = await _notify(path, clock, registered=False)
    info, _ = await call_unary(path, clock, GET_INFO)
    return FailedRegistrationRecord(refused, info, await _notify(path, clock, registered=True))


def _list_files(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        os.listdir(directory)
    except PermissionError as error:
        raise PermissionDeniedError(
            f"directory {directory}: may not be listed: {error.strerror}; run as root"
        ) from None
    except OSError as error:
        raise UsageError(
            f"directory {directory}: cannot be listed: {error.strerror}; set --plugin-dir"
        ) from None
    number = 0
    for top, below, names in os.walk(directory):
        below.sort()
        for name in sorted(names):
            path = os.path.join(top, name)
            try:
                status = os.lstat(path)
            except OSError:  # removed meanwhile
                continue
            yield path, status
            number += 1
            if number == FILES_LIMIT:
                return


async def _get_info(path: str, status: os.stat_result | None, clock: SessionClock) -> RegistrationFile:
    """Call GetInfo on a file of the directory if it is a socket.

    ``status`` is the result of stat(2); None: the file is known to be a socket.
    """
    made_ns = status.st_ctime_ns if status else 0
    is_socket = status is None or stat.S_ISSOCK(status.st_mode)
    if not is_socket or len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        return RegistrationFile(path, is_socket, made_ns, None, None)
    answer, data = await call_unary(path, clock, GET_INFO)
    info = None
    if answer.is_ok:
        try:
            wire_info = Codec(ENTRIES_LIMIT).decode(data, wire.PluginInfo)
        except GRPCError as error:
            answer = answer._replace(status="", text=error.message or "")
        else:
            info = PluginInfo(
                wire_info.type, wire_info.name, wire_info.endpoint, tuple(wire_info.supported_versions)
            )
    return RegistrationFile(path, True, made_ns, answer, info)


async def _notify(path: str, clock: SessionClock, *, registered: bool) -> UnaryCallResult:
    status = wire.RegistrationStatus(registered, "" if registered else REFUSAL_TEXT)
    return (await call_unary(path, clock, NOTIFY, bytes(status)))[0]


# --- the session -------------------------------------------------------------------------------------------

SOCKET_SUFFIX: Final = ".sock"
LOCATE_S: Final = 0.2
"""Pause between two searches for a restarted driver [s]."""


class SessionOptions(NamedTuple):
    """Options of a conformance session: the driver to test, and the duration. Paths are absolute."""

    socket: str
    """Path of the service socket; empty: the endpoint in the driver's answer to GetInfo."""
    plugin_dir: str
    """Directory of registration sockets; empty: registration is not tested."""
    driver: str
    """Name of the driver, if the directory has several; empty: the only driver."""
    kubelet_dir: str
    window_s: float
    """Duration for which the health streams are recorded [s]."""
    refuse: bool
    """True: the session reports once to the driver that its registration failed."""
    notify: bool
    """True: the session reports to the driver that it is registered."""
    prepare: PrepareOptions | None = None
    """Claims to prepare after the recording; None: no claims are prepared."""


async def run_session(
    options: SessionOptions, on_begin: Callable[[str], None], warn: Callable[[str], None] = lambda text: None
) -> SessionRecord:
    """Act as the kubelet towards a driver, and return the record of its behaviour.

    Takes ``window_s`` and up to 10 s, or 20 s with ``refuse``, and the time of ``prepare``.

    Args:
        options: Driver to test, and duration.
        on_begin: Called with the path of the service socket before the health streams are opened, if the
            socket can be used.
        warn: Called with a text on each claim that stays prepared.

    Raises:
        AgentUnreachable: No process serves the socket, or the directory has no registration socket.
        PermissionDeniedError: A socket or the directory may not be opened.
        UsageError: The directory does not exist, or has several drivers and ``driver`` is empty; or a claim
            cannot be prepared.
    """
    asyncio.get_running_loop().set_exception_handler(_handle_loop_error)
    clock = SessionClock()
    if (
        options.socket
        and _is_path_short_enough(options.socket)
        and (error := await connect_error(options.socket))
    ):
        question = "; is the driver running?" if error in {NO_SOCKET, NO_SERVER} else ""
        raise AgentUnreachable(f"socket {options.socket}: {error}{question}")
    chosen = await _find_driver_files(options, clock) if options.plugin_dir else ()
    endpoints = [await connect_endpoint(file, options.kubelet_dir) for file in chosen]
    socket = options.socket or _newest_endpoint(chosen, endpoints)
    connects = socket == options.socket or any(
        endpoint and endpoint.path == socket and not endpoint.error for endpoint in endpoints
    )
    usable = bool(socket) and connects and _is_path_short_enough(socket)
    async with AsyncExitStack() as stack:
        preparing = _make_prepare_session(options, chosen, clock, warn)
        if preparing is not None:
            await stack.enter_async_context(preparing)
        if usable:
            on_begin(socket)
        registering = asyncio.gather(
            *(
                register_plugin(*pair, clock, notify=options.notify)
                for pair in zip(chosen, endpoints, strict=True)
            )
        )
        recording = _record_streams(socket if usable else "", options.window_s)
        streams, registrations = await asyncio.gather(recording, registering)
        if options.refuse:
            registrations = [await _refuse_registration(each, clock) for each in registrations]
        prepare = await preparing.run(socket if usable else "") if preparing else None
    if options.prepare is not None and prepare is None:
        prepare = omit_all(not_run("no socket has answered GetInfo"))
    directory = RegistrationDirRecord(options.plugin_dir, options.kubelet_dir, tuple(registrations))
    return SessionRecord(
        socket=socket,
        socket_size=len(os.fsencode(socket)),
        window_s=options.window_s if streams else 0.0,
        directory=directory if options.plugin_dir else None,
        prepare=prepare,
        **(streams._asdict() if streams else {}),
    )


def _make_prepare_session(
    options: SessionOptions,
    chosen: Sequence[RegistrationFile],
    clock: SessionClock,
    warn: Callable[[str], None],
) -> PrepareSession | None:
    """Return the session that prepares claims, for the newest registration of the driver.

    None: the options exclude it, or no registration socket answered GetInfo.
    """
    infos = [(file.ctime_ns, file.info) for file in chosen if file.info is not None]
    if options.prepare is None or not infos:
        return None
    _, info = max(infos, key=lambda pair: pair[0])

    async def locate() -> str:
        return await _wait_for_driver(options._replace(driver=info.name), clock)

    return PrepareSession(options.prepare, info.name, info.versions, clock, locate, warn)


async def _wait_for_driver(options: SessionOptions, clock: SessionClock) -> str:
    """Wait until a service socket of the driver takes a connection, and return its path.

    Empty: no socket did within READY_S.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while True:
                with suppress(AgentUnreachable, UsageError):
                    chosen = await _find_driver_files(options, clock)
                    endpoints = [await connect_endpoint(file, options.kubelet_dir) for file in chosen]
                    usable = [endpoint if endpoint and not endpoint.error else None for endpoint in endpoints]
                    if socket := _newest_endpoint(chosen, usable):
                        return socket
                await asyncio.sleep(LOCATE_S)
    return ""


def _handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore errors that a server causes in grpclib's callbacks.

    The session records the end of the connection, which each of these errors causes.
    """
    if "protocol" not in context:
        loop.default_exception_handler(context)


def _is_path_short_enough(path: str) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_LIMIT


async def _find_driver_files(options: SessionOptions, clock: SessionClock) -> tuple[RegistrationFile, ...]:
    found = await find_plugins(options.plugin_dir, clock)
    if not found and not options.socket:
        raise AgentUnreachable(
            f"directory {options.plugin_dir}: no registration socket in it; is the driver running?"
        )
    return choose_driver_files(found, options.socket, options.driver, options.plugin_dir)


def _newest_endpoint(chosen: Sequence[RegistrationFile], endpoints: Sequence[PluginEndpoint | None]) -> str:
    known = [
        (file.ctime_ns, endpoint.path)
        for file, endpoint in zip(chosen, endpoints, strict=True)
        if endpoint is not None
    ]
    return max(known, default=(0, ""))[1]


async def _record_streams(socket: str, window_s: float) -> StreamRecords | None:
    return await HealthStreamClients(socket, window_s).record() if socket else None


async def _refuse_registration(registration: RegistrationRecord, clock: SessionClock) -> RegistrationRecord:
    if registration.file.info is None:
        return registration
    return registration._replace(refused=await refuse_registration(registration.file.path, clock))


def choose_driver_files(
    found: Sequence[RegistrationFile], socket: str, driver: str, directory: str
) -> tuple[RegistrationFile, ...]:
    """Return the registration files of one driver, from all files in the directory of registration sockets.

    They are the files whose answer to GetInfo names the driver, and files without an answer whose name begins
    with the driver's name. If no DRA driver answered, all sockets of the directory are returned, unless
    several plugins of other types answered.

    Args:
        found: All files of the directory.
        socket: Service socket of the driver; empty: unknown.
        driver: Name of the driver; empty: unknown.
        directory: Path of the directory, for error messages.

    Raises UsageError: the directory has several plugins and none is chosen, or no driver with that name.
    """
    answered = [(file, file.info) for file in found if file.info is not None]
    drivers = [(file, info) for file, info in answered if info.type == PLUGIN_TYPE]
    names = sorted({info.name for _, info in drivers})
    known = ", ".join(repr(shorten(name)) for name in names) or "none"
    if driver:
        chosen = _files_of(driver, found)
        if not chosen:
            near = suggestion(driver, map(shorten, names))
            raise UsageError(f"directory {directory}: no driver {driver!r}{near}; there are: {known}")
        return chosen
    at_socket = {info.name for file, info in drivers or answered if (info.endpoint or file.path) == socket}
    if len(at_socket) == 1:
        return _files_of(at_socket.pop(), found)
    if len(names) > 1:
        raise UsageError(f"directory {directory}: several drivers, choose one with --driver: {known}")
    if names:
        return _files_of(names[0], found)
    if len({info.name for _, info in answered}) > 1:
        known = ", ".join(sorted({f"{shorten(info.name)!r} ({shorten(info.type)})" for _, info in answered}))
        raise UsageError(f"directory {directory}: no DRA driver, choose a plugin with --driver: {known}")
    return tuple(file for file in found if file.is_socket or file.path.endswith(SOCKET_SUFFIX))


def _files_of(driver: str, found: Sequence[RegistrationFile]) -> tuple[RegistrationFile, ...]:
    return tuple(
        file
        for file in found
        if (file.info.name == driver if file.info else _is_named_like(driver, file.path))
    )


def _is_named_like(driver: str, path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.lstrip(".").startswith(driver) and name.endswith(SOCKET_SUFFIX)
