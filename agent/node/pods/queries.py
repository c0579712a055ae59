"""Queries about claims, pods and devices, answered by the kubelet and by the state files of DRA drivers.

A source that is absent, hangs or returns invalid data yields an answer with that reason.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from agent.config.config import DRIVERS
from agent.errors import DrahealthError
from agent.model.claim_sources import (
    AllocatedDevice,
    Origin,
    PodResourcesPod,
    PreparedClaim,
    Provenance,
    SourceAnswer,
)
from agent.model.health import DeviceHealth
from agent.model.json_values import JsonObject
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.time import Instant
from agent.serve.kubelet import client, pods_api
from agent.sources import kubelet_files
from agent.store import driver_files
from agent.store.driver_files import LedgerFileContent
from agent.store.state_files import UnusableFile
from agent.system.files import ReadError, read_bounded
from agent.system.threads.worker_threads import DISK_TIMEOUT_S, SOCKET_TIMEOUT_S, HungGuard, timeout_text
from agent.system.timing import read_clocks

T = TypeVar("T")

EMBEDDED_DIR: Final = "drahealth"
"""Name of an embedding driver's state directory, below its plugin directory."""


class DriverStateDirectory(NamedTuple):
    """State directory of a DRA driver, and the sockets that serve the health of its devices."""

    name: str
    directory: Path
    is_agents: bool
    """Whether the agent, and not an embedding driver, writes the state and serves the health."""
    sockets: tuple[Path, ...] = ()


class DriverDirectories(NamedTuple):
    """Drivers found by their state directory or socket, and directories that cannot be listed."""

    drivers: tuple[DriverStateDirectory, ...] = ()
    unreadable: tuple[str, ...] = ()
    """Directories that cannot be listed, each with the reason."""


def find_drivers(
    kubelet_dir: Path | None = None, state_dir: Path | None = None, runtime_dir: Path | None = None
) -> DriverDirectories:
    """Find the drivers that have a state directory or a socket below one of three directories.

    A directory that is None is not searched. Of the kubelet's plugins only those that embed drahealth are
    included.
    """
    found: dict[Path, DriverStateDirectory] = {}
    problems: list[str] = []
    if state_dir is not None:
        below = state_dir / DRIVERS
        for name in _list_names(below, problems):
            found[below / name] = DriverStateDirectory(name, below / name, is_agents=True)
    if runtime_dir is not None:
        sockets = runtime_dir / DRIVERS
        for name in _list_names(sockets, problems):
            driver = name.removesuffix(".sock")
            if driver != name:
                state = (state_dir or runtime_dir) / DRIVERS / driver
                found[state] = DriverStateDirectory(driver, state, is_agents=True, sockets=(sockets / name,))
    if kubelet_dir is not None:
        plugins = kubelet_dir / "plugins"
        for name in _list_names(plugins, problems):
            inside = _list_names(plugins / name, problems)
            if EMBEDDED_DIR in inside:
                state = plugins / name / EMBEDDED_DIR
                served = tuple(plugins / name / entry for entry in inside if entry.endswith(".sock"))
                found[state] = DriverStateDirectory(name, state, is_agents=False, sockets=served)
    return DriverDirectories(tuple(found.values()), tuple(problems))


def _list_names(directory: Path, problems: list[str]) -> list[str]:
    """Return the names of the entries of a directory; empty if the directory is absent.

    The reason of a failure is appended to `problems`.
    """
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problems.append(f"directory of drivers {directory}: cannot be listed: {error.strerror}")
        return []


async def read_prepared(directory: Path, guard: HungGuard) -> SourceAnswer[PreparedClaim]:
    """Read the claims that a driver has prepared from its state `directory`. Waits up to 5 s for the disk."""
    path = directory / driver_files.LEDGER_FILE
    try:
        return await guard.run(path, partial(_read_prepares, path), DISK_TIMEOUT_S)
    except TimeoutError:
        return SourceAnswer(
            Provenance(Origin.DRIVER, read_clocks()),
            (),
            Absence.UNREADABLE,
            timeout_text(path, DISK_TIMEOUT_S),
        )


def _read_prepares(path: Path) -> SourceAnswer[PreparedClaim]:
    try:
        file = read_bounded(path, driver_files.SIZE_MAX)
        claims = tuple(prepared_claims(driver_files.decode_ledger(file.data)))
    except ReadError as error:
        return SourceAnswer(Provenance(Origin.DRIVER, read_clocks()), (), error.absence, str(error))
    except UnusableFile as error:
        return SourceAnswer(
            Provenance(Origin.DRIVER, read_clocks()), (), Absence.UNREADABLE, f"{path}: {error}"
        )
    return SourceAnswer(Provenance(Origin.DRIVER, read_clocks(), file.written_s), claims)


def prepared_claims(file: LedgerFileContent) -> Iterator[PreparedClaim]:
    """Yield the claims that a driver's state file lists as prepared."""
    for entry in file.ledger.claims.values():
        if entry.outcome.verdict is None and not entry.unprepared_wall_s:
            devices = tuple(AllocatedDevice(device) for device in entry.outcome.devices)
            yield PreparedClaim(entry.outcome.claim, devices)


