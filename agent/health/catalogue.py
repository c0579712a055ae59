"""The catalogue: every rule as one row, with what it reads, its limits, who is to blame and what to do.

What a row reads also tells the native core what to wake for: a reading that no rule looks at wakes nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from agent.health import rules
from agent.health.rules import Answer
from agent.model.health import Blame, Severity
from agent.model.time import NS
from agent.model.wake import Field, GpuWake, Wake

CLEAN_PASSES: Final = 3
"""Clearing takes this many clean passes of the source, and..."""
CLEAN_MIN_NS: Final = NS
"""...this long without a bad one: with fast passes, what comes and goes would be told each time it does..."""
CLEAN_NS: Final = 10 * NS
"""...or only this long, if passes are rarer. One clean pass is never enough."""

STALLED: Final = "source.stalled"
STALLED_ADVICE: Final = (
    "a read hangs in the kernel: look at /proc/<pid>/task/*/stack of the agent, then restart it"
)
UNREADABLE_ADVICE: Final = "read the file by hand; an error there too is the kernel's, else restart the agent"
GPU_UNREADABLE_ADVICE: Final = (
    "ask nvidia-smi -q for it; an error there too is the driver's, else restart the agent"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One possible cause: what it means, and how long it takes to raise and to clear."""

    code: str
    severity: Severity
    blame: Blame
    source: str
    """Source whose pass is a look at it; ``gpu`` stands for that of the GPU at hand."""
    threshold: str
    """The limit with its unit, for people."""
    why: str
    advice: str
    try_it: str = ""
    """How to see it happen."""
    raise_after: int = 1
    """Bad passes in a row before the cause is raised; 1 for explicit facts."""
    raise_ns: int = 0
    """And bad for so long without a good pass [ns]."""
    clear_after: int = CLEAN_PASSES
    probation_ns: int = 0
    """How long a cause that has cleared is still held [ns]."""
    leads: bool = False
    """It is told before others that are as severe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Row):
    """A row that a function judges from readings."""

    reads: tuple[Field, ...] = ()
    """Of the sampler."""
    gpu_reads: tuple[GpuWake, ...] = ()
    """Of a GPU, and what of them the core must be woken for."""
    judge: Callable[[Any], Answer]
    """Takes the view of the rule's table below."""
    counter: bool = False
    """It reads counters and judges their growth over a window."""
    window_s: int = 0
    """The window of a counter [s]; 0: the configured one of throttle events."""
    blind: bool = False
    """It judges that a GPU does not answer, or what is known without the GPU's answer."""


@cache
def unreadable_of(rule: Rule) -> Row:
    """The row for "what this rule reads can no longer be read"."""
    return Row(
        code=f"{rule.code}.unreadable",
        severity=Severity.UNKNOWN,
        blame=Blame.AGENT,
        source=rule.source,
        threshold="it was readable before",
        why=rule.why,
        advice=GPU_UNREADABLE_ADVICE if rule.gpu_reads else UNREADABLE_ADVICE,
    )


CPU_RULES: Final = (
    Rule(
        code="cpu.offline",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="cpus",
        reads=(Field.CPU_ONLINE, Field.NODE_CPUS),
        threshold="any CPU that was online at start, or that the configuration names",
        why="a claim may hold the CPU; its threads now run elsewhere, on somebody else's",
        advice="write 1 to /sys/devices/system/cpu/cpu<N>/online; if that fails, look for machine checks",
        judge=rules.cpu_offline,
        try_it="echo 0 > /sys/devices/system/cpu/cpu1/online",
    ),
    Rule(
        code="cpu.throttled.core",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="throttle",
        reads=(Field.NODE_THROTTLE_CORE,),
        threshold="10 events in 60 s (throttle.events, throttle.window)",
        why="the cores run slower than what was paid for",
        advice="check fans, heat sinks and inlet temperature",
        judge=rules.cpu_throttled_core,
        counter=True,
        try_it="in a copy of sysfs (--sysfs-root), add 10 to cpu0/thermal_throttle/core_throttle_count",
    ),
    Rule(
        code="cpu.throttled.package",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="throttle",
        reads=(Field.NODE_THROTTLE_PACKAGE,),
        threshold="10 events in 60 s (throttle.events, throttle.window)",
        why="the whole socket runs slower than what was paid for",
        advice="check fans, heat sinks and inlet temperature",
        judge=rules.cpu_throttled_package,
        counter=True,
        try_it="in a copy of sysfs (--sysfs-root), add 10 to cpu0/thermal_throttle/package_throttle_count",
    ),
)

POOL_RULES: Final = (
    Rule(
        code="mem.hugepages.pool_shrunk",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="hugepages",
        reads=(Field.POOL_NR, Field.POOL_SURPLUS),
        threshold="fewer persistent pages than at start, or than configured",
        why="claims were promised pages that are no longer there",
        advice="write the number back to nr_hugepages and read it; if it stays short, free memory or reboot",
        judge=rules.pool_shrunk,
        try_it="echo 0 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
    ),
)

GROUP_RULES: Final = (
    Rule(
        code="cgroup.hugetlb.max_hit",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="cgroups",
        reads=(Field.GROUP_SET, Field.GROUP_HT_EVENTS),
        threshold="any hit in the last 10 min",
        why="the allocation failed with ENOMEM, or the process died of SIGBUS",
        advice="raise the pod's hugepage limit, or let the workload use fewer",
        judge=rules.hugetlb_limit_hit,
        try_it="in a container, map more hugepages than its limit and touch them",
    ),
)

ALL_RULES: Final = CPU_RULES + POOL_RULES + GROUP_RULES


def wakes(throttle_events: int, throttle_window_s: int) -> tuple[Wake, ...]:
    """What the native core must wake for, so that every rule sees what it judges."""
    found: dict[Field, Wake] = {}
    for rule in ALL_RULES:
        for field in rule.reads:
            if not rule.counter:
                found[field] = Wake(field)  # any change: more than any threshold asks for
            else:
                found.setdefault(field, Wake(field, throttle_events, throttle_window_s * NS))
    return tuple(found.values())
