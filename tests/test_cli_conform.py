"""``drahealth conform`` as a command: output, exit codes, and its page of the documentation."""

import hashlib
import json
import re
import socket
from pathlib import Path

import pytest
from conform_records import (
    CLAIM_FILES,
    DEVICES,
    INFER,
    SOCKET,
    TRAIN,
    UNIMPLEMENTED,
    both_versions,
    device,
    health_list,
    prepare_call,
    session_record,
    session_with_claims,
    version_records,
)
from kube_api import FakeKubeApi, forbid, write_kubeconfig

from agent.cli.conform import (
    EXITS,
    GROUPS,
    PROFILE,
    badge,
    document,
    exit_of,
    profile,
    render,
    render_checks,
    render_checks_markdown,
)
from agent.cli.main import main
from agent.cli.output.terminal import TextStyle
from agent.conform.check_table import CHECKS, run_checks
from agent.conform.outcomes import CheckVerdict
from agent.conform.session_record import CdiSnapshot, PrepareStage, SessionRecord

PAGE = Path(__file__).parent.parent / "docs" / "conform.md"

GOOD = session_record()
ALONE = session_record(directory=None)
BAD = session_record(
    versions=both_versions(
        health_list(0, device(message=b"\xff"), device("gpu-1", health=3)), *map(health_list, (10, 20, 30))
    ),
    directory=None,
)
NOTHING = session_record(
    socket="",
    window_s=0.0,
    versions=(),
    second_kubelet=None,
    stopped_reader=None,
    reopenings=(),
    unknown_methods=(),
    directory=None,
)


def render_record(record: SessionRecord, **style: object) -> str:
    return render(record, run_checks(record), TextStyle(**style))


# --- the table ---------------------------------------------------------------------------------------------


def test_failed_check_comes_first_with_effect_and_advice():
    assert render_record(BAD).startswith(
        f"{SOCKET}  recorded for 40s\n"
        "\n"
        "✖ health.utf8            fail  node-a/gpu-0: its message is not UTF-8\n"
        "                               grpc-go cannot decode the list: the stream ends, the kubelet "
        "discards the health of all the driver's devices, and again every 5 s.\n"
        "                               → replace bytes that are not UTF-8 before sending\n"
        "▲ health.enum            warn  node-a/gpu-1: 3\n"
        "                               The kubelet treats any other number as Unknown.\n"
        "                               → send 0 (Unknown), 1 (Healthy) or 2 (Unhealthy)\n"
        f"● socket.path            pass  {SOCKET}: 49 bytes\n"
    )


def test_last_line_counts_the_verdicts_that_occur():
    assert render_record(BAD).endswith("\n\n68 checks: 27 passed, 1 warning, 1 failed, 39 skipped\n")
    assert render_record(GOOD).endswith("\n\n68 checks: 40 passed, 28 skipped\n")
    assert render_record(NOTHING).endswith("\n\n68 checks: 29 not run, 39 skipped\n")


def test_duration_shows_recorded_and_requested_time():
    assert render_record(session_record(recorded_s=4.7)).startswith(f"{SOCKET}  recorded for 4s of 40s\n")


def test_session_without_a_connection_states_it():
    assert render_record(NOTHING).startswith("no service socket  no connection\n")


def test_skipped_checks_are_grouped_by_reason():
    line, other = [line for line in render_record(ALONE).splitlines() if line.startswith("○")]
    assert other.startswith("○ skipped, claims are prepared with --prepare only: prepare.first, ")
    assert line.startswith("○ skipped, registration is tested with --plugin-dir only: registration.socket, ")
    assert line.count("registration.") == 12


def test_table_is_ascii_or_coloured_as_the_style_is():
    plain, painted = render_record(BAD, unicode=False), render_record(BAD, colour=True)
    assert plain.isascii()
    assert "\x1b[31mfail\x1b[0m" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == render_record(BAD)


def test_lines_fit_the_terminal():
    lines = [
        *render_record(BAD, width=100).splitlines(),
        *render_checks(CHECKS, TextStyle(width=100)).splitlines(),
    ]
    assert max(map(len, lines)) < 100


