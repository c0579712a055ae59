"""``drahealth prepares``: the last prepare of each claim, worst first, and the list of codes."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from other_user import become_other_user
from prepare_samples import DRIVER, NOW, claim, verdict

from agent.cli.main import main
from agent.cli.output.terminal import TextStyle
from agent.cli.prepares.text import (
    CLASSES,
    exit_of,
    prepare_records,
    render,
    render_codes,
    render_codes_markdown,
)
from agent.model.claim import ClaimRef
from agent.model.prepare import ErrorClass
from agent.prepare import prepare_ledger as ledgers
from agent.prepare.failure_kinds import FAILURE_KINDS
from agent.prepare.prepare_ledger import PrepareLedger
from agent.store.driver_files import LEDGER_FILE, LedgerFileContent, save_ledger

PAGE = Path(__file__).parent.parent / "docs" / "prepare-errors.md"

XID = replace(
    verdict(ErrorClass.FAILED_DEVICE, "gpu.xid.79"), summary="the GPU is off the bus", advice="reboot"
)
PASSES = replace(
    verdict(ErrorClass.TRANSIENT, "cdi.write"), summary="ENOSPC while writing", advice="free space"
)


def ledger_of(*results: tuple[str, object], at: float = NOW) -> PrepareLedger:
    """Return a ledger with these claims, each with the verdict of its failure or None."""
    ledger = PrepareLedger()
    for number, (name, result) in enumerate(results):
        if result is None:
            ledger = ledgers.with_success(ledger, claim(name), "", at + number, "1.2")
        else:
            ledger, _ = ledgers.with_failure(ledger, claim(name), "", result, at + number, "1.2")
    return ledger


MANY = ledger_of(("ok", None), ("passes", PASSES), ("broken", XID), ("gone", verdict()))
MANY = ledgers.with_unprepare(MANY, claim("gone").ref, NOW + 60)


@dataclass
class Node:
    """Directories of a node."""

    root: Path

    @property
    def kubelet(self) -> Path:
        return self.root / "kubelet"

    @property
    def state(self) -> Path:
        return self.root / "state"

    def store(self, ledger: PrepareLedger, driver: str = DRIVER, *, by_agent: bool = False) -> Path:
        """Write the ledger of a driver and return its path."""
        directory = (
            self.state / "drivers" / driver if by_agent else self.kubelet / "plugins" / driver / "drahealth"
        )
        save_ledger(directory, driver, "1.2", ledger, NOW + 100)
        return directory / LEDGER_FILE

    def run(self, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
        """Run the command; return exit code, output and errors."""
        roots = ["--kubelet-dir", str(self.kubelet), "--state-dir", str(self.state)]
        code = main(["prepares", *roots, *argv])
        return code, *capsys.readouterr()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def render_ledger(ledger: PrepareLedger, **style: object) -> str:
    found = [LedgerFileContent(DRIVER, "1.2", ledger)]
    return render(prepare_records(found), found, TextStyle(**style), now_s=NOW + 100, whole=False)


# --- the list ----------------------------------------------------------------------------------------------


def test_failing_claims_come_first_with_advice():
    assert render_ledger(MANY) == (
        "4 claims: 1 failing for good, 1 failing, 1 prepared, 1 over\n"
        "\n"
        "  DRIVER           CLAIM        CLASS          CODE            COUNT  SINCE  LAST\n"
        "✖ gpu.example.com  team/broken  failed-device  gpu.xid.79      1      98s    98s ago\n"
        "    gpu-0: the GPU is off the bus\n"
        "    → reboot\n"
        "▲ gpu.example.com  team/passes  transient      cdi.write       1      99s    99s ago\n"
        "    ENOSPC while writing\n"
        "    → free space\n"
        "● gpu.example.com  team/ok      prepared                                     100s ago\n"
        "· gpu.example.com  team/gone    bad-config     config.invalid  1      97s    97s ago\n"
        "    what it is, 3 of 4\n"
        "    unprepared 40s ago\n"
        "\n"
        "  found broken  gpu.example.com/node-1/gpu-0: gpu.xid.79: the GPU is off the bus (98s ago, while "
        "preparing team/broken)\n"
    )


def test_list_is_ascii_or_coloured_as_the_style_is():
    plain, painted = render_ledger(MANY, unicode=False), render_ledger(MANY, colour=True)
    assert plain.isascii()
    assert "\x1b[31mfailed-device\x1b[0m" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == render_ledger(MANY)


def test_driver_text_with_control_characters_is_cleaned():
    odd = replace(XID, code="a.b", summary="\x1b[2J\nno", advice="\x07", evidence=("\x1b",))
    assert "\x1b" not in render_ledger(ledger_of(("x", odd)))
    assert "\x07" not in render_ledger(ledger_of(("x", odd)))


def test_lines_fit_the_terminal():
    long = replace(XID, summary="word " * 60, advice="more " * 60)
    body = [
        line
        for line in render_ledger(ledger_of(("x", long)), width=80).splitlines()
        if line.startswith("    ")
    ]
    assert len(body) > 6
    assert max(map(len, body)) < 80


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([], 0),
        ([None, None], 0),
        ([None, PASSES], 1),
        ([verdict(ErrorClass.UNKNOWN, "driver.error")], 1),
        *(([PASSES, verdict(kind, "a.b")], 2) for kind in sorted(ledgers.CACHED_CLASSES)),
    ],
)
def test_worst_claim_decides_the_exit_code(results, code):
    ledger = ledger_of(*((str(number), result) for number, result in enumerate(results)))
    assert exit_of(prepare_records([LedgerFileContent(DRIVER, "", ledger)])) == code


def test_unprepared_claim_does_not_fail_the_exit_code():
    ledger = ledgers.with_unprepare(ledger_of(("a", XID)), claim("a").ref, NOW)
    assert exit_of(prepare_records([LedgerFileContent(DRIVER, "", ledger)])) == 0
    assert (
        prepare_records(
            [
                LedgerFileContent(
                    DRIVER, "", ledgers.with_unprepare(ledger_of(("a", None)), claim("a").ref, NOW)
                )
            ]
        )
        == ()
    )


# --- the files ---------------------------------------------------------------------------------------------


def test_every_driver_of_the_node_is_listed(node, capsys):
    node.store(ledger_of(("a", None)))
    node.store(ledger_of(("b", PASSES)), "cpu.example.com", by_agent=True)
    elsewhere = node.store(ledger_of(("c", None)), "net.example.com").rename(node.root / "c.json")
    code, out, err = node.run(capsys, "--file", str(elsewhere), "-o", "json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["apiVersion"] == "drahealth/v1"
    assert [(claim["driver"], claim["name"], claim["state"]) for claim in found["claims"]] == [
        ("cpu.example.com", "b", "failing"),
        (DRIVER, "a", "prepared"),
        ("net.example.com", "c", "prepared"),
    ]


def test_driver_flag_selects_one_driver(node, capsys):
    node.store(ledger_of(("a", None)))
    broken = node.kubelet / "plugins" / "cpu.example.com" / "drahealth"
    broken.mkdir(parents=True)
    (broken / LEDGER_FILE).write_text("{")
    code, out, err = node.run(capsys, "--driver", DRIVER)
    assert (code, err) == (0, "")
    assert "team/a" in out


def test_json_has_every_field(node, capsys):
    node.store(MANY)
    code, out, _ = node.run(capsys, "broken", "-o", "json")
    (item,) = json.loads(out)["claims"]
    assert code == 2
    assert item == {
        "driver": DRIVER,
        "driverVersion": "1.2",
        "namespace": "team",
        "name": "broken",
        "uid": "uid-broken",
        "state": "failing",
        "devices": [{"driver": DRIVER, "pool": "node-1", "name": "gpu-0"}],
        "last": "2026-09-21T14:13:22Z",
        "unprepared": None,
        "verdict": {
            "class": "failed-device",
            "code": "gpu.xid.79",
            "scope": "claim",
            "requests": [],
            "devices": [{"driver": DRIVER, "pool": "node-1", "name": "gpu-0"}],
            "summary": "the GPU is off the bus",
            "detail": "",
            "evidence": [],
            "confidence": 0.0,
            "advice": "reboot",
            "repair": "none",
            "retryAfterSeconds": None,
            "health": None,
            "taint": None,
            "count": 1,
            "since": "2026-09-21T14:13:22Z",
            "last": "2026-09-21T14:13:22Z",
        },
    }
    (fault,) = json.loads(out)["foundBroken"]
    assert (fault["name"], fault["code"], fault["excused"]) == ("gpu-0", "gpu.xid.79", None)


@pytest.mark.parametrize("name", ["broken", "team/broken", "uid-broken"])
def test_named_claim_is_shown_in_full(node, capsys, name):
    node.store(MANY)
    code, out, _ = node.run(capsys, name)
    assert code == 2
    assert "uid-broken" in out
    assert "to blame  gpu.example.com/node-1/gpu-0" in out
    assert "team/passes" not in out


def test_unknown_claim_is_refused_with_a_suggestion(node, capsys):
    node.store(MANY)
    assert node.run(capsys, "team/brokn") == (
        64,
        "",
        "drahealth: no prepare of claim 'team/brokn' is known; did you mean 'team/broken'?\n",
    )


def test_empty_list_names_the_searched_places(node, capsys):
    (node.kubelet / "plugins").mkdir(parents=True)
    drivers = node.state / "drivers"
    assert node.run(capsys) == (
        0,
        "no prepare of a claim is known\n"
        "\n"
        f"  looked for  {node.kubelet}/plugins/*/drahealth/prepares.json\n"
        f"              {drivers}/*/prepares.json ({drivers} does not exist)\n"
        "  written by  DRA drivers that embed drahealth, and the agent for drivers of its sockets\n"
        "  elsewhere   --kubelet-dir for another root of the kubelet, --file for one driver's file\n"
        "  to try      drahealth classify --errno ENOSPC --doing cdi: how an error would be classified\n",
        "",
    )


def test_driver_without_claims_is_listed_as_found(node, capsys):
    node.store(PrepareLedger())
    code, out, err = node.run(capsys, "--driver", DRIVER)
    assert (code, err) == (0, "")
    assert f"  found       {DRIVER} 1.2: no claim\n" in out


def test_json_has_the_searched_places(node, capsys):
    elsewhere = node.store(MANY).rename(node.root / "c.json")
    _, out, _ = node.run(capsys, "--file", str(elsewhere), "-o", "json")
    assert json.loads(out)["lookedFor"] == [
        f"{node.kubelet}/plugins/*/drahealth/prepares.json",
        f"{node.state}/drivers/*/prepares.json",
        str(elsewhere),
    ]


def test_corrupt_file_is_named_and_hides_no_other(node, capsys):
    node.store(ledger_of(("a", XID)))
    broken = node.store(PrepareLedger(), "cpu.example.com")
    broken.write_text("nonsense")
    code, out, err = node.run(capsys)
    assert code == 70
    assert err.startswith(f"drahealth: {broken}: state file cannot be parsed: JSON is malformed")
    assert "team/a" in out
    assert broken.read_text() == "nonsense"


def test_path_with_control_characters_is_cleaned(node, capsys):
    node.store(ledger_of(("a", XID)), "odd\x1b[31m").write_text("nonsense")
    _, out, err = node.run(capsys)
    assert "\x1b" not in out + err
    assert "/odd\ufffd[31m/" in err


def test_missing_file_of_the_flag_is_an_error(node, capsys):
    missing = str(node.root / "none.json")
    code, out, err = node.run(capsys, "--file", missing)
    assert (code, err) == (70, f"drahealth: {missing}: No such file or directory\n")
    assert out.startswith("no prepare of a claim could be read\n")


def test_file_of_the_flag_may_be_a_pipe(node, capsys):
    reader, writer = os.pipe()
    os.write(writer, b"{")
    os.close(writer)
    code, _, err = node.run(capsys, "--file", f"/dev/fd/{reader}")
    os.close(reader)
    assert code == 70
    assert f"/dev/fd/{reader}: state file cannot be parsed" in err


@pytest.fixture
def unreadable_plugins(node: Node) -> Iterator[Path]:
    """Directory of drivers that this user may not read, also if the tests run as root."""
    node.store(MANY)
    plugins = node.kubelet / "plugins"
    plugins.chmod(0)
    before = os.geteuid()
    if before == 0:
        become_other_user()
    yield plugins
    os.seteuid(before)
    plugins.chmod(0o700)


def test_unreadable_directory_exits_77_and_is_named(node, unreadable_plugins, capsys):
    code, _, err = node.run(capsys)
    assert code == 77
    assert f"drahealth: {unreadable_plugins}: Permission denied\n" in err


def test_markdown_of_the_list_is_refused(node, capsys):
    code, _, err = node.run(capsys, "-o", "markdown")
    assert code == 64
    assert "-o markdown is only possible with --codes" in err


def test_invalid_configuration_exits_78(node, capsys, monkeypatch):
    monkeypatch.setenv("DRAHEALTH_PERIOD", "1ns")
    code, _, err = node.run(capsys)
    assert code == 78
    assert "DRAHEALTH_PERIOD" in err


# --- the codes ---------------------------------------------------------------------------------------------


def test_every_class_has_a_meaning():
    assert set(CLASSES) == set(ErrorClass)


def test_every_code_is_on_the_page_and_in_the_list():
    page, listed = render_codes_markdown(FAILURE_KINDS), render_codes(FAILURE_KINDS, TextStyle())
    for row in FAILURE_KINDS:
        assert f"| `{row.code}` |" in page
        assert f"  {row.code} " in listed
        assert f"→ {row.advice}" in listed


def test_markdown_rows_have_the_same_number_of_cells():
    rows = [line for line in render_codes_markdown(FAILURE_KINDS).splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_prepare_errors_page_is_up_to_date():
    assert PAGE.read_text() == render_codes_markdown(FAILURE_KINDS), (
        "drahealth prepares --codes -o markdown > docs/prepare-errors.md"
    )


def test_codes_are_found_by_their_first_parts(capsys):
    assert main(["prepares", "--codes", "cdi", "-o", "json"]) == 0
    codes = json.loads(capsys.readouterr().out)["codes"]
    assert {code["code"].partition(".")[0] for code in codes} == {"cdi"}
    assert {(code["code"], code["class"]) for code in codes} >= {
        ("cdi.write", "transient"),
        ("cdi.write", "permanent"),
    }


@pytest.mark.parametrize(
    ("code", "family"),
    [("os.enoent", "os.*"), ("gpu.xid.79", "gpu.xid.*"), ("driver.bug.key_error", "driver.bug.*")],
)
def test_code_of_an_event_is_found_by_its_family(capsys, code, family):
    assert main(["prepares", "--codes", code, "-o", "json"]) == 0
    assert {code["code"] for code in json.loads(capsys.readouterr().out)["codes"]} == {family}


def test_unknown_code_is_refused_with_a_suggestion(capsys):
    assert main(["prepares", "--codes", "cdi.wirte"]) == 64
    err = capsys.readouterr().err
    assert "did you mean 'cdi.write'?" in err
    assert "it may be the code of a check (see 'drahealth checks'), or the driver's own" in err


def test_claim_of_two_drivers_is_listed_for_each():
    found = [LedgerFileContent(name, "", ledger_of(("a", None))) for name in (DRIVER, "net.example.com")]
    assert [(record.driver, record.claim) for record in prepare_records(found)] == [
        (DRIVER, ClaimRef("team", "a", "uid-a")),
        ("net.example.com", ClaimRef("team", "a", "uid-a")),
    ]
