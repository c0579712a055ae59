"""Fixture of the fake libnvidia-ml.so.1: builds it, gives it a scenario, and sends it commands.

Owns the build (once per run, and one at a time) and the conversation with the control socket. What the
library does and what its commands mean is in docs/fake-nvml.md.
"""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from patience import PATIENCE_S

NATIVE: Final = Path(__file__).resolve().parent.parent / "native"
BRANCHES: Final = (535, 570, 575, 580, 590)
PREAMBLE: Final = """
import json, sys, threading, time
from pathlib import Path
import pynvml as n
from fake_nvml import FakeNvml
fake = FakeNvml(*map(Path, sys.argv[1:4]))
n.nvmlLib = n.CDLL(str(fake.library))
send = fake.send

def same(a, b):
    return n.cast(a, n.c_void_p).value == n.cast(b, n.c_void_p).value

def refused(call, *arguments):
    try:
        call(*arguments)
    except n.NVMLError as error:
        return error.value
    return 0

def fields(gpu, *ids):
    values = n.nvmlDeviceGetFieldValues(gpu, list(ids))
    return [v.value.ullVal if v.nvmlReturn == 0 else f"error {v.nvmlReturn}" for v in values]

def watch(*gpus, bits=None):
    events = n.nvmlEventSetCreate()
    for gpu in gpus:
        n.nvmlDeviceRegisterEvents(gpu, bits or n.nvmlDeviceGetSupportedEventTypes(gpu), events)
    return events

def event(events, timeout_ms=60_000):
    e = n.nvmlEventSetWait_v2(events, timeout_ms)
    return [n.nvmlDeviceGetIndex(e.device), e.eventType, e.eventData, e.gpuInstanceId, e.computeInstanceId]
"""
INIT: Final = (
    "n.nvmlInit()\ngpus = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]\n"
)


@cache
def library(branch: int = 580) -> Path:
    """Build and return the fake of a driver branch. Skips the test without a compiler."""
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"building the fake NVML needs {tool}")
    target = f"build/fake/{branch}/libnvidia-ml.so.1"
    with (NATIVE / "fake" / "fake.h").open() as lock:  # parallel test runs must not link at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        make = ["make", "-C", str(NATIVE), "-s", target]
        built = subprocess.run(make, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return NATIVE / target


@dataclass(frozen=True)
class FakeNvml:
    """Fake NVML with one scenario, for any number of processes one after the other.

    Attributes:
        library: Library to load instead of the driver's.
        scenario: File for ``FAKE_NVML``.
        control: Socket on which the process that loaded the library listens from its first nvmlInit on.
    """

    library: Path
    scenario: Path
    control: Path

    @property
    def env(self) -> dict[str, str]:
        """Return the environment of this process plus the scenario's name."""
        return os.environ | {"FAKE_NVML": str(self.scenario)}

    def send(self, *commands: str) -> str:
        """Send commands to the process that runs the scenario; waits until it listens.

        Returns:
            The answer to the last command: "" or a number.

        Raises:
            ValueError: A command was refused; the text gives the reason.
        """
        answer = ""
        with self._connect() as connection, connection.makefile("rw") as stream:
            for command in commands:
                print(command, file=stream, flush=True)
                status, _, answer = stream.readline().rstrip("\n").partition(" ")
                if status != "ok":
                    raise ValueError(f"{command}: {answer or 'the process went away'}")
        return answer

    def calls(self, gpu: int, call: str) -> int:
        """Return the number of calls on a GPU since the process began, hung and failed ones included."""
        return int(self.send(f"gpu {gpu} calls {call}"))

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(PATIENCE_S)
            try:
                connection.connect(str(self.control))
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return connection


def fake_nvml(directory: Path, *lines: str, branch: int = 580) -> FakeNvml:
    """Write a scenario with a control socket to a directory; a profile line comes first."""
    fake = FakeNvml(library(branch), directory / "scenario.txt", directory / "nvml.sock")
    fake.scenario.write_text("\n".join([*lines, f"socket {fake.control}", ""]))
    return fake


def play(fake: FakeNvml, code: str, *, init: bool = True) -> Any:
    """Run code in a process whose pynvml uses the fake, and return the final value of ``answer``."""
    script = PREAMBLE + (INIT if init else "") + textwrap.dedent(code) + "\nprint(json.dumps(answer))"
    ran = subprocess.run(
        [sys.executable, "-c", script, str(fake.library), str(fake.scenario), str(fake.control)],
        env=fake.env | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
