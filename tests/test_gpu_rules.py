"""All rules for GPUs: each can be triggered, handles missing readings, and wakes the engine."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Final

import pytest
from gpu_samples import (
    ABSENT,
    EIO,
    H100,
    LIMITS,
    T4,
    flat_growth,
    gpu_sample,
    gpu_set,
    gpu_view,
    hanging_view,
    pci_sample,
)
from hypothesis import given
from hypothesis import strategies as st

from agent.health.gpu.rule_input import GpuRuleInput, SeenGpuFeatures, nvml_code_text, worst_result
from agent.health.gpu.rule_state import counter_windows_s, gpu_rules, gpu_wakes
from agent.health.host.verdicts import ALL_HOST_RULES
from agent.health.rules import (
    OK,
    CounterGrowth,
    Rule,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    format_at_least,
    format_duration,
)
from agent.model.gpu import GpuField, GpuOsSample, GpuWakeCondition, GpuWakeMode, StuckProcess
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Reading, SourceState
from agent.model.settings import GpuLimits
from agent.model.time import NS

RULES: Final = gpu_rules(LIMITS)
ROWS: Final = {rule.code: rule for rule in RULES}


def view_with(**changed: Reading) -> GpuRuleInput:
    """Return the view of an H100 with other values of some readings."""
    return gpu_view({GpuField(name): value for name, value in changed.items()})


def grown_counters_view(**by: int) -> GpuRuleInput:
    """Return the view of an H100 whose counters have grown."""
    return gpu_view(grown={GpuField(name): value for name, value in by.items()})


def status(code: int) -> GpuRuleInput:
    return gpu_view(sample=gpu_sample(status=code))


def library(err: int) -> GpuRuleInput:
    return gpu_view(sample=None, gpu_set=gpu_set(state=SourceState.FAILING, err=err))


TRIGGERS: Final[Mapping[str, GpuRuleInput]] = {
    "gpu.recovery_action": view_with(recovery_action=1),
    "gpu.not_answering": hanging_view(7),
    "gpu.lost": status(15),
    "gpu.reset_required": status(16),
    "gpu.failing": status(999),
    "gpu.no_readings": gpu_view(dict.fromkeys(H100, ABSENT)),
    "gpu.probe.slow": gpu_view(sample=gpu_sample(probe_p50_ns=200_000_000)),
    "gpu.driver.process": gpu_view(gpu_set=gpu_set(process="the NVML process was killed by SIGSEGV")),
    "gpu.driver.init": library(9),
    "gpu.driver.mismatch": library(18),
    "gpu.missing": gpu_view(sample=gpu_sample(status=28)),
    "gpu.unbound": gpu_view(sample=gpu_sample(status=28), pci_function=pci_sample(driver="")),
    "gpu.driver.reloaded": gpu_view(gpu_set=gpu_set(generation=2)),
    "gpu.driver.persistence_off": view_with(persistence=0),
    "gpu.driver.stuck_process": gpu_view(host=GpuOsSample(stuck=(StuckProcess(4711, "python"),))),
    "gpu.driver.deaf": gpu_view(is_log_readable=False),
    "gpu.remap.failure": view_with(remap_failure=1),
    "gpu.ecc.sram_threshold": view_with(sram_threshold=1),
    "gpu.ecc.uncorrectable": view_with(ecc_uncorrectable=2, recovery_action=ABSENT),
    "gpu.ecc.correctable_rate": grown_counters_view(ecc_correctable=1000),
    "gpu.remap.pending": view_with(remap_pending=1),
    "gpu.retired.pages": gpu_view({GpuField.RETIRED_DBE: 60}, readings=T4),
    "gpu.retired.pending": gpu_view({GpuField.RETIRED_PENDING: 1}, readings=T4),
    "gpu.ecc.off": view_with(ecc_mode=0, ecc_mode_pending=0),
    "gpu.nvlink.down": view_with(links_up=0),
    "gpu.nvlink.recovery_failed": grown_counters_view(link_recovery_failed=1),
    "gpu.nvlink.errors": grown_counters_view(link_replay=1),
    "gpu.fabric.status": view_with(fabric_status=999),
    "gpu.fabric.state": view_with(fabric_state=2),
    "gpu.fabric.health": view_with(fabric_health=0x19A),
    "gpu.fabric.manager": gpu_view(host=GpuOsSample(fabric_manager=False)),
    "gpu.pcie.aer.fatal": grown_counters_view(aer_fatal=1),
    "gpu.pcie.aer.nonfatal": grown_counters_view(aer_nonfatal=1),
    "gpu.pcie.aer.correctable": grown_counters_view(aer_correctable=100),
    "gpu.pcie.replay": grown_counters_view(pcie_replay=9),
    "gpu.pcie.width": view_with(pcie_width=8),
    "gpu.pcie.gen": view_with(pcie_gen=1, utilization=90),
    "gpu.thermal.over_limit": view_with(temp=91),
    "gpu.thermal.memory": view_with(mem_temp=97),
    "gpu.thermal.slowdown": grown_counters_view(slowed_hw_thermal=6 * NS),
    "gpu.power.brake": grown_counters_view(slowed_hw_brake=6 * NS),
    "gpu.power.slowdown": view_with(clock_reasons=8),
}
"""Views that raise each rule, with the severity of its row."""

by_code = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
by_reading_rule = pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.gpu_reads], ids=lambda rule: rule.code
)


# --- the rows -----------------------------------------------------------------------------------------------


def test_every_rule_has_a_trigger_and_every_trigger_a_rule() -> None:
    assert list(TRIGGERS) == [rule.code for rule in RULES]
    assert not ROWS.keys() & {rule.code for rule in ALL_HOST_RULES}


@by_code
def test_trigger_raises_rule_with_severity_of_its_row(rule: Rule) -> None:
    answer = rule.evaluate(TRIGGERS[rule.code])
    assert isinstance(answer, Finding)
    assert (answer.code, answer.severity) == (rule.code, rule.severity)
    assert answer.evidence


@by_code
def test_every_row_is_complete(rule: Rule) -> None:
    assert rule.severity is not Severity.OK
    assert rule.blame in Blame
    assert rule.source in {"gpu", "nvml", "host", "pci"}
    assert all([rule.threshold, rule.why, rule.advice, rule.try_it])
    assert rule.evaluate.__doc__
    assert "Source:" in rule.evaluate.__doc__
    assert rule.counts_growth == bool(rule.window_s)
    assert rule.gpu_reads or rule.valid_when_stalled or rule.code in {"gpu.probe.slow", "gpu.no_readings"}


@by_code
def test_unhealthy_rules_have_a_probation(rule: Rule) -> None:
    if rule.severity is Severity.UNHEALTHY:
        assert rule.probation_ns == int(LIMITS.probation_s * NS)


@pytest.mark.parametrize("readings", [H100, T4], ids=["h100", "t4"])
def test_healthy_gpu_has_no_finding(readings: Mapping[GpuField, Reading]) -> None:
    view = gpu_view(readings=readings)
    assert [
        answer for rule in RULES if isinstance(answer := rule.evaluate(view), Finding | RuleInputUnreadable)
    ] == []


def test_row_texts_contain_configured_limits() -> None:
    rows = {
        rule.code: rule for rule in gpu_rules(GpuLimits(deadline_s=7, dead_s=90, probation_s=11, expect=3))
    }
    assert "older than 7 s" in rows["gpu.not_answering"].threshold
    assert "after 90 s" in rows["gpu.not_answering"].threshold
    assert rows["gpu.lost"].probation_ns == 11 * NS


def test_rules_of_equal_limits_are_created_once() -> None:
    assert gpu_rules(GpuLimits()) is RULES
    assert counter_windows_s(GpuLimits()) is counter_windows_s(LIMITS)


# --- missing data -------------------------------------------------------------------------------------------


@by_reading_rule
def test_absent_reading_makes_rule_not_applicable(rule: Rule) -> None:
    view = gpu_view({wake.field: ABSENT for wake in rule.gpu_reads})
    assert isinstance(rule.evaluate(view), RuleNotApplicable)


@by_reading_rule
def test_unreadable_reading_is_neither_ok_nor_finding(rule: Rule) -> None:
    view = gpu_view({wake.field: EIO for wake in rule.gpu_reads})
    answer = rule.evaluate(view)
    assert isinstance(answer, RuleInputUnreadable)
    assert answer.name in {wake.field for wake in rule.gpu_reads}
    assert answer.reading == EIO


@by_code
def test_unread_gpu_is_evaluated_by_rules_that_need_no_answer(rule: Rule) -> None:
    view = gpu_view(sample=None, growth={})
    answer = rule.evaluate(view)
    if rule.valid_when_stalled:
        assert isinstance(answer, Finding) == (rule.code == "gpu.missing")
    else:
        assert isinstance(answer, RuleNotApplicable | RuleInconclusive)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.counts_growth], ids=lambda rule: rule.code)
def test_counter_without_history_is_not_evaluated(rule: Rule) -> None:
    growth = {field: CounterGrowth(0, 0.0) for field in counter_windows_s(LIMITS)}
    assert isinstance(rule.evaluate(gpu_view(growth=growth)), RuleInconclusive)


# --- every view ---------------------------------------------------------------------------------------------

readings = st.one_of(
    st.just(ABSENT), st.just(EIO), st.integers(0, 20), st.integers(-10, 200), st.integers(0, 2**64 - 1)
)
every_readings = st.fixed_dictionaries(dict.fromkeys(GpuField, readings))
answers = Finding | RuleInputUnreadable | RuleInconclusive | RuleNotApplicable | None


def view_of(values: Mapping[GpuField, Reading], by: int, code: int, links: int) -> GpuRuleInput:
    growth = {
        field: unchanged._replace(events=by) if isinstance(unchanged.events, int) else unchanged
        for field, unchanged in flat_growth(LIMITS, values).items()
    }
    return gpu_view(
        readings=values, growth=growth, seen=SeenGpuFeatures(links, True, bool(links % 2))
    )._replace(sample=gpu_sample(readings=values, status=code))


views = st.builds(
    view_of,
    every_readings,
    st.integers(0, 2**40),
    st.sampled_from([0, 0, 15, 16, 28, 999]),
    st.integers(0, 2**18),
)


@given(views)
def test_every_rule_returns_a_result_for_every_view(view: GpuRuleInput) -> None:
    for rule in RULES:
        answer = rule.evaluate(view)
        assert isinstance(answer, answers)
        if isinstance(answer, Finding):
            assert answer.code == rule.code
            assert answer.evidence
            assert "\n" not in answer.evidence


UNWATCHED: Final = sorted(set(GpuField) - {wake.field for wake in gpu_wakes(LIMITS)})


@given(views, st.sampled_from(UNWATCHED), readings)
def test_reading_that_does_not_wake_engine_changes_no_result(
    view: GpuRuleInput, field: GpuField, value: Reading
) -> None:
    assert view.sample
    other = view._replace(sample=replace(view.sample, readings={**view.sample.readings, field: value}))
    assert [rule.evaluate(other) for rule in RULES] == [rule.evaluate(view) for rule in RULES]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.counts_growth], ids=lambda rule: rule.code)
def test_evidence_of_rate_is_independent_of_rate(rule: Rule) -> None:
    field = next(wake.field for wake in rule.gpu_reads if wake.mode is GpuWakeMode.RISE)
    found = {rule.evaluate(gpu_view(grown={field: by})) for by in (10**12, 10**12 + 1, 10**13)}
    assert len(found) == 1


# --- wakes of the engine ------------------------------------------------------------------------------------


def test_each_evaluated_field_has_exactly_one_wake() -> None:
    fields = [wake.field for wake in gpu_wakes(LIMITS)]
    assert len(fields) == len(set(fields))
    assert set(fields) == {wake.field for rule in RULES for wake in rule.gpu_reads}


def test_varying_readings_wake_only_at_their_limit() -> None:
    modes = {wake.field: wake.mode for wake in gpu_wakes(LIMITS)}
    assert modes[GpuField.TEMP] is modes[GpuField.MEM_TEMP] is GpuWakeMode.OVER
    assert modes[GpuField.MARGIN] is modes[GpuField.UTILIZATION] is GpuWakeMode.BELOW
    assert modes[GpuField.CLOCK_REASONS] is GpuWakeMode.BITS
    assert {modes[field] for field in counter_windows_s(LIMITS)} == {GpuWakeMode.RISE}
    assert not {GpuField.ECC_CORRECTABLE_LIFE, GpuField.SLOWED_SW_POWER} & modes.keys()


def test_bit_wakes_of_several_rules_are_merged() -> None:
    wake = next(wake for wake in gpu_wakes(LIMITS) if wake.field is GpuField.CLOCK_REASONS)
    assert wake == GpuWakeCondition(GpuField.CLOCK_REASONS, GpuWakeMode.BITS, 0xE8)


def test_counter_wakes_at_configured_budget() -> None:
    limits = GpuLimits(correctable_errors=7, correctable_window_s=30)
    wake = next(wake for wake in gpu_wakes(limits) if wake.field is GpuField.ECC_CORRECTABLE)
    assert wake == GpuWakeCondition(GpuField.ECC_CORRECTABLE, GpuWakeMode.RISE, 7, 30 * NS)
    assert counter_windows_s(limits)[GpuField.ECC_CORRECTABLE] == 30


# --- texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (60, "1 min"), (90, "90 s"), (3600, "1 h"), (5400, "90 min"), (86400, "1 d")],
)
def test_duration_uses_largest_unit_with_whole_number(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("code", "text"), [(15, "GPU_IS_LOST (15)"), (77, "unknown code 77")])
def test_return_code_has_nvml_name(code: int, text: str) -> None:
    assert nvml_code_text(code) == text


@given(st.lists(st.integers(1, 10**9), min_size=2))
def test_text_of_growing_count_changes_rarely(counts: list[int]) -> None:
    counts.sort()
    texts = [format_at_least(count) for count in counts]
    assert all(before == after for before, after in pairwise(texts) if len(before) == len(after) > 1)
    assert all(int(re.sub(r"\D", "", text)) <= count for text, count in zip(texts, counts, strict=True))
    assert len(set(texts)) <= 9 + 9


def test_worst_result_prefers_findings_then_unknown_results() -> None:
    bad, blind = Finding("x", Severity.INFO), RuleInputUnreadable("x", EIO)
    young, none = RuleInconclusive("x"), RuleNotApplicable("x")
    assert worst_result(none, OK, young, blind, bad) is bad
    assert worst_result(none, OK, young, blind) is blind
    assert worst_result(none, OK, young) is young
    assert worst_result(none, OK) is OK
    assert worst_result(none, none) is none
