"""Processes that suites start: real agents, subscribers, minimal C programs, and programs run to their end.

The module also builds the fake NVML, an imitation of NVIDIA's library that is part of the checkout. It writes
scenarios (made-up GPUs) for the fake NVML, and sends commands to its control socket.

docs/fake-nvml.md describes scenarios and commands.
"""

import contextlib
import fcntl
import json
import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, NoReturn, TypeVar

from agent.bench.file_trees import temporary_directory
from agent.bench.result import MeasurementError, SuiteOutcome, find_checkout
from agent.system.process_stat import describe_exit_code

DRIVER: Final = "bench.drahealth.example"
HEALTH_METHOD: Final = "/v1.DRAResourceHealth/NodeWatchResources"
AGENT_METHOD: Final = "/drahealth.v1.Agent/Watch"
WAIT_S: Final = 60.0  # a start takes 1 s, or 20 s on a busy machine
CHECK_S: Final = 0.2
"""Time between two checks that a process is still running [s]."""
END_S: Final = 2.0
"""Time that a process has to end after it closed its connections or its standard output [s]."""
OUTPUT_MAX: Final = 1 << 16
"""Largest part of a process's standard error that is read, at its end [bytes]."""

JsonLine = dict[str, Any]


class ProcessError(MeasurementError):
    """A process of a benchmark ended, or did not print the expected line in time."""


UNIT_ENVIRONMENT: Final[Mapping[str, str]] = {"PYTHONMALLOC": "malloc"}
"""Environment variables that the systemd unit sets for the agent."""


class StartedProcess:
    """Process that a suite started, and whose standard error is a file."""

    def __init__(self, name: str, process: "subprocess.Popen[Any]", errors: IO[Any]) -> None:
        self.name = name
        self._process = process
        self._errors = errors

    @property
    def pid(self) -> int:
        return self._process.pid

    def require_running(self, end_s: float = 0.0) -> None:
        """Raise ProcessError with exit code and reason if the process has ended, or ends within ``end_s``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_code = self._process.wait(end_s)
            raise ProcessError(f"process {self.name} {describe_exit_code(exit_code)}", self.read_errors())

    def read_errors(self) -> str:
        """Return the end of what the process wrote to standard error."""
        fd = self._errors.fileno()  # its position is that of the process and must not move
        size = os.fstat(fd).st_size
        return os.pread(fd, OUTPUT_MAX, max(0, size - OUTPUT_MAX)).decode(errors="replace")


@contextlib.contextmanager
def start_agent(
    runtime_dir: Path, flags: Sequence[str], config: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[StartedProcess]:
    """Run ``python -m agent run`` in a ``with`` block, with the environment of the unit; yield its process.

    If the block fails because the agent has ended, ProcessError states how. Any other exception gets the
    agent's log as a note.

    Args:
        runtime_dir: Directory of the agent's sockets, configuration and log.
        flags: Further flags, after all others.
        config: Text of the agent's TOML file; the configuration of the machine's own agent has no effect.
        environment: Further environment variables.
    """
    log, file = runtime_dir / "agent.log", runtime_dir / "config.toml"
    file.write_text(config)
    command = [sys.executable, "-m", "agent", "run", "--table", "never", "--config", str(file)]
    command += ["--driver", DRIVER, "--runtime-dir", str(runtime_dir / "run"), *flags]
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("DRAHEALTH_", "NOTIFY_"))
    }
    variables |= {**UNIT_ENVIRONMENT, **(environment or {})}
    with log.open("w+b") as errors, subprocess.Popen(command, stderr=errors, env=variables) as process:
        agent = StartedProcess("agent run", process, errors)
        try:
            yield agent
        except Exception as error:
            agent.require_running(END_S)
            error.add_note(f"log of the agent:\n{agent.read_errors()}")
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_S)
            process.kill()


def driver_socket(runtime_dir: Path) -> Path:
    """Return the path of the health socket that the agent with ``runtime_dir`` serves for the driver."""
    return runtime_dir / "run" / "drivers" / f"{DRIVER}.sock"


def agent_socket(runtime_dir: Path) -> Path:
    """Return the path of ``agent.sock`` of the agent with ``runtime_dir``."""
    return runtime_dir / "run" / "agent.sock"


def read_resident_bytes(pid: int) -> int:
    """Return the resident memory of a process [bytes]."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    if found is None:
        raise ProcessError(f"process {pid} has ended; its memory cannot be read")
    return int(found[1]) * 1024


