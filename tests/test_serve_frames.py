"""DATA frames made without h2: the same bytes and windows as h2's, and none where h2 sends none."""

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived
from h2.settings import SettingCodes

from agent.serve.grpc.hardened import data_frames, message_frames, reserve_window

STREAM = 1
WINDOW = 65_535  # RFC 9113, 6.9.2


class Pair:
    """Client with an open request on a stream, and the server that answers it."""

    def __init__(self) -> None:
        self.client = H2Connection(H2Configuration(client_side=True))
        self.server = H2Connection(H2Configuration(client_side=False))
        self.client.initiate_connection()
        self.server.initiate_connection()
        request = {":method": "POST", ":path": "/", ":scheme": "http", ":authority": "localhost"}
        self.client.send_headers(STREAM, list(request.items()), end_stream=True)
        self.to_server()
        self.server.send_headers(STREAM, [(":status", "200")])
        self.client.receive_data(self.server.data_to_send())

    def to_server(self) -> None:
        """Deliver the bytes that the client has sent so far."""
        self.server.receive_data(self.client.data_to_send())

    def window(self) -> int:
        """Return the remaining window of the server's stream, as h2 counts it."""
        return self.server.local_flow_control_window(STREAM)


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("size", [0, 1, 255, 256, 16_383, 16_384, 16_385, 65_535])
def test_frames_equal_those_of_h2(pair: Pair, size: int) -> None:
    data, limit = bytes(n % 251 for n in range(size)), pair.server.max_outbound_frame_size
    for at in range(0, size, limit):
        pair.server.send_data(STREAM, data[at : at + limit])
    assert data_frames(data, STREAM, limit) == pair.server.data_to_send()


def test_frames_use_maximum_frame_size_of_peer(pair: Pair) -> None:
    data, limit = bytes(1 << 17), (1 << 24) - 1
    pair.client.update_settings({SettingCodes.MAX_FRAME_SIZE: limit})
    pair.to_server()
    assert pair.server.max_outbound_frame_size == limit
    assert data_frames(data, STREAM, limit)[:9] == bytes([2, 0, 0, 0, 0, 0, 0, 0, STREAM])


def test_message_frames_begin_with_length_prefix(pair: Pair) -> None:
    message = b"list" * 10_000
    assert reserve_window(pair.server, STREAM, 5 + len(message))
    sent = message_frames(message, STREAM, pair.server.max_outbound_frame_size)
    received = [event for event in pair.client.receive_data(sent) if isinstance(event, DataReceived)]
    assert b"".join(event.data for event in received) == b"\0" + len(message).to_bytes(4, "big") + message


def test_message_frames_contain_stream_number() -> None:
    assert message_frames(b"list", 3, 100) == b"\0\0\x09\0\0\0\0\0\3\0\0\0\0\4list"
    assert message_frames(b"list", 5, 100) == b"\0\0\x09\0\0\0\0\0\5\0\0\0\0\4list"


def test_take_window_updates_windows_of_h2(pair: Pair) -> None:
    """The windows of the stream and the connection shrink, and h2 continues from there."""
    assert reserve_window(pair.server, STREAM, 60_000)
    assert pair.window() == WINDOW - 60_000
    assert pair.server.outbound_flow_control_window == WINDOW - 60_000
    pair.client.receive_data(data_frames(bytes(60_000), STREAM, pair.server.max_outbound_frame_size))
    pair.server.send_data(STREAM, bytes(5_535), end_stream=True)
    pair.client.receive_data(pair.server.data_to_send())
    assert pair.window() == 0


def test_take_window_above_window_takes_nothing(pair: Pair) -> None:
    assert not reserve_window(pair.server, STREAM, WINDOW + 1)
    assert pair.window() == WINDOW
    pair.client.increment_flow_control_window(1, STREAM)
    pair.to_server()
    assert not reserve_window(pair.server, STREAM, WINDOW + 1), "the connection has no room for it"
    pair.client.increment_flow_control_window(1)
    pair.to_server()
    assert reserve_window(pair.server, STREAM, WINDOW + 1)
    assert pair.window() == 0


def test_take_window_negative_window_takes_nothing(pair: Pair) -> None:
    assert reserve_window(pair.server, STREAM, 1_000)
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    pair.to_server()
    assert pair.window() == -1_000
    assert not reserve_window(pair.server, STREAM, 1)


def test_take_window_reset_stream_takes_nothing(pair: Pair) -> None:
    pair.client.reset_stream(STREAM)
    pair.to_server()
    assert not reserve_window(pair.server, STREAM, 1)
    assert pair.server.outbound_flow_control_window == WINDOW


def test_take_window_ended_stream_takes_nothing(pair: Pair) -> None:
    pair.server.end_stream(STREAM)
    assert not reserve_window(pair.server, STREAM, 1)
    assert pair.server.outbound_flow_control_window == WINDOW


def test_take_window_unknown_stream_takes_nothing(pair: Pair) -> None:
    assert not reserve_window(pair.server, 7, 1)


def test_take_window_after_goaway_takes_nothing(pair: Pair) -> None:
    pair.client.close_connection()
    pair.to_server()
    assert not reserve_window(pair.server, STREAM, 1)
    assert pair.server.outbound_flow_control_window == WINDOW
