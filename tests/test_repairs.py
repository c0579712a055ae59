"""Repairs: their order, a value in every catalog, and the repair that findings and decisions report."""

from typing import Final

import pytest
from gpu_samples import gpu_sample, gpu_set, gpu_view, hanging_view, pci_sample
from hypothesis import given
from hypothesis import strategies as st
from paper_gpus import OLD_DRIVER, GpuNode

from agent.cli.checks.catalog import CheckDescription, checks_by_section
from agent.health.gpu.rule_state import gpu_rules
from agent.health.gpu.xid.decisions import (
    MIN_BURSTS,
    FaultDecision,
    XidOccurrences,
    XidReadings,
    decide_sxid,
    decide_xid,
)
from agent.health.gpu.xid.log_lines import SxidLine, parse_line
from agent.health.gpu.xid.sxid_table import sxid_row
from agent.health.gpu.xid.xid_table import (
    REPAIR_BY_ACTION,
    REPAIR_BY_ADVICE,
    XIDS,
    CatalogAnswer,
    RecoveryAction,
    XidAdvice,
    XidRow,
    xid_row,
)
from agent.model.gpu import NvmlReturnCode
from agent.model.health import (
    Blame,
    Cause,
    DeviceHealth,
    Finding,
    Health,
    Repair,
    Severity,
    XidOverride,
    repair_for_severity,
    worst_repair,
)
from agent.model.prepare import ErrorClass
from agent.model.settings import GpuLimits
from agent.model.time import Instant
from agent.prepare.failure_kinds import FAILURE_KINDS, failure_kind

CHECKS: Final = {check.code: check for group in checks_by_section(GpuLimits()) for check in group.checks}
RULES: Final = {rule.code: rule for rule in gpu_rules(GpuLimits())}
ZERO: Final = Instant(0, 0.0)
WORDS: Final = {
    Repair.RESET_DEVICE: ("reset",),
    Repair.REBOOT_NODE: ("reboot", "reset all its gpus and nvswitches"),
    Repair.REPLACE_HARDWARE: ("replace",),
}
"""Words of which the advice has one, by repair; the other repairs have no words in common."""


# --- order of repairs ---------------------------------------------------------------------------------------


def test_repairs_are_ordered_from_none_to_replacement() -> None:
    assert [repair.value for repair in Repair] == [
        "none",
        "restart-workload",
        "reset-device",
        "reload-driver",
        "reboot-node",
        "inspect-hardware",
        "contact-vendor",
        "replace-hardware",
    ]


@given(st.lists(st.sampled_from(Repair)))
def test_worst_repair_is_the_last_in_the_order(repairs: list[Repair]) -> None:
    found = worst_repair(repairs)
    order = list(Repair)
    assert found in repairs or (not repairs and found is Repair.NONE)
    assert all(order.index(repair) <= order.index(found) for repair in repairs)


def device(severity: Severity, *repairs: Repair) -> DeviceHealth:
    causes = tuple(Cause("a.b", severity, Blame.HARDWARE, "", "", ZERO, repair=repair) for repair in repairs)
    return DeviceHealth("p", "d", "gpu", Health.UNHEALTHY, severity, "", ZERO, ZERO, 30, causes)


def test_device_has_the_worst_repair_of_its_causes() -> None:
    found = device(Severity.UNHEALTHY, Repair.RESET_DEVICE, Repair.REBOOT_NODE, Repair.NONE)
    assert found.repair is Repair.REBOOT_NODE
    assert device(Severity.OK).repair is Repair.NONE


def test_repair_of_a_faulty_device_without_causes_is_not_known() -> None:
    assert device(Severity.UNHEALTHY).repair is None


@pytest.mark.parametrize("repair", Repair)
def test_info_needs_at_most_a_restart_of_the_workload(repair: Repair) -> None:
    kept = repair is Repair.RESTART_WORKLOAD
    assert repair_for_severity(repair, Severity.INFO) is (repair if kept else Repair.NONE)
    assert repair_for_severity(repair, Severity.DEGRADED) is repair


