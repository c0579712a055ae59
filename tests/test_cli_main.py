"""The command itself: help, suggestions, and an exit code for each way in which it can end."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_reports import BUSY

from agent import __version__
from agent.cli.exits import EXIT_OF_ERROR, EXIT_OF_SEVERITY, INTERNAL, exit_of_severities
from agent.cli.main import VERBS, build_parser, complain, main, verb_of
from agent.errors import (
    AgentUnreachable,
    Busy,
    ConfigError,
    DrahealthError,
    PermissionDenied,
    ProbeError,
    UsageError,
)
from agent.model.health import Severity

REFERENCE = Path(__file__).parent.parent / "docs" / "configuration.md"


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and what was said on standard error."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


# --- exit codes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("severities", "code"),
    [
        ([Severity.OK, Severity.INFO], 0),
        ([Severity.OK, Severity.DEGRADED], 1),
        ([Severity.DEGRADED, Severity.UNHEALTHY, Severity.UNKNOWN], 2),
        ([Severity.DEGRADED, Severity.UNKNOWN, Severity.OK], 3),
    ],
)
def test_unhealthy_outranks_unknown_and_that_degraded(severities, code):
    assert exit_of_severities(severities) == code


def test_no_device_is_no_knowledge_and_never_healthy():
    assert exit_of_severities([]) == 3


def test_every_severity_has_an_exit_code():
    assert set(EXIT_OF_SEVERITY) == set(Severity)
    assert exit_of_severities(d.severity for d in BUSY.devices) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 64),
        (AgentUnreachable("x"), 69),
        (DrahealthError("x"), 70),
        (Busy("x"), 75),
        (PermissionDenied("x"), 77),
        (PermissionError("x"), 77),
        (ConfigError("x"), 78),
        (ProbeError("x"), 70),
    ],
)
def test_every_error_of_ours_has_an_exit_code_and_one_line(capsys, error, code):
    assert complain(error) == code
    assert capsys.readouterr().err == "drahealth: x\n"


def test_an_error_from_a_nursery_is_the_error_inside(capsys):
    assert complain(ExceptionGroup("nursery", [ExceptionGroup("inner", [ConfigError("x")])])) == 78
    assert capsys.readouterr().err == "drahealth: x\n"


def test_ctrl_c_is_quiet(capsys):
    assert complain(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_mistake_of_ours_shows_its_traceback(capsys):
    def fails() -> None:
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError) as caught:
        fails()
    assert complain(caught.value) == INTERNAL == 70
    err = capsys.readouterr().err
    assert "in fails" in err
    assert err.endswith("drahealth: this is a mistake in drahealth; please report it with the lines above\n")


def test_two_errors_at_once_are_shown_in_full(capsys):
    assert complain(ExceptionGroup("both", [ConfigError("x"), ValueError("y")])) == INTERNAL
    assert "ConfigError: x" in capsys.readouterr().err


# --- usage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["scna"],
            "'scna' is none of run, scan, watch, status, explain, audit, prepares, history, classify, "
            "checks, conform; did you mean 'scan'?\ntry 'drahealth --help'",
        ),
        (
            ["zzz"],
            "'zzz' is none of run, scan, watch, status, explain, audit, prepares, history, classify, "
            "checks, conform\ntry 'drahealth --help'",
        ),
        (["run", "--perid", "1s"], "'--perid' is no argument of run; did you mean '--period'?"),
        (["run", "--driverr=x"], "'--driverr' is no argument of run; did you mean '--driver'?"),
        (["watch", "--onse"], "'--onse' is no argument of watch; did you mean '--once'?"),
        (["scan", "extra"], "'extra' is no argument of scan\ntry 'drahealth scan --help'"),
        (
            ["scan", "-o", "jsn"],
            "'jsn' is none of table, json; did you mean 'json'?\ntry 'drahealth scan --help'",
        ),
        (["run", "--peri", "1s"], "'--peri' is no argument of run; did you mean '--period'?"),
        ([], "the following arguments are required: VERB"),
        (["scan", "--config"], "argument --config: expected one argument"),
    ],
)
def test_a_mistyped_command_line_is_64_with_a_suggestion(capsys, argv, words):
    code, err = told(capsys, *argv)
    assert code == 64
    assert err.startswith(f"drahealth: {words}")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["run", "--period", "5ms"], 78, "--period: 5ms is below the limit of 10ms"),
        (["run", "--driver", "A_b"], 78, "--driver: driver name 'A_b' is no DNS subdomain"),
        (["scan", "--config", "/none.toml"], 78, "/none.toml: No such file or directory"),
        (["status", "--runtime-dir", "/none"], 69, "/none/agent.sock: no such socket; is the agent running?"),
        (["watch", "--runtime-dir", "/none"], 69, "/none/agent.sock: no such socket; is the agent running?"),
        (["watch", "/none.sock"], 69, "/none.sock: no such socket; is the agent running?"),
        (["watch", "--once", "/none.sock"], 69, "/none.sock: no such socket; is the agent running?"),
    ],
)
def test_errors_of_the_verbs_reach_the_exit_code(capsys, argv, code, words):
    assert told(capsys, *argv)[0] == code
    assert told(capsys, *argv)[1].startswith(f"drahealth: {words}")


def test_the_file_can_be_named_in_the_environment_and_a_flag_wins(capsys, monkeypatch):
    monkeypatch.setenv("DRAHEALTH_CONFIG", "/none.toml")
    assert told(capsys, "status") == (78, "drahealth: /none.toml: No such file or directory\n")
    assert told(capsys, "status", "--config", "/nor.toml") == (
        78,
        "drahealth: /nor.toml: No such file or directory\n",
    )


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"drahealth {__version__}\n"


# --- help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_starts_with_two_examples(capsys, argv):
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "examples:"
    assert all(line.startswith("  drahealth ") for line in lines[1:3])
    assert lines[3:5] == ["", next(line for line in lines if line.startswith("usage: drahealth"))]


@pytest.mark.parametrize("verb", [verb_of(name) for name in VERBS], ids=VERBS)
def test_the_examples_are_command_lines_that_parse(verb):
    parser, _ = build_parser()
    for command, _ in verb.examples:
        program, *argv = shlex.split(command.partition(" |")[0])
        assert program == "drahealth"
        assert parser.parse_args(argv).verb == verb.name


def test_every_flag_is_in_the_reference_with_the_verbs_that_take_it():
    _, parsers = build_parser()
    takers: dict[str, set[str]] = {}
    for name, parser in parsers.items():
        for flag in re.findall(r"--[a-z-]+", parser.format_usage().replace("[-o {", "[--output {")):
            takers.setdefault(flag, set()).add(name)
    rows = {}
    for line in REFERENCE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if flags := re.findall(r"`(--[a-z-]+)`", cells[0]):
            (verbs,) = (cell for cell in cells if re.fullmatch(r"all|(`[a-z]+`(, )?)+", cell))
            rows[flags[0]] = set(parsers) if verbs == "all" else set(re.findall(r"\w+", verbs))
    assert rows == takers


def test_every_exit_code_is_in_the_reference():
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE.read_text(), re.MULTILINE)}
    assert codes == {*EXIT_OF_SEVERITY.values(), *(code for _, code in EXIT_OF_ERROR)}


# --- as a process ------------------------------------------------------------------------------------------


def test_help_and_a_mistake_cost_no_event_loop_and_no_grpc():
    heavy = {"trio", "asyncio", "grpclib", "betterproto", "psutil", "cffi", "agent.app.daemon", "agent.serve"}
    code = """
