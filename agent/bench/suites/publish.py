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
from pathlib import Path
from typing import Final, NamedTuple

from agent.bench.effort import Effort
from agent.bench.latency import paired_rows
from agent.bench.processes import DRIVER, HEALTH_METHOD, Child, child
from agent.bench.result import Outcome, Table
from agent.bench.trees import scratch

SUBSCRIBERS: Final = (1, 8, 64)
DEVICES: Final = 128
PAUSE_S: Final = 0.002  # between two publications: the last one's threads have gone to sleep


class Kind(NamedTuple):
    """One kind of client."""

    key: str
    crowd: str
    """What :mod:`agent.bench.crowd` calls it."""
    label: str


FRAMES: Final = Kind("frames", "frames", "frames: clients that only read HTTP/2 frames, all in one thread")
FLOOR: Final = Kind("floor", "bare", "floor: one send(2) to each of as many bare sockets")


class Way(NamedTuple):
    """The clients of one kind, and who publishes to them."""

    kind: Kind
    publisher: Child
    crowd: Child
    size: int
    """Bytes of what is said."""


def run(effort: Effort) -> Outcome:
    """1, 8 and 64 subscribers, 128 devices."""
    outcome = Outcome()
    kinds = [*_grpcio(outcome), FRAMES, FLOOR]
    with contextlib.ExitStack() as stack:
        directories = [stack.enter_context(scratch()) for _ in kinds]
        publishers = [
            stack.enter_context(child("agent.bench.publisher", one, DEVICES)) for one in directories
        ]
        ways = [_way(stack, *one) for one in zip(kinds, directories, publishers, strict=True)]
        for number in SUBSCRIBERS:
            for way in ways:
                way.crowd.tell(f"{number}")
            for way in ways:
                way.crowd.wait(lambda line: "subscribers" in line)
            outcome.tables.append(_measure(effort, number, ways))
    return outcome


def _grpcio(outcome: Outcome) -> Iterator[Kind]:
    """If it is there."""
    if importlib.util.find_spec("grpc") is None:
        outcome.skipped.append("publish: grpcio is not installed")
        return
    version = importlib.metadata.version("grpcio")
    yield Kind("server", "grpcio", f"grpcio {version}: clients with a thread each")


def _way(stack: contextlib.ExitStack, kind: Kind, directory: Path, publisher: Child) -> Way:
    """With nobody in the crowd yet."""
    size = publisher.wait(lambda line: "ready" in line)["size"]
    socket = directory / ("bare.sock" if kind is FLOOR else f"drivers/{DRIVER}.sock")
    what = size if kind is FLOOR else HEALTH_METHOD
    crowd = stack.enter_context(child("agent.bench.crowd", socket, kind.crowd, what))
    return Way(kind, publisher, crowd, size)


def _measure(effort: Effort, number: int, ways: Sequence[Way]) -> Table:
    taken: dict[str, list[int]] = {way.kind.key: [] for way in ways}
    for _ in range(effort.publications):
        for way in ways:
            time.sleep(PAUSE_S)
            way.publisher.tell("bare" if way.kind is FLOOR else "publish")
            start_ns = way.publisher.wait()["t_ns"]
            taken[way.kind.key].append(way.crowd.wait()["t_ns"] - start_ns)
    labels = {way.kind.key: way.kind.label for way in ways}
    rows = paired_rows(f"publish.{number}", labels, dict(taken))
    notes = (f"{DEVICES} devices, {ways[0].size} bytes, encoded once for all",)
    section = "from publish(), through the I/O thread, to the last receipt"
    return Table(f"{number} subscriber{'s' if number > 1 else ''}", rows, FLOOR.label, notes, section)
