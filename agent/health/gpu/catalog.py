"""Catalog of all rules for GPU readings, and the readings that the rules need from the native core."""

from collections.abc import Mapping
from functools import cache

from agent.health.gpu.driver import driver_rules
from agent.health.gpu.fabric import fabric_rules
from agent.health.gpu.heat import heat_rules
from agent.health.gpu.memory import memory_rules
from agent.health.gpu.nvlink import nvlink_rules
from agent.health.gpu.pcie import pcie_rules
from agent.health.gpu.responsiveness import responsiveness_rules
from agent.health.rule_changes import lowest_limit
from agent.health.rules import Rule
from agent.model.gpu import GpuField
from agent.model.settings import GpuLimits, RuleOverride
from agent.model.time import NS
from agent.model.wake_conditions import GpuWakeCondition, GpuWakeMode


@cache
def gpu_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return all rules for GPU readings, in report order; their texts contain the configured limits."""
    return (
        *responsiveness_rules(limits),
        *driver_rules(limits),
        *memory_rules(limits),
        *nvlink_rules(limits),
        *fabric_rules(limits),
        *pcie_rules(limits),
        *heat_rules(limits),
    )


@cache
def counter_windows_s(limits: GpuLimits) -> Mapping[GpuField, int]:
    """Return the length of the window in which the rules evaluate the growth of each counter [s]."""
    reads = (wake for rule in gpu_rules(limits) for wake in rule.gpu_reads)
    return {wake.field: wake.window_ns // NS for wake in reads if wake.mode is GpuWakeMode.RISE}


def _merge_wakes(first: GpuWakeCondition, second: GpuWakeCondition) -> GpuWakeCondition:
    """Return one condition for waking the engine that covers two such conditions of the same GPU field."""
    if first == second:
        return first
    if first.mode is second.mode is GpuWakeMode.BITS:
        return first._replace(threshold=first.threshold | second.threshold)
    return GpuWakeCondition(first.field)  # any change, which includes both


def gpu_wakes(limits: GpuLimits, overrides: tuple[RuleOverride, ...] = ()) -> tuple[GpuWakeCondition, ...]:
    """Return the changes of GPU fields for which the native core must wake the engine, at most one per field.

    Other fields do not wake the engine, and a counter does so only when it reaches a limit: that of its rule,
    or a lower one that the operator sets for some GPU (``overrides``).
    """
    found: dict[GpuField, GpuWakeCondition] = {}
    for rule in gpu_rules(limits):
        for wake in rule.gpu_reads:
            if rule.limit_in_view and wake.mode is GpuWakeMode.RISE:
                wake = wake._replace(threshold=lowest_limit(overrides, rule.code, wake.threshold))
            found[wake.field] = _merge_wakes(found.get(wake.field, wake), wake)
    return tuple(found.values())
