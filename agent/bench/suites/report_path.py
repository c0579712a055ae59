"""Times of a report's path in the agent: ``step()``, encoding, and publishing to subscribers.

Suite ``decide``: the engine's evaluation (``step()``) without and with a change, and the decoding of
snapshots. The devices are CPUs of this machine, declared by a driver; the cgroups are files that look like
cgroups, because their origin has no effect on the engine. An evaluation has no lower bound; ratios are to an
evaluation without a change.

Suite ``encode``: a list of device healths as protobuf, by the C core, betterproto and Google's protobuf.
Each contender builds its message from the same entries and encodes it, which is the cost of a change.
Google's library is timed if it is installed.

Suite ``publish``: from ``publish()`` of a report until the last subscriber on a Unix socket has received it.
Each kind of client has a process, and so have the servers that publish to it. grpcio clients have a thread
each and share an interpreter lock, so that many of them dominate the time. The other clients only read
frames, in one thread, so that the server dominates. The lower bound is one send(2) of as many bytes to each
of as many bare sockets, which one thread reads.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from agent.bench.file_trees import temporary_directory, write_cgroup_files
from agent.bench.processes import DRIVER, HEALTH_METHOD, ChildProcess, start_module
from agent.bench.result import (
    ResultMismatch,
    ResultRow,
    ResultTable,
    RunSize,
    SuiteOutcome,
    row_from_samples,
    rows_from_latencies,
    rows_from_race,
)
from agent.bench.suites.poll import open_sampler, read_snapshot
from agent.bench.timing import Contender, time_contenders
from agent.engine.step import EngineState, step
from agent.model.declared_devices import Declarations, DeclaredCpuDevice, DeclaredFile, DriverDevice
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import Instant
from agent.native.health_encoder import WireHealth, encode_health_lists
from agent.serve.grpc.gen.health_v1 import v1

DEVICES: Final = (8, 128, 1000)
GROUPS: Final = (100, 1000)


def run_decide(run_size: RunSize) -> SuiteOutcome:
    """Time the evaluation of a snapshot, ``step()``, with 8, 128 and 1,000 devices.

    With 100 and 1,000 cgroups, also time the decoding of the snapshot.
    """
    outcome = SuiteOutcome()
    sampler = open_sampler(None)
    base = read_snapshot(sampler)
    sampler.stop(1.0)
    for count in DEVICES:
        snapshot = replace(base, declared=declare_cpus(base, count))
        _measure(run_size, outcome, f"devices{count}", snapshot, None)
    for count in GROUPS:
        with temporary_directory() as directory:
            sampler = open_sampler(write_cgroup_files(directory, count))
            _measure(run_size, outcome, f"groups{count}", read_snapshot(sampler), sampler.read)
            sampler.stop(1.0)
    return outcome


def _measure(
    run_size: RunSize,
    outcome: SuiteOutcome,
    key: str,
    snapshot: Snapshot,
    decode: Callable[[], object] | None,
) -> None:
    now = snapshot_time(snapshot)
    state, report = step(EngineState(EngineSettings("bench")), snapshot, now)
    changed_snapshot = without_lowest_cpu(snapshot)
    assert step(state, changed_snapshot, now)[1].devices != report.devices, "the change must affect a verdict"
    contenders = [
        Contender("quiet", "quiet: step, nothing changed", lambda: step(state, snapshot, now)),
        Contender(
            "change", "change: step, a declared CPU goes offline", lambda: step(state, changed_snapshot, now)
        ),
    ]
    if decode:
        contenders.append(Contender("decode", "decode: Sampler.read, nothing changed", decode))
    timed = time_contenders(contenders, rounds=run_size.warm_rounds, limit_s=run_size.warm_limit_s)
    rows = rows_from_race(f"decide.{key}", timed, "quiet")
    title = f"{len(report.devices)} devices, {len(snapshot.groups)} cgroups"
    outcome.tables.append(
        ResultTable(title, rows, contenders[0].label, section="one evaluation of a snapshot")
    )
    outcome.reference_ns += timed.reference


def snapshot_time(snapshot: Snapshot) -> Instant:
    """Return a time for an evaluation at which the engine treats no source of the snapshot as stalled."""
    return Instant(max(source.beat_ns for source in snapshot.sources), 1.7e9)


def declare_cpus(snapshot: Snapshot, count: int) -> Declarations:
    """Return declarations of ``count`` CPU devices by one driver.

    The first device is the lowest online CPU; all others are the highest online CPU.
    """
    online = online_cpus(snapshot)
    lowest, highest = online & -online, 1 << online.bit_length() - 1
    devices = (
        DriverDevice(
            DRIVER,
            "node",
            f"cpu-{index}",
            DeclaredCpuDevice(highest if index else lowest, None, False, False),
            0,
        )
        for index in range(count)
    )
    return (DeclaredFile(DRIVER, tuple(devices)),)


def without_lowest_cpu(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the lowest CPU offline."""
    online = online_cpus(snapshot)
    return replace(snapshot, cpus=snapshot.cpus._replace(online=online & (online - 1)))


