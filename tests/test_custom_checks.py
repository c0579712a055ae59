"""``[[check]]``: the tables of the configuration, and verdicts from the results of operators' commands."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paper import PaperNode, codes, device_of
from paper_gpus import GpuNode

from agent.config.config import load_with_origins
from agent.config.tables import CHECKS_MAX, checks_to_tables, parse_checks
from agent.engine.step import initial_state, with_settings
from agent.errors import ConfigError
from agent.health.host.verdicts import NOT_RUN_YET
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredOtherDevice,
    DeclaredPart,
    DriverDevice,
    EqualRuns,
)
from agent.model.health import Finding, Health, NotApplicable, Repair, Severity
from agent.model.reading import SourceState
from agent.model.report import Report
from agent.model.settings import CustomCheck, CustomCheckResult, EngineSettings, RuleOverride
from agent.model.snapshot import Snapshot
from agent.store.gpu_fault_file import decode_gpu_faults, encode_gpu_faults

CPU = "cpu-node0"
FABRIC = CustomCheck("fabric", ("/opt/check",), "cpu-*", severity=Severity.UNHEALTHY, advice="restart it")
NODE = CustomCheck("ntp", ("/opt/ntp",))


class Node(PaperNode):
    """Node with one CPU device and results of custom checks; optionally with a declared device."""

    def __init__(self, *checks: CustomCheck, part: DeclaredPart | None = None, **settings: Any) -> None:
        super().__init__(EngineSettings("node-a", checks=checks, **settings))
        self.results: dict[tuple[str, str], CustomCheckResult] = {}
        self.equal_runs: dict[tuple[str, str], EqualRuns] = {}
        self.part = part

    def run(self, check: CustomCheck, text: str | None = None, reason: str = "", device: str = "") -> Report:
        """End a run of a check, with a fault unless `text` is None, and return the next report."""
        self.end_run(check, text, reason, device)
        return self.next()

    def end_run(
        self, check: CustomCheck, text: str | None = None, reason: str = "", device: str = ""
    ) -> None:
        """End a run of a check as run() does, but without an evaluation."""
        before = self.results.get((check.name, device))
        finding = text and Finding(check.code, check.severity, text, check.advice, repair=check.repair)
        passes = before.passes + 1 if before else 1
        runs = self.equal_runs.get((check.name, device), EqualRuns()).next(finding or None, reason)
        self.equal_runs[check.name, device] = runs
        self.wait(1)
        self.results[check.name, device] = CustomCheckResult(
            check.name, device, finding or None, reason, passes, self.now_ns, runs.equal_passes
        )

    def snapshot(self) -> Snapshot:
        snapshot = replace(super().snapshot(), custom_checks=tuple(self.results.values()))
        if self.part is None:
            return snapshot
        device = DriverDevice("a.example.com", "node-a", "dev-0", self.part, 0)
        return replace(snapshot, declared=(DeclaredFile("a.example.com", (device,)),))

    def restart(self) -> None:
        """Restart the agent within one boot."""
        saved = decode_gpu_faults(encode_gpu_faults(self.state.checkpoint))
        if not saved.start.boot_id:
            saved = replace(saved, start=replace(saved.start, boot_id="boot-1"))
        self.state = initial_state(self.state.settings, None, saved, "boot-1")
        self.results.clear()
        self.equal_runs.clear()


class CheckedGpuNode(GpuNode):
    """Node with GPUs, and results of one custom check."""

    results: tuple[CustomCheckResult, ...] = ()

    def __init__(self, check: CustomCheck) -> None:
        super().__init__()
        self.state = with_settings(self.state, replace(self.settings, checks=(check,)), self.now)

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), custom_checks=self.results)


# --- verdicts -----------------------------------------------------------------------------------------------


def test_fault_of_a_check_is_a_cause_of_matching_devices() -> None:
    node = Node(FABRIC._replace(repair=Repair.REBOOT_NODE))
    assert device_of(node.next(), CPU).health is Health.HEALTHY
    device = device_of(node.run(node.state.settings.checks[0], "link 3 is down"), CPU)
    assert (device.health, device.message) == (
        Health.UNHEALTHY,
        "custom.fabric: link 3 is down. Advice: restart it",
    )
    assert device.repair is Repair.REBOOT_NODE


def test_check_of_other_devices_changes_nothing() -> None:
    other = FABRIC._replace(devices="gpu-*")
    assert device_of(Node(other).run(other, "down"), CPU).causes == ()


def test_check_without_devices_is_a_note_of_the_node() -> None:
    report = Node(NODE).run(NODE, "no server answers")
    assert [(note.subject, note.cause.code, note.cause.evidence) for note in report.notes] == [
        ("node", "custom.ntp", "no server answers")
    ]
    assert device_of(report, CPU).causes == ()


def test_check_before_its_first_run_is_not_evaluated() -> None:
    report = Node(FABRIC, NODE).next()
    expected = [NotApplicable(CPU, FABRIC.code, NOT_RUN_YET), NotApplicable("node", NODE.code, NOT_RUN_YET)]
    assert [entry for entry in report.not_evaluated if entry.code.startswith("custom.")] == expected
    assert device_of(report, CPU).health is Health.HEALTHY


def test_check_without_result_makes_its_devices_unknown() -> None:
    node = Node(FABRIC)
    report = node.run(FABRIC, reason="no answer within 10 s")
    assert device_of(report, CPU).health is Health.UNKNOWN
    assert codes(device_of(report, CPU)) == ["custom.fabric.unknown"]
    source = next(source for source in report.sources if source.name == "check.custom.fabric")
    assert (source.state, source.detail) == (SourceState.FAILING, "no answer within 10 s")
    assert device_of(node.run(FABRIC), CPU).health is Health.UNKNOWN, "one good run never suffices"
    assert device_of(node.run(FABRIC), CPU).health is Health.HEALTHY


def test_fault_is_raised_and_cleared_after_its_numbers_of_runs() -> None:
    check = FABRIC._replace(raise_after=2, clear_after=3)
    node = Node(check)
    assert codes(device_of(node.run(check, "down"), CPU)) == []
    assert codes(device_of(node.next(5), CPU)) == [], "evaluations are no runs"
    assert codes(device_of(node.run(check, "down"), CPU)) == [check.code]
    assert codes(device_of(node.run(check), CPU)) == [check.code]
    assert codes(device_of(node.run(check), CPU)) == [check.code]
    assert codes(device_of(node.run(check), CPU)) == []


def test_run_without_result_keeps_a_raised_fault() -> None:
    node = Node(FABRIC)
    node.run(FABRIC, "down")
    report = node.run(FABRIC, reason="exit code 3")
    assert codes(device_of(report, CPU)) == ["custom.fabric", "custom.fabric.unknown"]


def test_run_without_a_result_between_evaluations_is_no_good_run() -> None:
    check = FABRIC._replace(clear_after=3)
    node = Node(check)
    node.run(check, "down")
    node.run(check)
    node.end_run(check, reason="exit code 3")
    assert codes(device_of(node.run(check), CPU)) == [check.code], "two good runs"
    assert codes(device_of(node.run(check), CPU)) == []


def test_check_per_device_counts_for_its_device_only() -> None:
    check = FABRIC._replace(command=("/opt/check", "{device}"))
    node = Node(check)
    assert codes(device_of(node.run(check, "down", device="cpu-node1"), CPU)) == []
    assert codes(device_of(node.run(check, "down", device=CPU), CPU)) == [check.code]


def test_rule_entry_changes_the_severity_of_a_custom_check() -> None:
    node = Node(FABRIC, rules=(RuleOverride("custom.fabric", severity=Severity.INFO),))
    assert device_of(node.run(FABRIC, "down"), CPU).severity is Severity.INFO


def test_removed_check_ends_its_faults() -> None:
    node = Node(FABRIC, NODE)
    node.run(NODE, "no server")
    node.run(FABRIC, "down")
    node.state = with_settings(node.state, replace(node.state.settings, checks=()), node.now)
    report = node.next()
    assert (device_of(report, CPU).health, report.notes) == (Health.HEALTHY, ())


def test_changed_settings_keep_the_faults_of_a_check() -> None:
    node = Node(FABRIC)
    node.run(FABRIC, "down")
    node.state = with_settings(node.state, replace(node.state.settings, throttle_events=5), node.now)
    assert codes(device_of(node.evaluate(), CPU)) == [FABRIC.code]


def test_fault_of_a_check_survives_a_restart() -> None:
    node = Node(FABRIC, NODE)
    node.restart()
    node.run(NODE, "no server")
    causes = device_of(node.run(FABRIC, "down"), CPU).causes
    node.restart()
    report = node.next(3)
    assert device_of(report, CPU).causes == causes
    assert [note.cause.code for note in report.notes] == [NODE.code]
    node.run(FABRIC)
    assert device_of(node.run(FABRIC), CPU).causes == ()


def test_fault_of_a_device_that_is_read_late_survives_a_restart() -> None:
    check = FABRIC._replace(devices="*/dev-0")
    part = DeclaredCpuDevice(0b10, 0, exclusive=False, isolated=False)
    node = Node(check, part=part)
    node.restart()
    node.next(3)
    node.run(check, "down")
    node.restart()
    node.part = None
    node.next(3)
    node.part = part
    assert codes(device_of(node.next(3), "dev-0")) == [check.code]


def test_stored_fault_of_an_unchecked_device_counts_before_the_first_run() -> None:
    check = FABRIC._replace(devices="*/dev-0")
    node = Node(check, part=DeclaredOtherDevice())
    node.restart()
    node.run(check, "down")
    node.restart()
    assert codes(device_of(node.next(3), "dev-0")) == [check.code, "declared.unseen"]


def test_declared_device_is_checked_by_its_name_in_reports() -> None:
    check = FABRIC._replace(devices="a.example.com/*")
    part = DeclaredCpuDevice(0b10, 0, exclusive=False, isolated=False)
    node = Node(check, part=part)
    node.next(3)
    before = device_of(node.next(), "dev-0")
    after = device_of(node.run(check, "down"), "dev-0")
    assert (before.health, after.health) == (Health.HEALTHY, Health.UNHEALTHY)
    assert after.timeout_s == before.timeout_s, "a slow check lengthens no lease"


def test_result_for_replaced_hardware_does_not_count() -> None:
    check = FABRIC._replace(devices="*/dev-0", command=("/opt/check", "{device}"))
    node = Node(check, part=DeclaredCpuDevice(0b10, 0, exclusive=False, isolated=False))
    name = "a.example.com/node-a/dev-0"
    node.next(3)
    assert codes(device_of(node.run(check, "down", device=name), "dev-0")) == [check.code]
    node.part = DeclaredCpuDevice(0b01, 0, exclusive=False, isolated=False)
    for _ in range(3):  # until the next run has ended
        report = node.next()
        assert check.code not in codes(device_of(report, "dev-0"))
        assert NotApplicable(name, check.code, NOT_RUN_YET) in report.not_evaluated
    assert codes(device_of(node.run(check, "down", device=name), "dev-0")) == [check.code]


def test_fault_of_a_check_ends_with_its_replaced_gpu() -> None:
    check = CustomCheck("fabric", ("/opt/check", "{device}"), "gpu-*", severity=Severity.UNHEALTHY)
    node = CheckedGpuNode(check)
    node.results = (
        CustomCheckResult("fabric", "gpu-0", Finding(check.code, check.severity, "down", ""), "", 1, 1),
    )
    assert check.code in codes(device_of(node.next(), "gpu-0"))
    node.results = ()
    assert check.code in codes(device_of(node.next(), "gpu-0"))
    node.change(0, uuid="GPU-new", serial="new")
    assert check.code not in codes(device_of(node.next(), "gpu-0"))


def test_custom_check_is_enough_for_a_device_without_other_checks() -> None:
    check = FABRIC._replace(devices="*/dev-0")
    node = Node(check, part=DeclaredOtherDevice())
    assert device_of(node.next(5), "dev-0").health is Health.UNKNOWN
    node.run(check)
    assert device_of(node.run(check), "dev-0").health is Health.HEALTHY
    assert codes(device_of(node.run(check, "down"), "dev-0")) == [check.code]


# --- configuration ------------------------------------------------------------------------------------------


FULL = """
[[check]]
name = "fabric"
command = ["/opt/check", "{device}"]
devices = "gpu-*"
period = "5m"
timeout = "30s"
severity = "unhealthy"
advice = "restart it"
repair = "reboot-node"
raise-after = 2
clear-after = 3
user = "checker"
memory = "128MiB"
processes = 8
"""


def parse_toml(text: str) -> tuple[CustomCheck, ...]:
    return parse_checks(tomllib.loads(text)["check"])


def test_every_key_of_a_check_is_read() -> None:
    assert parse_toml(FULL) == (
        CustomCheck(
            "fabric", ("/opt/check", "{device}"), "gpu-*", 300, 30, Severity.UNHEALTHY, "restart it",
            Repair.REBOOT_NODE, 2, 3, "checker", 128 << 20, 8,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("text", [FULL, '[[check]]\nname = "a"\ncommand = ["/bin/true"]\nuser = 61234\n'])
def test_shown_checks_are_read_again(text: str) -> None:
    checks = parse_toml(text)
    assert parse_checks(json.loads(json.dumps(checks_to_tables(checks)))) == checks


def test_default_timeout_is_at_most_the_period() -> None:
    (check,) = parse_toml('[[check]]\nname = "a"\ncommand = ["/bin/true"]\nperiod = "3s"')
    assert check.timeout_s == 3


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "Bad"}, "check 'Bad': command is missing"),
        ({"command": ["/bin/true"]}, "check 1: name is missing"),
        ({"name": "Bad", "command": ["/x"]}, "name: 'Bad' is not a DNS label of at most 40 bytes"),
        ({"command": "true"}, "command: 'true' is not a list of strings"),
        ({"command": []}, "command: the command has 0 arguments; it must have 1 to 64"),
        ({"command": ["true"]}, "'true' is not an absolute path"),
        ({"command": ["/x", "a\0"]}, "an argument of the command has a zero byte"),
        ({"command": ["/x", "a" * 5000]}, "the command has 5004 bytes, limit 4096; put it into a script"),
        ({"command": ["/x", "{device}"]}, "{device} needs a pattern of device names"),
        ({"devices": ""}, "devices: pattern of device names is 0 characters long"),
        ({"period": "0s"}, "period: 0s is below the limit of 1s"),
        ({"timeout": "2m"}, "timeout: 2m is over the period (1m); lower it"),
        ({"severity": "bad"}, "severity: 'bad' is not one of info, degraded, unhealthy"),
        ({"repair": "bad"}, "repair: 'bad' is not one of none,"),
        ({"advice": "x" * 400}, "advice: text is 400 bytes, limit 300"),
        ({"raise-after": 0}, "raise-after: 0 is below the limit of 1"),
        ({"clear-after": 1001}, "clear-after: 1001 is over the limit of 1000"),
        ({"user": "a b"}, "user: 'a b' is not the name of a user"),
        ({"memory": "1KiB"}, "memory: 1KiB is below the limit of 4MiB"),
        ({"processes": 0}, "processes: 0 is below the limit of 1"),
        ({"perod": "1s"}, "unknown key 'perod'; did you mean 'period'?"),
    ],
    ids=str,
)
def test_wrong_check_is_refused_with_its_name_and_limit(entry: dict[str, Any], words: str) -> None:
    is_minimal = entry.keys() <= {"name"} or (
        entry.keys() == {"command"} and entry["command"] == ["/bin/true"]
    )
    whole = entry if is_minimal else {"name": "a", "command": ["/bin/true"], **entry}
    with pytest.raises((ValueError, TypeError), match=r"^check ") as raised:
        parse_checks([whole])
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x", "'x' is not a list of checks"),
        (["x"], "check 1: 'x' is not a table of name, command"),
        ([{"name": "a", "command": ["/x"]}] * 2, "check 'a' is defined 2 times"),
        (
            [{"name": f"a{n}", "command": ["/x"]} for n in range(CHECKS_MAX + 1)],
            "65 custom checks, limit 64; merge some",
        ),
    ],
    ids=["text", "entry", "twice", "many"],
)
def test_wrong_list_of_checks_is_refused(value: object, words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        parse_checks(value)
    assert words in str(raised.value)


def test_checks_of_drop_ins_are_joined(tmp_path: Path) -> None:
    (tmp_path / "config.d").mkdir()
    default = tmp_path / "config.toml"
    default.write_text('[[check]]\nname = "a"\ncommand = ["/x"]')
    drop_in = tmp_path / "config.d" / "10.toml"
    drop_in.write_text('[[check]]\nname = "b"\ncommand = ["/x"]')
    loaded = load_with_origins({}, {}, default_file=default, needs_runtime_dir=False)
    assert [check.name for check in loaded.config.checks] == ["a", "b"]
    drop_in.write_text('[[check]]\nname = "a"\ncommand = ["/x"]')
    with pytest.raises(ConfigError, match=r"10.toml: check: check 'a' is defined 2 times"):
        load_with_origins({}, {}, default_file=default, needs_runtime_dir=False)
