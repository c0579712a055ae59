"""What the drivers of a node keep in files, and what became of reading them. Where those are is for
agent.node.pods.drivers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from agent.cli.explain.places import Places
from agent.cli.explain.words import PREPARES, TAINTS, Account
from agent.cli.output.text import format_count
from agent.cli.prepares.text import Claim, claims_of
from agent.model.claim import DeviceRef
from agent.model.claim_sources import Origin, PreparedClaim, Provenance, SourceAnswer
from agent.model.reading import Absence
from agent.model.taint import Taint
from agent.node.pods.drivers import Driver, prepared_claims
from agent.store import prepares, taints
from agent.store.files import CorruptFile
from agent.store.prepares import Prepares
from agent.system.clock import read_clocks
from agent.system.read_file import ReadError, read_bounded
from agent.system.threads.with_timeout import DISK_S, late, run_with_timeout

T = TypeVar("T")


class Records(NamedTuple):
    """What the drivers keep."""

    prepares: tuple[Prepares, ...] = ()
    prepared: tuple[SourceAnswer[PreparedClaim], ...] = ()
    """The claims that they hold prepared."""
    claims: tuple[Claim, ...] = ()
    taints: Mapping[str, Mapping[DeviceRef, tuple[Taint, ...]]] = MappingProxyType({})
    """By driver."""
    accounts: tuple[Account, ...] = ()


async def read_records(places: Places, drivers: Sequence[Driver], unread: Sequence[str]) -> Records:
    """What the drivers keep in files."""
    if places.kubelet_dir is None and places.state_dir is None:
        return Records()
    directories = [driver.directory for driver in drivers]
    found, tainted = await asyncio.gather(
        asyncio.gather(*(_kept(PREPARES, one / prepares.FILE, _read_prepares) for one in directories)),
        asyncio.gather(*(_kept(TAINTS, one / taints.FILE, _read_taints) for one in directories)),
    )
    held: list[SourceAnswer[PreparedClaim]] = []
    for one, account in found:
        if one is None:
            continue
        witness = Provenance(Origin.DRIVER, account.read, account.written_s)
        held.append(SourceAnswer(witness, tuple(prepared_claims(one))))
    return Records(
        prepares=tuple(one for one, _ in found if one),
        prepared=tuple(held),
        claims=claims_of(one for one, _ in found if one),
        taints={one.name: some for one, (some, _) in zip(drivers, tainted, strict=True) if some is not None},
        accounts=(
            *_folded(PREPARES, [account for _, account in found], places, unread),
            *_folded(TAINTS, [account for _, account in tainted], places, unread),
        ),
    )


async def _kept(
    source: str, path: Path, work: Callable[[Path], tuple[T, str, float]]
) -> tuple[T | None, Account]:
    """A driver's file and its account."""
    absence = Absence.UNREADABLE
    try:
        found, text, written_s = await run_with_timeout(partial(work, path), DISK_S)
    except TimeoutError:
        why = late(path, DISK_S)
    except ReadError as error:
        absence, why = error.absence, str(error)
    except CorruptFile as error:
        why = f"{path}: {error}"
    else:
        return found, Account(source, str(path), read_clocks(), written_s, text)
    return None, Account(source, str(path), read_clocks(), absence=absence, why=why)


def _read_prepares(path: Path) -> tuple[Prepares, str, float]:
    file = read_bounded(path, prepares.SIZE_MAX)
    found = prepares.decode(file.data)
    return found, format_count(len(found.book.claims), "claim"), file.written_s


def _read_taints(path: Path) -> tuple[dict[DeviceRef, tuple[Taint, ...]], str, float]:
    file = read_bounded(path, taints.SIZE_MAX)
    found = dict(taints.decode(file.data).devices)
    return found, format_count(len(found), "tainted device"), file.written_s


def _folded(
    source: str, accounts: Sequence[Account], places: Places, unread: Sequence[str]
) -> Iterator[Account]:
    """Those that are there or cannot be read, each; where none is, that there is none."""
    for why in unread:
        yield Account(source, why.partition(": ")[0], read_clocks(), absence=Absence.UNREADABLE, why=why)
    there = [one for one in accounts if one.absence is not Absence.ABSENT]
    yield from there
    if not there and not unread:
        name = prepares.FILE if source == PREPARES else taints.FILE
        where = [str(one) for one in (places.kubelet_dir, places.state_dir) if one]
        why = f"{' and '.join(where)}: no driver keeps a {name} here"
        yield Account(source, where[0], read_clocks(), absence=Absence.ABSENT, why=why)
