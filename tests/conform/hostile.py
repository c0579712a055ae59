"""Servers that are no gRPC servers, or are and mean harm: what each does with every connection."""

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

from conform.frames import OK, Manners, Peer
from conform.lists import Told, health_list

CONTINUATION: Final = 0x9
INTERNAL_ERROR: Final = 2
MANNERS: Final[dict[str, Manners]] = {}
"""By what they are called."""


def _manners(function: Manners) -> Manners:
    MANNERS[function.__name__] = function
    return function


def _calls(peer: Peer) -> Iterator[int]:
    """The streams of the calls that it makes, of which each is to be answered."""
    peer.greet()
    while True:
        yield peer.next_call()[0]


def _open(peer: Peer, stream: int) -> None:
    peer.headers(stream, OK)
    peer.data(stream, message(health_list([Told()])))


# --- no HTTP/2 ----------------------------------------------------------------------------------------------


@_manners
def closes_at_once(peer: Peer) -> None:
    pass


@_manners
def stares(peer: Peer) -> None:
    peer.stare()


@_manners
def speaks_http_1(peer: Peer) -> None:
    peer.send(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    peer.stare()


@_manners
def speaks_gibberish(peer: Peer) -> None:
    peer.send(random.Random(1).randbytes(1 << 16))
    peer.stare()


@_manners
def babbles_for_ever(peer: Peer) -> None:
    while True:
        peer.send(os.urandom(1 << 12))


@_manners
def greets_and_stares(peer: Peer) -> None:
    peer.greet()
    peer.stare()


# --- frames that should not be ------------------------------------------------------------------------------


@_manners
def sends_random_frames(peer: Peer) -> None:
    dice = random.Random(2)
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(50):
            kind, flags = dice.randrange(0, 12), dice.randrange(0, 256)
            peer.send(frame(kind, flags, dice.choice([0, stream, 99]), dice.randbytes(dice.randrange(0, 64))))


@_manners
def floods_with_pings(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(20_000):
            peer.send(frame(PING, 0, 0, bytes(8)))


@_manners
def floods_with_settings(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(20_000):
            peer.send(frame(SETTINGS, 0, 0))


@_manners
def floods_with_empty_frames(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(20_000):
            peer.send(frame(DATA, 0, stream))


@_manners
def sends_headers_without_end(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.send(frame(HEADERS, 0, stream, b"\x00" * 100))
        for _ in range(1000):
            peer.send(frame(CONTINUATION, 0, stream, bytes(1 << 14)))


@_manners
def announces_a_frame_of_16_mib(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.send(b"\xff\xff\xff" + struct.pack(">BBI", DATA, 0, stream))
        peer.stare()


@_manners
def opens_the_window_too_far(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream)
        for _ in range(3):
            peer.send(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", (1 << 31) - 1)))


@_manners
def answers_calls_that_nobody_made(peer: Peer) -> None:
    for stream in _calls(peer):
        _open(peer, stream + 1000)


@_manners
def resets_every_call(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.send(frame(RST_STREAM, 0, stream, struct.pack(">I", INTERNAL_ERROR)))


@_manners
def says_goodbye_to_every_call(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.send(frame(GOAWAY, 0, 0, struct.pack(">II", stream, 0) + b"\x1b[31mtoo many\x00"))


# --- HTTP that is no gRPC -----------------------------------------------------------------------------------


@_manners
def has_no_such_page(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, [(b":status", b"404"), (b"content-type", b"text/html")])
        peer.send(frame(DATA, END_STREAM, stream, b"<html>\x1b]0;owned\x07</html>"))


@_manners
def sends_no_status(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK, flags=END_HEADERS | END_STREAM)


@_manners
def sends_a_status_that_is_none(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(
            stream,
            [*OK, (b"grpc-status", b"\xb2many"), (b"grpc-message", b"%zz%")],
            flags=END_HEADERS | END_STREAM,
        )


@_manners
def sends_status_99(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.end(stream, 99)


@_manners
def writes_on_the_terminal(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.end(stream, 13, b"%1B[2J%1B]0;owned%07%0D%0A%C2%9B31m%E2%80%AE%00")


@_manners
def ends_with_a_text_of_a_million_bytes(peer: Peer) -> None:
    for stream in _calls(peer):
        _end_at_length(peer, stream, 1_000_000)


@_manners
def ends_with_a_text_of_forty_thousand_bytes(peer: Peer) -> None:
    for stream in _calls(peer):
        _end_at_length(peer, stream, 40_000)


def _end_at_length(peer: Peer, stream: int, size: int) -> None:
    headers = [*OK, (b"grpc-status", b"2"), (b"grpc-message", b"x" * size)]
    block = b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers)
    pieces = [block[at : at + (1 << 14)] for at in range(0, len(block), 1 << 14)]
    peer.send(frame(HEADERS, END_STREAM, stream, pieces[0]))
    for piece in pieces[1:-1]:
        peer.send(frame(CONTINUATION, 0, stream, piece))
    peer.send(frame(CONTINUATION, END_HEADERS, stream, pieces[-1]))


def _string(text: bytes) -> bytes:
    """A literal of HPACK: its length in seven bits and as many more as it takes, and its bytes."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, out = len(text) - 127, bytearray([127])
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    return bytes([*out, rest]) + text


# --- messages -----------------------------------------------------------------------------------------------


@_manners
def sends_half_a_message(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.data(stream, message(health_list([Told()]))[:-4])


@_manners
def closes_within_a_message(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.data(stream, message(health_list([Told()]))[:-4])
        return


@_manners
def ends_within_a_message(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.data(stream, message(health_list([Told()]))[:-4])
        peer.end(stream, 0, only=False)


@_manners
def announces_a_message_of_4_gib(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, OK)
        peer.data(stream, b"\x00\xff\xff\xff\xff")


@_manners
def compresses(peer: Peer) -> None:
    for stream in _calls(peer):
        peer.headers(stream, [*OK, (b"grpc-encoding", b"gzip")])
        peer.data(stream, message(b"\x1f\x8b\x08", compressed=1))


@_manners
def sends_random_messages(peer: Peer) -> None:
    dice = random.Random(3)
    for stream in _calls(peer):
        peer.headers(stream, OK)
        for _ in range(100):
            peer.data(stream, message(dice.randbytes(dice.randrange(0, 200))))
