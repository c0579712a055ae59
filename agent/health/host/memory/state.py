"""State that the memory rules carry between evaluations, and MemoryRuleInput, the input of these rules."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agent.health.host.memory.edac import (
    EdacState,
    MemoryErrorLocation,
    has_source_been_read,
    next_edac_state,
    numa_nodes_with_memory,
)
from agent.health.kernel_log.facts import KernelLogCode, KernelLogState
from agent.model.boot_baseline import MemoryBaseline
from agent.model.declared_devices import DeclaredMemoryDevice, DriverDevice
from agent.model.machine_samples import MachineSample, NumaMemorySample
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import Instant


class MachineMemoryReadings(NamedTuple):
    """Readings about the memory of the whole machine."""

    nodes_online: int | Missing
    """NUMA nodes that are online, as a bit set."""
    nodes_memory: int | Missing
    """NUMA nodes that have memory, as a bit set."""
    corrupted_kib: Reading
    """Memory with hardware errors [KiB]."""


class MemoryRuleInput(NamedTuple):
    """Input of the memory rules for one NUMA node."""

    numa_node: int
    machine: MachineMemoryReadings | None
    """Readings of the whole machine; None: not read yet."""
    edac_read: bool
    """True: the EDAC controllers have been read at least once."""
    sample: NumaMemorySample | None
    """Sample of the NUMA node; None: the NUMA node does not exist or has no memory now."""
    had_memory: bool
    """True: the NUMA node has memory now or had some since the agent's start."""
    blocks_online: Reading
    """Number of memory blocks that were online when the NUMA node first had memory."""
    is_only_numa_node: bool
    """True: no other NUMA node has memory."""
    locations: tuple[MemoryErrorLocation, ...]
    """Memory errors of the locations that belong, or may belong, to the NUMA node."""
    failure_lines: int
    """Number of kernel-log lines about pages with hardware errors on any NUMA node."""
    failed_since: Instant | None
    """Time of the first kernel-log line about a page with hardware errors; None: the log has no such line."""
    correctable_errors: int
    """Smallest number of correctable errors within the window that is a fault."""
    correctable_window_s: int
    declared_bytes: int = 0
    """Memory size that a driver declares [bytes]; 0: not declared."""


@dataclass(frozen=True, slots=True)
class MemoryRuleState:
    """Values that the memory rules carry from one evaluation to the next."""

    blocks_online: Mapping[int, Reading] = field(default_factory=dict)
    """Number of memory blocks online at start, by NUMA node; only NUMA nodes that ever had memory."""
    failure_lines: int = 0
    """Number of kernel-log lines about pages with hardware errors."""
    failed_since: Instant | None = None
    """Time of the first kernel-log line about a page with hardware errors; None: the log has no such line."""
    errors: EdacState = field(default_factory=EdacState)
    locations: Mapping[int, tuple[MemoryErrorLocation, ...]] = field(default_factory=dict)
    """Memory errors of the locations that may belong to a NUMA node, by NUMA node."""


def next_memory_state(
    previous: MemoryRuleState, log: KernelLogState, snapshot: Snapshot, settings: EngineSettings, now: Instant
) -> MemoryRuleState:
    """Return the state of the memory rules after a snapshot."""
    if snapshot.machine is None:
        return previous
    blocks = {**_blocks_online(snapshot.machine), **_known(previous.blocks_online)}
    errors = next_edac_state(previous.errors, log, snapshot, settings.host, now)
    fact = log.facts.get((KernelLogCode.MEMORY_FAILURE, ""))
    failures, failed_since = (fact.times, fact.since) if fact else (0, None)
    if errors is previous.errors and blocks.keys() == previous.blocks_online.keys():
        return MemoryRuleState(blocks, failures, failed_since, errors, previous.locations)
    locations = {
        node: tuple(
            location
            for location in errors.locations
            if location.numa_nodes is None or location.numa_nodes >> node & 1
        )
        for node in blocks
    }
    return MemoryRuleState(blocks, failures, failed_since, errors, locations)


def _known(blocks: Mapping[int, Reading]) -> Mapping[int, Reading]:
    return {node: online for node, online in blocks.items() if isinstance(online, int)}


def _blocks_online(machine: MachineSample) -> Mapping[int, Reading]:
    having = numa_nodes_with_memory(machine)
    return {
        numa.numa_node: numa.blocks - numa.blocks_offline
        if isinstance(numa.blocks, int) and isinstance(numa.blocks_offline, int)
        else NEVER_READ
        for numa in machine.numa
        if having >> numa.numa_node & 1
    }


def memory_baselines(state: MemoryRuleState) -> Iterator[MemoryBaseline]:
    """Yield the memory that each NUMA node had at the agent's start, to be stored as baseline."""
    for node, online in sorted(state.blocks_online.items()):
        yield MemoryBaseline(node, online if isinstance(online, int) else -1)


def restored_memory_state(memory: Iterable[MemoryBaseline]) -> MemoryRuleState:
    """Return the state of the memory rules with the baseline that the agent before a restart stored."""
    return MemoryRuleState(
        {node: online if online >= 0 else NEVER_READ for node, online in memory},
        locations={node: () for node, _ in memory},
    )


def restart_memory(state: MemoryRuleState, snapshot: Snapshot, numa_node: int) -> MemoryRuleState:
    """Return the memory rules' state in which a NUMA node's present memory is its new baseline."""
    if snapshot.machine is None or numa_node not in state.blocks_online:
        return state
    known = {node: online for node, online in state.blocks_online.items() if node != numa_node}
    now = _blocks_online(snapshot.machine)
    return replace(state, blocks_online={**known, **{n: now[n] for n in now if n == numa_node}})


def memory_rule_input(
    state: MemoryRuleState, snapshot: Snapshot, settings: EngineSettings, numa_node: int
) -> MemoryRuleInput:
    """Return the memory rules' input for one NUMA node."""
    machine, limits = snapshot.machine, settings.host
    return MemoryRuleInput(
        numa_node=numa_node,
        machine=MachineMemoryReadings(machine.nodes_online, machine.nodes_memory, machine.corrupted_kib)
        if machine and has_source_been_read(machine, "memory")
        else None,
        edac_read=has_source_been_read(machine, "edac"),
        sample=_numa(machine, numa_node) if machine else None,
        had_memory=numa_node in state.blocks_online,
        blocks_online=state.blocks_online.get(numa_node, NEVER_READ),
        is_only_numa_node=len(state.blocks_online) == 1,
        locations=state.locations.get(numa_node, ()),
        failure_lines=state.failure_lines,
        failed_since=state.failed_since,
        correctable_errors=limits.correctable_errors,
        correctable_window_s=limits.correctable_window_s,
    )


def _numa(machine: MachineSample, node: int) -> NumaMemorySample | None:
    for nodes in (machine.nodes_online, machine.nodes_memory):
        if isinstance(nodes, int) and not nodes >> node & 1:
            return None
    return next((numa for numa in machine.numa if numa.numa_node == node), None)


def declared_memory_rule_input(
    state: MemoryRuleState, snapshot: Snapshot, settings: EngineSettings, declared: DriverDevice
) -> MemoryRuleInput:
    """Return the memory rules' input for the memory that a driver declares on one NUMA node."""
    assert isinstance(declared.part, DeclaredMemoryDevice), "the device is not memory"
    view = memory_rule_input(state, snapshot, settings, declared.part.numa)
    return view._replace(declared_bytes=declared.part.size)
