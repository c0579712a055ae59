"""DATA frames of our own beside h2's: the same bytes, the same windows, and none where h2 would send none."""

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived
from h2.settings import SettingCodes

from agent.serve.grpc.frames import frames, message_frames, take_window

STREAM = 1
WINDOW = 65_535  # RFC 9113, 6.9.2


class Pair:
    """A client that has asked on a stream, and the server that answers it."""

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
        """What the client has said so far."""
        self.server.receive_data(self.client.data_to_send())

    def window(self) -> int:
        """What the server may still send, by h2's count."""
        return self.server.local_flow_control_window(STREAM)


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("size", [0, 1, 255, 256, 16_383, 16_384, 16_385, 65_535])
def test_frames_are_those_of_h2(pair: Pair, size: int) -> None:
    data, most = bytes(n % 251 for n in range(size)), pair.server.max_outbound_frame_size
    for at in range(0, size, most):
        pair.server.send_data(STREAM, data[at : at + most])
    assert frames(data, STREAM, most) == pair.server.data_to_send()


def test_a_frame_is_as_long_as_the_peer_takes_it(pair: Pair) -> None:
    data, most = bytes(1 << 17), (1 << 24) - 1
    pair.client.update_settings({SettingCodes.MAX_FRAME_SIZE: most})
    pair.to_server()
    assert pair.server.max_outbound_frame_size == most
    assert frames(data, STREAM, most)[:9] == bytes([2, 0, 0, 0, 0, 0, 0, 0, STREAM])


def test_a_message_arrives_with_its_length_before_it(pair: Pair) -> None:
    message = b"list" * 10_000
    assert take_window(pair.server, STREAM, 5 + len(message))
    sent = message_frames(message, STREAM, pair.server.max_outbound_frame_size)
    found = [event for event in pair.client.receive_data(sent) if isinstance(event, DataReceived)]
    assert b"".join(event.data for event in found) == b"\0" + len(message).to_bytes(4, "big") + message


def test_streams_of_other_numbers_get_frames_of_their_own() -> None:
    assert message_frames(b"list", 3, 100) == b"\0\0\x09\0\0\0\0\0\3\0\0\0\0\4list"
    assert message_frames(b"list", 5, 100) == b"\0\0\x09\0\0\0\0\0\5\0\0\0\0\4list"


def test_h2_counts_what_was_sent_without_it(pair: Pair) -> None:
    """On the stream and on the connection; and then goes on where we were."""
    assert take_window(pair.server, STREAM, 60_000)
    assert pair.window() == WINDOW - 60_000
    assert pair.server.outbound_flow_control_window == WINDOW - 60_000
    pair.client.receive_data(frames(bytes(60_000), STREAM, pair.server.max_outbound_frame_size))
    pair.server.send_data(STREAM, bytes(5_535), end_stream=True)
    pair.client.receive_data(pair.server.data_to_send())
    assert pair.window() == 0


def test_what_does_not_fit_takes_nothing(pair: Pair) -> None:
    assert not take_window(pair.server, STREAM, WINDOW + 1)
    assert pair.window() == WINDOW
    pair.client.increment_flow_control_window(1, STREAM)
    pair.to_server()
    assert not take_window(pair.server, STREAM, WINDOW + 1), "the connection has no room for it"
    pair.client.increment_flow_control_window(1)
    pair.to_server()
    assert take_window(pair.server, STREAM, WINDOW + 1)
    assert pair.window() == 0


def test_a_window_that_the_peer_made_negative_takes_nothing(pair: Pair) -> None:
    assert take_window(pair.server, STREAM, 1_000)
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    pair.to_server()
    assert pair.window() == -1_000
    assert not take_window(pair.server, STREAM, 1)


def test_a_stream_that_the_peer_has_reset_takes_nothing(pair: Pair) -> None:
    pair.client.reset_stream(STREAM)
    pair.to_server()
    assert not take_window(pair.server, STREAM, 1)
    assert pair.server.outbound_flow_control_window == WINDOW


def test_a_stream_that_we_have_ended_takes_nothing(pair: Pair) -> None:
    pair.server.end_stream(STREAM)
    assert not take_window(pair.server, STREAM, 1)
    assert pair.server.outbound_flow_control_window == WINDOW


def test_a_stream_that_never_was_takes_nothing(pair: Pair) -> None:
    assert not take_window(pair.server, 7, 1)


def test_after_goaway_nothing_is_taken(pair: Pair) -> None:
    pair.client.close_connection()
    pair.to_server()
    assert not take_window(pair.server, STREAM, 1)
    assert pair.server.outbound_flow_control_window == WINDOW
