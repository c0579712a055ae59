"""``drahealth bundle``: what is in the archive, what is left out, and its limits."""

import io
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from agents import LATE_ANSWERS
from golden.commands import serve_old_agent
from hypothesis import given
from hypothesis import strategies as st

from agent.cli import bundle
from agent.cli.bundle import REDACTED, BundleFile, collect_files, redact
from agent.cli.main import main
from agent.errors import OutputError

FILES = [
    *("manifest.json", "versions.json", "config.toml", "status.json", "report.json", "history.json"),
    *("availability.json", "log.txt"),
]
SECRET = "hunter2hunter2"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----"


# --- secrets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f'password = "{SECRET}"',
        f"api-key: {SECRET}",
        f'{{"clientSecret": "{SECRET}", "x": 1}}',
        f'{{"tokens": ["{SECRET}", "other"], "x": 1}}',
        f'{{"secret": {{"a": "{SECRET}"}}, "x": 1}}',
        f'{{"evidence": "called with Authorization: Bearer {SECRET}"}}',
        f'{{"evidence": "a \\"token\\": \\"{SECRET}\\" of it"}}',
        f"DRAHEALTH_TOKEN={SECRET} drahealth run",
        f"run --auth-token {SECRET} --period 1s",
        f"run --auth-token={SECRET}",
        f"https://user:{SECRET}@example.com/path",
        f"Cookie: {SECRET}",
        f"bearer {SECRET}",
        f"basic_auth_password='{SECRET}'",
        f'private_key = "{SECRET}"',
        f'token = """{SECRET}"""',
        f'token = """\na "quoted" word\n{SECRET}\n"""',
        f"token = '''{SECRET}'''",
        f"password: 'it''s {SECRET}'",
        f"password: |\n  {SECRET}",
        f"- password: >-  # folded\n\n    {SECRET}\n\n    {SECRET}",
        f"  tokens:\n  - {SECRET}\n  - {SECRET}",
        f"passphrase:\n    a {SECRET}",
        f'password = "{SECRET}',
        f'run --password "a {SECRET}"',
        f"run --password 'a {SECRET}'",
        f"run -api-token {SECRET}",
        f'command = ["/opt/chk", "--password", "{SECRET}"]',
        f"command = ['chk', '--api-key',\n  '{SECRET}',\n]",
        f'command = ["chk", "--password={SECRET}"]',
        f"- --password\n- {SECRET}",
        f'["/opt/chk", "--password", "{SECRET}", "-v"]',
        f'["/opt/chk", "--password", "-{SECRET}"]',
        f'["/opt/chk", "--password={SECRET}"]',
        f'["sh", "-c", "chk --password \\"{SECRET}\\""]',
        f'started: {{"argv": "[\\"--token\\", \\"{SECRET}\\"]"}}',
        f'started: {{"msg": "{{\\"a\\": \\"\\\\\\"token\\\\\\": \\\\\\"{SECRET}\\\\\\"\\"}}"}}',
        f"Authorization: Token {SECRET}",
        f'Authorization: Digest username="u", response="{SECRET}"',
        f"curl -H 'Authorization: AWS4-HMAC-SHA256 Signature={SECRET}' -v",
        f"cookie: a=b; c={SECRET}",
        f"https://user:p@{SECRET}@example.com/path",
        f"https://{SECRET}@example.com/path",
        f'passwords = ["a]b", "{SECRET}"]',
        f"passwords = ['a]b', '{SECRET}']",
        f'tokens = [["a"], ["{SECRET}"]]',
        f'tokens = [\n  "a", # ] of "b\n  "{SECRET}",\n]',
        f'credentials = {{ aws = {{ id = "{SECRET}" }} }}',
        f'credentials = {{ aws = {{ id = "{SECRET}"',
        f'token => "{SECRET}"',
        f'token := "{SECRET}"',
        f"token == {SECRET}",
    ],
)
def test_secret_is_replaced_and_json_stays_json(text: str) -> None:
    redacted, count = redact(text)
    assert count == 1
    assert SECRET not in redacted
    assert REDACTED in redacted
    if text.startswith("{"):
        json.loads(redacted)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"secret": {"a": {"b": SECRET}}, "x": 1}, {"secret": REDACTED, "x": 1}),
        ({"tokens": [[SECRET], [2]]}, {"tokens": REDACTED}),
        ({"text": f"cookie: {{{SECRET}", "k": 1}, {"text": f"cookie: {REDACTED}", "k": 1}),
        ({"text": f"{PEM[:40]}\nabc", "k": ["", 2.5]}, {"text": REDACTED, "k": ["", 2.5]}),
        ({"text": "mount secret-volume: ", "code": "a"}, {"text": "mount secret-volume: ", "code": "a"}),
        ([{"next": f"token={SECRET}"}], [{"next": f"token={REDACTED}"}]),
        (["--token", SECRET, "-v", "a"], ["--token", REDACTED, "-v", "a"]),
        ([["--token"], "a", "--no-token", "--v"], [["--token"], "a", "--no-token", "--v"]),
    ],
    ids=["nested object", "nested list", "open brace", "cut key", "no value", "list", "flag", "only flags"],
)
def test_json_text_is_redacted_value_by_value(document: Any, expected: Any, indent: int | None) -> None:
    redacted, count = redact(json.dumps(document, indent=indent))
    assert json.loads(redacted) == expected
    assert count == (document != expected)


