"""All rules of GPUs together: each can be made to raise, none guesses, and what they see wakes the core."""

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
    gpu_sample,
    gpu_set,
    gpu_view,
    pci_sample,
    silent_view,
    still,
)
from hypothesis import given
from hypothesis import strategies as st

from agent.health.catalog import Rule
from agent.health.gpu.catalog import gpu_rules, gpu_wakes, windows
from agent.health.gpu.common import foremost, nvml_name
from agent.health.gpu.view import GpuStart, GpuView
from agent.health.host.catalog import ALL_RULES
from agent.health.rules import OK, Growth, RuleNotApplicable, RuleNotEvaluated, Unreadable
from agent.health.words import at_least, duration
from agent.model.gpu import GpuField, GpuHost, StuckProcess
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Reading
from agent.model.settings import GpuLimits
from agent.model.source import SourceState
from agent.model.time import NS
from agent.model.wake import GpuWake, GpuWakeMode

RULES: Final = gpu_rules(LIMITS)
ROWS: Final = {rule.code: rule for rule in RULES}


def read(**changed: Reading) -> GpuView:
    """An H100 of which these readings are otherwise."""
    return gpu_view({GpuField(name): value for name, value in changed.items()})


def grown(**by: int) -> GpuView:
    """An H100 of which these counters have grown."""
    return gpu_view(grown={GpuField(name): value for name, value in by.items()})


def status(code: int) -> GpuView:
    return gpu_view(gpu=gpu_sample(status=code))


def library(err: int) -> GpuView:
    return gpu_view(gpu=None, gpus=gpu_set(state=SourceState.FAILING, err=err))


TRIGGERS: Final[Mapping[str, GpuView]] = {
    "gpu.recovery_action": read(recovery_action=1),
    "gpu.not_answering": silent_view(7),
    "gpu.lost": status(15),
    "gpu.reset_required": status(16),
    "gpu.failing": status(999),
    "gpu.probe.slow": gpu_view(gpu=gpu_sample(probe_p50_ns=200_000_000)),
    "gpu.driver.init": library(9),
    "gpu.driver.mismatch": library(18),
    "gpu.missing": gpu_view(gpu=gpu_sample(status=28)),
    "gpu.unbound": gpu_view(gpu=gpu_sample(status=28), pci=pci_sample(driver="")),
    "gpu.driver.reloaded": gpu_view(gpus=gpu_set(generation=2)),
    "gpu.driver.persistence_off": read(persistence=0),
    "gpu.driver.stuck_process": gpu_view(host=GpuHost(stuck=(StuckProcess(4711, "python"),))),
    "gpu.driver.deaf": gpu_view(log_read=False),
    "gpu.remap.failure": read(remap_failure=1),
    "gpu.ecc.sram_threshold": read(sram_threshold=1),
    "gpu.ecc.uncorrectable": read(ecc_uncorrectable=2, recovery_action=ABSENT),
    "gpu.ecc.correctable_rate": grown(ecc_correctable=1000),
    "gpu.remap.pending": read(remap_pending=1),
    "gpu.retired.pages": gpu_view({GpuField.RETIRED_DBE: 60}, readings=T4),
    "gpu.retired.pending": gpu_view({GpuField.RETIRED_PENDING: 1}, readings=T4),
    "gpu.ecc.off": read(ecc_mode=0, ecc_mode_pending=0),
    "gpu.nvlink.down": read(links_up=0),
    "gpu.nvlink.recovery_failed": grown(link_recovery_failed=1),
    "gpu.nvlink.errors": grown(link_replay=1),
    "gpu.fabric.status": read(fabric_status=999),
    "gpu.fabric.state": read(fabric_state=2),
    "gpu.fabric.health": read(fabric_health=0x19A),
    "gpu.fabric.manager": gpu_view(host=GpuHost(fabric_manager=False)),
    "gpu.pcie.aer.fatal": grown(aer_fatal=1),
    "gpu.pcie.aer.nonfatal": grown(aer_nonfatal=1),
    "gpu.pcie.aer.correctable": grown(aer_correctable=100),
    "gpu.pcie.replay": grown(pcie_replay=9),
    "gpu.pcie.width": read(pcie_width=8),
    "gpu.pcie.gen": read(pcie_gen=1, utilization=90),
    "gpu.thermal.over_limit": read(temp=91),
    "gpu.thermal.memory": read(mem_temp=97),
    "gpu.thermal.slowdown": grown(slowed_hw_thermal=6 * NS),
    "gpu.power.brake": grown(slowed_hw_brake=6 * NS),
    "gpu.power.slowdown": read(clock_reasons=8),
}
"""What makes each rule raise, at the severity that its row has."""

by_code = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
judges_readings = pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.gpu_reads], ids=lambda rule: rule.code
)


