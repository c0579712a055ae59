"""Health rules for the cgroups of pods and containers: memory and hugepage limits, CPU throttling, freezing.

A pod at its limits is not a fault of a device. So the findings of these rules inform operators about the pod.
They also inform, with severity ``info``, about the devices that provide the resource which the pod lacks.
Only throttling on exclusive CPUs makes a device degraded.
"""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Final

from agent.devices.inventory import DeviceKind, format_page_size
from agent.health.host.cgroup.state import MEMORY_WINDOW_S, CgroupRuleInput
from agent.health.rules import OK, Rule, RuleInconclusive, RuleResult
from agent.model.cpuset import format_cpus
from agent.model.gpu import SamplerField, WakeCondition
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.pod_findings import NO_LIMIT
from agent.model.reading import Absence, Missing, Reading
from agent.model.snapshot import HugetlbSample
from agent.model.time import NS


def once_per_pod(
    evaluate: Callable[[CgroupRuleInput], RuleResult],
) -> Callable[[CgroupRuleInput], RuleResult]:
    """Decorate a cgroup rule so that an event of a container is not reported a second time for its pod.

    The counters of a pod's cgroup include those of its containers. If the rule returns a finding for one of
    the containers, the decorated rule returns OK for the pod.
    """

    @wraps(evaluate)
    def evaluate_once(view: CgroupRuleInput) -> RuleResult:
        result = evaluate(view)
        if not isinstance(result, Finding):
            return result
        in_container = any(isinstance(evaluate(container), Finding) for container in view.containers)
        return OK if in_container else result

    return evaluate_once


def _format_bytes(value: int) -> str:
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= factor and value % factor == 0:
            return f"{value // factor} {unit}"
    return f"{value} B"


def format_limit(*limits: Reading) -> str:
    """Format the lowest of several limits [bytes] for a finding: `` (limit 8 MiB)``; empty: no limit."""
    finite = [limit for limit in limits if isinstance(limit, int) and limit != NO_LIMIT]
    return f" (limit {_format_bytes(min(finite))})" if finite else ""


MIN_LIMIT_EVENTS: Final = 10
"""Smallest number of events within MEMORY_WINDOW_S for which the rules of memory limits return a finding."""


def _limit_wake(field: SamplerField) -> WakeCondition:
    return WakeCondition(field, MIN_LIMIT_EVENTS, MEMORY_WINDOW_S * NS)


def _format_hugepage_limit(
    view: CgroupRuleInput, index: int, limits: Callable[[HugetlbSample], tuple[Reading, ...]]
) -> str:
    """Format the hugepage limit of a container for a finding's text.

    Without such a limit, format that of its pod.

    Args:
        index: Index of the page size in ``CgroupSample.hugetlb``.
        limits: Function that returns the limits of one page size.
    """
    own = format_limit(*limits(view.group.hugetlb[index]))
    if own or view.pod is None or index >= len(view.pod.hugetlb):
        return own
    return format_limit(*limits(view.pod.hugetlb[index]))


def _page_fault_limits(size: HugetlbSample) -> tuple[Reading, ...]:
    """Return the hugepage limits that a page fault may have hit. In cgroup v2, the limit of reservations is
    one of them, because one counter counts the hits of both limits."""
    return (size.max,) if isinstance(size.rsvd_failed, int) else (size.max, size.rsvd_max)


def _format_memory_limit(view: CgroupRuleInput) -> str:
    """Format the memory limit of a container for a finding's text. Without such a limit, format that of its
    pod. The text is `` (no limit of its own)`` if neither has a limit: the node or a parent cgroup ran out of
    memory."""
    limits = [group.mem_limit for group in (view.group, view.pod) if group is not None]
    none = " (no limit of its own)" if all(limit == NO_LIMIT for limit in limits) else ""
    return next(filter(None, map(format_limit, limits)), none)