def test_text_after_a_secret_table_is_kept() -> None:
    line = '{"msg": "secret: {\\"a\\": \\"b\\"} of gpu-0", "code": "x"}\n'
    text = f"{line}{line}"  # two documents are no JSON
    assert redact(text) == (text.replace('{\\"a\\": \\"b\\"}', REDACTED), 2)


def test_text_after_a_secret_block_is_kept() -> None:
    text = f"  token: |\n    {SECRET}\n\n  period: 1s\n"
    assert redact(text) == (f"  token: {REDACTED}\n\n  period: 1s\n", 1)


@pytest.mark.parametrize(
    "secret",
    [
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_abcdefghijklmnopqrst",
        PEM,
        PEM[:40],
    ],
)
def test_secret_is_known_by_its_form(secret: str) -> None:
    redacted, count = redact(f"before {secret} after")
    assert count == 1
    assert redacted.startswith(f"before {REDACTED}")
    assert secret not in redacted


@pytest.mark.parametrize(
    "text",
    [
        "gpu-3 Unhealthy: gpu.xid.79: 1 time (since 2026-11-21T10:03:03Z)",
        '{"device": {"driver": "gpu.example.com", "pool": "node-1"}, "uuid": "GPU-0f3c1d2e"}',
        'period = "1s"  # [stream] lease',
        "see https://example.com/docs: basic checks",
        "image https://example.com/agent@sha256:0f3c1d2e",
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert redact(text) == (text, 0)


@given(st.text(), st.text())
def test_any_text_around_a_secret_is_redacted(before: str, after: str) -> None:
    redacted, _ = redact(f"{before}\n{PEM}\n{after}")
    assert "MIIEow" not in redacted


# --- archive -----------------------------------------------------------------------------------------------


class Machine:
    """Directories of an agent that does not run, and programs that the command finds."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
    ) -> None:
        self.root = root
        self.capsys = capsys
        self.config = root / "config.toml"
        self.config.write_text(f'[agent]\nperiod = "2s"\n# password = "{SECRET}"\n')
        (root / "bin").mkdir()
        monkeypatch.setenv("PATH", f"{root / 'bin'}")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
        monkeypatch.chdir(root)
        for flag in ("SYSFS", "PROCFS", "CGROUPFS"):
            monkeypatch.setenv(f"DRAHEALTH_{flag}_ROOT", str(root / "none"))
        monkeypatch.setenv("DRAHEALTH_NVML_LIBRARY", str(root / "none.so"))
        monkeypatch.setenv("DRAHEALTH_KMSG", str(root / "none"))

    def journal(self, script: str) -> None:
        """Create a program journalctl."""
        program = self.root / "bin/journalctl"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def run(self, *argv: str) -> tuple[int, str, str]:
        state = ("--config", str(self.config), "--runtime-dir", str(self.root), "--state-dir", str(self.root))
        code = main(["bundle", *state, *argv])
        return code, *self.capsys.readouterr()

    def files(self, *, runtime_dir: str = "", **options: Any) -> dict[str, BundleFile]:
        environ = {
            **os.environ,
            "DRAHEALTH_RUNTIME_DIR": str(self.root / runtime_dir),
            "DRAHEALTH_CONFIG": str(self.config),
        }
        return {file.name: file for file in collect_files(self.config, environ, **options)}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]) -> Machine:
    return Machine(tmp_path, monkeypatch, capsys)


def unpack_bundle(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {
            Path(member.name).name: file.read()
            for member in tar
            if (file := tar.extractfile(member)) is not None
        }


def test_archive_has_the_listed_files_without_secrets(machine: Machine) -> None:
    machine.journal(f"echo 'agent: started --token {SECRET}'; echo 'the end'")
    code, out, err = machine.run("made.tar.gz")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "][
        1:
    ] == FILES
    assert out.splitlines()[-1].startswith("written: made.tar.gz, ")
    path = machine.root / "made.tar.gz"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = unpack_bundle(path)
    assert list(found) == FILES
    assert SECRET.encode() not in b"".join(found.values())
    assert b'period = "2s"' in found["config.toml"]
    assert b"the end" in found["log.txt"]
    manifest = {file["name"]: file for file in json.loads(found["manifest.json"])["files"]}
    assert manifest["log.txt"]["redacted"] == 1
    assert json.loads(found["versions.json"])["packages"]["trio"]
    assert json.loads(found["history.json"])["uses"] == []


def test_report_of_a_node_without_agent_is_a_scan(machine: Machine) -> None:
    files = machine.files()
    assert files["report.json"].content == "a scan of this node"
    assert "devices" in json.loads(files["report.json"].data)
    assert files["status.json"].remarks[0] == "exit code 69"
    assert files["log.txt"].remarks == ("there is no journalctl",)


def test_commands_run_no_code_of_the_working_directory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.root / "agent").mkdir()
    for name in ("agent/__init__.py", "agent/__main__.py", "json.py", "trio.py"):
        (machine.root / name).write_text("raise SystemExit('code of the working directory')")
    monkeypatch.delenv("PYTHONPATH")
    files = machine.files()
    assert json.loads(files["history.json"].data)["uses"] == []
    assert not any("code of" in remark for file in files.values() for remark in file.remarks)


def test_list_writes_nothing(machine: Machine) -> None:
    code, out, _ = machine.run("--list")
    assert code == 0
    assert "manifest.json" in out
    assert not list(machine.root.glob("*.tar.gz"))


def test_invalid_configuration_is_in_the_archive(machine: Machine) -> None:
    machine.config.write_text("period = [")
    files = machine.files()
    assert files["config.toml"].data == b"period = ["
    assert "exit code 78" in files["status.json"].remarks


def test_drop_ins_of_the_default_configuration_are_in_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "DEFAULT_FILE", tmp_path / "config.toml")
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d" / "10-period.toml").write_text('[agent]\nperiod = "2s"\n')
    files = {file.name: file for file in bundle.configuration_files(None)}
    assert files["config.toml"].remarks == ("no such file",)
    assert b'period = "2s"' in files["config.d/10-period.toml"].data


def test_standard_output_gets_only_the_archive(machine: Machine) -> None:
    command = [sys.executable, "-m", "agent", "bundle", "-", "--runtime-dir", str(machine.root)]
    done = subprocess.run(command, capture_output=True, check=True)
    assert b"manifest.json" in done.stderr
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        assert [Path(member.name).name for member in tar] == FILES


def test_report_of_a_running_agent_is_its_newest(machine: Machine) -> None:
    with serve_old_agent(machine.root):
        files = machine.files(runtime_dir="run")
        while any(late in text for file in files.values() for text in file.remarks for late in LATE_ANSWERS):
            files = machine.files(runtime_dir="run")
    assert files["report.json"].content == "newest report of the agent"
    assert json.loads(files["report.json"].data)["node"]
    assert json.loads(files["status.json"].data)["pid"]


def test_existing_file_is_not_replaced(machine: Machine) -> None:
    path = machine.root / "made.tar.gz"
    path.write_text("mine")
    code, _, err = machine.run(str(path))
    assert (code, path.read_text()) == (74, "mine")
    assert err == f"drahealth: bundle {path}: cannot be created: File exists\n"


def test_output_of_a_command_is_cut_at_the_limit(machine: Machine) -> None:
    machine.journal("while :; do echo 'a line of the log that repeats and repeats and repeats'; done")
    log = machine.files()["log.txt"]
    assert len(log.data) == 8 << 20
    assert "cut after 8.0 MiB" in log.remarks


def test_command_that_hangs_is_killed_and_listed(machine: Machine) -> None:
    machine.journal("exec /bin/sleep 3600")
    files = machine.files(timeout_s=0.01)
    assert "no answer within 0.01 s" in files["log.txt"].remarks


def test_commands_need_no_writable_directory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root file system of the agent's container is read-only, and has no other directory for files."""
    monkeypatch.setattr(tempfile, "tempdir", str(machine.root / "missing"))
    assert json.loads(machine.files()["history.json"].data)["uses"] == []


def test_lower_limit_of_file_sizes_stays(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert json.loads(machine.files()["history.json"].data)["uses"] == []


def test_interrupted_collection_kills_its_command(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            started.append(self)
            raise KeyboardInterrupt

    machine.journal("exec /bin/sleep 60")
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        bundle._Collector(os.environ, 60.0).log()
    assert started[0].poll() == -signal.SIGKILL


def test_existing_file_is_refused_before_the_collection(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "collect_files", pytest.fail)
    (machine.root / "made.tar.gz").write_text("mine")
    assert machine.run("made.tar.gz")[0] == 74


@pytest.mark.parametrize(
    ("place", "error", "code"),
    [
        ("agent.system.output.write_all", OutputError("bundle made.tar.gz: No space left on device"), 74),
        ("agent.cli.bundle.collect_files", KeyboardInterrupt(), 130),
    ],
)
def test_archive_that_is_not_complete_is_removed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException, code: int
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(place, fail)
    assert machine.run("made.tar.gz")[0] == code
    assert not (machine.root / "made.tar.gz").exists()


def test_empty_path_of_the_archive_is_refused(machine: Machine) -> None:
    code, _, err = machine.run("")
    assert code == 64
    assert f"the value after {str(machine.root)!r} is empty; write a value or omit the argument" in err
    assert not list(machine.root.glob("*.tar.gz"))
