"""As much of HTTP/2 and gRPC as it takes to subscribe and to count messages; the connection is the caller's.

A client that costs next to nothing, to time a server by: nothing of a message is decoded or kept, and of what
the server says about the stream only its end is understood. RFC 9113 has the frames, RFC 7541 the headers.
"""

import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM: Final = 1
WINDOW: Final = 1 << 24
"""Of the stream and of the connection; what was read is given back when it is half of it."""
WINDOW_BEGIN: Final = (1 << 16) - 1  # of a connection, by RFC 9113: there is no setting for it
HEAD: Final = 9
"""Bytes before a frame's payload."""
MESSAGE_HEAD: Final = 5
"""Bytes before a message of gRPC: whether it is compressed, and its length."""

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS: Final = 4
PADDED: Final = 8
INITIAL_WINDOW_SIZE: Final = 4


class StreamEnded(Exception):
    """The server will send no more; the text says by which frame."""


class Messages:
    """Counts the messages of one stream from the bytes of its connection."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._data = bytearray()
        self._read = 0

    def receive(self, data: bytes) -> tuple[int, bytes]:
        """Messages that are whole by now and were not before, and what is to be sent in answer.

        Raises:
            StreamEnded: There will be no more of them.
        """
        self._bytes += data
        answer = b""
        while len(self._bytes) >= HEAD:
            end = HEAD + int.from_bytes(self._bytes[:3], "big")
            if len(self._bytes) < end:
                break
            answer += self._frame(self._bytes[3], self._bytes[4], bytes(self._bytes[HEAD:end]))
            del self._bytes[:end]
        return self._whole(), answer

    def _frame(self, kind: int, flags: int, payload: bytes) -> bytes:
        if kind in {RST_STREAM, GOAWAY} or (kind in {DATA, HEADERS} and flags & END_STREAM):
            raise StreamEnded(f"a frame of type {kind} ends the stream: {payload!r}")
        if kind in {SETTINGS, PING} and not flags & ACK:
            return frame(kind, ACK, 0, payload if kind == PING else b"")
        if kind != DATA:
            return b""
        self._data += payload[1 : len(payload) - payload[0]] if flags & PADDED else payload
        self._read += len(payload)
        if self._read < WINDOW // 2:
            return b""
        given, self._read = struct.pack(">I", self._read), 0
        return frame(WINDOW_UPDATE, 0, 0, given) + frame(WINDOW_UPDATE, 0, STREAM, given)

    def _whole(self) -> int:
        number = 0
        while len(self._data) >= MESSAGE_HEAD:
            end = MESSAGE_HEAD + int.from_bytes(self._data[1:MESSAGE_HEAD], "big")
            if len(self._data) < end:
                break
            del self._data[:end]
            number += 1
        return number


def subscription(method: str) -> bytes:
    """What a client says first: that it speaks HTTP/2, its windows, and a call with an empty message."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(b"\0" + _string(name) + _string(value) for name, value in headers.items())
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW))
        + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - WINDOW_BEGIN))
        + frame(HEADERS, END_HEADERS, STREAM, block)
        + frame(DATA, END_STREAM, STREAM, bytes(MESSAGE_HEAD))
    )


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _string(text: str) -> bytes:
    """A literal without Huffman's code; shorter than 127 bytes, so that its length is one byte."""
    data = text.encode()
    assert len(data) < 0x7F, text
    return bytes([len(data)]) + data
