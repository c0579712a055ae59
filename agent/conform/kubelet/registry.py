"""Plays the part of the kubelet that finds and registers plugins, and notes what it sees. Judges nothing.

It walks the directory once, as the kubelet does when it starts, and asks everybody who they are. Nobody is
registered by it with anybody: a driver is told that it is, and no more.
"""

import asyncio
import os
import stat
from collections.abc import Iterator
from typing import Final

from grpclib.exceptions import GRPCError

from agent.conform.kubelet.calls import Clock, ask, connect_error
from agent.conform.observed import Answer, Endpoint, Info, Introduction, Refusal, Registration
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
"""By what is advertised."""

ENTRIES_LIMIT: Final = 64
"""What of a PluginInfo is read: eight times as many services."""
FILES_LIMIT: Final = 256
"""Files of the directory that are looked at."""
REASON: Final = "drahealth conform tells this once, to see what follows"


async def introductions(directory: str, clock: Clock) -> tuple[Introduction, ...]:
    """Every file below the directory, and what those who serve a socket there say of themselves.

    Raises:
        UsageError: there is no such directory.
        PermissionDenied: it, or a socket in it, may not be opened.
    """
    found = list(_files(directory))
    return tuple(await asyncio.gather(*(_introduce(path, status, clock) for path, status in found)))


async def endpoint_of(introduction: Introduction, kubelet_dir: str) -> Endpoint | None:
    """The socket that a plugin names, and whether it is there; None: it has not introduced itself.

    Raises:
        PermissionDenied: it may not be opened.
    """
    if introduction.info is None:
        return None
    path = introduction.info.endpoint or introduction.path
    return Endpoint(
        path=path,
        size=len(os.fsencode(path)),
        absolute=path.startswith(os.sep),
        inside=_is_inside(path, kubelet_dir),
        error=await connect_error(path),
    )


def _is_inside(path: str, directory: str) -> bool:
    """By the letter, as the kubelet cleans paths: links are not followed."""
    return os.path.normpath(path).startswith(os.path.join(os.path.normpath(directory), ""))


async def register(introduction: Introduction, endpoint: Endpoint | None, clock: Clock) -> Registration:
    """Registers a plugin that has introduced itself, asks it again, and has each version prepare no claims.

    What is not done here has no answer in the result. Raises PermissionDenied.
    """
    if introduction.info is None:
        return Registration(introduction)
    versions = [one for one in PREPARE if one in introduction.info.versions]
    prepares = []
    if endpoint is not None and not endpoint.error:
        prepares = [ask(endpoint.path, clock, PREPARE[one]) for one in versions]
    answers = asyncio.gather(*prepares)
    notified = await _notify(introduction.path, clock, registered=True)
    again = await _introduce(introduction.path, None, clock)
    prepared = tuple(zip(versions, (answer for answer, _ in await answers), strict=False))
    return Registration(introduction, endpoint, notified, again, prepared)


async def refuse(path: str, clock: Clock) -> Refusal:
    """Tells a plugin that it was not registered, and then that it was. Raises PermissionDenied."""
    told = await _notify(path, clock, registered=False)
    info, _ = await ask(path, clock, GET_INFO)
    return Refusal(told, info, await _notify(path, clock, registered=True))


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
            except OSError:  # gone meanwhile
                continue
            yield path, status
            number += 1
            if number == FILES_LIMIT:
                return


async def _introduce(path: str, status: os.stat_result | None, clock: Clock) -> Introduction:
    """Asks whoever serves that file, if it is a socket; without a status it is one that was asked before."""
    made_ns = status.st_ctime_ns if status else 0
    is_socket = status is None or stat.S_ISSOCK(status.st_mode)
    if not is_socket or len(os.fsencode(path)) > PATH_LIMIT:
        return Introduction(path, is_socket, made_ns, None, None)
    answer, data = await ask(path, clock, GET_INFO)
    info = None
    if answer.ok:
        try:
            said = Codec(ENTRIES_LIMIT).decode(data, wire.PluginInfo)
        except GRPCError as error:
            answer = answer._replace(status="", text=error.message or "")
        else:
            info = Info(said.type, said.name, said.endpoint, tuple(said.supported_versions))
    return Introduction(path, True, made_ns, answer, info)


async def _notify(path: str, clock: Clock, *, registered: bool) -> Answer:
    status = wire.RegistrationStatus(registered, "" if registered else REASON)
    return (await ask(path, clock, NOTIFY, bytes(status)))[0]
