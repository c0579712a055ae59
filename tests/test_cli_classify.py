"""``drahealth classify``: an error that is described is judged as one that was raised."""

import errno
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.cli.main import main
from agent.cli.output.terminal import Style
from agent.cli.prepares.classify import CLAIM, document, render
from agent.model.prepare import Operation
from agent.prepare.classify import Context, classify, classify_evidence
from agent.prepare.doing import doing
from agent.prepare.evidence import GRPC_NAMES, NVML_NAMES, NvmlCode
from agent.prepare.message import text

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
    """The command with this configuration."""

    file: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *argv: str) -> tuple[int, str, str]:
        """Exit code, output, complaints."""
        code = main(["classify", "--config", str(self.file), *argv])
        return code, *self.capsys.readouterr()

    def said(self, *argv: str) -> dict[str, object]:
        """What programs are told."""
        code, out, err = self.run(*argv, "-o", "json")
        assert (code, err) == (0, "")
        return json.loads(out)

    def kind(self, *argv: str) -> tuple[object, object]:
        """Code and class."""
        said = self.said(*argv)
        return said["code"], said["class"]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    file = tmp_path / "config.toml"
    file.write_text(PATTERNS)
    return Command(file, capsys)


# --- what is made of it ------------------------------------------------------------------------------------


def test_people_are_told_what_it_is_what_follows_and_the_line_for_the_kubelet(command):
    assert command.run("--errno", "ENOSPC", "--doing", "cdi") == (
        0,
        "cdi.write  transient\n"
        "  Trying again can help: the driver does within the call, then the kubelet does.\n"
        "\n"
        "  said          ENOSPC (No space left on device) while writing a CDI file\n"
        "  means         the CDI file could not be written just now\n"
        "  what to do    free space where CDI files are\n"
        "  what follows  retry later\n"
        "  reach         node\n"
        "  shown by      errno ENOSPC while cdi\n"
        "  confidence    0.9 (0 is a guess, 1 is proof)\n"
        "\n"
        "The kubelet would be told, of a claim with one device that is not known to be broken:\n"
        "[class=transient code=cdi.write device=<driver>/<pool>/<device> request=<request> retry=later] "
        "ENOSPC (No space left on device) while writing a CDI file; it is tried again.\n",
        "",
    )


def test_programs_get_every_field(command):
    assert command.said("--nvml", "15") == {
        "apiVersion": "drahealth/v1",
        "class": "failed-device",
        "code": "gpu.lost",
        "scope": "device",
        "summary": "NVML: GPU_IS_LOST (15)",
        "advice": "reboot the node; if it stays lost, replace the GPU",
        "retry": "after-repair",
        "stickySeconds": 86_400,
        "health": "Unhealthy",
        "taint": {"effect": "NoSchedule", "value": ""},
        "evidence": ["NVML 15 (GPU_IS_LOST)"],
        "confidence": 0.9,
        "text": "[class=failed-device code=gpu.lost device=<driver>/<pool>/<device> request=<request> "
        "retry=after-repair] NVML: GPU_IS_LOST (15); the device is Unhealthy, its taint is offered.",
    }


def test_what_lasts_says_for_how_long_it_is_not_tried_again(command):
    _, out, _ = command.run("--http", "403", "--doing", "api")
    assert (
        "  what follows  retry after-fix, Unknown; the same claim gets this answer for 60s while nothing "
        "changes\n" in out
    )


@pytest.mark.parametrize("operation", Operation)
def test_an_errno_is_judged_as_the_one_that_a_driver_gets(command, tmp_path, operation):
    with pytest.raises(OSError, match="No such file") as caught, doing(operation):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    verdict = classify(caught.value, Context(CLAIM))
    assert command.said("--errno", "ENOENT", "--doing", operation) == document(verdict)


