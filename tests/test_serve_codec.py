"""What betterproto would let through, the codec refuses, and says where."""

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st
from wire.google import message_class

from agent.serve.rpc.codec import Codec
from agent.serve.rpc.gen.agent.drahealth import v1 as agent_v1
from agent.serve.rpc.gen.health_v1 import v1

RESPONSE = v1.NodeWatchResourcesResponse


def entry(field: bytes) -> bytes:
    """A list of one device that consists of one raw field."""
    return b"\x0a" + bytes([len(field)]) + field


def test_bytes_go_out_as_they_are() -> None:
    assert Codec().encode(b"anything", RESPONSE) == b"anything"


def test_a_message_goes_out_encoded() -> None:
    message = RESPONSE([v1.DeviceHealth(message="x")])
    assert Codec().encode(message, RESPONSE) == bytes(message)


def test_nothing_is_the_empty_message() -> None:
    assert Codec().decode(b"", RESPONSE) == RESPONSE()


def test_fields_that_we_do_not_know_are_skipped() -> None:
    unknown = b"\x7a\x01x" + b"\x78\x05" + b"\x79" + bytes(8) + b"\x7d" + bytes(4)
    assert Codec().decode(entry(unknown + b"\x2a\x01m"), RESPONSE).devices[0].message == "m"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (entry(b"\x2a\x05ab"), "devices.message: ends 3 bytes after the message's 4"),
        (entry(b"\x2a\x02\xc3\x28"), "devices.message: not UTF-8 at byte 0 of 2"),
        (entry(b"\x28\x05"), "devices.message: wire type 0, should be 2"),
        (entry(b"\x12\x01x"), "devices.health: wire type 2, should be 0"),
        (entry(b"\x10" + b"\xff" * 10 + b"\x01"), "devices.health: a number of more than 10 bytes"),
        (entry(b"\x10\x80"), "devices.health: ends in the middle of a number"),
        (entry(b"\x0a\x03\x0a\x05p"), "devices.device.pool_name: ends 4 bytes after the message's 3"),
        (b"\x0b", "NodeWatchResourcesResponse.devices: wire type 3 is none of protobuf's"),
        (b"\x7f", "NodeWatchResourcesResponse field 15: wire type 7 is none of protobuf's"),
        (b"\x79\x00", "NodeWatchResourcesResponse field 15: ends 7 bytes after the message's 2"),
        (b"\x00\x00", "NodeWatchResourcesResponse: field number 0 is none of protobuf's"),
        (
            b"\x80\x80\x80\x80\x10\x00",
            "NodeWatchResourcesResponse: field number 536870912 is none of protobuf's",
        ),
        (b"\xff", "NodeWatchResourcesResponse: ends in the middle of a number"),
    ],
)
def test_what_is_no_such_message_is_refused_with_its_place(data: bytes, text: str) -> None:
    with pytest.raises(GRPCError) as raised:
        Codec().decode(data, RESPONSE)
    assert raised.value.status is Status.INTERNAL
    assert str(raised.value.message).endswith(text)


@pytest.mark.parametrize(
    "kind",
    [RESPONSE, agent_v1.WatchRequest, agent_v1.Picture, agent_v1.StatusRequest, agent_v1.StatusReply],
)
def test_every_message_that_we_read_can_be_checked(kind: type) -> None:
    with pytest.raises(GRPCError):
        Codec().decode(b"\xff", kind)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_message_or_an_error_and_google_takes_what_we_take(data: bytes) -> None:
    try:
        taken = Codec().decode(data, RESPONSE)
    except GRPCError:
        return
    google = message_class("v1", "NodeWatchResourcesResponse").FromString(data)
    assert [one.message for one in taken.devices] == [one.message for one in google.devices]
