"""The codec rejects input that betterproto alone would accept, and its error names the place."""

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st
from wire.google import message_class
from wire.plugin import DRA

from agent.serve.grpc.codec import FIELDS_PER_ENTRY, Codec, EmptyRequest
from agent.serve.grpc.gen.agent.drahealth import v1 as agent_v1
from agent.serve.grpc.gen.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1
from agent.serve.grpc.gen.dra_v1beta1.k8s.io.kubelet.pkg.apis.dra import v1beta1 as dra_v1beta1
from agent.serve.grpc.gen.health_v1 import v1
from agent.serve.grpc.gen.registration_v1 import pluginregistration

RESPONSE = v1.NodeWatchResourcesResponse


def entry(field: bytes) -> bytes:
    """Return a list of one device that consists of one raw field."""
    return b"\x0a" + bytes([len(field)]) + field


def test_bytes_are_sent_unchanged() -> None:
    assert Codec().encode(b"anything", RESPONSE) == b"anything"


def test_unread_request_is_checked_for_well_formedness() -> None:
    assert Codec().decode(b"\x7a\x01x", EmptyRequest) == b"\x7a\x01x"
    with pytest.raises(
        GRPCError, match="the request field 15: ends 1 bytes after the end of the message"
    ) as refused:
        Codec().decode(b"\x7a\x01", EmptyRequest)
    assert refused.value.status is Status.INTERNAL


def test_message_is_encoded() -> None:
    message = RESPONSE([v1.DeviceHealth(message="x")])
    assert Codec().encode(message, RESPONSE) == bytes(message)


def test_empty_data_are_the_empty_message() -> None:
    assert Codec().decode(b"", RESPONSE) == RESPONSE()


def test_unknown_fields_are_skipped() -> None:
    unknown = b"\x7a\x01x" + b"\x78\x05" + b"\x79" + bytes(8) + b"\x7d" + bytes(4)
    assert Codec().decode(entry(unknown + b"\x2a\x01m"), RESPONSE).devices[0].message == "m"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (entry(b"\x2a\x05ab"), "devices.message: ends 3 bytes after the end of the message"),
        (entry(b"\x2a\x02\xc3\x28"), "devices.message: not UTF-8 at byte 0 of 2"),
        (entry(b"\x28\x05"), "devices.message: wire type is 0, must be 2"),
        (entry(b"\x12\x01x"), "devices.health: wire type is 2, must be 0"),
        (entry(b"\x10" + b"\xff" * 10 + b"\x01"), "devices.health: varint is longer than 10 bytes"),
        (entry(b"\x10\x80"), "devices.health: message ends inside a varint"),
        (entry(b"\x0a\x03\x0a\x05p"), "devices.device.pool_name: ends 4 bytes after the end of the message"),
        (b"\x0b", "NodeWatchResourcesResponse.devices: wire type 3 is not valid"),
        (b"\x7f", "NodeWatchResourcesResponse field 15: wire type 7 is not valid"),
        (b"\x79\x00", "NodeWatchResourcesResponse field 15: ends 7 bytes after the end of the message"),
        (b"\x00\x00", "NodeWatchResourcesResponse: field number 0 is not valid"),
        (
            b"\x80\x80\x80\x80\x10\x00",
            "NodeWatchResourcesResponse: field number 536870912 is not valid",
        ),
        (b"\xff", "NodeWatchResourcesResponse: message ends inside a varint"),
    ],
)
def test_invalid_message_is_refused_with_place(data: bytes, text: str) -> None:
    with pytest.raises(GRPCError) as raised:
        Codec().decode(data, RESPONSE)
    assert raised.value.status is Status.INTERNAL
    assert str(raised.value.message).endswith(text)


@pytest.mark.parametrize(
    "message_type",
    [
        RESPONSE,
        agent_v1.WatchRequest,
        agent_v1.Report,
        agent_v1.StatusRequest,
        agent_v1.StatusReply,
        *(module.NodePrepareResourcesRequest for module in (dra_v1, dra_v1beta1)),
        *(module.NodePrepareResourcesResponse for module in (dra_v1, dra_v1beta1)),
        *(module.NodeUnprepareResourcesRequest for module in (dra_v1, dra_v1beta1)),
        *(module.NodeUnprepareResourcesResponse for module in (dra_v1, dra_v1beta1)),
        pluginregistration.InfoRequest,
        pluginregistration.PluginInfo,
        pluginregistration.RegistrationStatus,
    ],
)
def test_every_message_type_that_we_read_can_be_checked(message_type: type) -> None:
    with pytest.raises(GRPCError):
        Codec().decode(b"\xff", message_type)


