"""From snapshots to views: what each rule is shown, and what must be remembered for that.

Memory is a value. :func:`remember` makes the next one from the last and a snapshot; nothing is changed in
place, so any day of a node can be replayed from its snapshots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.devices.inventory import Device, Kind, devices_expected, devices_of
from agent.health.host.cgroup.state import GroupPast, remember_groups
from agent.health.host.cpu.state import CpuPast, CpuView, remember_cpus, view_cpus, view_declared_cpus
from agent.health.host.hugepages.state import (
    PoolPast,
    PoolView,
    remember_pools,
    view_declared_pages,
    view_pool,
)
from agent.health.host.memory.state import (
    MemoryPast,
    MemoryView,
    remember_memory,
    view_declared_memory,
    view_memory,
)
from agent.health.host.node.state import NodePast, remember_node
from agent.health.host.pci.state import PciPast, PciView, remember_pci, view_pci
from agent.health.kernel_log.latch import remember_log
from agent.health.kernel_log.values import LogPast
from agent.model.declared import Declared, DeclaredCpus, DeclaredHugepages, DeclaredMemory, DeclaredPci
from agent.model.settings import Settings
from agent.model.snapshot import PoolSample, Snapshot
from agent.model.source import SourceState
from agent.model.time import Instant

Pools = Mapping[Device, PoolSample]
"""The pool behind each hugepage device."""


@dataclass(frozen=True, slots=True)
class HostRuleState:
    """What the rules compare with."""

    devices: tuple[Device, ...] = ()
    log: LogPast = field(default_factory=LogPast)
    cpus: CpuPast = field(default_factory=CpuPast)
    memory: MemoryPast = field(default_factory=MemoryPast)
    pools: PoolPast = field(default_factory=PoolPast)
    pci: PciPast = field(default_factory=PciPast)
    groups: GroupPast = field(default_factory=GroupPast)
    node: NodePast = field(default_factory=NodePast)
    started: bool = False
    """Somebody has looked at the node."""


def is_starting(snapshot: Snapshot) -> bool:
    """Whether it was published before the first pass was over: it says nothing of the node."""
    return any(source.state is SourceState.STARTING for source in snapshot.sources if source.vital)


def remember(memory: HostRuleState, snapshot: Snapshot, settings: Settings, now: Instant) -> HostRuleState:
    """The memory after a snapshot."""
    if is_starting(snapshot):
        return HostRuleState(devices=devices_expected(settings.expect_cpus, settings.expect_pools))
    known = memory.devices if memory.started else ()
    log = remember_log(memory.log, snapshot.log, now)
    return HostRuleState(
        devices=devices_of(snapshot, known, settings.expect_pools),
        log=log,
        cpus=remember_cpus(memory.cpus, log, snapshot, settings, now),
        memory=remember_memory(memory.memory, log, snapshot, settings, now),
        pools=remember_pools(memory.pools, log, snapshot, settings, now),
        pci=remember_pci(memory.pci, snapshot, now),
        groups=remember_groups(memory.groups, snapshot, settings, now, started=memory.started),
        node=remember_node(memory.node, log, snapshot, settings, now),
        started=True,
    )


def view_device(
    memory: HostRuleState, snapshot: Snapshot, pools: Pools, settings: Settings, device: Device, now: Instant
) -> CpuView | MemoryView | PoolView:
    """What the rules of a device of the host are shown; ``pools`` are ``device_pools(snapshot)``."""
    match device.kind:
        case Kind.CPU:
            return view_cpus(memory.cpus, snapshot, settings, device.node)
        case Kind.MEMORY:
            return view_memory(memory.memory, snapshot, settings, device.node)
        case _:
            return view_pool(memory.pools, pools, snapshot, settings, device, now)


def view_declared(
    memory: HostRuleState,
    snapshot: Snapshot,
    pools: Pools,
    settings: Settings,
    declared: Declared,
    now: Instant,
) -> CpuView | MemoryView | PoolView | PciView:
    """The same of a device that a driver declares, other than a GPU."""
    match declared.what:
        case DeclaredCpus():
            return view_declared_cpus(memory.cpus, snapshot, settings, declared)
        case DeclaredMemory():
            return view_declared_memory(memory.memory, snapshot, settings, declared)
        case DeclaredHugepages():
            return view_declared_pages(memory.pools, pools, declared)
        case DeclaredPci(address, driver):
            return view_pci(memory.pci, memory.log, snapshot, address, driver, now)
        case _:
            raise TypeError(f"{declared.subject} has no rules of the host's")