@once_per_pod
def detect_hugepage_limit_hit(view: CgroupRuleInput) -> RuleResult:
    """A container exceeded its hugepage limit: an allocation failed (ENOMEM), or a process was killed
    (SIGBUS).

    Source: ``hugetlb.<size>.events`` max [count]; cgroup v1: ``hugetlb.<size>.failcnt``, at a page fault, and
    ``hugetlb.<size>.rsvd.failcnt``, at mmap(). v2 counts hits of a pod's limit at the container, v1 at the
    pod.
    """
    parts = []
    for index, (hits, refusals) in enumerate(zip(view.hits, view.refusals, strict=True)):
        if not hits and not refusals:
            continue
        size = format_page_size(view.group.hugetlb[index].size_kib)
        if hits:
            parts.append(
                f"{size} pages hit the limit{_format_hugepage_limit(view, index, _page_fault_limits)}"
            )
        if refusals:
            limit = _format_hugepage_limit(view, index, lambda sample: (sample.rsvd_max,))
            parts.append(f"{size} pages could not be reserved, mmap failed with ENOMEM{limit}")
    if not parts:
        return OK
    return Finding("cgroup.hugetlb.max_hit", Severity.INFO, ", ".join(parts))


@once_per_pod
def detect_oom_kill(view: CgroupRuleInput) -> RuleResult:
    """The kernel killed processes of a container because memory ran out.

    Source: ``memory.events`` oom_kill [count]; cgroup v1: ``memory.oom_control``. Kills because the whole
    machine ran out of memory count as well.
    """
    if not view.kills:
        return OK
    evidence = f"processes were killed: out of memory{_format_memory_limit(view)}"
    return Finding("cgroup.memory.oom_kill", Severity.INFO, evidence)


@once_per_pod
def detect_oom_without_kill(view: CgroupRuleInput) -> RuleResult:
    """A container ran out of memory at its limit without a kill: its allocations failed.

    Source: ``memory.events`` oom [count], where oom_kill did not grow; cgroup v1 does not count it.
    """
    if not view.ooms or view.kills:
        return OK
    evidence = f"out of memory, no process was killed{_format_memory_limit(view)}"
    return Finding("cgroup.memory.oom", Severity.INFO, evidence)


@once_per_pod
def detect_memory_max_hits(view: CgroupRuleInput) -> RuleResult:
    """A container hit its memory limit repeatedly: the kernel had to reclaim pages before each new one.

    Source: growth of ``memory.events`` max [count]; cgroup v1: ``memory.failcnt``.
    """
    if view.at_max < MIN_LIMIT_EVENTS:
        return OK
    times = f"at least {MIN_LIMIT_EVENTS} times in {MEMORY_WINDOW_S} s"
    evidence = f"hit its memory limit {times}{_format_memory_limit(view)}"
    return Finding("cgroup.memory.max", Severity.INFO, evidence)


@once_per_pod
def detect_memory_high_hits(view: CgroupRuleInput) -> RuleResult:
    """A container exceeded its memory.high repeatedly and was throttled for it.

    Source: growth of ``memory.events`` high [count].
    """
    if view.at_high < MIN_LIMIT_EVENTS:
        return OK
    evidence = f"above memory.high at least {MIN_LIMIT_EVENTS} times in {MEMORY_WINDOW_S} s"
    return Finding("cgroup.memory.high", Severity.INFO, evidence)