import sys
from agent.cli.main import main
main(['--help'])
main(['scna'])
main(['run', '--period', '0s'])
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy.isdisjoint(done.stderr.splitlines()[-1].split())


def test_an_agent_has_nothing_of_what_is_embedded_and_no_betterproto():
    """They are 7 MiB, which an agent that serves health alone would never use. Nor does it know words for who
    uses what, before a kubelet is there that knows claims."""
    heavy = {"agent.api", "agent.embed", "betterproto", "dateutil", "email", "google.protobuf", "psutil"}
    heavy |= {"agent.model.claim_sources", "agent.model.uses", "agent.sources.kubelet_checkpoint"}
    code = """
import sys
from agent.app import daemon
from agent.serve.health.service import HealthService
from agent.serve.grpc.codec import Codec, Unread
Codec().decode(b"", Unread)
print(*sys.modules)
import agent
print(agent.Monitor.__module__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, module = done.stdout.splitlines()
    assert heavy.isdisjoint(modules.split())
    assert "agent.serve.servers" in modules.split()
    assert module == "agent.embed.monitor"


def test_a_reader_that_went_away_ends_it_quietly_with_141():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "agent", "scan", "-o", "json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_python_m_agent_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "agent", "scna"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    assert "did you mean 'scan'?" in done.stderr
