"""Rules for heat and power: temperatures above the GPU's own limits, and clocks reduced for heat or power.

A temperature oscillates around its limit. So a fault is raised after several passes (readings) above the
limit, and is still reported for some time after the last such pass.
"""

from typing import Final

from agent.health.gpu.rule_input import (
    GpuRuleInput,
    GrowthLimit,
    gpu_reading,
    growth_limit_result,
    hardware_rule,
    worst_result,
)
from agent.health.rules import (
    OK,
    Rule,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
    format_duration,
    missing_reading_result,
)
from agent.model.gpu import GpuField, GpuWakeCondition, GpuWakeMode
from agent.model.health import Finding, Severity
from agent.model.reading import Absence, Missing
from agent.model.settings import GpuLimits
from agent.model.time import NS

HW_SLOWDOWN: Final = 0x08
SW_THERMAL: Final = 0x20
HW_THERMAL: Final = 0x40
POWER_BRAKE: Final = 0x80
"""Bit for the power brake in NVML's reasons for reduced clocks."""

WINDOW_S: Final = 60
SHARE_PERCENT: Final = 10
"""Smallest share of the window with reduced clocks that is a finding [%]; short peaks are normal."""
HEAT_PASSES: Final = 3
REASON_PASSES: Final = 5
"""Consecutive passes with the bit set that are a finding; NVML may also set the bit while clocks change."""
HOLD_NS: Final = 60 * NS
"""Time for which a fault is held after the last bad pass, so that an oscillating value is one fault [ns]."""


