"""Catalog of checks: complete, with the right severities, current in docs/, and found by its verb."""

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
from agent.cli.checks.catalog import LOG_LINES, CheckDescription, checks_by_section
from agent.cli.checks.command import COMMAND, markdown
from agent.cli.main import main
from agent.config.config import SETTINGS
from agent.embed.core_components import CORE_FAILED_ROW
from agent.health.declared.verdicts import DECLARED_GPU_RULES
from agent.health.gpu.faults import fault_log
from agent.health.gpu.rule_state import gpu_rules
from agent.health.gpu.xid import log_lines as xid_lines
from agent.health.gpu.xid.decisions import XidOccurrences, XidReadings, decide_sxid, decide_xid
from agent.health.gpu.xid.sxid_table import SXIDS
from agent.health.gpu.xid.xid_table import XIDS, RecoveryAction
from agent.health.host.pod import POD_AUDIT_ROWS
from agent.health.host.verdicts import ALL_HOST_RULES
from agent.health.kernel_log.facts import KernelLogCode
from agent.health.kernel_log.parse import parse_host_line as host_line
from agent.health.rules import STALLED, CatalogRow
from agent.model.health import Repair, Severity
from agent.model.settings import GpuLimits

LIMITS = GpuLimits()
PAGE = Path(__file__).parent.parent / "docs" / "checks.md"
GROUPS = checks_by_section(LIMITS)
CHECKS = {check.code: check for group in GROUPS for check in group.checks}


# --- the catalog -----------------------------------------------------------------------------------------


def test_every_cause_is_listed_once():
    codes = [rule.code for rule in (*ALL_HOST_RULES, *DECLARED_GPU_RULES, *gpu_rules(LIMITS))]
    codes += [row.code for row in fault_log.EVENT_FAULT_ROWS] + [*POD_AUDIT_ROWS]
    codes += [f"gpu.xid.{code}" for code in XIDS] + [f"gpu.fabric.sxid.{code}" for code in SXIDS]
    for module in walk_packages(agent.health.__path__, "agent.health."):
        codes += [
            row.code for row in vars(import_module(module.name)).values() if isinstance(row, CatalogRow)
        ]
    assert {*codes, STALLED, CORE_FAILED_ROW.code} == set(CHECKS)
    assert len(CHECKS) == sum(len(group.checks) for group in GROUPS)


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.code)
def test_check_has_every_field(check: CheckDescription):
    assert all((check.meaning, check.threshold, check.why, check.advice, check.source))
    assert "`" not in check.meaning, "a docstring's markup would be shown to people"


def test_check_has_try_it():
    assert [check.code for check in CHECKS.values() if not check.try_command] == [STALLED]


def test_threshold_names_its_unit_and_existing_settings():
    keys = {setting.key for setting in SETTINGS}
    for check in CHECKS.values():
        named = set(re.findall(r"[(, ]([a-z]+\.[a-z-]+)(?=[,)])", check.threshold))
        assert named <= keys, check.code
        assert not re.match(r"\d+ (in|since|of)\b", check.threshold), f"{check.code}: {check.threshold}"


def test_documented_numbers_match_the_limits():
    strict = {c.code: c for group in checks_by_section(GpuLimits(correctable_errors=7)) for c in group.checks}
    assert " 7 in 1 h" in strict["gpu.ecc.correctable_rate"].threshold


ACTION = st.none() | st.sampled_from([RecoveryAction(number) for number in range(9)])
MAYBE = st.none() | st.booleans()
FACTS = st.builds(
    XidReadings,
    *(ACTION, st.booleans(), ACTION, MAYBE, MAYBE, MAYBE, MAYBE, MAYBE, st.booleans(), MAYBE, st.booleans()),
)
MAX_LINES = [
    "NVRM: Xid (PCI:0000:1b:00): 74, pid=1, name=a, NVLink: fatal error detected on link 3"
    "(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 149, NETIR_LINK_EVT Fatal   XC0 i0 Link 02 (0x004505c6 0x00000000 0x0 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 144, SAW_MVB Nonfatal XC1 i0 Link 07 (0x00000001 0x00000001 0x0 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)",
    "NVRM: Xid (PCI:0000:1b:00): 147, TREX Fatal XC0 i0 Link 02 (0x00000001 0x00000001 0x0 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 148, NVLPW Fatal XC0 i0 Link 02 (0x00000001 0x00000001 0x0 0x0)",
    "NVRM: Xid (PCI:0000:1b:00): 13, pid=7, name=b, Graphics SM Warp Exception on (GPC 1, TPC 2, SM 0)",
]
PARSED = [line for text in MAX_LINES if isinstance(line := xid_lines.parse_line(text), xid_lines.XidLine)]
FAULTS = st.builds(
    XidOccurrences,
    st.sampled_from([1, 2, 100]),
    st.sampled_from([1, 2, 5]),
    st.lists(st.sampled_from(PARSED), max_size=3).map(tuple),
    st.integers(0, 3),
    st.frozensets(st.sampled_from([45, 154, 162])),
)


