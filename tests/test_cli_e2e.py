"""The command line with real processes and sockets, and a sysfs of plain files."""

import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agents import LATE_ANSWERS, run_command, short_tmp
from patience import PATIENCE_S
from small_disk import run_on_small_disk
from wire.serving import eventually

__all__ = ["short_tmp"]

DRIVER = "demo.drahealth.example"
AGENT = [sys.executable, "-m", "agent"]
PATIENT_PROGRAM = """
import runpy
from agent.cli.output import log
log.CLOSE_TIMEOUT_S = 60.0
runpy.run_module("agent", run_name="__main__", alter_sys=True)
"""
PATIENT = [sys.executable, "-c", PATIENT_PROGRAM]
"""An agent or client whose end waits until a busy machine has restored the terminal."""
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


class Node:
    """Machine of two CPUs and 8 hugepages, as files, and a runtime directory for an agent."""

    def __init__(self, directory: Path) -> None:
        self.runtime_dir = directory / "run"
        self.sysfs = directory / "sys"
        cgroups = directory / "cgroup"
        cgroups.mkdir()
        pool = "hugepages/hugepages-2048kB"
        for base in ("kernel/mm", "devices/system/node/node0"):
            for name in ("free", "surplus", "nr"):
                self.write(f"{base}/{pool}/{name}_hugepages", "0" if name == "surplus" else "8")
        for name in ("resv", "nr_overcommit"):
            self.write(f"kernel/mm/{pool}/{name}_hugepages", "0")
        for name, cpus in (("present", "0-1"), ("online", "0-1"), ("isolated", "")):
            self.write(f"devices/system/cpu/{name}", cpus)
        self.write("devices/system/node/online", "0")
        self.write("devices/system/node/node0/cpulist", "0-1")
        self.roots = [
            "--sysfs-root",
            str(self.sysfs),
            "--cgroupfs-root",
            str(cgroups),
            "--node-name",
            "worker-7",
        ]

    def write(self, path: str, text: str) -> None:
        file = self.sysfs / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def resize(self, pages: int) -> None:
        """Set the pool's pages, 0 to 9, in place and in one write: a reader of sysfs sees no half of it."""
        for base in ("kernel/mm", "devices/system/node/node0"):
            file = self.sysfs / base / "hugepages/hugepages-2048kB/nr_hugepages"
            with file.open("r+b", buffering=0) as stream:
                stream.write(b"%d\n" % pages)

    @property
    def agent_socket(self) -> str:
        return str(self.runtime_dir / "agent.sock")

    @property
    def driver_socket(self) -> str:
        return str(self.runtime_dir / "drivers" / f"{DRIVER}.sock")

    def run_args(self) -> list[str]:
        flags = ["--runtime-dir", str(self.runtime_dir), *self.roots]
        return [*AGENT, "run", "--driver", DRIVER, "--period", "20ms", *flags]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@contextmanager
def start_process(*command: str, stream: str = "stdout", **more: object) -> Iterator[subprocess.Popen[str]]:
    """Run a process with one stream to read, and kill it at the end."""
    pipes = {stream: subprocess.PIPE}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes, **more) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def line_with(lines: Iterator[str], text: str) -> str:
    """Return the next line that contains `text`."""
    for line in lines:
        if text in line:
            return line
    raise AssertionError(f"ended without {text!r}")


@pytest.fixture
def agent(node: Node) -> Iterator[subprocess.Popen[str]]:
    """An agent that has published its first report; its log is read up to there."""
    environ = {k: v for k, v in os.environ.items() if k not in {"JOURNAL_STREAM", "NOTIFY_SOCKET"}}
    with start_process(*node.run_args(), stream="stderr", env=environ) as process:
        line_with(process.stderr, "hugepages-2mi-node0 Healthy")
        yield process


