"""Plugin watcher of the simulated kubelet: finds and registers plugins, and records their answers.

The watcher walks the directory once, as the kubelet does at its start, and calls GetInfo on every socket. It
registers no plugin with a kubelet: the watcher only reports success to the driver.
"""

import asyncio
import os
import stat
from collections.abc import Iterator
from typing import Final

from grpclib.exceptions import GRPCError

from agent.conform.kubelet.calls import SessionClock, call, connect_error
from agent.conform.observed import (
    PluginEndpoint,
    PluginInfo,
    RefusalRecord,
    RegistrationFile,
    RegistrationRecord,
    UnaryResult,
)
from agent.errors import PermissionDenied, UsageError
from agent.model.sockets import PATH_LIMIT
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
"""Maximum number of services that are read of a PluginInfo: eight times as many as kubelets know."""
FILES_LIMIT: Final = 256
"""Maximum number of files of the directory that are read."""
REASON: Final = "test by drahealth conform: reports one failed registration"


async def find_plugins(directory: str, clock: SessionClock) -> tuple[RegistrationFile, ...]:
    """Return every file below the directory, with the answer of each socket to GetInfo.

    Raises:
        UsageError: The directory does not exist.
        PermissionDenied: The directory, or a socket in it, may not be opened.
    """
    found = list(_files(directory))
    return tuple(await asyncio.gather(*(_get_info(path, status, clock) for path, status in found)))


async def check_endpoint(file: RegistrationFile, kubelet_dir: str) -> PluginEndpoint | None:
    """Return the endpoint that a plugin names, and its connection error; None: GetInfo got no answer.

    Raises:
        PermissionDenied: The endpoint may not be opened.
    """
    if file.info is None:
        return None
    path = file.info.endpoint or file.path
    return PluginEndpoint(
        path=path,
        size=len(os.fsencode(path)),
        absolute=path.startswith(os.sep),
        inside=_is_inside(path, kubelet_dir),
        error=await connect_error(path),
    )


def _is_inside(path: str, directory: str) -> bool:
    """Return whether a path is below a directory; both are cleaned as the kubelet does, without following
    links.
    """
    return os.path.normpath(path).startswith(os.path.join(os.path.normpath(directory), ""))


async def register_plugin(
    file: RegistrationFile, endpoint: PluginEndpoint | None, clock: SessionClock
) -> RegistrationRecord:
    """Register a plugin that answered GetInfo, call GetInfo again, and have each version prepare no claims.

    A call that is not made has no result in the record. Raises PermissionDenied if a socket may not be
    opened.
    """
    if file.info is None:
        return RegistrationRecord(file)
    versions = [version for version in PREPARE if version in file.info.versions]
    prepares = []
    if endpoint is not None and not endpoint.error:
        prepares = [call(endpoint.path, clock, PREPARE[version]) for version in versions]
    answers = asyncio.gather(*prepares)
    notified = await _notify(file.path, clock, registered=True)
    again = await _get_info(file.path, None, clock)
    prepared = tuple(zip(versions, (answer for answer, _ in await answers), strict=False))
    return RegistrationRecord(file, endpoint, notified, again, prepared)


async def refuse_registration(path: str, clock: SessionClock) -> RefusalRecord:
    """Report to a plugin that its registration failed, then that it succeeded.

    Raises PermissionDenied if the socket may not be opened.
    """
    refused = await _notify(path, clock, registered=False)
    info, _ = await call(path, clock, GET_INFO)
    return RefusalRecord(refused, info, await _notify(path, clock, registered=True))


def _files(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        os.listdir(directory)
    except PermissionError as error:
        raise PermissionDenied(f"{directory}: may not list this directory ({error.strerror})") from None
    except OSError as error:
        raise UsageError(f"{directory}: cannot be listed ({error.strerror}); see --plugin-dir") from None
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
    """Call GetInfo on a file, if it is a socket; `status` None: the file is a socket that answered before."""
    made_ns = status.st_ctime_ns if status else 0
    is_socket = status is None or stat.S_ISSOCK(status.st_mode)
    if not is_socket or len(os.fsencode(path)) > PATH_LIMIT:
        return RegistrationFile(path, is_socket, made_ns, None, None)
    answer, data = await call(path, clock, GET_INFO)
    info = None
    if answer.ok:
        try:
            wire_info = Codec(ENTRIES_LIMIT).decode(data, wire.PluginInfo)
        except GRPCError as error:
            answer = answer._replace(status="", text=error.message or "")
        else:
            info = PluginInfo(
                wire_info.type, wire_info.name, wire_info.endpoint, tuple(wire_info.supported_versions)
            )
    return RegistrationFile(path, True, made_ns, answer, info)


async def _notify(path: str, clock: SessionClock, *, registered: bool) -> UnaryResult:
    status = wire.RegistrationStatus(registered, "" if registered else REASON)
    return (await call(path, clock, NOTIFY, bytes(status)))[0]
