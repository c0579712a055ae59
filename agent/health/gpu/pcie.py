"""Rules for a GPU's PCIe link: its width, its speed (generation), and its errors.

An idle link slows down to save power, so its generation is evaluated only under load.
"""

from typing import Final

from agent.health.gpu.rule_input import (
    GpuRuleInput,
    GrowthLimit,
    gpu_probation_ns,
    gpu_reading,
    growth_limit_result,
    hardware_rule,
)
from agent.health.rules import OK, Rule, RuleInconclusive, RuleResult, missing_reading_result
from agent.model.gpu import GpuField, GpuWakeCondition, GpuWakeMode
from agent.model.health import Finding, Repair, Severity
from agent.model.reading import Missing
from agent.model.settings import GpuLimits
from agent.model.time import NS

BUSY_PERCENT: Final = 50
"""Utilization of the GPU from which on it is under load [%]."""
FASTEST_IDLE_PSTATE: Final = 3
"""Lowest performance state number of an idle GPU; 0 to 2 are states under load."""
GEN_S: Final = 30
"""Time for which the PCIe link must be slow [s]: three readings, as a link speeds up only under load."""

NO_LINK: Final = "the driver reports no PCIe link: a virtual machine, or an integrated GPU"
NO_AER: Final = "no PCIe error counters: the kernel or the platform has no AER"

REPLAYS: Final = GrowthLimit(GpuField.PCIE_REPLAY, 9, 60, "PCIe replays")
"""Limit for PCIe replays: NVIDIA's health checks (DCGM) tolerate 8 a minute."""
CORRECTABLE: Final = GrowthLimit(GpuField.AER_CORRECTABLE, 100, 60, "correctable PCIe errors")
"""Limit for corrected PCIe errors: a good link has a few errors a day, a bad link one or two a second."""
NONFATAL: Final = GrowthLimit(GpuField.AER_NONFATAL, 1, 600, "non-fatal PCIe errors")
FATAL: Final = GrowthLimit(GpuField.AER_FATAL, 1, 600, "fatal PCIe errors")


def evaluate_link_width(view: GpuRuleInput) -> RuleResult:
    """The PCIe link has lost lanes.

    Source: nvmlDeviceGetCurrPcieLinkWidth compared with nvmlDeviceGetMaxPcieLinkWidth, which is the most that
    both GPU and slot support [lanes].
    """
    current, maximum = gpu_reading(view, GpuField.PCIE_WIDTH), gpu_reading(view, GpuField.PCIE_WIDTH_MAX)
    if isinstance(current, Missing):
        return missing_reading_result(GpuField.PCIE_WIDTH, current, NO_LINK)
    if isinstance(maximum, Missing):
        return missing_reading_result(GpuField.PCIE_WIDTH_MAX, maximum, NO_LINK)
    if current >= maximum:
        return OK
    return Finding("gpu.pcie.width", Severity.DEGRADED, f"{current} of {maximum} lanes")


def _is_idle(view: GpuRuleInput) -> bool:
    """Return whether the GPU is idle, so that a slow link is normal; True also if the GPU's load cannot be
    read."""
    busy, state = gpu_reading(view, GpuField.UTILIZATION), gpu_reading(view, GpuField.PSTATE)
    if isinstance(busy, Missing) or busy < BUSY_PERCENT:
        return True
    return isinstance(state, int) and state >= FASTEST_IDLE_PSTATE


def evaluate_link_generation(view: GpuRuleInput) -> RuleResult:
    """The PCIe link runs at a lower generation than possible while the GPU is under load.

    Source: nvmlDeviceGetCurrPcieLinkGeneration compared with nvmlDeviceGetMaxPcieLinkGeneration; load from
    nvmlDeviceGetUtilizationRates [%] and, if available, nvmlDeviceGetPerformanceState.
    """
    current, maximum = gpu_reading(view, GpuField.PCIE_GEN), gpu_reading(view, GpuField.PCIE_GEN_MAX)
    if isinstance(current, Missing):
        return missing_reading_result(GpuField.PCIE_GEN, current, NO_LINK)
    if isinstance(maximum, Missing):
        return missing_reading_result(GpuField.PCIE_GEN_MAX, maximum, NO_LINK)
    if current >= maximum:
        return OK
    if _is_idle(view):
        return RuleInconclusive("needs load: an idle link slows down")
    return Finding("gpu.pcie.gen", Severity.DEGRADED, f"generation {current} of {maximum} under load")


def evaluate_replays(view: GpuRuleInput) -> RuleResult:
    """The PCIe link repeats packets more often than the limit allows.

    Source: growth of NVML field 94 [count].
    """
    return growth_limit_result(
        view, REPLAYS, "gpu.pcie.replay", Severity.DEGRADED, "the driver counts no replays"
    )


def evaluate_correctable_errors(view: GpuRuleInput) -> RuleResult:
    """The PCIe link corrects errors more often than the limit allows.

    Source: growth of ``/sys/bus/pci/devices/<bus>/aer_dev_correctable``, TOTAL_ERR_COR [count].
    """
    return growth_limit_result(view, CORRECTABLE, "gpu.pcie.aer.correctable", Severity.DEGRADED, NO_AER)


