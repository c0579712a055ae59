"""``drahealth classify``: a described error gets the same verdict as a raised one."""

import errno
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.cli.main import main
from agent.cli.output.terminal import TextStyle
from agent.cli.prepares.classify import CLAIM, document, render
from agent.model.prepare import Operation
from agent.prepare.classify import PrepareContext, classify, classify_evidence
from agent.prepare.errors import doing
from agent.prepare.evidence import GRPC_NAMES, NVML_NAMES, NvmlCode
from agent.prepare.kubelet_message import kubelet_text

PATTERNS = """
[[prepare.patterns]]
match = 'no such bitstream'
code = "fpga.bitstream"
class = "bad-config"

[[prepare.patterns]]
match = 'bank \\d+ is locked'
code = "fpga.bank_locked"
class = "transient"
summary = "the bank is in use"
"""


@dataclass
class Command:
    """The command with one configuration."""

    file: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *argv: str) -> tuple[int, str, str]:
        """Run the command; return exit code, output and errors."""
        code = main(["classify", "--config", str(self.file), *argv])
        return code, *self.capsys.readouterr()

    def document(self, *argv: str) -> dict[str, object]:
        """Return the JSON document."""
        code, out, err = self.run(*argv, "-o", "json")
        assert (code, err) == (0, "")
        return json.loads(out)

    def code_and_class(self, *argv: str) -> tuple[object, object]:
        """Return code and class."""
        found = self.document(*argv)
        return found["code"], found["class"]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    file = tmp_path / "config.toml"
    file.write_text(PATTERNS)
    return Command(file, capsys)


# --- result -----------------------------------------------------------------------------------------------


def test_text_has_meaning_consequence_and_the_kubelet_line(command):
    assert command.run("--errno", "ENOSPC", "--doing", "cdi") == (
        0,
        "cdi.write  transient\n"
        "  A retry can help: by the embedded library within the call, then by the kubelet.\n"
        "\n"
        "  error        ENOSPC (No space left on device) while writing a CDI file\n"
        "  meaning      the CDI file could not be written\n"
        "  advice       free space in the CDI directory\n"
        "  consequence  retry later\n"
        "  scope        node\n"
        "  evidence     errno ENOSPC during cdi\n"
        "  confidence   0.9 (0 is a guess, 1 is proof)\n"
        "\n"
        "Line for the kubelet, for a claim with one device that is not known to be broken:\n"
        "[class=transient code=cdi.write device=<driver>/<pool>/<device> request=<request> retry=later] "
        "ENOSPC (No space left on device) while writing a CDI file; the kubelet retries.\n",
        "",
    )


def test_json_has_every_field(command):
    assert command.document("--nvml", "15") == {
        "apiVersion": "drahealth/v1",
        "class": "failed-device",
        "code": "gpu.lost",
        "scope": "device",
        "summary": "NVML: GPU_IS_LOST (15)",
        "advice": "reboot the node; if the GPU stays lost, replace it",
        "repair": "reboot-node",
        "retry": "after-repair",
        "stickySeconds": 60,
        "health": "Unhealthy",
        "taint": {"effect": "NoSchedule", "value": ""},
        "evidence": ["NVML 15 (GPU_IS_LOST)"],
        "confidence": 0.9,
        "text": "[class=failed-device code=gpu.lost device=<driver>/<pool>/<device> request=<request> "
        "retry=after-repair] NVML: GPU_IS_LOST (15); the device is Unhealthy, its taint is offered.",
    }


@pytest.mark.parametrize(
    ("argv", "consequence"),
    [
        (("--http", "403", "--doing", "api"), "retry after-fix"),
        (("--nvml", "15"), "retry after-repair, Unhealthy, taint NoSchedule"),  # only the driver reports it
    ],
)
def test_cached_failure_shows_the_duration_of_the_ledger(command, argv, consequence):
    _, out, _ = command.run(*argv)
    cached = "the same claim gets this verdict again for 60s while nothing changes"
    assert f"  consequence  {consequence}; {cached}\n" in out


