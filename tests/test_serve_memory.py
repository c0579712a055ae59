"""Memory and descriptors of a whole process whose clients do not read, or do nothing."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from agents import Agent, short_tmp, without_stalls
from http_client import connect
from wire.raw import DATA, RawClient
from wire.serving import DRIVER, eventually

from agent.serve.grpc.hardened import UNSENT_LIMIT

__all__ = ["short_tmp"]

WATCH = "/drahealth.v1.Agent/Watch"
WATCH_TAINTS = "/drahealth.v1.DriverLink/WatchTaints"
DEVICES = 1000
UNKNOWN = 0
"""Health.UNKNOWN of drahealth.v1."""
SERVER = f"""
import sys
from pathlib import Path
from agent.native.process import use_one_heap_arena
from wire.serving import Serving, at, device

use_one_heap_arena()  # as the agent does; other arenas keep up to 7 MiB of free memory
devices = [device(f"device-{{number}}", message="x" * 2000) for number in range({DEVICES})]
with Serving(Path(sys.argv[1])) as agent_server:
    for second, line in enumerate(sys.stdin, 2):
        agent_server.publish(*(one._replace(verified=at(second)) for one in devices))
        print(second, flush=True)
"""
"""Program that publishes a report of which all devices changed, for each line that it reads."""
LINK_SERVER = """
import sys
from pathlib import Path
from agent.model.claim import DeviceRef
from agent.model.health import Effect, Taint, Taints
from wire.link import LinkServer

refs = [DeviceRef("d", "p" * 253, f"{number:063d}") for number in range(4096)]
with LinkServer(Path(sys.argv[1])) as link_server:
    for second, line in enumerate(sys.stdin, 2):
        taint = Taint(f"{'d' * 63}/{'n' * 63}", "v" * 63, Effect.NO_SCHEDULE, second)
        link_server.handler.newest.publish(Taints(dict.fromkeys(refs, (taint,))))
        print(second, flush=True)
"""
"""Program that publishes taints of 4,096 devices with long names for each line that it reads."""


class ServerProcess:
    """Process with the agent's servers, and its memory."""

    def __init__(self, directory: Path, program: str = SERVER) -> None:
        self.agent_socket = directory / "agent.sock"
        self.driver_socket = directory / "drivers" / f"{DRIVER}.sock"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    def publish(self) -> None:
        """Publish a report, or taints, in which all devices changed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline()

    def rss_bytes(self) -> int:
        """Return the resident memory of the process [B]."""
        return int(psutil.Process(self._process.pid).memory_info().rss)


def test_stalled_readers_of_a_thousand_devices_share_one_limit_of_memory(tmp_path: Path) -> None:
    """Each reader stopped at another report of 2 MiB; 40 of them would hold 80 MiB."""
    with ServerProcess(tmp_path) as server, ExitStack() as clients:
        for _ in range(3):
            server.publish()
        with RawClient(server.agent_socket) as client:
            client.call(path=WATCH)
            client.next_headers(1)
        before = server.rss_bytes()
        for _ in range(40):
            client = clients.enter_context(RawClient(server.agent_socket, window=0))
            client.call(path=WATCH)
            client.next_headers(1)
            server.publish()
        raw_client = clients.enter_context(RawClient(server.agent_socket, window=0))
        for stream in range(1, 80, 2):
            raw_client.call(stream, path=WATCH)
            raw_client.next_headers(stream)
            server.publish()
        assert server.rss_bytes() - before < 3 * UNSENT_LIMIT  # these bytes, and the report in progress


def test_stalled_taint_streams_share_one_message(tmp_path: Path) -> None:
    """The message of 2 MiB would be held 128 times."""
    with ServerProcess(tmp_path, LINK_SERVER) as server, ExitStack() as clients:
        server.publish()
        with RawClient(server.driver_socket, window=1 << 24) as client:
            client.call(path=WATCH_TAINTS)
            client.next_of(DATA, 1)
        before = server.rss_bytes()
        for _ in range(2):
            stalled = clients.enter_context(RawClient(server.driver_socket, window=0))
            for stream in range(1, 129, 2):
                stalled.call(stream, path=WATCH_TAINTS)
                stalled.next_headers(stream)
        with RawClient(server.driver_socket, window=1 << 24) as client:
            client.call(path=WATCH_TAINTS)
            client.next_of(DATA, 1)  # the streams before have got the message, too
        assert server.rss_bytes() - before < UNSENT_LIMIT


@contextmanager
def own_descriptors(number: int) -> Iterator[None]:
    """Let this process open so many descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < number:
        pytest.skip(f"this process may open {limits[1]} files, and the test needs {number}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(number, limits[0]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def open_connection(path: Path, clients: ExitStack) -> bool:
    """Open one more connection; return False if the queue of the listening socket is full."""
    try:
        clients.enter_context(connect(path))
    except BlockingIOError:
        return False
    return True


def receives_report(agent: Agent) -> bool:
    """Return whether a new client gets a report; the agent refuses it while it closes many connections."""
    with agent.watch_reports() as watcher:
        try:
            watcher.next()
        except grpc.RpcError:
            return False
    return True


def test_idle_connections_at_the_descriptor_limit_make_no_device_unknown(short_tmp: Path) -> None:
    """Half of the descriptors are a reserve for the agent's sources."""
    wrapper = ("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh")
    flags = ("--period", "100ms")
    config = '[stream]\nheartbeat = "1s"'
    with (
        own_descriptors(2000),
        Agent(short_tmp, *flags, config=config, wrapper=wrapper) as agent,
        ExitStack() as clients,
    ):
        for number in range(1120):
            path = (agent.health_socket, agent.agent_socket)[number % 2]
            eventually(partial(open_connection, path, clients), "the server accepts")
        eventually(lambda: "connections" in agent.log, "the limit is logged")
        eventually(partial(receives_report, agent), "connections that wait to be accepted refuse no other")
        with agent.watch_reports() as watcher:
            for _ in range(4):  # reports of heartbeats, each after ten passes
                message = watcher.next()  # of this machine: another test may set a CPU offline
                assert message.devices
                assert UNKNOWN not in {device.health for device in without_stalls(message)}
        assert psutil.Process(agent.pid).num_fds() < 700
        of_devices = [line for line in agent.log.splitlines() if "Unknown" in line]
        assert [line for line in of_devices if "source.stalled" not in line] == []