def evaluate_nonfatal_errors(view: GpuRuleInput) -> RuleResult:
    """A PCIe transaction with the GPU was lost; the link continues to work.

    Source: growth of ``aer_dev_nonfatal`` [count].
    """
    return growth_limit_result(view, NONFATAL, "gpu.pcie.aer.nonfatal", Severity.DEGRADED, NO_AER)


def evaluate_fatal_errors(view: GpuRuleInput) -> RuleResult:
    """The PCIe link to the GPU failed; later readings may be wrong.

    Source: growth of ``aer_dev_fatal`` [count].
    """
    return growth_limit_result(view, FATAL, "gpu.pcie.aer.fatal", Severity.UNHEALTHY, NO_AER)


def pcie_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return the rules for a GPU's PCIe link. ``limits`` sets how long ended faults are reported."""
    reseat = "reseat the GPU, check riser and cables; compare with other slots"
    aer = "in a copy of sysfs (--sysfs-root) add {} to {} in bus/pci/devices/<bus>/{}"
    return (
        hardware_rule(
            code="gpu.pcie.aer.fatal",
            severity=Severity.UNHEALTHY,
            gpu_reads=(FATAL.wake,),
            threshold=FATAL.text,
            why="the link was reset; the workload has lost its GPU",
            advice="drain the GPU and reset it; " + reseat,
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_fatal_errors,
            probation_ns=gpu_probation_ns(limits),
            counts_growth=True,
            window_s=FATAL.window_s,
            limit_in_view="rule_limit",
            try_it=aer.format(FATAL.events, "TOTAL_ERR_FATAL", "aer_dev_fatal"),
        ),
        hardware_rule(
            code="gpu.pcie.aer.nonfatal",
            severity=Severity.DEGRADED,
            gpu_reads=(NONFATAL.wake,),
            threshold=NONFATAL.text,
            why="a transfer failed, and such a link often fails later",
            advice=reseat,
            evaluate=evaluate_nonfatal_errors,
            counts_growth=True,
            window_s=NONFATAL.window_s,
            limit_in_view="rule_limit",
            try_it=aer.format(NONFATAL.events, "TOTAL_ERR_NONFATAL", "aer_dev_nonfatal"),
        ),
        hardware_rule(
            code="gpu.pcie.aer.correctable",
            severity=Severity.DEGRADED,
            gpu_reads=(CORRECTABLE.wake,),
            threshold=CORRECTABLE.text,
            why="each error costs little time, but this many show a bad contact or lane",
            advice=reseat,
            evaluate=evaluate_correctable_errors,
            counts_growth=True,
            window_s=CORRECTABLE.window_s,
            limit_in_view="rule_limit",
            try_it=aer.format(CORRECTABLE.events, "TOTAL_ERR_COR", "aer_dev_correctable"),
        ),
        hardware_rule(
            code="gpu.pcie.replay",
            severity=Severity.DEGRADED,
            gpu_reads=(REPLAYS.wake,),
            threshold=REPLAYS.text,
            why="the link is noisy: transfers are slow, and uncorrectable errors follow",
            advice=reseat,
            evaluate=evaluate_replays,
            counts_growth=True,
            window_s=REPLAYS.window_s,
            limit_in_view="rule_limit",
            try_it=f"gpu 0 set pcie.replay=+{REPLAYS.events}",
        ),
        hardware_rule(
            code="gpu.pcie.width",
            severity=Severity.DEGRADED,
            gpu_reads=(GpuWakeCondition(GpuField.PCIE_WIDTH), GpuWakeCondition(GpuField.PCIE_WIDTH_MAX)),
            threshold="fewer lanes than both GPU and slot support",
            why="transfers to and from the machine are slower in proportion to the lost lanes",
            advice=reseat,
            evaluate=evaluate_link_width,
            try_it="gpu 0 set pcie.width=8",
        ),
        hardware_rule(
            code="gpu.pcie.gen",
            severity=Severity.DEGRADED,
            gpu_reads=(
                GpuWakeCondition(GpuField.PCIE_GEN),
                GpuWakeCondition(GpuField.PCIE_GEN_MAX),
                GpuWakeCondition(GpuField.UTILIZATION, GpuWakeMode.BELOW, BUSY_PERCENT),
                GpuWakeCondition(GpuField.PSTATE, GpuWakeMode.BELOW, FASTEST_IDLE_PSTATE),
            ),
            threshold=f"a lower generation than both GPU and slot support, {BUSY_PERCENT} % busy or more, "
            f"for {GEN_S} s",
            why="each lower generation halves the speed of transfers",
            advice="check the slot's setting in the firmware; " + reseat,
            evaluate=evaluate_link_generation,
            raise_ns=GEN_S * NS,
            try_it="gpu 0 set pcie.gen=1 utilization.gpu=90",
        ),
    )