def online_cpus(snapshot: Snapshot) -> int:
    """Return the bit mask of the online CPUs in a snapshot."""
    online = snapshot.cpus.online
    assert isinstance(online, int), "the online CPUs must be readable"
    return online


# --- suite encode ------------------------------------------------------------------------------------------

CORE: Final = "core: encode_health, C"

Encode = Callable[[Sequence[WireHealth]], bytes]


def run_encode(run_size: RunSize) -> SuiteOutcome:
    """Time the encoding of health lists of 8, 128 and 1,000 devices."""
    outcome = SuiteOutcome()
    google = google_encoder()
    if google is None:
        outcome.skipped.append("encode: Google's protobuf is not installed")
    for count in DEVICES:
        entries = health_entries(count)
        alternatives: list[tuple[str, str, Encode]] = []
        if count <= run_size.betterproto_devices:
            alternatives.append(("betterproto", "betterproto 2.0.0b7", encode_betterproto))
        else:
            outcome.skipped.append(f"encode: betterproto with {count} devices: skipped by --quick")
        if google:
            version = importlib.import_module("google.protobuf").__version__
            alternatives.append(("google", f"Google's protobuf {version}", google))
        core = b"".join(encode_health_lists(entries))
        for key, _, encode in alternatives:
            if encode(entries) != core:
                raise ResultMismatch(f"encode {count} devices: {key} returns other bytes than the core")
        contenders = [Contender("core", CORE, partial(encode_health_lists, entries))]
        contenders += [Contender(key, label, partial(encode, entries)) for key, label, encode in alternatives]
        timed = time_contenders(contenders, rounds=run_size.warm_rounds, limit_s=run_size.warm_limit_s)
        rows = rows_from_race(f"encode.{count}", timed, "core")
        notes = (
            "each contender builds its message from the same list and encodes it",
            f"{len(core)} bytes, equal for all contenders",
        )
        outcome.tables.append(ResultTable(f"{count} devices", rows, CORE, notes, "encoding of a device list"))
        outcome.reference_ns += timed.reference
    return outcome


def health_entries(count: int) -> list[WireHealth]:
    """Return health entries of ``count`` devices; every eighth device is Unhealthy with a message."""
    text = "mem.hugepages.pool_shrunk: 6 pages, 8 at start"
    return [
        WireHealth(
            "node-a.example.com", f"gpu-{n}", 2 if n % 8 == 7 else 1, 1_700_000_000, 30, text * (n % 8 == 7)
        )
        for n in range(count)
    ]


def encode_betterproto(entries: Sequence[WireHealth]) -> bytes:
    """Encode health entries with the generated classes of betterproto."""
    devices = [
        v1.DeviceHealth(
            device=v1.DeviceIdentifier(pool_name=entry.pool, device_name=entry.device),
            health=v1.HealthStatus(entry.health),
            last_updated_time=entry.last_updated_s,
            health_check_timeout_seconds=entry.timeout_s,
            message=entry.message,
        )
        for entry in entries
    ]
    return bytes(v1.NodeWatchResourcesResponse(devices=devices))


