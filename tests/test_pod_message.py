"""The reader of v1.Pod against pods written by Kubernetes and by Google's protobuf, and against bad input."""

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_samples import POD, pod_json
from wire.kubelet_apis import pod

from agent.serve.grpc.wire import FieldType, MessageSchema, SchemaField, read_by_schema
from agent.serve.kubelet.pods_api import POD_SCHEMA as SHAPE
from agent.serve.kubelet.pods_api import decode_pod


def fields_read(value: Any, shape: Any) -> Any:
    """Return the fields of a JSON object that the shape reads, without empty values."""
    if isinstance(shape, FieldType):
        return value
    shape_fields_by_name = {shape_field.name: shape_field for shape_field in shape.values()}
    pod_object = {}
    for name, item in value.items():
        shape_field = shape_fields_by_name.get(name)
        if shape_field is None or item in (None, "", [], {}, 0, False):
            continue
        if shape_field.repeated:
            pod_object[name] = [fields_read(entry, shape_field.kind) for entry in item]
        elif shape_field.is_map:
            pod_object[name] = {key: fields_read(entry, shape_field.kind) for key, entry in item.items()}
        else:
            pod_object[name] = fields_read(item, shape_field.kind)
    return pod_object


def without_empty(value: Any) -> Any:
    """Remove empty values: protobuf writes some of them, JSON does not."""
    if isinstance(value, dict):
        return {key: without_empty(item) for key, item in value.items() if item not in ("", [], {}, 0, False)}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


def pod_or_error(data: bytes) -> Any:
    """Return the pod, or the text of the ValueError."""
    try:
        return decode_pod(data)
    except ValueError as error:
        return str(error)


def shape_fields(shape: Any) -> Iterator[tuple[int, str]]:
    """Yield every field of a shape once, as the id of its shape and its name."""
    if not isinstance(shape, FieldType):
        for shape_field in shape.values():
            yield id(shape), shape_field.name
            yield from shape_fields(shape_field.kind)


def present_fields(value: Any, shape: Any) -> Iterator[tuple[int, str]]:
    """Yield those fields that an object contains."""
    if not isinstance(shape, FieldType):
        shape_fields_by_name = {shape_field.name: shape_field for shape_field in shape.values()}
        for name, item in value.items():
            yield id(shape), name
            for entry in (
                item
                if shape_fields_by_name[name].repeated
                else item.values()
                if shape_fields_by_name[name].is_map
                else [item]
            ):
                yield from present_fields(entry, shape_fields_by_name[name].kind)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def test_pod_encoded_by_kubernetes_decodes_to_its_json() -> None:
    assert without_empty(decode_pod(POD)) == {
        "apiVersion": "v1",
        "kind": "Pod",
        **fields_read(pod_json(), SHAPE),
    }


def test_sample_pod_has_every_decoded_field() -> None:
    missing = set(shape_fields(SHAPE)) - set(present_fields(fields_read(pod_json(), SHAPE), SHAPE))
    assert sorted(name for _, name in missing) == ["priorityClassName", "resources"]


def test_priority_class_of_a_pod_is_decoded() -> None:
    spec = field(24, b"system-node-critical") + varint(25 << 3) + varint(2_000_001_000)
    assert decode_pod(field(2, spec))["spec"] == {
        "priorityClassName": "system-node-critical",
        "priority": 2_000_001_000,
    }


def test_claim_resources_of_1_36_are_decoded() -> None:
    amount = field(1, b"cpu") + field(2, field(1, b"5"))
    status = field(21, field(1, b"nics") + field(2, b"main") + field(3, amount))
    assert decode_pod(field(3, status))["status"] == {
        "nodeAllocatableResourceClaimStatuses": [
            {"resourceClaimName": "nics", "containers": ["main"], "resources": {"cpu": "5"}}
        ]
    }


