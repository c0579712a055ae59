"""Agent as a process, a sysfs of plain files that it reads, and functions that wait for what it serves."""

import json
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
import psutil
import pytest
from patience import PATIENCE_S
from wire.google import Watcher, message_class, watch_health
from wire.serving import eventually

UNKNOWN, HEALTHY, UNHEALTHY = 0, 1, 2  # HealthStatus on the wire, KEP-4680
DRIVER: Final = "a.example.com"


class PlainSysfs:
    """Sysfs of a machine with two CPUs with thermal counters and 8 hugepages, as files."""

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
        """Return the thermal-throttle counters of both CPUs."""
        return [
            f"devices/system/cpu/cpu{cpu}/thermal_throttle/{name}_throttle_count"
            for cpu in (0, 1)
            for name in ("core", "package")
        ]

    def write(self, path: str, text: str) -> None:
        """Create a file with its whole text at once, as those of the kernel are."""
        with self._replace_file(path) as new:
            new.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        """Replace a file by a link."""
        with self._replace_file(path) as new:
            new.symlink_to(target)

    def hang(self, path: str) -> Path:
        """Replace a file by a FIFO whose opening blocks. Return another name of it."""
        other = self.root / "hanging"
        with self._replace_file(path) as new:
            os.mkfifo(new)
            os.link(new, other)
        return other

    def resize(self, pages: int) -> None:
        """Set the pages of the pool, 0 to 9; written in place, because the agent holds the files open."""
        for base in ("kernel/mm", "devices/system/node/node0"):
            with (self.root / base / self.POOL / "nr_hugepages").open("r+b", buffering=0) as file:
                file.write(b"%d\n" % pages)

    @contextmanager
    def _replace_file(self, path: str) -> Iterator[Path]:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(".new")
        yield new
        new.rename(file)


def read_thread_files(pid: int, file: str) -> dict[int, str]:
    """Return a file in ``/proc`` of each thread of a process, without threads that end meanwhile."""
    texts = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            texts[int(task.name)] = (task / file).read_text()
    return texts


def thread_names(pid: int) -> dict[int, str]:
    """Return the name of each thread of a process in the kernel."""
    return {tid: name.rstrip("\n") for tid, name in read_thread_files(pid, "comm").items()}


def threads_in_fifos() -> set[int]:
    """Return the threads of this process that wait for the other end of a FIFO, according to the kernel."""
    if not Path("/proc/self/wchan").exists():
        pytest.skip("the kernel has no wait channels")
    wait_channels = read_thread_files(os.getpid(), "wchan")
    return {tid for tid, channel in wait_channels.items() if channel == "wait_for_partner"}


LATE_ANSWERS: Final = (
    "no answer from the agent within",
    "no health report within",
    "the health engine did not answer within",
    "locked by the agent's write",
    "was not read twice within",
)
"""Errors of commands whose own time for an answer has passed, which a busy machine may need."""


def run_command(
    *args: str, program: Sequence[str | Path] = (sys.executable, "-m", "agent"), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``drahealth``, again while the answer to it was late, and return its exit code and output."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [*program, *args],
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_S,  # readers of GPUs that hang have half a minute
            check=False,
            **options,
        )
        if not any(error in done.stderr for error in LATE_ANSWERS) or time.monotonic() > deadline:
            return done


