"""The catalogue of checks: complete, honest about how bad a thing is, current in docs/, and easy to ask."""

import json
import re
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
from fake_nvml import fake_nvml, play
from hypothesis import given
from hypothesis import strategies as st

import agent.health
from agent.cli.checks.check import Check
from agent.cli.checks.rows import LOG_LINES, groups
from agent.cli.checks.text import COMMAND, markdown
from agent.cli.main import main
from agent.config.config import SETTINGS
from agent.embed.failed import FAILED
from agent.health.catalog import STALLED, Row
from agent.health.declared.gpus import DECLARED_GPU_RULES
from agent.health.gpu.catalog import gpu_rules
from agent.health.gpu.faults import events as gpu_events
from agent.health.gpu.xid import lines as xid_lines
from agent.health.gpu.xid.facts import XidFacts, XidFault
from agent.health.gpu.xid.recovery import RecoveryAction
from agent.health.gpu.xid.rules import decide
from agent.health.gpu.xid.sxid_rules import decide_sxid
from agent.health.gpu.xid.sxids import SXIDS
from agent.health.gpu.xid.table import XIDS
from agent.health.host.catalog import ALL_RULES
from agent.health.host.pod.rule_rows import PROMISES
from agent.health.kernel_log.parse import parse as host_line
from agent.health.kernel_log.values import LogCode
from agent.model.health import Severity
from agent.model.settings import GpuLimits

LIMITS = GpuLimits()
PAGE = Path(__file__).parent.parent / "docs" / "checks.md"
GROUPS = groups(LIMITS)
CHECKS = {check.code: check for group in GROUPS for check in group.checks}


# --- the catalogue -----------------------------------------------------------------------------------------


def test_everything_that_can_be_said_of_a_device_is_listed_once():
    codes = [rule.code for rule in (*ALL_RULES, *DECLARED_GPU_RULES, *gpu_rules(LIMITS))]
    codes += [row.code for row in gpu_events.ROWS] + [*PROMISES]
    codes += [f"gpu.xid.{code}" for code in XIDS] + [f"gpu.fabric.sxid.{code}" for code in SXIDS]
    for module in walk_packages(agent.health.__path__, "agent.health."):
        codes += [row.code for row in vars(import_module(module.name)).values() if isinstance(row, Row)]
    assert {*codes, STALLED, FAILED.code} == set(CHECKS)
    assert len(CHECKS) == sum(len(group.checks) for group in GROUPS)


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.code)
def test_a_check_says_everything(check: Check):
    assert all((check.what, check.threshold, check.why, check.advice, check.source))
    assert "`" not in check.what, "a docstring's markup would be shown to people"


def test_a_check_says_how_to_try_it():
    assert [check.code for check in CHECKS.values() if not check.try_it] == [STALLED]


def test_a_threshold_names_its_unit_and_settings_that_exist():
    keys = {setting.key for setting in SETTINGS}
    for check in CHECKS.values():
        named = set(re.findall(r"[(, ]([a-z]+\.[a-z-]+)(?=[,)])", check.threshold))
        assert named <= keys, check.code
        assert not re.match(r"\d+ (in|since|of)\b", check.threshold), f"{check.code}: {check.threshold}"


def test_the_numbers_are_those_of_the_limits():
    strict = {c.code: c for group in groups(GpuLimits(correctable_errors=7)) for c in group.checks}
    assert " 7 in 1 h" in strict["gpu.ecc.correctable_rate"].threshold


ACTION = st.none() | st.sampled_from([RecoveryAction(number) for number in range(9)])
MAYBE = st.none() | st.booleans()
FACTS = st.builds(
    XidFacts,
    *(ACTION, st.booleans(), ACTION, MAYBE, MAYBE, MAYBE, MAYBE, MAYBE, st.booleans(), MAYBE, st.booleans()),
)
LINES = [
    "NVRM: Xid (PCI:0000:1b:00): 74, pid=1, name=a, NVLink: fatal error detected on link 3"
    "(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 149, NETIR_LINK_EVT Fatal   XC0 i0 Link 02 (0x004505c6 0x00000000 0x0 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 144, SAW_MVB Nonfatal XC1 i0 Link 07 (0x00000001 0x00000001 0x0 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)",
    "NVRM: Xid (PCI:0000:1b:00): 147, TREX Fatal XC0 i0 Link 02 (0x00000001 0x00000001 0x0 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 148, NVLPW Fatal XC0 i0 Link 02 (0x00000001 0x00000001 0x0 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 13, pid=7, name=b, Graphics SM Warp Exception on (GPC 1, TPC 2, SM 0)",
]
PARSED = [line for text in LINES if isinstance(line := xid_lines.parse(text), xid_lines.XidLine)]
FAULTS = st.builds(
    XidFault,
    st.sampled_from([1, 2, 100]),
    st.sampled_from([1, 2, 5]),
    st.lists(st.sampled_from(PARSED), max_size=3).map(tuple),
    st.frozensets(st.integers(1, 3)),
    st.frozensets(st.sampled_from([45, 154, 162])),
)