def test_driver_text_with_control_characters_is_cleaned():
    odd = both_versions(health_list(0.1, device(name=b"\x1b[2J\n", message=b"\x07\xff")))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", render_record(session_record(versions=odd)))


# --- exit codes and programs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (GOOD, 0),
        (ALONE, 0),
        (session_record(versions=version_records([UNIMPLEMENTED]), directory=None), 1),
        (BAD, 2),
        (NOTHING, 3),
        (session_record(second_kubelet=None), 3),
    ],
)
def test_worst_verdict_decides_the_exit_code(record, code):
    assert exit_of(run_checks(record)) == code


def test_every_verdict_has_an_exit_code():
    assert set(EXITS) == set(CheckVerdict)


def test_json_has_every_field_of_every_check():
    found = json.loads(json.dumps(document(BAD, run_checks(BAD))))
    results = found.pop("results")
    assert found == {
        "apiVersion": "drahealth/v1",
        "socket": SOCKET,
        "pluginDir": None,
        "listenedSeconds": 40.0,
        "requestedSeconds": 40.0,
        "summary": {"checks": 68, "passed": 27, "warned": 1, "failed": 1, "notRun": 0, "skipped": 39},
        "profile": None,
        "badge": {
            "schemaVersion": 1,
            "label": "drahealth-conform/1",
            "message": "no profile",
            "color": "red",
        },
    }
    assert [result["code"] for result in results] == [check.code for check in CHECKS]
    (failed,) = [result for result in results if result["result"] == "fail"]
    assert failed == {
        "code": "health.utf8",
        "result": "fail",
        "title": "every string is UTF-8",
        "saw": "node-a/gpu-0: its message is not UTF-8",
        "why": "grpc-go cannot decode the list: the stream ends, the kubelet discards the health of all "
        "the driver's devices, and again every 5 s.",
        "advice": "replace bytes that are not UTF-8 before sending",
    }
    assert {result["advice"] for result in results if result["result"] in ("pass", "skipped")} == {None}


# --- the profile -------------------------------------------------------------------------------------------

CHECKS_OF_PROFILE_1 = "f167ac9d9f2f1bf9"
"""Digest of the codes of all checks of the profile."""


def test_profile_has_its_own_version_for_each_set_of_checks():
    digest = hashlib.sha256("\n".join(check.code for check in CHECKS).encode()).hexdigest()[:16]
    assert (PROFILE, digest) == ("drahealth-conform/1", CHECKS_OF_PROFILE_1), (
        "the set of checks changed: raise the number of PROFILE with the next release, then change the digest"
    )


def test_profile_has_the_areas_in_which_all_checks_passed():
    found = profile(run_checks(session_with_claims()))
    assert found["text"] == "drahealth-conform/1: kubelet 1.38, health, registration, prepare"
    assert found["skipped"] == ["registration.refused"]
    assert profile(run_checks(GOOD))["areas"] == ["health", "registration"]
    assert profile(run_checks(ALONE))["areas"] == ["health"]
    assert profile(run_checks(NOTHING)) is None


def test_profile_omits_an_area_with_a_warning_or_without_a_result():
    shared = DEVICES[TRAIN.uid][0]
    warned = {PrepareStage.FIRST: (prepare_call(TRAIN, INFER, infer=(shared._replace(name="gpu-1"),)),)}
    assert profile(run_checks(session_with_claims(warned)))["areas"] == ["health", "registration"]
    unread = session_with_claims(cdi_unprepared=CdiSnapshot((), "directory /cdi: gone"))
    assert profile(run_checks(unread))["areas"] == ["health", "registration"]


@pytest.mark.parametrize(
    ("record", "colour"),
    [
        (session_with_claims(), "brightgreen"),
        (session_record(second_kubelet=None), "lightgrey"),
        (session_with_claims(cdi_unprepared=CLAIM_FILES), "red"),
        (NOTHING, "lightgrey"),
    ],
)
def test_badge_has_the_colour_of_the_worst_result(record, colour):
    assert badge(run_checks(record))["color"] == colour


