"""State that all rules for the host carry from one snapshot to the next, and the choice of a device's rule
input.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent.devices.inventory import (
    DeviceKind,
    InventoryDevice,
    cpu_device,
    expected_devices,
    memory_device,
    parse_pool_name,
    update_inventory,
)
from agent.health.host.cgroup.state import CgroupRuleState, next_cgroup_state
from agent.health.host.cpu.state import (
    CpuRuleInput,
    CpuRuleState,
    declared_cpu_rule_input,
    next_cpu_state,
    numa_cpu_rule_input,
    with_gained_cpus,
)
from agent.health.host.hugepages.state import (
    PoolRuleInput,
    PoolRuleState,
    declared_pages_rule_input,
    next_pool_state,
    pool_rule_input,
    with_gained_pages,
)
from agent.health.host.machine.state import MachineRuleState, next_machine_state
from agent.health.host.memory.state import (
    MemoryRuleInput,
    MemoryRuleState,
    declared_memory_rule_input,
    memory_rule_input,
    next_memory_state,
)
from agent.health.host.nic.state import (
    NicRuleInput,
    NicRuleState,
    next_nic_state,
    nic_address,
    nic_rule_input,
)
from agent.health.host.pci.state import PciRuleInput, PciRuleState, next_pci_rule_state, pci_rule_input
from agent.health.kernel_log.facts import KernelLogState
from agent.health.kernel_log.latch import next_log_state
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredNicDevice,
    DeclaredPciDevice,
    DriverDevice,
)
from agent.model.settings import EngineSettings
from agent.model.snapshot import HugepagePoolSample, Snapshot
from agent.model.source_state import SourceState
from agent.model.time import Instant

PoolsByDevice = Mapping[InventoryDevice, HugepagePoolSample]
"""Samples of hugepage pools, by the device as which the agent publishes the pool."""


@dataclass(frozen=True, slots=True)
class HostRuleState:
    """Values that the rules for the machine, its devices and its pods carry from one evaluation to the
    next."""

    devices: tuple[InventoryDevice, ...] = ()
    """Devices that the agent itself publishes: CPUs, memory and hugepage pools."""
    kernel_log: KernelLogState = field(default_factory=KernelLogState)
    cpus: CpuRuleState = field(default_factory=CpuRuleState)
    memory: MemoryRuleState = field(default_factory=MemoryRuleState)
    pools: PoolRuleState = field(default_factory=PoolRuleState)
    nics: NicRuleState = field(default_factory=NicRuleState)
    pci: PciRuleState = field(default_factory=PciRuleState)
    groups: CgroupRuleState = field(default_factory=CgroupRuleState)
    machine: MachineRuleState = field(default_factory=MachineRuleState)
    started: bool = False
    """True: since the agent's start, all vital sources have finished their first pass once."""


def is_snapshot_incomplete(snapshot: Snapshot) -> bool:
    """Return True if a vital source has not finished its first pass: the snapshot is still incomplete."""
    return any(source.state is SourceState.STARTING for source in snapshot.sources if source.vital)


def next_host_state(
    previous: HostRuleState, snapshot: Snapshot, settings: EngineSettings, now: Instant
) -> HostRuleState:
    """Return the state of the host's rules after a snapshot.

    Until all vital sources have finished a pass, it is the state at start, with the expected devices only.
    """
    if is_snapshot_incomplete(snapshot):
        devices = expected_devices(settings.expect_cpus, settings.expect_pools)
        return replace(HostRuleState() if previous.started else previous, devices=devices)
    known = previous.devices
    if not previous.started:
        known = _devices_at_start(previous)
        previous = replace(
            previous,
            cpus=with_gained_cpus(previous.cpus, snapshot),
            pools=with_gained_pages(previous.pools, snapshot),
        )
    log = next_log_state(previous.kernel_log, snapshot.log, now)
    nics = next_nic_state(previous.nics, snapshot, settings.host, now)
    return HostRuleState(
        devices=update_inventory(snapshot, known, settings.expect_pools),
        kernel_log=log,
        cpus=next_cpu_state(previous.cpus, log, snapshot, settings, now),
        memory=next_memory_state(previous.memory, log, snapshot, settings, now),
        pools=next_pool_state(previous.pools, log, snapshot, settings, now),
        nics=nics,
        pci=next_pci_rule_state(previous.pci, snapshot, now, nics.addresses),
        groups=next_cgroup_state(previous.groups, snapshot, settings, now, started=previous.started),
        machine=next_machine_state(previous.machine, log, snapshot, settings, now),
        started=True,
    )


def _devices_at_start(state: HostRuleState) -> tuple[InventoryDevice, ...]:
    """Return the devices that an earlier agent stored values of; some of them may no longer exist."""
    found = [cpu_device(node) for node, cpus in state.cpus.expected.items() if cpus]
    found += [memory_device(node) for node in state.memory.blocks_online]
    found += [pool for name in state.pools.expected if (pool := parse_pool_name(name)) is not None]
    return tuple(sorted(found, key=InventoryDevice.sort_key))


def device_rule_input(
    host: HostRuleState,
    snapshot: Snapshot,
    pools: PoolsByDevice,
    settings: EngineSettings,
    device: InventoryDevice,
    now: Instant,
) -> CpuRuleInput | MemoryRuleInput | PoolRuleInput:
    """Return the rules' input for a device that the agent itself publishes."""
    match device.kind:
        case DeviceKind.CPU:
            return numa_cpu_rule_input(host.cpus, snapshot, settings, device.numa_node)
        case DeviceKind.MEMORY:
            return memory_rule_input(host.memory, snapshot, settings, device.numa_node)
        case _:
            return pool_rule_input(host.pools, pools, snapshot, settings, device, now)


def declared_rule_input(
    host: HostRuleState,
    snapshot: Snapshot,
    pools: PoolsByDevice,
    settings: EngineSettings,
    declared: DriverDevice,
    now: Instant,
) -> CpuRuleInput | MemoryRuleInput | PoolRuleInput | PciRuleInput | NicRuleInput:
    """Return the rules' input for a device that a driver declares. Raises TypeError for a GPU."""
    match declared.part:
        case DeclaredCpuDevice():
            return declared_cpu_rule_input(host.cpus, snapshot, settings, declared)
        case DeclaredMemoryDevice():
            return declared_memory_rule_input(host.memory, snapshot, settings, declared)
        case DeclaredHugepageDevice():
            return declared_pages_rule_input(host.pools, pools, declared)
        case DeclaredPciDevice(address, driver):
            return pci_rule_input(host.pci, host.kernel_log, snapshot, address, driver, now)
        case DeclaredNicDevice() as nic:
            address = nic_address(host.nics, nic)
            function = (
                pci_rule_input(host.pci, host.kernel_log, snapshot, address, "", now) if address else None
            )
            return nic_rule_input(host.nics, snapshot, nic, settings.host, function)
        case _:
            kind = type(declared.part).__name__
            raise TypeError(f"declared device {declared.subject}: no host rules evaluate {kind}")
