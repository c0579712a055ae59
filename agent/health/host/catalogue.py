"""The catalogue's rows for the host's own devices and cgroups, and what wakes the core."""

from collections.abc import Mapping
from typing import Final

from agent.devices.inventory import Kind
from agent.health.catalogue import Rule
from agent.health.host.cpus import CPU_RULES
from agent.health.host.groups import GROUP_RULES
from agent.health.host.hugepages import POOL_RULES
from agent.model.time import NS
from agent.model.wake import Field, Wake

RULES: Final[Mapping[Kind, tuple[Rule, ...]]] = {Kind.CPU: CPU_RULES, Kind.HUGEPAGES: POOL_RULES}
ALL_RULES: Final = CPU_RULES + POOL_RULES + GROUP_RULES


def wakes(throttle_events: int, throttle_window_s: int) -> tuple[Wake, ...]:
    """What the native core must wake for, so that every rule sees what it judges."""
    found: dict[Field, Wake] = {}
    for rule in ALL_RULES:
        for field in rule.reads:
            if not rule.counter:
                found[field] = Wake(field)  # any change: more than any threshold asks for
            else:
                found.setdefault(field, Wake(field, throttle_events, throttle_window_s * NS))
    return tuple(found.values())