@given(FACTS, FAULTS)
def test_no_xid_is_ever_judged_worse_than_the_page_says(facts, fault):
    for code, row in XIDS.items():
        mine = tuple(line for line in fault.details if line.code == code)
        told = decide(row, fault._replace(details=mine), facts)
        assert told.severity <= CHECKS[f"gpu.xid.{code}"].severity, (code, told)


def test_every_xid_can_be_as_bad_as_the_page_says():
    asked = XidFacts(
        action=RecoveryAction.GPU_RESET,
        has_action=True,
        remap_pending=True,
        links_down=True,
        replays_growing=True,
    )
    for code, row in XIDS.items():
        lines = tuple(line for line in PARSED if line.code == code)
        faults = [XidFault(20, 5, lines, frozenset({1, 2})), XidFault()]
        facts = [asked, XidFacts(), XidFacts(announced=RecoveryAction.NODE_REBOOT)]
        worst = max(decide(row, fault, fact).severity for fault in faults for fact in facts)
        assert worst is CHECKS[f"gpu.xid.{code}"].severity, code


def test_the_verdict_of_a_listed_code_begins_with_its_severity():
    for group in GROUPS:
        for check in group.checks if group.prefix else ():
            assert check.threshold.split()[0] == check.severity.name.lower()


def test_an_sxid_is_as_bad_as_its_row_says():
    for code, row in SXIDS.items():
        assert CHECKS[f"gpu.fabric.sxid.{code}"].severity is decide_sxid(row, None).severity


def test_lines_to_be_written_to_the_kernel_log_are_understood_there():
    kinds = {
        gpu_events.INIT_FAILED: xid_lines.InitFailedLine,
        gpu_events.LINK_SETUP_FAILED: xid_lines.LinkSetupLine,
        gpu_events.API_MISMATCH: xid_lines.MismatchLine,
    }
    assert {code: type(xid_lines.parse(line)) for code, line in LOG_LINES.items()} == kinds
    for code in SXIDS:
        (text,) = re.findall(r'echo "(.*)" > /dev/kmsg', CHECKS[f"gpu.fabric.sxid.{code}"].try_it)
        line = xid_lines.parse(text)
        assert isinstance(line, xid_lines.SxidLine)
        assert (line.code, line.fatal, line.link) == (code, True, 32)


def test_lines_about_the_host_are_understood_and_by_the_rule_that_names_them():
    written = {
        check.code: text.replace("<address>", "0000:3b:00.0")
        for check in CHECKS.values()
        for text in re.findall(r"echo '<\d>(.*?)' > /dev/kmsg", check.try_it)
    }
    heard = {code: line.code for code, text in written.items() if (line := host_line(text))}
    assert heard == {
        "cpu.machine_check": LogCode.MACHINE_CHECK,
        "cpu.machine_check.corrected": LogCode.MACHINE_CHECK_CORRECTED,
        "cpu.lockup.hard": LogCode.HARD_LOCKUP,
        "cpu.lockup.soft": LogCode.SOFT_LOCKUP,
        "pci.fault": LogCode.PCI_FAULT,
        "node.hung_task": LogCode.HUNG_TASK,
        "node.rcu_stall": LogCode.RCU_STALL,
        "node.oom": LogCode.OOM_KILL,
        "node.nvme": LogCode.NVME,
        "node.read_only": LogCode.READ_ONLY,
        "node.pci": LogCode.AER_FATAL,
        "node.pci.corrected": LogCode.AER_CORRECTED,
        "node.machine_check": LogCode.HARDWARE_ERROR,
    }
    assert heard.keys() == written.keys()


def test_commands_of_the_fake_nvml_are_understood_by_it(tmp_path):
    commands = [
        found
        for check in CHECKS.values()
        if not check.try_it.startswith("echo ")
        for found in re.findall(r"(?:gpu \d|init|reload) [^;]*", check.try_it)
    ]
    fake = fake_nvml(tmp_path, "profile h100 gpus=8", "gpu 0 mig 1g.10gb")
    heard = play(fake, f"answer = [tell(command) for command in {commands!r}]")
    assert len(heard) == len(commands) > len(XIDS)


# --- the page ----------------------------------------------------------------------------------------------


def test_the_page_is_current():
    assert PAGE.read_text() == markdown(GROUPS), "drahealth checks -o markdown > docs/checks.md"


def test_the_page_has_a_heading_or_a_row_for_every_check():
    page = PAGE.read_text()
    headings = set(re.findall(r"^### `(.*)`$", page, re.MULTILINE))
    numbers = set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))
    for group in GROUPS:
        for check in group.checks:
            known = numbers if group.prefix else headings
            assert check.code.removeprefix(group.prefix) in known


def test_no_text_breaks_a_table_of_the_page():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4, 7}


