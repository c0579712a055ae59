"""agent.serve.sd_notify with a real datagram socket that checks the sender, as systemd does."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from patience import PATIENCE_S

from agent.serve.sd_notify import STATUS_MAX_BYTES, SystemdNotifier

if TYPE_CHECKING:
    from collections.abc import Iterator

# A notifier is used until its process ends, so it has no close().
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

UCRED = struct.Struct("iII")  # pid, uid, gid


class Manager:
    """Service manager: receives datagrams with the sender's credentials."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE_S)

    def next_message(self) -> bytes:
        """Return the next message, which must come from this process."""
        data, ancillary, _, _ = self.socket.recvmsg(8192, socket.CMSG_SPACE(UCRED.size))
        ((level, kind, credentials),) = ancillary
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        assert UCRED.unpack(credentials) == (os.getpid(), os.getuid(), os.getgid())
        return data

    def has_no_message(self) -> bool:
        self.socket.setblocking(False)
        try:
            self.socket.recv(1)
        except BlockingIOError:
            return True
        return False


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(
        str(tmp_path / "notify") if request.param == "path" else f"@drahealth-test-{os.getpid()}"
    )
    yield manager
    manager.socket.close()


@pytest.fixture
def notifier(manager: Manager) -> SystemdNotifier:
    return SystemdNotifier.from_environ({"NOTIFY_SOCKET": manager.address})


def test_reloading_has_its_time_in_the_same_datagram(manager: Manager, notifier: SystemdNotifier) -> None:
    before_us = time.monotonic_ns() // 1000
    notifier.reloading()
    name, _, usec = manager.next_message().decode().partition("\nMONOTONIC_USEC=")
    assert name == "RELOADING=1"
    assert before_us <= int(usec) <= time.monotonic_ns() // 1000


def test_messages_arrive_in_the_form_of_systemd(manager: Manager, notifier: SystemdNotifier) -> None:
    notifier.ready()
    notifier.status("8 devices healthy")
    notifier.watchdog()
    notifier.stopping()
    assert [manager.next_message() for _ in range(4)] == [
        b"READY=1",
        b"STATUS=8 devices healthy",
        b"WATCHDOG=1",
        b"STOPPING=1",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("two\nREADY=1", b"two READY=1"),  # a second line would be a second message
        ("x" * 9000, b"x" * STATUS_MAX_BYTES),
        ("é" * 9000, "é".encode() * (STATUS_MAX_BYTES // 2)),
        ("x" + "é" * 9000, b"x" + "é".encode() * (STATUS_MAX_BYTES // 2 - 1)),  # cut between characters
        ("\udc80", b"?"),
    ],
)
def test_status_is_one_line_of_valid_text(
    manager: Manager, notifier: SystemdNotifier, text: str, line: bytes
) -> None:
    notifier.status(text)
    assert manager.next_message() == b"STATUS=" + line


def test_from_environ_removes_variables_for_children() -> None:
    program = """
import os, subprocess, sys
from agent.serve.sd_notify import SystemdNotifier
notifier = SystemdNotifier.from_environ(os.environ)
assert notifier.watchdog_s == 30.0, notifier.watchdog_s
subprocess.run(["env"], check=True)
"""
    environ = {
        "NOTIFY_SOCKET": "@missing",
        "WATCHDOG_USEC": "30000000",
        "KEPT": "1",
        "PATH": os.environ["PATH"],
    }
    output = subprocess.run(
        [sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True
    )
    names = {line.partition("=")[0] for line in output.stdout.splitlines()}
    assert "KEPT" in names
    assert not names & {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getppid())}, None),  # of another process
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_counts_only_for_this_process(environ: dict[str, str], watchdog_s: float | None) -> None:
    notifier = SystemdNotifier.from_environ({"NOTIFY_SOCKET": "@missing", **environ})
    assert notifier.watchdog_s == watchdog_s


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_notifier_without_manager_does_nothing(environ: dict[str, str]) -> None:
    notifier = SystemdNotifier.from_environ({**environ, "WATCHDOG_USEC": "1000000"})
    notifier.ready()
    assert notifier.watchdog_s is None


def test_restarted_manager_gets_messages_again(manager: Manager, notifier: SystemdNotifier) -> None:
    manager.socket.close()
    if not manager.address.startswith("@"):
        Path(manager.address).unlink()
    notifier.status("lost")
    restarted = Manager(manager.address)
    notifier.status("received again")
    assert restarted.next_message() == b"STATUS=received again"
    restarted.socket.close()


def test_manager_that_does_not_read_does_not_block_the_notifier(
    manager: Manager, notifier: SystemdNotifier
) -> None:
    capacity = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 1
    for _ in range(capacity + 10):
        notifier.watchdog()
    manager.socket.setblocking(False)
    received = 0  # less than the queue's length where the sender's buffer is full before, as under systemd
    with suppress(BlockingIOError):
        while manager.next_message() == b"WATCHDOG=1":
            received += 1
    assert 0 < received < capacity + 10, "the socket was never full"
    notifier.stopping()  # the socket has room again
    manager.socket.settimeout(PATIENCE_S)
    assert manager.next_message() == b"STOPPING=1"


def test_state_that_could_not_be_sent_is_sent_with_the_next_message(
    manager: Manager, notifier: SystemdNotifier
) -> None:
    for _ in range(int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 10):
        notifier.watchdog()
    notifier.ready()
    manager.socket.setblocking(False)
    with suppress(BlockingIOError):
        while manager.next_message() == b"WATCHDOG=1":
            pass
    notifier.status("1 device")
    notifier.watchdog()
    assert [manager.next_message() for _ in range(3)] == [b"READY=1", b"STATUS=1 device", b"WATCHDOG=1"]


@pytest.mark.parametrize("address", ["/" + "x" * 200, "/nul\0inside"])
def test_impossible_address_does_not_raise(address: str) -> None:
    SystemdNotifier(address).ready()
