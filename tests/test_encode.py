"""The C encoder writes the same bytes as Google's protobuf and as betterproto."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc
from hypothesis import given
from hypothesis import strategies as st

from agent.native.health_encoder import WireHealth, encode_health_lists
from agent.serve.grpc.gen.health_v1 import v1
from agent.serve.grpc.gen.health_v1alpha1 import v1alpha1

PROTO = Path(__file__).resolve().parents[1] / "proto"
VERSIONS = {"v1": v1, "v1alpha1": v1alpha1}
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
FOREVER = (1 << 63) - 1

Encoder = Callable[[Sequence[WireHealth]], bytes]


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def google(version: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return Google's class for NodeWatchResourcesResponse in a separate pool: many packages are named v1."""
    out = tmp_path_factory.mktemp("descriptors") / "set"
    source = f"dra_health/{version}/dra_health_{version}.proto"
    assert protoc.main(["protoc", f"-I{PROTO}", f"--descriptor_set_out={out}", source]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"{version}.NodeWatchResourcesResponse")
    )


def google_encoder(response: Any) -> Encoder:
    def encode(entries: Sequence[WireHealth]) -> bytes:
        message = response()
        for entry in entries:
            device = message.devices.add()
            device.device.SetInParent()
            device.device.pool_name = entry.pool
            device.device.device_name = entry.device
            device.health = entry.health
            device.last_updated_time = entry.last_updated_s
            device.health_check_timeout_seconds = entry.timeout_s
            device.message = entry.message
        encoded: bytes = message.SerializeToString()
        return encoded

    return encode


def decode(response: Any, messages: Sequence[bytes]) -> list[WireHealth]:
    """Return the list of a client that appends all messages."""
    return [
        WireHealth(
            d.device.pool_name,
            d.device.device_name,
            d.health,
            d.last_updated_time,
            d.health_check_timeout_seconds,
            d.message,
        )
        for message in messages
        for d in response.FromString(message).devices
    ]


def betterproto_encoder(api: Any) -> Encoder:
    def encode(entries: Sequence[WireHealth]) -> bytes:
        return bytes(
            api.NodeWatchResourcesResponse(
                devices=[
                    api.DeviceHealth(
                        device=api.DeviceIdentifier(pool_name=entry.pool, device_name=entry.device),
                        health=api.HealthStatus(entry.health),
                        last_updated_time=entry.last_updated_s,
                        health_check_timeout_seconds=entry.timeout_s,
                        message=entry.message,
                    )
                    for entry in entries
                ]
            )
        )

    return encode


def texts(min_size: int = 0) -> st.SearchStrategy[str]:
    """Return a strategy of Unicode texts, with long ones where the length needs one more byte."""
    edges = st.sampled_from([126, 127, 128, 129, 16382, 16383, 16384]).map("x".__mul__)
    return st.text(st.characters(exclude_categories=["Cs"]), min_size=min_size, max_size=80) | edges


def wire_healths(
    *, names_min: int = 0, health: st.SearchStrategy[int] = INT32
) -> st.SearchStrategy[WireHealth]:
    return st.builds(
        WireHealth,
        pool=texts(names_min),
        device=texts(names_min),
        health=health,
        last_updated_s=INT64 | st.just(0),
        timeout_s=INT64 | st.just(0),
        message=texts(),
    )


def device(name: str = "gpu-0", message: str = "") -> WireHealth:
    return WireHealth("node-a", name, 1, 1_700_000_000, 30, message)


@given(entries=st.lists(wire_healths(), max_size=8))
def test_bytes_equal_googles_protobuf(google: Any, entries: list[WireHealth]) -> None:
    assert b"".join(encode_health_lists(entries)) == google_encoder(google)(entries)


@given(entries=st.lists(wire_healths(names_min=1, health=st.sampled_from([0, 1, 2])), max_size=8))
def test_bytes_equal_betterproto(version: str, entries: list[WireHealth]) -> None:
    """The devices have names and known states: betterproto drops empty devices and unknown states."""
    assert b"".join(encode_health_lists(entries)) == betterproto_encoder(VERSIONS[version])(entries)


@given(entries=st.lists(wire_healths(), min_size=1, max_size=8), data=st.data())
def test_list_split_at_any_limit_is_the_same_list(
    google: Any, entries: list[WireHealth], data: st.DataObject
) -> None:
    sizes = [len(encode_health_lists([entry])[0]) for entry in entries]
    limit = data.draw(st.integers(max(sizes), sum(sizes) + 1), "limit")
    messages = encode_health_lists(entries, size_limit=limit)
    assert decode(google, messages) == entries
    assert all(len(message) <= limit for message in messages)
    if limit >= sum(sizes):
        assert len(messages) == 1


def test_messages_are_as_full_as_possible() -> None:
    size = len(encode_health_lists([device()])[0])
    messages = encode_health_lists([device()] * 10, size_limit=4 * size + size - 1)
    assert [len(message) // size for message in messages] == [4, 4, 2]


def test_thousand_devices_stay_below_a_mebibyte_per_message(google: Any) -> None:
    entries = [device(f"gpu-{n}", "m" * 1024 * 2) for n in range(1000)]
    messages = encode_health_lists(entries)
    assert len(messages) == 2
    assert all(len(message) <= 1 << 20 for message in messages)
    assert decode(google, messages) == entries


def test_no_devices_make_no_message() -> None:
    assert encode_health_lists([]) == []


def test_messages_are_independent_bytes() -> None:
    first, second = encode_health_lists([device("gpu-0"), device("gpu-1")], size_limit=40)
    assert type(first) is bytes
    assert b"gpu-0" in first
    assert b"gpu-1" in second


def test_entry_longer_than_a_message_is_refused_with_sizes() -> None:
    entry = device("gpu-7", "é" * 100)
    size = len(encode_health_lists([entry])[0])
    assert len(encode_health_lists([device(), entry], size_limit=size)) == 2
    with pytest.raises(ValueError, match=r"^device 'gpu-7' of pool 'node-a': ") as refused:
        encode_health_lists([device(), entry], size_limit=size - 1)
    assert "too large for one message: pool 6 bytes, name 5, message 200" in str(refused.value)
    assert f"limit {size - 1}" in str(refused.value)


@pytest.mark.parametrize("field", ["pool", "device", "message"])
def test_lone_surrogate_is_refused_with_the_device(field: str) -> None:
    entry = WireHealth(**{**device("gpu-7")._asdict(), field: "ab\ud800"})
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at character 2") as refused:
        encode_health_lists([device(), entry])
    assert str(refused.value).startswith(f"device {entry.device!r} of pool {entry.pool!r}: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("health", 1 << 31),
        ("health", -(1 << 31) - 1),
        ("last_updated_s", FOREVER + 1),
        ("last_updated_s", -FOREVER - 2),
        ("timeout_s", FOREVER + 1),
        ("timeout_s", -FOREVER - 2),
    ],
)
def test_number_too_large_is_refused_with_the_device(field: str, value: int) -> None:
    entry = WireHealth(**{**device("gpu-7")._asdict(), field: value})
    with pytest.raises(ValueError, match=r"^device 'gpu-7' of pool 'node-a': ") as refused:
        encode_health_lists([device(), entry])
    assert str(value) in str(refused.value)
