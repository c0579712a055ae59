"""Exact counts and times of the publication of a report, from ``publish()`` to the clients.

Publisher and clients are processes of the suite ``publish``. A client only reads frames, so that all streams
are lent to the publishing thread. Its system calls are counted with strace; opcodes of Python are those of
the call of ``LatestValue.publish()``.
"""

import contextlib
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Final

from agent.bench.file_trees import temporary_directory
from agent.bench.idle_counts import count_opcodes, run_python
from agent.bench.processes import DRIVER, HEALTH_METHOD, ChildProcess, start_module, trace_threads
from agent.bench.publisher import make_report
from agent.bench.result import MeasurementError
from agent.bench.suites.report_path import BARE_SOCKETS, FRAMES, open_clients, publish_in_turn
from agent.bench.timing import ContenderSamples, MedianInterval, paired_ratio
from agent.model.report import Report
from agent.serve.grpc_servers import GrpcServers
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import AsyncioThread

PUBLICATION_CLIENTS: Final[Mapping[str, int]] = {"publish_1": 1, "publish_64": 64}
"""Number of clients in each workload."""
DEVICES: Final = 8
"""Number of devices of each report whose publication is counted."""
PUBLICATIONS: Final = 9
"""Number of publications; the counts are their medians."""
RATIO_PUBLICATIONS: Final = 200
"""Number of publications whose times are compared with those of sends to bare sockets."""
ATTACH_S: Final = 10.0
"""Longest time that strace has to attach to the publisher [s]."""
PAUSE_S: Final = 0.05
"""Pause before a publication, in which the event loop lends all streams [s]."""
_CALL: Final = re.compile(r"^(sendmsg|sendto|epoll_wait|recvfrom)\(")
_BEGIN, _END = 'read(0, "publish', "write(1, "
"""Begin of the first, and of the last system call of a publication in the publishing thread."""


def count_publication_calls(name: str) -> Mapping[str, float]:
    """Count the system calls of both threads for one publication, by thread and call.

    The publishing thread (core) sends with ``sendmsg`` to each client, and wakes the I/O thread with
    ``sendto``. The clients answer nothing, so that the I/O thread (io) only wakes.

    Raises:
        MeasurementError: strace ended, or the clients did not receive the reports.
    """
    with contextlib.ExitStack() as stack:
        clients = open_clients(stack, FRAMES, DEVICES)
        clients.subscribe(PUBLICATION_CLIENTS[name])
        pid = clients.publisher.pid
        tracer = stack.enter_context(trace_threads(pid))
        deadline = time.monotonic() + ATTACH_S
        while pid not in tracer.read() and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        for _ in range(PUBLICATIONS):
            time.sleep(PAUSE_S)
            tracer.require_running()
            clients.publish()
        time.sleep(PAUSE_S)
        by_thread = tracer.read()
    core = _calls_of_publications(by_thread.pop(pid, ""))
    counts = {f"core_{call}": statistics.median(one[call] for one in core) for call in ("sendmsg", "sendto")}
    io = Counter(_calls(next((text for text in by_thread.values() if "recvfrom(" in text), "")))
    return counts | {f"io_{call}": round(io[call] / len(core)) for call in sorted(io)}


def _calls(text: str) -> list[str]:
    return [match[1] for line in text.splitlines() if (match := _CALL.match(line))]


def _calls_of_publications(text: str) -> list[Counter[str]]:
    """Return the system calls of each publication in the strace output of the publishing thread."""
    counts: list[Counter[str]] = []
    current: list[str] | None = None
    for line in text.splitlines():
        if line.startswith(_BEGIN):
            current = []
        elif current is not None and line.startswith(_END):
            counts.append(Counter(_calls("\n".join(current))))
            current = None
        elif current is not None:
            current.append(line)
    if not counts:
        raise MeasurementError("strace: shows no publication")
    return counts


def count_publication_opcodes(name: str) -> int:
    """Return the number of Python opcodes that the publishing thread executes for one publication."""
    clients = PUBLICATION_CLIENTS[name]
    program = f"from agent.bench.publication_counts import print_publication_opcodes as p; p({clients})"
    return int(run_python(["-c", program]))


def print_publication_opcodes(subscribers: int) -> None:
    """Count the opcodes of publications to ``subscribers`` clients in this process; print their median."""
    with temporary_directory() as directory, contextlib.ExitStack() as stack:
        latest = LatestValue[Report]()
        servers = GrpcServers(latest, runtime_dir=directory, drivers=[DRIVER], version="")
        io = AsyncioThread(servers.run, on_failure=lambda error: print(error, file=sys.stderr))
        io.start()
        stack.callback(io.stop)
        latest.publish(make_report(DEVICES, 0))
        socket = directory / f"drivers/{DRIVER}.sock"
        crowd: ChildProcess = stack.enter_context(
            start_module("agent.bench.subscribers", socket, FRAMES.crowd, HEALTH_METHOD)
        )
        crowd.send_line(f"{subscribers}")
        crowd.wait(lambda line: "subscribers" in line)
        counts: list[int] = []
        for number in range(1, PUBLICATIONS + 1):
            time.sleep(PAUSE_S)
            report = make_report(DEVICES, number)
            counts.append(count_opcodes(partial(latest.publish, report)))
            crowd.wait()
        print(round(statistics.median(counts)))


def measure_publication_ratio(clients: int) -> MedianInterval:
    """Return the time of a publication to so many clients, in multiples of that to bare sockets."""
    with contextlib.ExitStack() as stack:
        groups = [open_clients(stack, kind) for kind in (FRAMES, BARE_SOCKETS)]
        for group in groups:
            group.subscribe(clients)
        latencies = publish_in_turn(groups, RATIO_PUBLICATIONS)
    frames, bare = (
        ContenderSamples(tuple((float(value),) for value in latencies[group.kind.key]), 1) for group in groups
    )
    return paired_ratio(frames, bare)
