"""Time to encode a list of device healths as protobuf: C core, betterproto and Google's protobuf.

Each contender builds its message from the same entries and encodes it, which is the cost of a change.
Google's library is timed if it is installed.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from agent.bench.result import ResultMismatch, ResultTable, SuiteOutcome, rows_from_race
from agent.bench.run_size import RunSize
from agent.bench.timing import Contender, time_contenders
from agent.native.health_encoder import WireHealth, encode_health_lists
from agent.serve.grpc.gen.health_v1 import v1

DEVICES: Final = (8, 128, 1000)
CORE: Final = "core: encode_health, C"

Encode = Callable[[Sequence[WireHealth]], bytes]


def run(run_size: RunSize) -> SuiteOutcome:
    """Encode lists of 8, 128 and 1,000 devices."""
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
            alternatives.append(("google", f"Google's protobuf {_protobuf_version()}", google))
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
    """Return a function that encodes with Google's protobuf; None: it is not installed."""
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


def _protobuf_version() -> str:
    return str(importlib.import_module("google.protobuf").__version__)
