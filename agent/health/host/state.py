"""State of the host's rules, carried from one snapshot to the next, and views, which are the inputs of the
rules.

The state is immutable: :func:`next_host_state` derives it from the last state and a snapshot, so recorded
snapshots replay to the same views.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.devices.inventory import Device, DeviceKind, devices_expected, devices_of
from agent.health.host.cgroup.state import GroupState, next_group_state
from agent.health.host.cpu.state import CpuState, CpuView, next_cpu_state, view_cpus, view_declared_cpus
from agent.health.host.hugepages.state import (
    PoolState,
    PoolView,
    next_pool_state,
    view_declared_pages,
    view_pool,
)
from agent.health.host.memory.state import (
    MemoryState,
    MemoryView,
    next_memory_state,
    view_declared_memory,
    view_memory,
)
from agent.health.host.node.state import NodeState, next_node_state
from agent.health.host.pci.state import PciState, PciView, next_pci_state, view_pci
from agent.health.kernel_log.latch import next_log_state
from agent.health.kernel_log.values import LogState
from agent.model.declared import Declared, DeclaredCpus, DeclaredHugepages, DeclaredMemory, DeclaredPci
from agent.model.settings import Settings
from agent.model.snapshot import PoolSample, Snapshot
from agent.model.source import SourceState
from agent.model.time import Instant

Pools = Mapping[Device, PoolSample]
"""Hugepage pools, by device."""


@dataclass(frozen=True, slots=True)
class HostRuleState:
    """State of all rules for the machine, its devices and pods, which the next evaluation compares with."""

    devices: tuple[Device, ...] = ()
    log: LogState = field(default_factory=LogState)
    cpus: CpuState = field(default_factory=CpuState)
    memory: MemoryState = field(default_factory=MemoryState)
    pools: PoolState = field(default_factory=PoolState)
    pci: PciState = field(default_factory=PciState)
    groups: GroupState = field(default_factory=GroupState)
    node: NodeState = field(default_factory=NodeState)
    started: bool = False
    """Whether the first pass of the sources has finished."""


def is_starting(snapshot: Snapshot) -> bool:
    """Return True if a vital source has not finished its first pass, so that the snapshot is incomplete."""
    return any(source.state is SourceState.STARTING for source in snapshot.sources if source.vital)


def next_host_state(
    previous: HostRuleState, snapshot: Snapshot, settings: Settings, now: Instant
) -> HostRuleState:
    """Return the state of the host's rules after a snapshot."""
    if is_starting(snapshot):
        return HostRuleState(devices=devices_expected(settings.expect_cpus, settings.expect_pools))
    known = previous.devices if previous.started else ()
    log = next_log_state(previous.log, snapshot.log, now)
    return HostRuleState(
        devices=devices_of(snapshot, known, settings.expect_pools),
        log=log,
        cpus=next_cpu_state(previous.cpus, log, snapshot, settings, now),
        memory=next_memory_state(previous.memory, log, snapshot, settings, now),
        pools=next_pool_state(previous.pools, log, snapshot, settings, now),
        pci=next_pci_state(previous.pci, snapshot, now),
        groups=next_group_state(previous.groups, snapshot, settings, now, started=previous.started),
        node=next_node_state(previous.node, log, snapshot, settings, now),
        started=True,
    )


def view_device(
    host: HostRuleState, snapshot: Snapshot, pools: Pools, settings: Settings, device: Device, now: Instant
) -> CpuView | MemoryView | PoolView:
    """Return the rules' input for a device of the host; ``pools`` is ``device_pools(snapshot)``."""
    match device.kind:
        case DeviceKind.CPU:
            return view_cpus(host.cpus, snapshot, settings, device.node)
        case DeviceKind.MEMORY:
            return view_memory(host.memory, snapshot, settings, device.node)
        case _:
            return view_pool(host.pools, pools, snapshot, settings, device, now)


def view_declared(
    host: HostRuleState,
    snapshot: Snapshot,
    pools: Pools,
    settings: Settings,
    declared: Declared,
    now: Instant,
) -> CpuView | MemoryView | PoolView | PciView:
    """Return the rules' input for a device that a driver declares and that is not a GPU; ``pools`` is
    ``device_pools(snapshot)``."""
    match declared.part:
        case DeclaredCpus():
            return view_declared_cpus(host.cpus, snapshot, settings, declared)
        case DeclaredMemory():
            return view_declared_memory(host.memory, snapshot, settings, declared)
        case DeclaredHugepages():
            return view_declared_pages(host.pools, pools, declared)
        case DeclaredPci(address, driver):
            return view_pci(host.pci, host.log, snapshot, address, driver, now)
        case _:
            raise TypeError(f"{declared.subject}: no host rules for devices of this kind")
