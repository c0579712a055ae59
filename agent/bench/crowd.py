"""``python -m agent.bench.crowd SOCKET KIND WHAT``: many subscribers in one process, each with a connection.

For each line on standard input, a number, there are as many, and it says so in a line of JSON when each has
got its first message. From then on a line for each round: when the last of them had got its next message
(CLOCK_MONOTONIC, ns). Three kinds: ``grpcio METHOD``, a thread for each; ``frames METHOD``, one thread that
reads HTTP/2 frames from all of them; ``bare SIZE``, the same thread, and sockets of which each has a message
when it has read so many bytes: the floor.
"""

import importlib
import json
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from agent.bench.frames import Messages, subscription

Receive = Callable[[bytes], tuple[int, bytes]]
"""Messages that are whole with these bytes, and what is to be sent in answer."""


class Rounds:
    """Counts messages until everybody has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 0
        self._left = 0
        self._done: Callable[[int], None] = _say_time

    def begin(self, size: int) -> None:
        """So many subscribers; those that have come since wait for their first message now."""
        with self._lock:
            self._left, self._size = size - self._size, size
            self._done = lambda _: _say(subscribers=size)

    def got(self) -> None:
        """A subscriber has a message, now."""
        t_ns = time.monotonic_ns()
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._done(t_ns)
                self._done, self._left = _say_time, self._size


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def _say_time(t_ns: int) -> None:
    _say(t_ns=t_ns)


def grpcio(path: str, method: str, rounds: Rounds) -> Callable[[], None]:
    """What adds a subscriber: a channel, and a thread that reads from it."""
    grpc = importlib.import_module("grpc")
    options = [("grpc.use_local_subchannel_pool", 1)]  # else all channels share one connection

    def follow() -> None:
        channel = grpc.insecure_channel(f"unix:{path}", options)
        for _ in channel.unary_stream(method)(b"", wait_for_ready=True):
            rounds.got()

    return lambda: threading.Thread(target=follow, daemon=True).start()


def frames(path: str, method: str, rounds: Rounds) -> Callable[[], None]:
    """What adds a subscriber that knows of HTTP/2 what it needs."""
    asks = subscription(method)

    def begin(connection: socket.socket) -> Receive:
        connection.sendall(asks)
        return Messages().receive

    return _polled(path, begin, rounds)


def bare(path: str, size: str, rounds: Rounds) -> Callable[[], None]:
    """What adds a socket. To be connected counts as the first message."""

    def begin(_: socket.socket) -> Receive:
        rounds.got()
        return Bytes(int(size)).receive

    return _polled(path, begin, rounds)


class Bytes:
    """So many of them are a message."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._read = 0

    def receive(self, data: bytes) -> tuple[int, bytes]:
        """See :data:`Receive`."""
        number, self._read = divmod(self._read + len(data), self._size)
        return number, b""


def _polled(path: str, begin: Callable[[socket.socket], Receive], rounds: Rounds) -> Callable[[], None]:
    """What adds a connection; one thread reads from all of them."""
    selector = selectors.EpollSelector()

    def read() -> None:
        while True:
            for key, _ in selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                data = connection.recv(1 << 16)
                if not data:
                    raise ConnectionError(f"{path}: hung up")
                number, answer = key.data(data)
                for _ in range(number):
                    rounds.got()
                if answer:
                    connection.sendall(answer)

    def add() -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        selector.register(connection, selectors.EVENT_READ, begin(connection))

    threading.Thread(target=read, daemon=True).start()
    return add


KINDS: Final = {"grpcio": grpcio, "frames": frames, "bare": bare}


def main(path: str, kind: str, what: str) -> None:
    """Until standard input ends."""
    rounds = Rounds()
    add = KINDS[kind](path, what, rounds)
    there = 0
    for line in sys.stdin:
        rounds.begin(int(line))
        for _ in range(there, int(line)):
            add()
        there = int(line)


if __name__ == "__main__":
    main(*sys.argv[1:4])
