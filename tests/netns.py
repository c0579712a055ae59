"""Network namespace of a test, with device events that the test injects through the real kernel.

The kernel sends device events to every network namespace of the initial user namespace. A process with
CAP_SYS_ADMIN over a namespace can also inject an event, which only the listeners in this namespace receive
(``uevent_net_rcv()`` in lib/kobject_uevent.c). Events of the machine arrive too.
"""

import ctypes
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from patience import PATIENCE_S

CLONE_NEWNET: Final = 0x40000000
NETLINK_KOBJECT_UEVENT: Final = 15
KERNEL_GROUP: Final = 1
HEADER: Final = struct.Struct("=IHHII")
"""Header of a netlink message: length, type, flags, sequence, port."""
MIN_TYPE: Final = 16
REQUEST_ACK: Final = 1 | 4

GPU: Final = "/devices/pci0000:3a/0000:3b:00.0"
GPU_VARIABLES: Final = {
    "SUBSYSTEM": "pci",
    "PCI_CLASS": "30200",
    "PCI_ID": "10DE:2330",
    "PCI_SLOT_NAME": "0000:3b:00.0",
    "DRIVER": "nvidia",
}

_libc: Final = ctypes.CDLL(None, use_errno=True)


@contextmanager
def netns() -> Iterator[None]:
    """Move this thread, and the threads and processes it starts, to a new network namespace."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(CLONE_NEWNET):
            pytest.skip(f"no network namespace of one's own: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            if _libc.setns(before, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "the way back from a network namespace")
    finally:
        os.close(before)


def run_in_user_namespace(*command: str) -> str:
    """Return the output of a command as root of a user namespace with a network namespace of its own."""
    unshare = ["unshare", "-U", "-r", "-n"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespace of one's own")
    done = subprocess.run(
        [*unshare, *command], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _message(action: str, path: str, variables: dict[str, str]) -> bytes:
    texts = [f"{action}@{path}", f"ACTION={action}", f"DEVPATH={path}"]
    texts += [f"{key}={value}" for key, value in variables.items()]
    return "".join(text + "\0" for text in texts).encode()


class Injector:
    """Sender of kernel events for the network namespace in which it was created."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_KOBJECT_UEVENT)
        self._socket.bind((0, 0))

    def __enter__(self) -> "Injector":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def inject(self, action: str, path: str = GPU, **variables: str) -> None:
        """Inject an event through the kernel, which adds SEQNUM; by default an event of a GPU.

        The event is in the listeners' sockets when this returns.
        """
        body = _message(action, path, variables or GPU_VARIABLES)
        self._socket.send(HEADER.pack(HEADER.size + len(body), MIN_TYPE, REQUEST_ACK, 1, 0) + body)
        error = struct.unpack_from("=i", self._socket.recv(4096), HEADER.size)[0]
        if error:
            raise OSError(-error, os.strerror(-error))

    def spoof(self, action: str, path: str = GPU, **variables: str) -> None:
        """Send the same event from user space to all listeners."""
        body = _message(action, path, (variables or GPU_VARIABLES) | {"SEQNUM": "1"})
        self._socket.sendto(body, (0, KERNEL_GROUP))
