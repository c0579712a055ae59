"""Failures of the bench: a line with the reason, at once, and the other suites go on."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from patience import PATIENCE_S

from agent.bench import main as bench_main
from agent.bench.file_trees import temporary_directory
from agent.bench.processes import (
    HEALTH_METHOD,
    ChildProcess,
    FakeNvml,
    ProcessError,
    StartedProcess,
    driver_socket,
    start_agent,
    start_child,
    start_subscriber,
)
from agent.bench.report import decode_figures
from agent.bench.result import MeasurementError, RunSize, SuiteOutcome, find_reason

ENDED: Final = r"^process agent run ended with exit code 64: .*--no-such-option"
"""Pattern of the error if an agent has ended because of its options; notes follow the text."""


@contextlib.contextmanager
def child(program: str) -> Iterator[ChildProcess]:
    with start_child("test program", [sys.executable, "-c", program], ChildProcess) as process:
        yield process


@contextlib.contextmanager
def failing_agent(directory: Path) -> Iterator[StartedProcess]:
    with start_agent(directory, ["--no-such-option"]) as agent:
        yield agent


def test_reason_is_the_first_error_of_a_compiler_or_the_last_line() -> None:
    compiler = ["In file a.c:", "a.c:1:10: fatal error: b.h: No such file", "1 | #include", "terminated."]
    assert find_reason("\n".join(compiler)) == compiler[1]
    assert find_reason("Traceback ...:\n  raise ValueError\nValueError: 7\n\n") == "ValueError: 7"
    assert (
        find_reason("drahealth: no such option\ntry 'drahealth run --help'\n") == "drahealth: no such option"
    )
    assert find_reason(" \n") == ""
    assert len(find_reason("long " * 1000)) <= 300


def test_measurement_error_has_one_line_and_the_whole_output_as_a_note() -> None:
    error = MeasurementError("make failed", "cc a.c\nno such luck\n")
    assert str(error) == "make failed: no such luck"
    assert error.__notes__ == ["cc a.c\nno such luck"]
    assert not hasattr(MeasurementError("no output"), "__notes__")


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("import sys; sys.exit('no such luck')", "process test program ended with exit code 1: no such luck"),
        (f"import os; os.kill(os.getpid(), {signal.SIGKILL})", "process test program was killed by SIGKILL"),
    ],
    ids=["exit", "signal"],
)
def test_wait_for_an_ended_child_raises_how_it_ended(program: str, end: str) -> None:
    with child(program) as process:
        for _ in range(2):
            with pytest.raises(ProcessError) as raised:
                process.wait()
            assert str(raised.value) == end
            assert process.discard_lines() == 0


def test_wait_returns_all_lines_of_an_ended_child() -> None:
    with child("print('{\"n\": 1}'); print('{\"n\": 2}')") as process:
        assert [process.wait()["n"], process.wait()["n"]] == [1, 2]
        with pytest.raises(ProcessError, match=r"^process test program ended with exit code 0$"):
            process.wait()


def test_send_line_to_an_ended_child_raises_how_it_ended() -> None:
    with child("import sys; sys.exit('no such luck')") as process:
        with pytest.raises(ProcessError):
            process.wait()
        with pytest.raises(ProcessError, match=r"ended with exit code 1: no such luck\n"):
            process.send_line("one")


def test_child_that_closes_its_output_is_no_endless_wait() -> None:
    with (
        child("import os, sys; os.close(1); sys.stdin.read()") as process,
        pytest.raises(ProcessError, match=r"^process test program: closed its standard output$"),
    ):
        process.wait()


def test_client_of_an_ended_agent_raises_how_the_agent_ended() -> None:
    with (
        temporary_directory() as directory,
        pytest.raises(ProcessError, match=ENDED),
        failing_agent(directory) as agent,
        start_subscriber(driver_socket(directory), HEALTH_METHOD, "", agent) as client,
    ):
        client.wait()


def test_connection_to_fake_nvml_of_an_ended_agent_raises_how_it_ended() -> None:
    with temporary_directory() as directory:
        fake = FakeNvml(directory / "none", directory / "none", directory / "none.sock")
        with (
            pytest.raises(ProcessError, match=ENDED),
            failing_agent(directory) as agent,
            fake.connect(agent),
        ):
            raise AssertionError("nothing listens")


def test_exception_after_the_end_of_the_agent_reports_how_it_ended() -> None:
    """The files of an ended process in /proc cannot be read."""

    def read_files(agent: StartedProcess) -> None:
        os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
        raise FileNotFoundError

    with (
        temporary_directory() as directory,
        pytest.raises(ProcessError, match=ENDED),
        failing_agent(directory) as agent,
    ):
        read_files(agent)


def test_other_failures_have_the_log_of_the_agent_as_a_note() -> None:
    error = MeasurementError("too slow")
    with (
        contextlib.suppress(MeasurementError),
        temporary_directory() as directory,
        contextlib.ExitStack() as stack,
    ):
        agent = stack.enter_context(start_agent(directory, ["--cgroupfs-root", str(directory / "none")]))
        client = stack.enter_context(start_subscriber(driver_socket(directory), HEALTH_METHOD, "", agent))
        client.wait(lambda line: "found" in line)
        raise error
    assert str(error) == "too slow"
    (log,) = error.__notes__
    assert log.startswith("log of the agent:\n")
    assert "drahealth" in log


# --- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def no_agent(tmp_path: Path) -> dict[str, str]:
    """Environment in which an agent ends at its start."""
    program = "import os, sys\nif sys.orig_argv[1:4] == ['-m', 'agent', 'run']:\n"
    program += "    os.write(2, b'first\\nno such luck\\n')\n    os._exit(7)\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def bench(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agent.bench", "--quick", "--json", *arguments]
    limit_s = 5 * PATIENCE_S
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )


def test_suite_whose_agent_ends_is_one_line_and_others_go_on(no_agent: dict[str, str]) -> None:
    done = bench(no_agent, "--suite", "startup", "--suite", "encode")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "measuring startup ...",
        "python -m agent.bench: startup: process agent run ended with exit code 7: no such luck; "
        "--verbose prints more",
        "measuring encode ...",
    ]
    assert "encode.8.core" in decode_figures(done.stdout)


def test_verbose_prints_traceback_and_log_of_the_agent(no_agent: dict[str, str]) -> None:
    done = bench(no_agent, "--suite", "startup", "--verbose")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert (
        lines[1] == "python -m agent.bench: startup: process agent run ended with exit code 7: no such luck"
    )
    assert "Traceback (most recent call last):" in lines
    assert lines[-2:] == ["first", "no such luck"]


def raise_error(error: Exception) -> SuiteOutcome:
    raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            AssertionError("the change must affect a verdict"),
            "AssertionError: the change must affect a verdict",
        ),
        (TypeError(), "TypeError"),
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),
        (subprocess.CalledProcessError(1, "a\nb"), "CalledProcessError: Command 'a b' returned non-zero"),
        (ExceptionGroup("", [OSError(28, "No space left")]), "OSError: [Errno 28] No space left"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_exception_of_a_suite_is_one_line_and_others_go_on(
    error: Exception,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured: list[RunSize] = []

    def measure(run_size: RunSize) -> SuiteOutcome:
        measured.append(run_size)
        return SuiteOutcome()

    monkeypatch.setitem(bench_main.SUITES, "poll", lambda _: raise_error(error))
    monkeypatch.setitem(bench_main.SUITES, "encode", measure)
    monkeypatch.setattr(sys, "argv", ["bench", "--suite", "poll", "--suite", "encode"])
    assert bench_main.main() == 1
    printed = capsys.readouterr()
    failure = printed.err.splitlines()[1]
    assert printed.err.splitlines() == ["measuring poll ...", failure, "measuring encode ..."]
    assert failure.startswith(f"python -m agent.bench: poll: {text}")
    assert "(main.py:" in failure
    assert failure.endswith("; --verbose prints more")
    assert printed.out.count("not measured: poll: entire suite, which failed") == 1
    assert measured