def test_the_outermost_number_comes_first_and_the_weightiest_decides(command):
    said = command.said("--grpc", "INTERNAL", "--errno", "EBUSY", "--doing", "device")
    assert (said["code"], said["evidence"]) == (
        "device.busy",
        ["errno EBUSY while device", "gRPC 13 (INTERNAL)"],
    )
    two = [command.said("--errno", one, "--errno", two)["code"] for one, two in (("5", "11"), ("11", "5"))]
    assert two == ["os.eio", "os.eagain"]


def test_the_text_is_the_message_of_a_number_that_can_have_one(command):
    assert command.said("no bank", "--errno", "EINVAL")["summary"] == "EINVAL (no bank)"
    assert command.said("no bank", "--grpc", "13")["summary"] == "gRPC: INTERNAL: no bank"
    assert command.said("no bank", "--http", "500")["summary"] == "HTTP: 500 Internal Server Error: no bank"
    assert command.said("no bank", "--nvml", "999")["evidence"] == ["NVML 999 (UNKNOWN)", "a text"]


def test_only_the_api_servers_refusal_proves_something(command):
    assert command.kind("--http", "403") == ("http.refused", "unknown")
    assert command.kind("--http", "403", "--doing", "api") == ("api.forbidden", "permanent")


# --- patterns ----------------------------------------------------------------------------------------------


def test_a_pattern_of_the_configuration_is_tried(command):
    code, out, _ = command.run("open: bank 3 is locked")
    assert code == 0
    assert out.startswith("fpga.bank_locked  transient\n")
    assert "  said          the bank is in use\n" in out
    assert "  means         what its pattern says; it is handled like driver.transient\n" in out
    assert "  patterns      number 2 of 2 in the configuration is found in the text\n" in out


def test_a_text_that_no_pattern_has_says_so(command):
    _, out, _ = command.run("no bank")
    assert out.startswith("driver.error  unknown\n")
    assert "  patterns      of 2 in the configuration none is found in the text\n" in out


def test_a_pattern_that_a_number_outweighs_is_told_of(command):
    _, out, _ = command.run("bank 3 is locked", "--errno", "EBUSY", "--doing", "device")
    assert out.startswith("device.busy  transient\n")
    assert (
        "number 2 of 2 in the configuration is found in the text, but what else was given shows more than "
        "fpga.bank_locked\n" in out
    )


def test_without_patterns_or_a_text_nothing_is_said_of_them(command):
    assert "patterns" not in command.run("--nvml", "15")[1]
    command.file.write_text("")
    assert "patterns" not in command.run("no bank")[1]
    assert command.kind("no bank is busy: device is busy") == ("text.busy", "transient")


def test_a_wrong_pattern_is_78_with_its_file_key_and_number(command):
    command.file.write_text(PATTERNS + "sumary = ''")
    code, out, err = command.run("x")
    assert (code, out) == (78, "")
    assert err == (
        f"drahealth: {command.file}: prepare.patterns: pattern 2: unknown key 'sumary'; did you mean "
        "'summary'?\n"
    )


# --- numbers and names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["ENOSPC", "enospc", "28", "-28"])
def test_an_errno_is_a_name_or_a_number_as_the_kernel_returns_it(command, word):
    assert command.said("--errno", word)["evidence"] == ["errno ENOSPC"]


def test_a_second_name_of_an_errno_is_known_and_a_driver_may_have_its_own_number(command):
    assert command.said("--errno", "EWOULDBLOCK")["evidence"] == ["errno EAGAIN"]
    assert command.said("--errno", "524")["evidence"] == ["errno 524"]


@pytest.mark.parametrize("word", ["15", "GPU_IS_LOST", "NVML_ERROR_GPU_IS_LOST", "NVMLError_GpuIsLost"])
def test_nvml_and_its_bindings_write_the_same_code(command, word):
    assert command.said("--nvml", word)["evidence"] == ["NVML 15 (GPU_IS_LOST)"]


