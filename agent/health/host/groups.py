"""What can be wrong with the cgroups of pods: notes, for no device is judged by them."""

from typing import Final

from agent.devices.inventory import size_name
from agent.health.catalogue import Rule
from agent.health.host.group_view import GroupView
from agent.health.rules import FINE, Answer
from agent.model.health import Blame, Finding, Severity
from agent.model.snapshot import GroupSample
from agent.model.wake import Field

NO_LIMIT: Final = 2**64 - 1


def _bytes(value: int) -> str:
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= factor and value % factor == 0:
            return f"{value // factor} {unit}"
    return f"{value} B"


def _limit_text(group: GroupSample | None, index: int) -> str:
    if group is None or index >= len(group.hugetlb):
        return ""
    limits = (group.hugetlb[index].max, group.hugetlb[index].rsvd_max)
    finite = [limit for limit in limits if isinstance(limit, int) and limit != NO_LIMIT]
    return f"limit {_bytes(min(finite))}" if finite else ""


def hugetlb_limit_hit(view: GroupView) -> Answer:
    """A container asked for hugepages beyond its limit, and was refused (ENOMEM) or killed (SIGBUS).

    Source: ``hugetlb.<size>.events`` max [count]; cgroup v1: ``hugetlb.<size>.failcnt``. The kernel counts
    a pod's limit at the container that ran into it.
    """
    parts = []
    for index, hits in enumerate(view.hits):
        if hits <= 0:
            continue
        limit = _limit_text(view.group, index) or _limit_text(view.pod, index)
        size = size_name(view.group.hugetlb[index].size_kib)
        parts.append(f"{size} pages hit the limit" + (f" ({limit})" if limit else ""))
    if not parts:
        return FINE
    return Finding("cgroup.hugetlb.max_hit", Severity.INFO, ", ".join(parts))


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
        judge=hugetlb_limit_hit,
        try_it="in a container, map more hugepages than its limit and touch them",
    ),
)
