"""gRPC client at the level of HTTP/2 frames, to send what no correct client would.

Built on h2's codec and a blocking socket, without any of its checks on what is sent.
"""

import socket
import struct
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hpack import Decoder, Encoder
from patience import PATIENCE_S

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA: Final = 0x0
HEADERS: Final = 0x1
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8

END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
ACK: Final = 0x1

INITIAL_WINDOW_SIZE: Final = 0x4

V1: Final = "/v1.DRAResourceHealth/NodeWatchResources"
V1ALPHA1: Final = "/v1alpha1.DRAResourceHealth/NodeWatchResources"

Header = tuple[bytes, bytes]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(payload: bytes = b"", *, compressed: int = 0) -> bytes:
    """Encode a gRPC message: flag, length, payload."""
    return struct.pack(">BI", compressed, len(payload)) + payload


def request_headers(path: str = V1) -> list[Header]:
    """Return the headers that every gRPC client sends."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]


class RawClient:
    """Connection that returns all frames except the server's settings as they arrive."""

    def __init__(self, path: Path, *, window: int = 65_535, timeout_s: float = PATIENCE_S) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(timeout_s)
        self.sock.connect(str(path))
        self._encoder = Encoder()
        self._decoder = Decoder()
        self._received = bytearray()
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.send(PREFACE + frame(SETTINGS, 0, 0, settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        """Send bytes unchanged."""
        self.sock.sendall(data)

    def headers(self, stream: int, headers: list[Header], *, flags: int = END_HEADERS) -> None:
        """Send a HEADERS frame."""
        self.send(self.encode_headers(stream, headers, flags=flags))

    def encode_headers(self, stream: int, headers: list[Header], *, flags: int = END_HEADERS) -> bytes:
        """Return a HEADERS frame, to be sent before another is encoded."""
        return frame(HEADERS, flags, stream, self._encoder.encode(headers))

    def call(self, stream: int = 1, path: str = V1) -> None:
        """Open a health stream as the kubelet does: headers, the empty message, half-close."""
        self.headers(stream, request_headers(path))
        self.send(frame(DATA, END_STREAM, stream, message()))

    def next_frame(self) -> tuple[int, int, int, bytes] | None:
        """Return type, flags, stream and payload of the next frame; None at the end of the connection."""
        while len(self._received) < 9 or len(self._received) < 9 + self._size():
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._received += data
        size = self._size()
        kind, flags, stream = struct.unpack_from(">BBI", self._received, 3)
        payload = bytes(self._received[9 : 9 + size])
        del self._received[: 9 + size]
        if kind == SETTINGS and not flags & ACK:
            with suppress(BrokenPipeError):  # the server has closed the connection; what it sent can be read
                self.send(frame(SETTINGS, ACK, 0))
        return kind, flags, stream, payload

    def drain(self) -> int:
        """Keep all bytes that have arrived for later frames; return their number."""
        before, timeout_s = len(self._received), self.sock.gettimeout()
        self.sock.setblocking(False)
        with suppress(BlockingIOError):
            while data := self.sock.recv(1 << 16):
                self._received += data
        self.sock.settimeout(timeout_s)
        return len(self._received) - before

    def next_of(self, kind: int, stream: int) -> tuple[int, bytes]:
        """Return flags and payload of the next frame of that type in that stream.

        Raises:
            EOFError: The connection ended without such a frame.
        """
        while (received := self.next_frame()) is not None:
            if received[0] == HEADERS and (kind, stream) != (HEADERS, received[2]):
                self._decoder.decode(received[3])  # keeps the compression state
            if (received[0], received[2]) == (kind, stream):
                return received[1], received[3]
        raise EOFError(f"connection ended before a frame of type {kind} in stream {stream}")

    def decode_headers(self, payload: bytes) -> list[tuple[str, str]]:
        """Decode the payload of a HEADERS frame; each must be decoded once, in the order of receipt."""
        return list(self._decoder.decode(payload))

    def next_headers(self, stream: int = 1) -> dict[str, str]:
        """Return the next headers or trailers of that stream."""
        _, payload = self.next_of(HEADERS, stream)
        return dict(self._decoder.decode(payload))

    def _size(self) -> int:
        return int.from_bytes(self._received[:3], "big")
