"""What all declared devices of one kind are judged by, and whom a change of it can concern.

A rule is a function of its view; a view is made of what was read, which is the same for all devices of a
kind, and of what is said or counted of the one device. Between two looks little of that changes: a device
that nothing of it concerns need not be judged again, for its rules would answer what they did.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from agent.devices.inventory import Device, Kind
from agent.health.host.cpu.cores import Cores
from agent.health.host.memory.edac import is_read
from agent.health.host.state import HostRuleState
from agent.health.kernel_log.silence import reader_state
from agent.health.kernel_log.values import LogCode
from agent.model.cpuset import CpuSet, cpus_of
from agent.model.declared import Declared, DeclaredCpus
from agent.model.reading import Missing
from agent.model.settings import Settings
from agent.model.snapshot import PoolSample, Snapshot
from agent.model.time import Instant

EVERYONE: Final[CpuSet] = -1
"""Concerned by a change, whatever the device is; of a device: every change concerns it."""
_PCI_CODES: Final = (LogCode.AER_FATAL, LogCode.AER_NONFATAL, LogCode.PCI_FAULT)


class Ground(NamedTuple):
    """All that the devices of a kind are judged by, but for what is of one device alone."""

    whole: tuple[object, ...]
    """A change of this concerns everyone..."""
    sets: tuple[CpuSet, ...] = ()
    """...one of these the CPUs that came or went, and those that share a core with them..."""
    cores: Cores = Cores()
    """...so of these."""


def ground_of(
    kind: Kind,
    memory: HostRuleState,
    snapshot: Snapshot,
    pools: Mapping[Device, PoolSample],
    settings: Settings,
    now: Instant,
) -> Ground:
    """What declared devices of a kind are judged by in this look, GPUs apart; arguments as of the views."""
    match kind:
        case Kind.CPU:
            return _of_cpus(memory, snapshot, settings)
        case Kind.MEMORY:
            return _of_memory(memory, snapshot, settings)
        case Kind.HUGEPAGES:
            return Ground((pools, memory.pools.wanted, memory.pools.most))
        case Kind.PCI:
            return _of_pci(memory, snapshot, now)
        case _:
            raise TypeError(f"devices of kind {kind} have no rules of the host's")


def _of_cpus(memory: HostRuleState, snapshot: Snapshot, settings: Settings) -> Ground:
    past, cores = memory.cpus, memory.cpus.cores
    machine, nodes = snapshot.machine, snapshot.nodes
    readings = (*snapshot.cpus, past.isolated, *(node.cpus for node in nodes))
    return Ground(
        (
            reader_state(snapshot.log),
            [node.node for node in nodes],
            [reading if isinstance(reading, Missing) else None for reading in readings],
            cores.checks if isinstance(cores.checks, Missing) else None,
            (machine.smt_active if machine else None, past.smt),
            bool(past.watched),
            settings,
        ),
        (
            *(0 if isinstance(reading, Missing) else reading for reading in readings),
            cores.checked | past.told.checks,
            past.corrected,
            past.hard_lockups,
            past.soft_lockups,
        ),
        cores,
    )


def _of_memory(memory: HostRuleState, snapshot: Snapshot, settings: Settings) -> Ground:
    past, machine = memory.memory, snapshot.machine
    if machine is None:
        return Ground((settings, past))
    return Ground(
        (
            settings,
            (past.blocks, past.failures, past.places),
            (is_read(machine, "memory"), is_read(machine, "edac")),
            (machine.numa, machine.nodes_online, machine.nodes_memory, machine.corrupted_kib),
        )
    )


def _of_pci(memory: HostRuleState, snapshot: Snapshot, now: Instant) -> Ground:
    told = memory.log.of(*_PCI_CODES)
    functions = "read" if isinstance(snapshot.pci, tuple) else snapshot.pci
    # what the log told is forgotten with time
    until = now if told else None
    return Ground((memory.pci, functions, reader_state(snapshot.log), told, until))


def concerned(before: Ground | None, now: Ground) -> CpuSet:
    """The CPUs that a change between two looks concerns; those of a device are :func:`cpus_near`."""
    if before is None or before.whole != now.whole:
        return EVERYONE
    cpus = 0
    for old, new in zip(before.sets, now.sets, strict=True):
        cpus |= old ^ new
    if before.cores is not now.cores:
        for core in set(before.cores.samples) ^ set(now.cores.samples):
            cpus |= 1 << core.cpu
    near = cpus
    for cpu in cpus_of(cpus):
        near |= before.cores.sharing.get(cpu, 0) | now.cores.sharing.get(cpu, 0)
    return near


def cpus_near(declared: Declared) -> CpuSet:
    """The CPUs of which any change concerns a device."""
    what = declared.what
    return what.cpus if isinstance(what, DeclaredCpus) and what.cpus else EVERYONE
