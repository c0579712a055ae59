"""What can be wrong with memory: a NUMA node or blocks of it that are gone, or never were there."""

from typing import Final

from agent.health.catalog import Rule
from agent.health.host.memory.error_rules import ERROR_RULES, NOT_THERE, NOT_YET, TRY_SYSFS
from agent.health.host.memory.state import MemoryView
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, Unreadable, lacking
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing, is_absent

KIB: Final = 1 << 10
MIB: Final = 1 << 20


def numa_offline(view: MemoryView) -> RuleResult:
    """A NUMA node that had memory at start, or since, is offline or has none any more.

    Source: ``/sys/devices/system/node/online`` and ``has_memory``.
    """
    if view.machine is None:
        return NOT_YET
    online, having = view.machine.nodes_online, view.machine.nodes_memory
    if isinstance(online, Missing):
        return lacking("node/online", online, "no NUMA nodes")
    if isinstance(having, Missing) and not is_absent(having):
        return Unreadable("node/has_memory", having)
    if not view.had_memory:
        return OK
    evidence = ""
    if not online >> view.node & 1:
        evidence = f"NUMA node {view.node} is offline, it was online"
    elif isinstance(having, int) and not having >> view.node & 1:
        evidence = f"NUMA node {view.node} has no memory, it had some"
    return Finding("mem.numa.offline", Severity.UNHEALTHY, evidence) if evidence else OK


def blocks_offline(view: MemoryView) -> RuleResult:
    """Blocks of memory were taken offline, or away, since the start. What was offline then is only told.

    Source: ``node<N>/memory*/state`` [blocks].
    """
    if view.machine is None:
        return NOT_YET
    if view.numa is None:
        return NOT_THERE
    blocks, offline = view.numa.blocks, view.numa.blocks_offline
    if isinstance(blocks, Missing):
        return lacking("memory blocks", blocks, "no memory blocks")
    if isinstance(offline, Missing):
        return Unreadable("memory blocks", offline)
    online, before = blocks - offline, view.blocks_online
    if isinstance(before, int) and online < before:
        evidence = f"{online} memory {'block' if online == 1 else 'blocks'} online, {before} at start"
        return Finding("mem.blocks.offline", Severity.UNHEALTHY, evidence)
    if offline:
        return Finding("mem.blocks.offline", Severity.INFO, f"{offline} of {blocks} memory blocks offline")
    return OK


def missing(view: MemoryView) -> RuleResult:
    """A driver declares memory of a NUMA node that does not exist, or has less.

    Source: ``/sys/devices/system/node/online`` and ``has_memory``, ``MemTotal`` of ``node<N>/meminfo`` [KiB].
    """
    if view.machine is None:
        return NOT_YET
    online, having = view.machine.nodes_online, view.machine.nodes_memory
    if isinstance(online, Missing) and not is_absent(online):
        return RuleNotEvaluated("node/online cannot be read")
    if isinstance(online, Missing):
        online = 1  # a kernel without NUMA: all there is is node 0
    is_online = online >> view.node & 1
    if is_online and (isinstance(having, Missing) or having >> view.node & 1):
        return _too_little(view)
    if view.had_memory:
        return OK  # it was there: mem.numa.offline says that it is gone
    evidence = f"NUMA node {view.node} has no memory" if is_online else f"no NUMA node {view.node}"
    return Finding("mem.missing", Severity.UNHEALTHY, evidence)


def _too_little(view: MemoryView) -> RuleResult:
    if not view.declared_bytes:
        return OK
    if view.numa is None or is_absent(view.numa.total_kib):
        return RuleNotApplicable("no meminfo of NUMA nodes")
    total_kib = view.numa.total_kib
    if isinstance(total_kib, Missing):
        return Unreadable("MemTotal", total_kib)
    if total_kib * KIB >= view.declared_bytes:
        return OK
    # rounded apart, so that a difference is seen
    there, declared = total_kib * KIB // MIB, -(-view.declared_bytes // MIB)
    evidence = f"{there} MiB on NUMA node {view.node}, {declared} MiB declared"
    return Finding("mem.missing", Severity.UNHEALTHY, evidence)


MEMORY_RULES: Final = (
    *ERROR_RULES,
    Rule(
        code="mem.numa.offline",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="memory",
        threshold="a NUMA node that had memory is offline, or has none",
        why="claims were promised memory of this node; what they get now is far away, or nothing",
        advice="write online to /sys/devices/system/memory/memory<M>/state of its blocks; else reboot",
        judge=numa_offline,
        try_it=TRY_SYSFS + "take the node out of devices/system/node/online",
    ),
    Rule(
        code="mem.blocks.offline",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="memory",
        threshold="fewer blocks online than at start; those that were offline then are info",
        why="there is less memory than was handed out",
        advice="write online to /sys/devices/system/memory/memory<M>/state, unless it is offline on purpose",
        judge=blocks_offline,
        try_it="echo offline > /sys/devices/system/memory/memory<M>/state",
    ),
)

DECLARED_MEMORY_RULES: Final = (
    *MEMORY_RULES,
    Rule(
        code="mem.missing",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="memory",
        threshold="the NUMA node does not exist, has no memory, or less than is declared",
        why="the driver hands out memory that is not there",
        advice="correct the driver's declaration, or look for memory that the firmware has disabled",
        judge=missing,
        try_it="declare memory of NUMA node 9",
    ),
)
