"""Queries all sources on the node for ``drahealth explain``, in parallel and each with a timeout.

If a source is missing, hangs or sends invalid data, the answers of the others are still used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from agent.cli.explain.model import (
    AGENT,
    DRIVER_SOCKET,
    HISTORY,
    PREPARES,
    TAINTS,
    DriverSocketReport,
    NodeAnswers,
    SourcePaths,
    SourceResult,
)
from agent.cli.output.text import format_count
from agent.cli.prepares.text import prepare_records
from agent.devices.consumers.kube_objects import parse_claims, parse_pods, parse_workloads
from agent.errors import AgentUnreachable, DrahealthError, PermissionDeniedError, ResourceBusyError
from agent.model.claim import DeviceRef
from agent.model.claim_sources import (
    KubeletHealthRecord,
    Origin,
    PodCgroup,
    PreparedClaim,
    Provenance,
    SourceAnswer,
    SourceAnswers,
    WorkloadRef,
)
from agent.model.health import Taint
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.settings import HISTORY_FILE
from agent.model.time import Instant
from agent.node.pods.queries import (
    DriverDirectories,
    DriverStateDirectory,
    find_drivers,
    prepared_claims,
    query_kubelet,
    query_report,
    read_file,
)
from agent.serve.kubelet import client, pods_api
from agent.sources import kubectl_files, kubelet_files, pod_cgroups
from agent.store import driver_files
from agent.store.driver_files import LedgerFileContent
from agent.store.state_files import UnusableFile
from agent.system.files import FileContent, ReadError, read_bounded
from agent.system.threads.worker_threads import (
    DISK_TIMEOUT_S,
    SOCKET_TIMEOUT_S,
    HungGuard,
    run_with_timeout,
    timeout_text,
)
from agent.system.timing import read_clocks

if TYPE_CHECKING:
    from agent.model.device_usage import PodDeviceUsage

T = TypeVar("T")


async def query_all_sources(paths: SourcePaths) -> NodeAnswers:
    """Query all sources at `paths` and return their answers.

    Raises:
        UsageError: ``--pods`` or ``--claims`` names a file that cannot be used.
        AgentUnreachable: No source answered; the text has the reason for each.
        PermissionDeniedError: No source answered, and this user may not read some of them or a named file.
    """
    try:
        find = partial(find_drivers, paths.kubelet_dir, paths.state_dir, paths.runtime_dir)
        drivers, unread = await run_with_timeout(find, DISK_TIMEOUT_S)
    except TimeoutError:
        drivers, unread = DriverDirectories(
            (), (f"the drivers' directories: no answer within {DISK_TIMEOUT_S:g} s",)
        )
    answers = await asyncio.gather(
        _query_agent(paths.runtime_dir),
        asyncio.gather(
            *(_query_driver_socket(driver, socket) for driver in drivers for socket in driver.sockets)
        ),
        _query_kubelet(paths.kubelet_dir),
        _query_cgroups(paths.cgroupfs_root, paths.kubelet_cgroup_root),
        asyncio.gather(_driver_files(paths, drivers, unread), _query_history(paths.state_dir)),
        asyncio.gather(_read_saved_file(paths.pods), _read_saved_file(paths.claims)),
    )
    (report, agent), sockets, (kubelet, beliefs, kubelet_results), (live, cgroups), stored, saved = answers
    files, (usage, history) = stored
    # after all queries: parsing YAML blocks the event loop
    objects, workloads, object_results = _parse_saved_files(*saved)
    results = (
        *agent,
        *(answer.result for answer in sockets),
        *kubelet_results,
        *cgroups,
        *files.results,
        *history,
        *object_results,
    )
    if all(result.absence for result in results if result.place):
        reasons = [f"  {result.source}: {result.reason}" for result in results if result.place]
        kind = PermissionDeniedError if any(result.is_denied for result in results) else AgentUnreachable
        raise kind("\n".join(["no source on this node answered:", *reasons]))
    return NodeAnswers(
        now=read_clocks(),
        report=report,
        driver_reports=_driver_reports(sockets),
        consumers=SourceAnswers(
            prepared=(*kubelet.prepared, *files.prepared),
            listed=kubelet.listed,
            pods=(*kubelet.pods, *objects.pods),
            claims=objects.claims,
            live=live,
        ),
        workloads=workloads,
        kubelet_health=beliefs,
        prepares=prepare_records(files.prepares),
        driver_faults=tuple(
            fault
            for stored in files.prepares
            for fault in stored.ledger.driver_faults.faults
            if not fault.expired_wall_s
        ),
        taints=files.taints,
        usage=usage,
        sources=results,
        node=paths.node,
    )


# --- health sockets ----------------------------------------------------------------------------------------


class _SocketAnswer(NamedTuple):
    driver: str
    socket: Path
    is_agents: bool
    report: Report | None
    result: SourceResult


def _driver_reports(answers: Iterable[_SocketAnswer]) -> dict[str, DriverSocketReport]:
    """Return the health report about each driver's devices, by driver.

    The report is from the driver's own socket if that socket lists devices. Otherwise the report is from the
    agent's socket for the driver.
    """
    found: dict[str, DriverSocketReport] = {}
    for driver, socket, is_agents, report, _ in answers:
        if report is None:
            continue
        earlier = found.get(driver)
        if earlier is None or (earlier.is_agents and not is_agents and report.devices):
            found[driver] = DriverSocketReport(str(socket), is_agents, report)
    return found


async def _query_agent(runtime_dir: Path | None) -> tuple[Report | None, tuple[SourceResult, ...]]:
    if runtime_dir is None:
        return None, ()
    report, result = await _first_report(AGENT, runtime_dir / "agent.sock")
    return report, (result,)


async def _query_driver_socket(driver: DriverStateDirectory, socket: Path) -> _SocketAnswer:
    return _SocketAnswer(driver.name, socket, driver.is_agents, *await _first_report(DRIVER_SOCKET, socket))


async def _first_report(source: str, socket: Path) -> tuple[Report | None, SourceResult]:
    absence = Absence.UNREADABLE
    try:
        report = await query_report(socket)
    except TimeoutError:
        reason = timeout_text(socket, SOCKET_TIMEOUT_S)
    except DrahealthError as error:
        reason = str(error)
        if isinstance(error.__context__, FileNotFoundError):
            absence = Absence.ABSENT
    else:
        found = format_count(len(report.devices), "device")
        return report, SourceResult(source, str(socket), read_clocks(), report.at.wall_s, found)
    return None, SourceResult(source, str(socket), read_clocks(), absence=absence, reason=reason)


# --- kubelet and cgroups -----------------------------------------------------------------------------------


async def _query_kubelet(
    directory: Path | None,
) -> tuple[SourceAnswers, tuple[KubeletHealthRecord, ...], tuple[SourceResult, ...]]:
    if directory is None:
        return SourceAnswers(), (), ()
    health_file = directory / kubelet_files.HEALTH_FILE
    guard = HungGuard()
    answers, beliefs = await asyncio.gather(
        query_kubelet(directory, guard),
        read_file(Origin.HEALTH_STATE, health_file, kubelet_files.read_health_state, guard),
    )
    pods = parse_pods(answers.pods)
    results = (
        _source_result(answers.prepared, directory / kubelet_files.CLAIMS_FILE, "claim"),
        _source_result(beliefs, health_file, "device"),
        _source_result(answers.listed, directory / client.PODRESOURCES_SOCKET, "pod"),
        _source_result(pods, directory / pods_api.SOCKET, "pod"),
    )
    consumers = SourceAnswers(prepared=(answers.prepared,), listed=(answers.listed,), pods=(pods,))
    return consumers, beliefs.items, results


async def _query_cgroups(
    mount: Path | None, root: str
) -> tuple[tuple[SourceAnswer[PodCgroup], ...], tuple[SourceResult, ...]]:
    if mount is None:
        return (), ()
    answer = await read_file(
        Origin.CGROUPS, mount, lambda path, at: pod_cgroups.read_live_pods(path, root, at), HungGuard()
    )
    return (answer,), (_source_result(answer, mount, "pod"),)


def _source_result(answer: SourceAnswer[Any], place: Path, noun: str) -> SourceResult:
    origin, read, written_s = answer.provenance
    found = "" if answer.absence else format_count(len(answer.items), noun)
    content = (found, answer.absence, answer.reason, answer.invalid)
    return SourceResult(str(origin), str(place), read, written_s, *content)


# --- files of drivers and of the agent ---------------------------------------------------------------------


class _DriverFiles(NamedTuple):
    prepares: tuple[LedgerFileContent, ...] = ()
    prepared: tuple[SourceAnswer[PreparedClaim], ...] = ()
    """Claims that drivers have prepared."""
    taints: Mapping[str, Mapping[DeviceRef, tuple[Taint, ...]]] = MappingProxyType({})
    """Taints that drivers publish, by driver."""
    results: tuple[SourceResult, ...] = ()


async def _driver_files(
    paths: SourcePaths, drivers: Sequence[DriverStateDirectory], unread: Sequence[str]
) -> _DriverFiles:
    """Read the files of prepare results and of taints of all drivers.

    `unread` has the directories that could not be listed.
    """
    if paths.kubelet_dir is None and paths.state_dir is None:
        return _DriverFiles()
    directories = [driver.directory for driver in drivers]
    found, tainted = await asyncio.gather(
        asyncio.gather(
            *(
                _read_state_file(PREPARES, directory / driver_files.LEDGER_FILE, _read_prepares)
                for directory in directories
            )
        ),
        asyncio.gather(
            *(
                _read_state_file(TAINTS, directory / driver_files.TAINTS_FILE, _read_taints)
                for directory in directories
            )
        ),
    )
    return _DriverFiles(
        prepares=tuple(stored for stored, _ in found if stored),
        prepared=tuple(
            SourceAnswer(
                Provenance(Origin.DRIVER, result.read, result.written_s), tuple(prepared_claims(stored))
            )
            for stored, result in found
            if stored
        ),
        taints={
            driver.name: some for driver, (some, _) in zip(drivers, tainted, strict=True) if some is not None
        },
        results=(
            *_file_results(PREPARES, [result for _, result in found], paths, unread),
            *_file_results(TAINTS, [result for _, result in tainted], paths, unread),
        ),
    )


async def _read_state_file(
    source: str, path: Path, read: Callable[[Path], tuple[T, str, float | None]]
) -> tuple[T | None, SourceResult]:
    """Read a state file of a driver or of the agent with the function `read`.

    Return the content of the file and the outcome. The content is None if the file has no usable content.
    """
    absence = Absence.UNREADABLE
    try:
        content, found, written_s = await run_with_timeout(partial(read, path), DISK_TIMEOUT_S)
    except TimeoutError:
        reason = timeout_text(path, DISK_TIMEOUT_S)
    except ReadError as error:
        absence, reason = error.absence, str(error)
    except (FileNotFoundError, NotADirectoryError):
        absence, reason = Absence.ABSENT, f"{path}: no such file"
    except OSError as error:
        reason = f"{path}: {error.strerror}"
    except (ResourceBusyError, UnusableFile) as error:
        reason = f"{path}: {error}"
    else:
        return content, SourceResult(source, str(path), read_clocks(), written_s, found)
    return None, SourceResult(source, str(path), read_clocks(), absence=absence, reason=reason)


def _read_prepares(path: Path) -> tuple[LedgerFileContent, str, float]:
    file = read_bounded(path, driver_files.SIZE_MAX)
    content = driver_files.decode_ledger(file.data)
    return content, format_count(len(content.ledger.claims), "claim"), file.written_s


def _read_taints(path: Path) -> tuple[dict[DeviceRef, tuple[Taint, ...]], str, float]:
    file = read_bounded(path, driver_files.SIZE_MAX)
    content = dict(driver_files.decode_taints(file.data).devices)
    return content, format_count(len(content), "tainted device"), file.written_s


def _file_results(
    source: str, results: Sequence[SourceResult], paths: SourcePaths, unread: Sequence[str]
) -> Iterator[SourceResult]:
    """Yield the outcome for each state file of this kind that exists or cannot be read.

    If there is no such file, yield one outcome that states this.
    """
    for reason in unread:
        place = reason.partition(": ")[0].removeprefix("directory of drivers ")
        yield SourceResult(source, place, read_clocks(), absence=Absence.UNREADABLE, reason=reason)
    existing = [result for result in results if result.absence is not Absence.ABSENT]
    yield from existing
    if not existing and not unread:
        name = driver_files.LEDGER_FILE if source == PREPARES else driver_files.TAINTS_FILE
        directories = [str(directory) for directory in (paths.kubelet_dir, paths.state_dir) if directory]
        reason = f"{' and '.join(directories)}: no driver has a {name} here"
        yield SourceResult(source, directories[0], read_clocks(), absence=Absence.ABSENT, reason=reason)


async def _query_history(
    state_dir: Path | None,
) -> tuple[tuple[PodDeviceUsage, ...], tuple[SourceResult, ...]]:
    """Return the uses of devices by pods in the agent's history, and the outcome of reading the history file.

    Both are empty if there is no history file.
    """
    if state_dir is None:
        return (), ()
    usage, result = await _read_state_file(HISTORY, state_dir / HISTORY_FILE, _read_history)
    return usage or (), () if result.absence is Absence.ABSENT else (result,)


def _read_history(path: Path) -> tuple[tuple[PodDeviceUsage, ...], str, float | None]:
    path.lstat()
    from agent.store.history_file import read_history  # loads SQLite, which is not needed without the file

    content = read_history(path)
    usage = (*content.running, *content.ended)
    written_s = content.last_write_s or None  # 0 is no time: the agent has recorded nothing yet
    return usage, format_count(len(usage), "use of a device", "uses of devices"), written_s


# --- files that the operator names -------------------------------------------------------------------------


class _SavedFile(NamedTuple):
    path: Path
    read: Instant
    file: FileContent


async def _read_saved_file(path: Path | None) -> _SavedFile | None:
    if path is None:
        return None
    is_pipe = path == Path("-") or path.is_relative_to("/dev")  # its writer may be a slow kubectl
    timeout_s = None if is_pipe else DISK_TIMEOUT_S
    try:
        content = await run_with_timeout(lambda: kubectl_files.read_object_file(path), timeout_s)
        return _SavedFile(path, read_clocks(), content)
    except TimeoutError:
        raise DrahealthError(timeout_text(path, DISK_TIMEOUT_S)) from None


def _parse_saved_files(
    pods_file: _SavedFile | None, claims_file: _SavedFile | None
) -> tuple[SourceAnswers, tuple[WorkloadRef, ...], tuple[SourceResult, ...]]:
    """Return the pods in the file of ``--pods``, the claims in the file of ``--claims``, and workloads.

    The workload objects are the other objects in the file of ``--pods``. The last value is the outcome for
    each file.
    """
    answers, results = SourceAnswers(), []
    workloads: tuple[WorkloadRef, ...] = ()
    if pods_file is not None:
        content = _parse(pods_file, kubectl_files.POD)
        pods, workloads = parse_pods(content.answer), parse_workloads(content.others)
        answers = SourceAnswers(pods=(pods,))
        result = _source_result(pods, pods_file.path, "pod")
        others = f", {format_count(len(workloads), 'other object')}" if workloads else ""
        results.append(result._replace(found=f"{result.found}{others}"))
    if claims_file is not None:
        claims = parse_claims(_parse(claims_file, kubectl_files.CLAIM).answer)
        answers = SourceAnswers(pods=answers.pods, claims=(claims,))
        results.append(_source_result(claims, claims_file.path, "claim"))
    else:
        reason = "no file is given; see --claims"
        results.append(SourceResult("claims-file", "", read_clocks(), absence=Absence.ABSENT, reason=reason))
    return answers, workloads, tuple(results)


def _parse(saved: _SavedFile, kind: str) -> kubectl_files.ObjectFileContent:
    return kubectl_files.parse_mixed_object_file(saved.path, saved.file, kind, saved.read)
