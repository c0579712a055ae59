"""Health rules for memory, and the state that the rules carry between evaluations.

The rules report errors of memory modules, pages with hardware errors, and missing NUMA nodes and blocks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from agent.health.host.memory.edac import (
    EdacState,
    MemoryErrorCounts,
    has_edac_been_read,
    has_source_been_read,
    next_edac_state,
    numa_nodes_with_memory,
    unchanged_edac_state,
)
from agent.health.kernel_log.facts import (
    KernelLogCode,
    KernelLogState,
    is_log_complete,
    log_reader_state,
    no_log_lines_result,
)
from agent.health.rules import (
    OK,
    Rule,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
    format_at_least,
    format_duration,
    missing_reading_result,
)
from agent.model.declared_devices import DeclaredMemoryDevice, DriverDevice
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.machine_samples import MachineSample, NumaMemorySample
from agent.model.persistent_faults import MemoryBaseline
from agent.model.reading import NEVER_READ, Missing, Reading, SourceState, is_absent
from agent.model.settings import EngineSettings, HostLimits
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
    locations: tuple[MemoryErrorCounts, ...]
    """Memory errors of the locations that belong, or may belong, to the NUMA node."""
    failure_lines: int
    """Number of kernel-log lines about pages with hardware errors on any NUMA node."""
    failed_since: Instant | None
    """Time of the first kernel-log line about a page with hardware errors; None: the log has no such line."""
    correctable_errors: int
    """Smallest number of correctable errors within the window that is a fault."""
    correctable_window_s: int
    log_reader: SourceState = SourceState.ABSENT
    is_log_complete: bool = False
    """True: all lines of the kernel log since boot were read."""
    declared_bytes: int = 0
    """Memory size that a driver declares [bytes]; 0: not declared."""


class MemoryRuleState(NamedTuple):
    """Values that the memory rules carry from one evaluation to the next."""

    blocks_online: Mapping[int, Reading] = {}
    """Number of memory blocks online at start, by NUMA node; only NUMA nodes that ever had memory."""
    failure_lines: int = 0
    """Number of kernel-log lines about pages with hardware errors."""
    failed_since: Instant | None = None
    """Time of the first kernel-log line about a page with hardware errors; None: the log has no such line."""
    errors: EdacState = EdacState()
    locations: Mapping[int, tuple[MemoryErrorCounts, ...]] = {}
    """Memory errors of the locations that may belong to a NUMA node, by NUMA node."""


def next_memory_state(
    previous: MemoryRuleState, log: KernelLogState, snapshot: Snapshot, settings: EngineSettings, now: Instant
) -> MemoryRuleState:
    """Return the state of the memory rules after a snapshot (the newest readings)."""
    if snapshot.machine is None:
        return previous
    known = {node: online for node, online in previous.blocks_online.items() if isinstance(online, int)}
    blocks = {**_blocks_online(snapshot.machine), **known}
    errors = next_edac_state(previous.errors, log, snapshot, settings.host, now, blocks)
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


def unchanged_memory_state(previous: MemoryRuleState, snapshot: Snapshot) -> MemoryRuleState:
    """Return the memory rules' state after a snapshot with the same readings as in the last evaluation."""
    errors = unchanged_edac_state(previous.errors, snapshot)
    return previous if errors is previous.errors else previous._replace(errors=errors)


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
    """Yield the memory that each NUMA node had at the agent's start, to be stored for a restart."""
    for node, online in sorted(state.blocks_online.items()):
        yield MemoryBaseline(node, online if isinstance(online, int) else -1)


def restored_memory_state(memory: Iterable[MemoryBaseline]) -> MemoryRuleState:
    """Return the state of the memory rules with the values that the agent stored before a restart."""
    return MemoryRuleState(
        {node: online if online >= 0 else NEVER_READ for node, online in memory},
        locations={node: () for node, _ in memory},
    )


def rebaseline_memory(state: MemoryRuleState, snapshot: Snapshot, numa_node: int) -> MemoryRuleState:
    """Return the memory rules' state in which a NUMA node's present memory replaces its memory at start."""
    if snapshot.machine is None or numa_node not in state.blocks_online:
        return state
    known = {node: online for node, online in state.blocks_online.items() if node != numa_node}
    now = _blocks_online(snapshot.machine)
    return state._replace(blocks_online={**known, **{n: now[n] for n in now if n == numa_node}})


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
        edac_read=has_edac_been_read(machine),
        sample=_numa(machine, numa_node) if machine else None,
        had_memory=numa_node in state.blocks_online,
        blocks_online=state.blocks_online.get(numa_node, NEVER_READ),
        is_only_numa_node=len(state.blocks_online) == 1,
        locations=state.locations.get(numa_node, ()),
        failure_lines=state.failure_lines,
        failed_since=state.failed_since,
        correctable_errors=limits.correctable_errors,
        correctable_window_s=limits.correctable_window_s,
        log_reader=log_reader_state(snapshot.log),
        is_log_complete=is_log_complete(snapshot.log),
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


