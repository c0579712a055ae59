"""The client that only reads HTTP/2 frames, against a server of h2."""

from typing import Final

import h2.connection
import h2.events
import pytest
from h2.config import H2Configuration

from agent.bench.subscribers import (
    GOAWAY,
    PING,
    WINDOW,
    MessageCounter,
    StreamEnded,
    encode_frame,
    subscription_request,
)

METHOD: Final = "/v1.DRAResourceHealth/NodeWatchResources"
MESSAGE: Final = b"\0\0\0\x15\x12" + bytes(5394)
FRAME: Final = 1 << 14


class Peer:
    """h2 server and subscribed client, with the transport between them."""

    def __init__(self, received: list[bytes] | None = None) -> None:
        self.server = h2.connection.H2Connection(H2Configuration(client_side=False))
        self.messages = MessageCounter(received)
        self.events = self.server.receive_data(subscription_request(METHOD))
        self.server.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])

    def deliver(self, chunk: int = 1 << 16) -> int:
        """Deliver the server's bytes in pieces of ``chunk``; return the number of messages."""
        data = self.server.data_to_send()
        count = 0
        for offset in range(0, len(data), chunk):
            completed, reply = self.messages.receive(data[offset : offset + chunk])
            count += completed
            self.events += self.server.receive_data(reply)
        return count


def test_subscription_is_a_grpc_request() -> None:
    events = Peer().events
    (request,) = (event for event in events if isinstance(event, h2.events.RequestReceived))
    headers = dict(request.headers)
    assert headers[b":path"] == METHOD.encode()
    assert headers[b"content-type"] == b"application/grpc"
    assert headers[b"te"] == b"trailers"
    (data,) = (event for event in events if isinstance(event, h2.events.DataReceived))
    assert data.data == bytes(5)
    assert any(isinstance(event, h2.events.StreamEnded) for event in events)


@pytest.mark.parametrize("chunk", [1, 7, 5399, 1 << 16])
def test_messages_are_counted_for_any_chunk_size(chunk: int) -> None:
    peer = Peer()
    peer.server.send_data(1, MESSAGE)
    peer.server.send_data(1, MESSAGE[:4])
    assert peer.deliver(chunk) == 1
    peer.server.send_data(1, MESSAGE[4:] + MESSAGE)
    assert peer.deliver(chunk) == 2


@pytest.mark.parametrize("chunk", [1, 7, 5399, 1 << 16])
def test_messages_are_kept_on_request_for_any_chunk_size(chunk: int) -> None:
    received: list[bytes] = []
    peer = Peer(received)
    peer.server.send_data(1, MESSAGE)
    peer.deliver(chunk)
    peer.server.send_data(1, MESSAGE + MESSAGE)
    peer.deliver(chunk)
    assert received == [MESSAGE[5:]] * 3


def test_padding_is_not_part_of_a_message() -> None:
    peer = Peer()
    for _ in range(3):
        peer.server.send_data(1, MESSAGE, pad_length=200)
    assert peer.deliver() == 3


def test_windows_are_renewed_before_they_are_exhausted() -> None:
    peer = Peer()
    piece = b"\0" + (FRAME - 5).to_bytes(4, "big") + bytes(FRAME - 5)
    for _ in range(3 * WINDOW // FRAME):
        peer.server.send_data(1, piece)
        assert peer.deliver() == 1


def test_settings_and_ping_are_acknowledged() -> None:
    peer = Peer()
    peer.server.initiate_connection()
    peer.server.ping(b"pingping")
    peer.deliver()
    kinds = {type(event) for event in peer.events}
    assert {h2.events.SettingsAcknowledged, h2.events.PingAckReceived} <= kinds


def test_end_of_stream_raises_stream_ended() -> None:
    peer = Peer()
    peer.server.send_headers(1, [("grpc-status", "14")], end_stream=True)
    with pytest.raises(StreamEnded, match="type 1"):
        peer.deliver()
    with pytest.raises(StreamEnded, match="type 7"):
        MessageCounter().receive(encode_frame(PING, 1, 0, bytes(8)) + encode_frame(GOAWAY, 0, 0, bytes(8)))