def answers(*fields: bytes) -> bytes:
    """Return a map of one entry that consists of these raw fields."""
    entry_bytes = b"".join(fields)
    return b"\x0a" + bytes([len(entry_bytes)]) + entry_bytes


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (answers(b"\x0a\x05ab"), "claims.key: ends 3 bytes after the end of the message"),
        (answers(b"\x0a\x02\xc3\x28"), "claims.key: not UTF-8 at byte 0 of 2"),
        (answers(b"\x08\x05"), "claims.key: wire type is 0, must be 2"),
        (answers(b"\x10\x05"), "claims.value: wire type is 0, must be 2"),
        (
            answers(b"\x0a\x01u", b"\x12\x03\x12\x05e"),
            "claims.value.error: ends 4 bytes after the end of the message",
        ),
        (b"\x08\x05", "claims: wire type is 0, must be 2"),
    ],
)
def test_map_is_checked_with_its_values(data: bytes, text: str) -> None:
    with pytest.raises(GRPCError) as raised:
        Codec().decode(data, dra_v1.NodePrepareResourcesResponse)
    assert raised.value.message == f"NodePrepareResourcesResponse.{text}"


@pytest.mark.parametrize(
    "data",
    [
        answers(b"\x0a\x01u", b"\x12\x03\x12\x01e"),
        answers(b"\x12\x03\x12\x01e", b"\x0a\x01u"),
        answers(b"\x0a\x01u"),
        answers(b"\x12\x03\x12\x01e"),
        answers(),
        answers(b"\x0a\x01u", b"\x12\x03\x12\x01a") + answers(b"\x0a\x01u", b"\x12\x03\x12\x01b"),
        answers(b"\x0a\x01u", b"\x12\x03\x12\x01a") + answers(b"\x0a\x01v", b"\x12\x03\x12\x01b"),
    ],
)
def test_map_is_decoded_as_by_google_protobuf(data: bytes) -> None:
    """The last entry of a repeated key counts, and a missing value is empty."""
    ours = Codec().decode(data, dra_v1.NodePrepareResourcesResponse)
    google = message_class(f"{DRA}.v1", "NodePrepareResourcesResponse").FromString(data)
    assert {uid: item.error for uid, item in ours.claims.items()} == {
        uid: item.error for uid, item in google.claims.items()
    }


def test_entries_above_the_limit_are_refused_unread() -> None:
    codec = Codec(max_entries=3)
    assert len(codec.decode(entry(b"\x2a\x01m") * 3, RESPONSE).devices) == 3
    with pytest.raises(GRPCError) as raised:
        codec.decode(entry(b"\x2a\x01m") * 4 + b"\xff", RESPONSE)
    assert raised.value.status is Status.RESOURCE_EXHAUSTED
    assert raised.value.message == "NodeWatchResourcesResponse.devices: more than 3 entries; send fewer"


def test_betterproto_gets_no_unknown_fields() -> None:
    unknown = b"\x7a\x01x\x78\x05"
    read = Codec().decode(unknown + entry(unknown + b"\x2a\x01m" + unknown) + unknown, RESPONSE)
    assert (read.devices[0].message, read._unknown_fields, read.devices[0]._unknown_fields) == ("m", b"", b"")


@pytest.mark.parametrize("field", [b"\x78\x05", b"\x2a\x00"])
def test_fields_above_the_limit_are_refused_known_or_not(field: bytes) -> None:
    codec, maximum = Codec(max_entries=4), 4 * FIELDS_PER_ENTRY
    assert len(codec.decode(entry(field * (maximum - 1)), RESPONSE).devices) == 1
    with pytest.raises(GRPCError) as raised:
        codec.decode(entry(field * maximum), RESPONSE)
    assert raised.value.status is Status.RESOURCE_EXHAUSTED
    assert raised.value.message.endswith(f".devices: more than {maximum} fields in all; send fewer")


@given(st.binary(max_size=40))
def test_decoded_bytes_are_accepted_by_google_protobuf(data: bytes) -> None:
    try:
        decoded = Codec().decode(data, RESPONSE)
    except GRPCError:
        return
    google = message_class("v1", "NodeWatchResourcesResponse").FromString(data)
    assert [item.message for item in decoded.devices] == [item.message for item in google.devices]