_cgroup_rule = partial(
    Rule, severity=Severity.INFO, blame=Blame.WORKLOAD, source="cgroups", repair=Repair.NONE
)
"""Constructor of a ``Rule`` for cgroups; defaults: severity ``info``, blame on the workload, no repair."""
HUGETLB_LIMIT_RULE: Final = _cgroup_rule(
    code="cgroup.hugetlb.max_hit",
    sampler_reads=(SamplerField.GROUP_SET, SamplerField.GROUP_HT_EVENTS, SamplerField.GROUP_HT_RSVD_FAILED),
    threshold="any hit in the last 10 min",
    why="the allocation failed with ENOMEM, or the process died of SIGBUS",
    advice="raise the pod's hugepage limit, or let the workload use fewer",
    evaluate=detect_hugepage_limit_hit,
    try_it="in a container, map more hugepages than its limit and touch them",
)
MEMORY_LIMIT_RULES: Final = (
    _cgroup_rule(
        code="cgroup.memory.oom_kill",
        sampler_reads=(SamplerField.GROUP_SET, SamplerField.GROUP_MEM_OOM_KILL),
        threshold="any kill in the last 10 min",
        why="the work of the process is lost; the container may continue without it",
        advice="raise the container's memory limit, or let the workload use less",
        evaluate=detect_oom_kill,
        try_it="in a container with a memory limit of 64Mi, run: tail /dev/zero",
    ),
    _cgroup_rule(
        code="cgroup.memory.oom",
        sampler_reads=(SamplerField.GROUP_SET, SamplerField.GROUP_MEM_OOM),
        threshold="any in the last 10 min, without a kill",
        why="one of its system calls failed with ENOMEM, which few programs handle",
        advice="raise the container's memory limit, or let the workload use less",
        evaluate=detect_oom_without_kill,
        try_it="in a container with a memory limit, let a task of oom_score_adj -1000 use more",
    ),
    _cgroup_rule(
        code="cgroup.memory.max",
        sampler_reads=(_limit_wake(SamplerField.GROUP_MEM_MAX), _limit_wake(SamplerField.GROUP_MEM_FAILCNT)),
        threshold=f"{MIN_LIMIT_EVENTS} times in {MEMORY_WINDOW_S} s",
        why="each new page requires reclaiming another: slow, and close to an OOM kill",
        advice="raise the container's memory limit, or let the workload use less, its page cache included",
        evaluate=detect_memory_max_hits,
        try_it="in a container with a memory limit, read files that are larger than it",
    ),
    _cgroup_rule(
        code="cgroup.memory.high",
        sampler_reads=(_limit_wake(SamplerField.GROUP_MEM_HIGH),),
        threshold=f"{MIN_LIMIT_EVENTS} times in {MEMORY_WINDOW_S} s",
        why="the kernel delays its processes until it uses less",
        advice="raise memory.high (see the kubelet's memoryThrottlingFactor), or let the workload use less",
        evaluate=detect_memory_high_hits,
        try_it="write less than a container uses into its memory.high, and let it allocate",
    ),
)


MIN_PERIODS: Final = 20
"""Smallest number of CPU periods for which the share of throttled periods is meaningful: 2 s of 100 ms
each."""
EXCLUSIVE_MIN_EVALUATIONS: Final = 2
"""Number of evaluations with throttling on exclusive CPUs from which the rule returns a finding: the kubelet
may set and remove a quota right after the container's start, which throttles in one evaluation."""
FROZEN_S: Final = 300
"""Shortest time for which a container must be frozen before the cause is raised [s]."""

