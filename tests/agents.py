"""The agent as a process of its own, a sysfs of plain files for it to read, and ears for what it serves."""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import pytest
from patience import PATIENCE_S
from wire.google import Watcher, message_class, watch_health
from wire.serving import eventually

UNKNOWN, HEALTHY, UNHEALTHY = 0, 1, 2  # HealthStatus on the wire, KEP-4680
DRIVER: Final = "a.example.com"


class PlainSysfs:
    """A machine of two CPUs with thermal counters and 8 hugepages, as files."""

    POOL: Final = "hugepages/hugepages-2048kB"

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, cpus in (("present", "0-1"), ("online", "0-1"), ("isolated", "")):
            self.write(f"devices/system/cpu/{name}", cpus)
        for counter in self.counters():
            self.write(counter, "0")
        self.write(self.cpulist, "0-1")
        for base in ("kernel/mm", "devices/system/node/node0"):
            for name, pages in (("nr", 8), ("free", 8), ("surplus", 0)):
                self.write(f"{base}/{self.POOL}/{name}_hugepages", f"{pages}")

    cpulist: Final = "devices/system/node/node0/cpulist"

    def counters(self) -> list[str]:
        """The thermal-throttle counters of both CPUs."""
        return [
            f"devices/system/cpu/cpu{cpu}/thermal_throttle/{name}_throttle_count"
            for cpu in (0, 1)
            for name in ("core", "package")
        ]

    def write(self, path: str, text: str) -> None:
        """A file appears with its whole text, as those of the kernel do."""
        with self._replacing(path) as new:
            new.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        """A file becomes a link to another."""
        with self._replacing(path) as new:
            new.symlink_to(target)

    def hang(self, path: str) -> Path:
        """A file of which even the opening does not return. Returns another name of it."""
        other = self.root / "hanging"
        with self._replacing(path) as new:
            os.mkfifo(new)
            os.link(new, other)
        return other

    def resize(self, pages: int) -> None:
        """The pool has so many pages, 0 to 9; written in place, since the agent holds the files open."""
        for base in ("kernel/mm", "devices/system/node/node0"):
            with (self.root / base / self.POOL / "nr_hugepages").open("r+b", buffering=0) as file:
                file.write(b"%d\n" % pages)

    @contextmanager
    def _replacing(self, path: str) -> Iterator[Path]:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(".new")
        yield new
        new.rename(file)


