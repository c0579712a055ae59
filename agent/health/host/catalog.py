"""Lists of the rules for the machine's devices and pods' cgroups, and of the changes that wake the engine."""

from collections.abc import Mapping
from typing import Final

from agent.devices.inventory import DeviceKind
from agent.health.host.cgroup.rules import GROUP_RULES
from agent.health.host.cpu.rules import CPU_RULES, DECLARED_CPU_RULES
from agent.health.host.hugepages.rules import DECLARED_POOL_RULES, POOL_RULES
from agent.health.host.memory.rules import DECLARED_MEMORY_RULES, MEMORY_RULES
from agent.health.host.node.rules import NODE_RULES
from agent.health.host.pci.rules import PCI_RULES
from agent.health.rules import Rule
from agent.model.time import NS
from agent.model.wake import SamplerField, Wake

RULES: Final[Mapping[DeviceKind, tuple[Rule, ...]]] = {
    DeviceKind.CPU: CPU_RULES,
    DeviceKind.MEMORY: MEMORY_RULES,
    DeviceKind.HUGEPAGES: POOL_RULES,
}
"""Rules for the devices that this agent publishes itself, by kind."""
DECLARED_RULES: Final[Mapping[DeviceKind, tuple[Rule, ...]]] = {
    DeviceKind.CPU: DECLARED_CPU_RULES,
    DeviceKind.MEMORY: DECLARED_MEMORY_RULES,
    DeviceKind.HUGEPAGES: DECLARED_POOL_RULES,
    DeviceKind.PCI: PCI_RULES,
    DeviceKind.OTHER: (),
}
"""Rules for devices that drivers declare, by kind. Declared GPUs are evaluated as the host's GPUs."""
MAIN_SOURCES: Final[Mapping[DeviceKind, tuple[str, ...]]] = {
    DeviceKind.CPU: ("cpus", "throttle"),
    DeviceKind.GPU: ("nvml",),
    DeviceKind.MEMORY: ("memory", "edac"),
    DeviceKind.HUGEPAGES: ("hugepages",),
    DeviceKind.PCI: ("pci",),
    DeviceKind.OTHER: (),
}
"""Sources that verify a device, by kind. A device is verified when they were read and the health checks of
its driver have ended. A GPU that NVML has found has a source of its own.
"""
ALL_RULES: Final = tuple(
    dict.fromkeys(
        [
            *(rule for rules in RULES.values() for rule in rules),
            *(rule for rules in DECLARED_RULES.values() for rule in rules),
            *GROUP_RULES,
            *NODE_RULES,
        ]
    )
)


def wakes(throttle_events: int, throttle_window_s: int) -> tuple[Wake, ...]:
    """Return the changes for which the native sampler must wake the engine, so that every rule is evaluated
    when its readings change.
    """
    found: dict[SamplerField, Wake] = {}
    for rule in ALL_RULES:
        for field in rule.reads:
            if isinstance(field, Wake):
                found.setdefault(field.field, field)
            elif not rule.counter:
                found[field] = Wake(field)  # any change, which includes any threshold
            else:
                found.setdefault(field, Wake(field, throttle_events, throttle_window_s * NS))
    return tuple(found.values())
