"""Tables of the host's health rules by kind of device, and of the sources that the verdicts depend on."""

from collections.abc import Mapping
from itertools import chain
from typing import Final

from agent.devices.inventory import DeviceKind
from agent.health.host.cgroup.rules import CGROUP_RULES
from agent.health.host.cpu.rules import CPU_RULES, DECLARED_CPU_RULES
from agent.health.host.hugepages.rules import DECLARED_POOL_RULES, POOL_RULES
from agent.health.host.machine.log_rules import MACHINE_LOG_RULES
from agent.health.host.machine.rules import MACHINE_RULES
from agent.health.host.memory.rules import DECLARED_MEMORY_RULES, MEMORY_RULES
from agent.health.host.nic.rules import NIC_RULES
from agent.health.host.pci.rules import PCI_RULES
from agent.health.rule_changes import lowest_limit
from agent.health.rules import Rule
from agent.model.settings import RuleOverride
from agent.model.time import NS
from agent.model.wake_conditions import SamplerField, WakeCondition

HOST_RULES: Final[Mapping[DeviceKind, tuple[Rule, ...]]] = {
    DeviceKind.CPU: CPU_RULES,
    DeviceKind.MEMORY: MEMORY_RULES,
    DeviceKind.HUGEPAGES: POOL_RULES,
}
"""Rules for the devices that the agent itself publishes, by kind."""
DECLARED_RULES: Final[Mapping[DeviceKind, tuple[Rule, ...]]] = {
    DeviceKind.CPU: DECLARED_CPU_RULES,
    DeviceKind.MEMORY: DECLARED_MEMORY_RULES,
    DeviceKind.HUGEPAGES: DECLARED_POOL_RULES,
    DeviceKind.PCI: PCI_RULES,
    DeviceKind.NIC: (*NIC_RULES, *PCI_RULES),
    DeviceKind.OTHER: (),
}
"""Rules for devices that drivers declare, by kind; declared GPUs have the rules in agent.health.gpu."""
MAIN_SOURCES: Final[Mapping[DeviceKind, tuple[str, ...]]] = {
    DeviceKind.CPU: ("cpus", "throttle"),
    DeviceKind.GPU: ("nvml",),
    DeviceKind.MEMORY: ("memory", "edac"),
    DeviceKind.HUGEPAGES: ("hugepages",),
    DeviceKind.PCI: ("pci",),
    DeviceKind.NIC: ("nic",),
    DeviceKind.OTHER: (),
}
"""Names of the sources whose passes verify a device, by kind. If one of them stalls, the device is Unknown. A
GPU that NVML has found has a source of its own."""
NODE_RULES: Final = (*MACHINE_RULES, *MACHINE_LOG_RULES)
"""Rules for the machine as a whole, whose findings are notes."""
ALL_HOST_RULES: Final = tuple(
    dict.fromkeys(chain(*HOST_RULES.values(), *DECLARED_RULES.values(), CGROUP_RULES, NODE_RULES))
)
"""All rules for the machine, its devices and the cgroups of pods, without duplicates."""


def sampler_wakes(
    throttle_events: int, throttle_window_s: int, overrides: tuple[RuleOverride, ...] = ()
) -> tuple[WakeCondition, ...]:
    """Return the changes of readings for which the native sampler must wake the evaluation engine.

    Args:
        throttle_events: Growth of a thermal-throttle counter that wakes the engine.
        throttle_window_s: Window of that growth [s].
        overrides: Changes of rules by the operator, which may have lower limits.
    """
    found: dict[SamplerField, WakeCondition] = {}
    for rule in ALL_HOST_RULES:
        for field in rule.sampler_reads:
            if isinstance(field, WakeCondition):
                found.setdefault(field.field, field)
            elif not rule.counts_growth:
                found[field] = WakeCondition(field)  # any change, which includes any threshold
            else:
                limit = lowest_limit(overrides, rule.code, throttle_events)
                found.setdefault(field, WakeCondition(field, limit, throttle_window_s * NS))
    return tuple(found.values())
