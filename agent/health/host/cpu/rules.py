"""Which CPUs there are, and whether they are those that should be; the rows of all rules of CPUs."""

from typing import Final

from agent.health.catalog import Rule
from agent.health.host.cpu.fault_rules import FAULT_RULES
from agent.health.host.cpu.speed_rules import SPEED_RULES
from agent.health.host.cpu.state import CpuView, named
from agent.health.rules import OK, RuleNotApplicable, RuleResult, Unreadable, lacking
from agent.model.cpuset import cpus_of, format_cpus
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import NEVER_READ, Missing
from agent.model.wake import Field

NODE_CPUS: Final = "node{}/cpulist"


def cpu_offline(view: CpuView) -> RuleResult:
    """CPUs that should be online are not.

    Source: ``/sys/devices/system/cpu/online`` against the set at start, as configured, or as declared.
    """
    if isinstance(view.online, Missing):
        return Unreadable("cpu/online", view.online)
    if view.node and isinstance(view.node.cpus, Missing):
        return Unreadable(NODE_CPUS.format(view.node.node), view.node.cpus)
    gone = view.expected.cpus & ~view.online
    if not gone:
        return OK
    evidence = f"{named(gone)} offline, {view.expected.by}: {format_cpus(view.expected.cpus)}"
    return Finding("cpu.offline", Severity.UNHEALTHY, evidence)


def cpu_missing(view: CpuView) -> RuleResult:
    """The machine does not have CPUs that a driver declares.

    Source: ``/sys/devices/system/cpu/present``.
    """
    if isinstance(view.present, Missing):
        return Unreadable("cpu/present", view.present)
    absent = view.cpus & ~view.present
    if not absent:
        return OK
    do = "does" if absent.bit_count() == 1 else "do"
    evidence = f"{named(absent)} {do} not exist, declared: {format_cpus(view.cpus)}"
    return Finding("cpu.missing", Severity.UNHEALTHY, evidence)


def cpu_numa(view: CpuView) -> RuleResult:
    """Declared CPUs are on another NUMA node than their driver says.

    A CPU that has never been online is on none that anybody could name: another rule tells of it.

    Source: ``/sys/devices/system/node/node*/cpulist``.
    """
    if view.declared is None or view.declared.numa is None:
        return RuleNotApplicable("no NUMA node is declared")
    number = view.declared.numa
    said = f"declared: NUMA node {number}"
    nodes = {node.node: node.cpus for node in view.nodes}
    if nodes and number not in nodes:
        return Finding("cpu.numa", Severity.UNHEALTHY, f"NUMA node {number} does not exist, {said}")
    elsewhere = [
        f"{named(view.cpus & cpus)} on NUMA node {node}"
        for node, cpus in nodes.items()
        if node != number and isinstance(cpus, int) and view.cpus & cpus
    ]
    if elsewhere:
        return Finding("cpu.numa", Severity.UNHEALTHY, f"{', '.join(elsewhere)}, {said}")
    own = nodes.get(number, NEVER_READ)
    return Unreadable(NODE_CPUS.format(number), own) if isinstance(own, Missing) else OK


def cpu_isolation(view: CpuView) -> RuleResult:
    """CPUs that should be isolated are not: the kernel schedules other tasks on them.

    Source: ``/sys/devices/system/cpu/isolated`` against the set at start, or as declared.
    """
    if isinstance(view.isolated, Missing):
        return lacking("cpu/isolated", view.isolated, "the kernel does not tell which CPUs are isolated")
    open_to_all = view.apart.cpus & ~view.isolated
    if not open_to_all:
        return OK
    evidence = f"{named(open_to_all)} not isolated, {view.apart.by}: {format_cpus(view.apart.cpus)}"
    return Finding("cpu.isolation", Severity.DEGRADED, evidence)


def cpu_smt(view: CpuView) -> RuleResult:
    """Simultaneous multithreading was switched on or off since the agent started.

    Source: ``/sys/devices/system/cpu/smt/active`` against itself at start.
    """
    now, start = view.smt, view.smt_start
    if isinstance(now, Missing):
        return lacking("smt/active", now, "the kernel does not tell of SMT")
    if now == start:
        return OK
    return Finding("cpu.smt", Severity.INFO, "SMT on, off at start" if now else "SMT off, on at start")


