"""A real agent in a process of its own, and others in theirs that print lines of JSON."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from agent.bench.result import Unmeasured

DRIVER: Final = "bench.drahealth.example"
HEALTH_METHOD: Final = "/v1.DRAResourceHealth/NodeWatchResources"
AGENT_METHOD: Final = "/drahealth.v1.Agent/Watch"
WAIT_S: Final = 60.0  # a start takes a second, or twenty beside a busy neighbour

Line = dict[str, Any]


class Silence(Unmeasured):
    """A process did not say what it should in time."""


@contextlib.contextmanager
def agent(
    runtime_dir: Path, flags: Sequence[str], config: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """``python -m agent run`` until the end of the block. Yields its pid.

    Args:
        runtime_dir: For its sockets, its configuration and its log.
        flags: Behind all others.
        config: The text of its TOML file: whatever the machine's own agent is configured to, this one is not.
        environment: More of it.
    """
    log, file = runtime_dir / "agent.log", runtime_dir / "config.toml"
    file.write_text(config)
    command = [sys.executable, "-m", "agent", "run", "--table", "never", "--config", str(file)]
    command += ["--driver", DRIVER, "--runtime-dir", str(runtime_dir / "run"), *flags]
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("DRAHEALTH_", "NOTIFY_"))
    }
    own |= environment or {}
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr, env=own) as process:
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


def rss(pid: int) -> int:
    """Resident memory of a process [bytes]."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    if found is None:
        raise Silence(f"process {pid} has ended")
    return int(found[1]) * 1024


class Child:
    """A process that is told lines, and says lines of JSON."""

    def __init__(self, process: "subprocess.Popen[str]", errors: IO[str]) -> None:
        self._process = process
        self._errors = errors
        self._lines: queue.Queue[Line] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def tell(self, line: str) -> None:
        """Give it a line to read."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def wait(self, wanted: Callable[[Line], bool] = lambda _: True, timeout_s: float = WAIT_S) -> Line:
        """The first line from now on that is wanted.

        Raises:
            Silence: There was none in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                raise Silence(f"{self}: no such line in {timeout_s:g} s{self._complaint()}") from None
            if wanted(line):
                return line

    def __str__(self) -> str:
        """What was started, and how it ended if it has."""
        command = self._process.args
        words = command if isinstance(command, list) else [command]
        return f"{' '.join(map(str, words[-3:]))} (exit {self._process.poll()})"

    def _complaint(self) -> str:
        self._errors.seek(0)
        said = self._errors.read()[-2000:].strip()
        return f"; it said:\n{said}" if said else ""

    def seen(self) -> int:
        """Lines that have come and nobody has waited for; they are forgotten."""
        number = 0
        with contextlib.suppress(queue.Empty):
            while self._lines.get_nowait():
                number += 1
        return number


class Subscriber(Child):
    """What ``agent.bench.client`` prints, message by message."""

    def __init__(self, process: "subprocess.Popen[str]", errors: IO[str]) -> None:
        super().__init__(process, errors)
        self.library = str(self.wait(lambda line: "client" in line)["client"])


@contextlib.contextmanager
def running(command: Sequence[str], kind: type[Child] = Child) -> Iterator[Any]:
    """A process until the end of the block, as a ``kind`` of child."""
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        try:
            yield kind(process, errors)
        finally:
            process.kill()


def child(module: str, *arguments: object) -> contextlib.AbstractContextManager[Child]:
    """A module of ours in a process until the end of the block."""
    return running([sys.executable, "-m", module, *map(str, arguments)])


def subscriber(socket: Path, method: str, marker: str) -> contextlib.AbstractContextManager[Subscriber]:
    """A subscriber until the end of the block; see ``agent.bench.client``."""
    command = [sys.executable, "-m", "agent.bench.client", str(socket), method, marker]
    return running(command, Subscriber)