@pytest.mark.parametrize("name", ["gpu.md", "host.md", "declared-devices.md"])
def test_the_operators_page_names_only_checks_settings_and_pages_that_exist(name):
    page = (PAGE.parent / name).read_text()
    known = {*CHECKS, *(setting.key for setting in SETTINGS)}
    heads = "|".join({one.partition(".")[0] for one in known})
    assert set(re.findall(rf"`((?:{heads})\.(?!example)[a-z_.-]+)`", page)) <= known
    assert all((PAGE.parent / link).exists() for link in re.findall(r"\]\(([a-z.-]+)\)", page))


def test_only_what_can_be_typed_is_set_as_a_command():
    assert COMMAND.fullmatch("gpu 0 set remap.failure=1")
    assert COMMAND.fullmatch(CHECKS["node.pci.corrected"].try_it)
    assert not COMMAND.fullmatch("no fake: it takes a driver that holds a process in state D")


# --- the verb ----------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["checks", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_one_check_is_shown_in_full(capsys):
    assert said(capsys, "gpu.remap.failure") == (
        "gpu.remap.failure  unhealthy, blame: hardware\n"
        "  A row of memory could not be replaced: its bank has no spare rows left.\n"
        "\n"
        "  when            the flag is set\n"
        "  why it matters  a known bad row stays in use: data will be lost again\n"
        f"  what to do      {CHECKS['gpu.remap.failure'].advice}\n"
        "  source          gpu\n"
        "  try it          gpu 0 set remap.failure=1\n"
    )


@pytest.mark.parametrize("asked", ["gpu.xid.79", "79", "xid.79"])
def test_an_xid_is_found_by_its_number(capsys, asked):
    assert said(capsys, asked).startswith("gpu.xid.79  unhealthy, blame: hardware\n")


def test_the_beginning_of_codes_shows_all_of_them(capsys):
    codes = re.findall(r"^  (\S+)", said(capsys, "gpu.remap"), re.MULTILINE)
    assert codes == ["gpu.remap.failure", "gpu.remap.pending"]
    assert len(said(capsys, "gpu.xid").splitlines()) == 1 + len(XIDS)


@pytest.mark.parametrize("word", ["nvlink", "NVLink", "pcie", "aer", "recovery_action"])
def test_a_word_shows_all_codes_that_have_it(capsys, word):
    codes = [check["code"] for check in json.loads(said(capsys, word, "-o", "json"))["checks"]]
    assert codes == [code for code in CHECKS if word.lower() in code.split(".")]


@pytest.mark.parametrize("code", ["gpu.xid.999", "gpu.fabric.sxid.99999"])
def test_a_code_of_a_message_that_no_list_has_is_explained_too(capsys, code):
    shown = said(capsys, code)
    assert shown.startswith(f"{code}  degraded")
    assert "unknown to this version" in shown


def test_the_list_of_all_counts_the_xids_and_names_the_rest(capsys):
    shown = said(capsys)
    assert "gpu.xid.<N>  173 codes, see drahealth checks gpu.xid\n" in shown
    for rule in (*ALL_RULES, *gpu_rules(LIMITS)):
        assert f"  {rule.code} " in shown


def test_a_code_of_what_can_no_longer_be_read_is_explained(capsys):
    shown = said(capsys, "mem.hugepages.pool_shrunk.unreadable")
    assert shown.startswith("mem.hugepages.pool_shrunk.unreadable  unknown, blame: agent\n")
    assert "read the file by hand" in shown


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("gpu.xdi.79", "'gpu.xdi.79' is no check; did you mean 'gpu.xid.79'?"),
        ("999", "'999' is no check\n"),
        ("gpu.xid.79.unreadable", "'gpu.xid.79.unreadable' is no check; did you mean 'gpu.xid.79'?"),
    ],
)
def test_what_is_no_check_is_a_mistake_with_a_suggestion(capsys, asked, words):
    assert main(["checks", asked]) == 64
    assert capsys.readouterr().err.startswith(f"drahealth: {words}")


def test_a_code_of_a_prepare_is_no_check_and_it_is_said_where_it_is(capsys):
    assert main(["checks", "state.write"]) == 64
    assert "'drahealth prepares --codes' what is said of claims" in capsys.readouterr().err


def test_programs_get_every_field(capsys):
    found = json.loads(said(capsys, "-o", "json"))
    assert found["apiVersion"] == "drahealth/v1"
    assert len(found["checks"]) == len(CHECKS)
    (one,) = json.loads(said(capsys, "gpu.lost", "-o", "json"))["checks"]
    assert one["severity"] == "unhealthy"
    assert {key: type(value) for key, value in one.items()} == dict.fromkeys(
        ("code", "group", "severity", "blame", "source", "what", "threshold", "why", "advice", "tryIt"), str
    )


def test_severities_are_coloured_and_nothing_else_changes(capsys):
    plain, painted = (said(capsys, "gpu.ecc", "--color", choice) for choice in ("never", "always"))
    assert "\x1b[31munhealthy\x1b[0m" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain
    assert Severity.UNHEALTHY.name.lower() in plain
