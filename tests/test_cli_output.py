"""Output that cannot be written: commands report it in one line and exit with an error code."""

import fcntl
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S
from small_disk import run_on_small_disk

from agent.system.process_stat import describe_exit

AGENT = [sys.executable, "-m", "agent"]
BENCH = [sys.executable, "-m", "agent.bench"]
VERBS = [
    "--help",
    "--version",
    "run --help",
    "scan",
    "scan -o json",
    "audit",
    "prepares",
    "prepares --codes",
    "history",
    "classify --errno ENOSPC",
    "checks",
    "conform --checks",
]
"""Command lines that need no agent and print something."""


def shell(redirected: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run the command with redirections of a shell, such as ``>&-``."""
    script = ["sh", "-c", f"{shlex.join(command)} {redirected}"]
    while True:
        done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        if "was not read twice within" not in done.stderr:  # a busy machine may take longer for a scan
            return done


def isolating_prefix(directory: Path) -> list[str]:
    """Return a prefix that keeps a command away from the files of this machine."""
    return ["env", *(f"DRAHEALTH_{name}_DIR={directory}" for name in ("STATE", "RUNTIME", "KUBELET"))]


# --- standard output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("redirected", "reason"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_failed_output_exits_74_with_one_line(tmp_path, verb, redirected, reason):
    done = shell(redirected, *isolating_prefix(tmp_path), *AGENT, *verb.split())
    assert (done.returncode, done.stdout) == (74, "")
    assert done.stderr == f"drahealth: standard output: {reason}\n"


def test_output_cut_off_by_a_full_disk_exits_74(tmp_path):
    program = """
import subprocess, sys
open("full", "wb").write(bytes(64 << 10))
with open("out", "wb") as out:
    command = [sys.executable, "-m", "agent", "checks", "-o", "markdown"]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
print(done.returncode, done.stderr, end="")
print(0 < open("out", "rb").seek(0, 2) < 100_000)
""".replace('open("', f'open("{tmp_path}/')
    assert run_on_small_disk(program, tmp_path) == [
        "74 drahealth: standard output: No space left on device",
        "True",
    ]


def test_pipe_closed_while_printing_exits_141_without_a_message(tmp_path):
    """The command writes more than a pipe holds, and a part of it is read."""
    command = [*AGENT, "checks", "-o", "markdown"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


def test_non_blocking_pipe_is_waited_for():
    """Another process that shares a pipe may have made it non-blocking, and may read slowly."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)  # it is soon full
    os.set_blocking(write, False)
    command = [*AGENT, "checks", "-o", "markdown"]
    with os.fdopen(read) as out, subprocess.Popen(command, stdout=write) as process:
        os.close(write)
        assert out.read() == (Path(__file__).parent.parent / "docs" / "checks.md").read_text()
        assert process.wait() == 0


# --- standard error ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-", ">&- 2>&-", ">/dev/full 2>&1"])
def test_error_that_cannot_be_printed_keeps_its_exit_code(redirected):
    done = shell(redirected, *AGENT, "scna")
    assert (done.returncode, done.stdout, done.stderr) == (64, "", "")


def test_closed_standard_error_fails_only_commands_that_use_it(tmp_path):
    silent = shell("2>&-", *isolating_prefix(tmp_path), *AGENT, "history")
    assert (silent.returncode, silent.stderr) == (0, "")
    (tmp_path / "prepares.json").mkdir()
    file = str(tmp_path / "prepares.json")
    assert shell("", *isolating_prefix(tmp_path), *AGENT, "prepares", "--file", file).returncode == 70
    assert shell("2>&-", *isolating_prefix(tmp_path), *AGENT, "prepares", "--file", file).returncode == 74


def test_no_file_gets_the_number_of_a_closed_descriptor(tmp_path):
    """Otherwise printed text would be written into the file."""
    program = """
import os, sys
from agent.system.output import unbuffer_outputs
unbuffer_outputs()
assert os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) > 2
"""
    file = tmp_path / "state"
    assert shell("<&- >&- 2>&-", sys.executable, "-c", program, str(file)).returncode == 0
    assert file.read_bytes() == b""


def test_log_on_a_full_disk_loses_lines_and_continues():
    program = """
import logging, sys, warnings
from agent.cli.output import log as logs
from agent.cli.output.log import LineFormatter, ReportLogThread, install_log_handler
from agent.system.output import unbuffer_outputs
logs.CLOSE_TIMEOUT_S = 60.0
unbuffer_outputs()
log = ReportLogThread(sys.stderr, LineFormatter(journal=False))
install_log_handler(log.queue)
logging.getLogger("agent").error("a line")
warnings.warn("another")
print("lives", log.close())
"""
    for redirected in ("2>/dev/full", "2>&-"):
        done = shell(redirected, sys.executable, "-c", program)
        assert (done.returncode, done.stdout, done.stderr) == (0, "lives True\n", "")


def test_library_log_line_that_cannot_be_written_is_dropped():
    program = """
import logging
from agent.system.output import unbuffer_outputs
unbuffer_outputs()
logging.getLogger("agent.example").warning("a line")
print("lives")
"""
    for redirected in ("2>/dev/full", "2>&-"):
        done = shell(redirected, sys.executable, "-c", program)
        assert (done.returncode, done.stdout) == (0, "lives\n")


# --- the bench ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["--help", "--check bytes"])
def test_bench_output_that_fails_exits_74(arguments):
    done = shell(">/dev/full", *BENCH, *arguments.split())
    assert done.returncode == 74
    assert done.stderr == "python -m agent.bench: standard output: No space left on device\n"


def test_bench_with_a_closed_pipe_exits_141():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*BENCH, "--help"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("wait_status", "end"),
    [
        (0, "ended with exit code 0"),
        (3 << 8, "ended with exit code 3"),
        (11, "was killed by SIGSEGV"),
        (11 | 0x80, "was killed by SIGSEGV"),  # with a core dump
        (40, "was killed by signal 40"),  # a real-time signal has no name
    ],
)
def test_end_of_a_process_is_described_by_exit_code_or_signal(wait_status, end):
    assert describe_exit(wait_status) == end


# --- a working directory that was removed ------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        "run --runtime-dir relative",
        "scan --sysfs-root relative",
        "scan --nvml-library ./libnvidia-ml.so.1",
        "status --runtime-dir relative",
        "config check --state-dir relative",
    ],
)
def test_relative_path_in_a_removed_working_directory_is_an_error(tmp_path, arguments):
    path = next(argument for argument in arguments.split() if "relative" in argument or argument[0] == ".")
    removed = tmp_path / "removed"
    program = """
import os, sys
os.mkdir(sys.argv[1])
os.chdir(sys.argv[1])
os.rmdir(sys.argv[1])
os.execv(sys.argv[2], sys.argv[2:])
"""
    command = [
        *isolating_prefix(tmp_path),
        sys.executable,
        "-c",
        program,
        str(removed),
        *AGENT,
        *arguments.split(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert (
        f"path {path!r} is relative, and the working directory cannot be used: No such file or directory; "
        "write an absolute path" in done.stderr
    )
    assert "Traceback" not in done.stderr
