"""A real agent in a process of its own, and subscribers in theirs."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from agent.bench.result import Unmeasured

DRIVER: Final = "bench.drahealth.example"
HEALTH_METHOD: Final = "/v1.DRAResourceHealth/NodeWatchResources"
AGENT_METHOD: Final = "/drahealth.v1.Agent/Watch"
WAIT_S: Final = 10.0


class Silence(Unmeasured):
    """A process did not say what it should in time."""


@contextlib.contextmanager
def agent(runtime_dir: Path, flags: Sequence[str]) -> Iterator[int]:
    """``python -m agent run`` until the end of the block. Yields its pid."""
    log = runtime_dir / "agent.log"
    empty = runtime_dir / "config.toml"
    empty.touch()  # whatever the machine's own agent is configured to, this one is not
    command = [sys.executable, "-m", "agent", "run", "--table", "never", "--config", str(empty)]
    command += ["--driver", DRIVER, "--runtime-dir", str(runtime_dir / "run"), *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DRAHEALTH_")}
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr, env=environment) as process:
        try:
            yield process.pid
        except Silence as silence:
            said = log.read_text(errors="replace")[-2000:]
            raise Silence(f"{silence}; the agent (exit {process.poll()}) said:\n{said}") from None
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_S)
            process.kill()


def health_socket(runtime_dir: Path) -> Path:
    """The driver's socket of an agent that was started with this directory."""
    return runtime_dir / "run" / "drivers" / f"{DRIVER}.sock"


def agent_socket(runtime_dir: Path) -> Path:
    """The agent's own."""
    return runtime_dir / "run" / "agent.sock"


class Subscriber:
    """What ``agent.bench.client`` prints, message by message."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stdout = process.stdout
        threading.Thread(target=self._read, daemon=True).start()
        self.library = str(self.wait(lambda line: "client" in line)["client"])

    def _read(self) -> None:
        assert self._stdout is not None
        for line in self._stdout:
            self._lines.put(json.loads(line))

    def wait(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The first message from now on that is wanted.

        Raises:
            Silence: There was none in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                raise Silence(f"the subscriber saw no such message in {timeout_s:g} s") from None
            if wanted(line):
                return line

    def seen(self) -> int:
        """Messages that have come and nobody has waited for; they are forgotten."""
        number = 0
        with contextlib.suppress(queue.Empty):
            while self._lines.get_nowait():
                number += 1
        return number


@contextlib.contextmanager
def subscriber(socket: Path, method: str, marker: str) -> Iterator[Subscriber]:
    """A subscriber until the end of the block."""
    command = [sys.executable, "-m", "agent.bench.client", str(socket), method, marker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield Subscriber(process)
        finally:
            process.kill()