def read_memory(pid: int) -> tuple[int, int]:
    """Return RSS and PSS of a process [bytes]. Raises OSError if it has ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return kib["Rss:"] * 1024, kib["Pss:"] * 1024


class ThreadUsage(NamedTuple):
    """CPU time and voluntary context switches of one thread at one moment."""

    name: str
    run_ns: int
    wakeups: int
    """Voluntary context switches, in which the thread waited."""


SAMPLER: Final = "dh-sampler"
ROLES: Final = {SAMPLER: SAMPLER, "dh-io": "I/O"}
"""Roles of threads that are measured alone, by their name in the kernel."""
C_THREADS: Final = frozenset({"dh-kmsg", "dh-machine", SAMPLER, "dh-uevents"})
"""Names of the threads of the C core, which execute no Python."""


def read_threads(pid: int, role: str = "") -> Mapping[int, ThreadUsage]:
    """Read CPU time and context switches of all threads of a process, and of its child processes.

    Threads and child processes that end meanwhile are left out. Raises OSError if the process has ended.
    ``role`` names all threads of the process; if it is empty, each thread has its own name.
    """
    found: dict[int, ThreadUsage] = {}
    for child in child_pids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= read_threads(child, "nvml")
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = (task / "status").read_text().splitlines()
            fields = dict(line.split(":\t") for line in lines if ":\t" in line)
            run_ns = int((task / "schedstat").read_text().split()[0])
            name = role or _thread_role(fields["Name"], is_main=task.name == str(pid))
            found[int(task.name)] = ThreadUsage(name, run_ns, int(fields["voluntary_ctxt_switches"]))
    return found


def child_pids(pid: int) -> Iterator[int]:
    """Yield the child processes of a process; none if the kernel lacks CONFIG_PROC_CHILDREN."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended
            yield from map(int, (task / "children").read_text().split())


def _thread_role(name: str, *, is_main: bool) -> str:
    """Return the role of a thread of the agent, by its name in the kernel."""
    if is_main:
        return "main"
    return ROLES.get(name) or ("C" if name in C_THREADS else "Python")


def cpu_percent(
    before: Mapping[int, ThreadUsage], after: Mapping[int, ThreadUsage], duration_s: float
) -> float:
    """Return the CPU time that all threads used between two readings [% of one core]."""
    thread_ids = before.keys() & after.keys()
    return sum(after[tid].run_ns - before[tid].run_ns for tid in thread_ids) / duration_s / 1e7


class ChildProcess(StartedProcess):
    """Child process that reads lines and prints lines of JSON."""

    server: StartedProcess | None = None
    """Process whose messages the child process waits for."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", errors: IO[Any]) -> None:
        super().__init__(name, process, errors)
        self._lines: queue.Queue[JsonLine | None] = queue.Queue()
        """Printed lines; None is the end of standard output."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._lines.put(json.loads(line))
        finally:
            self._lines.put(None)

    def send_line(self, line: str) -> None:
        """Write a line to standard input of the process.

        Raises:
            ProcessError: The process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.require_running(END_S)
            raise ProcessError(f"process {self.name}: reads no more lines", self.read_errors()) from None

    def wait(
        self, matches: Callable[[JsonLine], bool] = lambda _: True, timeout_s: float = WAIT_S
    ) -> JsonLine:
        """Return the next printed line that ``matches`` accepts; drop the lines before it.

        Raises:
            ProcessError: No line matched in time, or the process or its server has ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.001, deadline - time.monotonic())
            try:
                line = self._lines.get(timeout=min(left_s, CHECK_S))
            except queue.Empty:
                if self.server:
                    self.server.require_running()
                if left_s > CHECK_S:
                    continue
                raise ProcessError(
                    f"process {self.name}: no expected line within {timeout_s:g} s", self.read_errors()
                ) from None
            if line is None:
                self._raise_end()
            elif matches(line):
                return line

    def _raise_end(self) -> NoReturn:
        """Raise ProcessError because standard output has ended; the cause may be the end of the server."""
        self._lines.put(None)
        for process in filter(None, (self.server, self)):
            process.require_running(END_S)
        raise ProcessError(f"process {self.name}: closed its standard output", self.read_errors())

    def discard_lines(self) -> int:
        """Drop all printed lines that :meth:`wait` has not returned; return their number."""
        count = 0
        with contextlib.suppress(queue.Empty):
            while self._lines.get_nowait() is not None:
                count += 1
            self._lines.put(None)
        return count