# --- the rows -----------------------------------------------------------------------------------------------


def test_every_row_has_a_trigger_and_every_trigger_a_row() -> None:
    assert list(TRIGGERS) == [rule.code for rule in RULES]
    assert not ROWS.keys() & {rule.code for rule in ALL_RULES}


@by_code
def test_a_trigger_raises_its_rule_as_the_row_says(rule: Rule) -> None:
    answer = rule.judge(TRIGGERS[rule.code])
    assert isinstance(answer, Finding)
    assert (answer.code, answer.severity) == (rule.code, rule.severity)
    assert answer.evidence


@by_code
def test_every_row_is_complete(rule: Rule) -> None:
    assert rule.severity is not Severity.OK
    assert rule.blame in Blame
    assert rule.source in {"gpu", "nvml", "host", "pci"}
    assert all([rule.threshold, rule.why, rule.advice, rule.try_it])
    assert rule.judge.__doc__
    assert "Source:" in rule.judge.__doc__
    assert rule.counter == bool(rule.window_s)
    assert rule.gpu_reads or rule.blind or rule.code == "gpu.probe.slow"


@by_code
def test_a_gpu_that_was_unhealthy_is_watched_before_it_is_believed(rule: Rule) -> None:
    if rule.severity is Severity.UNHEALTHY:
        assert rule.probation_ns == int(LIMITS.probation_s * NS)


@pytest.mark.parametrize("readings", [H100, T4], ids=["h100", "t4"])
def test_a_gpu_that_is_well_raises_nothing(readings: Mapping[GpuField, Reading]) -> None:
    view = gpu_view(readings=readings)
    assert [answer for rule in RULES if isinstance(answer := rule.judge(view), Finding | Unreadable)] == []


def test_the_texts_have_the_configured_numbers() -> None:
    rows = {
        rule.code: rule for rule in gpu_rules(GpuLimits(deadline_s=7, dead_s=90, probation_s=11, expect=3))
    }
    assert "older than 7 s" in rows["gpu.not_answering"].threshold
    assert "after 90 s" in rows["gpu.not_answering"].threshold
    assert rows["gpu.lost"].probation_ns == 11 * NS


def test_the_rows_of_the_same_limits_are_made_once() -> None:
    assert gpu_rules(GpuLimits()) is RULES
    assert windows(GpuLimits()) is windows(LIMITS)


# --- missing data -------------------------------------------------------------------------------------------


@judges_readings
def test_what_was_never_there_makes_a_rule_inapplicable(rule: Rule) -> None:
    view = gpu_view({wake.field: ABSENT for wake in rule.gpu_reads})
    assert isinstance(rule.judge(view), RuleNotApplicable)


@judges_readings
def test_what_cannot_be_read_any_more_is_neither_good_nor_bad(rule: Rule) -> None:
    view = gpu_view({wake.field: EIO for wake in rule.gpu_reads})
    answer = rule.judge(view)
    assert isinstance(answer, Unreadable)
    assert answer.what in {wake.field for wake in rule.gpu_reads}
    assert answer.why == EIO


@by_code
def test_a_gpu_that_has_never_been_seen_is_judged_by_what_needs_no_answer(rule: Rule) -> None:
    view = gpu_view(gpu=None, growth={})
    answer = rule.judge(view)
    if rule.blind:
        assert isinstance(answer, Finding) == (rule.code == "gpu.missing")
    else:
        assert isinstance(answer, RuleNotApplicable | RuleNotEvaluated)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.counter], ids=lambda rule: rule.code)
def test_a_counter_without_history_is_not_called_quiet(rule: Rule) -> None:
    growth = {field: Growth(0, 0.0) for field in windows(LIMITS)}
    assert isinstance(rule.judge(gpu_view(growth=growth)), RuleNotEvaluated)


# --- every view ---------------------------------------------------------------------------------------------

readings = st.one_of(
    st.just(ABSENT), st.just(EIO), st.integers(0, 20), st.integers(-10, 200), st.integers(0, 2**64 - 1)
)
every_readings = st.fixed_dictionaries(dict.fromkeys(GpuField, readings))
answers = Finding | Unreadable | RuleNotEvaluated | RuleNotApplicable | None


def view_of(values: Mapping[GpuField, Reading], by: int, code: int, links: int) -> GpuView:
    growth = {
        field: still_one._replace(events=by) if isinstance(still_one.events, int) else still_one
        for field, still_one in still(LIMITS, values).items()
    }
    return gpu_view(readings=values, growth=growth, start=GpuStart(links, True, bool(links % 2)))._replace(
        gpu=gpu_sample(readings=values, status=code)
    )


