"""Asks everybody on the node, all at the same time and nobody for long.

Owns what is asked, and the account of what became of it. A source that is missing, hangs or lies costs what
it would have said, and nothing else. What follows from the answers is agent.cli.explain_facts's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agent.cli.explain_ask import DISK_S, SOCKET_S, Places, in_time, late, now
from agent.cli.explain_drivers import Driver, Drivers, find_drivers, read_records
from agent.cli.explain_words import AGENT, DRIVER_SOCKET, Account, Gathered, Stream
from agent.cli.text import format_count
from agent.devices.objects import claims_from, pods_from
from agent.errors import AgentUnreachable, DrahealthError
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.testimony import Belief, Heard, Origin, Told, Witness
from agent.model.time import Instant
from agent.serve import client, podresources, pods_api
from agent.sources import kube_objects, kubelet_checkpoint, kubelet_health

T = TypeVar("T")


async def gather(places: Places) -> Gathered:
    """What everybody says.

    Raises:
        UsageError, PermissionDenied: A file that was named cannot be used.
        AgentUnreachable: There was nobody who said anything; with who was asked, and why not.
    """
    try:
        drivers, unread = await in_time(partial(find_drivers, places), DISK_S)
    except TimeoutError:
        drivers, unread = Drivers((), (f"the drivers' directories: no answer within {DISK_S:g} s",))
    results = await asyncio.gather(
        _agent(places.runtime_dir),
        asyncio.gather(*(_stream(driver, socket) for driver in drivers for socket in driver.sockets)),
        _kubelet(places.kubelet_dir),
        read_records(places, drivers, unread),
        _files(places),
    )
    (report, agent), streams, (heard, beliefs, kubelet), records, (objects, files) = results
    accounts = (*agent, *(one.account for one in streams), *kubelet, *records.accounts, *files)
    if all(one.absence for one in accounts if one.place):
        asked = [f"  {one.source}: {one.why}" for one in accounts if one.place]
        raise AgentUnreachable("\n".join(["nobody says anything:", *asked]))
    told = {
        one.driver: Stream(str(one.socket), one.of_agent, one.report)
        for one in reversed(streams)
        if one.report
    }
    return Gathered(
        now=now(),
        report=report,
        streams=told,
        heard=Heard(
            prepared=(*heard.prepared, *records.prepared),
            listed=heard.listed,
            pods=(*heard.pods, *objects.pods),
            claims=objects.claims,
        ),
        beliefs=beliefs,
        records=records.claims,
        broken=tuple(
            fault for one in records.prepares for fault in one.book.told.faults if not fault.excused_wall_s
        ),
        taints=records.taints,
        accounts=accounts,
    )


# --- who judges --------------------------------------------------------------------------------------------


class _Heard(NamedTuple):
    driver: str
    socket: Path
    of_agent: bool
    report: Report | None
    account: Account


async def _agent(runtime_dir: Path | None) -> tuple[Report | None, tuple[Account, ...]]:
    if runtime_dir is None:
        return None, ()
    report, account = await _report(AGENT, runtime_dir / "agent.sock")
    return report, (account,)


async def _stream(driver: Driver, socket: Path) -> _Heard:
    return _Heard(driver.name, socket, driver.of_agent, *await _report(DRIVER_SOCKET, socket))


async def _report(source: str, socket: Path) -> tuple[Report | None, Account]:
    """The first report of a socket."""
    place = str(socket)
    try:
        async with asyncio.timeout(SOCKET_S), aclosing(client.follow(socket)) as reports:
            report = await anext(reports)
    except TimeoutError:
        why = late(socket, SOCKET_S)
        return None, Account(source, place, now(), absence=Absence.UNREADABLE, why=why)
    except DrahealthError as error:
        is_there = not isinstance(error.__context__, FileNotFoundError)
        absence = Absence.UNREADABLE if is_there else Absence.ABSENT
        return None, Account(source, place, now(), absence=absence, why=str(error))
    found = format_count(len(report.devices), "device")
    return report, Account(source, place, now(), report.at.wall_s, found)


# --- the kubelet -------------------------------------------------------------------------------------------


async def _kubelet(directory: Path | None) -> tuple[Heard, tuple[Belief, ...], tuple[Account, ...]]:
    if directory is None:
        return Heard(), (), ()
    checkpoint = directory / kubelet_checkpoint.NAME
    health = directory / kubelet_health.NAME
    listing = directory / podresources.SOCKET
    pods = directory / pods_api.SOCKET
    prepared, beliefs, listed, objects = await asyncio.gather(
        _read(Origin.CHECKPOINT, checkpoint, kubelet_checkpoint.read_checkpoint),
        _read(Origin.HEALTH_STATE, health, kubelet_health.read_health_state),
        _ask(Origin.PODRESOURCES, listing, podresources.list_podresources),
        _ask(Origin.PODS_API, pods, pods_api.list_pods),
    )
    known = pods_from(objects)
    accounts = (
        _account(prepared, checkpoint, "claim"),
        _account(beliefs, health, "device"),
        _account(listed, listing, "pod"),
        _account(known, pods, "pod"),
    )
    heard = Heard(prepared=(prepared,), listed=(listed,), pods=(known,))
    return heard, beliefs.items, accounts


async def _read(origin: Origin, file: Path, read: Callable[[Path, Instant], Told[T]]) -> Told[T]:
    """What stands in a file of the kubelet's, or that it cannot be read in time."""
    try:
        return await in_time(lambda: read(file, now()), DISK_S)
    except TimeoutError:
        return Told(Witness(origin, now()), (), Absence.UNREADABLE, late(file, DISK_S))


async def _ask(
    origin: Origin, socket: Path, ask: Callable[[Path, Callable[[], Instant]], Awaitable[Told[T]]]
) -> Told[T]:
    """What the kubelet says on a socket, or that it does not answer in time."""
    try:
        async with asyncio.timeout(SOCKET_S):
            return await ask(socket, now)
    except TimeoutError:
        return Told(Witness(origin, now()), (), Absence.UNREADABLE, late(socket, SOCKET_S))


def _account(told: Told[Any], place: Path, what: str) -> Account:
    witness = told.witness
    found = "" if told.absence else format_count(len(told.items), what)
    said = (found, told.absence, told.why, told.wrong)
    return Account(str(witness.origin), str(place), witness.read, witness.written_s, *said)


# --- files -------------------------------------------------------------------------------------------------


async def _files(places: Places) -> tuple[Heard, tuple[Account, ...]]:
    """Objects that somebody saved."""
    heard, accounts = Heard(), []
    if places.pods is not None:
        pods = pods_from(await _objects(places.pods, kube_objects.POD))
        heard = Heard(pods=(pods,))
        accounts.append(_account(pods, places.pods, "pod"))
    if places.claims is not None:
        claims = claims_from(await _objects(places.claims, kube_objects.CLAIM))
        heard = Heard(pods=heard.pods, claims=(claims,))
        accounts.append(_account(claims, places.claims, "claim"))
    else:
        why = "not given; see --claims"
        accounts.append(Account("claims-file", "", now(), absence=Absence.ABSENT, why=why))
    return heard, tuple(accounts)


async def _objects(path: Path, kind: str) -> Told[kube_objects.Object]:
    try:
        return await in_time(lambda: kube_objects.read_objects(path, kind, now()), DISK_S)
    except TimeoutError:
        raise DrahealthError(late(path, DISK_S)) from None
