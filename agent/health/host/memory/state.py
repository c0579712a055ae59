"""Memory as its rules see it, and what is remembered for that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.health.host.memory.edac import EdacPast, ErrorPlace, is_read, remember_errors
from agent.health.host.memory.edac_nodes import memory_nodes
from agent.health.kernel_log.values import LogCode, LogPast
from agent.model.declared import Declared, DeclaredMemory
from agent.model.machine import MachineSample, NumaSample
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot
from agent.model.time import Instant


class MachineMemory(NamedTuple):
    """What is read of all memory together, as :class:`MachineSample` has it."""

    nodes_online: int | Missing
    nodes_memory: int | Missing
    corrupted_kib: Reading


class MemoryView(NamedTuple):
    """The memory of one NUMA node."""

    node: int
    machine: MachineMemory | None
    """None: its memory has not been read yet."""
    edac_read: bool
    numa: NumaSample | None
    """None: the node is not there, or has no memory now."""
    had_memory: bool
    """Now, at start, or in between."""
    blocks_online: Reading
    """Memory blocks that were online when it first had memory."""
    alone: bool
    """No other node has memory."""
    places: tuple[ErrorPlace, ...]
    """Where errors of this memory are counted, or may be."""
    failures: int
    """Lines of the kernel log about pages with hardware errors, of whatever node."""
    correctable_errors: int
    """Within the window that are too many."""
    correctable_window_s: int
    declared_bytes: int = 0
    """How much a driver says there is; 0: it does not say."""


@dataclass(frozen=True, slots=True)
class MemoryPast:
    """What the rules of memory compare with."""

    blocks: Mapping[int, Reading] = field(default_factory=dict)
    """Memory blocks online at start, by NUMA node, of those that ever had memory."""
    failures: int = 0
    """Lines of the kernel log about pages with hardware errors."""
    errors: EdacPast = field(default_factory=EdacPast)
    places: Mapping[int, tuple[ErrorPlace, ...]] = field(default_factory=dict)
    """Of the errors, by NUMA node."""


def remember_memory(
    past: MemoryPast, log: LogPast, snapshot: Snapshot, settings: Settings, now: Instant
) -> MemoryPast:
    """The past after a snapshot."""
    if snapshot.machine is None:
        return past
    blocks = {**_blocks_online(snapshot.machine), **_known(past.blocks)}
    errors = remember_errors(past.errors, log, snapshot, settings.host, now)
    fact = log.facts.get((LogCode.MEMORY_FAILURE, ""))
    failures = fact.times if fact else 0
    if errors is past.errors and blocks.keys() == past.blocks.keys():
        return MemoryPast(blocks, failures, errors, past.places)
    places = {
        node: tuple(place for place in errors.places if place.nodes is None or place.nodes >> node & 1)
        for node in blocks
    }
    return MemoryPast(blocks, failures, errors, places)


def _known(blocks: Mapping[int, Reading]) -> Mapping[int, Reading]:
    return {node: online for node, online in blocks.items() if isinstance(online, int)}


def _blocks_online(machine: MachineSample) -> Mapping[int, Reading]:
    having = memory_nodes(machine)
    return {
        numa.node: numa.blocks - numa.blocks_offline
        if isinstance(numa.blocks, int) and isinstance(numa.blocks_offline, int)
        else NEVER_READ
        for numa in machine.numa
        if having >> numa.node & 1
    }


def view_memory(past: MemoryPast, snapshot: Snapshot, settings: Settings, node: int) -> MemoryView:
    """The memory of a NUMA node."""
    machine, limits = snapshot.machine, settings.host
    return MemoryView(
        node=node,
        machine=_whole(machine) if machine and is_read(machine, "memory") else None,
        edac_read=is_read(machine, "edac"),
        numa=_numa(machine, node) if machine else None,
        had_memory=node in past.blocks,
        blocks_online=past.blocks.get(node, NEVER_READ),
        alone=len(past.blocks) == 1,
        places=past.places.get(node, ()),
        failures=past.failures,
        correctable_errors=limits.correctable_errors,
        correctable_window_s=limits.correctable_window_s,
    )


def _whole(machine: MachineSample) -> MachineMemory:
    return MachineMemory(machine.nodes_online, machine.nodes_memory, machine.corrupted_kib)


def _numa(machine: MachineSample, node: int) -> NumaSample | None:
    for nodes in (machine.nodes_online, machine.nodes_memory):
        if isinstance(nodes, int) and not nodes >> node & 1:
            return None
    return next((numa for numa in machine.numa if numa.node == node), None)


def view_declared_memory(
    past: MemoryPast, snapshot: Snapshot, settings: Settings, declared: Declared
) -> MemoryView:
    """The memory that a driver declares."""
    assert isinstance(declared.what, DeclaredMemory), "the device is no memory"
    view = view_memory(past, snapshot, settings, declared.what.numa)
    return view._replace(declared_bytes=declared.what.size)
