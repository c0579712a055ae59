"""From ``publish()`` to the last subscriber's receipt: the agent's servers, and clients of a unix socket.

The server has a process to itself. All clients share another, and there grpcio's threads share an interpreter
lock: with many of them it is they who take the time. The floor is one send(2) of as many bytes to each of as
many bare sockets, which one thread of another process reads.
"""

import importlib.metadata
import importlib.util
import time
from typing import Final

from agent.bench.effort import Effort
from agent.bench.latency import paired_rows
from agent.bench.processes import DRIVER, HEALTH_METHOD, Child, child
from agent.bench.result import Outcome, Table
from agent.bench.trees import scratch

SUBSCRIBERS: Final = (1, 8, 64)
DEVICES: Final = 128
PAUSE_S: Final = 0.002  # between two publications: the last one's threads have gone to sleep


def run(effort: Effort) -> Outcome:
    """1, 8 and 64 subscribers, 128 devices."""
    outcome = Outcome()
    if importlib.util.find_spec("grpc") is None:
        outcome.skipped.append("publish: grpcio is not installed")
        return outcome
    with scratch() as directory, child("agent.bench.publisher", directory, DEVICES) as publisher:
        size = publisher.wait(lambda line: "ready" in line)["size"]
        sockets = (directory / "drivers" / f"{DRIVER}.sock", directory / "bare.sock")
        with (
            child("agent.bench.crowd", sockets[0], HEALTH_METHOD) as clients,
            child("agent.bench.crowd", sockets[1], size) as bare,
        ):
            for number in SUBSCRIBERS:
                for crowd in (clients, bare):
                    crowd.tell(f"{number}")
                for crowd in (clients, bare):
                    crowd.wait(lambda line: "subscribers" in line)
                outcome.tables.append(_measure(effort, number, publisher, clients, bare, size))
    return outcome


def _measure(effort: Effort, number: int, publisher: Child, clients: Child, bare: Child, size: int) -> Table:
    taken: dict[str, list[int]] = {"server": [], "floor": []}
    for _ in range(effort.publications):
        for key, word, crowd in (("server", "publish", clients), ("floor", "bare", bare)):
            time.sleep(PAUSE_S)
            publisher.tell(word)
            start_ns = publisher.wait()["t_ns"]
            taken[key].append(crowd.wait()["t_ns"] - start_ns)
    labels = {
        "server": f"grpcio {importlib.metadata.version('grpcio')}: from publish() through the I/O thread",
        "floor": "floor: one send(2) to each of as many bare sockets",
    }
    plural = "s" if number > 1 else ""
    notes = (f"to the last receipt of {number}; {DEVICES} devices, {size} bytes, encoded once for all",)
    rows = paired_rows(f"publish.{number}", labels, dict(taken))
    return Table(f"{number} subscriber{plural}", rows, labels["floor"], notes)
