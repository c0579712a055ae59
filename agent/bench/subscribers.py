"""``python -m agent.bench.subscribers SOCKET KIND ARGUMENT``: subscribers with a connection each.

Each line on standard input is a number of subscribers. The process connects that many, and prints a line of
JSON when each of them has received its first message. It then prints a line for each round: the time at which
the last subscriber received its next message (CLOCK_MONOTONIC, ns). Kinds: ``grpcio METHOD``, a thread per
subscriber; ``frames METHOD``, one thread that reads the HTTP/2 frames of all subscribers; ``bare SIZE``, one
thread that reads bare sockets, where SIZE bytes are a message: the lower bound.

``follow METHOD MARKER`` is one gRPC subscriber and reads no standard input. It prints a line of JSON at start
(the name of its gRPC library) and one for each message: arrival time (CLOCK_MONOTONIC, taken before the bytes
are parsed), size, and the matches of the regular expression MARKER in the message. It uses grpcio if
installed, which behaves most like a kubelet's client; otherwise it reads HTTP/2 frames.

MessageCounter understands just enough of HTTP/2 (RFC 9113) and HPACK (RFC 7541) to subscribe and to count
messages. It decodes no message and costs next to nothing, so that the server's cost dominates a measurement.
"""

import errno
import importlib
import importlib.util
import json
import os
import re
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM: Final = 1
WINDOW: Final = 1 << 24
"""HTTP/2 flow control window of stream and connection [bytes]; renewed when half of it is used."""
INITIAL_WINDOW: Final = (1 << 16) - 1  # of a connection; RFC 9113 has no setting for it
HEAD: Final = 9
"""Length of the header of an HTTP/2 frame [bytes]."""
MESSAGE_HEAD: Final = 5
"""Length of the gRPC message prefix [bytes]: compression flag and message length."""

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS: Final = 4
PADDED: Final = 8
INITIAL_WINDOW_SIZE: Final = 4


class StreamEnded(Exception):
    """The server ended a subscriber's stream and sends no more messages; the text names the frame."""


class MessageCounter:
    """Counter of the messages of one subscriber's stream, fed with the bytes of its connection.

    Args:
        messages: List to which each message is added; None: messages are only counted.
    """

    def __init__(self, messages: list[bytes] | None = None) -> None:
        self._messages = messages
        self._bytes = bytearray()
        self._data = bytearray()
        self._read = 0
        self._heads = b""
        """Headers of the last frame that was one whole message, of HTTP/2 and of gRPC."""
        self._size = 0
        """Size of that frame [bytes]."""

    def receive(self, data: bytes) -> tuple[int, bytes]:
        """Process received bytes; return the number of completed messages and the bytes to send back.

        Raises:
            StreamEnded: The server sends no more messages.
        """
        if not self._bytes and not self._data and self._read < WINDOW // 4 and self._is_one_message(data):
            if self._messages is not None:
                self._messages.append(data[HEAD + MESSAGE_HEAD :])
            self._read += len(data) - HEAD
            return 1, b""
        self._bytes += data
        reply = b""
        while len(self._bytes) >= HEAD:
            end = HEAD + int.from_bytes(self._bytes[:3], "big")
            if len(self._bytes) < end:
                break
            reply += self._handle_frame(self._bytes[3], self._bytes[4], bytes(self._bytes[HEAD:end]))
            del self._bytes[:end]
        return self._count_complete_messages(), reply

    def _is_one_message(self, data: bytes) -> bool:
        """Return whether received bytes are one DATA frame that contains one message and ends no stream.

        This is the usual case, in which a subscriber costs little more than a bare socket: the headers and
        the size are those of the message before.
        """
        if len(data) == self._size and data.startswith(self._heads):
            return True
        size = len(data) - HEAD
        if not (
            size >= MESSAGE_HEAD
            and data[3:5] == bytes((DATA, 0))
            and int.from_bytes(data[:3], "big") == size
            and int.from_bytes(data[HEAD + 1 : HEAD + MESSAGE_HEAD], "big") == size - MESSAGE_HEAD
        ):
            return False
        self._heads, self._size = data[: HEAD + MESSAGE_HEAD], len(data)
        return True

    def _handle_frame(self, kind: int, flags: int, payload: bytes) -> bytes:
        if kind in {RST_STREAM, GOAWAY} or (kind in {DATA, HEADERS} and flags & END_STREAM):
            raise StreamEnded(f"server: an HTTP/2 frame of type {kind} ended the stream: {payload!r}")
        if kind in {SETTINGS, PING} and not flags & ACK:
            return encode_frame(kind, ACK, 0, payload if kind == PING else b"")
        if kind != DATA:
            return b""
        self._data += payload[1 : len(payload) - payload[0]] if flags & PADDED else payload
        self._read += len(payload)
        if self._read < WINDOW // 2:
            return b""
        credit, self._read = struct.pack(">I", self._read), 0
        return encode_frame(WINDOW_UPDATE, 0, 0, credit) + encode_frame(WINDOW_UPDATE, 0, STREAM, credit)

    def _count_complete_messages(self) -> int:
        count = 0
        while len(self._data) >= MESSAGE_HEAD:
            end = MESSAGE_HEAD + int.from_bytes(self._data[1:MESSAGE_HEAD], "big")
            if len(self._data) < end:
                break
            if self._messages is not None:
                self._messages.append(bytes(self._data[MESSAGE_HEAD:end]))
            del self._data[:end]
            count += 1
        return count


