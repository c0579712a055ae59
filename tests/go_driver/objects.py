"""Decoder of Kubernetes objects from client-go: JSON, or protobuf in an envelope.

The proto files come with the Go modules ``k8s.io/api`` and ``k8s.io/apimachinery``. There is no encoder:
client-go accepts JSON as an answer.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_tools import protoc

MAGIC: Final = b"k8s\x00"
META: Final = "k8s.io.apimachinery.pkg.apis.meta.v1"
ENVELOPE: Final = "k8s.io.apimachinery.pkg.runtime.Unknown"
KINDS: Final = {
    "ResourceSlice": "k8s.io.api.resource.v1.ResourceSlice",
    "DeleteOptions": f"{META}.DeleteOptions",
}
Decode = Callable[[bytes], dict[str, Any]]


def decoder(modules: dict[str, Path], scratch: Path) -> Decode:
    """Return a function that decodes a request's body, JSON or protobuf.

    Args:
        modules: Source directories of the Go modules, by module path.
        scratch: Empty directory.
    """
    for module, directory in modules.items():
        link = scratch / module
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory)
    out = scratch / "descriptors"
    files = ["k8s.io/api/resource/v1/generated.proto", "k8s.io/apimachinery/pkg/runtime/generated.proto"]
    options = [f"--proto_path={scratch}", f"--descriptor_set_out={out}", "--include_imports"]
    if protoc.main(["protoc", *options, *files]) != 0:
        raise ValueError(f"protoc refused upstream's files in {', '.join(map(str, modules.values()))}")
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.Add(file)

    def message(name: str, data: bytes) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name)).FromString(data)

    def decode(body: bytes) -> dict[str, Any]:
        if not body.startswith(MAGIC):
            return dict(json.loads(body or b"{}"))
        envelope = message(ENVELOPE, body[len(MAGIC) :])
        kind = envelope.typeMeta.kind
        return {"apiVersion": envelope.typeMeta.apiVersion, "kind": kind} | as_json(
            message(KINDS[kind], envelope.raw)
        )

    return decode


def as_json(message: Message) -> Any:
    """Convert a message to Kubernetes' JSON, without empty strings."""
    match message.DESCRIPTOR.full_name.rpartition(".")[2]:
        case "Quantity":
            return message.string
        case "Time":
            return (
                f"{datetime.fromtimestamp(message.seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
                if message.seconds
                else ""
            )
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if (plain := _plain(field, value)) not in ("", [], {}):
            found[field.name] = plain
    return found


def _plain(field: FieldDescriptor, value: Any) -> Any:
    inner = field.message_type
    if inner is None:
        return list(value) if field.is_repeated else value
    if inner.GetOptions().map_entry:
        nested = inner.fields_by_name["value"].message_type is not None
        return {key: as_json(value[key]) if nested else value[key] for key in value}
    return [as_json(item) for item in value] if field.is_repeated else as_json(value)
