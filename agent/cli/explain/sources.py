"""Asks everybody on the node, all at the same time and nobody for long.

Owns what is asked, and the account of what became of it. A source that is missing, hangs or lies costs what
it would have said, and nothing else. What follows from the answers is agent.cli.explain.facts's.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from agent.cli.explain.drivers import read_records
from agent.cli.explain.history import read_history
from agent.cli.explain.places import Places
from agent.cli.explain.words import AGENT, DRIVER_SOCKET, Account, Gathered, Stream
from agent.cli.output.text import format_count
from agent.devices.consumers.kube_objects import claims_from, pods_from
from agent.errors import AgentUnreachable, DrahealthError, PermissionDenied
from agent.model.claim_sources import Belief, LivePod, Origin, SourceAnswer, SourceAnswers
from agent.model.objects import Object
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.time import Instant
from agent.node.pods.drivers import Driver, Drivers, find_drivers
from agent.node.pods.queries import ask_kubelet, read_file
from agent.serve.agent_api import client
from agent.serve.kubelet import podresources, pods_api
from agent.sources import cgroup_tree, kube_objects, kubelet_checkpoint, kubelet_health
from agent.system.clock import read_clocks
from agent.system.read_file import WholeFile
from agent.system.threads.with_timeout import DISK_S, SOCKET_S, HungGuard, late, run_with_timeout


async def gather(places: Places) -> Gathered:
    """What everybody says.

    Raises:
        UsageError, PermissionDenied: A file that was named cannot be used.
        AgentUnreachable: There was nobody who said anything; with who was asked, and why not.
        PermissionDenied: Likewise, and somebody may be there whom this user may not ask.
    """
    try:
        find = partial(find_drivers, places.kubelet_dir, places.state_dir, places.runtime_dir)
        drivers, unread = await run_with_timeout(find, DISK_S)
    except TimeoutError:
        drivers, unread = Drivers((), (f"the drivers' directories: no answer within {DISK_S:g} s",))
    results = await asyncio.gather(
        _agent(places.runtime_dir),
        asyncio.gather(*(_stream(driver, socket) for driver in drivers for socket in driver.sockets)),
        _kubelet(places.kubelet_dir),
        _cgroups(places.cgroupfs_root, places.kubelet_cgroup_root),
        asyncio.gather(read_records(places, drivers, unread), read_history(places.state_dir)),
        asyncio.gather(_file(places.pods), _file(places.claims)),
    )
    (report, agent), streams, (heard, beliefs, kubelet), (live, tree), kept, (pods, claims) = results
    records, (recorded, history) = kept
    objects, files = _objects(pods, claims)  # now: nobody is heard meanwhile, and YAML takes its time
    accounts = (
        *agent,
        *(one.account for one in streams),
        *kubelet,
        *tree,
        *records.accounts,
        *history,
        *files,
    )
    if all(one.absence for one in accounts if one.place):
        asked = [f"  {one.source}: {one.why}" for one in accounts if one.place]
        kind = PermissionDenied if any(one.denied for one in accounts) else AgentUnreachable
        raise kind("\n".join(["nobody says anything:", *asked]))
    told = {
        one.driver: Stream(str(one.socket), one.of_agent, one.report)
        for one in reversed(streams)
        if one.report
    }
    return Gathered(
        now=read_clocks(),
        report=report,
        streams=told,
        heard=SourceAnswers(
            prepared=(*heard.prepared, *records.prepared),
            listed=heard.listed,
            pods=(*heard.pods, *objects.pods),
            claims=objects.claims,
            live=live,
        ),
        beliefs=beliefs,
        records=records.claims,
        broken=tuple(
            fault for one in records.prepares for fault in one.book.told.faults if not fault.excused_wall_s
        ),
        taints=records.taints,
        recorded=recorded,
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
        return None, Account(source, place, read_clocks(), absence=Absence.UNREADABLE, why=why)
    except DrahealthError as error:
        is_there = not isinstance(error.__context__, FileNotFoundError)
        absence = Absence.UNREADABLE if is_there else Absence.ABSENT
        return None, Account(source, place, read_clocks(), absence=absence, why=str(error))
    found = format_count(len(report.devices), "device")
    return report, Account(source, place, read_clocks(), report.at.wall_s, found)


# --- the kubelet -------------------------------------------------------------------------------------------


async def _kubelet(directory: Path | None) -> tuple[SourceAnswers, tuple[Belief, ...], tuple[Account, ...]]:
    if directory is None:
        return SourceAnswers(), (), ()
    checkpoint = directory / kubelet_checkpoint.NAME
    health = directory / kubelet_health.NAME
    listing = directory / podresources.SOCKET
    pods = directory / pods_api.SOCKET
    patience = HungGuard()
    told, beliefs = await asyncio.gather(
        ask_kubelet(directory, patience),
        read_file(Origin.HEALTH_STATE, health, kubelet_health.read_health_state, patience),
    )
    known = pods_from(told.pods)
    accounts = (
        _account(told.prepared, checkpoint, "claim"),
        _account(beliefs, health, "device"),
        _account(told.listed, listing, "pod"),
        _account(known, pods, "pod"),
    )
    heard = SourceAnswers(prepared=(told.prepared,), listed=(told.listed,), pods=(known,))
    return heard, beliefs.items, accounts


async def _cgroups(
    mounted: Path | None, root: str
) -> tuple[tuple[SourceAnswer[LivePod], ...], tuple[Account, ...]]:
    """The pods that have cgroups."""
    if mounted is None:
        return (), ()
    told = await read_file(
        Origin.CGROUPS, mounted, lambda path, at: cgroup_tree.read_tree(path, root, at), HungGuard()
    )
    return (told,), (_account(told, mounted, "pod"),)


def _account(told: SourceAnswer[Any], place: Path, what: str) -> Account:
    witness = told.witness
    found = "" if told.absence else format_count(len(told.items), what)
    said = (found, told.absence, told.why, told.wrong)
    return Account(str(witness.origin), str(place), witness.read, witness.written_s, *said)


# --- files -------------------------------------------------------------------------------------------------


class _Saved(NamedTuple):
    path: Path
    read: Instant
    file: WholeFile


async def _file(path: Path | None) -> _Saved | None:
    """What somebody saved."""
    if path is None:
        return None
    try:
        return _Saved(
            path, read_clocks(), await run_with_timeout(lambda: kube_objects.read_file(path), DISK_S)
        )
    except TimeoutError:
        raise DrahealthError(late(path, DISK_S)) from None


def _objects(
    saved_pods: _Saved | None, saved_claims: _Saved | None
) -> tuple[SourceAnswers, tuple[Account, ...]]:
    """The objects in what was saved."""
    heard, accounts = SourceAnswers(), []
    if saved_pods is not None:
        pods = pods_from(_told(saved_pods, kube_objects.POD))
        heard = SourceAnswers(pods=(pods,))
        accounts.append(_account(pods, saved_pods.path, "pod"))
    if saved_claims is not None:
        claims = claims_from(_told(saved_claims, kube_objects.CLAIM))
        heard = SourceAnswers(pods=heard.pods, claims=(claims,))
        accounts.append(_account(claims, saved_claims.path, "claim"))
    else:
        why = "not given; see --claims"
        accounts.append(Account("claims-file", "", read_clocks(), absence=Absence.ABSENT, why=why))
    return heard, tuple(accounts)


def _told(saved: _Saved, kind: str) -> SourceAnswer[Object]:
    return kube_objects.objects_of(saved.path, saved.file, kind, saved.read)