# --- rules -------------------------------------------------------------------------------------------------

MAX_LOCATIONS_LISTED: Final = 4
"""Largest number of error locations that a message lists; it gives the number of the others."""
NOT_YET: Final = RuleInconclusive("the machine's memory has not been read yet")
NO_MEMORY: Final = RuleInconclusive("the NUMA node has no memory")
NO_COUNTERS: Final = RuleNotApplicable("the machine has no EDAC error counters")
_PRECAUTION: Final = "find the module (EDAC, rasdaemon); replace it at the next maintenance if pages follow"
TRY_SYSFS: Final = "in a copy of sysfs (--sysfs-root), "
_LIMITS: Final = HostLimits()


def _format_locations(bad: Sequence[tuple[MemoryErrorCounts, str, int]]) -> str:
    """Format the memory modules with most errors, each with its fault, in the order of ``bad``.

    Args:
        bad: Each faulty module with the text of its fault and its number of errors. If there are more than
            MAX_LOCATIONS_LISTED modules, the remaining ones are counted but not listed.
    """
    most = sorted(range(len(bad)), key=lambda at: -bad[at][2])[:MAX_LOCATIONS_LISTED]
    texts = [
        f"{location.name}: {fault}" + ("" if location.numa_nodes is not None else " (NUMA node unknown)")
        for location, fault, _ in map(bad.__getitem__, sorted(most))
    ]
    if len(bad) > MAX_LOCATIONS_LISTED:
        texts.append(f"and {len(bad) - MAX_LOCATIONS_LISTED} more")
    return ", ".join(texts)


def detect_uncorrectable_errors(view: MemoryRuleInput) -> RuleResult:
    """A memory module had uncorrectable errors since its EDAC driver was loaded or its counters were reset.

    Source: ``edac/mc/mc*/ue_count`` and ``dimm_ue_count`` of its modules [count]; without them, lines of EDAC
    in the kernel log.
    """
    if not view.edac_read:
        return NOT_YET
    bad = []
    for location in view.locations:
        count = location.uncorrectable
        if isinstance(count, int) and count:
            noun = "error" if count == 1 else "errors"
            since = "in the kernel log" if location.logged else "since the EDAC driver was loaded"
            bad.append((location, f"{format_at_least(count)} uncorrectable {noun} {since}", count))
    if bad:
        began = min((location.since for location, _, _ in bad if location.since), default=None)
        return Finding("mem.ecc.uncorrectable", Severity.UNHEALTHY, _format_locations(bad), since=began)
    for location in view.locations:
        if isinstance(location.uncorrectable, Missing) and not is_absent(location.uncorrectable):
            return RuleInputUnreadable(f"ue_count of {location.name}", location.uncorrectable)
    return OK if view.locations else NO_COUNTERS


def detect_frequent_correctable_errors(view: MemoryRuleInput) -> RuleResult:
    """A memory module had more corrected errors than the limit allows, within the window.

    Source: growth of ``edac/mc/mc*/ce_count`` and ``dimm_ce_count`` of its modules [count]; without them,
    lines of EDAC in the kernel log.
    """
    if not view.edac_read:
        return NOT_YET
    if not view.locations:
        return NO_COUNTERS
    limit, window_s = view.correctable_errors, view.correctable_window_s
    counted = [(location, *location.correctable) for location in view.locations]
    fault = f"at least {limit} correctable errors in {format_duration(window_s)}"
    faulty = [
        (location, fault, events)
        for location, events, _ in counted
        if isinstance(events, int) and events >= limit
    ]
    if faulty:
        return Finding("mem.ecc.correctable_rate", Severity.DEGRADED, _format_locations(faulty))
    for location, events, _ in counted:
        if isinstance(events, Missing) and not is_absent(events):
            return RuleInputUnreadable(f"ce_count of {location.name}", events)
    if any(isinstance(events, int) and span_s < window_s for _, events, span_s in counted):
        return RuleInconclusive(f"needs {format_duration(window_s)} of history")
    return OK


