"""What the cgroups of pods ran into: their limits of memory and of hugepages.

Notes, for people: that a pod ran into its own limits says nothing of a device.
"""

from collections.abc import Callable
from typing import Final

from agent.devices.inventory import size_name
from agent.health.catalog import Rule
from agent.health.host.cgroup.state import MEMORY_WINDOW_S
from agent.health.host.cgroup.view import GroupView
from agent.health.host.cgroup.words import limit_text, once
from agent.health.rules import OK, RuleResult
from agent.model.cgroup import NO_LIMIT
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Reading
from agent.model.snapshot import HugetlbSample
from agent.model.time import NS
from agent.model.wake import Field, Wake

AT_LIMIT: Final = 10


def _at_limit(field: Field) -> Wake:
    return Wake(field, AT_LIMIT, MEMORY_WINDOW_S * NS)


def _size_limit(view: GroupView, index: int, limits: Callable[[HugetlbSample], tuple[Reading, ...]]) -> str:
    """The container's own limit of a hugepage size, else its pod's."""
    own = limit_text(*limits(view.group.hugetlb[index]))
    if own or view.pod is None or index >= len(view.pod.hugetlb):
        return own
    return limit_text(*limits(view.pod.hugetlb[index]))


def _fault_limits(size: HugetlbSample) -> tuple[Reading, ...]:
    """v1 counts failed reservations apart; v2 does not say which of the two limits was hit."""
    return (size.max,) if isinstance(size.rsvd_failed, int) else (size.max, size.rsvd_max)


def _memory_limit(view: GroupView) -> str:
    """The same of memory; that there is none is worth a word: it was the node, or all pods together."""
    limits = [group.mem_limit for group in (view.group, view.pod) if group is not None]
    none = " (no limit of its own)" if all(limit == NO_LIMIT for limit in limits) else ""
    return next(filter(None, map(limit_text, limits)), none)


@once
def hugetlb_limit_hit(view: GroupView) -> RuleResult:
    """A container asked for hugepages beyond its limit, and was refused (ENOMEM) or killed (SIGBUS).

    Source: ``hugetlb.<size>.events`` max [count]; cgroup v1: ``hugetlb.<size>.failcnt``, at a page fault, and
    ``hugetlb.<size>.rsvd.failcnt``, at mmap(). v2 counts a pod's limit at the container that ran into it, v1
    at the pod.
    """
    parts = []
    for index, (hits, refusals) in enumerate(zip(view.hits, view.refusals, strict=True)):
        if not hits and not refusals:
            continue
        size = size_name(view.group.hugetlb[index].size_kib)
        if hits:
            parts.append(f"{size} pages hit the limit{_size_limit(view, index, _fault_limits)}")
        if refusals:
            limit = _size_limit(view, index, lambda sample: (sample.rsvd_max,))
            parts.append(f"{size} pages could not be reserved, mmap failed with ENOMEM{limit}")
    if not parts:
        return OK
    return Finding("cgroup.hugetlb.max_hit", Severity.INFO, ", ".join(parts))


@once
def memory_oom_kill(view: GroupView) -> RuleResult:
    """The kernel killed processes of a container because there was no memory for them.

    Source: ``memory.events`` oom_kill [count]; cgroup v1: ``memory.oom_control``. Kills for want of memory in
    the whole machine count as well.
    """
    if not view.kills:
        return OK
    evidence = f"processes were killed for want of memory{_memory_limit(view)}"
    return Finding("cgroup.memory.oom_kill", Severity.INFO, evidence)


@once
def memory_oom(view: GroupView) -> RuleResult:
    """A container was out of memory at its limit, and nothing was killed: what it asked for failed.

    Source: ``memory.events`` oom [count], where oom_kill did not grow; cgroup v1 does not count it.
    """
    if not view.ooms or view.kills:
        return OK
    evidence = f"out of memory, and nothing was killed{_memory_limit(view)}"
    return Finding("cgroup.memory.oom", Severity.INFO, evidence)


@once
def memory_at_max(view: GroupView) -> RuleResult:
    """A container ran into its limit of memory again and again, and had to give up pages first.

    Source: ``memory.events`` max [count], its growth; cgroup v1: ``memory.failcnt``.
    """
    if view.at_max < AT_LIMIT:
        return OK
    evidence = f"at its limit of memory at least {AT_LIMIT} times in {MEMORY_WINDOW_S} s{_memory_limit(view)}"
    return Finding("cgroup.memory.max", Severity.INFO, evidence)


@once
def memory_at_high(view: GroupView) -> RuleResult:
    """A container had more memory than its memory.high again and again, and was slowed down for it.

    Source: ``memory.events`` high [count], its growth.
    """
    if view.at_high < AT_LIMIT:
        return OK
    evidence = f"above memory.high at least {AT_LIMIT} times in {MEMORY_WINDOW_S} s"
    return Finding("cgroup.memory.high", Severity.INFO, evidence)


HUGETLB_LIMIT_RULE: Final = Rule(
    code="cgroup.hugetlb.max_hit",
    severity=Severity.INFO,
    blame=Blame.WORKLOAD,
    source="cgroups",
    reads=(Field.GROUP_SET, Field.GROUP_HT_EVENTS, Field.GROUP_HT_RSVD_FAILED),
    threshold="any hit in the last 10 min",
    why="the allocation failed with ENOMEM, or the process died of SIGBUS",
    advice="raise the pod's hugepage limit, or let the workload use fewer",
    judge=hugetlb_limit_hit,
    try_it="in a container, map more hugepages than its limit and touch them",
)
MEMORY_LIMIT_RULES: Final = (
    Rule(
        code="cgroup.memory.oom_kill",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="cgroups",
        reads=(Field.GROUP_SET, Field.GROUP_MEM_OOM_KILL),
        threshold="any kill in the last 10 min",
        why="what the process was doing is lost; the container may go on without it",
        advice="raise the container's memory limit, or let the workload use less",
        judge=memory_oom_kill,
        try_it="in a container with a memory limit of 64Mi, run: tail /dev/zero",
    ),
    Rule(
        code="cgroup.memory.oom",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="cgroups",
        reads=(Field.GROUP_SET, Field.GROUP_MEM_OOM),
        threshold="any in the last 10 min, without a kill",
        why="a system call of it failed with ENOMEM, which few programs stand",
        advice="raise the container's memory limit, or let the workload use less",
        judge=memory_oom,
        try_it="in a container with a memory limit, let a task of oom_score_adj -1000 use more",
    ),
    Rule(
        code="cgroup.memory.max",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="cgroups",
        reads=(_at_limit(Field.GROUP_MEM_MAX), _at_limit(Field.GROUP_MEM_FAILCNT)),
        threshold=f"{AT_LIMIT} times in {MEMORY_WINDOW_S} s",
        why="for each further page it must give up another first: slow, and close to being killed",
        advice="raise the container's memory limit, or let the workload use less, its page cache included",
        judge=memory_at_max,
        try_it="in a container with a memory limit, read files that are larger than it",
    ),
    Rule(
        code="cgroup.memory.high",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="cgroups",
        reads=(_at_limit(Field.GROUP_MEM_HIGH),),
        threshold=f"{AT_LIMIT} times in {MEMORY_WINDOW_S} s",
        why="its processes are made to wait until it has less",
        advice="raise memory.high (see the kubelet's memoryThrottlingFactor), or let the workload use less",
        judge=memory_at_high,
        try_it="write less than a container uses into its memory.high, and let it allocate",
    ),
)
