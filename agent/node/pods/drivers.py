"""What the drivers of a node keep of the claims that they hold prepared.

A driver that embeds drahealth keeps it in its plugin's directory; for one beside it the agent does.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from agent.config.config import DRIVERS
from agent.model.claim_sources import DeviceUse, Origin, PreparedClaim, Provenance, SourceAnswer
from agent.model.reading import Absence
from agent.store import prepares
from agent.store.files import CorruptFile
from agent.store.prepares import Prepares
from agent.system.clock import read_clocks
from agent.system.read_file import ReadError, read_bounded
from agent.system.threads.with_timeout import DISK_S, HungGuard, late

KEPT: Final = "drahealth"
"""What a driver that embeds drahealth has in its plugin's directory."""


class Driver(NamedTuple):
    """A directory in which a driver keeps what it remembers, and the sockets on which it tells health."""

    name: str
    directory: Path
    of_agent: bool
    """It is the agent that keeps and tells it."""
    sockets: tuple[Path, ...] = ()


class Drivers(NamedTuple):
    """All that keep something here or are served here."""

    drivers: tuple[Driver, ...] = ()
    unread: tuple[str, ...] = ()
    """Directories in which there may be more, each with the reason."""


def find_drivers(
    kubelet_dir: Path | None = None, state_dir: Path | None = None, runtime_dir: Path | None = None
) -> Drivers:
    """The drivers. Of the kubelet's plugins only those are asked for their health that embed drahealth: they
    take several readers."""
    found: dict[Path, Driver] = {}
    unread: list[str] = []
    if state_dir is not None:
        below = state_dir / DRIVERS
        for name in _names(below, unread):
            found[below / name] = Driver(name, below / name, of_agent=True)
    if runtime_dir is not None:
        sockets = runtime_dir / DRIVERS
        for name in _names(sockets, unread):
            driver = name.removesuffix(".sock")
            if driver != name:
                kept = (state_dir or runtime_dir) / DRIVERS / driver
                found[kept] = Driver(driver, kept, of_agent=True, sockets=(sockets / name,))
    if kubelet_dir is not None:
        plugins = kubelet_dir / "plugins"
        for name in _names(plugins, unread):
            inside = _names(plugins / name, unread)
            if KEPT in inside:
                kept = plugins / name / KEPT
                served = tuple(plugins / name / one for one in inside if one.endswith(".sock"))
                found[kept] = Driver(name, kept, of_agent=False, sockets=served)
    return Drivers(tuple(found.values()), tuple(unread))


def _names(directory: Path, unread: list[str]) -> list[str]:
    """What is in a directory; nothing in one that is not there. Why one cannot be listed is added."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        unread.append(f"{directory}: {error.strerror}")
        return []


async def read_prepared(directory: Path, patience: HungGuard) -> SourceAnswer[PreparedClaim]:
    """The claims that a driver holds prepared, or why nobody knows; absent if it keeps no such record."""
    path = directory / prepares.FILE
    try:
        return await patience.in_time(path, partial(_read, path), DISK_S)
    except TimeoutError:
        return SourceAnswer(
            Provenance(Origin.DRIVER, read_clocks()), (), Absence.UNREADABLE, late(path, DISK_S)
        )


def _read(path: Path) -> SourceAnswer[PreparedClaim]:
    try:
        file = read_bounded(path, prepares.SIZE_MAX)
        claims = tuple(prepared_claims(prepares.decode(file.data)))
    except ReadError as error:
        return SourceAnswer(Provenance(Origin.DRIVER, read_clocks()), (), error.absence, str(error))
    except CorruptFile as error:
        return SourceAnswer(
            Provenance(Origin.DRIVER, read_clocks()), (), Absence.UNREADABLE, f"{path}: {error}"
        )
    return SourceAnswer(Provenance(Origin.DRIVER, read_clocks(), file.written_s), claims)


def prepared_claims(one: Prepares) -> Iterator[PreparedClaim]:
    """The claims that a driver holds prepared, as it remembers."""
    for kept in one.book.claims.values():
        if kept.outcome.verdict is None and not kept.over_wall_s:
            devices = tuple(DeviceUse(device) for device in kept.outcome.devices)
            yield PreparedClaim(kept.outcome.claim, devices)
