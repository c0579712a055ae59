"""The fake NVML of the checkout, for benchmarks: its build, and the conversation with who plays it.

What it plays and understands is in docs/fake-nvml.md.
"""

import contextlib
import fcntl
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bench.budgets import checkout
from agent.bench.result import Unmeasured

TARGET: Final = "build/fake/580/libnvidia-ml.so.1"
WAIT_S: Final = 60.0


class NoLibrary(Exception):
    """There is none to be had; the text says why."""


def fake_library() -> Path:
    """The fake, of driver branch 580; built if it is not.

    Raises:
        NoLibrary: This is no checkout, or there is nothing to build with.
    """
    root = checkout()
    if root is None:
        raise NoLibrary("the fake NVML is in the checkout only")
    native = root / "native"
    if not all(map(shutil.which, ("make", "gcc"))):
        raise NoLibrary("building the fake NVML needs make and gcc")
    with (native / "fake/fake.h").open() as lock:  # the tests build it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        make = ["make", "-C", str(native), "-s", TARGET]
        built = subprocess.run(make, capture_output=True, text=True, check=False)
    if built.returncode:
        raise Unmeasured(f"the fake NVML cannot be built: {built.stderr[-1000:]}")
    return native / TARGET


@dataclass(frozen=True, slots=True)
class FakeNvml:
    """One scenario, for one process."""

    library: Path
    scenario: Path
    control: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """What the process that plays it has to have."""
        return {"FAKE_NVML": str(self.scenario)}

    @contextlib.contextmanager
    def told(self) -> Iterator["Director"]:
        """A connection to the process that plays it, until the end of the block."""
        deadline = time.monotonic() + WAIT_S
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            while True:
                try:
                    connection.connect(str(self.control))
                    break
                except (FileNotFoundError, ConnectionRefusedError):
                    if time.monotonic() > deadline:
                        raise Unmeasured(f"{self.control}: nobody plays the fake NVML's scenario") from None
                    time.sleep(0.01)
            yield Director(connection)


class Director:
    """Tells a fake what happens next."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("r")

    def tell(self, command: str) -> int:
        """Carry out a command. Returns the time just before it was sent (CLOCK_MONOTONIC, ns).

        Raises:
            Unmeasured: It was refused.
        """
        start_ns = time.monotonic_ns()
        self._connection.sendall(f"{command}\n".encode())
        answer = self._stream.readline().rstrip("\n")
        if not answer.startswith("ok"):
            raise Unmeasured(f"the fake NVML: {command}: {answer or 'it went away'}")
        return start_ns


def fake_nvml(directory: Path, gpus: int) -> FakeNvml:
    """A scenario of so many healthy H100s. Raises as :func:`fake_library`."""
    fake = FakeNvml(fake_library(), directory / "scenario", directory / "nvml.sock")
    fake.scenario.write_text(f"profile h100 gpus={gpus}\nsocket {fake.control}\n")
    return fake