# --- the catalogs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.code)
def test_every_check_has_a_repair_that_its_advice_names(check: CheckDescription) -> None:
    assert isinstance(check.repair, Repair)
    assert check.repair is repair_for_severity(check.repair, check.severity)
    words = WORDS.get(check.repair, ())
    follows_action = check.advice in {XidAdvice.FOLLOW_ACTION, RULES["gpu.recovery_action"].advice}
    assert not words or follows_action or any(word in check.advice.lower() for word in words), check.advice


def test_every_advice_and_every_action_has_a_repair() -> None:
    assert set(REPAIR_BY_ADVICE) == set(XidAdvice)
    assert set(REPAIR_BY_ACTION) == set(RecoveryAction)
    assert RecoveryAction(9).repair is Repair.CONTACT_VENDOR


def test_faults_of_hardware_that_make_a_device_unhealthy_have_a_repair() -> None:
    without = [
        check.code
        for check in CHECKS.values()
        if check.severity is Severity.UNHEALTHY
        and check.blame is Blame.HARDWARE
        and check.repair is Repair.NONE
    ]
    assert without == []


@pytest.mark.parametrize("row", XIDS.values(), ids=lambda row: f"xid-{row.code}")
def test_repair_of_an_xid_is_one_that_nvidia_calls_enough(row: XidRow) -> None:
    answers = {
        Repair.RESTART_WORKLOAD: row.repairs.app_restart,
        Repair.RESET_DEVICE: row.repairs.gpu_reset,
        Repair.REBOOT_NODE: row.repairs.reboot,
    }
    if row.repair in answers:
        assert answers[row.repair] in {CatalogAnswer.YES, CatalogAnswer.NOT_NEEDED}


def test_prepare_error_has_the_repair_of_the_check_with_its_code() -> None:
    wrong = [
        (kind.code, kind.repair, CHECKS[kind.code].repair)
        for kind in FAILURE_KINDS
        if kind.code in CHECKS and kind.health and kind.repair is not CHECKS[kind.code].repair
    ]
    assert wrong == []


def test_failure_kind_that_blames_a_device_has_the_repair_in_its_advice() -> None:
    for kind in FAILURE_KINDS:
        words = WORDS.get(kind.repair, ())
        assert not words or any(word in kind.advice.lower() for word in words), kind.code


def test_prepare_error_of_an_xid_has_the_repair_of_the_xid_table() -> None:
    for code in (48, 79, 54, 999):
        kind = failure_kind(f"gpu.xid.{code}", ErrorClass.FAILED_DEVICE)
        assert kind.repair is xid_row(code).repair
    assert xid_row(79).repair is Repair.REBOOT_NODE


# --- decisions on XIDs and SXids ----------------------------------------------------------------------------


def decide(
    code: int,
    action: RecoveryAction | None = None,
    *,
    bursts: int = 1,
    override: XidOverride | None = None,
    **readings: bool,
) -> FaultDecision:
    facts = XidReadings(action=action, has_action=action is not None)._replace(**readings)
    return decide_xid(xid_row(code), XidOccurrences(bursts=bursts), facts, override)


@pytest.mark.parametrize("action", [value for value in RecoveryAction if value])
@pytest.mark.parametrize("code", [48, 79, 119, 159, 57])
def test_requested_action_decides_the_repair_of_an_xid(code: int, action: RecoveryAction) -> None:
    found = decide(code, action)
    assert found.repair is action.repair
    assert found.repair is xid_row(code).repair or found.advice == action.advice


def test_requested_action_does_not_replace_a_hardware_repair() -> None:
    assert decide(54, RecoveryAction.GPU_RESET).repair is Repair.INSPECT_HARDWARE
    assert decide(64, RecoveryAction.GPU_RESET, remap_failed=True).repair is Repair.REPLACE_HARDWARE