def detect_poisoned_pages(view: MemoryRuleInput) -> RuleResult:
    """Memory pages had hardware errors: the kernel took them out of use and killed the processes that used
    them.

    Kernels before Linux 6.4 do not count them by NUMA node; then they count for every NUMA node. Their count
    includes pages taken out of use as a precaution, which lose no data: degraded if the kernel log was read
    since boot, and has no line of memory failure.

    Source: ``node<N>/memory_failure/total`` [pages]; else ``HardwareCorrupted`` of ``/proc/meminfo`` [KiB],
    and lines of memory failure in the kernel log.
    """
    if view.machine is None:
        return NOT_YET
    if view.sample is None:
        return NO_MEMORY
    pages = view.sample.poisoned
    if is_absent(pages):
        return _poisoned_on_unknown_numa_node(view, view.machine.corrupted_kib)
    if isinstance(pages, Missing):
        return RuleInputUnreadable("memory_failure/total", pages)
    if not pages:
        return OK
    noun = "page" if pages == 1 else "pages"
    return Finding(
        "mem.poisoned", Severity.UNHEALTHY, f"{format_at_least(pages)} {noun} with hardware errors"
    )


def _poisoned_on_unknown_numa_node(view: MemoryRuleInput, kib: Reading) -> RuleResult:
    lines = view.failure_lines
    place = "" if view.is_only_numa_node else ", NUMA node unknown"
    fault = ""
    if isinstance(kib, int) and kib and not lines:
        if view.log_reader is SourceState.STARTING:
            return no_log_lines_result(view.log_reader)
        if view.is_log_complete:
            evidence = f"{format_at_least(kib)} KiB taken out of use as a precaution{place}"
            return Finding(
                "mem.poisoned", Severity.DEGRADED, evidence, _PRECAUTION, repair=Repair.INSPECT_HARDWARE
            )
    if isinstance(kib, int) and kib:
        fault = f"{format_at_least(kib)} KiB with hardware errors"
    elif lines:
        noun = "line" if lines == 1 else "lines"
        fault = f"{format_at_least(lines)} {noun} of memory failure in the kernel log"
    if fault:
        return Finding("mem.poisoned", Severity.UNHEALTHY, fault + place, since=view.failed_since)
    if isinstance(kib, int):
        return OK
    return missing_reading_result(
        "HardwareCorrupted", kib, "the kernel does not count pages with hardware errors"
    )


_memory_rule = partial(
    Rule, severity=Severity.UNHEALTHY, blame=Blame.CONFIGURATION, source="memory", repair=Repair.NONE
)
"""Constructor of a ``Rule`` for memory; defaults: ``unhealthy``, blame on the configuration, no repair."""
ERROR_RULES: Final = (
    _memory_rule(
        code="mem.ecc.uncorrectable",
        blame=Blame.HARDWARE,
        source="edac",
        threshold="1 error since the EDAC driver was loaded, or its counters were reset",
        why="data was lost, and a module that has lost data is likely to lose more",
        advice="drain the node and replace the module; a reboot or mc<N>/reset_counters resets the count",
        repair=Repair.REPLACE_HARDWARE,
        evaluate=detect_uncorrectable_errors,
        try_it=TRY_SYSFS + "write 1 to devices/system/edac/mc/mc0/ue_count",
    ),
    _memory_rule(
        code="mem.poisoned",
        blame=Blame.HARDWARE,
        threshold="1 page since boot",
        why="processes that use such a page are killed; an access by the kernel is a panic",
        advice="drain the node, find the module in the kernel log (EDAC, machine checks) and replace it",
        repair=Repair.REPLACE_HARDWARE,
        evaluate=detect_poisoned_pages,
        try_it=TRY_SYSFS + "write 1 to devices/system/node/node0/memory_failure/total",
    ),
    _memory_rule(
        code="mem.ecc.correctable_rate",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="edac",
        threshold=f"{_LIMITS.correctable_errors} errors of one module in "
        f"{format_duration(_LIMITS.correctable_window_s)} (errors.correctable, errors.window)",
        why="frequent corrected errors often precede uncorrectable ones",
        advice="replace the module at the next maintenance",
        repair=Repair.REPLACE_HARDWARE,
        evaluate=detect_frequent_correctable_errors,
        counts_growth=True,
        window_s=_LIMITS.correctable_window_s,
        limit_in_view="correctable_errors",
        try_it=TRY_SYSFS + f"add {_LIMITS.correctable_errors} to devices/system/edac/mc/mc0/ce_count",
    ),
)


KIB: Final = 1 << 10
MIB: Final = 1 << 20


def detect_offline_numa_node(view: MemoryRuleInput) -> RuleResult:
    """A NUMA node that had memory at start, or later, is offline or has no memory any more.

    Source: ``/sys/devices/system/node/online`` and ``has_memory``.
    """
    if view.machine is None:
        return NOT_YET
    online, having = view.machine.nodes_online, view.machine.nodes_memory
    if isinstance(online, Missing):
        return missing_reading_result("node/online", online, "the kernel reports no NUMA nodes")
    if isinstance(having, Missing) and not is_absent(having):
        return RuleInputUnreadable("node/has_memory", having)
    if not view.had_memory:
        return OK
    evidence = ""
    if not online >> view.numa_node & 1:
        evidence = f"NUMA node {view.numa_node} is offline, it was online"
    elif isinstance(having, int) and not having >> view.numa_node & 1:
        evidence = f"NUMA node {view.numa_node} has no memory, it had some"
    return Finding("mem.numa.offline", Severity.UNHEALTHY, evidence) if evidence else OK