def test_pod_encoded_by_google_protobuf_decodes_alike() -> None:
    pod_object = decode_pod(pod("u", "p", claims=["c"]))
    assert pod_object["metadata"] == {"name": "p", "namespace": "team-a", "uid": "u"}
    assert pod_object["spec"] == {
        "nodeName": "node-1",
        "containers": [{"name": "main", "resources": {"claims": [{"name": "c-0"}]}}],
        "resourceClaims": [{"name": "c-0", "resourceClaimName": "c"}],
    }


def test_time_zero_of_go_is_none() -> None:
    """Go writes it as an empty message, and as null in JSON."""
    assert read_by_schema(b"\x0a\x00", {1: SchemaField("at", FieldType.TIME)}, "pod") == {"at": None}


def test_absent_fields_stay_absent() -> None:
    assert decode_pod(b"") == {"apiVersion": "v1", "kind": "Pod"}


def test_repeated_scalar_takes_the_last_and_messages_merge() -> None:
    twice = field(1, field(1, b"old") + field(5, b"u")) + field(1, field(1, b"new"))
    assert decode_pod(twice)["metadata"] == {"name": "new", "uid": "u"}


def test_unknown_fields_of_any_wire_type_are_skipped() -> None:
    unknown = (
        field(99, b"text") + varint(98 << 3) + varint(7) + varint(97 << 3 | 1) + bytes(8)
        + varint(96 << 3 | 5) + bytes(4)
    )  # fmt: skip
    assert decode_pod(unknown + field(1, unknown + field(5, b"u"))) == {
        **decode_pod(b""),
        "metadata": {"uid": "u"},
    }


# the cut may remove exactly the last field of the message
@given(st.integers(0, len(POD) - 1))
def test_truncated_pod_is_refused_or_has_fewer_fields(size: int) -> None:
    pod_object, complete = pod_or_error(POD[:size]), decode_pod(POD)
    assert (
        pod_object.startswith("pod")
        if isinstance(pod_object, str)
        else pod_object.items() <= complete.items()
    )


@given(st.binary(max_size=60))
def test_any_bytes_give_a_pod_or_a_value_error(data: bytes) -> None:
    pod_object = pod_or_error(data)
    assert pod_object.startswith("pod") if isinstance(pod_object, str) else pod_object["kind"] == "Pod"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (varint(1 << 3) + varint(5), "pod.metadata: wire type is 0, must be 2"),
        (field(1, field(5, b"\xff")), "pod.metadata.uid: not UTF-8 at byte 0 of 1"),
        (field(1, b"\x0a\x7f"), "pod.metadata field 1: ends 127 bytes after the end of the message"),
        (b"\x80" * 10 + b"\x01", "pod: varint is longer than 5 bytes"),
        (b"\x80", "pod: message ends inside a varint"),
        (b"\x0b", "pod field 1: wire type 3 is not valid"),
        (b"\x02", "pod: field number 0 is not valid"),
        (field(1, field(8, b"\x08" + varint(1 << 62))), "pod.metadata.creationTimestamp: 4611"),
    ],
)
def test_invalid_message_is_refused_with_the_field(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:  # noqa: RUF043
        decode_pod(data)
    assert str(caught.value).startswith(text)


NUMBERS: MessageSchema = {
    1: SchemaField("n", FieldType.INTEGER),
    2: SchemaField("b", FieldType.BOOL),
    3: SchemaField("m", is_map=True),
}


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_negative_numbers_are_decoded(number: int) -> None:
    (unsigned,) = struct.unpack("<Q", struct.pack("<q", number))
    assert read_by_schema(varint(1 << 3) + varint(unsigned), NUMBERS, "it") == {"n": number}


def test_map_entry_without_key_and_value_is_decoded() -> None:
    data = field(3, b"") + field(3, field(1, b"k")) + field(3, field(1, b"j") + field(2, b"v"))
    assert read_by_schema(data, NUMBERS, "it") == {"m": {"": "", "k": "", "j": "v"}}
