"""The agent's servers in their thread, and reports to give them."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from patience import PATIENCE_S

from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.serve.servers import Servers
from agent.system.threads.latest import Latest
from agent.system.threads.loop_thread import IoThread

DRIVER = "test.drahealth.example"


def at(second: int) -> Instant:
    """A moment."""
    return Instant(second * NS, 1_700_000_000.0 + second)


def device(name: str = "cpu-node0", *, verified: int = 1, **changes: object) -> DeviceHealth:
    """A healthy device, verified in that second, but for the changes."""
    healthy = DeviceHealth(
        pool="node-a",
        device=name,
        kind="cpu",
        health=Health.HEALTHY,
        severity=Severity.OK,
        message="",
        since=at(1),
        verified=at(verified),
        timeout_s=30,
    )
    return healthy._replace(**changes)


def sick(name: str = "cpu-node0", message: str = "cpu.offline: CPU 1", *, verified: int = 1) -> DeviceHealth:
    """The same device, unhealthy."""
    return device(
        name, verified=verified, health=Health.UNHEALTHY, severity=Severity.UNHEALTHY, message=message
    )


def report(devices: Iterable[DeviceHealth] = (), *, second: int = 1) -> Report:
    """A report of these devices."""
    return Report(node="node-a", at=at(second), devices=tuple(devices))


class InThread:
    """What is served in a thread of its own; leaving stops it, and fails if it did."""

    thread: IoThread
    failures: list[BaseException]

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = self.thread.stop(PATIENCE_S)
        if error is None:
            assert self.failures == []
            assert ended


class Serving(InThread):
    """Servers of one driver or more."""

    def __init__(self, runtime_dir: Path, *more: str) -> None:
        self.latest: Latest[Report] = Latest()
        self.failures = []
        drivers = [DRIVER, *more]
        self.servers = Servers(self.latest, runtime_dir=runtime_dir, drivers=drivers, version="9.9.9")
        self.health, *self.others, self.agent = self.servers.paths
        self.thread = IoThread(self.servers.run, on_failure=self.failures.append)

    def publish(self, *devices: DeviceHealth) -> None:
        """Publishes a report of these devices."""
        self.latest.publish(report(devices))


def eventually(claim: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Waits for what another thread or process brings about; fails if it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def descriptors() -> set[tuple[str, str]]:
    """What this process has open, with what each is of. Of former tests some may be about to be closed."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile, as that of this list is
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def connections(path: Path) -> int:
    """How many connections the server of this socket holds, whoever else has sockets."""
    bound = [line for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(f" {path}")]
    return len(bound) - 1  # it listens on one of them
