"""``python -m agent.bench.publisher DIRECTORY DEVICES``: the agent's servers without what is behind them.

For each line on standard input it says something new, and prints when it began (CLOCK_MONOTONIC, ns):
``publish``: a report, to whoever subscribes to the driver's socket, through the thread and the sockets of the
agent. ``bare``: bytes of the same number, one send(2) to each connection on ``bare.sock``; the floor.
"""

import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Final

from agent.app.daemon import SWITCH_INTERVAL_S
from agent.bench.processes import DRIVER
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.serve.servers import Servers, encode_devices
from agent.system.threads.latest import Latest
from agent.system.threads.loop_thread import IoThread
from agent.version import VERSION

WALL_S: Final = 1.7e9


class Bare:
    """A socket that says to everybody what it is told to."""

    def __init__(self, path: Path) -> None:
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._connections.append(self._listener.accept()[0])

    def say(self, data: bytes) -> None:
        """To everybody who is connected."""
        for connection in self._connections:
            connection.sendall(data)


def main(directory: Path, devices: int) -> None:
    """Until standard input ends."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    latest = Latest[Report]()
    servers = Servers(latest, runtime_dir=directory, drivers=[DRIVER], version=VERSION)
    io = IoThread(servers.run, on_failure=lambda error: print(f"publisher: {error}", file=sys.stderr))
    io.start()
    bare = Bare(directory / "bare.sock")
    data = b"".join(encode_devices(report(devices, 0).devices))
    latest.publish(report(devices, 0))
    _say(ready=True, size=len(data))
    for number, line in enumerate(sys.stdin, 1):
        news = report(devices, number)
        t_ns = time.monotonic_ns()
        if line == "publish\n":
            latest.publish(news)
        else:
            bare.say(data)
        _say(t_ns=t_ns)
    io.stop()


def report(devices: int, number: int) -> Report:
    """So many devices; each was read again since the last number."""
    at = Instant(number * NS, WALL_S + number)
    healths = tuple(
        DeviceHealth(
            pool="node-a.example.com",
            device=f"gpu-{one}",
            kind="gpu",
            health=Health.HEALTHY,
            severity=Severity.OK,
            message="",
            since=at,
            verified=at,
            timeout_s=30,
        )
        for one in range(devices)
    )
    return Report(node="node-a.example.com", at=at, devices=healths)


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
