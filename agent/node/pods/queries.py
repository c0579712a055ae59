"""What the kubelet and the drivers of this node say of claims, pods and devices, right now.

A source that is missing, hangs or lies costs what it would have said, and nothing else.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from agent.model.claim_sources import ListedPod, Origin, PreparedClaim, Provenance, SourceAnswer
from agent.model.objects import Object
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.node.pods.drivers import find_drivers, read_prepared
from agent.serve.kubelet import podresources, pods_api
from agent.sources import kubelet_checkpoint
from agent.system.clock import read_clocks
from agent.system.threads.with_timeout import DISK_S, SOCKET_S, HungGuard, late

T = TypeVar("T")


class Kubelet(NamedTuple):
    """What the kubelet says."""

    prepared: SourceAnswer[PreparedClaim]
    listed: SourceAnswer[ListedPod]
    pods: SourceAnswer[Object]
    """v1.Pods."""


async def ask_kubelet(
    directory: Path, patience: HungGuard, pods: Callable[[], Awaitable[SourceAnswer[Object]]] | None = None
) -> Kubelet:
    """Its checkpoint, podresources and the pods API, all at once; of the last ``pods`` is asked, if given."""
    prepared, listed, objects = await asyncio.gather(
        read_file(
            Origin.CHECKPOINT,
            directory / kubelet_checkpoint.NAME,
            kubelet_checkpoint.read_checkpoint,
            patience,
        ),
        ask_socket(Origin.PODRESOURCES, directory / podresources.SOCKET, podresources.list_podresources),
        pods() if pods else ask_pods(directory),
    )
    return Kubelet(prepared, listed, objects)


async def ask_pods(directory: Path) -> SourceAnswer[Object]:
    """The pods API, once."""
    return await ask_socket(Origin.PODS_API, directory / pods_api.SOCKET, pods_api.list_pods)


async def ask_drivers(
    kubelet_dir: Path, state_dir: Path, patience: HungGuard
) -> tuple[SourceAnswer[PreparedClaim], ...]:
    """The claims that each driver which keeps such a record holds prepared."""
    try:
        find = partial(find_drivers, kubelet_dir, state_dir)
        drivers, unread = await patience.in_time("drivers", find, DISK_S)
    except TimeoutError:
        drivers, unread = (), (late("the drivers' directories", DISK_S),)
    witness = Provenance(Origin.DRIVER, read_clocks())
    gaps = [SourceAnswer[PreparedClaim](witness, (), Absence.UNREADABLE, why) for why in unread]
    told = await asyncio.gather(*(read_prepared(one.directory, patience) for one in drivers))
    return (*gaps, *(one for one in told if one.absence is not Absence.ABSENT))


async def read_file(
    origin: Origin, file: Path, read: Callable[[Path, Instant], SourceAnswer[T]], patience: HungGuard
) -> SourceAnswer[T]:
    """What stands in a file of the kubelet's, or that it cannot be read in time."""
    try:
        return await patience.in_time(file, lambda: read(file, read_clocks()), DISK_S)
    except TimeoutError:
        return SourceAnswer(Provenance(origin, read_clocks()), (), Absence.UNREADABLE, late(file, DISK_S))


async def ask_socket(
    origin: Origin, socket: Path, ask: Callable[[Path, Callable[[], Instant]], Awaitable[SourceAnswer[T]]]
) -> SourceAnswer[T]:
    """What the kubelet says on a socket, or that it does not answer in time."""
    try:
        async with asyncio.timeout(SOCKET_S):
            return await ask(socket, read_clocks)
    except TimeoutError:
        return SourceAnswer(Provenance(origin, read_clocks()), (), Absence.UNREADABLE, late(socket, SOCKET_S))
