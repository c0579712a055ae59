"""State of the memory rules, and views, which are the inputs of these rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.health.host.memory.edac import EdacState, ErrorLocation, is_read, memory_nodes, next_edac_state
from agent.health.kernel_log.values import LogCode, LogState
from agent.model.declared import Declared, DeclaredMemory
from agent.model.machine import MachineSample, NumaSample
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot
from agent.model.time import Instant


class MachineMemory(NamedTuple):
    """Readings of the machine's memory as a whole, as in :class:`MachineSample`."""

    nodes_online: int | Missing
    nodes_memory: int | Missing
    corrupted_kib: Reading


class MemoryView(NamedTuple):
    """Input of the memory rules for one NUMA node."""

    node: int
    machine: MachineMemory | None
    """Readings of the whole machine; None: not read yet."""
    edac_read: bool
    numa: NumaSample | None
    """Sample of the NUMA node; None: the NUMA node does not exist or has no memory now."""
    had_memory: bool
    """True if the NUMA node has memory now or had some since the agent's start."""
    blocks_online: Reading
    """Number of memory blocks that were online when the NUMA node first had memory."""
    only_node: bool
    """True if no other NUMA node has memory."""
    locations: tuple[ErrorLocation, ...]
    """Memory errors of the locations that belong, or may belong, to the NUMA node."""
    failure_lines: int
    """Number of kernel-log lines about pages with hardware errors on any NUMA node."""
    correctable_errors: int
    """Smallest number of correctable errors within the window for which the rule returns a finding."""
    correctable_window_s: int
    declared_bytes: int = 0
    """Memory size that a driver declares [bytes]; 0: not declared."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """State of the memory rules, which the next evaluation compares with."""

    blocks: Mapping[int, Reading] = field(default_factory=dict)
    """Number of memory blocks online at start, by NUMA node; only NUMA nodes that ever had memory."""
    failure_lines: int = 0
    """Number of kernel-log lines about pages with hardware errors."""
    errors: EdacState = field(default_factory=EdacState)
    locations: Mapping[int, tuple[ErrorLocation, ...]] = field(default_factory=dict)
    """Memory errors of each location, by NUMA node."""


def next_memory_state(
    previous: MemoryState, log: LogState, snapshot: Snapshot, settings: Settings, now: Instant
) -> MemoryState:
    """Return the state of the memory rules after a snapshot."""
    if snapshot.machine is None:
        return previous
    blocks = {**_blocks_online(snapshot.machine), **_known(previous.blocks)}
    errors = next_edac_state(previous.errors, log, snapshot, settings.host, now)
    fact = log.facts.get((LogCode.MEMORY_FAILURE, ""))
    failures = fact.times if fact else 0
    if errors is previous.errors and blocks.keys() == previous.blocks.keys():
        return MemoryState(blocks, failures, errors, previous.locations)
    locations = {
        node: tuple(
            location for location in errors.locations if location.nodes is None or location.nodes >> node & 1
        )
        for node in blocks
    }
    return MemoryState(blocks, failures, errors, locations)


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


def view_memory(state: MemoryState, snapshot: Snapshot, settings: Settings, node: int) -> MemoryView:
    """Return the rules' input for the memory of a NUMA node."""
    machine, limits = snapshot.machine, settings.host
    return MemoryView(
        node=node,
        machine=_machine_memory(machine) if machine and is_read(machine, "memory") else None,
        edac_read=is_read(machine, "edac"),
        numa=_numa(machine, node) if machine else None,
        had_memory=node in state.blocks,
        blocks_online=state.blocks.get(node, NEVER_READ),
        only_node=len(state.blocks) == 1,
        locations=state.locations.get(node, ()),
        failure_lines=state.failure_lines,
        correctable_errors=limits.correctable_errors,
        correctable_window_s=limits.correctable_window_s,
    )


def _machine_memory(machine: MachineSample) -> MachineMemory:
    return MachineMemory(machine.nodes_online, machine.nodes_memory, machine.corrupted_kib)


def _numa(machine: MachineSample, node: int) -> NumaSample | None:
    for nodes in (machine.nodes_online, machine.nodes_memory):
        if isinstance(nodes, int) and not nodes >> node & 1:
            return None
    return next((numa for numa in machine.numa if numa.node == node), None)


def view_declared_memory(
    state: MemoryState, snapshot: Snapshot, settings: Settings, declared: Declared
) -> MemoryView:
    """Return the rules' input for the memory that a driver declares."""
    assert isinstance(declared.part, DeclaredMemory), "the device is not memory"
    view = view_memory(state, snapshot, settings, declared.part.numa)
    return view._replace(declared_bytes=declared.part.size)