def _held_finding(code: str, evidence: str, window_s: int = 0) -> Finding:
    """Return a finding whose evidence states for how long the fault is reported after it has ended.

    The evidence contains no time of day, because the time would change with each oscillation.

    Args:
        window_s: Window of the counter in which the finding was found [s]; 0: the finding is from one
            reading.
    """
    held = format_duration(window_s + HOLD_NS // NS)
    end = f"at most {held}" if window_s else held
    return Finding(code, Severity.DEGRADED, f"{evidence} (reported until {end} after the end)")


def _slowdown_budget(field: GpuField, events_text: str) -> GrowthLimit:
    return GrowthLimit(field, WINDOW_S * NS * SHARE_PERCENT // 100, WINDOW_S, events_text)


HW_TIME: Final = _slowdown_budget(GpuField.SLOWED_HW_THERMAL, "ns of thermal slowdown by hardware")
SW_TIME: Final = _slowdown_budget(GpuField.SLOWED_SW_THERMAL, "ns of thermal slowdown by the driver")
BRAKE_TIME: Final = _slowdown_budget(GpuField.SLOWED_HW_BRAKE, "ns of power brake")
_SHARE_TEXT: Final = f"{SHARE_PERCENT} % of {format_duration(WINDOW_S)}"


def evaluate_gpu_temperature(view: GpuRuleInput) -> RuleResult:
    """The GPU has reached its temperature limit.

    Source: nvmlDeviceGetTemperature compared with the slowdown threshold, and nvmlDeviceGetMarginTemperature,
    the distance to the limit on newer GPUs [C].
    """
    temp, limit = gpu_reading(view, GpuField.TEMP), gpu_reading(view, GpuField.TEMP_SLOWDOWN)
    margin = gpu_reading(view, GpuField.MARGIN)
    if isinstance(margin, int) and margin <= 0:
        evidence = "no margin left to the temperature at which clocks are reduced"
        return _held_finding("gpu.thermal.over_limit", evidence)
    if isinstance(temp, int) and isinstance(limit, int) and temp >= limit:
        evidence = f"at or above the slowdown limit of {limit} C"
        return _held_finding("gpu.thermal.over_limit", evidence)
    for field, reading in ((GpuField.MARGIN, margin), (GpuField.TEMP, temp)):
        if isinstance(reading, Missing) and reading.absence is Absence.UNREADABLE:
            return RuleInputUnreadable(field, reading)
    if isinstance(margin, Missing) and (isinstance(temp, Missing) or isinstance(limit, Missing)):
        return RuleNotApplicable("the GPU reports no temperature with a limit")
    return OK


def evaluate_memory_temperature(view: GpuRuleInput) -> RuleResult:
    """The GPU's memory has reached its temperature limit.

    Source: NVML field 82 compared with the memory threshold [C].
    """
    temp, limit = gpu_reading(view, GpuField.MEM_TEMP), gpu_reading(view, GpuField.TEMP_MEM_MAX)
    if isinstance(temp, Missing):
        return missing_reading_result(GpuField.MEM_TEMP, temp, "the GPU reports no memory temperature")
    if isinstance(limit, Missing):
        return missing_reading_result(
            GpuField.TEMP_MEM_MAX, limit, "the GPU reports no limit for its memory temperature"
        )
    if temp < limit:
        return OK
    return _held_finding("gpu.thermal.memory", f"at or above the memory's limit of {limit} C")


def _clock_reason_result(view: GpuRuleInput, code: str, bits: int, evidence: str) -> RuleResult:
    """Return a finding if NVML's current reasons for reduced clocks contain a bit of ``bits``, else OK."""
    reasons = gpu_reading(view, GpuField.CLOCK_REASONS)
    if isinstance(reasons, Missing):
        return missing_reading_result(
            GpuField.CLOCK_REASONS, reasons, "the driver reports no reasons for reduced clocks"
        )
    return _held_finding(code, evidence) if reasons & bits else OK


def _slowdown_result(view: GpuRuleInput, code: str, budget: GrowthLimit, bits: int, by: str) -> RuleResult:
    """Return the result of a rule for reduced clocks. The result follows from NVML's counter of the time with
    reduced clocks. If NVML has no such counter, it follows from NVML's present reasons for the reduction."""
    result = growth_limit_result(view, budget, code, Severity.DEGRADED, "no such counter")
    if isinstance(result, RuleNotApplicable):
        return _clock_reason_result(view, code, bits, f"clocks are reduced by {by}")
    if isinstance(result, Finding):
        return _held_finding(code, f"clocks reduced by {by} for at least {_SHARE_TEXT}", WINDOW_S)
    return result


def evaluate_thermal_slowdown(view: GpuRuleInput) -> RuleResult:
    """The hardware or the driver reduces clocks because of heat.

    Source: growth of NVML fields 251 and 252 (driver 580 and later: 269, 270) [ns]; without them, the bits of
    nvmlDeviceGetCurrentClocksEventReasons.
    """
    code = "gpu.thermal.slowdown"
    return worst_result(
        _slowdown_result(view, code, HW_TIME, HW_THERMAL, "the hardware because of heat"),
        _slowdown_result(view, code, SW_TIME, SW_THERMAL, "the driver because of heat"),
    )


def evaluate_power_brake(view: GpuRuleInput) -> RuleResult:
    """The machine's power supply limits the GPU to half its clocks or less.

    Source: growth of NVML field 253 (driver 580 and later: 271) [ns]; without it, the bit of the clock
    reasons.
    """
    return _slowdown_result(view, "gpu.power.brake", BRAKE_TIME, POWER_BRAKE, "the external power brake")


def evaluate_power_slowdown(view: GpuRuleInput) -> RuleResult:
    """The hardware reduces clocks because the GPU draws too much power, not because of heat or the power
    brake.

    Source: nvmlDeviceGetCurrentClocksEventReasons, bit 0x8 without 0x40 and 0x80.
    """
    reasons = gpu_reading(view, GpuField.CLOCK_REASONS)
    if isinstance(reasons, int) and reasons & (HW_THERMAL | POWER_BRAKE):
        return OK
    evidence = "clocks are reduced by the hardware, not because of heat"
    return _clock_reason_result(view, "gpu.power.slowdown", HW_SLOWDOWN, evidence)


def heat_rules(_limits: GpuLimits) -> tuple[Rule, ...]:
    """Return the rules for heat, power and clocks. Their limits cannot be configured."""
    cooling = "check fans, heat sinks, air flow and inlet temperature"
    return (
        hardware_rule(
            code="gpu.thermal.over_limit",
            severity=Severity.DEGRADED,
            gpu_reads=(
                GpuWakeCondition(GpuField.TEMP, GpuWakeMode.OVER, limit=GpuField.TEMP_SLOWDOWN),
                GpuWakeCondition(GpuField.MARGIN, GpuWakeMode.BELOW, 1),
                GpuWakeCondition(GpuField.TEMP_SLOWDOWN),
            ),
            threshold=f"the GPU's own slowdown limit, or a margin of 0 C, in {HEAT_PASSES} passes",
            why="clocks are reduced; some degrees more, and the GPU shuts itself down",
            advice=cooling,
            evaluate=evaluate_gpu_temperature,
            raise_after=HEAT_PASSES,
            probation_ns=HOLD_NS,
            try_it="gpu 0 set temperature=91 temperature.margin=-2",
        ),
        hardware_rule(
            code="gpu.thermal.memory",
            severity=Severity.DEGRADED,
            gpu_reads=(
                GpuWakeCondition(GpuField.MEM_TEMP, GpuWakeMode.OVER, limit=GpuField.TEMP_MEM_MAX),
                GpuWakeCondition(GpuField.TEMP_MEM_MAX),
            ),
            threshold=f"the memory's own limit, in {HEAT_PASSES} passes",
            why="clocks are reduced, and hot memory has more errors",
            advice=cooling,
            evaluate=evaluate_memory_temperature,
            raise_after=HEAT_PASSES,
            probation_ns=HOLD_NS,
            try_it="gpu 0 set temperature.memory=97",
        ),
        hardware_rule(
            code="gpu.thermal.slowdown",
            severity=Severity.DEGRADED,
            gpu_reads=(
                HW_TIME.wake,
                SW_TIME.wake,
                GpuWakeCondition(GpuField.CLOCK_REASONS, GpuWakeMode.BITS, SW_THERMAL | HW_THERMAL),
            ),
            threshold=f"{_SHARE_TEXT}; without time counters: {REASON_PASSES} passes in a row",
            why="the GPU is slow, and so are all processes that wait for it",
            advice=cooling,
            evaluate=evaluate_thermal_slowdown,
            raise_after=REASON_PASSES,
            probation_ns=HOLD_NS,
            counts_growth=True,
            window_s=WINDOW_S,
            try_it=f"gpu 0 set throttle.hw_thermal=+{HW_TIME.events}",
        ),
        hardware_rule(
            code="gpu.power.brake",
            severity=Severity.DEGRADED,
            gpu_reads=(
                BRAKE_TIME.wake,
                GpuWakeCondition(GpuField.CLOCK_REASONS, GpuWakeMode.BITS, POWER_BRAKE),
            ),
            threshold=f"{_SHARE_TEXT}; without time counters: {REASON_PASSES} passes in a row",
            why="the machine lacks power; the GPU runs at half its clocks or less",
            advice="check power supplies, their redundancy and the rack's power limit",
            evaluate=evaluate_power_brake,
            raise_after=REASON_PASSES,
            probation_ns=HOLD_NS,
            counts_growth=True,
            window_s=WINDOW_S,
            try_it=f"gpu 0 set throttle.power_brake=+{BRAKE_TIME.events}",
        ),
        hardware_rule(
            code="gpu.power.slowdown",
            severity=Severity.DEGRADED,
            gpu_reads=(
                GpuWakeCondition(
                    GpuField.CLOCK_REASONS, GpuWakeMode.BITS, HW_SLOWDOWN | HW_THERMAL | POWER_BRAKE
                ),
            ),
            threshold=f"{REASON_PASSES} passes in a row",
            why="the GPU's power delivery is at its limit; its clocks are reduced to half or less",
            advice="check power cables and supplies; if the cause stays, run the vendor's field diagnostic",
            evaluate=evaluate_power_slowdown,
            raise_after=REASON_PASSES,
            probation_ns=HOLD_NS,
            try_it="gpu 0 set clocks.reasons=8",
        ),
    )
