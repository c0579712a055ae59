"""Inputs of the rules for devices that drivers declare, by kind, and the devices that a change of the inputs
affects.

A view (the rules' input for one device) holds readings that all devices of a kind share, and values of one
device. Little of it changes between two evaluations; a device that no change affects keeps its verdict,
because its rules would return the same results.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from agent.devices.inventory import Device, DeviceKind
from agent.health.host.cpu.facts import CoreFacts
from agent.health.host.memory.edac import is_read
from agent.health.host.state import HostRuleState
from agent.health.kernel_log.values import LogCode, reader_state
from agent.model.cpuset import CpuSet, cpus_of
from agent.model.declared import Declared, DeclaredCpus
from agent.model.reading import Missing
from agent.model.settings import Settings
from agent.model.snapshot import PoolSample, Snapshot
from agent.model.time import Instant

ALL_DEVICES: Final[CpuSet] = -1
"""Set of CPUs with the meaning that a change affects every device, or that a device is affected by every
change."""
_PCI_CODES: Final = (LogCode.AER_FATAL, LogCode.AER_NONFATAL, LogCode.PCI_FAULT)


class KindInputs(NamedTuple):
    """Inputs that all declared devices of a kind share."""

    shared: tuple[object, ...]
    """Values whose change affects all devices of the kind."""
    cpu_sets: tuple[CpuSet, ...] = ()
    """CPU sets whose change affects the CPUs that were added or removed, and the CPUs that share a core with
    them."""
    cores: CoreFacts = CoreFacts()
    """Facts about cores whose change affects the CPUs that changed, and the CPUs that share a core with
    them."""


def kind_inputs(
    kind: DeviceKind,
    host: HostRuleState,
    snapshot: Snapshot,
    pools: Mapping[Device, PoolSample],
    settings: Settings,
    now: Instant,
) -> KindInputs:
    """Return the shared inputs of the rules for a kind of device other than GPU."""
    match kind:
        case DeviceKind.CPU:
            return _of_cpus(host, snapshot, settings)
        case DeviceKind.MEMORY:
            return _of_memory(host, snapshot, settings)
        case DeviceKind.HUGEPAGES:
            return KindInputs((pools, host.pools.declared_pages, host.pools.max_seen))
        case DeviceKind.PCI:
            return _of_pci(host, snapshot, now)
        case _:
            raise TypeError(f"kind {kind}: no host rules")


def _of_cpus(host: HostRuleState, snapshot: Snapshot, settings: Settings) -> KindInputs:
    cpus, cores = host.cpus, host.cpus.cores
    machine, nodes = snapshot.machine, snapshot.nodes
    readings = (*snapshot.cpus, cpus.isolated, *(node.cpus for node in nodes))
    return KindInputs(
        (
            reader_state(snapshot.log),
            [node.node for node in nodes],
            [reading if isinstance(reading, Missing) else None for reading in readings],
            cores.machine_check_counts if isinstance(cores.machine_check_counts, Missing) else None,
            (machine.smt_active if machine else None, cpus.smt),
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


def _of_memory(host: HostRuleState, snapshot: Snapshot, settings: Settings) -> KindInputs:
    memory, machine = host.memory, snapshot.machine
    if machine is None:
        return KindInputs((settings, memory))
    return KindInputs(
        (
            settings,
            (memory.blocks, memory.failure_lines, memory.locations),
            (is_read(machine, "memory"), is_read(machine, "edac")),
            (machine.numa, machine.nodes_online, machine.nodes_memory, machine.corrupted_kib),
        )
    )


def _of_pci(host: HostRuleState, snapshot: Snapshot, now: Instant) -> KindInputs:
    facts = host.log.select(*_PCI_CODES)
    functions = "read" if isinstance(snapshot.pci, tuple) else snapshot.pci
    # facts expire with time
    expires = now if facts else None
    return KindInputs((host.pci, functions, reader_state(snapshot.log), facts, expires))


def affected_cpus(before: KindInputs | None, now: KindInputs) -> CpuSet:
    """Return the CPUs that a change between two evaluations affects, to be compared with
    :func:`cpus_affecting`.
    """
    if before is None or before.shared != now.shared:
        return ALL_DEVICES
    cpus = 0
    for old, new in zip(before.cpu_sets, now.cpu_sets, strict=True):
        cpus |= old ^ new
    if before.cores is not now.cores:
        for core in set(before.cores.samples) ^ set(now.cores.samples):
            cpus |= 1 << core.cpu
    near = cpus
    for cpu in cpus_of(cpus):
        near |= before.cores.sharing.get(cpu, 0) | now.cores.sharing.get(cpu, 0)
    return near


def cpus_affecting(declared: Declared) -> CpuSet:
    """Return the CPUs whose change affects a declared device."""
    what = declared.part
    return what.cpus if isinstance(what, DeclaredCpus) and what.cpus else ALL_DEVICES