# --- the verb ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "no driver is given: use --socket, --plugin-dir, or both\n"),
        (["--socket", "s", "--refuse"], "--refuse needs --plugin-dir\n"),
        (["--socket", "s", "--no-notify"], "--no-notify needs --plugin-dir\n"),
        (["--plugin-dir", "p", "--refuse", "--no-notify"], "--refuse and --no-notify exclude each other\n"),
        (["--socket", "s", "--driver", "d"], "--driver needs --plugin-dir\n"),
        (["--socket", "s", "--for", "1s"], "--for: 1s is not between 2s and 10m\n"),
        (["--socket", "s", "--for", "11m"], "--for: 11m is not between 2s and 10m\n"),
        (["--socket", "s", "--for", "soon"], "--for: 'soon' is not a duration"),
        (["--socket", "s", "-o", "markdown"], "-o markdown is only possible with --checks\n"),
        (["--plugin-dir", "p", "--claims", "c"], "--claims needs --prepare\n"),
        (["--plugin-dir", "p", "--cdi-dir", "c"], "--cdi-dir needs --prepare\n"),
        (
            ["--socket", "s", "--prepare"],
            "--prepare needs --plugin-dir, where the driver's name is registered\n",
        ),
        (
            ["--plugin-dir", "p", "--prepare"],
            "--prepare needs claims: use --claims, --device, --slices or --kubeconfig\n",
        ),
        (
            ["--plugin-dir", "p", "--prepare", "--claims", "c", "--claim-command", "c"],
            "--claim-command needs --device or --slices\n",
        ),
        (
            ["--plugin-dir", "p", "--prepare", "--kubeconfig", "k", "--slices", "s", "--claim-command", "c"],
            "--claim-command and --kubeconfig exclude each other\n",
        ),
        (["--plugin-dir", "p", "--slices", "s"], "--slices needs --prepare\n"),
        (["--plugin-dir", "p", "--kubeconfig", "s"], "--kubeconfig needs --prepare\n"),
        (["--plugin-dir", "p", "--node-name", "s"], "--node-name needs --prepare\n"),
        (["--plugin-dir", "p", "--prepare", "--slices", "/none"], "/none: No such file or directory\n"),
        (["--plugin-dir", "p", "--prepare", "--slices", "/dev/null"], "/dev/null: is not a regular file\n"),
        (
            ["--plugin-dir", "p", "--prepare", "--device", "a/b", "--remove-cdi"],
            "--remove-cdi needs --restart-command: a reboot also restarts the driver\n",
        ),
        (["--plugin-dir", "p", "--prepare", "--device", "gpu-0"], "--device: 'gpu-0' is not POOL/NAME\n"),
        (["--plugin-dir", "p", "--prepare", "--claims", "/none"], "/none: "),
        (["--sockte", "s"], "'--sockte' is not an argument of drahealth conform; did you mean '--socket'?"),
    ],
)
def test_invalid_argument_exits_64_and_is_named(capsys, argv, error):
    assert main(["conform", *argv]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"drahealth: {error}")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "is empty"),
        ('{"kind": "Pod"}', "holds no ResourceSlice"),
    ],
)
def test_file_without_slices_names_the_command_that_makes_it(capsys, tmp_path, text, error):
    file = tmp_path / "slices.json"
    file.write_text(text)
    assert main(["conform", "--plugin-dir", "p", "--prepare", "--slices", str(file)]) == 64
    assert capsys.readouterr().err == (
        f"drahealth: file {file}: {error}; create it with: "
        "kubectl get resourceslices,resourceclaims -A -o json\n"
    )


def test_api_server_that_cannot_be_reached_exits_69(capsys, tmp_path):
    with socket.socket() as unused, FakeKubeApi(None) as api:
        unused.bind(("127.0.0.1", 0))  # it does not listen, and no other process gets the port
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api, cluster={"server": url})
        assert main(["conform", "--plugin-dir", "p", "--prepare", "--kubeconfig", str(kubeconfig)]) == 69
    assert capsys.readouterr().err == f"drahealth: API server {url}: Connection refused\n"


def test_missing_verb_at_the_api_server_exits_77(capsys, tmp_path):
    with FakeKubeApi(None) as api:
        api.refuse = forbid("GET", "resourceclaims")
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api)
        assert main(["conform", "--plugin-dir", "p", "--prepare", "--kubeconfig", str(kubeconfig)]) == 77
    assert "403 Forbidden: list of resourceclaims.resource.k8s.io: " in capsys.readouterr().err


