"""Servers that do not speak gRPC, or abuse it: functions that serve every connection."""

import os
import random
import struct
from collections.abc import Iterator
from typing import Final

from wire.raw import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    message,
)

from conform.frames import OK, Behaviour, Peer
from conform.lists import ListedDevice, health_list

CONTINUATION: Final = 0x9
INTERNAL_ERROR: Final = 2
BEHAVIOURS: Final[dict[str, Behaviour]] = {}
"""Behaviours by name."""


def _behaviour(function: Behaviour) -> Behaviour:
    BEHAVIOURS[function.__name__] = function
    return function


def _calls(peer: Peer) -> Iterator[int]:
    """Yield the streams of the calls of a client, each of which is to be answered."""
    peer.handshake()
    while True:
        yield peer.next_call()[0]


def _open(peer: Peer, stream: int) -> None:
    peer.headers(stream, OK)
    peer.data(stream, message(health_list([ListedDevice()])))


# --- no HTTP/2 ----------------------------------------------------------------------------------------------


@_behaviour
def closes_at_once(peer: Peer) -> None:
    pass


@_behaviour
def reads_silently(peer: Peer) -> None:
    peer.read_silently()


@_behaviour
def answers_in_http_1(peer: Peer) -> None:
    peer.send(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    peer.read_silently()


@_behaviour
def sends_random_bytes(peer: Peer) -> None:
    peer.send(random.Random(1).randbytes(1 << 16))
    peer.read_silently()


@_behaviour
def sends_random_bytes_without_end(peer: Peer) -> None:
    while True:
        peer.send(os.urandom(1 << 12))


@_behaviour
def handshakes_and_reads_silently(peer: Peer) -> None:
    peer.handshake()
    peer.read_silently()


# --- invalid frames -----------------------------------------------------------------------------------------


@_behaviour
def sends_random_frames(peer: Peer) -> None:
    rng = random.Random(2)
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(50):
            kind, flags = rng.randrange(0, 12), rng.randrange(0, 256)
            peer.send(frame(kind, flags, rng.choice([0, stream, 99]), rng.randbytes(rng.randrange(0, 64))))


@_behaviour
def floods_with_pings(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(20_000):
            peer.send(frame(PING, 0, 0, bytes(8)))


@_behaviour
def floods_with_settings(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(20_000):
            peer.send(frame(SETTINGS, 0, 0))


@_behaviour
def floods_with_empty_frames(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(20_000):
            peer.send(frame(DATA, 0, stream))


@_behaviour
def sends_headers_without_end(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.send(frame(HEADERS, 0, stream, b"\x00" * 100))
        for _ in range(1000):
            peer.send(frame(CONTINUATION, 0, stream, bytes(1 << 14)))


@_behaviour
def announces_a_frame_of_16_mib(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.send(b"\xff\xff\xff" + struct.pack(">BBI", DATA, 0, stream))
        peer.read_silently()


@_behaviour
def opens_the_window_too_far(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(3):
            peer.send(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", (1 << 31) - 1)))


@_behaviour
def answers_unknown_streams(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream + 1000)


@_behaviour
def resets_every_call(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.send(frame(RST_STREAM, 0, stream, struct.pack(">I", INTERNAL_ERROR)))


@_behaviour
def sends_goaway_to_every_call(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.send(frame(GOAWAY, 0, 0, struct.pack(">II", stream, 0) + b"\x1b[31mtoo many\x00"))


# --- HTTP without gRPC --------------------------------------------------------------------------------------


@_behaviour
def has_no_such_page(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, [(b":status", b"404"), (b"content-type", b"text/html")])
        peer.send(frame(DATA, END_STREAM, stream, b"<html>\x1b]0;owned\x07</html>"))


@_behaviour
def sends_no_status(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK, flags=END_HEADERS | END_STREAM)


@_behaviour
def sends_a_status_that_is_none(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(
            stream,
            [*OK, (b"grpc-status", b"\xb2many"), (b"grpc-message", b"%zz%")],
            flags=END_HEADERS | END_STREAM,
        )


@_behaviour
def sends_status_99(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.end(stream, 99)


@_behaviour
def writes_on_the_terminal(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.end(stream, 13, b"%1B[2J%1B]0;owned%07%0D%0A%C2%9B31m%E2%80%AE%00")


@_behaviour
def ends_with_a_text_of_a_million_bytes(peer: Peer) -> None:
    for stream in _calls(peer):
        _end_at_length(peer, stream, 1_000_000)


@_behaviour
def ends_with_a_text_of_forty_thousand_bytes(peer: Peer) -> None:
    for stream in _calls(peer):
        _end_at_length(peer, stream, 40_000)


def _end_at_length(peer: Peer, stream: int, size: int) -> None:
    headers = [*OK, (b"grpc-status", b"2"), (b"grpc-message", b"x" * size)]
    block = b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers)
    chunks = [block[offset : offset + (1 << 14)] for offset in range(0, len(block), 1 << 14)]
    peer.send(frame(HEADERS, END_STREAM, stream, chunks[0]))
    for chunk in chunks[1:-1]:
        peer.send(frame(CONTINUATION, 0, stream, chunk))
    peer.send(frame(CONTINUATION, END_HEADERS, stream, chunks[-1]))


def _string(text: bytes) -> bytes:
    """Encode a string literal of HPACK: its length with a prefix of seven bits, and its bytes."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, out = len(text) - 127, bytearray([127])
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    return bytes([*out, rest]) + text


# --- messages -----------------------------------------------------------------------------------------------


@_behaviour
def sends_half_a_message(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.data(stream, message(health_list([ListedDevice()]))[:-4])


@_behaviour
def closes_within_a_message(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.data(stream, message(health_list([ListedDevice()]))[:-4])
        return


@_behaviour
def ends_within_a_message(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.data(stream, message(health_list([ListedDevice()]))[:-4])
        peer.end(stream, 0, trailers_only=False)


@_behaviour
def announces_a_message_of_4_gib(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.data(stream, b"\x00\xff\xff\xff\xff")


@_behaviour
def compresses(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, [*OK, (b"grpc-encoding", b"gzip")])
        peer.data(stream, message(b"\x1f\x8b\x08", compressed=1))


@_behaviour
def sends_random_messages(peer: Peer) -> None:
    rng = random.Random(3)
    for stream in _calls(peer):
        peer.headers(stream, OK)
        for _ in range(100):
            peer.data(stream, message(rng.randbytes(rng.randrange(0, 200))))