def said_of_threads(pid: int, file: str) -> dict[int, str]:
    """What a file in ``/proc`` says of each thread of a process. Those that end meanwhile are not in it."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found[int(task.name)] = (task / file).read_text()
    return found


def thread_names(pid: int) -> dict[int, str]:
    """What the kernel calls each thread of a process."""
    return {tid: name.rstrip("\n") for tid, name in said_of_threads(pid, "comm").items()}


def inside_fifos() -> set[int]:
    """The threads of this process that wait for the other end of a FIFO, as the kernel says it."""
    if not Path("/proc/self/wchan").exists():
        pytest.skip("the kernel does not say where its threads wait")
    places = said_of_threads(os.getpid(), "wchan")
    return {tid for tid, place in places.items() if place == "wait_for_partner"}


class Agent:
    """``python -m agent run`` with one driver. Leaving kills it if it still lives."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        config: str = "",
        environ: dict[str, str] | None = None,
        expect: str = "Healthy",
        within: Sequence[str] = (),
    ) -> None:
        """
        Args:
            directory: For its sockets, its configuration and its log.
            flags: Behind all others.
            config: The text of its TOML file.
            environ: More environment.
            expect: What to wait for in its log.
            within: A command that becomes what its arguments say, ``unshare -m``: namespaces of its own.
        """
        self.directory = directory
        self.log_file = directory / "log"
        (directory / "config.toml").write_text(config)
        flags = ("--runtime-dir", str(directory / "run"), "--config", str(directory / "config.toml"), *flags)
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("NOTIFY_", "DRAHEALTH_"))}
        self.environ.pop("JOURNAL_STREAM", None)
        self.environ |= environ or {}
        run = [sys.executable, "-m", "agent", "run", "--driver", DRIVER, "--table", "never", *flags]
        self.command = [*within, *run]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ
            )
        try:
            self.logs(expect)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has written on both outputs."""
        return self.log_file.read_text()

    @property
    def health_socket(self) -> Path:
        return self.directory / "run" / "drivers" / f"{DRIVER}.sock"

    @property
    def agent_socket(self) -> Path:
        return self.directory / "run" / "agent.sock"

    def logs(self, words: str) -> None:
        """Returns when it has written these words; fails if it ends without."""

        def written() -> bool:
            is_over = self.process.poll() is not None  # and has written all that it will
            found = words in self.log
            assert found or not is_over, f"ended: {self.log}"
            return found

        eventually(written, f"{words!r} in the log")

    def kubelet(self, version: str = "v1") -> Watcher:
        """Somebody who reads the driver's socket as a kubelet of that version does."""
        return watch_health(self.health_socket, version)

    def onlooker(self) -> Watcher:
        """Somebody who reads ``agent.sock``."""
        return Watcher(
            self.agent_socket,
            "/drahealth.v1.Agent/Watch",
            message_class("drahealth.v1", "WatchRequest"),
            message_class("drahealth.v1", "Picture"),
        )

    def threads(self, which: str) -> list[int]:
        """The ids of ``main``, the first thread; of the ``sampler``; or of ``others``: I/O and the log."""
        names = thread_names(self.pid)
        samplers = [tid for tid, name in names.items() if name == "dh-sampler"]
        others = [tid for tid, name in names.items() if tid != self.pid and not name.startswith("dh-")]
        return {"main": [self.pid], "sampler": samplers, "others": others}[which]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signals it and returns its exit code, once it has ended by itself."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        yield Path(directory)


def hear(watcher: Watcher, claim: Callable[[Any], bool], what: str) -> Any:
    """The next message of which the claim is true."""
    deadline = time.monotonic() + PATIENCE_S
    while (left_s := deadline - time.monotonic()) > 0:
        message = watcher.next(left_s)
        if claim(message):
            return message
    raise AssertionError(f"not within {PATIENCE_S} s: {what}")


def silent(watcher: Watcher, seconds: float) -> None:
    """Returns once it has heard nothing for so long; what was on its way before may come."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            watcher.next(seconds)
        except queue.Empty:
            return
    raise AssertionError(f"never silent for {seconds} s")


def farewell(watcher: Watcher) -> tuple[grpc.StatusCode, str]:
    """How the stream ended."""
    try:
        while True:
            watcher.next(PATIENCE_S)
    except grpc.RpcError as error:
        return error.code(), error.details()


def entry(message: Any, name: str) -> Any:
    """A device in a health list, or None if it is not in it."""
    return next((one for one in message.devices if one.device.device_name == name), None)


def hear_health(watcher: Watcher, name: str, health: int) -> Any:
    """The next entry that says this of that device."""

    def says(message: Any) -> bool:
        found = entry(message, name)
        return found is not None and found.health == health

    return entry(hear(watcher, says, f"health {health} of {name}"), name)


@contextmanager
def strace(tids: list[int], *arguments: str) -> Iterator[None]:
    """Faults injected into the system calls of these threads, until the end."""
    try:
        command = ["strace", "-q", "-o", "/dev/null", *(f"-p{tid}" for tid in tids), *arguments]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        pytest.skip("strace is not installed")

    def traced(tid: int) -> bool:
        """It is, or is gone; or strace is."""
        status = Path(f"/proc/{tid}/status")
        return not status.exists() or f"TracerPid:\t{tracer.pid}\n" in status.read_text()

    try:
        eventually(lambda: all(map(traced, tids)) or tracer.poll() is not None, "every thread traced")
        if tracer.poll() is not None:
            pytest.skip(f"strace may not attach here: {tracer.stderr.read().strip()}")  # type: ignore[union-attr]
        yield
    finally:
        tracer.terminate()
        tracer.communicate()


def say(text: str) -> None:
    """A measured figure, for whoever reads the test's output; nothing is judged by it."""
    sys.stdout.write(f"{text}\n")