views = st.builds(
    view_of,
    every_readings,
    st.integers(0, 2**40),
    st.sampled_from([0, 0, 15, 16, 28, 999]),
    st.integers(0, 2**18),
)


@given(views)
def test_every_rule_has_an_answer_to_every_view(view: GpuView) -> None:
    for rule in RULES:
        answer = rule.judge(view)
        assert isinstance(answer, answers)
        if isinstance(answer, Finding):
            assert answer.code == rule.code
            assert answer.evidence
            assert "\n" not in answer.evidence


UNWATCHED: Final = sorted(set(GpuField) - {wake.field for wake in gpu_wakes(LIMITS)})


@given(views, st.sampled_from(UNWATCHED), readings)
def test_a_reading_that_wakes_nobody_changes_no_answer(
    view: GpuView, field: GpuField, value: Reading
) -> None:
    assert view.gpu
    other = view._replace(gpu=replace(view.gpu, readings={**view.gpu.readings, field: value}))
    assert [rule.judge(other) for rule in RULES] == [rule.judge(view) for rule in RULES]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.counter], ids=lambda rule: rule.code)
def test_the_evidence_of_a_rate_does_not_move_with_the_rate(rule: Rule) -> None:
    field = next(wake.field for wake in rule.gpu_reads if wake.mode is GpuWakeMode.RISE)
    found = {rule.judge(gpu_view(grown={field: by})) for by in (10**12, 10**12 + 1, 10**13)}
    assert len(found) == 1


# --- what wakes the core ------------------------------------------------------------------------------------


def test_the_core_is_woken_once_per_field_and_for_every_field_that_is_judged() -> None:
    fields = [wake.field for wake in gpu_wakes(LIMITS)]
    assert len(fields) == len(set(fields))
    assert set(fields) == {wake.field for rule in RULES for wake in rule.gpu_reads}


def test_what_moves_all_the_time_wakes_only_at_its_limit() -> None:
    modes = {wake.field: wake.mode for wake in gpu_wakes(LIMITS)}
    assert modes[GpuField.TEMP] is modes[GpuField.MEM_TEMP] is GpuWakeMode.OVER
    assert modes[GpuField.MARGIN] is modes[GpuField.UTILIZATION] is GpuWakeMode.BELOW
    assert modes[GpuField.CLOCK_REASONS] is GpuWakeMode.BITS
    assert {modes[field] for field in windows(LIMITS)} == {GpuWakeMode.RISE}
    assert not {GpuField.ECC_CORRECTABLE_LIFE, GpuField.SLOWED_SW_POWER} & modes.keys()


def test_rules_that_look_at_different_bits_are_woken_for_all_of_them() -> None:
    wake = next(wake for wake in gpu_wakes(LIMITS) if wake.field is GpuField.CLOCK_REASONS)
    assert wake == GpuWake(GpuField.CLOCK_REASONS, GpuWakeMode.BITS, 0xE8)


def test_counters_wake_when_the_configured_budget_is_used_up() -> None:
    limits = GpuLimits(correctable_errors=7, correctable_window_s=30)
    wake = next(wake for wake in gpu_wakes(limits) if wake.field is GpuField.ECC_CORRECTABLE)
    assert wake == GpuWake(GpuField.ECC_CORRECTABLE, GpuWakeMode.RISE, 7, 30 * NS)
    assert windows(limits)[GpuField.ECC_CORRECTABLE] == 30


# --- words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (60, "1 min"), (90, "90 s"), (3600, "1 h"), (5400, "90 min"), (86400, "1 d")],
)
def test_a_duration_is_told_in_the_largest_unit_that_keeps_it_whole(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("code", "text"), [(15, "GPU_IS_LOST (15)"), (77, "code 77")])
def test_a_return_code_has_nvmls_name(code: int, text: str) -> None:
    assert nvml_name(code) == text


@given(st.lists(st.integers(1, 10**9), min_size=2))
def test_the_text_of_a_growing_count_changes_seldom(counts: list[int]) -> None:
    counts.sort()
    texts = [at_least(count) for count in counts]
    assert all(before == after for before, after in pairwise(texts) if len(before) == len(after) > 1)
    assert all(int(re.sub(r"\D", "", text)) <= count for text, count in zip(texts, counts, strict=True))
    assert len(set(texts)) <= 9 + 9


def test_of_several_answers_the_bad_one_counts_and_then_what_is_not_known() -> None:
    bad, blind = Finding("x", Severity.INFO), Unreadable("x", EIO)
    young, none = RuleNotEvaluated("x"), RuleNotApplicable("x")
    assert foremost(none, OK, young, blind, bad) is bad
    assert foremost(none, OK, young, blind) is blind
    assert foremost(none, OK, young) is young
    assert foremost(none, OK) is OK
    assert foremost(none, none) is none
