"""Comparison of records on the workers of a dask.distributed cluster, one task for each record.

dask gives the tasks of a lost worker to other workers. If several workers die during the comparison of a
record, the record is named and left out.
"""

import logging
import pickle
import pkgutil
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from agent.errors import ConfigError, ProbeError, UsageError
from agent.record.replay import ChangeSettings
from agent.record.segment_file import RecordPath, UrlPath
from agent.record.what_if import RecordComparison, compare_record, left_out
from agent.system.files import absolute_path
from agent.version import VERSION

CONNECT_S: Final = 30.0
"""Longest wait for the scheduler [s]."""
WORKERS_S: Final = 60.0
"""Longest time in which the cluster may have no worker [s]: a restart of a worker takes less."""
CHECK_S: Final = 5.0
"""Time without a result after which the command checks that the cluster has a worker [s]."""
RESULT_S: Final = 60.0
"""Longest wait for a result that is ready [s]; then dask may compute it again on another worker."""
IN_FLIGHT: Final = 1000
"""Largest number of tasks at the scheduler at once, because its memory holds the names of their segments."""

TaskOutcome = RecordComparison | str | Exception
"""Result of a task: a comparison, the other version of drahealth on the worker, or why it failed."""


def compare_on_cluster(
    scheduler: str,
    groups: Sequence[Sequence[RecordPath]],
    change: ChangeSettings,
    show_progress: Callable[[int, int], None],
) -> list[RecordComparison]:
    """Return the comparison of each record, in the order of the records. Blocks until all are compared.

    Args:
        scheduler: URL of the scheduler, such as ``tcp://host:8786``.
        groups: Segments of each record. Workers read a file at the same path as this machine.
        change: Returns the settings of the other configuration.
        show_progress: Called with the number of compared records and the number of all records.

    Raises:
        UsageError: The scheduler's URL is malformed.
        ConfigError: dask is not installed or has no certificates, or a worker has another drahealth.
        ProbeError: The scheduler cannot be reached, or there is no worker.
    """
    try:
        from distributed import Client, KilledWorker, Security
        from distributed.comm import get_address_host_port
    except ImportError:
        raise ConfigError(
            "--scheduler needs the package distributed; install drahealth[fleet-replay]"
        ) from None
    try:
        get_address_host_port(scheduler, strict=True)
    except ValueError as error:
        raise UsageError(f"--scheduler: {error}; write a URL such as tcp://HOST:8786") from None
    for name in ("distributed", "distributed.client"):  # the errors below need none of dask's tracebacks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        security = Security()
        if scheduler.startswith("tls:") and not security.get_connection_args("client").get("ssl_context"):
            raise ConfigError(
                f"scheduler {scheduler}: dask has no certificates; set its option distributed.comm.tls"
            )
        client = Client(scheduler, timeout=CONNECT_S, security=security, set_as_default=False)
    except OSError as error:
        raise ProbeError(
            f"scheduler {scheduler}: no connection: {error}; check that the scheduler runs there"
        ) from None
    found: dict[int, RecordComparison] = {}
    suspects: list[int] = []

    def task(number: int) -> tuple[int, bytes]:
        return number, pickle.dumps(([_absolute_path(path) for path in groups[number]], change))

    with client:
        _check_versions(client)
        show_progress(0, len(groups))
        for number, outcome in _outcomes(client, map(task, range(len(groups)))):
            if isinstance(outcome, KilledWorker):
                suspects.append(number)
            else:
                found[number] = _comparison(groups[number], outcome)
            show_progress(len(found), len(groups))
        for number in suspects:  # alone, because another record on the same worker may be the cause
            outcome = _outcome_alone(client, task(number))
            found[number] = _comparison(groups[number], outcome)
            show_progress(len(found), len(groups))
    return [found[number] for number in range(len(groups))]


def compare_pickled(version: str, data: bytes) -> RecordComparison | str:
    """Compare one record on a worker; if the worker has another version of drahealth, return the version.

    Args:
        version: Version of drahealth that `data` is for.
        data: Segments of the record and the change of the settings, which only that version can unpickle.
    """
    if version != VERSION:
        return VERSION
    paths, change = pickle.loads(data)
    return compare_record(paths, change)


def _absolute_path(path: RecordPath) -> RecordPath:
    return path if isinstance(path, UrlPath) else Path(absolute_path(path))


def _check_versions(client: Any) -> None:
    """Check that each worker has this version of drahealth; workers that join later are checked by each task.

    Raises:
        ConfigError: A worker has another version, or none.
        ProbeError: There is no worker.
    """
    _require_worker(client)
    answers = client.run(pkgutil.resolve_name, "agent.version:VERSION", on_error="return")
    for worker, answer in sorted(answers.items()):
        if isinstance(answer, ImportError):
            raise ConfigError(
                f"worker {worker}: has no drahealth; install drahealth[fleet-replay] {VERSION} there"
            )
        if isinstance(answer, str) and answer != VERSION:
            raise ConfigError(
                f"worker {worker}: has drahealth {answer} instead of {VERSION}; install the same version"
            )


def _require_worker(client: Any) -> None:
    try:
        client.wait_for_workers(1, timeout=WORKERS_S)
    except TimeoutError:  # an OSError
        raise ProbeError(
            f"dask cluster: no worker for {WORKERS_S:g} s; start workers with: dask worker URL --nthreads 1"
        ) from None
    except OSError as error:
        raise ProbeError(
            f"dask cluster: the connection to the scheduler was lost: {error}; run the command again"
        ) from None


def _outcomes(client: Any, tasks: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, TaskOutcome]]:
    """Run tasks on the cluster and yield their outcomes by number, in the order in which they end.

    Raises:
        ProbeError: The connection to the scheduler is lost, or there is no worker.
    """
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting = iter(tasks)
    running: dict[str, tuple[int, Any]] = {}
    while True:
        for number, data in islice(waiting, IN_FLIGHT - len(running)):
            future = client.submit(compare_pickled, VERSION, data, pure=False)
            running[future.key] = number, future
            future.add_done_callback(ready.put)
        if not running:
            return
        try:
            future = ready.get(timeout=CHECK_S)
        except queue.Empty:
            _require_worker(client)
            continue
        if future.status in ("cancelled", "lost"):
            raise ProbeError("dask cluster: the scheduler was lost; run the command again")
        outcome: TaskOutcome
        try:
            outcome = future.result(timeout=RESULT_S)
        except Exception as error:
            if isinstance(error, TimeoutError) and future.status != "error":
                future.add_done_callback(ready.put)  # the worker was lost with the result
                continue
            outcome = error
        yield running.pop(future.key)[0], outcome


def _outcome_alone(client: Any, task: tuple[int, bytes]) -> TaskOutcome:
    """Run one task while this command runs no other task, and return its outcome."""
    try:
        return next(outcome for _, outcome in _outcomes(client, [task]))
    except ProbeError as error:  # the last worker was lost, too; the other records are compared
        return error


def _comparison(group: Sequence[RecordPath], outcome: TaskOutcome) -> RecordComparison:
    """Return the comparison of a record from the outcome of its task.

    If the task failed, the comparison is empty and names the reason.

    Raises:
        ConfigError: The worker of the task has another version of drahealth.
    """
    if isinstance(outcome, RecordComparison):
        return outcome
    if isinstance(outcome, str):
        raise ConfigError(
            f"dask cluster: a worker has drahealth {outcome} instead of {VERSION}; install the same version"
        )
    return left_out(group, outcome)