@given(FACTS, FAULTS)
def test_no_xid_is_worse_than_on_the_page(facts, fault):
    for code, row in XIDS.items():
        mine = tuple(line for line in fault.lines if line.code == code)
        ruling = decide_xid(row, fault._replace(lines=mine), facts)
        assert ruling.severity <= CHECKS[f"gpu.xid.{code}"].severity, (code, ruling)


def test_every_xid_can_be_as_severe_as_on_the_page():
    query = XidReadings(
        action=RecoveryAction.GPU_RESET,
        has_action=True,
        remap_pending=True,
        links_down=True,
        replays_growing=True,
    )
    for code, row in XIDS.items():
        lines = tuple(line for line in PARSED if line.code == code)
        faults = [XidOccurrences(20, 5, lines, 2), XidOccurrences()]
        facts = [query, XidReadings(), XidReadings(announced=RecoveryAction.NODE_REBOOT)]
        worst = max(decide_xid(row, fault, fact).severity for fault in faults for fact in facts)
        assert worst is CHECKS[f"gpu.xid.{code}"].severity, code


def test_verdict_of_a_listed_code_begins_with_its_severity():
    for group in GROUPS:
        for check in group.checks if group.prefix else ():
            assert check.threshold.split()[0] == check.severity.name.lower()


def test_sxid_is_as_severe_as_its_row():
    for code, row in SXIDS.items():
        assert CHECKS[f"gpu.fabric.sxid.{code}"].severity is decide_sxid(row, None).severity


def test_kernel_log_lines_in_try_it_texts_are_parsed():
    kinds = {
        fault_log.INIT_FAILED: xid_lines.InitFailedLine,
        fault_log.LINK_SETUP_FAILED: xid_lines.LinkSetupFailedLine,
        fault_log.API_MISMATCH: xid_lines.VersionMismatchLine,
    }
    assert {code: type(xid_lines.parse_line(line)) for code, line in LOG_LINES.items()} == kinds
    for code in SXIDS:
        (text,) = re.findall(r'echo "(.*)" > /dev/kmsg', CHECKS[f"gpu.fabric.sxid.{code}"].try_command)
        line = xid_lines.parse_line(text)
        assert isinstance(line, xid_lines.SxidLine)
        stated = (True, 32) if SXIDS[code].states_severity else (None, None)
        assert (line.code, line.fatal, line.link) == (code, *stated)


def test_host_log_lines_in_try_it_texts_raise_their_checks():
    written = {
        check.code: text.replace("<address>", "0000:3b:00.0")
        for check in CHECKS.values()
        for text in re.findall(r"echo '<\d>(.*?)' > /dev/kmsg", check.try_command)
    }
    parsed = {code: line.code for code, text in written.items() if (line := host_line(text))}
    assert parsed == {
        "cpu.machine_check": KernelLogCode.MACHINE_CHECK,
        "cpu.machine_check.corrected": KernelLogCode.MACHINE_CHECK_CORRECTED,
        "cpu.lockup.hard": KernelLogCode.HARD_LOCKUP,
        "cpu.lockup.soft": KernelLogCode.SOFT_LOCKUP,
        "pci.fault": KernelLogCode.PCI_FAULT,
        "node.hung_task": KernelLogCode.HUNG_TASK,
        "node.rcu_stall": KernelLogCode.RCU_STALL,
        "node.oom": KernelLogCode.OOM_KILL,
        "node.nvme": KernelLogCode.NVME,
        "node.read_only": KernelLogCode.READ_ONLY,
        "node.pci": KernelLogCode.AER_FATAL,
        "node.pci.corrected": KernelLogCode.AER_CORRECTED,
        "node.machine_check": KernelLogCode.HARDWARE_ERROR,
        "node.io_error": KernelLogCode.IO_ERROR,
        "node.nvme.path": KernelLogCode.NVME_PATH,
        "node.raid": KernelLogCode.RAID,
        "node.beyond_end": KernelLogCode.BEYOND_END,
        "node.filesystem": KernelLogCode.FILESYSTEM,
        "node.nfs": KernelLogCode.NFS,
        "node.oops": KernelLogCode.OOPS,
        "node.table_full": KernelLogCode.TABLE_FULL,
        "node.netdev_held": KernelLogCode.NETDEV_HELD,
        "node.tx_timeout": KernelLogCode.TX_TIMEOUT,
        "node.nic": KernelLogCode.NIC_HARDWARE,
        "node.peermem": KernelLogCode.PEERMEM,
        "node.nccl": KernelLogCode.NCCL,
        "pci.nic.stopped": KernelLogCode.NIC_HARDWARE,
        "pci.nic.hot": KernelLogCode.NIC_HEAT,
        "pci.nic.tx_timeout": KernelLogCode.TX_TIMEOUT,
        "pci.nic.power": KernelLogCode.NIC_POWER,
        "pci.nic.module": KernelLogCode.NIC_MODULE,
        "pci.nic.register": KernelLogCode.NIC_REGISTER,
    }
    assert parsed.keys() == written.keys()


