"""The client that only reads frames, against h2: it is understood, and counts every message once."""

from typing import Final

import h2.connection
import h2.events
import pytest
from h2.config import H2Configuration

from agent.bench.frames import GOAWAY, PING, WINDOW, Messages, StreamEnded, frame, subscription

METHOD: Final = "/v1.DRAResourceHealth/NodeWatchResources"
MESSAGE: Final = b"\0\0\0\x15\x12" + bytes(5394)
FRAME: Final = 1 << 14


class Peer:
    """A server, and a client that has subscribed to it; what each says is carried to the other."""

    def __init__(self) -> None:
        self.server = h2.connection.H2Connection(H2Configuration(client_side=False))
        self.messages = Messages()
        self.events = self.server.receive_data(subscription(METHOD))
        self.server.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])

    def carry(self, chunk: int = 1 << 16) -> int:
        """In pieces of so many bytes. Returns how many messages there were."""
        data = self.server.data_to_send()
        found = 0
        for place in range(0, len(data), chunk):
            number, answer = self.messages.receive(data[place : place + chunk])
            found += number
            self.events += self.server.receive_data(answer)
        return found


def test_it_asks_as_grpc_asks() -> None:
    asked = Peer().events
    (request,) = (one for one in asked if isinstance(one, h2.events.RequestReceived))
    headers = dict(request.headers)
    assert headers[b":path"] == METHOD.encode()
    assert headers[b"content-type"] == b"application/grpc"
    assert headers[b"te"] == b"trailers"
    (data,) = (one for one in asked if isinstance(one, h2.events.DataReceived))
    assert data.data == bytes(5)
    assert any(isinstance(one, h2.events.StreamEnded) for one in asked)


@pytest.mark.parametrize("chunk", [1, 7, 5399, 1 << 16])
def test_messages_are_counted_however_their_bytes_arrive(chunk: int) -> None:
    peer = Peer()
    peer.server.send_data(1, MESSAGE)
    peer.server.send_data(1, MESSAGE[:4])
    assert peer.carry(chunk) == 1
    peer.server.send_data(1, MESSAGE[4:] + MESSAGE)
    assert peer.carry(chunk) == 2


def test_padding_is_no_part_of_a_message() -> None:
    peer = Peer()
    for _ in range(3):
        peer.server.send_data(1, MESSAGE, pad_length=200)
    assert peer.carry() == 3


def test_windows_are_given_back_before_they_are_used_up() -> None:
    peer = Peer()
    piece = b"\0" + (FRAME - 5).to_bytes(4, "big") + bytes(FRAME - 5)
    for _ in range(3 * WINDOW // FRAME):
        peer.server.send_data(1, piece)
        assert peer.carry() == 1


def test_settings_and_pings_are_acknowledged() -> None:
    peer = Peer()
    peer.server.initiate_connection()
    peer.server.ping(b"are you?")
    peer.carry()
    kinds = {type(one) for one in peer.events}
    assert {h2.events.SettingsAcknowledged, h2.events.PingAckReceived} <= kinds


def test_what_ends_the_stream_is_an_error_and_not_silence() -> None:
    peer = Peer()
    peer.server.send_headers(1, [("grpc-status", "14")], end_stream=True)
    with pytest.raises(StreamEnded, match="type 1"):
        peer.carry()
    with pytest.raises(StreamEnded, match="type 7"):
        Messages().receive(frame(PING, 1, 0, bytes(8)) + frame(GOAWAY, 0, 0, bytes(8)))
