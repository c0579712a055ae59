"""Rules for temperatures and reduced clocks: by time counters, else by clock reasons."""

from typing import Final

import pytest
from gpu_samples import ABSENT, EIO, LIMITS, T4, gpu_view

from agent.health.gpu.heat import HOLD_NS
from agent.health.gpu.rule_input import GpuRuleInput
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
from agent.model.time import NS

ROWS: Final = {rule.code: rule for rule in gpu_rules(LIMITS)}
HOT: Final = "gpu.thermal.over_limit"
MEMORY: Final = "gpu.thermal.memory"
SLOWED: Final = "gpu.thermal.slowdown"
BRAKE: Final = "gpu.power.brake"
POWER: Final = "gpu.power.slowdown"
TENTH: Final = 6 * NS
"""10 % of a minute."""


def heat(temp: Reading, limit: Reading = 89, margin: Reading = 54) -> GpuRuleInput:
    return gpu_view({GpuField.TEMP: temp, GpuField.TEMP_SLOWDOWN: limit, GpuField.MARGIN: margin})


def memory(temp: Reading, limit: Reading = 95) -> GpuRuleInput:
    return gpu_view({GpuField.MEM_TEMP: temp, GpuField.TEMP_MEM_MAX: limit})


def heat_view(
    hardware: CounterGrowth | int = 0, driver: CounterGrowth | int = 0, reasons: Reading = 0
) -> GpuRuleInput:
    grown = {GpuField.SLOWED_HW_THERMAL: hardware, GpuField.SLOWED_SW_THERMAL: driver}
    return gpu_view({GpuField.CLOCK_REASONS: reasons}, grown=grown)


def power_brake_view(growth: CounterGrowth | int, reasons: Reading = 0) -> GpuRuleInput:
    return gpu_view({GpuField.CLOCK_REASONS: reasons}, grown={GpuField.SLOWED_HW_BRAKE: growth})


def reasons(bits: Reading) -> GpuRuleInput:
    return gpu_view({GpuField.CLOCK_REASONS: bits})


def bad(code: str, text: str, held: str = "1 min") -> Finding:
    return Finding(code, Severity.DEGRADED, f"{text} (reported until {held} after the end)")


def counter_finding(code: str, text: str) -> Finding:
    """Return the finding from a counter of the last minute."""
    return bad(code, text, "at most 2 min")