def test_try_it_commands_of_the_fake_nvml_run(tmp_path):
    commands = [
        found
        for check in CHECKS.values()
        if not check.try_command.startswith("echo ")
        for found in re.findall(r"(?:gpu \d|init|reload) [^;]*", check.try_command)
    ]
    fake = fake_nvml(tmp_path, "profile h100 gpus=8", "gpu 0 mig 1g.10gb")
    parsed = play(fake, f"answer = [send(command) for command in {commands!r}]")
    assert len(parsed) == len(commands) > len(XIDS)


# --- the page ---------------------------------------------------------------------------------------------


def test_checks_page_is_current():
    assert PAGE.read_text() == markdown(GROUPS), "drahealth checks -o markdown > docs/checks.md"


def test_checks_page_has_every_check():
    page = PAGE.read_text()
    headings = set(re.findall(r"^### `(.*)`$", page, re.MULTILINE))
    numbers = set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))
    for group in GROUPS:
        for check in group.checks:
            known = numbers if group.prefix else headings
            assert check.code.removeprefix(group.prefix) in known


def test_no_text_breaks_a_table_of_the_checks_page():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3, 4, 8}


@pytest.mark.parametrize("name", ["gpu.md", "host.md", "declared-devices.md"])
def test_operators_page_names_only_existing_codes_keys_and_links(name):
    page = (PAGE.parent / name).read_text()
    known = {*CHECKS, *(setting.key for setting in SETTINGS)}
    heads = "|".join({code.partition(".")[0] for code in known})
    assert set(re.findall(rf"`((?:{heads})\.(?!example)[a-z_.-]+)`", page)) <= known
    assert all((PAGE.parent / link).exists() for link in re.findall(r"\]\(([a-z.-]+)\)", page))


@pytest.mark.parametrize(
    "name", ["cluster.md", "explain.md", "fleet.md", "history.md", "replay.md", "taints.md"]
)
def test_sample_output_names_only_existing_checks(name):
    page = (PAGE.parent / name).read_text()
    known = {*CHECKS, *(setting.key for setting in SETTINGS)}
    found = set(re.findall(r"\b((?:gpu|mem|nic|pci|cgroup|node|cpu|hugepages)\.[a-z_.-]*[a-z])\b", page))
    names = {code for code in found if not code.startswith(("gpu.example.com", "gpu.md"))}
    assert names <= known | {"gpu.xid"}


def test_only_commands_are_formatted_as_commands():
    assert COMMAND.fullmatch("gpu 0 set remap.failure=1")
    assert COMMAND.fullmatch(CHECKS["node.pci.corrected"].try_command)
    assert not COMMAND.fullmatch("no fake: it takes a driver that holds a process in state D")


# --- the verb ---------------------------------------------------------------------------------------------


