"""v1.Pod is read by its numbers: what Kubernetes wrote, whole; what nobody wrote, never."""

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_wrote import POD, pod_json
from wire.kubelet_apis import pod

from agent.serve.grpc.wire.shapes import Kind, Part, Shape, read_shape
from agent.serve.kubelet.pod_message import POD as SHAPE
from agent.serve.kubelet.pod_message import read_pod


def kept(value: Any, shape: Any) -> Any:
    """Of an object as JSON what the shape reads, without what is empty."""
    if isinstance(shape, Kind):
        return value
    parts = {part.name: part for part in shape.values()}
    found = {}
    for name, one in value.items():
        part = parts.get(name)
        if part is None or one in (None, "", [], {}, 0, False):
            continue
        if part.many:
            found[name] = [kept(each, part.of) for each in one]
        elif part.keyed:
            found[name] = {key: kept(each, part.of) for key, each in one.items()}
        else:
            found[name] = kept(one, part.of)
    return found


def bare(value: Any) -> Any:
    """An object without what is empty: protobuf writes some of that, and JSON does not."""
    if isinstance(value, dict):
        return {key: bare(one) for key, one in value.items() if one not in ("", [], {}, 0, False)}
    return [bare(one) for one in value] if isinstance(value, list) else value


def outcome(data: bytes) -> Any:
    """The pod, or what the ValueError says."""
    try:
        return read_pod(data)
    except ValueError as error:
        return str(error)


def parts_of(shape: Any) -> Iterator[tuple[int, str]]:
    """All that a shape reads, each part once: the shape that it stands in, and its name."""
    if not isinstance(shape, Kind):
        for part in shape.values():
            yield id(shape), part.name
            yield from parts_of(part.of)


def parts_in(value: Any, shape: Any) -> Iterator[tuple[int, str]]:
    """Those of which an object has something."""
    if not isinstance(shape, Kind):
        parts = {part.name: part for part in shape.values()}
        for name, one in value.items():
            yield id(shape), name
            for each in one if parts[name].many else one.values() if parts[name].keyed else [one]:
                yield from parts_in(each, parts[name].of)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def test_a_pod_of_kubernetes_is_read_as_kubernetes_shows_it() -> None:
    assert bare(read_pod(POD)) == {"apiVersion": "v1", "kind": "Pod", **kept(pod_json(), SHAPE)}


def test_that_pod_has_all_that_is_read_of_one_but_for_what_was_taken_out_of_the_api() -> None:
    missing = set(parts_of(SHAPE)) - set(parts_in(kept(pod_json(), SHAPE), SHAPE))
    assert [name for _, name in missing] == ["resources"]


def test_what_1_36_had_in_the_place_of_mapping_is_read() -> None:
    amount = field(1, b"cpu") + field(2, field(1, b"5"))
    status = field(21, field(1, b"nics") + field(2, b"main") + field(3, amount))
    assert read_pod(field(3, status))["status"] == {
        "nodeAllocatableResourceClaimStatuses": [
            {"resourceClaimName": "nics", "containers": ["main"], "resources": {"cpu": "5"}}
        ]
    }


def test_a_pod_of_googles_protobuf_is_read_alike() -> None:
    found = read_pod(pod("u", "p", claims=["c"]))
    assert found["metadata"] == {"name": "p", "namespace": "team-a", "uid": "u"}
    assert found["spec"] == {
        "nodeName": "node-1",
        "containers": [{"name": "main", "resources": {"claims": [{"name": "c-0"}]}}],
        "resourceClaims": [{"name": "c-0", "resourceClaimName": "c"}],
    }


def test_what_is_not_there_is_not_there() -> None:
    assert read_pod(b"") == {"apiVersion": "v1", "kind": "Pod"}


def test_of_what_is_there_twice_the_last_counts_and_messages_are_one() -> None:
    twice = field(1, field(1, b"old") + field(5, b"u")) + field(1, field(1, b"new"))
    assert read_pod(twice)["metadata"] == {"name": "new", "uid": "u"}


def test_fields_that_nobody_knows_are_passed_over_whatever_their_kind() -> None:
    strange = (
        field(99, b"text") + varint(98 << 3) + varint(7) + varint(97 << 3 | 1) + bytes(8)
        + varint(96 << 3 | 5) + bytes(4)
    )  # fmt: skip
    assert read_pod(strange + field(1, strange + field(5, b"u"))) == {
        **read_pod(b""),
        "metadata": {"uid": "u"},
    }


# the first that is cut away may be a whole field at the end of the message
@given(st.integers(0, len(POD) - 1))
def test_a_pod_that_is_cut_off_is_refused_or_less_and_never_something_else(size: int) -> None:
    found, whole = outcome(POD[:size]), read_pod(POD)
    assert found.startswith("pod") if isinstance(found, str) else found.items() <= whole.items()


@given(st.binary(max_size=60))
def test_any_bytes_are_a_pod_or_a_value_error(data: bytes) -> None:
    found = outcome(data)
    assert found.startswith("pod") if isinstance(found, str) else found["kind"] == "Pod"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (varint(1 << 3) + varint(5), "pod.metadata: wire type 0, should be 2"),
        (field(1, field(5, b"\xff")), "pod.metadata.uid: not UTF-8 at byte 0 of 1"),
        (field(1, b"\x0a\x7f"), "pod.metadata: field 1 ends 127 bytes after the message's 2"),
        (b"\x80" * 10 + b"\x01", "pod: a number of more than 10 bytes"),
        (b"\x80", "pod: ends in the middle of a number"),
        (b"\x0b", "pod: wire type 3 is none of protobuf's"),
        (b"\x02", "pod: field number 0 is none of protobuf's"),
        (field(1, field(8, b"\x08" + varint(1 << 62))), "pod.metadata.creationTimestamp: 4611"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:  # noqa: RUF043
        read_pod(data)
    assert str(caught.value).startswith(text)


NUMBERS: Shape = {1: Part("n", Kind.NUMBER), 2: Part("b", Kind.SWITCH), 3: Part("m", keyed=True)}


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_numbers_have_their_sign(number: int) -> None:
    (unsigned,) = struct.unpack("<Q", struct.pack("<q", number))
    assert read_shape(varint(1 << 3) + varint(unsigned), NUMBERS, "it") == {"n": number}


def test_an_entry_of_a_map_may_lack_key_and_value() -> None:
    data = field(3, b"") + field(3, field(1, b"k")) + field(3, field(1, b"j") + field(2, b"v"))
    assert read_shape(data, NUMBERS, "it") == {"m": {"": "", "k": "", "j": "v"}}
