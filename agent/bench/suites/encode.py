"""The health list as protobuf bytes: the C core, betterproto and Google's protobuf, from the same entries.

Each contender builds what it needs and encodes it: that is what a change costs. Google's library is timed
where it can be imported.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from agent.bench.effort import Effort
from agent.bench.result import Outcome, Table, Unequal, rows_of
from agent.bench.timing import Contender, race
from agent.native.encode import WireHealth, encode_health
from agent.serve.grpc.gen.health_v1 import v1

DEVICES: Final = (8, 128, 1000)
CORE: Final = "core: encode_health, C"

Encode = Callable[[Sequence[WireHealth]], bytes]


def run(effort: Effort) -> Outcome:
    """8, 128 and 1,000 devices."""
    outcome = Outcome()
    google = google_encoder()
    if google is None:
        outcome.skipped.append("encode: Google's protobuf is not installed")
    for number in DEVICES:
        entries = entries_of(number)
        others: list[tuple[str, str, Encode]] = []
        if number <= effort.betterproto_devices:
            others.append(("betterproto", "betterproto 2.0.0b7", encode_betterproto))
        else:
            outcome.skipped.append(
                f"encode: betterproto with {number} devices, left to a run without --quick"
            )
        if google:
            others.append(("google", f"Google's protobuf {_version()}", google))
        core = b"".join(encode_health(entries))
        for key, _, encode in others:
            if encode(entries) != core:
                raise Unequal(f"{number} devices: {key} writes other bytes than the core")
        contenders = [Contender("core", CORE, partial(encode_health, entries))]
        contenders += [Contender(key, label, partial(encode, entries)) for key, label, encode in others]
        timed = race(contenders, rounds=effort.warm_rounds, limit_s=effort.warm_limit_s)
        labels = {one.key: one.label for one in contenders}
        rows = rows_of(f"encode.{number}", labels, timed, "core")
        notes = (
            "each builds its message from the same list and encodes it",
            f"{len(core)} bytes, equal from all",
        )
        outcome.tables.append(Table(f"{number} devices", rows, CORE, notes, "a list of devices as bytes"))
        outcome.reference_ns += timed.reference
    return outcome


def entries_of(number: int) -> list[WireHealth]:
    """Healthy devices, every eighth with a message, as a node might state them."""
    text = "mem.hugepages.pool_shrunk: 6 pages, 8 at start"
    return [
        WireHealth(
            "node-a.example.com", f"gpu-{n}", 2 if n % 8 == 7 else 1, 1_700_000_000, 30, text * (n % 8 == 7)
        )
        for n in range(number)
    ]


def encode_betterproto(entries: Sequence[WireHealth]) -> bytes:
    """What a server would do with the generated code alone."""
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
    """The same with Google's library, or None if there is none."""
    if importlib.util.find_spec("google") is None or importlib.util.find_spec("google.protobuf") is None:
        return None
    response = _message_class()

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


def _message_class() -> Any:
    pb2 = importlib.import_module("google.protobuf.descriptor_pb2")
    pool = importlib.import_module("google.protobuf.descriptor_pool").DescriptorPool()
    kind = pb2.FieldDescriptorProto
    file = pb2.FileDescriptorProto(name="bench/dra_health.proto", package="bench", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str | None]) -> None:
        made = file.message_type.add(name=name)
        for field, number, type_, of in fields:
            label = kind.LABEL_REPEATED if field == "devices" else kind.LABEL_OPTIONAL
            made.field.add(name=field, number=number, type=type_, label=label, type_name=of)

    text, int64 = kind.TYPE_STRING, kind.TYPE_INT64
    message("DeviceIdentifier", ("pool_name", 1, text, None), ("device_name", 2, text, None))
    message(
        "DeviceHealth",
        ("device", 1, kind.TYPE_MESSAGE, ".bench.DeviceIdentifier"),
        ("health", 2, kind.TYPE_INT32, None),
        ("last_updated_time", 3, int64, None),
        ("health_check_timeout_seconds", 4, int64, None),
        ("message", 5, text, None),
    )
    message("NodeWatchResourcesResponse", ("devices", 1, kind.TYPE_MESSAGE, ".bench.DeviceHealth"))
    pool.Add(file)
    factory = importlib.import_module("google.protobuf.message_factory")
    return factory.GetMessageClass(pool.FindMessageTypeByName("bench.NodeWatchResourcesResponse"))


def _version() -> str:
    return str(importlib.import_module("google.protobuf").__version__)
