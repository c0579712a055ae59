"""Rules for PCIe, NVLink and the fabric: links that are down, slow or noisy, and harmless states."""

from typing import Final

import pytest
from gpu_samples import ABSENT, ALL_UP, EIO, LIMITS, T4, gpu_sample, gpu_view

from agent.health.gpu.nvlink import ERROR_LIMITS
from agent.health.gpu.rule_input import GpuRuleInput, GrowthLimit, SeenGpuFeatures
from agent.health.gpu.rule_state import gpu_rules
from agent.health.rules import (
    OK,
    CounterGrowth,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
)
from agent.model.gpu import GpuField, GpuOsSample
from agent.model.health import Finding, Severity
from agent.model.reading import Missing, Reading

ROWS: Final = {rule.code: rule for rule in gpu_rules(LIMITS)}
WIDTH: Final = "gpu.pcie.width"
GEN: Final = "gpu.pcie.gen"
REPLAY: Final = "gpu.pcie.replay"
DOWN: Final = "gpu.nvlink.down"
ERRORS: Final = "gpu.nvlink.errors"
GIVEN_UP: Final = "gpu.nvlink.recovery_failed"
STATE: Final = "gpu.fabric.state"
STATUS: Final = "gpu.fabric.status"
HEALTH: Final = "gpu.fabric.health"
MANAGER: Final = "gpu.fabric.manager"

NONE: Final = CounterGrowth(ABSENT, 0.0)
BROKEN: Final = CounterGrowth(EIO, 0.0)
Cases = list[tuple[str, GpuRuleInput, RuleResult]]
STRANGER: Final = SeenGpuFeatures()
"""Nothing has been seen up or running."""
NO_LINK: Final = RuleNotApplicable("the driver reports no PCIe link: a virtual machine, or an integrated GPU")
NO_AER: Final = RuleNotApplicable("no PCIe error counters: the kernel or the platform has no AER")
NO_FABRIC: Final = RuleNotApplicable("the GPU has no fabric, or the driver does not report it")
NO_HEALTH: Final = RuleNotApplicable(
    "the driver does not report the fabric's health (before 550), or the GPU has no fabric"
)


def bad(code: str, text: str, severity: Severity = Severity.DEGRADED) -> Finding:
    return Finding(code, severity, text)


def unhealthy_finding(code: str, text: str) -> Finding:
    return Finding(code, Severity.UNHEALTHY, text)


def width(now: Reading, most: Reading = 16) -> GpuRuleInput:
    return gpu_view({GpuField.PCIE_WIDTH: now, GpuField.PCIE_WIDTH_MAX: most})


def gen(now: Reading, most: Reading = 5, busy: Reading = 90, pstate: Reading = 0) -> GpuRuleInput:
    return gpu_view({
        GpuField.PCIE_GEN: now,
        GpuField.PCIE_GEN_MAX: most,
        GpuField.UTILIZATION: busy,
        GpuField.PSTATE: pstate,
    })  # fmt: skip


def view_of(field: GpuField, growth: CounterGrowth | int) -> GpuRuleInput:
    return gpu_view(grown={field: growth})


def aer_cases(name: str, field: GpuField, events: int, window: str, what: str, severity: Severity) -> Cases:
    """Return the cases that the three AER rules share."""
    code = f"gpu.pcie.aer.{name}"
    text = f"{what}: at least {events} in {window}"
    if window != "1 min":
        text += f" (reported until {window} after the last, or a reset)"
    return [
        (code, view_of(field, events - 1), OK),
        (code, view_of(field, events), bad(code, text, severity)),
        (
            code,
            view_of(field, CounterGrowth(0, 1.0)),
            RuleInconclusive(f"needs {window} of history"),
        ),
        (code, view_of(field, BROKEN), RuleInputUnreadable(field, EIO)),
        (code, view_of(field, NONE), NO_AER),
    ]


def links(up: Reading, before: int = ALL_UP, mig: Reading = 0) -> GpuRuleInput:
    changed = {GpuField.LINKS_UP: up, GpuField.MIG_MODE: mig}
    return gpu_view(changed, seen=SeenGpuFeatures(links_up=before))


def noisy_links(by: dict[GpuField, CounterGrowth | int], counts: tuple[int, ...] = ()) -> GpuRuleInput:
    return gpu_view(grown=by)._replace(sample=gpu_sample(link_errors=counts))


def fabric(
    state: Reading, status: Reading = 0, *, manager: bool | Missing = True, seen: SeenGpuFeatures = STRANGER
) -> GpuRuleInput:
    changed = {GpuField.FABRIC_STATE: state, GpuField.FABRIC_STATUS: status}
    return gpu_view(changed, seen=seen, host=GpuOsSample(fabric_manager=manager))