class KubeletAnswers(NamedTuple):
    """Answers of the kubelet's three sources: claims checkpoint, podresources API and pods API."""

    prepared: SourceAnswer[PreparedClaim]
    listed: SourceAnswer[PodResourcesPod]
    pods: SourceAnswer[JsonObject]
    """Answer of the pods API: pods as v1.Pod objects."""


async def query_kubelet(
    directory: Path, guard: HungGuard, pods: Callable[[], Awaitable[SourceAnswer[JsonObject]]] | None = None
) -> KubeletAnswers:
    """Query the kubelet's claims checkpoint, podresources API and pods API at the same time.

    ``pods``: returns the answer of the pods API; None: the API is queried.
    """
    prepared, listed, objects = await asyncio.gather(
        read_file(
            Origin.CHECKPOINT,
            directory / kubelet_files.CLAIMS_FILE,
            kubelet_files.read_claims_checkpoint,
            guard,
        ),
        query_socket(Origin.PODRESOURCES, directory / client.PODRESOURCES_SOCKET, client.list_podresources),
        pods() if pods else query_pods(directory),
    )
    return KubeletAnswers(prepared, listed, objects)


async def query_pods(directory: Path) -> SourceAnswer[JsonObject]:
    """Query the kubelet's pods API once, for all pods as v1.Pod objects."""
    return await query_socket(Origin.PODS_API, directory / pods_api.SOCKET, pods_api.list_pods)


class DriverAnswers(NamedTuple):
    """Prepared claims that the state files of DRA drivers list, and the drivers that were found."""

    prepared: tuple[SourceAnswer[PreparedClaim], ...]
    """Prepared claims, one answer per driver."""
    drivers: tuple[DriverStateDirectory, ...]
    """Drivers found by their state directories."""


async def query_drivers(kubelet_dir: Path, state_dir: Path, guard: HungGuard) -> DriverAnswers:
    """Read the prepared claims of each driver that has a state file."""
    try:
        find = partial(find_drivers, kubelet_dir, state_dir)
        drivers, problems = await guard.run("drivers", find, DISK_TIMEOUT_S)
    except TimeoutError:
        drivers, problems = (), (timeout_text("directories of drivers", DISK_TIMEOUT_S),)
    provenance = Provenance(Origin.DRIVER, read_clocks())
    failed = [SourceAnswer[PreparedClaim](provenance, (), Absence.UNREADABLE, reason) for reason in problems]
    answers = await asyncio.gather(*(read_prepared(driver.directory, guard) for driver in drivers))
    existing = (answer for answer in answers if answer.absence is not Absence.ABSENT)
    return DriverAnswers((*failed, *existing), drivers)


async def query_embedded_health(
    drivers: Iterable[DriverStateDirectory], names: Collection[str]
) -> Mapping[str, tuple[DeviceHealth, ...]]:
    """Read the health of devices from the sockets of drivers that embed drahealth, by driver. A driver that
    does not answer within 2 s is left out.

    Args:
        drivers: Drivers found by their state directories.
        names: Names of the drivers to query.
    """
    sockets = [
        (driver.name, socket)
        for driver in drivers
        if not driver.is_agents and driver.name in names
        for socket in driver.sockets
    ]
    found = await asyncio.gather(*(_health_or_nothing(socket) for _, socket in sockets))
    return {name: devices for (name, _), devices in reversed([*zip(sockets, found, strict=True)]) if devices}


async def _health_or_nothing(socket: Path) -> tuple[DeviceHealth, ...]:
    try:
        return (await query_report(socket)).devices
    except (TimeoutError, DrahealthError):  # the driver ended, starts, or serves no health
        return ()


async def query_report(socket: Path) -> Report:
    """Return the current health report of the agent's or a driver's socket.

    Raises:
        TimeoutError: The report did not begin within 2 s, or stopped.
        DrahealthError: See :func:`agent.serve.agent_api.client.watch_reports`.
    """
    from agent.serve.agent_api.client import first_report  # an agent without embedding drivers saves it

    return await first_report(socket, first_byte_s=SOCKET_TIMEOUT_S)


async def read_file(
    origin: Origin, file: Path, read: Callable[[Path, Instant], SourceAnswer[T]], guard: HungGuard
) -> SourceAnswer[T]:
    """Return the answer of `read` for a state file. Waits up to 5 s for the disk, then answers UNREADABLE."""
    try:
        return await guard.run(file, lambda: read(file, read_clocks()), DISK_TIMEOUT_S)
    except TimeoutError:
        return SourceAnswer(
            Provenance(origin, read_clocks()), (), Absence.UNREADABLE, timeout_text(file, DISK_TIMEOUT_S)
        )


async def query_socket(
    origin: Origin, socket: Path, query: Callable[[Path, Callable[[], Instant]], Awaitable[SourceAnswer[T]]]
) -> SourceAnswer[T]:
    """Return the answer of `query` for a socket of the kubelet. After 2 s the answer is UNREADABLE."""
    try:
        async with asyncio.timeout(SOCKET_TIMEOUT_S):
            return await query(socket, read_clocks)
    except TimeoutError:
        return SourceAnswer(
            Provenance(origin, read_clocks()), (), Absence.UNREADABLE, timeout_text(socket, SOCKET_TIMEOUT_S)
        )
