"""Rules for ECC, row remapping and page retirement: each limit from both sides, and missing readings."""

from typing import Final

import pytest
from gpu_samples import ABSENT, EIO, LIMITS, T4, gpu_view

from agent.health.gpu.rule_input import GpuRuleInput, SeenGpuFeatures
from agent.health.gpu.rule_state import gpu_rules
from agent.health.rules import (
    OK,
    CounterGrowth,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
)
from agent.model.gpu import GpuField
from agent.model.health import Finding, Severity
from agent.model.reading import Reading
from agent.model.settings import GpuLimits

ROWS: Final = {rule.code: rule for rule in gpu_rules(LIMITS)}
LOST: Final = "gpu.ecc.uncorrectable"
RATE: Final = "gpu.ecc.correctable_rate"
OFF: Final = "gpu.ecc.off"
SRAM: Final = "gpu.ecc.sram_threshold"
PAGES: Final = "gpu.retired.pages"

NO_REMAP: Final = RuleNotApplicable("no row remapping: the GPU is older than Ampere, or has no ECC")
NO_RETIREMENT: Final = RuleNotApplicable(
    "no page retirement: the GPU remaps rows (Ampere and later), or has no ECC"
)
FEW: Final = GpuLimits(correctable_errors=5, correctable_window_s=60)


def errors(
    count: Reading,
    action: Reading = 0,
    dram: Reading = ABSENT,
    sram: Reading = ABSENT,
    parity: Reading = ABSENT,
    secded: Reading = ABSENT,
) -> GpuRuleInput:
    return gpu_view({
        GpuField.ECC_UNCORRECTABLE: count,
        GpuField.RECOVERY_ACTION: action,
        GpuField.ECC_UNCORRECTABLE_DRAM: dram,
        GpuField.ECC_UNCORRECTABLE_SRAM: sram,
        GpuField.SRAM_PARITY: parity,
        GpuField.SRAM_SECDED: secded,
    })  # fmt: skip


def lost_finding(text: str, severity: Severity = Severity.DEGRADED) -> Finding:
    return Finding(LOST, severity, f"{text} since the driver was loaded")


def corrected_errors_view(growth: CounterGrowth | int, limits: GpuLimits = LIMITS) -> GpuRuleInput:
    return gpu_view(grown={GpuField.ECC_CORRECTABLE: growth}, limits=limits)


def mode(now: Reading, pending: Reading, *, at_start: bool = False) -> GpuRuleInput:
    changed = {GpuField.ECC_MODE: now, GpuField.ECC_MODE_PENDING: pending}
    return gpu_view(changed, seen=SeenGpuFeatures(ecc=at_start))


def pages(sbe: Reading, dbe: Reading) -> GpuRuleInput:
    return gpu_view({GpuField.RETIRED_SBE: sbe, GpuField.RETIRED_DBE: dbe}, readings=T4)


def off_finding(text: str) -> Finding:
    return Finding(OFF, Severity.INFO, text)