_THROTTLED: Final = WakeCondition(SamplerField.GROUP_CPU_THROTTLED, MIN_PERIODS // 4, 60 * NS)


@once_per_pod
def detect_throttling(view: CgroupRuleInput) -> RuleResult:
    """A container used up its CPU quota in many of the CPU periods in which it ran.

    Source: ``cpu.stat`` nr_throttled against nr_periods [count], over the window.
    """
    percent, window_s = view.limits.throttled_percent, view.limits.throttled_window_s
    throttled, periods, _ = view.throttling
    if periods < MIN_PERIODS or throttled * 100 <= percent * periods:
        return OK
    evidence = f"throttled in more than {percent} % of its CPU periods in {window_s} s"
    return Finding("cgroup.cpu.throttled", Severity.INFO, evidence)


@once_per_pod
def detect_exclusive_throttling(view: CgroupRuleInput) -> RuleResult:
    """A container was throttled by its CPU quota although it has exclusive CPUs.

    Source: ``cpu.stat`` nr_throttled [count], over the window; ``cpuset.cpus.effective`` (cgroup v1:
    ``cpuset.effective_cpus``) against the CPUs that drivers declare as exclusive and prepared for the pod.
    """
    if (
        not view.exclusive
        or view.throttling.evaluations < EXCLUSIVE_MIN_EVALUATIONS
        or isinstance(view.group.cpus, Missing)
    ):
        return OK
    evidence = f"throttled on exclusive CPUs {format_cpus(view.group.cpus)}"
    return Finding("cgroup.cpu.throttled_exclusive", Severity.DEGRADED, evidence)


@once_per_pod
def detect_frozen(view: CgroupRuleInput) -> RuleResult:
    """A container is frozen (paused): none of its processes runs.

    Source: ``cgroup.events`` frozen; cgroup v1: ``freezer.state``.
    """
    state = view.group.frozen
    if isinstance(state, Missing):
        unknown = state.absence is Absence.UNREADABLE
        return RuleInconclusive("whether it is still frozen cannot be read") if unknown else OK
    return Finding("cgroup.frozen", Severity.INFO, "frozen") if state else OK


EXCLUSIVE_THROTTLED: Final = _cgroup_rule(
    code="cgroup.cpu.throttled_exclusive",
    severity=Severity.DEGRADED,
    blame=Blame.CONFIGURATION,
    sampler_reads=(_THROTTLED, SamplerField.GROUP_CPUS),
    threshold="any throttled period within the window, in two evaluations",
    why="the container's exclusive CPUs idle while it waits for its quota",
    advice=(
        "remove the quota from the pod and the container: the kubelet does so with the feature gate "
        "DisableCPUQuotaWithExclusiveCPUs, or if no CPU limit is set"
    ),
    evaluate=detect_exclusive_throttling,
    try_it="declare a container's CPUs as exclusive, set its CPU limit below their number, and load them",
)
CGROUP_RULES: Final = (
    HUGETLB_LIMIT_RULE,
    _cgroup_rule(
        code="cgroup.cpu.throttled",
        sampler_reads=(_THROTTLED,),
        threshold=(
            f"25 % of the periods in 60 s (cgroups.throttled-percent, cgroups.throttled-window), "
            f"{MIN_PERIODS} periods at least"
        ),
        why="the container waits for the rest of each such period",
        advice="raise or remove the container's CPU limit, or let the workload use fewer threads",
        evaluate=detect_throttling,
        limit_in_view="limits.throttled_percent",
        try_it="in a container with a CPU limit of 200m, run: timeout 60 sh -c 'while :; do :; done'",
    ),
    EXCLUSIVE_THROTTLED,
    *MEMORY_LIMIT_RULES,
    _cgroup_rule(
        code="cgroup.frozen",
        blame=Blame.CONFIGURATION,
        sampler_reads=(SamplerField.GROUP_FROZEN,),
        threshold=f"for {FROZEN_S // 60} min",
        why="none of its processes runs, but it still holds its devices",
        advice="find out what paused it (crictl inspect, ctr task ls), then resume or delete it",
        evaluate=detect_frozen,
        raise_ns=FROZEN_S * NS,
        try_it="write 1 to a container's cgroup.freeze (cgroup v1: FROZEN to freezer.state)",
    ),
)
AFFECTED_KINDS: Final[Mapping[str, DeviceKind]] = {
    "cgroup.hugetlb.max_hit": DeviceKind.HUGEPAGES,
    "cgroup.memory.oom_kill": DeviceKind.MEMORY,
    "cgroup.memory.oom": DeviceKind.MEMORY,
    "cgroup.memory.max": DeviceKind.MEMORY,
    "cgroup.memory.high": DeviceKind.MEMORY,
}
"""Kind of the devices that provide the resource which a pod lacks, by finding code of the pod's cgroup."""
