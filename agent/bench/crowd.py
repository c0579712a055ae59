"""``python -m agent.bench.crowd SOCKET METHOD``: many subscribers in one process, each with a connection.

For each line on standard input, a number, there are as many, and it says so in a line of JSON when each has
got its first message. From then on a line for each round: when the last of them had got its next message
(CLOCK_MONOTONIC, ns). With grpcio; or, with a METHOD that is a number, as bare sockets of which each has a
message when it has read so many bytes: the floor.
"""

import importlib
import json
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable


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


def bare(path: str, size: int, rounds: Rounds) -> Callable[[], None]:
    """What adds a socket; one thread reads from all of them. To be connected counts as the first message."""
    selector = selectors.EpollSelector()
    left: dict[socket.socket, int] = {}

    def read() -> None:
        while True:
            for key, _ in selector.select(None if left else 0.01):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                left[connection] -= len(connection.recv(min(left[connection], 1 << 16)))
                if not left[connection]:
                    left[connection] = size
                    rounds.got()

    def add() -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        left[connection] = size
        selector.register(connection, selectors.EVENT_READ)
        rounds.got()

    threading.Thread(target=read, daemon=True).start()
    return add


def main(path: str, method: str) -> None:
    """Until standard input ends."""
    rounds = Rounds()
    add = bare(path, int(method), rounds) if method.isdecimal() else grpcio(path, method, rounds)
    there = 0
    for line in sys.stdin:
        rounds.begin(int(line))
        for _ in range(there, int(line)):
            add()
        there = int(line)


if __name__ == "__main__":
    main(*sys.argv[1:3])