def output_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["checks", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_one_check_is_shown_in_full(capsys):
    assert output_of(capsys, "gpu.remap.failure") == (
        "gpu.remap.failure  unhealthy, blame: hardware\n"
        "  Bad memory could not be remapped or repaired, for example because its bank has no spare rows.\n"
        "\n"
        "  when            a flag is set\n"
        "  why it matters  bad memory stays in use, and will lose data again\n"
        f"  what to do      {CHECKS['gpu.remap.failure'].advice}\n"
        "  repair          replace-hardware\n"
        "  source          gpu\n"
        "  try it          gpu 0 set remap.failure=1\n"
    )


@pytest.mark.parametrize("query", ["gpu.xid.79", "79", "xid.79"])
def test_xid_is_found_by_its_number(capsys, query):
    assert output_of(capsys, query).startswith("gpu.xid.79  unhealthy, blame: hardware\n")


def test_code_prefix_shows_all_matches(capsys):
    codes = re.findall(r"^  (\S+)", output_of(capsys, "gpu.remap"), re.MULTILINE)
    assert codes == ["gpu.remap.failure", "gpu.remap.pending"]
    assert len(output_of(capsys, "gpu.xid").splitlines()) == 1 + len(XIDS)


def test_family_of_the_configuration_shows_its_checks(capsys):
    assert output_of(capsys, "gpu.remap.*") == output_of(capsys, "gpu.remap")
    assert output_of(capsys, "custom.*") == output_of(capsys, "custom")


@pytest.mark.parametrize(
    ("code", "listed"),
    [
        ("custom.fabric", "custom.<name>"),
        ("custom.fabric.unknown", "custom.<name>.unknown"),
        ("check.link.expired", "check.<name>.expired"),
        ("check.link.unreadable", "check.<name>.unreadable"),
    ],
)
def test_code_with_the_name_of_a_check_is_explained(capsys, code, listed):
    assert output_of(capsys, code).startswith(f"{listed}  ")


@pytest.mark.parametrize("word", ["nvlink", "NVLink", "pcie", "aer", "recovery_action"])
def test_word_shows_all_codes_with_it(capsys, word):
    codes = [check["code"] for check in json.loads(output_of(capsys, word, "-o", "json"))["checks"]]
    assert codes == [code for code in CHECKS if word.lower() in code.split(".")]


@pytest.mark.parametrize("code", ["gpu.xid.999", "gpu.fabric.sxid.99999"])
def test_unlisted_code_of_a_message_is_explained(capsys, code):
    shown = output_of(capsys, code)
    assert shown.startswith(f"{code}  degraded")
    assert "unknown to this version" in shown


def test_full_list_counts_xids_and_names_the_rest(capsys):
    shown = output_of(capsys)
    assert "gpu.xid.<N>  173 codes, see drahealth checks gpu.xid\n" in shown
    for rule in (*ALL_HOST_RULES, *gpu_rules(LIMITS)):
        assert f"  {rule.code} " in shown


def test_unreadable_code_is_explained(capsys):
    shown = output_of(capsys, "mem.hugepages.pool_shrunk.unreadable")
    assert shown.startswith("mem.hugepages.pool_shrunk.unreadable  unknown, blame: agent\n")
    assert "read the file by hand" in shown


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("gpu.xdi.79", "no check has the code 'gpu.xdi.79'; did you mean 'gpu.xid.79'?"),
        ("999", "no check has the code '999'\n"),
        (
            "gpu.xid.79.unreadable",
            "no check has the code 'gpu.xid.79.unreadable'; did you mean 'gpu.xid.79'?",
        ),
    ],
)
def test_unknown_check_is_an_error_with_a_suggestion(capsys, query, error):
    assert main(["checks", query]) == 64
    assert capsys.readouterr().err.startswith(f"drahealth: {error}")


def test_prepare_code_refers_to_its_own_list(capsys):
    assert main(["checks", "state.write"]) == 64
    assert "errors of claims with 'drahealth prepares --codes'" in capsys.readouterr().err


def test_json_has_every_field(capsys):
    found = json.loads(output_of(capsys, "-o", "json"))
    assert found["apiVersion"] == "drahealth/v1"
    assert len(found["checks"]) == len(CHECKS)
    (item,) = json.loads(output_of(capsys, "gpu.lost", "-o", "json"))["checks"]
    assert item["severity"] == "unhealthy"
    assert {key: type(value) for key, value in item.items()} == dict.fromkeys(
        (
            *("code", "group", "severity", "blame", "source", "what", "threshold", "why", "advice"),
            *("repair", "tryIt"),
        ),
        str,
    )


def test_page_explains_every_repair_in_order():
    rows = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [repair.value for repair in Repair]


def test_only_severities_are_coloured(capsys):
    plain, painted = (output_of(capsys, "gpu.ecc", "--color", choice) for choice in ("never", "always"))
    assert "\x1b[31munhealthy\x1b[0m" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain
    assert Severity.UNHEALTHY.name.lower() in plain