@pytest.mark.parametrize("operation", Operation)
def test_errno_gets_the_verdict_of_a_raised_error(command, tmp_path, operation):
    with pytest.raises(OSError, match="No such file") as caught, doing(operation):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    verdict = classify(caught.value, PrepareContext(CLAIM))
    assert command.document("--errno", "ENOENT", "--doing", operation) == document(verdict)


def test_strongest_of_several_numbers_decides(command):
    found = command.document("--grpc", "INTERNAL", "--errno", "EBUSY", "--doing", "device")
    assert (found["code"], found["evidence"]) == (
        "device.busy",
        ["errno EBUSY during device", "gRPC 13 (INTERNAL)"],
    )
    two = [
        command.document("--errno", pair, "--errno", two)["code"] for pair, two in (("5", "11"), ("11", "5"))
    ]
    assert two == ["os.eio", "os.eagain"]


def test_text_becomes_the_message_of_a_number(command):
    assert command.document("no bank", "--errno", "EINVAL")["summary"] == "EINVAL (no bank)"
    assert command.document("no bank", "--grpc", "13")["summary"] == "gRPC: INTERNAL: no bank"
    assert (
        command.document("no bank", "--http", "500")["summary"] == "HTTP: 500 Internal Server Error: no bank"
    )
    assert command.document("no bank", "--nvml", "999")["evidence"] == ["NVML 999 (UNKNOWN)", "error text"]


def test_http_status_is_proof_only_from_the_api_server(command):
    assert command.code_and_class("--http", "403") == ("http.refused", "unknown")
    assert command.code_and_class("--http", "403", "--doing", "api") == ("api.forbidden", "permanent")


# --- patterns ----------------------------------------------------------------------------------------------


def test_pattern_of_the_configuration_matches(command):
    code, out, _ = command.run("open: bank 3 is locked")
    assert code == 0
    assert out.startswith("fpga.bank_locked  transient\n")
    assert "  error        the bank is in use\n" in out
    assert "  meaning      as its pattern states; handled like driver.transient\n" in out
    assert "  patterns     number 2 of 2 in the configuration matches the text\n" in out


def test_text_without_a_matching_pattern_is_marked(command):
    _, out, _ = command.run("no bank")
    assert out.startswith("driver.error  unknown\n")
    assert "  patterns     none of 2 in the configuration matches the text\n" in out


def test_pattern_weaker_than_a_number_is_marked(command):
    _, out, _ = command.run("bank 3 is locked", "--errno", "EBUSY", "--doing", "device")
    assert out.startswith("device.busy  transient\n")
    assert (
        "number 2 of 2 in the configuration matches the text, but other evidence is stronger than "
        "fpga.bank_locked\n" in out
    )


def test_without_patterns_or_text_no_patterns_are_shown(command):
    assert "patterns" not in command.run("--nvml", "15")[1]
    command.file.write_text("")
    assert "patterns" not in command.run("no bank")[1]
    assert command.code_and_class("no bank is busy: device is busy") == ("text.busy", "transient")


def test_invalid_pattern_exits_78_and_is_named(command):
    command.file.write_text(PATTERNS + "sumary = ''")
    code, out, err = command.run("x")
    assert (code, out) == (78, "")
    assert err == (
        f"drahealth: {command.file}: prepare.patterns: pattern 2: unknown key 'sumary'; did you mean "
        "'summary'?\n"
    )


# --- numbers and names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ENOSPC", "enospc", "28", "-28"])
def test_errno_is_read_as_name_and_as_number(command, name):
    assert command.document("--errno", name)["evidence"] == ["errno ENOSPC"]


def test_errno_alias_and_unnamed_number_are_read(command):
    assert command.document("--errno", "EWOULDBLOCK")["evidence"] == ["errno EAGAIN"]
    assert command.document("--errno", "524")["evidence"] == ["errno 524"]


@pytest.mark.parametrize("name", ["15", "GPU_IS_LOST", "NVML_ERROR_GPU_IS_LOST", "NVMLError_GpuIsLost"])
def test_nvml_code_is_read_in_the_spelling_of_each_binding(command, name):
    assert command.document("--nvml", name)["evidence"] == ["NVML 15 (GPU_IS_LOST)"]