@pytest.mark.parametrize(
    "word", ["4", "DEADLINE_EXCEEDED", "DeadlineExceeded", "StatusCode.DEADLINE_EXCEEDED"]
)
def test_every_language_writes_the_same_status_of_grpc(command, word):
    assert command.said("--grpc", word)["evidence"] == ["gRPC 4 (DEADLINE_EXCEEDED)"]


@pytest.mark.parametrize("word", ["429", "TOO_MANY_REQUESTS", "Too Many Requests", "TooManyRequests"])
def test_a_status_of_http_is_a_number_or_its_phrase(command, word):
    assert command.said("--http", word)["evidence"] == ["HTTP 429 Too Many Requests"]


def test_a_status_of_http_that_nobody_named_is_a_number(command):
    assert command.said("--http", "599")["evidence"] == ["HTTP 599"]


def test_every_name_that_drahealth_writes_is_understood(command):
    for code, name in NVML_NAMES.items():
        assert command.said("--nvml", name) == command.said("--nvml", str(code))
    for status, name in enumerate(GRPC_NAMES):
        assert command.said("--grpc", name) == command.said("--grpc", str(status))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give the error's TEXT, --errno, --nvml, --grpc or --http, or several"),
        ([""], "give the error's TEXT, --errno, --nvml, --grpc or --http, or several"),
        (["--doing", "cdi"], "give the error's TEXT, --errno, --nvml, --grpc or --http, or several"),
        (["x", "--doing", "cdi"], "--doing cdi is for --errno: it says nothing of what else was given"),
        (["--http", "403", "--doing", "cdi"], "--doing cdi is for --errno: it says nothing of what else was"),
        (["--nvml", "15", "--doing", "api"], "--doing api is for --errno or --http: it says nothing of what"),
        (["--doing", "cdii"], "'cdii' is none of device, cdi, state, config, api, lock, cgroup; did you"),
        (["--errno", "ENSPC"], "argument --errno: 'ENSPC' is no errno; did you mean 'ENOSPC'?"),
        (["--errno", "0"], "argument --errno: 0 is below the limit of 1"),
        (["--errno", "4096"], "argument --errno: 4096 is over the limit of 4095"),
        (["--errno", "1e3"], "argument --errno: '1e3' is no errno"),
        (["--errno", ""], "argument --errno: '' is no errno"),
        (["--nvml", "1000"], "argument --nvml: 1000 is over the limit of 999"),
        (["--nvml", "GPU_LOST"], "argument --nvml: 'GPU_LOST' is no return code of NVML; did you mean "
         "'GPU_IS_LOST'?"),
        (["--grpc", "17"], "argument --grpc: 17 is over the limit of 16"),
        (["--grpc", "Canceled"], "argument --grpc: 'Canceled' is no gRPC status; did you mean 'CANCELLED'?"),
        (["--http", "200"], "argument --http: 200 is below the limit of 400"),
        (["--http", "OK"], "argument --http: 'OK' is no HTTP status of an error"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_64_and_named(command, argv, words):
    code, out, err = command.run(*argv)
    assert (code, out) == (64, "")
    assert err.startswith(f"drahealth: {words}")
    assert err.endswith("try 'drahealth classify --help'\n")


# --- how it looks ------------------------------------------------------------------------------------------


def test_it_is_coloured_where_it_is_asked_for_and_the_line_is_never_wrapped():
    verdict = classify_evidence((NvmlCode(15),), Context(CLAIM))
    plain = render(verdict, Style(width=60, unicode=False), "", ())
    painted = render(verdict, Style(width=60, colour=True, unicode=False), "", ())
    assert "\x1b[31mfailed-device\x1b[0m" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain
    *body, line = plain.splitlines()
    assert max(map(len, body)) < 60
    assert line == text(verdict)


def test_what_was_typed_cannot_move_the_cursor(command):
    _, out, _ = command.run("\x1b[2J\nno\x07")
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "  said          [2J no\n" in out