def cpu_shared_core(view: CpuView) -> RuleResult:
    """Declared CPUs share cores with CPUs that are not in the set; all of them are online.

    Source: ``cpu*/topology/core_cpus_list``.
    """
    cores = view.cores
    online = ~0 if isinstance(view.online, Missing) else view.online
    inside = outside = 0
    if cores.sharing:
        for cpu in cpus_of(view.cpus & online):
            if others := cores.sharing.get(cpu, 0) & online & ~view.cpus:
                inside |= 1 << cpu
                outside |= others
    if outside:
        share = "shares a core" if outside.bit_count() == 1 else "share cores"
        evidence = f"{named(outside)} {share} with {format_cpus(inside)}"
        return Finding("cpu.shared_core", Severity.INFO, evidence)
    for cpu, why in cores.core_lost.items():
        if view.cpus >> cpu & 1:
            return Unreadable(f"cpu{cpu}/topology/core_cpus_list", why)
    return (
        OK
        if cores.placed & view.cpus
        else RuleNotApplicable("the kernel does not tell which CPUs share cores")
    )


_OFFLINE: Final = Rule(
    code="cpu.offline",
    severity=Severity.UNHEALTHY,
    blame=Blame.CONFIGURATION,
    source="cpus",
    reads=(Field.CPU_ONLINE, Field.NODE_CPUS),
    threshold="any CPU that was online at start, or that the configuration or a driver names",
    why="a claim may hold the CPU; its threads now run elsewhere, on somebody else's",
    advice="write 1 to /sys/devices/system/cpu/cpu<N>/online; if that fails, look for machine checks",
    judge=cpu_offline,
    try_it="echo 0 > /sys/devices/system/cpu/cpu1/online",
)
_ISOLATION: Final = Rule(
    code="cpu.isolation",
    severity=Severity.DEGRADED,
    blame=Blame.CONFIGURATION,
    source="cpus",
    reads=(Field.CPU_ISOLATED,),
    threshold="any CPU that was isolated at start, or that a driver declares to be",
    why="tasks of others run on CPUs that somebody counts on having alone",
    advice="name the CPUs in isolcpus= on the kernel's command line and boot, or make their cpuset partition "
    "isolated again",
    judge=cpu_isolation,
    try_it="in devices.d, declare CPUs with isolated = true that are not in /sys/devices/system/cpu/isolated",
)
_SMT: Final = Rule(
    code="cpu.smt",
    severity=Severity.INFO,
    blame=Blame.CONFIGURATION,
    source="cores",
    threshold="on and off at start, or off and on at start",
    why="half of the CPUs are gone, or each has to share its core",
    advice="write on, or off, to /sys/devices/system/cpu/smt/control",
    judge=cpu_smt,
    try_it="echo off > /sys/devices/system/cpu/smt/control",
)
_OF_DECLARATIONS: Final = (
    Rule(
        code="cpu.missing",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="cpus",
        reads=(Field.CPU_ONLINE,),
        threshold="any declared CPU that the machine does not have",
        why="the driver offers what is not there",
        advice="compare the declaration with /sys/devices/system/cpu/present; let the driver declare anew",
        judge=cpu_missing,
        try_it="in devices.d, declare CPUs that the machine does not have",
    ),
    Rule(
        code="cpu.numa",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="cpus",
        reads=(Field.NODE_CPUS,),
        threshold="any declared CPU on another NUMA node, or a node that does not exist",
        why="claims are placed by NUMA node: memory and devices would be those of another",
        advice="compare the declaration with lscpu; let the driver declare anew",
        judge=cpu_numa,
        try_it="in devices.d, declare CPUs with the number of a NUMA node that they are not on",
    ),
    Rule(
        code="cpu.shared_core",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        source="cores",
        threshold="any online CPU that is not declared with them",
        why="whoever runs on the other thread of a core takes from its speed",
        advice="declare whole cores: lscpu -e tells which CPUs share one",
        judge=cpu_shared_core,
        try_it="in devices.d, declare one of two CPUs that share a core",
    ),
)

CPU_RULES: Final = (_OFFLINE, *FAULT_RULES, *SPEED_RULES, _ISOLATION, _SMT)
"""Of the CPUs of a NUMA node."""
DECLARED_CPU_RULES: Final = (_OFFLINE, *_OF_DECLARATIONS, *FAULT_RULES, *SPEED_RULES, _ISOLATION)
"""Of CPUs that a driver declares. That SMT was switched they see by their own cores."""