ChildT = TypeVar("ChildT", bound=ChildProcess)


class Subscriber(ChildProcess):
    """Process of ``agent.bench.subscribers``, which prints a line for each message that it receives."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", errors: IO[Any]) -> None:
        super().__init__(name, process, errors)
        self.library = str(self.wait(lambda line: "client" in line)["client"])


class ThreadTracer:
    """System calls of all threads of a process, which strace writes to one file per thread."""

    def __init__(self, directory: Path, strace: "subprocess.Popen[bytes]") -> None:
        self._directory = directory
        self._strace = strace

    def require_running(self) -> None:
        """Raise MeasurementError if strace has ended."""
        if self._strace.poll() is not None:
            raise MeasurementError(
                f"strace: ended with status {self._strace.returncode}; it may lack the permission to trace "
                "the process"
            )

    def read(self) -> dict[int, str]:
        """Return what strace has written, by thread id."""
        files = self._directory.glob("strace.*")
        return {int(file.suffix[1:]): file.read_text(errors="replace") for file in files}


@contextlib.contextmanager
def trace_threads(pid: int, *flags: str) -> Iterator[ThreadTracer]:
    """Trace all threads of a process in a ``with`` block, with flags of strace."""
    with temporary_directory() as directory:
        command = ["strace", "-ff", "-qq", *flags, "-o", str(directory / "strace"), "-p", str(pid)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as strace:
            try:
                yield ThreadTracer(directory, strace)
            finally:
                strace.terminate()


@contextlib.contextmanager
def start_child(name: str, command: Sequence[str], child_type: type[ChildT]) -> Iterator[ChildT]:
    """Run a command in a ``with`` block; yield its process as an object of ``child_type``.

    Args:
        name: Name of the process in errors.
        command: Program and arguments.
        child_type: Type of the object.
    """
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        try:
            yield child_type(name, process, errors)
        finally:
            process.kill()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # a line that the process did not read
                process.stdin.close()


def start_module(module: str, *arguments: object) -> contextlib.AbstractContextManager[ChildProcess]:
    """Run a module with ``python -m`` in a ``with`` block."""
    return start_child(module, [sys.executable, "-m", module, *map(str, arguments)], ChildProcess)


_HIT_LIMITS: Final = """
import json, mmap, os, sys, time
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000 | 21 << 26  # MAP_HUGETLB, MAP_HUGE_2MB
for line in sys.stdin:
    with open(os.path.join(line.rstrip(), "cgroup.procs"), "w") as procs:
        procs.write(str(os.getpid()))
    t_ns = time.monotonic_ns()
    try:
        mmap.mmap(-1, 2 << 20, flags=flags).close()
        is_hit = False
    except OSError:
        is_hit = True
    print(json.dumps({"t_ns": t_ns, "is_hit": is_hit}), flush=True)
"""
_RUN_OUT_OF_MEMORY: Final = """
import json, mmap, os, signal, sys, time
size = 64 << 20
written_ns = memoryview(mmap.mmap(-1, 8)).cast("q")  # shared with the children
for line in sys.stdin:
    child = os.fork()
    if not child:
        with open(os.path.join(line.rstrip(), "cgroup.procs"), "w") as procs:
            procs.write(str(os.getpid()))
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, size, mmap.PAGESIZE):
            written_ns[0] = time.monotonic_ns()
            pages[at] = 1
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    ended_ns = time.monotonic_ns()
    is_hit = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    print(json.dumps({"t_ns": written_ns[0], "ended_ns": ended_ns, "is_hit": is_hit}), flush=True)