def subscription_request(method: str) -> bytes:
    """Encode what a client sends first: HTTP/2 preface, flow control windows, and the call of ``method``."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(b"\0" + _header_string(name) + _header_string(value) for name, value in headers.items())
    return (
        PREFACE
        + encode_frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW))
        + encode_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - INITIAL_WINDOW))
        + encode_frame(HEADERS, END_HEADERS, STREAM, block)
        + encode_frame(DATA, END_STREAM, STREAM, bytes(MESSAGE_HEAD))
    )


def encode_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Encode one HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header_string(text: str) -> bytes:
    """Encode an HPACK string literal without Huffman coding, shorter than 127 bytes (one length byte)."""
    data = text.encode()
    assert len(data) < 0x7F, text
    return bytes([len(data)]) + data


Receive = Callable[[bytes], tuple[int, bytes]]
"""Function that takes bytes from the server; returns the number of completed messages and the reply."""


class DeliveryRounds:
    """Counter of delivery rounds: a round ends when every subscriber has received one message.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 0
        self._left = 0
        self._done: Callable[[int], None] = _print_time

    def begin(self, size: int) -> None:
        """Start a round of the first messages of new subscribers.

        ``size`` is the number of all subscribers from now on.
        """
        with self._lock:
            self._left, self._size = size - self._size, size
            self._done = lambda _: _print_json(subscribers=size)

    def count_received(self) -> None:
        """Count a message that a subscriber just received; print the time if the message ends the round."""
        t_ns = time.monotonic_ns()
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._done(t_ns)
                self._done, self._left = _print_time, self._size