def detect_offline_blocks(view: MemoryRuleInput) -> RuleResult:
    """Memory blocks were taken offline or removed since the agent's start; blocks offline at start are info
    only.

    Source: ``node<N>/memory*/state`` [blocks].
    """
    if view.machine is None:
        return NOT_YET
    if view.sample is None:
        return NO_MEMORY
    blocks, offline = view.sample.blocks, view.sample.blocks_offline
    if isinstance(blocks, Missing):
        return missing_reading_result("memory blocks", blocks, "the kernel reports no memory blocks")
    if isinstance(offline, Missing):
        return RuleInputUnreadable("memory blocks", offline)
    online, before = blocks - offline, view.blocks_online
    if isinstance(before, int) and online < before:
        evidence = f"{online} memory {'block' if online == 1 else 'blocks'} online, {before} at start"
        return Finding("mem.blocks.offline", Severity.UNHEALTHY, evidence)
    if offline:
        return Finding("mem.blocks.offline", Severity.INFO, f"{offline} of {blocks} memory blocks offline")
    return OK


def detect_missing_memory(view: MemoryRuleInput) -> RuleResult:
    """A driver declares memory of a NUMA node that does not exist or has less memory than declared.

    Source: ``/sys/devices/system/node/online`` and ``has_memory``, ``MemTotal`` of ``node<N>/meminfo`` [KiB].
    """
    if view.machine is None:
        return NOT_YET
    online, having = view.machine.nodes_online, view.machine.nodes_memory
    if isinstance(online, Missing) and not is_absent(online):
        return RuleInconclusive("node/online cannot be read")
    if isinstance(online, Missing):
        online = 1  # a kernel without NUMA has node 0 only
    is_online = online >> view.numa_node & 1
    if is_online and (isinstance(having, Missing) or having >> view.numa_node & 1):
        return _declared_size_result(view)
    if view.had_memory:
        return OK  # mem.numa.offline covers nodes that had memory
    evidence = f"NUMA node {view.numa_node} has no memory" if is_online else f"no NUMA node {view.numa_node}"
    return Finding("mem.missing", Severity.UNHEALTHY, evidence)


def _declared_size_result(view: MemoryRuleInput) -> RuleResult:
    if not view.declared_bytes:
        return OK
    if view.sample is None or is_absent(view.sample.total_kib):
        return RuleNotApplicable("the kernel has no meminfo files of NUMA nodes")
    total_kib = view.sample.total_kib
    if isinstance(total_kib, Missing):
        return RuleInputUnreadable("MemTotal", total_kib)
    if total_kib * KIB >= view.declared_bytes:
        return OK
    # rounded in opposite directions, so that the numbers differ
    present, declared = total_kib * KIB // MIB, -(-view.declared_bytes // MIB)
    evidence = f"{present} MiB on NUMA node {view.numa_node}, {declared} MiB declared"
    return Finding("mem.missing", Severity.UNHEALTHY, evidence)


MEMORY_RULES: Final = (
    *ERROR_RULES,
    _memory_rule(
        code="mem.numa.offline",
        threshold="a NUMA node that had memory is offline, or has none",
        why="claims expect memory of this node; they now get remote memory or none",
        advice="write online to /sys/devices/system/memory/memory<M>/state of its blocks; else reboot",
        evaluate=detect_offline_numa_node,
        try_it=TRY_SYSFS + "take the node out of devices/system/node/online",
    ),
    _memory_rule(
        code="mem.blocks.offline",
        threshold="fewer blocks online than at start; info for blocks that were offline at start",
        why="less memory exists than was allocated to claims",
        advice="write online to /sys/devices/system/memory/memory<M>/state, unless it is offline on purpose",
        evaluate=detect_offline_blocks,
        try_it="echo offline > /sys/devices/system/memory/memory<M>/state",
    ),
)

DECLARED_MEMORY_RULES: Final = (
    *MEMORY_RULES,
    _memory_rule(
        code="mem.missing",
        threshold="the NUMA node does not exist, has no memory, or less than is declared",
        why="the driver offers memory that does not exist",
        advice="correct the driver's declaration, or check whether the firmware has disabled memory",
        evaluate=detect_missing_memory,
        try_it="declare memory of NUMA node 9",
    ),
)