@pytest.mark.parametrize(
    "name", ["4", "DEADLINE_EXCEEDED", "DeadlineExceeded", "StatusCode.DEADLINE_EXCEEDED"]
)
def test_grpc_status_is_read_in_the_spelling_of_each_language(command, name):
    assert command.document("--grpc", name)["evidence"] == ["gRPC 4 (DEADLINE_EXCEEDED)"]


@pytest.mark.parametrize("name", ["429", "TOO_MANY_REQUESTS", "Too Many Requests", "TooManyRequests"])
def test_http_status_is_read_as_number_and_as_phrase(command, name):
    assert command.document("--http", name)["evidence"] == ["HTTP 429 Too Many Requests"]


def test_http_status_without_a_name_is_a_number(command):
    assert command.document("--http", "599")["evidence"] == ["HTTP 599"]


def test_every_name_in_the_output_is_accepted_as_input(command):
    for code, name in NVML_NAMES.items():
        assert command.document("--nvml", name) == command.document("--nvml", str(code))
    for status, name in enumerate(GRPC_NAMES):
        assert command.document("--grpc", name) == command.document("--grpc", str(status))


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "no error is given: use TEXT, --errno, --nvml, --grpc or --http, or several"),
        ([""], "the value after"),
        (["--doing", "cdi"], "no error is given: use TEXT, --errno, --nvml, --grpc or --http, or several"),
        (["x", "--doing", "cdi"], "--doing cdi needs --errno"),
        (["--http", "403", "--doing", "cdi"], "--doing cdi needs --errno"),
        (["--nvml", "15", "--doing", "api"], "--doing api needs --errno or --http"),
        (["--doing", "cdii"], "'cdii' is not one of device, cdi, state, config, api, lock, cgroup; did you"),
        (["--errno", "ENSPC"], "argument --errno: 'ENSPC' is not an errno; did you mean 'ENOSPC'?"),
        (["--errno", "0"], "argument --errno: 0 is below the limit of 1"),
        (["--errno", "4096"], "argument --errno: 4096 is over the limit of 4095"),
        (["--errno", "1e3"], "argument --errno: '1e3' is not an errno"),
        (["--errno", ""], "argument --errno: '' is not an errno"),
        (["--nvml", "1000"], "argument --nvml: 1000 is over the limit of 999"),
        (["--nvml", "GPU_LOST"], "argument --nvml: 'GPU_LOST' is not a return code of NVML; did you mean "
         "'GPU_IS_LOST'?"),
        (["--grpc", "17"], "argument --grpc: 17 is over the limit of 16"),
        (["--grpc", "Canceled"], "argument --grpc: 'Canceled' is not a gRPC status; did you mean "
         "'CANCELLED'?"),
        (["--http", "200"], "argument --http: 200 is below the limit of 400"),
        (["--http", "OK"], "argument --http: 'OK' is not the HTTP status of an error"),
    ],
)  # fmt: skip
def test_invalid_argument_exits_64_and_is_named(command, argv, error):
    code, out, err = command.run(*argv)
    assert (code, out) == (64, "")
    assert err.startswith(f"drahealth: {error}")
    assert err.endswith("try 'drahealth classify --help'\n")


# --- format ------------------------------------------------------------------------------------------------


def test_text_is_wrapped_and_coloured_but_the_kubelet_line_is_not():
    verdict = classify_evidence((NvmlCode(15),), PrepareContext(CLAIM))
    plain = render(verdict, TextStyle(width=60, unicode=False), "", ())
    painted = render(verdict, TextStyle(width=60, colour=True, unicode=False), "", ())
    assert "\x1b[31mfailed-device\x1b[0m" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain
    *body, line = plain.splitlines()
    assert max(map(len, body)) < 60
    assert line == kubelet_text(verdict)


def test_text_with_control_characters_is_cleaned(command):
    _, out, _ = command.run("\x1b[2J\nno\x07")
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "  error        [2J no\n" in out
