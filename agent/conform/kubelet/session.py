"""Plays the kubelet to a DRA driver, whoever wrote it, and notes what it sees. Judges nothing.

asyncio, for a process that does nothing else. The peer is not trusted: whatever it sends or leaves out, the
outcome is an observation, and every wait ends. But for :attr:`Wishes.refuse` it is harmless to a driver in
use: it listens, asks who it is, says that it is registered, and has it prepare no claims.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from agent.conform.choice import choose
from agent.conform.kubelet.calls import Clock, connect_error
from agent.conform.kubelet.registry import endpoint_of, introductions, refuse, register
from agent.conform.kubelet.streams import Heard, Kubelets
from agent.conform.observed import Directory, Endpoint, Introduction, Observed, Registration
from agent.errors import AgentUnreachable
from agent.model.sockets import PATH_LIMIT
from agent.serve.sockets import GONE, UNSERVED


class Wishes(NamedTuple):
    """What to look at, and for how long. Paths are absolute."""

    socket: str
    """The service socket; empty: the one that the registration names."""
    plugin_dir: str
    """Where registration sockets are; empty: registration is not looked at."""
    driver: str
    """Which one of those that are registered there; empty: there is but one."""
    kubelet_dir: str
    window_s: float
    refuse: bool
    """Whether to tell the driver once that it was not registered."""


async def observe(wishes: Wishes, on_begin: Callable[[str], None]) -> Observed:
    """Plays the kubelet for ``window_s`` and up to ten seconds, with ``refuse`` twenty.

    ``on_begin`` is called with the service socket when the listening begins, if there is one to listen to.

    Raises:
        AgentUnreachable: nobody serves the socket, or there is none in the directory.
        PermissionDenied: a socket or the directory may not be opened.
        UsageError: there is no such directory, or it has several drivers and none of them was chosen.
    """
    asyncio.get_running_loop().set_exception_handler(_complain)
    clock, began_wall_s = Clock(), time.time()
    if wishes.socket and _fits(wishes.socket) and (error := await connect_error(wishes.socket)):
        question = "; is the driver running?" if error in {GONE, UNSERVED} else ""
        raise AgentUnreachable(f"{wishes.socket}: {error}{question}")
    chosen = await _find(wishes, clock) if wishes.plugin_dir else ()
    endpoints = [await endpoint_of(one, wishes.kubelet_dir) for one in chosen]
    socket = wishes.socket or _newest(chosen, endpoints)
    registering = asyncio.gather(*(register(*one, clock) for one in zip(chosen, endpoints, strict=True)))
    is_there = socket == wishes.socket or any(at and at.path == socket and not at.error for at in endpoints)
    speaks = bool(socket) and is_there and _fits(socket)
    if speaks:
        on_begin(socket)
    listening = _listen(socket if speaks else "", wishes.window_s)
    heard, registrations = await asyncio.gather(listening, registering)
    if wishes.refuse:
        registrations = [await _refuse(one, clock) for one in registrations]
    directory = Directory(wishes.plugin_dir, wishes.kubelet_dir, tuple(registrations))
    return Observed(
        socket=socket,
        socket_size=len(os.fsencode(socket)),
        window_s=wishes.window_s if heard else 0.0,
        began_wall_s=began_wall_s,
        directory=directory if wishes.plugin_dir else None,
        **(heard._asdict() if heard else {}),
    )


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What a peer does to the callbacks of grpclib ends its connection, and is noted there."""
    if "protocol" not in context:
        loop.default_exception_handler(context)


def _fits(path: str) -> bool:
    return len(os.fsencode(path)) <= PATH_LIMIT


async def _find(wishes: Wishes, clock: Clock) -> tuple[Introduction, ...]:
    """The registration sockets of the driver that is meant."""
    found = await introductions(wishes.plugin_dir, clock)
    if not found and not wishes.socket:
        raise AgentUnreachable(f"{wishes.plugin_dir}: no registration socket in it; is the driver running?")
    return choose(found, wishes.socket, wishes.driver, wishes.plugin_dir)


def _newest(chosen: Sequence[Introduction], endpoints: Sequence[Endpoint | None]) -> str:
    """The endpoint that was registered last, as the kubelet prefers it; empty: there is none."""
    known = [(one.made_ns, at.path) for one, at in zip(chosen, endpoints, strict=True) if at is not None]
    return max(known, default=(0, ""))[1]


async def _listen(socket: str, window_s: float) -> Heard | None:
    """What is heard on the socket; None: there is none that anybody could connect to."""
    return await Kubelets(socket, window_s).listen() if socket else None


async def _refuse(registration: Registration, clock: Clock) -> Registration:
    if registration.introduction.info is None:
        return registration
    return registration._replace(refused=await refuse(registration.introduction.path, clock))