"""


def start_hugepage_limit_hitter() -> contextlib.AbstractContextManager[ChildProcess]:
    """Run a process in a ``with`` block that hits the hugepage limits of cgroups.

    Each line on its standard input is the path of a cgroup. The process joins the cgroup, requests one 2 MiB
    page, which the cgroup must refuse, and prints a line of JSON: the time just before the request
    (CLOCK_MONOTONIC, ns), and whether the request was refused.
    """
    return start_child("hugepage limit hitter", [sys.executable, "-c", _HIT_LIMITS], ChildProcess)


def start_memory_limit_hitter() -> contextlib.AbstractContextManager[ChildProcess]:
    """Run a process in a ``with`` block whose children run out of the memory of cgroups.

    Each line on its standard input is the path of a cgroup, whose limit is below 64 MiB. A child joins the
    cgroup and writes to new pages until the kernel kills it. Then the process prints a line of JSON: the
    times just before the last write and after the end of the child (CLOCK_MONOTONIC, ns), and whether the
    kernel killed the child.
    """
    return start_child("memory limit hitter", [sys.executable, "-c", _RUN_OUT_OF_MEMORY], ChildProcess)


@contextlib.contextmanager
def start_subscriber(
    socket: Path, method: str, marker: str, server: StartedProcess | None = None
) -> Iterator[Subscriber]:
    """Run ``agent.bench.subscribers SOCKET follow METHOD MARKER`` in a ``with`` block.

    ``server`` is the process that serves ``SOCKET``; None: the caller sets it when it has started it.
    """
    command = [sys.executable, "-m", "agent.bench.subscribers", str(socket), "follow", method, marker]
    with start_child("subscriber", command, Subscriber) as subscriber:
        subscriber.server = server
        yield subscriber


# The rusage of a child includes the memory of its parent at the fork; VmHWM in /proc/self/status does not.
_PRINT_STATUS: Final = (
    "import atexit; atexit.register(lambda: print('\\n' + open('/proc/self/status').read()))"
)
_MEMORY: Final = re.compile(r"^VmHWM:\s+(\d+) kB$.*^VmRSS:\s+(\d+) kB$", re.M | re.S)
_MAIN: Final = "import sys; sys.argv[1:] = {}; from agent.cli.main import main; sys.exit(main())"


class ProcessRun(NamedTuple):
    """Duration, memory and output of one ended process."""

    took_ns: int
    peak_rss: int
    """Largest resident memory that the process had [bytes]."""
    end_rss: int
    """Resident memory at the end of the program [bytes]."""
    output: str


def drahealth_program(*arguments: object) -> str:
    """Return the text of a Python program that runs ``drahealth`` with these arguments."""
    return _MAIN.format([str(argument) for argument in arguments])


def run_program(
    code: str, exit_codes: Container[int] = (0,), environment: Mapping[str, str] | None = None
) -> ProcessRun:
    """Run the Python program ``code`` to its end; ``environment`` has further environment variables.

    Raises:
        MeasurementError: The exit status is not in ``exit_codes``.
    """
    start_ns = time.monotonic_ns()
    command = [sys.executable, "-c", f"{_PRINT_STATUS}\n{code}"]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    took_ns = time.monotonic_ns() - start_ns
    memory = _MEMORY.search(done.stdout)
    if done.returncode not in exit_codes or memory is None:
        program = textwrap.shorten(code, 100)
        raise MeasurementError(f"program {program!r}: exit status {done.returncode}", done.stderr)
    return ProcessRun(took_ns, int(memory[1]) * 1024, int(memory[2]) * 1024, done.stdout)


SOURCE: Final = "benchmarks/lower_bound.c"


class LowerBoundUnavailable(Exception):
    """The C program of the lower bound cannot run on this machine; the text states the reason."""


@contextlib.contextmanager
def start_lower_bound(*arguments: object) -> Iterator[ChildProcess]:
    """Compile ``benchmarks/lower_bound.c`` and run it in a ``with`` block.

    The program does only the work that any implementation of the measured task must do.

    Args:
        arguments: Arguments of the program, as texts.

    Raises:
        LowerBoundUnavailable: The package does not run from a checkout, or gcc is missing.
    """
    root = find_checkout()
    if root is None:
        raise LowerBoundUnavailable("the lower bounds in C can be built in a checkout only")
    if shutil.which("gcc") is None:
        raise LowerBoundUnavailable("building the lower bounds in C needs gcc")
    with temporary_directory() as directory:
        program = directory / "lower_bound"
        command = ["gcc", "-std=c11", "-O2", "-D_GNU_SOURCE", str(root / SOURCE), "-o", str(program)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            raise MeasurementError(f"{SOURCE}: gcc failed", built.stderr)
        command = [str(program), *map(str, arguments)]
        with start_child(program.name, command, ChildProcess) as child:
            child.wait(lambda line: "ready" in line)
            yield child


@contextlib.contextmanager
def lower_bound_or_none(
    outcome: SuiteOutcome, suite: str, *arguments: object
) -> Iterator[ChildProcess | None]:
    """Start the C program of the lower bound and yield it; yield None if it is unavailable.

    The reason is then added to the skipped measurements of ``outcome``.
    """
    with contextlib.ExitStack() as stack:
        program = None
        try:
            program = stack.enter_context(start_lower_bound(*arguments))
        except LowerBoundUnavailable as reason:
            outcome.skipped.append(f"{suite}: {reason}")
        yield program


COALESCE_S: Final = 0.1  # the agent combines changes within this time; causes are further apart


def sleep_past_coalescing() -> None:
    """Sleep until the agent no longer combines the next change with the previous one.

    The duration is random, so that changes happen at any moment of the agent's polling period.
    """
    time.sleep(COALESCE_S * (1.2 + random.random()))


class DetectionLatency(NamedTuple):
    """Start of a change, and duration until a subscriber received the message that reports it."""

    start_ns: int
    took_ns: int


def measure_latency(
    client: Subscriber, cause: Callable[[], int], matches: Callable[[JsonLine], bool]
) -> DetectionLatency:
    """Make a change, and return the time until a client receives the message that reports it.

    ``cause`` makes the change and returns its start time [ns]. ``matches`` returns whether a message reports
    the change.
    """
    sleep_past_coalescing()
    client.discard_lines()
    start_ns = cause()
    return DetectionLatency(start_ns, int(client.wait(matches)["t_ns"]) - start_ns)


def split_into_batches(count: int, size: int) -> Iterable[range]:
    """Split ``range(count)`` into ranges of at most ``size``."""
    return (range(first, min(first + size, count)) for first in range(0, count, size))


# --- fake NVML ---------------------------------------------------------------------------------------------

TARGET: Final = "build/fake/580/libnvidia-ml.so.1"


class FakeNvmlUnavailable(Exception):
    """The fake NVML is not available; the text states the reason."""


def build_fake_library() -> Path:
    """Return the path of the fake NVML of driver branch 580; build the library if needed.

    Raises:
        FakeNvmlUnavailable: The package does not run from a checkout, or make or gcc is missing.
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
        raise MeasurementError("fake NVML: make failed", built.stderr)
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
    def connect(self, agent: StartedProcess | None = None) -> Iterator["FakeNvmlControl"]:
        """Connect to the control socket of the process that loaded the fake NVML. Blocks up to WAIT_S.

        ``agent`` is the agent that starts this process; None: the process is that of the caller.
        """
        deadline = time.monotonic() + WAIT_S
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            while True:
                try:
                    connection.connect(str(self.control))
                    break
                except (FileNotFoundError, ConnectionRefusedError):
                    if agent:
                        agent.require_running()
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
    """Build the fake NVML and write its scenario (made-up hardware) of ``gpus`` healthy H100 GPUs.

    Raises:
        FakeNvmlUnavailable: The package does not run from a checkout, or make or gcc is missing.
    """
    fake = FakeNvml(build_fake_library(), directory / "scenario", directory / "nvml.sock")
    fake.scenario.write_text(f"profile h100 gpus={gpus}\nsocket {fake.control}\n")
    return fake