def test_cluster_without_slices_is_named(capsys, tmp_path):
    with FakeKubeApi(None) as api:
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api)
        assert main(["conform", "--plugin-dir", "p", "--prepare", "--kubeconfig", str(kubeconfig)]) == 64
    assert capsys.readouterr().err == (
        f"drahealth: --kubeconfig: the API server {api.url} has no ResourceSlice; does a driver run?\n"
    )


def test_slices_of_the_given_driver_only_are_read(capsys, tmp_path):
    with FakeKubeApi(None) as api:
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api)
        flags = ["--plugin-dir", "p", "--prepare", "--kubeconfig", str(kubeconfig)]
        assert main(["conform", *flags, "--driver", "nic.example.com"]) == 64
    [call] = [call for call in api.calls if "/resourceslices?" in call.target]
    assert "fieldSelector=spec.driver%3Dnic.example.com" in call.target
    assert capsys.readouterr().err == (
        f"drahealth: --kubeconfig: the API server {api.url} has no ResourceSlice of driver nic.example.com; "
        "does a driver run?\n"
    )


def test_socket_that_does_not_exist_exits_69(capsys, tmp_path):
    assert main(["conform", "--socket", str(tmp_path / "dra.sock")]) == 69
    assert capsys.readouterr().err == (
        f"drahealth: socket {tmp_path}/dra.sock: no such socket; is the driver running?\n"
    )


def test_socket_path_with_control_characters_is_cleaned(capsys, tmp_path):
    assert main(["conform", "--socket", str(tmp_path / "\x1b[31m.sock")]) == 69
    assert f"socket {tmp_path}/\ufffd[31m.sock: no such socket" in capsys.readouterr().err


def test_regular_file_instead_of_a_socket_exits_69(capsys, tmp_path):
    file = tmp_path / "dra.sock"
    file.touch()
    assert main(["conform", "--socket", str(file)]) == 69
    assert capsys.readouterr().err == f"drahealth: socket {file}: is not a socket\n"


def test_empty_directory_exits_69_and_a_missing_one_64(capsys, tmp_path):
    assert main(["conform", "--plugin-dir", str(tmp_path)]) == 69
    assert main(["conform", "--plugin-dir", str(tmp_path / "none")]) == 64
    assert capsys.readouterr().err == (
        f"drahealth: directory {tmp_path}: no registration socket in it; is the driver running?\n"
        f"drahealth: directory {tmp_path}/none: cannot be listed: No such file or directory; set --plugin-dir\n"  # noqa: E501
    )


def test_socket_path_that_is_too_long_is_a_finding(capsys, tmp_path):
    path = tmp_path / ("x" * 108)
    assert main(["conform", "--socket", str(path), "-o", "json"]) == 2
    found = json.loads(capsys.readouterr().out)
    results = {result["code"]: result["result"] for result in found["results"]}
    assert found["listenedSeconds"] == 0
    assert results.pop("socket.path") == "fail"
    assert set(results.values()) == {"not run", "skipped"}


# --- the checks --------------------------------------------------------------------------------------------


def test_conform_page_is_up_to_date():
    assert PAGE.read_text() == render_checks_markdown(CHECKS), (
        "drahealth conform --checks -o markdown > docs/conform.md"
    )


def test_conform_page_has_a_row_for_every_check():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    assert [code for row in rows for code in re.findall(r"^\| `(.*?)` \|", row)] == [
        check.code for check in CHECKS
    ]


def test_checks_are_listed_without_a_driver(capsys):
    for output in ("table", "json", "markdown"):
        assert main(["conform", "--checks", "-o", output]) == 0
        out = capsys.readouterr().out
        assert all(check.code in out for check in CHECKS)
    assert main(["conform", "--checks", "-o", "json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {key: type(value) for key, value in checks[0].items()} == dict.fromkeys(
        ("code", "title", "looksAt", "why", "advice"), str
    )


def test_every_code_belongs_to_a_group():
    assert {check.code.partition(".")[0] for check in CHECKS} == set(GROUPS)
