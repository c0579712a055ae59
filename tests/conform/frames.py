"""Server at the level of HTTP/2 frames, to send what no correct server would.

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
    """Connection of a client."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._encoder = Encoder()
        self._decoder = Decoder()

    def send(self, data: bytes) -> None:
        """Send bytes unchanged."""
        self._sock.sendall(data)

    def handshake(self) -> None:
        """Read the client's preface and send our settings.

        Raises:
            EOFError: The preface is missing or wrong.
        """
        if self._take(len(PREFACE)) != PREFACE:
            raise EOFError("no HTTP/2")
        self.send(frame(SETTINGS, 0, 0))

    def next_call(self) -> tuple[int, str]:
        """Return stream and path of the next call; acknowledge settings and pings before it.

        Raises:
            EOFError: The connection ended without a call.
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
        """Send headers or, with END_STREAM among the flags, trailers."""
        self.send(frame(HEADERS, flags, stream, self._encoder.encode(headers)))

    def end(self, stream: int, code: int, text: bytes = b"", *, trailers_only: bool = True) -> None:
        """End a call with that status: ``trailers_only``, or after headers that were sent."""
        status = [(b"grpc-status", b"%d" % code), (b"grpc-message", text)]
        self.headers(stream, [*(OK if trailers_only else ()), *status], flags=END_HEADERS | END_STREAM)

    def data(self, stream: int, data: bytes) -> None:
        """Send a part of a call's answer, in as many frames as it needs."""
        for offset in range(0, len(data), 1 << 14):
            self.send(frame(DATA, 0, stream, data[offset : offset + (1 << 14)]))

    def wait_closed(self) -> None:
        """Serve no more calls; return at the end of the connection."""
        with suppress(EOFError):
            while True:
                self.next_call()

    def read_silently(self) -> None:
        """Read without an answer; return at the end of the connection."""
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
                raise EOFError("the client has disconnected")
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken


Behaviour = Callable[[Peer], None]
"""Function that serves a connection, which is closed when it returns."""


class FrameServer:
    """Server on a socket that serves each connection by its behaviour, in its own thread."""

    def __init__(self, path: Path, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
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
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, EOFError):  # the client has disconnected
            self._behaviour(Peer(sock))
        with self._lock:
            self._open.discard(sock)
            sock.close()
