"""From snapshots to views: what each rule is shown, and what must be remembered for that.

Memory is a value. :func:`remember` makes the next one from the last and a snapshot; nothing is changed in
place, so any day of a node can be replayed from its snapshots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.devices.inventory import Device, Kind, devices_expected, devices_of
from agent.health.host.cpu_view import CpuPast, CpuView, remember_cpus, view_cpus
from agent.health.host.group_view import GroupPast, remember_groups
from agent.health.host.pool_view import PoolPast, PoolView, remember_pools, view_pool
from agent.model.settings import Settings
from agent.model.snapshot import PoolSample, Snapshot
from agent.model.source import SourceState
from agent.model.time import Instant


@dataclass(frozen=True, slots=True)
class Memory:
    """What the rules compare with."""

    devices: tuple[Device, ...] = ()
    cpus: CpuPast = field(default_factory=CpuPast)
    pools: PoolPast = field(default_factory=PoolPast)
    groups: GroupPast = field(default_factory=GroupPast)
    started: bool = False
    """Somebody has looked at the node."""


def is_starting(snapshot: Snapshot) -> bool:
    """Whether it was published before the first pass was over: it says nothing of the node."""
    return any(source.state is SourceState.STARTING for source in snapshot.sources if source.vital)


def remember(memory: Memory, snapshot: Snapshot, settings: Settings, now: Instant) -> Memory:
    """The memory after a snapshot."""
    if is_starting(snapshot):
        return Memory(devices=devices_expected(settings.expect_cpus, settings.expect_pools))
    known = memory.devices if memory.started else ()
    return Memory(
        devices=devices_of(snapshot, known, settings.expect_pools),
        cpus=remember_cpus(memory.cpus, snapshot, settings, now),
        pools=remember_pools(memory.pools, snapshot, settings),
        groups=remember_groups(memory.groups, snapshot, now, started=memory.started),
        started=True,
    )


def view_device(
    memory: Memory, snapshot: Snapshot, pools: Mapping[Device, PoolSample], settings: Settings, device: Device
) -> CpuView | PoolView:
    """What the rules of this device's kind are shown; ``pools`` are ``device_pools(snapshot)``."""
    if device.kind is Kind.CPU:
        return view_cpus(memory.cpus, snapshot, settings, device.node)
    return view_pool(memory.pools, pools, settings, device)