def google_encoder() -> Encode | None:
    """Return a function that encodes with Google's protobuf; None: Google's protobuf is not installed."""
    if importlib.util.find_spec("google") is None or importlib.util.find_spec("google.protobuf") is None:
        return None
    response = _google_message_class()

    def encode(entries: Sequence[WireHealth]) -> bytes:
        message = response()
        for entry in entries:
            device = message.devices.add()
            device.device.pool_name = entry.pool
            device.device.device_name = entry.device
            device.health = entry.health
            device.last_updated_time = entry.last_updated_s
            device.health_check_timeout_seconds = entry.timeout_s
            device.message = entry.message
        return bytes(message.SerializeToString())

    return encode


def _google_message_class() -> Any:
    pb2 = importlib.import_module("google.protobuf.descriptor_pb2")
    pool = importlib.import_module("google.protobuf.descriptor_pool").DescriptorPool()
    field_types = pb2.FieldDescriptorProto
    file = pb2.FileDescriptorProto(name="bench/dra_health.proto", package="bench", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str | None]) -> None:
        message_type = file.message_type.add(name=name)
        for field, number, type_, type_name in fields:
            label = field_types.LABEL_REPEATED if field == "devices" else field_types.LABEL_OPTIONAL
            message_type.field.add(name=field, number=number, type=type_, label=label, type_name=type_name)

    text, int64 = field_types.TYPE_STRING, field_types.TYPE_INT64
    message("DeviceIdentifier", ("pool_name", 1, text, None), ("device_name", 2, text, None))
    message(
        "DeviceHealth",
        ("device", 1, field_types.TYPE_MESSAGE, ".bench.DeviceIdentifier"),
        ("health", 2, field_types.TYPE_INT32, None),
        ("last_updated_time", 3, int64, None),
        ("health_check_timeout_seconds", 4, int64, None),
        ("message", 5, text, None),
    )
    message("NodeWatchResourcesResponse", ("devices", 1, field_types.TYPE_MESSAGE, ".bench.DeviceHealth"))
    pool.Add(file)
    factory = importlib.import_module("google.protobuf.message_factory")
    return factory.GetMessageClass(pool.FindMessageTypeByName("bench.NodeWatchResourcesResponse"))


# --- suite publish -----------------------------------------------------------------------------------------

SUBSCRIBERS: Final = (1, 8, 64)
PUBLISHED_DEVICES: Final = 128
PAUSE_S: Final = 0.002  # between publications, until the threads of the previous one sleep


class ClientKind(NamedTuple):
    """Kind of client that subscribes to the published reports."""

    key: str
    crowd: str
    """Name of this kind in the command line of :mod:`agent.bench.subscribers`."""
    label: str


FRAMES: Final = ClientKind(
    "frames", "frames", "frames: clients that only read HTTP/2 frames, all in one thread"
)
BARE_SOCKETS: Final = ClientKind("floor", "bare", "lower bound: one send(2) to each of as many bare sockets")


class ClientProcesses(NamedTuple):
    """Processes of one benchmark: one has all clients of a kind, the other one publishes to them."""

    kind: ClientKind
    publisher: ChildProcess
    crowd: ChildProcess
    size: int
    """Size of a message to the clients [bytes]."""

    def subscribe(self, count: int) -> None:
        """Increase the number of clients, and wait until all have received their first message."""
        self.crowd.send_line(f"{count}")
        self.crowd.wait(lambda line: "subscribers" in line)

    def publish(self) -> int:
        """Publish a report, or send to bare sockets; return the time until all clients have it [ns]."""
        self.publisher.send_line("bare" if self.kind is BARE_SOCKETS else "publish")
        start_ns = int(self.publisher.wait()["t_ns"])
        return int(self.crowd.wait()["t_ns"]) - start_ns