def run_once(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command once, also if it has to wait for an answer in vain."""
    return subprocess.run([*AGENT, *args], capture_output=True, text=True, check=False, timeout=PATIENCE_S)


# --- scan --------------------------------------------------------------------------------------------------


def test_scan_shows_the_node_without_an_agent(node):
    done = run_command("scan", *node.roots)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("worker-7  2 devices: 2 healthy\n")
    assert re.search(r"^● hugepages-2mi-node0 +Healthy$", done.stdout, re.MULTILINE)
    assert "no thermal_throttle" in done.stdout
    assert not node.runtime_dir.exists()


def test_scan_json_is_one_document_with_processes(node, agent):
    document = json.loads(run_command("scan", "-o", "json", *node.roots).stdout)
    assert {d["name"]: d["health"] for d in document["devices"]} == {
        "cpu-node0": "Healthy", "hugepages-2mi-node0": "Healthy"
    }  # fmt: skip
    assert agent.pid in [p["pid"] for p in document["processes"] if p["name"] == "drahealth"]


def test_scan_exits_with_2_when_a_pool_is_smaller_than_configured(node, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[expect.hugepages]\nhugepages-2mi-node0 = 9\n")
    done = run_command("scan", "--config", str(file), *node.roots)
    assert done.returncode == 2
    assert re.search(r"✖ hugepages-2mi-node0 +Unhealthy +mem.hugepages.pool_shrunk: .*\n +→ ", done.stdout)


NPD_CONFIG = Path(__file__).parent.parent / "deploy" / "node-problem-detector" / "drahealth.json"


def test_plugin_of_node_problem_detector_has_one_line_and_its_exit_codes(node, tmp_path):
    monitor = json.loads(NPD_CONFIG.read_text())
    (rule,) = monitor["rules"]
    assert rule["condition"] in {condition["type"] for condition in monitor["conditions"]}
    assert (monitor["plugin"], rule["type"]) == ("custom", "permanent")
    assert rule["timeout"] == monitor["pluginConfig"]["timeout"], "a rule's may not be longer"
    healthy = run_command(*rule["args"], *node.roots)
    assert (healthy.returncode, healthy.stdout) == (0, "no device of 2 is unhealthy\n")
    file = tmp_path / "config.toml"
    file.write_text("[expect.hugepages]\nhugepages-2mi-node0 = 9\n")
    shrunk = run_command(*rule["args"], "--config", str(file), *node.roots)
    line = "unhealthy, 1 of 2 devices: hugepages-2mi-node0 (mem.hugepages.pool_shrunk)\n"
    assert (shrunk.returncode, shrunk.stdout) == (1, line)
    (tmp_path / "empty").mkdir()
    empty = run_command(*rule["args"], *node.roots, "--sysfs-root", str(tmp_path / "empty"))
    assert (empty.returncode, empty.stdout) == (2, "no device was found\n")


def test_scan_without_devices_exits_as_unknown(node, tmp_path):
    (tmp_path / "empty").mkdir()
    done = run_command("scan", *node.roots, "--sysfs-root", str(tmp_path / "empty"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "\n  no device found: cpus absent" in done.stdout
    assert "\n\n\n" not in done.stdout


def test_scan_with_hanging_reads_names_the_sources(node):
    cpulist = node.sysfs / "devices/system/node/node0/cpulist"
    cpulist.unlink()
    os.mkfifo(cpulist)
    done = run_once("scan", *node.roots)
    assert done.returncode == 3
    assert re.search(r"a read hangs in the kernel; no data from: .*cpus", done.stderr)


def test_ctrl_c_in_a_scan_exits_130_without_a_message(node):
    cpulist = node.sysfs / "devices/system/node/node0/cpulist"
    cpulist.unlink()
    os.mkfifo(cpulist)
    with start_process(*AGENT, "scan", *node.roots, stream="stderr") as scan:
        with cpulist.open("w"):  # returns when the scan reads, which has a limit of 5 s
            scan.send_signal(signal.SIGINT)
            assert scan.stderr.read() == ""
        assert scan.wait() == 130


# --- run ---------------------------------------------------------------------------------------------------


def test_run_without_a_terminal_logs_changes_until_sigterm(node, agent):
    node.resize(4)
    line = line_with(agent.stderr, "Unhealthy")
    assert re.match(rf"{TIME} error hugepages-2mi-node0 Unhealthy mem.hugepages.pool_shrunk: ", line)
    node.resize(8)
    assert re.match(rf"{TIME} info hugepages-2mi-node0 Healthy", line_with(agent.stderr, "hugepages-2mi"))
    agent.send_signal(signal.SIGTERM)
    assert agent.wait() == 0
    assert not Path(node.agent_socket).exists()


def test_run_for_the_journal_logs_priorities(node):
    read, write = os.pipe()
    stat = os.fstat(write)
    environ = os.environ | {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}
    with os.fdopen(read) as log, subprocess.Popen(node.run_args(), stderr=write, env=environ) as process:
        os.close(write)
        try:
            assert line_with(log, "hugepages-2mi-node0") == "<6>hugepages-2mi-node0 Healthy\n"
        finally:
            process.kill()


def test_run_with_json_log_writes_an_object_per_line(node):
    with subprocess.Popen(
        [*node.run_args(), "--log-format", "json"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            found = json.loads(line_with(process.stderr, '"object": "hugepages-2mi-node0"'))
        finally:
            process.kill()
    assert (found["state"], found["severity"], found["level"]) == ("Healthy", "ok", "info")


def test_refused_agent_ends_with_an_unread_log(node, agent):
    with unread_pipe() as stderr:
        assert (
            subprocess.run(node.run_args(), stderr=stderr, timeout=PATIENCE_S, check=False).returncode == 75
        )


def test_second_agent_on_the_directory_is_refused(node, agent):
    done = subprocess.run(node.run_args(), capture_output=True, text=True, check=False)
    assert done.returncode == 75
    text = f"another agent (pid {agent.pid} on the host or in its container) serves it; stop that agent"
    assert text in done.stderr


def test_second_agent_on_the_state_of_a_removed_directory_is_refused(node, short_tmp):
    state = ("--state-dir", str(short_tmp / "state"))
    with start_process(*node.run_args(), *state, stream="stderr") as agent:
        line_with(agent.stderr, "hugepages-2mi-node0 Healthy")
        node.runtime_dir.rename(short_tmp / "gone")
        other = ("--runtime-dir", str(short_tmp / "other"))
        done = subprocess.run([*node.run_args(), *state, *other], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (
            75,
            f"drahealth: state directory {short_tmp}/state: another agent (pid {agent.pid} on the host or in "
            "its container) uses it; stop that agent\n",
        )


@pytest.mark.parametrize("directory", ["run", "state"])
def test_directory_that_all_users_may_write_is_refused(node, short_tmp, directory):
    unsafe = short_tmp / "unsafe"
    unsafe.mkdir()
    unsafe.chmod(0o777)
    flag = {"run": "--runtime-dir", "state": "--state-dir"}[directory]
    noun = {"run": "directory", "state": "state directory"}[directory]
    done = subprocess.run([*node.run_args(), flag, str(unsafe)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        78,
        f"drahealth: {noun} {unsafe}: has mode 0777: all users may write to it; run chmod o-w on it, or "
        f"choose another directory with {flag}\n",
    )


@pytest.mark.parametrize(
    ("name", "noun", "error"),
    [
        ("", "path", "is not a directory; choose another with --runtime-dir"),
        ("agent.lock", "lock file", "is not a regular file; remove it"),
        ("agent.sock", "file", "is not a socket, but a socket must be created there; remove the file"),
        ("drivers", "path", "is not a directory; choose another with --runtime-dir"),
    ],
)
def test_wrong_file_type_in_the_runtime_directory_is_refused(node, name, noun, error):
    path = node.runtime_dir / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    done = subprocess.run(node.run_args(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (78, f"drahealth: {noun} {path}: {error}\n")


def test_run_on_a_terminal_shows_a_live_table(node):
    with run_on_terminal(*PATIENT, *node.run_args()[len(AGENT) :]) as (process, screen):
        screen.read_until(node.driver_socket)
        screen.read_until("2 devices: ")
        node.resize(4)
        screen.read_until("1 unhealthy")
        process.send_signal(signal.SIGINT)
        screen.read_until("\x1b[?1049l")
        assert "1 unhealthy" in screen.read_until("cgroups")
        assert process.wait() == 0


def test_agent_on_a_full_disk_runs_and_locks_its_directory(node, short_tmp):
    program = f"""
import signal, subprocess
disk = {str(short_tmp)!r}
with open(f"{{disk}}/full", "wb", buffering=0) as full:
    full.write(bytes(1 << 20))  # as much as fits
command = {node.run_args()!r}
command += ["--runtime-dir", f"{{disk}}/run", "--state-dir", f"{{disk}}/state"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
    next(line for line in agent.stderr if "hugepages-2mi-node0 Healthy" in line)
    second = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    print(second.returncode, second.stderr, end="")
    agent.send_signal(signal.SIGTERM)
    agent.stderr.read()
    print(agent.wait())
"""
    assert run_on_small_disk(program, short_tmp) == [
        f"75 drahealth: runtime directory {short_tmp}/run: another agent (pid unknown on the host or in its "
        "container) serves it; stop that agent",
        "0",
    ]


# --- watch -------------------------------------------------------------------------------------------------


def test_watch_in_a_pipe_prints_changes_and_exits_69(node, agent):
    with start_process(
        *AGENT, "watch", "--runtime-dir", str(node.runtime_dir), stderr=subprocess.PIPE
    ) as watch:
        assert re.fullmatch(rf"{TIME} cpu-node0 Healthy\n", next(watch.stdout))
        assert re.fullmatch(rf"{TIME} hugepages-2mi-node0 Healthy\n", next(watch.stdout))
        node.resize(4)
        line = line_with(watch.stdout, "hugepages")
        assert re.match(rf"{TIME} hugepages-2mi-node0 Unhealthy mem.hugepages.pool_shrunk: ", line)
        agent.send_signal(signal.SIGTERM)
        assert watch.wait() == 69
        reason = watch.stderr.read()
        assert "agent shutting down" in reason or "the I/O thread did not stop within" in agent.stderr.read()


def test_watch_follows_a_driver_socket(node, agent):
    with start_process(*AGENT, "watch", node.driver_socket, "-o", "json") as watch:
        first = json.loads(next(watch.stdout))
        assert [d["name"] for d in first["devices"]] == ["cpu-node0", "hugepages-2mi-node0"]
        node.resize(4)
        health = {d["name"]: d["health"] for d in json.loads(next(watch.stdout))["devices"]}
        while health["hugepages-2mi-node0"] == "Healthy":
            health = {d["name"]: d["health"] for d in json.loads(next(watch.stdout))["devices"]}
        assert health == {"cpu-node0": "Healthy", "hugepages-2mi-node0": "Unhealthy"}
        watch.send_signal(signal.SIGINT)
        assert watch.wait() == 130


def test_watch_once_prints_a_table_and_exits(node, agent):
    done = run_command("watch", "--once", node.agent_socket)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("worker-7  2 devices: 2 healthy\n")
    assert "SINCE  VERIFIED" in done.stdout
    assert run_command("watch", "--once", "-o", "json", node.driver_socket).returncode == 0


def test_watch_once_of_a_driver_socket_shows_no_time_of_change(node, agent):
    done = run_command("watch", "--once", node.driver_socket)
    assert done.returncode == 0
    assert "VERIFIED" in done.stdout
    assert "SINCE" not in done.stdout, "the kubelet's API has none"


def test_watch_once_of_a_stopped_agent_exits_69(node, agent):
    agent.send_signal(signal.SIGSTOP)
    done = run_once("watch", "--once", node.agent_socket)
    assert done.returncode == 69
    assert "no health report within 10 s" in done.stderr


def test_watch_on_a_terminal_redraws_its_table(node, agent):
    with run_on_terminal(*PATIENT, "watch", node.agent_socket) as (process, screen):
        screen.read_until("2 healthy")
        node.resize(4)
        screen.read_until("1 unhealthy")
        agent.send_signal(signal.SIGTERM)
        screen.read_until(f"drahealth: socket {node.agent_socket}: ")
        assert process.wait() == 69


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_watch_restores_its_terminal_after_a_signal(node, agent, number):
    with run_on_terminal(*PATIENT, "watch", node.agent_socket) as (process, screen):
        screen.read_until("2 healthy")
        process.send_signal(number)
        screen.read_until("\x1b[?25h\x1b[?1049l")
        assert process.wait() == 130


# --- status ------------------------------------------------------------------------------------------------


def test_status_shows_the_agent_and_its_devices(node, agent):
    done = run_command("status", "--runtime-dir", str(node.runtime_dir))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("worker-7  2 devices: 2 healthy\n")
    assert f"pid {agent.pid}, up " in done.stdout
    document = json.loads(run_command("status", "-o", "json", "--runtime-dir", str(node.runtime_dir)).stdout)
    assert document["pid"] == agent.pid
    assert document["rssBytes"] > 1 << 20
    assert document["devices"] == {"ok": 2}


def test_status_finds_the_agent_by_the_environment(node, agent):
    done = run_command("status", env=os.environ | {"DRAHEALTH_RUNTIME_DIR": str(node.runtime_dir)})
    assert done.returncode == 0, done.stderr


def test_status_of_a_stopped_agent_exits_69(node, agent):
    agent.send_signal(signal.SIGSTOP)
    done = run_once("status", "--runtime-dir", str(node.runtime_dir))
    assert done.returncode == 69
    assert "no answer from the agent within 5 s" in done.stderr


# --- outputs that take nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["status", "watch --once", "watch", "watch -o json"])
def test_failed_output_of_a_client_exits_74_with_one_line(node, agent, verb):
    command = [*AGENT, *verb.split(), "--runtime-dir", str(node.runtime_dir)]
    while True:  # until an agent without CPU answers
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        if not any(error in done.stderr for error in LATE_ANSWERS):
            break
    assert done.returncode == 74
    assert done.stderr == "drahealth: standard output: No space left on device\n"


def test_watch_on_a_closed_terminal_exits_74(node, agent):
    screen, terminal = pty.openpty()
    command = [*AGENT, "watch", node.agent_socket]
    environ = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(
        command, stdout=terminal, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        os.close(terminal)
        try:
            try:
                Screen(screen).read_until("2 healthy")
            finally:
                os.close(screen)
            pages = itertools.cycle((4, 5))  # the loss of a terminal is noticed at the next drawing
            eventually(lambda: node.resize(next(pages)) or process.poll() is not None, "its end")
            assert process.stderr.read() == "drahealth: the terminal: Input/output error\n"
            assert process.wait() == 74
        finally:
            process.kill()


@contextmanager
def full_disk() -> Iterator[int]:
    with open("/dev/full", "wb", buffering=0) as full:
        yield full.fileno()


@contextmanager
def unread_pipe() -> Iterator[int]:
    """Yield the writing end of a full pipe: every write to it blocks."""
    read, write = os.pipe()
    with os.fdopen(os.open(f"/proc/self/fd/{write}", os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as same:
        while same.write(b"#"):
            pass
    yield write
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("log", [full_disk, unread_pipe])
def test_agent_with_a_failing_log_serves_until_sigterm(node, log):
    flags = ["--runtime-dir", str(node.runtime_dir)]
    with log() as stderr, subprocess.Popen(node.run_args(), stderr=stderr) as agent:
        try:
            eventually(lambda: run_command("status", *flags).returncode == 0, "an agent with a report")
            node.resize(4)
            eventually(lambda: run_command("status", *flags).returncode == 2, "an agent with a new report")
            agent.send_signal(signal.SIGTERM)
            assert agent.wait() == 0
        finally:
            agent.kill()


# --- terminals ---------------------------------------------------------------------------------------------


class Screen:
    """Reading end of a pseudo-terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unread = ""

    def read_until(self, text: str) -> str:
        """Return what is shown up to `text`, without colours."""
        end_s = time.monotonic() + PATIENCE_S
        while text not in self._unread:
            remaining_s = max(0.0, end_s - time.monotonic())  # a table that is drawn again never ends
            assert select.select([self._fd], [], [], remaining_s)[0], f"no {text!r}, but {self._unread!r}"
            data = os.read(self._fd, 65536).decode("utf-8", "replace")
            self._unread += re.sub(r"\x1b\[[0-9;]*m", "", data)
        before, _, self._unread = self._unread.partition(text)
        return before + text


@contextmanager
def run_on_terminal(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    """Run a process on its own pseudo-terminal; yield the process and the screen."""
    screen, terminal = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR"}} | {
        "TERM": "xterm"
    }
    # a suite that nohup runs ignores SIGHUP, and so would the process
    reset = ("env", "--default-signal=HUP", *command)
    with subprocess.Popen(reset, stdin=terminal, stdout=terminal, stderr=terminal, env=environ) as process:
        os.close(terminal)
        try:
            yield process, Screen(screen)
        finally:
            process.kill()
            os.close(screen)
