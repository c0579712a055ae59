"""The catalogue's rows for GPUs, and what follows from them: windows of counters, and what wakes the core.

Rows with configured limits are made from the configuration, so that every text holds the numbers that count.
"""

from collections.abc import Mapping
from functools import cache

from agent.health.catalog import Rule
from agent.health.gpu import answers as gpu_answers
from agent.health.gpu import driver as gpu_driver
from agent.health.gpu import fabric as gpu_fabric
from agent.health.gpu import heat as gpu_heat
from agent.health.gpu import memory as gpu_memory
from agent.health.gpu import nvlink as gpu_nvlink
from agent.health.gpu import pcie as gpu_pcie
from agent.model.gpu import GpuField
from agent.model.settings import GpuLimits
from agent.model.time import NS
from agent.model.wake import GpuWake, GpuWakeMode


@cache
def gpu_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Every row that is judged from readings, in the order of decision: the driver's own demand is first."""
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
    """The counters whose growth is judged, and over which window [s]."""
    reads = (wake for rule in gpu_rules(limits) for wake in rule.gpu_reads)
    return {wake.field: wake.window_ns // NS for wake in reads if wake.mode is GpuWakeMode.RISE}


def _joined(one: GpuWake, other: GpuWake) -> GpuWake:
    """One wish that covers two of the same field."""
    if one == other:
        return one
    if one.mode is other.mode is GpuWakeMode.BITS:
        return one._replace(threshold=one.threshold | other.threshold)
    return GpuWake(one.field)  # any change: more than either asks for


def gpu_wakes(limits: GpuLimits) -> tuple[GpuWake, ...]:
    """What the native core must wake for, so that every rule sees what it judges: one wish per field.

    What the rules do not judge wakes nobody, and a counter does so only when a budget is used up.
    """
    found: dict[GpuField, GpuWake] = {}
    for rule in gpu_rules(limits):
        for wake in rule.gpu_reads:
            found[wake.field] = _joined(found.get(wake.field, wake), wake)
    return tuple(found.values())
