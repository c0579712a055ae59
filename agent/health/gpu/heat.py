"""A GPU's heat and power: temperatures against its own limits, and clocks that are held down.

A temperature on its limit swings about it. Views have no past, so there is no second, lower limit to clear
at: instead the cause must be seen in several passes, and is held for a while after the last bad one.
Limits are the GPU's own and none is made up.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.gpu.common import Budget, foremost, over_budget, read
from agent.health.gpu.view import GpuView
from agent.health.rules import OK, RuleNotApplicable, RuleResult, Unreadable, lacking
from agent.health.words import duration
from agent.model.gpu import GpuField
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Absence, Missing
from agent.model.settings import GpuLimits
from agent.model.time import NS
from agent.model.wake import GpuWake, GpuWakeMode

HW_SLOWDOWN: Final = 0x08
SW_THERMAL: Final = 0x20
HW_THERMAL: Final = 0x40
POWER_BRAKE: Final = 0x80
"""Bits of NVML's reasons for clocks below the wanted ones."""

WINDOW_S: Final = 60
SHARE: Final = 10
"""Clocks held down for so many percent of the window are no passing peak."""
HEAT_PASSES: Final = 3
REASON_PASSES: Final = 5
"""The bits flicker: NVML documents that they may be set while clocks merely change."""
HOLD_NS: Final = 60 * NS
"""Told for so long after the last bad look: what swings about a limit is one cause, not many."""


