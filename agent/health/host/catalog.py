"""The catalogue's rows for the host's devices, cgroups and node, and what wakes the core."""

from collections.abc import Mapping
from typing import Final

from agent.devices.inventory import Kind
from agent.health.catalog import Rule
from agent.health.host.cgroup.rules import GROUP_RULES
from agent.health.host.cpu.rules import CPU_RULES, DECLARED_CPU_RULES
from agent.health.host.hugepages.rules import DECLARED_POOL_RULES, POOL_RULES
from agent.health.host.memory.rules import DECLARED_MEMORY_RULES, MEMORY_RULES
from agent.health.host.node.rules import NODE_RULES
from agent.health.host.pci.rules import PCI_RULES
from agent.model.time import NS
from agent.model.wake import Field, Wake

RULES: Final[Mapping[Kind, tuple[Rule, ...]]] = {
    Kind.CPU: CPU_RULES,
    Kind.MEMORY: MEMORY_RULES,
    Kind.HUGEPAGES: POOL_RULES,
}
"""Of the host's own devices."""
DECLARED_RULES: Final[Mapping[Kind, tuple[Rule, ...]]] = {
    Kind.CPU: DECLARED_CPU_RULES,
    Kind.MEMORY: DECLARED_MEMORY_RULES,
    Kind.HUGEPAGES: DECLARED_POOL_RULES,
    Kind.PCI: PCI_RULES,
    Kind.OTHER: (),
}
"""Of those that drivers declare, but for GPUs, which are judged as the host's."""
MAIN_SOURCES: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.CPU: ("cpus", "throttle"),
    Kind.GPU: ("nvml",),
    Kind.MEMORY: ("memory", "edac"),
    Kind.HUGEPAGES: ("hugepages",),
    Kind.PCI: ("pci",),
    Kind.OTHER: (),
}
"""A device is verified when these were read, and its driver's own checks have ended. A GPU that NVML has
found has a source of its own."""
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
    """What the native core must wake for, so that every rule sees what it judges."""
    found: dict[Field, Wake] = {}
    for rule in ALL_RULES:
        for field in rule.reads:
            if isinstance(field, Wake):
                found.setdefault(field.field, field)
            elif not rule.counter:
                found[field] = Wake(field)  # any change: more than any threshold asks for
            else:
                found.setdefault(field, Wake(field, throttle_events, throttle_window_s * NS))
    return tuple(found.values())