def _print_json(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _print_time(t_ns: int) -> None:
    _print_json(t_ns=t_ns)


def grpcio_adder(path: str, method: str, rounds: DeliveryRounds) -> Callable[[], None]:
    """Return a function that adds a subscriber with a grpcio channel and a thread of its own."""
    grpc = importlib.import_module("grpc")
    options = [("grpc.use_local_subchannel_pool", 1)]  # else all channels share one connection

    def follow() -> None:
        channel = grpc.insecure_channel(f"unix:{path}", options)
        for _ in channel.unary_stream(method)(b"", wait_for_ready=True):
            rounds.count_received()

    return lambda: threading.Thread(target=follow, daemon=True).start()


def frames_adder(path: str, method: str, rounds: DeliveryRounds) -> Callable[[], None]:
    """Return a function that adds a subscriber which counts messages by HTTP/2 frames."""
    request = subscription_request(method)

    def begin(connection: socket.socket) -> Receive:
        connection.sendall(request)
        return MessageCounter().receive

    return _polled_adder(path, begin, rounds)


def bare_adder(path: str, size: str, rounds: DeliveryRounds) -> Callable[[], None]:
    """Return a function that adds a connection to a bare socket.
    A connection counts as a subscriber at once: the server sends no first message."""

    def begin(_: socket.socket) -> Receive:
        rounds.count_received()
        return FixedSizeMessageCounter(int(size)).receive

    return _polled_adder(path, begin, rounds)


class FixedSizeMessageCounter:
    """Counter of messages of a fixed size on a bare socket."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._read = 0

    def receive(self, data: bytes) -> tuple[int, bytes]:
        """Process received bytes; return the number of completed messages and an empty reply."""
        count, self._read = divmod(self._read + len(data), self._size)
        return count, b""


def _polled_adder(
    path: str, begin: Callable[[socket.socket], Receive], rounds: DeliveryRounds
) -> Callable[[], None]:
    """Return a function that adds a subscriber's connection to ``path``.
    One thread reads from all connections."""
    selector = selectors.EpollSelector()

    def read() -> None:
        while True:
            for key, _ in selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                data = connection.recv(1 << 16)
                if not data:
                    raise ConnectionError(f"socket {path}: the server closed the connection")
                count, reply = key.data(data)
                for _ in range(count):
                    rounds.count_received()
                if reply:
                    connection.sendall(reply)

    def add() -> None:
        connection = connect_when_served(path)
        selector.register(connection, selectors.EVENT_READ, begin(connection))

    threading.Thread(target=read, daemon=True).start()
    return add


def connect_when_served(path: str) -> socket.socket:
    """Return a connection to a socket, at once when a server listens on it: its file exists shortly before.
    Blocks without limit."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        code = connection.connect_ex(path)
        if code == 0:
            return connection
        connection.close()
        if code not in {errno.ENOENT, errno.ECONNREFUSED}:
            raise OSError(code, os.strerror(code), path)
        time.sleep(0.001)


ADDERS: Final = {"grpcio": grpcio_adder, "frames": frames_adder, "bare": bare_adder}


def follow_stream(path: str, method: str, marker: str) -> None:
    """Subscribe to ``method`` on the socket ``path``; print a line for each message until the stream ends."""
    pattern = re.compile(marker.encode(), re.DOTALL)
    grpc = importlib.import_module("grpc") if importlib.util.find_spec("grpc") else None
    _print_json(client=f"grpcio {grpc.__version__}" if grpc else "a client that only reads HTTP/2 frames")
    connection = connect_when_served(path)
    if grpc:
        connection.close()  # it only waited: after a failed attempt, grpcio waits a second
        _follow_grpcio(grpc, path, method, pattern)
    else:
        _follow_frames(connection, method, pattern)


def _find_markers(pattern: re.Pattern[bytes], data: bytes) -> list[str]:
    return [match.decode() for match in pattern.findall(data)]


def _follow_grpcio(grpc: Any, path: str, method: str, pattern: re.Pattern[bytes]) -> None:
    channel = grpc.insecure_channel(f"unix:{path}")
    for data in channel.unary_stream(method)(b"", wait_for_ready=True):
        t_ns = time.monotonic_ns()
        _print_json(t_ns=t_ns, size=len(data), found=_find_markers(pattern, data))


def _follow_frames(connection: socket.socket, method: str, pattern: re.Pattern[bytes]) -> None:
    messages: list[bytes] = []
    counter = MessageCounter(messages)
    with connection:
        connection.sendall(subscription_request(method))
        while data := connection.recv(1 << 16):
            t_ns = time.monotonic_ns()
            _, reply = counter.receive(data)
            if reply:
                connection.sendall(reply)
            for message in messages:
                _print_json(t_ns=t_ns, size=len(message), found=_find_markers(pattern, message))
            messages.clear()
    raise StreamEnded("server: closed the connection")


def main(path: str, kind: str, argument: str, marker: str = "") -> None:
    """Connect subscribers to ``path`` and print the time of each round until standard input ends."""
    if kind == "follow":
        follow_stream(path, argument, marker)
        return
    rounds = DeliveryRounds()
    add = ADDERS[kind](path, argument, rounds)
    connected = 0
    for line in sys.stdin:
        rounds.begin(int(line))
        for _ in range(connected, int(line)):
            add()
        connected = int(line)


if __name__ == "__main__":
    main(*sys.argv[1:5])