CASES: Final[list[tuple[str, GpuRuleInput, RuleResult]]] = [
    # --- gpu.ecc.uncorrectable
    (LOST, errors(0), OK),
    (LOST, errors(1), lost_finding("1 uncorrectable error")),
    (LOST, errors(3, dram=3, sram=0), lost_finding("3 uncorrectable errors in DRAM")),
    (LOST, errors(3, dram=2, sram=1), lost_finding("3 uncorrectable errors in DRAM and SRAM")),
    (LOST, errors(10), lost_finding("at least 10 uncorrectable errors")),
    (LOST, errors(999), lost_finding("at least 100 uncorrectable errors")),
    (LOST, errors(1, action=1), lost_finding("1 uncorrectable error", Severity.UNHEALTHY)),
    (LOST, errors(1, action=ABSENT), lost_finding("1 uncorrectable error", Severity.UNHEALTHY)),
    (LOST, errors(1, action=EIO), lost_finding("1 uncorrectable error", Severity.UNHEALTHY)),
    (LOST, errors(0, dram=2), lost_finding("2 uncorrectable errors in DRAM")),
    (LOST, errors(0, sram=1), lost_finding("1 uncorrectable error in SRAM")),
    (LOST, errors(0, sram=0, parity=1), lost_finding("1 uncorrectable error in SRAM (parity)")),
    (LOST, errors(0, sram=0, secded=2), lost_finding("2 uncorrectable errors in SRAM (SEC-DED)")),
    (LOST, errors(0, action=1, parity=1),
     lost_finding("1 uncorrectable error in SRAM (parity)", Severity.UNHEALTHY)),
    (LOST, errors(1, sram=1, parity=2, secded=1),
     lost_finding("3 uncorrectable errors in SRAM (parity, SEC-DED)")),
    (LOST, errors(5, dram=2, sram=3, secded=3),
     lost_finding("5 uncorrectable errors in DRAM and SRAM (SEC-DED)")),
    (LOST, errors(EIO, parity=1), lost_finding("1 uncorrectable error in SRAM (parity)")),
    (LOST, errors(0, parity=EIO), RuleInputUnreadable("sram_parity", EIO)),
    (LOST, errors(EIO), RuleInputUnreadable("ecc_uncorrectable", EIO)),
    (LOST, errors(ABSENT), RuleNotApplicable("the GPU has no ECC")),
    (LOST, errors(ABSENT, dram=0), OK),
    (LOST, gpu_view({GpuField.ECC_MODE: 0, GpuField.ECC_UNCORRECTABLE: 2}), RuleNotApplicable("ECC is off")),
    # --- gpu.ecc.correctable_rate
    (RATE, corrected_errors_view(999), OK),
    (RATE, corrected_errors_view(1000),
     Finding(RATE, Severity.DEGRADED, "correctable memory errors: at least 1000 in 1 h"
             " (reported until 1 h after the last, or a reset)")),
    (RATE, corrected_errors_view(CounterGrowth(1000, 3.0)),
     Finding(RATE, Severity.DEGRADED, "correctable memory errors: at least 1000 in 1 h"
             " (reported until 1 h after the last, or a reset)")),
    (RATE, corrected_errors_view(CounterGrowth(999, 3599.0)), RuleInconclusive("needs 1 h of history")),
    (RATE, corrected_errors_view(CounterGrowth(EIO, 0.0)), RuleInputUnreadable("ecc_correctable", EIO)),
    (RATE, corrected_errors_view(CounterGrowth(ABSENT, 0.0)), RuleNotApplicable("the GPU has no ECC")),
    (RATE, corrected_errors_view(4, FEW), OK),
    (RATE, corrected_errors_view(5, FEW),
     Finding(RATE, Severity.DEGRADED, "correctable memory errors: at least 5 in 1 min")),
    (RATE, gpu_view({GpuField.ECC_MODE: 0}, grown={GpuField.ECC_CORRECTABLE: 9999}),
     RuleNotApplicable("ECC is off")),
    # --- gpu.ecc.off
    (OFF, mode(1, 1), OK),
    (OFF, mode(1, ABSENT), OK),
    (OFF, mode(1, 0), off_finding("ECC will be off after the next reset")),
    (OFF, mode(0, 1), off_finding("ECC is off until the next reset")),
    (OFF, mode(0, 0), off_finding("ECC is off")),
    (OFF, mode(0, 0, at_start=True), off_finding("ECC is off, but was on at start")),
    (OFF, mode(EIO, 1), RuleInputUnreadable("ecc_mode", EIO)),
    (OFF, mode(ABSENT, ABSENT), RuleNotApplicable("the GPU has no ECC")),
    # --- gpu.ecc.sram_threshold
    (SRAM, gpu_view(), OK),
    (SRAM, gpu_view({GpuField.SRAM_THRESHOLD: 1}),
     Finding(SRAM, Severity.UNHEALTHY, "uncorrectable SRAM errors exceed the vendor's limit")),
    (SRAM, gpu_view({GpuField.SRAM_THRESHOLD: EIO}), RuleInputUnreadable("sram_threshold", EIO)),
    (SRAM, gpu_view(readings=T4), RuleNotApplicable("driver or GPU have no SRAM threshold")),
    # --- gpu.remap.*
    ("gpu.remap.failure", gpu_view(), OK),
    ("gpu.remap.failure", gpu_view({GpuField.REMAP_FAILURE: 1}),
     Finding("gpu.remap.failure", Severity.UNHEALTHY, "a bad memory row could not be remapped")),
    ("gpu.remap.failure", gpu_view({GpuField.REMAP_FAILURE: EIO}), RuleInputUnreadable("remap_failure", EIO)),
    ("gpu.remap.failure", gpu_view(readings=T4), NO_REMAP),
    ("gpu.remap.failure", gpu_view({GpuField.UNREPAIRABLE_MEMORY: 0}, readings=T4), OK),
    ("gpu.remap.failure", gpu_view({GpuField.UNREPAIRABLE_MEMORY: ABSENT}), OK),
    ("gpu.remap.failure", gpu_view({GpuField.UNREPAIRABLE_MEMORY: 1}, readings=T4),
     Finding("gpu.remap.failure", Severity.UNHEALTHY, "bad memory cannot be repaired")),
    ("gpu.remap.pending", gpu_view(), OK),
    ("gpu.remap.pending", gpu_view({GpuField.REMAP_PENDING: 1}),
     Finding("gpu.remap.pending", Severity.DEGRADED, "a row remapping waits for a reset")),
    ("gpu.remap.pending", gpu_view({GpuField.CHANNEL_REPAIR_PENDING: 1}),
     Finding("gpu.remap.pending", Severity.DEGRADED, "the repair of a memory channel waits for a reset")),
    ("gpu.remap.pending", gpu_view({GpuField.REMAP_PENDING: ABSENT, GpuField.TPC_REPAIR_PENDING: 1}),
     Finding("gpu.remap.pending", Severity.DEGRADED, "the repair of a TPC waits for a reset")),
    ("gpu.remap.pending",
     gpu_view({GpuField.CHANNEL_REPAIR_PENDING: ABSENT, GpuField.TPC_REPAIR_PENDING: ABSENT}), OK),
    ("gpu.remap.pending", gpu_view({GpuField.REMAP_PENDING: EIO}), RuleInputUnreadable("remap_pending", EIO)),
    ("gpu.remap.pending", gpu_view(readings=T4), NO_REMAP),
    # --- gpu.retired.*
    (PAGES, pages(0, 0), OK),
    (PAGES, pages(40, 19), OK),
    (PAGES, pages(40, 20), Finding(PAGES, Severity.DEGRADED, "60 pages retired, the limit is 60")),
    (PAGES, pages(0, 64), Finding(PAGES, Severity.DEGRADED, "64 pages retired, the limit is 60")),
    (PAGES, pages(EIO, 3), RuleInputUnreadable("retired_sbe", EIO)),
    (PAGES, pages(3, EIO), RuleInputUnreadable("retired_dbe", EIO)),
    (PAGES, gpu_view(), NO_RETIREMENT),
    ("gpu.retired.pending", gpu_view(readings=T4), OK),
    ("gpu.retired.pending", gpu_view({GpuField.RETIRED_PENDING: 1}, readings=T4),
     Finding("gpu.retired.pending", Severity.DEGRADED, "a page retirement waits for a reset")),
    ("gpu.retired.pending", gpu_view({GpuField.RETIRED_PENDING: EIO}, readings=T4),
     RuleInputUnreadable("retired_pending", EIO)),
    ("gpu.retired.pending", gpu_view(), NO_RETIREMENT),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_rule_returns_expected_result_for_view(code: str, view: GpuRuleInput, answer: RuleResult) -> None:
    assert ROWS[code].evaluate(view) == answer


def test_configured_budget_is_in_threshold_text() -> None:
    row = next(rule for rule in gpu_rules(FEW) if rule.code == RATE)
    assert row.threshold.startswith("correctable memory errors: at least 5 in 1 min")
    assert row.window_s == 60
