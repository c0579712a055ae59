"""What a driver's socket tells before its driver declares devices and from then on, as a kubelet sees it."""

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
from wire.serving import DRIVER, Serving, device, report

from agent.model.health import DeviceHealth, Health

OTHER = "other.drahealth.example"
HOSTS = "cpu-node0"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, OTHER) as serving:
        yield serving


@pytest.fixture
def kubelet(serving: Serving) -> Iterator[Watcher]:
    with watch_health(serving.health) as watcher:
        yield watcher


def own(name: str, driver: str = DRIVER, **changes: Any) -> DeviceHealth:
    return device(name, driver=driver, **changes)


def publish(serving: Serving, *devices: DeviceHealth, declaring: tuple[str, ...] = (DRIVER,)) -> None:
    """A report of the host's device and of these, at the newest moment of all."""
    newest = max([device.verified for device in devices], key=lambda at: at.mono_ns)
    hosts = device(HOSTS)._replace(verified=newest)
    serving.latest.publish(replace(report([hosts, *devices]), declaring=declaring))


def test_who_begins_to_declare_is_told_of_its_own_on_the_same_stream_and_of_the_host_no_more(
    serving: Serving, kubelet: Watcher
) -> None:
    serving.publish(device(HOSTS))
    assert names(kubelet.next()) == [HOSTS]
    for second in (2, 3):
        publish(serving, own("set-0", verified=second))
        assert names(kubelet.next()) == ["set-0"]


def test_a_declared_device_of_the_same_name_as_the_hosts_is_told_at_once(
    serving: Serving, kubelet: Watcher
) -> None:
    serving.publish(device(HOSTS))
    assert [one.health for one in kubelet.next().devices] == [1]
    publish(serving, own(HOSTS, health=Health.UNHEALTHY, message="cpu.offline: CPU 1"))
    assert [one.health for one in kubelet.next().devices] == [2]


def test_each_socket_tells_of_its_own_driver_and_one_that_declares_nothing_of_the_host(
    serving: Serving, kubelet: Watcher
) -> None:
    [path] = serving.others
    with watch_health(path) as other:
        publish(serving, own("set-0"))
        assert names(kubelet.next()) == ["set-0"]
        assert names(other.next()) == [HOSTS]
        publish(serving, own("set-0", verified=2), own("set-0", OTHER, verified=2), declaring=(DRIVER, OTHER))
        assert names(other.next()) == ["set-0"]


def test_the_same_name_in_two_pools_is_two_devices_to_the_kubelet(serving: Serving, kubelet: Watcher) -> None:
    publish(serving, own("set-0", pool="a"), own("set-0", pool="b", health=Health.UNHEALTHY, message="m"))
    told = [(one.device.pool_name, one.health) for one in kubelet.next().devices]
    assert told == [("a", 1), ("b", 2)]


READER = """
import sys
from wire.google import watch_health
with watch_health(sys.argv[1]) as watcher:
    while True:
        print(watcher.next(60).devices[-1].message, flush=True)
"""


@contextmanager
def reader(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A client in a process of its own."""
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


def heavy(number: int, driver: str) -> list[DeviceHealth]:
    """About 60 kB; the last says their number."""
    devices = [own(f"set-{n}", driver, verified=number, message="x" * 200) for n in range(250)]
    return [*devices, own("last", driver, verified=number, message=f"{number}")]


def test_a_stopped_reader_of_one_socket_holds_up_no_reader_of_another(serving: Serving) -> None:
    total = 200
    with reader(serving.others[0]) as slow, watch_health(serving.health) as fast:
        assert slow.stdout
        publish(serving, *heavy(1, DRIVER), *heavy(1, OTHER), declaring=(DRIVER, OTHER))
        assert slow.stdout.readline() == "1\n"
        slow.send_signal(signal.SIGSTOP)
        for number in range(2, total + 1):
            publish(serving, *heavy(number, DRIVER), *heavy(number, OTHER), declaring=(DRIVER, OTHER))
            while fast.next().devices[-1].message != f"{number}":
                pass
        slow.send_signal(signal.SIGCONT)
        told: list[int] = []
        while not told or told[-1] < total:
            told.append(int(slow.stdout.readline()))
    assert told == sorted(told)
    assert len(told) < total / 2, "it was owed the newest, not the history"
