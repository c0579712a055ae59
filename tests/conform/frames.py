"""A server at the level of HTTP/2 frames, to answer what no well-behaved server would.

Built on h2's codec for headers and on blocking sockets, without any checks on what is sent.
"""

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hpack import Decoder, Encoder
from wire.raw import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, SETTINGS, Header, frame

TIMEOUT_S: Final = 60.0
OK: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"))


class Peer:
    """A connection that a client has made."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._encoder = Encoder()
        self._decoder = Decoder()

    def send(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self._sock.sendall(data)

    def greet(self) -> None:
        """Reads the client's preface and sends our settings.

        Raises:
            EOFError: it is none, or there is nothing.
        """
        if self._take(len(PREFACE)) != PREFACE:
            raise EOFError("no HTTP/2")
        self.send(frame(SETTINGS, 0, 0))

    def next_call(self) -> tuple[int, str]:
        """Stream and path of the next call; settings and pings that come before it are acknowledged.

        Raises:
            EOFError: the connection ended without one.
        """
        while True:
            kind, flags, stream, payload = self._next_frame()
            if kind == SETTINGS and not flags & ACK:
                self.send(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                self.send(frame(PING, ACK, 0, payload))
            elif kind == HEADERS:
                return stream, dict(self._decoder.decode(payload))[":path"]

    def headers(self, stream: int, headers: Sequence[Header] = OK, *, flags: int = END_HEADERS) -> None:
        """Sends headers or, with END_STREAM among the flags, trailers."""
        self.send(frame(HEADERS, flags, stream, self._encoder.encode(headers)))

    def end(self, stream: int, code: int, text: bytes = b"", *, only: bool = True) -> None:
        """Ends a call with that status: ``only`` trailers, or behind headers that were sent."""
        status = [(b"grpc-status", b"%d" % code), (b"grpc-message", text)]
        self.headers(stream, [*(OK if only else ()), *status], flags=END_HEADERS | END_STREAM)

    def data(self, stream: int, data: bytes) -> None:
        """Sends a part of a call's answer, in as many frames as it needs."""
        for at in range(0, len(data), 1 << 14):
            self.send(frame(DATA, 0, stream, data[at : at + (1 << 14)]))

    def stay(self) -> None:
        """Takes no call any more; returns at the end of the connection."""
        with suppress(EOFError):
            while True:
                self.next_call()

    def stare(self) -> None:
        """Reads and answers nothing; returns at the end of the connection."""
        while self._sock.recv(1 << 16):
            pass

    def _next_frame(self) -> tuple[int, int, int, bytes]:
        head = self._take(9)
        kind, flags, stream = struct.unpack_from(">BBI", head, 3)
        return kind, flags, stream, self._take(int.from_bytes(head[:3], "big"))

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            data = self._sock.recv(1 << 16)
            if not data:
                raise EOFError("the client is gone")
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken


Manners = Callable[[Peer], None]
"""What a server does with each connection, until it returns: then the connection is closed."""


class FrameServer:
    """Listens on a socket. Entered, it gives each connection to its manners, in a thread of its own."""

    def __init__(self, path: Path, manners: Manners) -> None:
        self._manners = manners
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        with self._lock:
            for sock in self._open:
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # shut down
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(TIMEOUT_S)
                with self._lock:
                    self._open.add(sock)
                thread = threading.Thread(target=self._meet, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _meet(self, sock: socket.socket) -> None:
        with suppress(OSError, EOFError):  # the client has had enough
            self._manners(Peer(sock))
        with self._lock:
            self._open.discard(sock)
            sock.close()
