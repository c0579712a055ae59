"""Agent's servers in a thread, and reports for them."""

import errno
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest
from patience import PATIENCE_S

from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.serve.agent_api.service import ClearRequests
from agent.serve.grpc_servers import GrpcServers, encode_device_health
from agent.serve.health.service import HealthListEncoder
from agent.system.files import DirectoryLock
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import AsyncioThread
from agent.system.timing import read_clocks

DRIVER = "test.drahealth.example"


def at(second: int) -> Instant:
    """Return the moment of a second."""
    return Instant(second * NS, 1_700_000_000.0 + second)


LEASE_S: Final = 3600
"""Lease of devices [s]. A new stream gets a Healthy device only within half of it, also on a busy machine."""


def device(name: str = "cpu-node0", *, verified: int = 1, **changes: object) -> DeviceHealth:
    """Return a healthy device, verified in that second, with changes."""
    healthy = DeviceHealth(
        pool="node-a",
        device=name,
        kind="cpu",
        health=Health.HEALTHY,
        severity=Severity.OK,
        message="",
        since=at(1),
        verified=at(verified),
        timeout_s=LEASE_S,
    )
    return healthy._replace(**changes)


def unhealthy(
    name: str = "cpu-node0", message: str = "cpu.offline: CPU 1", *, verified: int = 1
) -> DeviceHealth:
    """Return an unhealthy device."""
    return device(
        name, verified=verified, health=Health.UNHEALTHY, severity=Severity.UNHEALTHY, message=message
    )


def report(devices: Iterable[DeviceHealth] = (), *, second: int = 1) -> Report:
    """Return a report of these devices."""
    return Report(node="node-a", at=at(second), devices=tuple(devices))


def current_report(devices: Iterable[DeviceHealth] = ()) -> Report:
    """Return a report of these devices that was evaluated now, as a new health stream needs it."""
    return replace(report(devices), at=read_clocks())


class ServerThread:
    """Server in its own thread; the end of its context stops it and fails if it failed."""

    thread: AsyncioThread
    failures: list[BaseException]

    def __enter__(self) -> Self:
        self.thread.start(PATIENCE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = self.thread.stop(PATIENCE_S)
        if error is None:
            assert self.failures == []
            assert ended


class Serving(ServerThread):
    """Servers of one driver or more."""

    def __init__(
        self,
        runtime_dir: Path,
        *other_drivers: str,
        clear_requests: ClearRequests | None = None,
        locks: Sequence[DirectoryLock] = (),
        encode_list: HealthListEncoder = encode_device_health,
    ) -> None:
        self.latest: LatestValue[Report] = LatestValue()
        self.failures = []
        drivers = [DRIVER, *other_drivers]
        self.servers = GrpcServers(
            self.latest,
            runtime_dir=runtime_dir,
            drivers=drivers,
            version="9.9.9",
            clear_requests=clear_requests,
            locks=locks,
            encode_list=encode_list,
        )
        self.health, *self.others, self.agent = self.servers.paths
        self.thread = AsyncioThread(self.servers.run, on_failure=self.failures.append)

    def publish(self, *devices: DeviceHealth) -> None:
        """Publish a report of these devices."""
        self.latest.publish(current_report(devices))


def is_served(path: Path) -> bool:
    """Return True if a process listens on the socket; the file exists shortly before."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def eventually(
    condition: Callable[[], bool], event: str | Callable[[], str], timeout_s: float = PATIENCE_S
) -> None:
    """Wait until a condition holds that another thread or process brings about; fail at the timeout.

    Args:
        condition: Returns whether the condition holds.
        event: What is waited for, or a function that describes the state at the timeout.
        timeout_s: Longest wait [s].
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s} s: {event if isinstance(event, str) else event()}")
        time.sleep(0.005)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[OSError]:
    """Let the next call of a method raise ENOMEM; return the raised error in a list."""
    raised, method = list[OSError](), getattr(owner, name)

    def fail(*arguments: object) -> object:
        if not raised:
            raised.append(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
            raise raised[0]
        return method(*arguments)

    monkeypatch.setattr(owner, name, fail)
    return raised


def remove_tree(directory: Path) -> None:
    """Remove a directory of a server, which may create files in it meanwhile."""

    def is_removed() -> bool:
        try:
            shutil.rmtree(directory)
        except OSError:  # a new file
            return False
        return True

    eventually(is_removed, f"{directory} is removed")


def stacks_of_threads(prefix: str, ignored: Collection[threading.Thread]) -> str:
    """Return the names and stacks of this process's threads whose names begin with a text.

    The threads `ignored` are left out: those of earlier tests.
    """
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.name.startswith(prefix) and thread.ident in frames and thread not in ignored
    )


def descriptors() -> set[tuple[str, str]]:
    """Return the open file descriptors of this process with their targets; some of former tests may be
    closing.
    """
    open_files = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile, like the descriptor of this list
            open_files.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return open_files


def connections(path: Path) -> int:
    """Return the number of connections of this socket's server."""
    bound = [line for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(f" {path}")]
    return len(bound) - 1  # it listens on one of them
