"""What can be wrong with the cgroups of pods; that they ran into limits is
agent.health.host.cgroup.limit_rules'.

Notes, for people: how pods fare is no device's fault. What a pod has not enough of is a word on those of its
devices that give it, too. More than a word is one thing: time that was kept from a container on CPUs that are
its alone.
"""

from collections.abc import Mapping
from typing import Final

from agent.devices.inventory import Kind
from agent.health.catalog import Rule
from agent.health.host.cgroup.limit_rules import HUGETLB_LIMIT_RULE, MEMORY_LIMIT_RULES
from agent.health.host.cgroup.view import GroupView
from agent.health.host.cgroup.words import once
from agent.health.rules import OK, RuleNotEvaluated, RuleResult
from agent.model.cpuset import format_cpus
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Absence, Missing
from agent.model.time import NS
from agent.model.wake import Field, Wake

PERIODS: Final = 20
"""Of fewer CPU periods, two seconds' worth of 100 ms each, a share says nothing."""
EXCLUSIVE_LOOKS: Final = 2
"""A quota that is taken back right after the start, as the kubelet may, throttles within one look."""
FROZEN_S: Final = 300

_THROTTLED: Final = Wake(Field.GROUP_CPU_THROTTLED, PERIODS // 4, 60 * NS)


@once
def cpu_throttled(view: GroupView) -> RuleResult:
    """A container used up its quota of CPU time in many of the periods in which it ran.

    Source: ``cpu.stat`` nr_throttled against nr_periods [count], over the window.
    """
    percent, window_s = view.limits.throttled_percent, view.limits.throttled_window_s
    throttled, periods, _ = view.throttling
    if periods < PERIODS or throttled * 100 <= percent * periods:
        return OK
    evidence = f"throttled in more than {percent} % of its CPU periods in {window_s} s"
    return Finding("cgroup.cpu.throttled", Severity.INFO, evidence)


@once
def cpu_throttled_exclusive(view: GroupView) -> RuleResult:
    """A container was throttled on CPUs that are its alone.

    Source: ``cpu.stat`` nr_throttled [count], over the window; ``cpuset.cpus.effective`` (cgroup v1:
    ``cpuset.effective_cpus``) against the CPUs that drivers declare as exclusive.
    """
    if not view.exclusive or view.throttling.looks < EXCLUSIVE_LOOKS or isinstance(view.group.cpus, Missing):
        return OK
    evidence = f"throttled on exclusive CPUs {format_cpus(view.group.cpus)}"
    return Finding("cgroup.cpu.throttled_exclusive", Severity.DEGRADED, evidence)


@once
def frozen(view: GroupView) -> RuleResult:
    """A container is frozen.

    Source: ``cgroup.events`` frozen; cgroup v1: ``freezer.state``.
    """
    state = view.group.frozen
    if isinstance(state, Missing):
        unknown = state.absence is Absence.UNREADABLE
        return RuleNotEvaluated("whether it is still frozen cannot be read") if unknown else OK
    return Finding("cgroup.frozen", Severity.INFO, "frozen") if state else OK


EXCLUSIVE_THROTTLED: Final = Rule(
    code="cgroup.cpu.throttled_exclusive",
    severity=Severity.DEGRADED,
    blame=Blame.CONFIGURATION,
    source="cgroups",
    reads=(_THROTTLED, Field.GROUP_CPUS),
    threshold="any throttled period within the window, in two looks",
    why="CPUs that are the container's alone stand idle while it has to wait for them",
    advice=(
        "take the quota off the pod and the container: the kubelet does so itself with the feature gate "
        "DisableCPUQuotaWithExclusiveCPUs, or where a CPU limit is not set"
    ),
    judge=cpu_throttled_exclusive,
    try_it="declare a container's CPUs as exclusive, set its CPU limit below their number, and load them",
)
GROUP_RULES: Final = (
    HUGETLB_LIMIT_RULE,
    Rule(
        code="cgroup.cpu.throttled",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="cgroups",
        reads=(_THROTTLED,),
        threshold=(
            f"25 % of the periods in 60 s (cgroups.throttled-percent, cgroups.throttled-window), "
            f"{PERIODS} periods at least"
        ),
        why="it waits for the rest of each such period, and whoever waits for it too",
        advice="raise the container's CPU limit or take it away, or let the workload use fewer threads",
        judge=cpu_throttled,
        try_it="in a container with a CPU limit of 200m, run: timeout 60 sh -c 'while :; do :; done'",
    ),
    EXCLUSIVE_THROTTLED,
    *MEMORY_LIMIT_RULES,
    Rule(
        code="cgroup.frozen",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        source="cgroups",
        reads=(Field.GROUP_FROZEN,),
        threshold=f"for {FROZEN_S // 60} min",
        why="none of its processes runs, and it holds its devices all the while",
        advice="find out who paused it (crictl inspect, ctr task ls), and resume or delete it",
        judge=frozen,
        raise_ns=FROZEN_S * NS,
        try_it="write 1 to a container's cgroup.freeze (cgroup v1: FROZEN to freezer.state)",
    ),
)
LACKED: Final[Mapping[str, Kind]] = {
    "cgroup.hugetlb.max_hit": Kind.HUGEPAGES,
    "cgroup.memory.oom_kill": Kind.MEMORY,
    "cgroup.memory.oom": Kind.MEMORY,
    "cgroup.memory.max": Kind.MEMORY,
    "cgroup.memory.high": Kind.MEMORY,
}
"""By code, of which kind of device it says that a pod has not enough."""