def run_publish(run_size: RunSize) -> SuiteOutcome:
    """Measure the delivery of reports in which all devices changed.

    They have 128 devices for 1, 8 and 64 subscribers, and other numbers of devices for one subscriber.
    """
    outcome = SuiteOutcome()
    kinds = [*_grpcio_kind_if_installed(outcome), FRAMES, BARE_SOCKETS]
    if len(run_size.published_devices) == 1:
        outcome.skipped.append("publish: 1,000 devices: skipped by --quick")
    for devices in run_size.published_devices:
        counts = SUBSCRIBERS if devices == PUBLISHED_DEVICES else SUBSCRIBERS[:1]
        with contextlib.ExitStack() as stack:
            groups = [open_clients(stack, kind, devices) for kind in kinds]
            for count in counts:
                for group in groups:
                    group.subscribe(count)
                outcome.tables.append(_measure_publish(run_size, devices, count, groups))
    return outcome


def _grpcio_kind_if_installed(outcome: SuiteOutcome) -> Iterator[ClientKind]:
    """Yield the kind of grpcio clients if grpcio is installed; otherwise record that it was skipped."""
    if importlib.util.find_spec("grpc") is None:
        outcome.skipped.append("publish: grpcio is not installed")
        return
    version = importlib.metadata.version("grpcio")
    yield ClientKind("server", "grpcio", f"grpcio {version}: clients with a thread each")


def open_clients(
    stack: contextlib.ExitStack, kind: ClientKind, devices: int = PUBLISHED_DEVICES
) -> ClientProcesses:
    """Start a publisher, and one process for all clients of a kind; the clients do not subscribe yet."""
    directory = stack.enter_context(temporary_directory())
    publisher = stack.enter_context(start_module("agent.bench.publisher", directory, devices))
    size = publisher.wait(lambda line: "ready" in line)["size"]
    socket = directory / ("bare.sock" if kind is BARE_SOCKETS else f"drivers/{DRIVER}.sock")
    argument = size if kind is BARE_SOCKETS else HEALTH_METHOD
    crowd = stack.enter_context(start_module("agent.bench.subscribers", socket, kind.crowd, argument))
    crowd.server = publisher
    return ClientProcesses(kind, publisher, crowd, size)


def _measure_publish(
    run_size: RunSize, devices: int, count: int, groups: Sequence[ClientProcesses]
) -> ResultTable:
    latencies = publish_in_turn(groups, run_size.publications)
    labels = {group.kind.key: group.kind.label for group in groups}
    key = f"publish.{count}" if devices == PUBLISHED_DEVICES else f"publish.{count}.devices{devices}"
    rows = rows_from_latencies(key, labels, dict(latencies))
    notes = (f"{devices} changed devices, {groups[0].size} bytes, encoded once",)
    title = f"{count} subscriber{'s' if count > 1 else ''}, {devices} devices"
    section = "from publish() to the last receipt"
    return ResultTable(title, (*rows, *tail_ratio(rows)), BARE_SOCKETS.label, notes, section)


def tail_ratio(rows: Sequence[ResultRow]) -> Iterator[ResultRow]:
    """Yield the ratio of the p99 of the clients that only read frames to that of bare sockets."""
    p99 = {row.key.rpartition(".")[2]: row.p99 for row in rows}
    frames, bare = p99[FRAMES.key], p99[BARE_SOCKETS.key]
    if frames and bare:
        prefix = rows[0].key.rpartition(".")[0]
        yield row_from_samples(
            f"{prefix}.p99_to_floor", "p99 ratio: frames to lower bound", (frames / bare,), "x"
        )


def publish_in_turn(groups: Sequence[ClientProcesses], publications: int) -> dict[str, list[int]]:
    """Publish to each group of clients in turn; return the times until the last receipt by kind [ns]."""
    latencies: dict[str, list[int]] = {group.kind.key: [] for group in groups}
    for _ in range(publications):
        for group in groups:
            time.sleep(PAUSE_S)
            latencies[group.kind.key].append(group.publish())
    return latencies
