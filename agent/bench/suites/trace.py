"""The way of a change, hop by hop: cause, C core, eventfd, Trio, step(), encoding, asyncio, socket, client.

The hops are those of one process that is the agent but for what a change does not pass, and reads the clock
six times on the way. The first hop begins before the system call that is the cause, and the last ends when
the client's library hands over the message.
"""

import contextlib
import json
from pathlib import Path
from typing import Final

from agent.bench.effort import Effort
from agent.bench.latency import pause, seconds
from agent.bench.processes import (
    DRIVER,
    HEALTH_METHOD,
    Child,
    Line,
    Subscriber,
    child,
    health_socket,
    subscriber,
)
from agent.bench.result import Outcome, Table, row_of
from agent.bench.suites.detect import SHRUNK, fixture_pool
from agent.bench.trees import scratch, write_sysfs

PERIOD_MS: Final = 10
HOPS: Final = (
    ("rung", "cause to eventfd: the next pass, reading, comparing"),
    ("woken", "eventfd to Trio: a thread wakes"),
    ("read", "snapshot copied and decoded"),
    ("decided", "step(), and what makes it news"),
    ("taken", "Trio to asyncio: a thread wakes"),
    ("encoded", "encoding in C"),
    ("client", "socket to client: two processes, grpcio's threads"),
)


def run(effort: Effort) -> Outcome:
    """A polled value that changes, on files: no other part of the machine has a say in it."""
    outcome = Outcome()
    with scratch() as directory, contextlib.ExitStack() as stack:
        write_sysfs(directory / "sys")
        flags = {
            "--period": f"{PERIOD_MS}ms",
            "--sysfs-root": str(directory / "sys"),
            "--cgroupfs-root": str(directory / "none"),
            "--runtime-dir": str(directory / "run"),
            "--driver": [DRIVER],
        }
        agent = stack.enter_context(child("agent.bench.traced", json.dumps(flags)))
        client = stack.enter_context(subscriber(health_socket(directory), HEALTH_METHOD, SHRUNK))
        client.wait(lambda line: "found" in line and not line["found"])
        outcome.tables.append(_measure(effort, directory, agent, client))
    return outcome


def _measure(effort: Effort, directory: Path, agent: Child, client: Subscriber) -> Table:
    change = fixture_pool(directory / "sys")
    hops: dict[str, list[int]] = {key: [] for key, _ in HOPS}
    totals: list[int] = []
    for place in range(-(-effort.causes // 2)):  # each takes a second to be over
        if place:
            change(0)
            client.wait(lambda line: not line["found"])
        pause()
        agent.seen()
        start_ns = change(-1)
        end_ns = int(client.wait(lambda line: bool(line["found"]))["t_ns"])
        stamps = agent.wait() | {"client": end_ns}
        for key, taken in hop_times(stamps, start_ns).items():
            hops[key].append(taken)
        totals.append(end_ns - start_ns)
    rows = [row_of(f"trace.{key}", label, seconds(hops[key]), "s") for key, label in HOPS]
    rows.append(row_of("trace.all", "all of it", seconds(totals), "s"))
    notes = (
        f"0 to {PERIOD_MS} ms of the first hop are waiting for the next pass",
        f"one subscriber, {client.library}; 3 devices",
    )
    return Table("a pool shrinks, files on tmpfs", tuple(rows), notes=notes)


def hop_times(stamps: Line, start_ns: int) -> dict[str, int]:
    """How long each hop took [ns]; together they are all of the time from the cause to the client."""
    taken = {}
    before = start_ns
    for key, _ in HOPS:
        taken[key] = stamps[key] - before
        before = stamps[key]
    return taken
