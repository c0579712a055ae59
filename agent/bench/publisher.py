"""``python -m agent.bench.publisher DIRECTORY DEVICES``: the agent's gRPC servers, fed with made-up reports.

For each line on standard input, the process publishes once and prints the start time (CLOCK_MONOTONIC, ns).
The line ``publish`` sends a new report to the subscribers of the driver's socket, through the agent's I/O
thread. The line ``bare`` sends the same number of bytes, one send(2) to each connection of ``bare.sock``: the
lower bound.
"""

import contextlib
import json
import socket
import sys
import time
from pathlib import Path
from typing import Final

from agent.app.daemon import SWITCH_INTERVAL_S
from agent.bench.processes import DRIVER
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.serve.grpc_servers import GrpcServers, encode_device_health
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import AsyncioThread
from agent.system.timing import read_clocks
from agent.version import VERSION

WALL_S: Final = 1.7e9


class FixedBytesServer:
    """Socket server that sends the same bytes to all connections."""

    def __init__(self, path: Path) -> None:
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._listener.setblocking(False)

    def accept(self) -> None:
        """Accept all clients whose ``connect()`` has returned."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._connections.append(self._listener.accept()[0])

    def send(self, data: bytes) -> None:
        """Send ``data`` to all accepted clients."""
        for connection in self._connections:
            connection.sendall(data)


def main(directory: Path, devices: int) -> None:
    """Publish a report of ``devices`` devices for each line on standard input, until it ends."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    latest = LatestValue[Report]()
    servers = GrpcServers(latest, runtime_dir=directory, drivers=[DRIVER], version=VERSION)
    io = AsyncioThread(servers.run, on_failure=lambda error: print(f"publisher: {error}", file=sys.stderr))
    io.start()
    bare = FixedBytesServer(directory / "bare.sock")
    data = b"".join(encode_device_health(make_report(devices, 0).devices))
    latest.publish(make_report(devices, 0))
    _print_json(ready=True, size=len(data))
    for number, line in enumerate(sys.stdin, 1):
        new_report = make_report(devices, number)
        bare.accept()
        t_ns = time.monotonic_ns()
        if line == "publish\n":
            latest.publish(new_report)
        else:
            bare.send(data)
        _print_json(t_ns=t_ns)
    io.stop()


def make_report(devices: int, number: int) -> Report:
    """Return a report of ``devices`` devices whose timestamps grow with ``number``, evaluated now."""
    at = Instant(number * NS, WALL_S + number)
    healths = tuple(
        DeviceHealth(
            pool="node-a.example.com",
            device=f"gpu-{index}",
            kind="gpu",
            health=Health.HEALTHY,
            severity=Severity.OK,
            message="",
            since=at,
            verified=at,
            timeout_s=30,
        )
        for index in range(devices)
    )
    return Report(node="node-a.example.com", at=read_clocks(), devices=healths)


def _print_json(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
