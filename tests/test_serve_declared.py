"""Devices that a driver's socket sends before and after the driver declares devices, as a kubelet sees
them.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from wire.google import Watcher, names, watch_health
from wire.serving import DRIVER, Serving, current_report, device

from agent.model.health import DeviceHealth, Health

OTHER = "other.drahealth.example"
HOSTS = "cpu-node0"


@pytest.fixture
def agent_server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, OTHER) as agent_server:
        yield agent_server


@pytest.fixture
def kubelet(agent_server: Serving) -> Iterator[Watcher]:
    with watch_health(agent_server.health) as watcher:
        yield watcher


def declared_device(name: str, driver: str = DRIVER, **changes: Any) -> DeviceHealth:
    return device(name, driver=driver, **changes)


def publish(agent_server: Serving, *devices: DeviceHealth, declaring: tuple[str, ...] = (DRIVER,)) -> None:
    """Publish a report of the host's device and of these, verified at the newest time of all."""
    newest = max([device.verified for device in devices], key=lambda at: at.mono_ns)
    hosts = device(HOSTS)._replace(verified=newest)
    agent_server.latest.publish(replace(current_report([hosts, *devices]), declaring=declaring))


def test_stream_switches_from_host_to_declared_devices(agent_server: Serving, kubelet: Watcher) -> None:
    agent_server.publish(device(HOSTS))
    assert names(kubelet.next()) == [HOSTS]
    for second in (2, 3):
        publish(agent_server, declared_device("set-0", verified=second))
        assert names(kubelet.next()) == ["set-0"]


def test_declared_device_named_like_host_device_is_sent_at_once(
    agent_server: Serving, kubelet: Watcher
) -> None:
    agent_server.publish(device(HOSTS))
    assert [entry.health for entry in kubelet.next().devices] == [1]
    publish(agent_server, declared_device(HOSTS, health=Health.UNHEALTHY, message="cpu.offline: CPU 1"))
    assert [entry.health for entry in kubelet.next().devices] == [2]


def test_each_socket_sends_devices_of_its_driver_or_of_the_host(
    agent_server: Serving, kubelet: Watcher
) -> None:
    [path] = agent_server.others
    with watch_health(path) as other:
        publish(agent_server, declared_device("set-0"))
        assert names(kubelet.next()) == ["set-0"]
        assert names(other.next()) == [HOSTS]
        publish(
            agent_server,
            declared_device("set-0", verified=2),
            declared_device("set-0", OTHER, verified=2),
            declaring=(DRIVER, OTHER),
        )
        assert names(other.next()) == ["set-0"]


def test_same_name_in_two_pools_is_sent_as_two_devices(agent_server: Serving, kubelet: Watcher) -> None:
    publish(
        agent_server,
        declared_device("set-0", pool="a"),
        declared_device("set-0", pool="b", health=Health.UNHEALTHY, message="m"),
    )
    received = [(entry.device.pool_name, entry.health) for entry in kubelet.next().devices]
    assert received == [("a", 1), ("b", 2)]


READER = """
import sys
from wire.google import watch_health
with watch_health(sys.argv[1]) as watcher:
    while True:
        print(watcher.next(600).devices[-1].message, flush=True)
"""


@contextmanager
def reader(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a client in another process."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def large_list(number: int, driver: str) -> list[DeviceHealth]:
    """Return devices of about 60 kB; the message of the last has the number."""
    devices = [declared_device(f"set-{n}", driver, verified=number, message="x" * 200) for n in range(250)]
    return [*devices, declared_device("last", driver, verified=number, message=f"{number}")]


def test_stopped_reader_of_one_socket_delays_no_other_socket(agent_server: Serving) -> None:
    total = 200
    with reader(agent_server.others[0]) as slow, watch_health(agent_server.health) as fast:
        assert slow.stdout
        publish(agent_server, *large_list(1, DRIVER), *large_list(1, OTHER), declaring=(DRIVER, OTHER))
        assert slow.stdout.readline() == "1\n"
        slow.send_signal(signal.SIGSTOP)
        for number in range(2, total + 1):
            publish(
                agent_server,
                *large_list(number, DRIVER),
                *large_list(number, OTHER),
                declaring=(DRIVER, OTHER),
            )
            while fast.next().devices[-1].message != f"{number}":
                pass
        slow.send_signal(signal.SIGCONT)
        received: list[int] = []
        while not received or received[-1] < total:
            received.append(int(slow.stdout.readline()))
    assert received == sorted(received)
    assert len(received) < total / 2, "the slow reader skips lists"
