"""From ``publish()`` to the last subscriber's receipt: the agent's servers, and clients of a unix socket.

Each kind of client has a process, and the servers that publish to it have another. grpcio's clients have a
thread each, and these share an interpreter lock: with many of them it is they who take the time. So there are
others, which only read frames, all of them in one thread: what they wait for is the server. The floor is one
send(2) of as many bytes to each of as many bare sockets, which such a thread reads, too.
"""

import contextlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from agent.bench.effort import Effort
from agent.bench.latency import paired_rows
from agent.bench.processes import DRIVER, HEALTH_METHOD, Child, child
from agent.bench.result import Outcome, Table
from agent.bench.trees import scratch

SUBSCRIBERS: Final = (1, 8, 64)
DEVICES: Final = 128
PAUSE_S: Final = 0.002  # between two publications: the last one's threads have gone to sleep
FRAMES: Final = "frames: clients that only read HTTP/2 frames, all in one thread"
FLOOR: Final = "floor: one send(2) to each of as many bare sockets"


class Way(NamedTuple):
    """One kind of client, and who publishes to it."""

    key: str
    label: str
    word: str
    """What the publisher is told, so that it says something to them."""
    publisher: Child
    crowd: Child
    size: int
    """Bytes of what is said."""


def run(effort: Effort) -> Outcome:
    """1, 8 and 64 subscribers, 128 devices."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        ways = []
        if importlib.util.find_spec("grpc"):
            label = f"grpcio {importlib.metadata.version('grpcio')}: clients with a thread each"
            ways.append(stack.enter_context(_way("server", label, "grpcio")))
        else:
            outcome.skipped.append("publish: grpcio is not installed")
        ways.append(stack.enter_context(_way("frames", FRAMES, "frames")))
        ways.append(stack.enter_context(_way("floor", FLOOR, "bare")))
        for number in SUBSCRIBERS:
            for way in ways:
                way.crowd.tell(f"{number}")
            for way in ways:
                way.crowd.wait(lambda line: "subscribers" in line)
            outcome.tables.append(_measure(effort, number, ways))
    return outcome


@contextlib.contextmanager
def _way(key: str, label: str, kind: str) -> Iterator[Way]:
    """A kind of :mod:`agent.bench.crowd`."""
    with scratch() as directory, child("agent.bench.publisher", directory, DEVICES) as publisher:
        size = publisher.wait(lambda line: "ready" in line)["size"]
        if kind == "bare":
            where, what, word = directory / "bare.sock", size, "bare"
        else:
            where, what, word = directory / "drivers" / f"{DRIVER}.sock", HEALTH_METHOD, "publish"
        with child("agent.bench.crowd", where, kind, what) as crowd:
            yield Way(key, label, word, publisher, crowd, size)


def _measure(effort: Effort, number: int, ways: Sequence[Way]) -> Table:
    taken: dict[str, list[int]] = {way.key: [] for way in ways}
    for _ in range(effort.publications):
        for way in ways:
            time.sleep(PAUSE_S)
            way.publisher.tell(way.word)
            start_ns = way.publisher.wait()["t_ns"]
            taken[way.key].append(way.crowd.wait()["t_ns"] - start_ns)
    rows = paired_rows(f"publish.{number}", {way.key: way.label for way in ways}, dict(taken))
    notes = (f"{DEVICES} devices, {ways[0].size} bytes, encoded once for all",)
    section = "from publish(), through the I/O thread, to the last receipt"
    return Table(f"{number} subscriber{'s' if number > 1 else ''}", rows, FLOOR, notes, section)