def mask(bits: Reading, summary: Reading = 1, state: Reading = 3) -> GpuRuleInput:
    return gpu_view({
        GpuField.FABRIC_HEALTH: bits,
        GpuField.FABRIC_SUMMARY: summary,
        GpuField.FABRIC_STATE: state,
    })  # fmt: skip


def fabric_manager_view(running: bool | Missing, *, before: bool = False) -> GpuRuleInput:
    return gpu_view(seen=SeenGpuFeatures(fabric_manager=before), host=GpuOsSample(fabric_manager=running))


REGISTERING: Final = RuleInconclusive("registration with the fabric is not complete")
IDLE: Final = RuleInconclusive("needs load: an idle link slows down")
RAN: Final = SeenGpuFeatures(fabric_manager=True)
HELD: Final = " (reported until 10 min after the last, or a reset)"

CASES: Final[Cases] = [
    # --- gpu.pcie.width
    (WIDTH, width(16), OK),
    (WIDTH, width(15), bad(WIDTH, "15 of 16 lanes")),
    (WIDTH, width(8), bad(WIDTH, "8 of 16 lanes")),
    (WIDTH, width(8, 8), OK),
    (WIDTH, width(EIO), RuleInputUnreadable("pcie_width", EIO)),
    (WIDTH, width(16, EIO), RuleInputUnreadable("pcie_width_max", EIO)),
    (WIDTH, width(ABSENT), NO_LINK),
    (WIDTH, width(16, ABSENT), NO_LINK),
    # --- gpu.pcie.gen
    (GEN, gen(5), OK),
    (GEN, gen(5, busy=0), OK),
    (GEN, gen(4), bad(GEN, "generation 4 of 5 under load")),
    (GEN, gen(1, busy=50), bad(GEN, "generation 1 of 5 under load")),
    (GEN, gen(1, busy=49), IDLE),
    (GEN, gen(1, busy=ABSENT), IDLE),
    (GEN, gen(1, pstate=2), bad(GEN, "generation 1 of 5 under load")),
    (GEN, gen(1, pstate=3), IDLE),
    (GEN, gen(1, pstate=ABSENT), bad(GEN, "generation 1 of 5 under load")),
    (GEN, gen(EIO), RuleInputUnreadable("pcie_gen", EIO)),
    (GEN, gen(5, EIO), RuleInputUnreadable("pcie_gen_max", EIO)),
    (GEN, gen(ABSENT), NO_LINK),
    (GEN, gen(5, ABSENT), NO_LINK),
    # --- gpu.pcie.replay, gpu.pcie.aer.*
    (REPLAY, view_of(GpuField.PCIE_REPLAY, 8), OK),
    (REPLAY, view_of(GpuField.PCIE_REPLAY, 9), bad(REPLAY, "PCIe replays: at least 9 in 1 min")),
    (REPLAY, view_of(GpuField.PCIE_REPLAY, CounterGrowth(8, 59.9)),
     RuleInconclusive("needs 1 min of history")),
    (REPLAY, view_of(GpuField.PCIE_REPLAY, BROKEN), RuleInputUnreadable("pcie_replay", EIO)),
    (REPLAY, view_of(GpuField.PCIE_REPLAY, NONE), RuleNotApplicable("the driver counts no replays")),
    *aer_cases(
        "correctable", GpuField.AER_CORRECTABLE, 100, "1 min", "correctable PCIe errors", Severity.DEGRADED
    ),
    *aer_cases("nonfatal", GpuField.AER_NONFATAL, 1, "10 min", "non-fatal PCIe errors", Severity.DEGRADED),
    *aer_cases("fatal", GpuField.AER_FATAL, 1, "10 min", "fatal PCIe errors", Severity.UNHEALTHY),
    # --- gpu.nvlink.down
    (DOWN, links(ALL_UP), OK),
    (DOWN, links(ALL_UP, before=0b11), OK),
    (DOWN, links(ALL_UP & ~(1 << 4)), unhealthy_finding(DOWN, "NVLink 4 down, up before: 0-17")),
    (DOWN, links(0b1001, before=0b1111), unhealthy_finding(DOWN, "NVLinks 1-2 down, up before: 0-3")),
    (DOWN, links(0b0011, before=0b0011), OK),  # links 2 and 3 were never up
    (DOWN, links(0, mig=1), RuleNotApplicable("a GPU in MIG mode uses no NVLinks")),
    (DOWN, links(0, before=0), RuleNotApplicable("no NVLink was up")),
    (DOWN, links(EIO), RuleInputUnreadable("links_up", EIO)),
    (DOWN, links(ABSENT), RuleNotApplicable("the GPU has no NVLinks")),
    # --- gpu.nvlink.errors, gpu.nvlink.recovery_failed
    (ERRORS, gpu_view(), OK),
    (ERRORS, noisy_links({GpuField.LINK_CRC: 5_999}), OK),
    (ERRORS, noisy_links({GpuField.LINK_CRC: 6_000}),
     bad(ERRORS, "NVLink CRC errors: at least 6000 in 1 min")),
    (ERRORS, noisy_links({GpuField.LINK_REPLAY: 1}),
     bad(ERRORS, f"NVLink replays: at least 1 in 10 min{HELD}")),
    (ERRORS, noisy_links({GpuField.LINK_REPLAY: 1, GpuField.LINK_CRC: 9_000}),
     bad(ERRORS, "NVLink CRC errors: at least 6000 in 1 min, "
         f"NVLink replays: at least 1 in 10 min{HELD}")),
    (ERRORS, noisy_links({GpuField.LINK_RECOVERY: 2}, (0, 0, 0, 7, 1)),
     bad(ERRORS, f"NVLink recoveries: at least 1 in 10 min{HELD}"
         "; since the driver was loaded, most on NVLink 3")),
    (ERRORS, noisy_links({GpuField.LINK_RECOVERY: 2}, (9, 9, 9, 9)),
     bad(ERRORS, f"NVLink recoveries: at least 1 in 10 min{HELD}")),
    (ERRORS, noisy_links({GpuField.LINK_REPLAY: CounterGrowth(0, 599.0)}), OK),  # it counted nothing, ever
    (ERRORS, gpu_view({GpuField.LINK_REPLAY: 7}, grown={GpuField.LINK_REPLAY: CounterGrowth(0, 599.0)}),
     RuleInconclusive("needs 10 min of history")),
    (ERRORS, noisy_links({GpuField.LINK_REPLAY: BROKEN}), RuleInputUnreadable("link_replay", EIO)),
    (ERRORS, noisy_links({GpuField.LINK_REPLAY: NONE}), OK),  # the other kinds are counted
    (ERRORS, noisy_links({GpuField.LINK_REPLAY: BROKEN, GpuField.LINK_CRC: 6_000}),
     bad(ERRORS, "NVLink CRC errors: at least 6000 in 1 min")),
    (ERRORS, gpu_view(readings=T4), RuleNotApplicable("the driver counts no such errors")),
    (GIVEN_UP, gpu_view(), OK),
    (GIVEN_UP, view_of(GpuField.LINK_RECOVERY_FAILED, 1),
     bad(GIVEN_UP, f"NVLink recoveries that failed: at least 1 in 10 min{HELD}")),
    (GIVEN_UP, view_of(GpuField.LINK_RECOVERY_FAILED, CounterGrowth(0, 9.0)),
     RuleInconclusive("needs 10 min of history")),
    (GIVEN_UP, view_of(GpuField.LINK_RECOVERY_FAILED, BROKEN), RuleInputUnreadable("link_recovery_failed", EIO)),  # noqa: E501
    (GIVEN_UP, gpu_view(readings=T4), RuleNotApplicable("the driver counts no such errors")),
    # --- gpu.fabric.state, gpu.fabric.status
    (STATE, fabric(3), OK),
    (STATE, fabric(2), unhealthy_finding(STATE, "registration with the fabric does not finish")),
    (STATE, fabric(2, manager=ABSENT),
     unhealthy_finding(STATE, "registration with the fabric does not finish")),
    (STATE, fabric(1), unhealthy_finding(STATE, "registration with the fabric does not begin")),
    (STATE, fabric(1, manager=False),
     unhealthy_finding(STATE, "registration with the fabric does not begin")),
    (STATE, fabric(1, manager=ABSENT, seen=RAN),
     unhealthy_finding(STATE, "registration with the fabric does not begin")),
    (STATE, fabric(1, manager=ABSENT),
     RuleNotApplicable("registration has not begun, and no Fabric Manager will begin it")),
    (STATE, fabric(0), NO_FABRIC),
    (STATE, fabric(ABSENT), NO_FABRIC),
    (STATE, fabric(EIO), RuleInputUnreadable("fabric_state", EIO)),
    (STATUS, fabric(3), OK),
    (STATUS, fabric(3, 999), unhealthy_finding(STATUS, "registration with the fabric failed: UNKNOWN (999)")),
    (STATUS, fabric(2, 999), REGISTERING),
    (STATUS, fabric(1, manager=False), REGISTERING),
    (STATUS, fabric(1, manager=ABSENT, seen=RAN), REGISTERING),
    (STATUS, fabric(1, manager=ABSENT), RuleNotApplicable("registration is not complete")),
    (STATUS, fabric(0), RuleNotApplicable("registration is not complete")),
    (STATUS, fabric(3, EIO), RuleInputUnreadable("fabric_status", EIO)),
    (STATUS, fabric(EIO), RuleInputUnreadable("fabric_state", EIO)),
    (STATUS, fabric(ABSENT, ABSENT), NO_FABRIC),
    # --- gpu.fabric.health
    (HEALTH, mask(0x1AA), OK),
    (HEALTH, mask(0x1AA, ABSENT), OK),
    (HEALTH, mask(0x1A9), bad(HEALTH, "bandwidth is degraded")),
    (HEALTH, mask(0x1A6), bad(HEALTH, "routes are being recovered")),
    (HEALTH, mask(0x19A), unhealthy_finding(HEALTH, "a route is unhealthy")),
    (HEALTH, mask(0x16A), bad(HEALTH, "recovering from an access timeout")),
    (HEALTH, mask(0x5AA), unhealthy_finding(HEALTH, "too few NVLinks")),
    (HEALTH, mask(0xBAA), unhealthy_finding(HEALTH, "incorrect configuration of an unknown kind")),
    (HEALTH, mask(0x51AA), OK),
    (HEALTH, mask(0x21AA), bad(HEALTH, "no partition is assigned")),
    (HEALTH, mask(0x81AA), bad(HEALTH, "the global fabric manager is not connected")),
    (HEALTH, mask(0x4A9), unhealthy_finding(HEALTH, "bandwidth is degraded, not in a partition")),
    (HEALTH, mask(0x1AA, 2), unhealthy_finding(HEALTH, "summary: unhealthy")),
    (HEALTH, mask(0x1AA, 3), bad(HEALTH, "summary: limited capacity")),
    (HEALTH, mask(0, 2), unhealthy_finding(HEALTH, "summary: unhealthy")),
    (HEALTH, mask(0, 0), NO_HEALTH),
    (HEALTH, mask(0, 0, state=2), REGISTERING),
    (HEALTH, mask(0, 0, state=1), REGISTERING),
    (HEALTH, mask(0, 0, state=1)._replace(seen=STRANGER, host=GpuOsSample(fabric_manager=ABSENT)), NO_HEALTH),
    (HEALTH, mask(0x19A, state=2), unhealthy_finding(HEALTH, "a route is unhealthy")),
    (HEALTH, mask(ABSENT, ABSENT), NO_HEALTH),
    (HEALTH, mask(EIO), RuleInputUnreadable("fabric_health", EIO)),
    (HEALTH, mask(0x1AA, EIO), RuleInputUnreadable("fabric_summary", EIO)),
    # --- gpu.fabric.manager
    (MANAGER, fabric_manager_view(True), OK),
    (MANAGER, fabric_manager_view(False),
     bad(MANAGER, "nv-fabricmanager is not running, and the machine has NVSwitches")),
    (MANAGER, fabric_manager_view(False, before=True),
     bad(MANAGER, "nv-fabricmanager was running, and is not any more")),
    (MANAGER, fabric_manager_view(ABSENT, before=True),
     bad(MANAGER, "nv-fabricmanager was running, and is not any more")),
    (MANAGER, fabric_manager_view(ABSENT),
     RuleNotApplicable("no NVSwitches on the PCI bus, or processes cannot be listed")),
    (MANAGER, fabric_manager_view(EIO, before=True), RuleInputUnreadable("processes", EIO)),
    (MANAGER, fabric_manager_view(False)._replace(sample=None),
     bad(MANAGER, "nv-fabricmanager is not running, and the machine has NVSwitches")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_rule_returns_expected_result_for_view(code: str, view: GpuRuleInput, answer: RuleResult) -> None:
    assert ROWS[code].evaluate(view) == answer


@pytest.mark.parametrize("budget", ERROR_LIMITS, ids=lambda budget: budget.field)
def test_each_nvlink_error_kind_has_its_own_budget(budget: GrowthLimit) -> None:
    judge = ROWS[ERRORS].evaluate
    assert judge(view_of(budget.field, budget.events - 1)) is OK
    assert judge(view_of(budget.field, budget.events)) == bad(ERRORS, budget.evidence)


def test_up_to_three_worst_links_are_listed() -> None:
    judge = ROWS[ERRORS].evaluate
    text = f"NVLink replays: at least 1 in 10 min{HELD}"
    named = bad(ERRORS, f"{text}; since the driver was loaded, most on NVLink 0-2")
    assert judge(noisy_links({GpuField.LINK_REPLAY: 1}, (9, 9, 9, 0))) == named
    assert judge(noisy_links({GpuField.LINK_REPLAY: 1}, (9, 9, 9, 9))) == bad(ERRORS, text)
