"""Latency from ``publish()`` of a report until the last subscriber on a Unix socket has received it.

Each kind of client has a process, and so have the servers that publish to it. grpcio clients have a thread
each and share an interpreter lock, so that many of them dominate the time. The other clients only read
frames, in one thread, so that the server dominates. The lower bound is one send(2) of as many bytes to each
of as many bare sockets, which one thread reads.
"""

import contextlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.bench.file_trees import temporary_directory
from agent.bench.processes import DRIVER, HEALTH_METHOD, ChildProcess, start_module
from agent.bench.result import ResultTable, SuiteOutcome, rows_from_latencies
from agent.bench.run_size import RunSize

SUBSCRIBERS: Final = (1, 8, 64)
DEVICES: Final = 128
PAUSE_S: Final = 0.002  # between publications, until the threads of the previous one sleep


class ClientKind(NamedTuple):
    """Kind of client that subscribes to the published reports."""

    key: str
    crowd: str
    """Name of this kind in the command line of :mod:`agent.bench.many_subscribers`."""
    label: str


FRAMES: Final = ClientKind(
    "frames", "frames", "frames: clients that only read HTTP/2 frames, all in one thread"
)
BARE_SOCKETS: Final = ClientKind("floor", "bare", "lower bound: one send(2) to each of as many bare sockets")


class ClientProcesses(NamedTuple):
    """Process with all clients of one kind, and the process that publishes to them."""

    kind: ClientKind
    publisher: ChildProcess
    crowd: ChildProcess
    size: int
    """Size of a message to the clients [bytes]."""


def run(run_size: RunSize) -> SuiteOutcome:
    """Measure the delivery of reports of 128 devices to 1, 8 and 64 subscribers."""
    outcome = SuiteOutcome()
    kinds = [*_grpcio_kind_if_installed(outcome), FRAMES, BARE_SOCKETS]
    with contextlib.ExitStack() as stack:
        directories = [stack.enter_context(temporary_directory()) for _ in kinds]
        publishers = [
            stack.enter_context(start_module("agent.bench.publisher", directory, DEVICES))
            for directory in directories
        ]
        groups = [
            _start_group(stack, kind, directory, publisher)
            for kind, directory, publisher in zip(kinds, directories, publishers, strict=True)
        ]
        for count in SUBSCRIBERS:
            for group in groups:
                group.crowd.send_line(f"{count}")
            for group in groups:
                group.crowd.wait(lambda line: "subscribers" in line)
            outcome.tables.append(_measure(run_size, count, groups))
    return outcome


def _grpcio_kind_if_installed(outcome: SuiteOutcome) -> Iterator[ClientKind]:
    """Yield the kind of grpcio clients if grpcio is installed; otherwise record it as skipped."""
    if importlib.util.find_spec("grpc") is None:
        outcome.skipped.append("publish: grpcio is not installed")
        return
    version = importlib.metadata.version("grpcio")
    yield ClientKind("server", "grpcio", f"grpcio {version}: clients with a thread each")


def _start_group(
    stack: contextlib.ExitStack, kind: ClientKind, directory: Path, publisher: ChildProcess
) -> ClientProcesses:
    """Start the process of all clients of one kind, which have no subscriptions yet."""
    size = publisher.wait(lambda line: "ready" in line)["size"]
    socket = directory / ("bare.sock" if kind is BARE_SOCKETS else f"drivers/{DRIVER}.sock")
    argument = size if kind is BARE_SOCKETS else HEALTH_METHOD
    crowd = stack.enter_context(start_module("agent.bench.many_subscribers", socket, kind.crowd, argument))
    return ClientProcesses(kind, publisher, crowd, size)


def _measure(run_size: RunSize, count: int, groups: Sequence[ClientProcesses]) -> ResultTable:
    latencies: dict[str, list[int]] = {group.kind.key: [] for group in groups}
    for _ in range(run_size.publications):
        for group in groups:
            time.sleep(PAUSE_S)
            group.publisher.send_line("bare" if group.kind is BARE_SOCKETS else "publish")
            start_ns = group.publisher.wait()["t_ns"]
            latencies[group.kind.key].append(group.crowd.wait()["t_ns"] - start_ns)
    labels = {group.kind.key: group.kind.label for group in groups}
    rows = rows_from_latencies(f"publish.{count}", labels, dict(latencies))
    notes = (f"{DEVICES} devices, {groups[0].size} bytes, encoded once",)
    section = "from publish(), through the I/O thread, to the last receipt"
    return ResultTable(
        f"{count} subscriber{'s' if count > 1 else ''}", rows, BARE_SOCKETS.label, notes, section
    )
