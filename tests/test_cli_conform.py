"""``drahealth conform`` as a command: what it prints, its exit codes, and its page."""

import json
import re
from pathlib import Path

import pytest
from conform_paper import SOCKET, UNIMPLEMENTED, both, device, heard, observed, watches

from agent.cli.conform.checks import GROUPS, markdown, render_checks
from agent.cli.conform.text import EXITS, document, exit_of, render
from agent.cli.main import main
from agent.cli.output.terminal import Style
from agent.conform.observed import Observed
from agent.conform.results import judge
from agent.conform.table import CHECKS
from agent.conform.verdicts import Verdict

PAGE = Path(__file__).parent.parent / "docs" / "conform.md"

GOOD = observed()
ALONE = observed(directory=None)
BAD = observed(
    watches=both(heard(0, device(message=b"\xff"), device("gpu-1", health=3)), *map(heard, (10, 20, 30))),
    directory=None,
)
NOTHING = observed(
    socket="", window_s=0.0, watches=(), leaver=None, stopped=None, reopenings=(), unknown=(), directory=None
)


def shown(seen: Observed, **style: object) -> str:
    return render(seen, judge(seen), Style(**style))


# --- the table ---------------------------------------------------------------------------------------------


def test_the_worst_comes_first_with_the_kubelets_side_of_it_and_what_to_do():
    assert shown(BAD).startswith(
        f"{SOCKET}  listened for 40s\n"
        "\n"
        "✖ health.utf8            fail  node-a/gpu-0: its message is no UTF-8\n"
        "                               grpc-go cannot decode the list: the stream ends, the health of all "
        "the driver's devices is forgotten, and so again every 5 s.\n"
        "                               → replace what is no UTF-8 before it is sent\n"
        "▲ health.enum            warn  node-a/gpu-1: 3\n"
        "                               The kubelet takes any other number for Unknown.\n"
        "                               → send 0 (Unknown), 1 (Healthy) or 2 (Unhealthy)\n"
        f"● socket.path            pass  {SOCKET}: 49 bytes\n"
    )


def test_the_last_line_counts_and_what_is_none_is_left_out():
    assert shown(BAD).endswith("\n\n38 checks: 24 passed, 1 warning, 1 failed, 12 not run\n")
    assert shown(GOOD).endswith("\n\n38 checks: 37 passed, 1 not run\n")
    assert shown(NOTHING).endswith("\n\n38 checks: 38 not run\n")


def test_nobody_is_said_to_have_been_listened_to_who_was_not():
    assert shown(NOTHING).startswith("no service socket  nobody to listen to\n")


def test_what_was_not_run_is_told_by_its_reason_with_every_code():
    (line,) = [line for line in shown(ALONE).splitlines() if line.startswith("◌")]
    assert line.startswith(
        "◌ not run, registration is looked at with --plugin-dir only: registration.socket, "
    )
    assert line.count("registration.") == 12


def test_the_table_is_ascii_where_the_terminal_is_and_coloured_where_it_is_asked_for():
    plain, painted = shown(BAD, unicode=False), shown(BAD, colour=True)
    assert plain.isascii()
    assert "\x1b[31mfail\x1b[0m" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == shown(BAD)


def test_a_line_fits_the_window():
    lines = [*shown(BAD, width=100).splitlines(), *render_checks(CHECKS, Style(width=100)).splitlines()]
    assert max(map(len, lines)) < 100


def test_what_a_driver_says_cannot_move_the_cursor():
    odd = both(heard(0.1, device(name=b"\x1b[2J\n", message=b"\x07\xff")))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", shown(observed(watches=odd)))


# --- exit codes and programs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        (GOOD, 0),
        (ALONE, 0),
        (observed(watches=watches([UNIMPLEMENTED]), directory=None), 1),
        (BAD, 2),
        (NOTHING, 3),
    ],
)
def test_the_worst_verdict_is_the_exit_code(seen, code):
    assert exit_of(judge(seen)) == code


def test_every_verdict_has_an_exit_code():
    assert set(EXITS) == set(Verdict)


