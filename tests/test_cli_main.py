"""The command itself: help, suggestions, and the exit code of each error."""

import errno
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from cli_reports import BUSY

from agent import __version__
from agent.cli.main import VERBS, build_parser, load_verb, main, parse, report_error
from agent.cli.subcommand import EXIT_OF_ERROR, EXIT_OF_SEVERITY, INTERNAL, exit_of_severities
from agent.errors import (
    AgentUnreachable,
    ConfigError,
    DrahealthError,
    FaultStillPresent,
    PermissionDeniedError,
    ProbeError,
    ResourceBusyError,
    UsageError,
)
from agent.model.health import Severity
from agent.model.reading import SourceSample, SourceState

REFERENCE = Path(__file__).parent.parent / "docs" / "configuration.md"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Run the command; return exit code and standard error."""
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
def test_worst_severity_decides_the_exit_code(severities, code):
    assert exit_of_severities(severities) == code


def test_no_device_exits_as_unknown():
    assert exit_of_severities([]) == 3


@pytest.mark.parametrize(
    ("state", "passes", "code"),
    [
        (SourceState.OK, 1, 0),
        (SourceState.ABSENT, 0, 0),
        (SourceState.STARTING, 0, 3),
        (SourceState.STALLED, 0, 3),
        (SourceState.STALLED, 4, 0),
    ],
)
def test_exit_code_is_unknown_while_nvml_has_not_listed_gpus(
    state: SourceState, passes: int, code: int
) -> None:
    """NVML that stalls later has listed its GPUs, which have verdicts of their own."""
    sources = [SourceSample("nvml", state, 0, 1, 0, "", passes=passes)]
    assert exit_of_severities([Severity.OK], sources=sources) == code
    assert exit_of_severities([Severity.UNHEALTHY], sources=sources) == 2


def test_every_severity_has_an_exit_code():
    assert set(EXIT_OF_SEVERITY) == set(Severity)
    assert exit_of_severities(d.severity for d in BUSY.devices) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 64),
        (AgentUnreachable("x"), 69),
        (DrahealthError("x"), 70),
        (ResourceBusyError("x"), 75),
        (FaultStillPresent("x"), 75),
        (PermissionDeniedError("x"), 77),
        (PermissionError("x"), 77),
        (ConfigError("x"), 78),
        (ProbeError("x"), 70),
    ],
)
def test_every_error_class_has_an_exit_code_and_one_line(capsys, error, code):
    assert report_error(error) == code
    assert capsys.readouterr().err == "drahealth: x\n"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *(
            (number, 75)
            for number in (errno.ENOMEM, errno.EMFILE, errno.ENOSPC, errno.EIO, errno.EADDRNOTAVAIL)
        ),
        (errno.ENOENT, 78),
    ],
)
def test_configuration_that_a_lack_makes_unusable_is_to_be_retried(capsys, number, code):
    """systemd starts the agent again after 75, and does not after 78."""
    error = ConfigError("socket: cannot be created")
    error.__context__ = OSError(number, "x")
    assert report_error(error) == code
    assert capsys.readouterr().err == "drahealth: socket: cannot be created\n"


@pytest.mark.parametrize("error", [UsageError("a\x1b[31m\x07b\nc"), ValueError("a\x1b[31m\x07b\nc")])
def test_error_text_is_cleaned_and_keeps_its_line_breaks(capsys, error):
    report_error(error)
    assert "a\ufffd[31m\ufffdb\nc\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["explain", "gpu-0", "--claims"], ["conform", "--plugin-dir", ".", "--prepare", "--claims"]]
)
def test_kind_with_control_characters_in_a_file_is_cleaned(capsys, tmp_path, argv):
    file = tmp_path / "claims.json"
    file.write_text('{"apiVersion": "resource.k8s.io/v1", "kind": "Evil\\u001b[31m"}')
    assert main([*argv, str(file)]) == 64
    err = capsys.readouterr().err
    assert "Evil\ufffd[31m" in err
    assert "\x1b" not in err


def test_long_line_of_an_error_loses_its_middle(capsys):
    report_error(UsageError(f"no device {'x' * 100_000!r} is known\ntry it"))
    first, second = capsys.readouterr().err.splitlines()
    assert (len(first), second) == (2005, "try it")
    assert first.startswith("drahealth: no device 'xxx")
    assert first.endswith("xxx' is known")


def test_error_in_an_exception_group_is_unwrapped(capsys):
    assert report_error(ExceptionGroup("nursery", [ExceptionGroup("inner", [ConfigError("x")])])) == 78
    assert capsys.readouterr().err == "drahealth: x\n"


def test_ctrl_c_prints_nothing(capsys):
    assert report_error(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_unexpected_exception_shows_its_traceback(capsys):
    def fails() -> None:
        raise ZeroDivisionError("bug")

    with pytest.raises(ZeroDivisionError) as caught:
        fails()
    assert report_error(caught.value) == INTERNAL == 70
    err = capsys.readouterr().err
    assert "in fails" in err
    assert err.endswith("drahealth: this is a bug in drahealth; please report it with the lines above\n")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.EMFILE, "Too many open files"),
            r"too many open files: .* \(RLIMIT_NOFILE\); raise it",
        ),
        (OSError(errno.ENFILE, "x"), "too many open files on this machine; raise the sysctl fs.file-max"),
        (RuntimeError("can't start new thread"), "the kernel started no further thread: a limit of tasks"),
        (MemoryError(), "out of memory: raise MemoryMax="),
        (OSError(errno.ENOMEM, "x"), "out of memory: raise MemoryMax="),
        (OSError(errno.ENOBUFS, "x"), "out of memory: raise MemoryMax="),
        (OSError(errno.ENOSPC, "x"), "no space left: on a disk, or for watches of files; raise the sysctl"),
    ],
)
def test_lack_of_resources_is_no_bug(capsys, error, words):
    assert report_error(ExceptionGroup("tasks", [error, ExceptionGroup("inner", [error])])) == INTERNAL
    assert re.fullmatch(rf"drahealth: {words}.*\n", capsys.readouterr().err)


def test_bug_with_a_lack_of_resources_shows_its_traceback(capsys):
    assert report_error(ExceptionGroup("tasks", [MemoryError(), ValueError("y")])) == INTERNAL
    assert "ValueError: y" in capsys.readouterr().err


def test_agent_with_32_descriptors_names_the_limit(tmp_path):
    limits = (resource.RLIMIT_NOFILE, (32, 32))
    program = f"""
