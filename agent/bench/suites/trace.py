"""Latency of a change by hop: cause, C core, eventfd, Trio, step(), encoding, asyncio, socket, client.

agent.bench.traced_agent reads the clock six times along the path of a change. The first hop begins before
the system call that is the cause; the last ends when the client's library delivers the message.
"""

import contextlib
import json
from pathlib import Path
from typing import Final

from agent.bench.file_trees import temporary_directory, write_sysfs
from agent.bench.processes import (
    DRIVER,
    HEALTH_METHOD,
    ChildProcess,
    JsonLine,
    Subscriber,
    driver_socket,
    sleep_past_coalescing,
    start_module,
    start_subscriber,
)
from agent.bench.result import ResultTable, SuiteOutcome, row_from_samples, seconds_from_ns
from agent.bench.run_size import RunSize
from agent.bench.suites.detect import SHRUNK, fixture_pool

PERIOD_MS: Final = 10
HOPS: Final = (
    ("rung", "cause to eventfd: the next pass, reading, comparing"),
    ("woken", "eventfd to Trio: a thread wakes"),
    ("read", "snapshot copied and decoded"),
    ("decided", "step(), and the check for changes"),
    ("taken", "Trio to asyncio: a thread wakes"),
    ("encoded", "encoding in C"),
    ("client", "socket to client: two processes, grpcio's threads"),
)


def run(run_size: RunSize) -> SuiteOutcome:
    """Measure the hops from a changed file (a hugepage pool on tmpfs) to a subscriber."""
    outcome = SuiteOutcome()
    with temporary_directory() as directory, contextlib.ExitStack() as stack:
        write_sysfs(directory / "sys")
        flags = {
            "--period": f"{PERIOD_MS}ms",
            "--sysfs-root": str(directory / "sys"),
            "--cgroupfs-root": str(directory / "none"),
            "--runtime-dir": str(directory / "run"),
            "--driver": [DRIVER],
        }
        agent = stack.enter_context(start_module("agent.bench.traced_agent", json.dumps(flags)))
        client = stack.enter_context(start_subscriber(driver_socket(directory), HEALTH_METHOD, SHRUNK))
        client.wait(lambda line: "found" in line and not line["found"])
        outcome.tables.append(_measure(run_size, directory, agent, client))
    return outcome


def _measure(run_size: RunSize, directory: Path, agent: ChildProcess, client: Subscriber) -> ResultTable:
    change = fixture_pool(directory / "sys")
    hops: dict[str, list[int]] = {key: [] for key, _ in HOPS}
    totals: list[int] = []
    for round_index in range(-(-run_size.causes // 2)):  # each takes a second to clear
        if round_index:
            change(0)
            client.wait(lambda line: not line["found"])
        sleep_past_coalescing()
        agent.discard_lines()
        start_ns = change(-1)
        end_ns = int(client.wait(lambda line: bool(line["found"]))["t_ns"])
        stamps = agent.wait() | {"client": end_ns}
        for key, duration_ns in hop_times(stamps, start_ns).items():
            hops[key].append(duration_ns)
        totals.append(end_ns - start_ns)
    rows = [row_from_samples(f"trace.{key}", label, seconds_from_ns(hops[key]), "s") for key, label in HOPS]
    rows.append(row_from_samples("trace.all", "total", seconds_from_ns(totals), "s"))
    notes = (
        f"the first hop includes 0 to {PERIOD_MS} ms of waiting for the next pass",
        f"one subscriber, {client.library}; 3 devices",
    )
    return ResultTable("a pool shrinks, files on tmpfs", tuple(rows), notes=notes)


def hop_times(stamps: JsonLine, start_ns: int) -> dict[str, int]:
    """Return the duration of each hop [ns] from the times when hops ended and when the cause began."""
    duration_ns = {}
    before = start_ns
    for key, _ in HOPS:
        duration_ns[key] = stamps[key] - before
        before = stamps[key]
    return duration_ns