NONE: Final = CounterGrowth(ABSENT, 0.0)
BROKEN: Final = CounterGrowth(EIO, 0.0)
NO_REASONS: Final = RuleNotApplicable("the driver reports no reasons for reduced clocks")
CASES: Final[list[tuple[str, GpuRuleInput, RuleResult]]] = [
    # --- gpu.thermal.over_limit
    (HOT, heat(33), OK),
    (HOT, heat(88), OK),
    (HOT, heat(89), bad(HOT, "at or above the slowdown limit of 89 C")),
    (HOT, heat(120), bad(HOT, "at or above the slowdown limit of 89 C")),
    (HOT, heat(33, margin=1), OK),
    (HOT, heat(33, margin=0), bad(HOT, "no margin left to the temperature at which clocks are reduced")),
    (HOT, heat(33, margin=-7), bad(HOT, "no margin left to the temperature at which clocks are reduced")),
    (HOT, heat(99, limit=ABSENT, margin=3), OK),  # newer GPUs report only the margin
    (HOT, heat(92, limit=93, margin=ABSENT), OK),
    (HOT, heat(93, limit=93, margin=ABSENT), bad(HOT, "at or above the slowdown limit of 93 C")),
    (HOT, heat(89, margin=EIO), bad(HOT, "at or above the slowdown limit of 89 C")),
    (HOT, heat(33, margin=EIO), RuleInputUnreadable("margin", EIO)),
    (HOT, heat(EIO), RuleInputUnreadable("temp", EIO)),
    (HOT, heat(99, limit=ABSENT, margin=ABSENT),
     RuleNotApplicable("the GPU reports no temperature with a limit")),
    (HOT, heat(ABSENT, margin=ABSENT), RuleNotApplicable("the GPU reports no temperature with a limit")),
    # --- gpu.thermal.memory
    (MEMORY, memory(94), OK),
    (MEMORY, memory(95), bad(MEMORY, "at or above the memory's limit of 95 C")),
    (MEMORY, memory(EIO), RuleInputUnreadable("mem_temp", EIO)),
    (MEMORY, memory(ABSENT), RuleNotApplicable("the GPU reports no memory temperature")),
    (MEMORY, memory(94, ABSENT), RuleNotApplicable("the GPU reports no limit for its memory temperature")),
    # --- gpu.thermal.slowdown
    (SLOWED, heat_view(), OK),
    (SLOWED, heat_view(TENTH - 1, TENTH - 1), OK),
    (SLOWED, heat_view(TENTH),
     counter_finding(SLOWED, "clocks reduced by the hardware because of heat for at least 10 % of 1 min")),
    (SLOWED, heat_view(0, TENTH),
     counter_finding(SLOWED, "clocks reduced by the driver because of heat for at least 10 % of 1 min")),
    (SLOWED, heat_view(0, 0, 0x60), OK),  # time is kept: the bits of the moment do not count
    (SLOWED, heat_view(CounterGrowth(0, 59.0)), RuleInconclusive("needs 1 min of history")),
    (SLOWED, heat_view(CounterGrowth(TENTH, 7.0)),
     counter_finding(SLOWED, "clocks reduced by the hardware because of heat for at least 10 % of 1 min")),
    (SLOWED, heat_view(BROKEN, 0), RuleInputUnreadable("slowed_hw_thermal", EIO)),
    (SLOWED, heat_view(NONE, NONE, 0x1), OK),
    (SLOWED, heat_view(NONE, NONE, 0x40), bad(SLOWED, "clocks are reduced by the hardware because of heat")),
    (SLOWED, heat_view(NONE, NONE, 0x20), bad(SLOWED, "clocks are reduced by the driver because of heat")),
    (SLOWED, heat_view(NONE, NONE, EIO), RuleInputUnreadable("clock_reasons", EIO)),
    (SLOWED, heat_view(NONE, NONE, ABSENT), NO_REASONS),
    (SLOWED, heat_view(0, NONE, ABSENT), OK),  # one of the two is enough to judge by
    # --- gpu.power.brake
    (BRAKE, power_brake_view(TENTH - 1), OK),
    (BRAKE, power_brake_view(TENTH),
     counter_finding(BRAKE, "clocks reduced by the external power brake for at least 10 % of 1 min")),
    (BRAKE, power_brake_view(0, 0x80), OK),
    (BRAKE, power_brake_view(CounterGrowth(0, 1.0)), RuleInconclusive("needs 1 min of history")),
    (BRAKE, power_brake_view(BROKEN), RuleInputUnreadable("slowed_hw_brake", EIO)),
    (BRAKE, power_brake_view(NONE, 0x40), OK),
    (BRAKE, power_brake_view(NONE, 0x80), bad(BRAKE, "clocks are reduced by the external power brake")),
    (BRAKE, power_brake_view(NONE, ABSENT), NO_REASONS),
    # --- gpu.power.slowdown
    (POWER, reasons(0x4), OK),  # the driver's own power cap is how GPUs work
    (POWER, reasons(0x8), bad(POWER, "clocks are reduced by the hardware, not because of heat")),
    (POWER, reasons(0x48), OK),
    (POWER, reasons(0x88), OK),
    (POWER, reasons(EIO), RuleInputUnreadable("clock_reasons", EIO)),
    (POWER, reasons(ABSENT), NO_REASONS),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_rule_returns_expected_result_for_view(code: str, view: GpuRuleInput, answer: RuleResult) -> None:
    assert ROWS[code].evaluate(view) == answer


@pytest.mark.parametrize("code", [HOT, MEMORY, SLOWED, BRAKE, POWER])
def test_heat_needs_several_passes_and_is_held(code: str) -> None:
    assert ROWS[code].raise_after >= 3
    assert ROWS[code].probation_ns == HOLD_NS


def test_t4_is_evaluated_by_temperature_and_clock_reasons() -> None:
    hot = gpu_view({GpuField.TEMP: 93}, readings=T4)
    assert isinstance(ROWS[HOT].evaluate(hot), Finding)