import os, resource, sys
resource.setrlimit{limits}
os.execv(sys.executable, [sys.executable, "-m", "agent", "run", "--runtime-dir", {str(tmp_path / "run")!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == INTERNAL
    assert "Traceback" not in done.stderr
    assert re.search("[Tt]oo many open files", done.stderr)


def run_with_action_at_import(module: str, action: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run drahealth in a process that executes a statement when a module is imported."""
    program = f"""
import os, runpy, signal, sys
class Action:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            {action}
assert {module!r} not in sys.modules
sys.meta_path.insert(0, Action)
sys.argv[0] = "drahealth"
runpy.run_module("agent", run_name="__main__", alter_sys=True)
"""
    command = [sys.executable, "-S", "-c", program, *argv]  # without site, which may load modules
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


@pytest.mark.parametrize("module", ["typing", "traceback", "argparse", "agent.cli.main"])
def test_ctrl_c_during_imports_prints_nothing(module):
    done = run_with_action_at_import(module, "os.kill(os.getpid(), signal.SIGINT)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("module", ["argparse", "agent.cli.main", "agent.cli.run"])
def test_sighup_during_imports_of_the_agent_is_pending(tmp_path, module):
    reload = "os.kill(os.getpid(), signal.SIGHUP); print(signal.SIGHUP in signal.sigpending(), flush=True)"
    done = run_with_action_at_import(module, reload, "run", "--config", str(tmp_path / "missing.toml"))
    assert done.stdout == "True\n"
    assert (done.returncode, done.stderr.count("drahealth: ")) == (78, 1), done.stderr


def test_scan_runs_no_program_even_without_a_temporary_directory(tmp_path):
    """The search for a library of an imported package would run ldconfig or gcc."""
    program = """
import runpy, sys
def note(event, arguments):
    if event in {"subprocess.Popen", "os.posix_spawn", "os.fork", "tempfile.mkstemp"}:
        print(event, arguments, file=sys.stderr, flush=True)
sys.addaudithook(note)
sys.argv = ["drahealth", "scan", "-o", "json", "--nvml-library", "/nonexistent", "--kmsg", "/dev/null"]
runpy.run_module("agent", run_name="__main__", alter_sys=True)
"""
    environ = os.environ | {"PATH": str(tmp_path), "TMPDIR": str(tmp_path / "missing")}
    while True:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environ
        )
        if "was not read twice within" not in done.stderr:  # a busy machine may take longer for a scan
            break
    assert done.stdout.startswith("{"), done.stderr
    assert done.stderr == ""


def test_group_of_two_errors_is_shown_in_full(capsys):
    assert report_error(ExceptionGroup("both", [ConfigError("x"), ValueError("y")])) == INTERNAL
    assert "ConfigError: x" in capsys.readouterr().err


# --- usage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["scna"],
            "'scna' is not one of run, scan, watch, status, explain, clear, audit, record, replay, "
            "what-if, prepares, history, fleet, classify, checks, conform, new-driver, bundle, config, "
            "completion, version; did you mean 'scan'?\ntry 'drahealth --help'",
        ),
        (
            ["zzz"],
            "'zzz' is not one of run, scan, watch, status, explain, clear, audit, record, replay, "
            "what-if, prepares, history, fleet, classify, checks, conform, new-driver, bundle, config, "
            "completion, version\ntry 'drahealth --help'",
        ),
        (["run", "--perid", "1s"], "'--perid' is not an argument of drahealth run; did you mean '--period'?"),
        (["run", "--driverr=x"], "'--driverr' is not an argument of drahealth run; did you mean '--driver'?"),
        (["watch", "--onse"], "'--onse' is not an argument of drahealth watch; did you mean '--once'?"),
        (["scan", "extra"], "'extra' is not an argument of drahealth scan\ntry 'drahealth scan --help'"),
        (
            ["scan", "-o", "jsn"],
            "'jsn' is not one of table, json; did you mean 'json'?\ntry 'drahealth scan --help'",
        ),
        (["run", "--peri", "1s"], "'--peri' is not an argument of drahealth run; did you mean '--period'?"),
        (["run", "--foo"], "'--foo' is not an argument of drahealth run\ntry 'drahealth run --help'"),
        (["watch", "--foo"], "'--foo' is not an argument of drahealth watch\ntry"),
        (["help", "scna"], "'scna' is not one of run, scan"),
        ([], "the following arguments are required: VERB"),
        (["--config", "x", "scan"], "'--config' is not an argument of drahealth; write a verb first"),
        (["scan", "--config"], "argument --config: expected one argument"),
    ],
)
def test_mistyped_command_line_exits_64_with_a_suggestion(capsys, argv, error):
    code, err = run(capsys, *argv)
    assert code == 64
    assert err.startswith(f"drahealth: {error}")


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["explain", "pod", "-o", "json", "a/b"], {"what": ["pod", "a/b"], "output": "json"}),
        (["config", "check", "--color=never", "x.toml"], {"action": "check", "file": "x.toml"}),
    ],
)
def test_flag_between_positional_arguments_is_accepted(argv, names):
    _, args = parse(argv)
    assert names.items() <= vars(args).items()


@pytest.mark.parametrize(
    ("argv", "code", "error"),
    [
        (
            ["run", "--runtime-dir", "/none", "--period", "5ms"],
            78,
            "--period: 5ms is below the limit of 10ms",
        ),
        (
            ["run", "--runtime-dir", "/none", "--driver", "A_b"],
            78,
            "--driver: driver name 'A_b' is not a DNS subdomain",
        ),
        (["scan", "--config", ""], 64, "the value after '--config' is empty; write a value or omit"),
        (["clear", "gpu-0", "--code", ""], 64, "the value after '--code' is empty; write a value or omit"),
        (["clear", "gpu-0", "--code="], 64, "the value after '--code' is empty; write a value or omit"),
        (["record", "--to", "", "/none"], 64, "the value after '--to' is empty; write a value or omit"),
        (["audit", "", "--all"], 64, "the value after 'audit' is empty; write a value or omit the argument"),
        (["explain", "pod", ""], 64, "the value after 'pod' is empty; write a value or omit the argument"),
        (["scan", "--config", "/none.toml"], 78, "configuration file /none.toml: No such file or directory"),
        (
            ["status", "--runtime-dir", "/none"],
            69,
            "socket /none/agent.sock: no such socket; is the agent running?",
        ),
        (
            ["watch", "--runtime-dir", "/none"],
            69,
            "socket /none/agent.sock: no such socket; is the agent running?",
        ),
        (
            ["scan", "--backend", "pynvml", "--exit-style", "npd"],
            64,
            "--exit-style npd needs verdicts, and --backend pynvml has none; omit one of them",
        ),
        (["watch", "/none.sock"], 69, "socket /none.sock: no such socket; is the agent running?"),
        (["watch", "--once", "/none.sock"], 69, "socket /none.sock: no such socket; is the agent running?"),
        (
            ["watch", "/none.sock", "--runtime-dir", "/run"],
            64,
            "SOCKET '/none.sock' needs no settings; leave out SOCKET, or --runtime-dir",
        ),
        (
            ["record", "/none", "--to", "/none/copy", "--record-dir", "/none"],
            64,
            "RECORD '/none' needs no settings; leave out RECORD, or --record-dir",
        ),
    ],
)
def test_error_of_a_verb_decides_the_exit_code(capsys, argv, code, error):
    assert run(capsys, *argv)[0] == code
    assert run(capsys, *argv)[1].startswith(f"drahealth: {error}")


def test_config_flag_overrides_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("DRAHEALTH_CONFIG", "/none.toml")
    assert run(capsys, "status") == (
        78,
        "drahealth: configuration file /none.toml: No such file or directory\n",
    )
    assert run(capsys, "status", "--config", "/nor.toml") == (
        78,
        "drahealth: configuration file /nor.toml: No such file or directory\n",
    )


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"drahealth {__version__}\n"


def test_version_verb_shows_one_line(capsys):
    assert main(["version"]) == 0
    python = ".".join(map(str, sys.version_info[:3]))
    assert capsys.readouterr().out.startswith(f"drahealth {__version__}, Python {python}, Linux ")


def test_version_document_names_required_libraries(capsys):
    assert main(["version", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["version"] == __version__
    assert document["kernel"] == os.uname().release
    assert {"trio", "grpclib"} <= document["libraries"].keys()
    assert document["libraries"]["trio"] == trio.__version__


# --- help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv", [["--help"], ["help"], ["help", "scan"], *([verb, "--help"] for verb in VERBS)], ids=" ".join
)
def test_help_starts_with_two_examples(capsys, argv):
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "examples:"
    assert all(line.startswith("  drahealth ") for line in lines[1:3])
    assert lines[3:5] == ["", next(line for line in lines if line.startswith("usage: drahealth"))]


@pytest.mark.parametrize("verb", [load_verb(name) for name in VERBS], ids=VERBS)
def test_examples_in_help_can_be_parsed(verb):
    parser, _ = build_parser()
    for command, _ in verb.examples:
        program, *argv = shlex.split(command.partition(" |")[0])
        assert program == "drahealth"
        assert parser.parse_args(argv).verb == verb.name


def test_every_flag_is_in_the_reference_with_its_verbs():
    _, parsers = build_parser()
    verbs_of: dict[str, set[str]] = {}
    for name, parser in parsers.items():
        for flag in re.findall(r"--[a-z-]+", parser.format_usage().replace("[-o {", "[--output {")):
            verbs_of.setdefault(flag, set()).add(name)
    rows = {}
    for line in REFERENCE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if flags := re.findall(r"`(--[a-z-]+)`", cells[0]):
            (verbs,) = (cell for cell in cells if re.fullmatch(r"all|(`[a-z][a-z-]*`(, )?)+", cell))
            rows[flags[0]] = set(parsers) if verbs == "all" else set(re.findall(r"[\w-]+", verbs))
    assert rows == verbs_of


def test_every_exit_code_is_in_the_reference():
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE.read_text(), re.MULTILINE)}
    assert codes == {*EXIT_OF_SEVERITY.values(), *(code for _, code in EXIT_OF_ERROR)}


# --- as a process ------------------------------------------------------------------------------------------


def test_help_and_usage_errors_load_no_event_loop_and_no_grpc():
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


def test_agent_loads_no_embedding_code_and_no_betterproto():
    """Embedding code takes 7 MiB, which an agent that only serves health never uses. The consumer model is
    loaded only once a kubelet with claims exists."""
    heavy = {"agent.api", "agent.embed", "betterproto", "dateutil", "email", "google.protobuf", "psutil"}
    heavy |= {"agent.model.claim_sources", "agent.model.device_usage", "agent.sources.kubelet_files"}
    code = """
import sys
from agent.app import daemon
from agent.serve.health.service import HealthService
from agent.serve.grpc.codec import Codec, EmptyRequest
Codec().decode(b"", EmptyRequest)
print(*sys.modules)
import drahealth
print(drahealth.Monitor.__module__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, module = done.stdout.splitlines()
    assert heavy.isdisjoint(modules.split())
    assert "agent.serve.grpc_servers" in modules.split()
    assert module == "agent.embed.monitor"


def test_closed_pipe_exits_141_without_a_message():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "agent", "scan", "-o", "json"]
    while True:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
        if "was not read twice within" not in done.stderr:  # a busy machine may take longer for a scan
            break
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_python_m_agent_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "agent", "scna"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    assert "did you mean 'scan'?" in done.stderr