class Agent:
    """Process of ``python -m agent run`` with one driver; killed at the end of its context."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        config: str = "",
        environ: dict[str, str] | None = None,
        expect: str = "Healthy",
        wrapper: Sequence[str] = (),
    ) -> None:
        """Start the agent.

        Args:
            directory: Directory of its sockets, configuration and log.
            flags: Flags after all others.
            config: Text of its TOML file.
            environ: Additional environment.
            expect: Text to wait for in its log.
            wrapper: Command that runs its arguments, ``unshare -m``: its own namespaces.
        """
        self.directory = directory
        self.log_file = directory / "log"
        (directory / "config.toml").write_text(config)
        flags = ("--runtime-dir", str(directory / "run"), "--config", str(directory / "config.toml"), *flags)
        # pytest changes the environment while the threads of a test start agents
        mine = {name: text for name in list(os.environ) if (text := os.environ.get(name)) is not None}
        self.environ = {k: v for k, v in mine.items() if not k.startswith(("NOTIFY_", "DRAHEALTH_"))}
        self.environ.pop("JOURNAL_STREAM", None)
        self.environ |= environ or {}
        program = [sys.executable, "-m", "agent", "run", "--driver", DRIVER, "--table", "never", *flags]
        self.command = [*wrapper, *program]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ
            )
        try:
            self.wait_for_log(expect)
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
        """Text that the agent has written on both outputs."""
        return self.log_file.read_text()

    @property
    def health_socket(self) -> Path:
        return self.directory / "run" / "drivers" / f"{DRIVER}.sock"

    @property
    def agent_socket(self) -> Path:
        return self.directory / "run" / "agent.sock"

    def wait_for_log(self, text: str) -> None:
        """Wait until the agent has logged the text; fail if it ends before."""

        def has_text() -> bool:
            is_over = self.process.poll() is not None  # its log is complete
            texts = text in self.log
            assert texts or not is_over, f"ended: {self.log}"
            return texts

        eventually(has_text, f"{text!r} in the log")

    def kubelet(self, version: str = "v1") -> Watcher:
        """Read the driver's socket as a kubelet of that version does."""
        return watch_health(self.health_socket, version)

    def watch_reports(self) -> Watcher:
        """Read the reports of ``agent.sock``."""
        return Watcher(
            self.agent_socket,
            "/drahealth.v1.Agent/Watch",
            message_class("drahealth.v1", "WatchRequest"),
            message_class("drahealth.v1", "Report"),
        )

    def status(self) -> dict[str, Any]:
        """Return the document of ``drahealth status``."""
        flags = ("-o", "json", "--config", os.devnull, "--runtime-dir", str(self.directory / "run"))
        document: dict[str, Any] = json.loads(run_command("status", *flags, env=self.environ).stdout)
        return document

    def threads(self, kind: str) -> list[int]:
        """Return the ids of ``main``, the first thread; of the ``sampler``; or of ``others``: I/O and the
        log.
        """
        names = thread_names(self.pid)
        samplers = [tid for tid, name in names.items() if name == "dh-sampler"]
        named = {"dh-io", "dh-log"}  # by Python 3.14
        others = [tid for tid, name in names.items() if not name.startswith("dh-") or name in named]
        others = [tid for tid in others if tid != self.pid]
        return {"main": [self.pid], "sampler": samplers, "others": others}[kind]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code, once the agent has ended by itself."""
        self.process.send_signal(number)
        return self.wait_ended()

    def wait_ended(self) -> int:
        """Return the exit code, once the agent has ended by itself."""
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Yield a directory whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        yield Path(directory)


def wait_for_message(watcher: Watcher, condition: Callable[[Any], bool], event: str) -> Any:
    """Return the next message for which the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    message: Any = None
    while (left_s := deadline - time.monotonic()) > 0:
        with suppress(queue.Empty):
            message = watcher.next(left_s)
            if condition(message):
                return message
    raise AssertionError(f"not within {PATIENCE_S} s: {event}; the last message:\n{message}")


def assert_silent(watcher: Watcher, seconds: float) -> None:
    """Wait until no message has come for `seconds`; messages that are already on their way may come."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            watcher.next(seconds)
        except queue.Empty:
            return
    raise AssertionError(f"never silent for {seconds} s")


def stream_end(watcher: Watcher) -> tuple[grpc.StatusCode, str]:
    """Return status and text of the end of a stream."""
    try:
        while True:
            watcher.next(PATIENCE_S)
    except grpc.RpcError as error:
        return error.code(), error.details()


def entry(message: Any, name: str) -> Any:
    """Return the entry of a device in a health list; None if it has none."""
    return next((device for device in message.devices if device.device.device_name == name), None)


def without_stalls(message: Any) -> list[Any]:
    """Return the entries of a health list, without those of a thread that did not run for 2 s.

    No thread of a busy machine is promised that it runs.
    """
    return [device for device in message.devices if not device.message.startswith("source.stalled: ")]


def wait_for_health(watcher: Watcher, name: str, health: int) -> Any:
    """Return the next entry with that health of a device."""

    def matches(message: Any) -> bool:
        texts = entry(message, name)
        return texts is not None and texts.health == health

    return entry(wait_for_message(watcher, matches, f"health {health} of {name}"), name)


@contextmanager
def suspend_process(pid: int) -> Iterator[None]:
    """Stop a process for the duration of the context."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        eventually(lambda: process.status() == psutil.STATUS_STOPPED, "the process is stopped")
        yield
    finally:
        process.resume()


@contextmanager
def strace(tids: list[int], *arguments: str) -> Iterator[None]:
    """Inject faults into the system calls of these threads, until the end of the context."""
    try:
        command = ["strace", "-q", "-o", "/dev/null", *(f"-p{tid}" for tid in tids), *arguments]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        pytest.skip("strace is not installed")

    def is_traced(tid: int) -> bool:
        """Return whether the thread is traced or has ended."""
        try:
            return f"TracerPid:\t{tracer.pid}\n" in Path(f"/proc/{tid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    try:
        eventually(lambda: all(map(is_traced, tids)) or tracer.poll() is not None, "every thread traced")
        if tracer.poll() is not None:
            pytest.skip(f"strace may not attach here: {tracer.stderr.read().strip()}")  # type: ignore[union-attr]
        yield
    finally:
        tracer.terminate()
        tracer.communicate()


LATE_STOP: Final = "did not stop "
"""Text that an agent logs if a thread did not stop within a limit of less than 2 s."""
TRIES: Final = 5


def play_in_time(play: Callable[[], str], late: str) -> None:
    """Play a test until its agent does not log a text that a busy machine causes, too.

    A defect causes it each time, and fails the test.

    Args:
        play: Plays the test once with a new agent, and returns the agent's log.
        late: Text that says that a thread did not run in time.
    """
    for _ in range(TRIES):
        log = play()
        if late not in log:
            return
    raise AssertionError(f"each of {TRIES} agents logged {late!r}: {log}")


def print_figure(text: str) -> None:
    """Print a measured figure in the test's output; no test evaluates it."""
    sys.stdout.write(f"{text}\n")