def test_programs_get_every_field_of_every_check():
    told = json.loads(json.dumps(document(BAD, judge(BAD))))
    results = told.pop("results")
    assert told == {
        "apiVersion": "drahealth/v1",
        "socket": SOCKET,
        "pluginDir": None,
        "listenedSeconds": 40.0,
        "summary": {"checks": 38, "passed": 24, "warned": 1, "failed": 1, "notRun": 12},
    }
    assert [one["code"] for one in results] == [check.code for check in CHECKS]
    (failed,) = [one for one in results if one["result"] == "fail"]
    assert failed == {
        "code": "health.utf8",
        "result": "fail",
        "title": "every string is UTF-8",
        "saw": "node-a/gpu-0: its message is no UTF-8",
        "why": "grpc-go cannot decode the list: the stream ends, the health of all the driver's devices is "
        "forgotten, and so again every 5 s.",
        "advice": "replace what is no UTF-8 before it is sent",
    }
    assert {one["advice"] for one in results if one["result"] in ("pass", "not run")} == {None}


# --- the verb ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "which driver? give --socket, --plugin-dir, or both\n"),
        (["--socket", "s", "--refuse"], "--refuse is about registration: give --plugin-dir, too\n"),
        (["--socket", "s", "--driver", "d"], "--driver is about registration: give --plugin-dir, too\n"),
        (["--socket", "s", "--for", "1s"], "--for: 1s is not between 2s and 10m\n"),
        (["--socket", "s", "--for", "11m"], "--for: 11m is not between 2s and 10m\n"),
        (["--socket", "s", "--for", "soon"], "--for: 'soon' is no duration"),
        (["--socket", "s", "-o", "markdown"], "-o markdown is for --checks\n"),
        (["--sockte", "s"], "'--sockte' is no argument of conform; did you mean '--socket'?"),
    ],
)
def test_what_means_nothing_is_a_mistake_that_is_named(capsys, argv, words):
    assert main(["conform", *argv]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"drahealth: {words}")


def test_a_socket_that_nobody_serves_is_unreachable(capsys, tmp_path):
    assert main(["conform", "--socket", str(tmp_path / "dra.sock")]) == 69
    assert capsys.readouterr().err == (
        f"drahealth: {tmp_path}/dra.sock: no such socket; is the driver running?\n"
    )


def test_of_what_is_no_socket_nobody_asks_whether_the_driver_runs(capsys, tmp_path):
    file = tmp_path / "dra.sock"
    file.touch()
    assert main(["conform", "--socket", str(file)]) == 69
    assert capsys.readouterr().err == f"drahealth: {file}: is no socket\n"


def test_an_empty_directory_is_unreachable_and_one_that_is_not_there_a_mistake(capsys, tmp_path):
    assert main(["conform", "--plugin-dir", str(tmp_path)]) == 69
    assert main(["conform", "--plugin-dir", str(tmp_path / "none")]) == 64
    assert capsys.readouterr().err == (
        f"drahealth: {tmp_path}: no registration socket in it; is the driver running?\n"
        f"drahealth: {tmp_path}/none: cannot be listed (No such file or directory); see --plugin-dir\n"
    )


def test_the_path_of_a_socket_that_is_too_long_is_a_finding(capsys, tmp_path):
    path = tmp_path / ("x" * 108)
    assert main(["conform", "--socket", str(path), "-o", "json"]) == 2
    told = json.loads(capsys.readouterr().out)
    results = {one["code"]: one["result"] for one in told["results"]}
    assert told["listenedSeconds"] == 0
    assert results.pop("socket.path") == "fail"
    assert set(results.values()) == {"not run"}


# --- the checks --------------------------------------------------------------------------------------------


def test_the_page_is_current():
    assert PAGE.read_text() == markdown(CHECKS), "drahealth conform --checks -o markdown > docs/conform.md"


def test_the_page_has_a_row_for_every_check_and_no_text_breaks_it():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    assert [code for row in rows for code in re.findall(r"^\| `(.*?)` \|", row)] == [
        one.code for one in CHECKS
    ]


def test_the_checks_are_listed_without_a_driver(capsys):
    for output in ("table", "json", "markdown"):
        assert main(["conform", "--checks", "-o", output]) == 0
        said = capsys.readouterr().out
        assert all(check.code in said for check in CHECKS)
    assert main(["conform", "--checks", "-o", "json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {key: type(value) for key, value in checks[0].items()} == dict.fromkeys(
        ("code", "title", "looksAt", "why", "advice"), str
    )


def test_every_code_belongs_to_a_group():
    assert {check.code.partition(".")[0] for check in CHECKS} == set(GROUPS)
