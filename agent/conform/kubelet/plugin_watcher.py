"""Plugin watcher of the simulated kubelet: finds registration sockets and registers drivers."""

import asyncio
import os
import stat
from collections.abc import Iterator
from typing import Final

from grpclib.exceptions import GRPCError

from agent.conform.kubelet.unary_calls import SessionClock, call_unary, connect_error
from agent.conform.session_record import (
    FailedRegistrationRecord,
    PluginEndpoint,
    PluginInfo,
    RegistrationFile,
    RegistrationRecord,
    UnaryCallResult,
)
from agent.errors import PermissionDeniedError, UsageError
from agent.model.socket_address import SOCKET_PATH_LIMIT
from agent.serve.grpc.codec import Codec
from agent.serve.grpc.gen.registration_v1 import pluginregistration as wire

GET_INFO: Final = "/pluginregistration.Registration/GetInfo"
NOTIFY: Final = "/pluginregistration.Registration/NotifyRegistrationStatus"
PREPARE: Final = {
    "v1.DRAPlugin": "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
    "v1beta1.DRAPlugin": "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources",
}
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


async def check_endpoint(file: RegistrationFile, kubelet_dir: str) -> PluginEndpoint | None:
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
    """Report a successful registration to a driver that answered GetInfo if `notify`; call GetInfo again.

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
