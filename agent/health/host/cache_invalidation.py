"""Detection of the declared devices whose cached health and causes a new snapshot makes outdated.

The rules for the declared devices of one kind share most of their input. A device that no change of the
shared input affects keeps its verdict, because its rules would return the same results.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice
from agent.health.host.cpu.facts import CpuFacts
from agent.health.host.memory.edac import has_source_been_read
from agent.health.host.pci.state import PCI_LOG_CODES
from agent.health.host.state import HostRuleState
from agent.health.kernel_log.facts import log_reader_state
from agent.model.cpuset import CpuSet, cpu_numbers
from agent.model.declared_devices import DeclaredCpuDevice, DriverDevice
from agent.model.reading import Missing
from agent.model.settings import EngineSettings
from agent.model.snapshot import HugepagePoolSample, Snapshot
from agent.model.time import Instant

ALL_DEVICES: Final[CpuSet] = -1
"""Stands for all CPUs, also those of devices without CPUs: a change of the shared input affects every device.
"""


class SharedRuleInput(NamedTuple):
    """Input of the rules that all declared devices of one kind share."""

    shared: tuple[object, ...]
    """Values whose change affects every device of the kind."""
    cpu_sets: tuple[CpuSet, ...] = ()
    """CPU sets whose change affects the CPUs that were added to a set or removed from it, and the CPUs that
    share a physical core with them."""
    cpu_facts: CpuFacts = CpuFacts()
    """Facts about single CPUs. A change of a CPU's fact affects the CPU and those that share its physical
    core.
    """


def shared_rule_input(
    kind: DeviceKind,
    host: HostRuleState,
    snapshot: Snapshot,
    pools: Mapping[InventoryDevice, HugepagePoolSample],
    settings: EngineSettings,
    now: Instant,
) -> SharedRuleInput:
    """Return the input that the rules for declared devices of one kind share. Raises TypeError for GPUs."""
    match kind:
        case DeviceKind.CPU:
            return _shared_cpu_input(host, snapshot, settings)
        case DeviceKind.MEMORY:
            return _shared_memory_input(host, snapshot, settings)
        case DeviceKind.HUGEPAGES:
            return SharedRuleInput((pools, host.pools.declared_pages, host.pools.max_seen))
        case DeviceKind.PCI:
            return _shared_pci_input(host, snapshot, now)
        case DeviceKind.NIC:
            function = _shared_pci_input(host, snapshot, now)
            return SharedRuleInput((host.nics, snapshot.nics, settings.host, *function.shared))
        case _:
            raise TypeError(f"device kind {kind}: there are no host rules for devices of this kind")


def _shared_cpu_input(host: HostRuleState, snapshot: Snapshot, settings: EngineSettings) -> SharedRuleInput:
    cpus, cores = host.cpus, host.cpus.cpu_facts
    machine, nodes = snapshot.machine, snapshot.nodes
    readings = (*snapshot.cpus, cpus.isolated_start, *(node.cpus for node in nodes))
    return SharedRuleInput(
        (
            log_reader_state(snapshot.log),
            [node.numa_node for node in nodes],
            [reading if isinstance(reading, Missing) else None for reading in readings],
            cores.machine_check_readers if isinstance(cores.machine_check_readers, Missing) else None,
            (machine.smt_active if machine else None, cpus.smt_start),
            bool(cpus.declared_throttle),
            settings,
        ),
        (
            *(0 if isinstance(reading, Missing) else reading for reading in readings),
            cores.machine_checked | cpus.log_facts.machine_checks,
            cpus.corrected,
            cpus.hard_lockups,
            cpus.soft_lockups,
        ),
        cores,
    )


def _shared_memory_input(
    host: HostRuleState, snapshot: Snapshot, settings: EngineSettings
) -> SharedRuleInput:
    memory, machine = host.memory, snapshot.machine
    if machine is None:
        return SharedRuleInput((settings, memory))
    return SharedRuleInput(
        (
            settings,
            (memory.blocks_online, memory.failure_lines, memory.locations),
            (has_source_been_read(machine, "memory"), has_source_been_read(machine, "edac")),
            (machine.numa, machine.nodes_online, machine.nodes_memory, machine.corrupted_kib),
        )
    )


def _shared_pci_input(host: HostRuleState, snapshot: Snapshot, now: Instant) -> SharedRuleInput:
    facts = host.kernel_log.select(*PCI_LOG_CODES)
    functions = "read" if isinstance(snapshot.pci, tuple) else snapshot.pci
    # facts expire with time
    expires = now if facts else None
    return SharedRuleInput((host.pci, functions, log_reader_state(snapshot.log), facts, expires))


def changed_cpus(before: SharedRuleInput | None, now: SharedRuleInput) -> CpuSet:
    """Return the CPUs that are affected by the change of the shared input between two evaluations;
    ``ALL_DEVICES`` if every device of the kind is affected. ``before`` is None in the first evaluation."""
    if before is None or before.shared != now.shared:
        return ALL_DEVICES
    cpus = 0
    for old, new in zip(before.cpu_sets, now.cpu_sets, strict=True):
        cpus |= old ^ new
    if before.cpu_facts is not now.cpu_facts:
        for core in set(before.cpu_facts.samples) ^ set(now.cpu_facts.samples):
            cpus |= 1 << core.cpu
    near = cpus
    for cpu in cpu_numbers(cpus):
        near |= before.cpu_facts.core_siblings.get(cpu, 0) | now.cpu_facts.core_siblings.get(cpu, 0)
    return near


def cpus_affecting(declared: DriverDevice) -> CpuSet:
    """Return the CPUs whose change affects a declared device; ``ALL_DEVICES`` for a device without CPUs,
    which every change affects."""
    part = declared.part
    return part.cpus if isinstance(part, DeclaredCpuDevice) and part.cpus else ALL_DEVICES