@pytest.mark.parametrize(
    ("code", "bursts", "repair"),
    [
        (79, 1, Repair.REBOOT_NODE),
        (79, MIN_BURSTS, Repair.INSPECT_HARDWARE),
        (80, 1, Repair.RESTART_WORKLOAD),
        (80, MIN_BURSTS, Repair.INSPECT_HARDWARE),
        (94, 1, Repair.NONE),
        (94, MIN_BURSTS, Repair.RESET_DEVICE),
        (45, 1, Repair.NONE),
        (999, 1, Repair.NONE),
    ],
)
def test_repair_of_an_xid_follows_its_occurrences(code: int, bursts: int, repair: Repair) -> None:
    assert decide(code, bursts=bursts).repair is repair


def test_xid_that_is_set_to_info_needs_no_repair() -> None:
    assert decide(79, override=XidOverride.INFO).repair is Repair.NONE
    assert decide(79, override=XidOverride.UNHEALTHY).repair is Repair.REBOOT_NODE


@pytest.mark.parametrize(
    ("code", "severity", "repair"),
    [
        (10003, "Fatal", Repair.REBOOT_NODE),
        (12028, "Fatal", Repair.REBOOT_NODE),
        (14017, "Fatal, Link 32", Repair.RESET_DEVICE),
        (14017, "Non-fatal, Link 32", Repair.NONE),
    ],
)
def test_repair_of_an_sxid_follows_its_scope(code: int, severity: str, repair: Repair) -> None:
    line = parse_line(f"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): {code}, {severity}, text")
    assert isinstance(line, SxidLine)
    assert decide_sxid(sxid_row(code), line).repair is repair


# --- findings of rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [*(value for value in RecoveryAction if value), RecoveryAction(9)])
def test_gpu_with_a_requested_action_has_its_repair(action: RecoveryAction) -> None:
    node = GpuNode()
    node.set_readings(0, recovery_action=action)
    node.rest(3)
    assert [cause.repair for cause in node.verdict().causes] == [action.repair]
    assert node.verdict().repair is action.repair


def test_gpu_on_which_an_xid_and_a_mild_action_meet_has_the_worse_repair() -> None:
    node = GpuNode()
    node.set_readings(0, recovery_action=RecoveryAction.GPU_RESET)
    node.xid(0, 54)
    node.rest(3)
    assert {cause.code: cause.repair for cause in node.verdict().causes} == {
        "gpu.recovery_action": Repair.RESET_DEVICE,
        "gpu.xid.54": Repair.INSPECT_HARDWARE,
    }
    assert node.verdict().repair is Repair.INSPECT_HARDWARE


@pytest.mark.parametrize("code", [48, 54, 79, 164])
def test_repair_survives_a_restart(code: int) -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, code)
    node.rest(20)
    before = node.verdict().repair
    assert before is xid_row(code).repair
    node.restart(evaluate=False)
    first = node.evaluate()
    assert [found.repair for found in first.devices if found.device == "gpu-0"] == [before]


def finding(code: str, view: object) -> Finding:
    found = RULES[code].evaluate(view)
    assert isinstance(found, Finding)
    return found


def test_hanging_call_is_repaired_by_a_reboot_only_after_the_second_limit() -> None:
    assert finding("gpu.not_answering", hanging_view(5)).repair is Repair.NONE
    dead = finding("gpu.not_answering", hanging_view(60))
    assert (dead.repair or RULES["gpu.not_answering"].repair) is Repair.REBOOT_NODE


def test_gpu_of_a_virtual_machine_is_not_taken_back() -> None:
    view = gpu_view(
        sample=gpu_sample(status=NvmlReturnCode.GPU_NOT_FOUND),
        gpu_set=gpu_set(),
        pci_function=pci_sample(driver="vfio-pci"),
    )
    assert finding("gpu.unbound", view).repair is Repair.NONE
    assert RULES["gpu.unbound"].repair is Repair.RELOAD_DRIVER
