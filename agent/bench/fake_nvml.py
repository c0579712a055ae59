"""Build, scenarios and control socket of the fake NVML, an imitation of NVIDIA's library in the checkout.

docs/fake-nvml.md describes scenarios and commands.
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

from agent.bench.budgets import find_checkout
from agent.bench.result import MeasurementError

TARGET: Final = "build/fake/580/libnvidia-ml.so.1"
WAIT_S: Final = 60.0


class FakeNvmlUnavailable(Exception):
    """The fake NVML is not available; the text states the reason."""


def build_fake_library() -> Path:
    """Return the fake NVML of driver branch 580, built if needed.

    Raises:
        FakeNvmlUnavailable: This is no checkout, or make or gcc is missing.
    """
    root = find_checkout()
    if root is None:
        raise FakeNvmlUnavailable("the fake NVML can be built in a checkout only")
    native = root / "native"
    if not all(map(shutil.which, ("make", "gcc"))):
        raise FakeNvmlUnavailable("building the fake NVML needs make and gcc")
    with (native / "fake/fake.h").open() as lock:  # tests build the same file
        fcntl.flock(lock, fcntl.LOCK_EX)
        make = ["make", "-C", str(native), "-s", TARGET]
        built = subprocess.run(make, capture_output=True, text=True, check=False)
    if built.returncode:
        raise MeasurementError(f"fake NVML: make failed: {built.stderr[-1000:]}")
    return native / TARGET


@dataclass(frozen=True, slots=True)
class FakeNvml:
    """Files of the fake NVML for one process that loads it."""

    library: Path
    scenario: Path
    control: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the process that loads the fake NVML."""
        return {"FAKE_NVML": str(self.scenario)}

    @contextlib.contextmanager
    def connect(self) -> Iterator["FakeNvmlControl"]:
        """Connect to the control socket of the process that loaded the fake NVML. Blocks up to WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            while True:
                try:
                    connection.connect(str(self.control))
                    break
                except (FileNotFoundError, ConnectionRefusedError):
                    if time.monotonic() > deadline:
                        raise MeasurementError(
                            f"socket {self.control}: no process loaded the fake NVML within {WAIT_S:g} s"
                        ) from None
                    time.sleep(0.01)
            yield FakeNvmlControl(connection)


class FakeNvmlControl:
    """Client of the control socket of a fake NVML."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("r")

    def send(self, command: str) -> int:
        """Run a command of the fake NVML. Returns the time just before it was sent (CLOCK_MONOTONIC, ns).

        Raises:
            MeasurementError: The fake NVML refused the command.
        """
        start_ns = time.monotonic_ns()
        self._connection.sendall(f"{command}\n".encode())
        reply = self._stream.readline().rstrip("\n")
        if not reply.startswith("ok"):
            raise MeasurementError(f"fake NVML: command {command!r} refused: {reply or 'connection closed'}")
        return start_ns


def write_gpu_scenario(directory: Path, gpus: int) -> FakeNvml:
    """Build the fake NVML and write a scenario of ``gpus`` healthy H100s.

    Raises:
        FakeNvmlUnavailable: This is no checkout, or make or gcc is missing.
    """
    fake = FakeNvml(build_fake_library(), directory / "scenario", directory / "nvml.sock")
    fake.scenario.write_text(f"profile h100 gpus={gpus}\nsocket {fake.control}\n")
    return fake
