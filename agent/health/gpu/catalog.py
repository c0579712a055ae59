"""Catalog of the rules for GPUs, the windows of their counters, and the changes that wake the engine.

The catalog rows of rules with configured limits are made from the configuration, so that their texts contain
the limits in effect.
"""

from collections.abc import Mapping
from functools import cache

from agent.health.gpu import answers as gpu_answers
from agent.health.gpu import driver as gpu_driver
from agent.health.gpu import fabric as gpu_fabric
from agent.health.gpu import heat as gpu_heat
from agent.health.gpu import memory as gpu_memory
from agent.health.gpu import nvlink as gpu_nvlink
from agent.health.gpu import pcie as gpu_pcie
from agent.health.rules import Rule
from agent.model.gpu import GpuField
from agent.model.settings import GpuLimits
from agent.model.time import NS
from agent.model.wake import GpuWake, GpuWakeMode


@cache
def gpu_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return all rules that evaluate GPU readings, in report order: the driver's recovery action is first."""
    return (
        *gpu_answers.rows(limits),
        *gpu_driver.rows(limits),
        *gpu_memory.rows(limits),
        *gpu_nvlink.rows(limits),
        *gpu_fabric.rows(limits),
        *gpu_pcie.rows(limits),
        *gpu_heat.rows(limits),
    )


@cache
def windows(limits: GpuLimits) -> Mapping[GpuField, int]:
    """Return the window of each GPU counter whose growth the rules evaluate [s]."""
    reads = (wake for rule in gpu_rules(limits) for wake in rule.gpu_reads)
    return {wake.field: wake.window_ns // NS for wake in reads if wake.mode is GpuWakeMode.RISE}


def _merge_wakes(first: GpuWake, second: GpuWake) -> GpuWake:
    """Return one wake-up condition of a GPU field that covers two conditions of the same field."""
    if first == second:
        return first
    if first.mode is second.mode is GpuWakeMode.BITS:
        return first._replace(threshold=first.threshold | second.threshold)
    return GpuWake(first.field)  # any change, which includes both


def gpu_wakes(limits: GpuLimits) -> tuple[GpuWake, ...]:
    """Return the changes of GPU fields for which the native core must wake the engine, at most one per field.

    Other fields do not wake the engine, and a counter does so only when it reaches a limit.
    """
    found: dict[GpuField, GpuWake] = {}
    for rule in gpu_rules(limits):
        for wake in rule.gpu_reads:
            found[wake.field] = _merge_wakes(found.get(wake.field, wake), wake)
    return tuple(found.values())