def _held_down(field: GpuField, what: str) -> Budget:
    return Budget(field, WINDOW_S * NS * SHARE // 100, WINDOW_S, what)


HW_TIME: Final = _held_down(GpuField.SLOWED_HW_THERMAL, "ns of thermal slowdown by hardware")
SW_TIME: Final = _held_down(GpuField.SLOWED_SW_THERMAL, "ns of thermal slowdown by the driver")
BRAKE_TIME: Final = _held_down(GpuField.SLOWED_HW_BRAKE, "ns of power brake")
_SHARE_TEXT: Final = f"{SHARE} % of {duration(WINDOW_S)}"


def over_limit(view: GpuView) -> RuleResult:
    """The GPU is as hot as its limit or hotter.

    Source: nvmlDeviceGetTemperature against the slowdown threshold, and nvmlDeviceGetMarginTemperature, the
    distance to the limit on newer GPUs [C].
    """
    temp, limit = read(view, GpuField.TEMP), read(view, GpuField.TEMP_SLOWDOWN)
    margin = read(view, GpuField.MARGIN)
    if isinstance(margin, int) and margin <= 0:
        evidence = "no margin left to the temperature at which clocks are cut"
        return Finding("gpu.thermal.over_limit", Severity.DEGRADED, evidence)
    if isinstance(temp, int) and isinstance(limit, int) and temp >= limit:
        evidence = f"at or above the slowdown limit of {limit} C"
        return Finding("gpu.thermal.over_limit", Severity.DEGRADED, evidence)
    for field, reading in ((GpuField.MARGIN, margin), (GpuField.TEMP, temp)):
        if isinstance(reading, Missing) and reading.absence is Absence.UNREADABLE:
            return Unreadable(field, reading)
    if isinstance(margin, Missing) and (isinstance(temp, Missing) or isinstance(limit, Missing)):
        return RuleNotApplicable("the GPU tells no temperature with a limit")
    return OK


def memory_over_limit(view: GpuView) -> RuleResult:
    """The memory is as hot as its limit or hotter.

    Source: NVML field 82 against the memory threshold [C].
    """
    temp, limit = read(view, GpuField.MEM_TEMP), read(view, GpuField.TEMP_MEM_MAX)
    if isinstance(temp, Missing):
        return lacking(GpuField.MEM_TEMP, temp, "the GPU tells no memory temperature")
    if isinstance(limit, Missing):
        return lacking(GpuField.TEMP_MEM_MAX, limit, "the GPU tells no limit of its memory temperature")
    if temp < limit:
        return OK
    return Finding("gpu.thermal.memory", Severity.DEGRADED, f"at or above the memory's limit of {limit} C")


def _reason(view: GpuView, code: str, bits: int, evidence: str) -> RuleResult:
    """The same by the bits of the moment, for drivers that keep no time."""
    reasons = read(view, GpuField.CLOCK_REASONS)
    if isinstance(reasons, Missing):
        return lacking(GpuField.CLOCK_REASONS, reasons, "the driver gives no reasons for low clocks")
    return Finding(code, Severity.DEGRADED, evidence) if reasons & bits else OK


def _slowed(view: GpuView, code: str, budget: Budget, bits: int, by: str) -> RuleResult:
    spent = over_budget(view, budget, code, Severity.DEGRADED, "no such counter")
    if isinstance(spent, RuleNotApplicable):
        return _reason(view, code, bits, f"clocks are cut by {by}")
    if isinstance(spent, Finding):
        return Finding(code, Severity.DEGRADED, f"clocks cut by {by} for at least {_SHARE_TEXT}")
    return spent


def thermal_slowdown(view: GpuView) -> RuleResult:
    """Clocks are held down for heat, by the hardware or by the driver.

    Source: NVML fields 251 and 252 (driver 580 and later: 269, 270) [ns], their growth; without them the
    reasons' bits of nvmlDeviceGetCurrentClocksEventReasons.
    """
    code = "gpu.thermal.slowdown"
    return foremost(
        _slowed(view, code, HW_TIME, HW_THERMAL, "the hardware for heat"),
        _slowed(view, code, SW_TIME, SW_THERMAL, "the driver for heat"),
    )


def power_brake(view: GpuView) -> RuleResult:
    """The power supply of the machine makes the GPU run at half its clocks or less.

    Source: NVML field 253 (driver 580 and later: 271) [ns], its growth; without it the reason's bit.
    """
    return _slowed(view, "gpu.power.brake", BRAKE_TIME, POWER_BRAKE, "the external power brake")


def power_slowdown(view: GpuView) -> RuleResult:
    """The hardware holds clocks down and names neither heat nor the power brake: it draws too much power.

    Source: nvmlDeviceGetCurrentClocksEventReasons, bit 0x8 without 0x40 and 0x80.
    """
    reasons = read(view, GpuField.CLOCK_REASONS)
    if isinstance(reasons, int) and reasons & (HW_THERMAL | POWER_BRAKE):
        return OK
    evidence = "clocks are cut by the hardware, not for heat"
    return _reason(view, "gpu.power.slowdown", HW_SLOWDOWN, evidence)


def rows(_limits: GpuLimits) -> tuple[Rule, ...]:
    """The rows of these rules. Their limits are the GPU's and the vendor's; nothing is configured."""
    cooling = "check fans, heat sinks, air flow and inlet temperature"
    return (
        Rule(
            code="gpu.thermal.over_limit",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(
                GpuWake(GpuField.TEMP, GpuWakeMode.OVER, limit=GpuField.TEMP_SLOWDOWN),
                GpuWake(GpuField.MARGIN, GpuWakeMode.BELOW, 1),
                GpuWake(GpuField.TEMP_SLOWDOWN),
            ),
            threshold=f"the GPU's own slowdown limit, or a margin of 0 C, in {HEAT_PASSES} passes",
            why="clocks are cut; some degrees more and the GPU shuts itself down",
            advice=cooling,
            judge=over_limit,
            raise_after=HEAT_PASSES,
            probation_ns=HOLD_NS,
            try_it="gpu 0 set temperature=91 temperature.margin=-2",
        ),
        Rule(
            code="gpu.thermal.memory",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(
                GpuWake(GpuField.MEM_TEMP, GpuWakeMode.OVER, limit=GpuField.TEMP_MEM_MAX),
                GpuWake(GpuField.TEMP_MEM_MAX),
            ),
            threshold=f"the memory's own limit, in {HEAT_PASSES} passes",
            why="clocks are cut, and hot memory makes more errors",
            advice=cooling,
            judge=memory_over_limit,
            raise_after=HEAT_PASSES,
            probation_ns=HOLD_NS,
            try_it="gpu 0 set temperature.memory=97",
        ),
        Rule(
            code="gpu.thermal.slowdown",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(
                HW_TIME.wake,
                SW_TIME.wake,
                GpuWake(GpuField.CLOCK_REASONS, GpuWakeMode.BITS, SW_THERMAL | HW_THERMAL),
            ),
            threshold=f"{_SHARE_TEXT}; where no time is kept: {REASON_PASSES} passes in a row",
            why="the GPU runs slower than what was paid for, and whoever waits for it too",
            advice=cooling,
            judge=thermal_slowdown,
            raise_after=REASON_PASSES,
            probation_ns=HOLD_NS,
            counter=True,
            window_s=WINDOW_S,
            try_it=f"gpu 0 set throttle.hw_thermal=+{HW_TIME.events}",
        ),
        Rule(
            code="gpu.power.brake",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(BRAKE_TIME.wake, GpuWake(GpuField.CLOCK_REASONS, GpuWakeMode.BITS, POWER_BRAKE)),
            threshold=f"{_SHARE_TEXT}; where no time is kept: {REASON_PASSES} passes in a row",
            why="the machine's power is short; the GPU runs at half its clocks or less",
            advice="check power supplies, their redundancy and the rack's power limit",
            judge=power_brake,
            raise_after=REASON_PASSES,
            probation_ns=HOLD_NS,
            counter=True,
            window_s=WINDOW_S,
            try_it=f"gpu 0 set throttle.power_brake=+{BRAKE_TIME.events}",
        ),
        Rule(
            code="gpu.power.slowdown",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(
                GpuWake(GpuField.CLOCK_REASONS, GpuWakeMode.BITS, HW_SLOWDOWN | HW_THERMAL | POWER_BRAKE),
            ),
            threshold=f"{REASON_PASSES} passes in a row",
            why="the GPU's own power delivery is at its limit; its clocks are cut to half or less",
            advice="check the power cables and supplies; if it stays, run the vendor's field diagnostic",
            judge=power_slowdown,
            raise_after=REASON_PASSES,
            probation_ns=HOLD_NS,
            try_it="gpu 0 set clocks.reasons=8",
        ),
    )
