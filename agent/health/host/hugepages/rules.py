"""Rules for hugepage pools.

The expected number of pages comes from drivers that declare hugepages, from the configuration, or from the
agent's start. A pool with fewer pages is unhealthy; the other findings are information for operators.
"""

from typing import Final

from agent.devices.inventory import size_name
from agent.health.host.hugepages.state import ALLOC_FAILED_NS, PoolView, persistent_pages
from agent.health.rules import (
    OK,
    Rule,
    RuleNotApplicable,
    RuleNotEvaluated,
    RuleResult,
    Unreadable,
    at_least,
    duration,
    missing_result,
)
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing, is_absent
from agent.model.time import NS
from agent.model.wake import SamplerField

SHRUNK: Final = "mem.hugepages.pool_shrunk"
HELD_NS: Final = 60 * NS
"""Shortest time for which a pool must be exhausted or exceeded: both occur briefly in normal use."""
FRAGMENTED_ADVICE: Final = (
    "write the number to nr_hugepages and read it back; if it stays lower, memory is full or fragmented: "
    "reserve the pages at boot, with hugepages= on the kernel's command line"
)
POOL_UNREADABLE: Final = RuleNotEvaluated("nr_hugepages or surplus_hugepages cannot be read")


def pool_shrunk(view: PoolView) -> RuleResult:
    """The pool has fewer pages than at start, than configured, or than drivers declare together.

    Source: ``nr_hugepages`` minus ``surplus_hugepages`` [pages].
    """
    if view.declared and view.pool is None:
        return OK  # mem.hugepages.missing covers this
    pages = persistent_pages(view.pool) if view.pool else 0
    if isinstance(pages, Missing):
        name = "surplus_hugepages" if view.pool and isinstance(view.pool.nr, int) else "nr_hugepages"
        return Unreadable(name, pages)
    if isinstance(view.expected, Missing):
        return Unreadable("pool size at start", view.expected)
    if pages >= view.expected:
        return OK
    where = f" on node {view.node}" if view.declared else ""
    size, max_seen = size_name(view.size_kib) + where, view.max_seen
    advice = ""
    if view.pool is None:
        found = f"no pool of {size} pages"
    elif isinstance(max_seen, Missing) or max_seen >= view.expected:
        found = f"{_pages(pages)} of {size}"
    else:  # the pool did not shrink: it never had the expected pages
        found = f"never {f'more than {_pages(max_seen)}' if max_seen else 'any pages'} of {size}"
        found += f", {pages} now" if pages < max_seen else ""
        advice = f"declare fewer pages, or {FRAGMENTED_ADVICE}" if view.declared else FRAGMENTED_ADVICE
    return Finding(SHRUNK, Severity.UNHEALTHY, f"{found}, {view.expected} {_basis(view)}", advice)


def _pages(count: int) -> str:
    return "1 page" if count == 1 else f"{count} pages"


def _basis(view: PoolView) -> str:
    if view.declared:
        return f"declared by {view.declared.devices} devices" if view.declared.devices > 1 else "declared"
    return "configured" if view.configured else "at start"


def pool_missing(view: PoolView) -> RuleResult:
    """A driver declares pages of a size, or on a NUMA node, that has no pool.

    Source: ``/sys/kernel/mm/hugepages``, ``node<N>/hugepages``.
    """
    if view.pool is not None:
        return OK
    evidence = f"no pool of {size_name(view.size_kib)} pages on node {view.node}"
    return Finding("mem.hugepages.missing", Severity.UNHEALTHY, evidence)


def short_at_boot(view: PoolView) -> RuleResult:
    """The kernel allocated fewer pages at boot than its command line requests, and the pool still has fewer.

    Source: "HugeTLB: allocating ... failed" in the kernel log; ``nr_hugepages`` minus ``surplus_hugepages``.
    """
    boot = view.boot
    if boot is None or view.configured:
        return OK  # mem.hugepages.pool_shrunk compares with the configuration
    pool = view.machine_pool if boot.machine_wide else view.pool
    pages = persistent_pages(pool) if pool else 0
    if isinstance(pages, Missing):
        return POOL_UNREADABLE
    if pages >= boot.requested:
        return OK
    scope = ", on all NUMA nodes together" if boot.machine_wide else ""
    current = f", {pages} now" if pages != boot.allocated else ""
    requested = f"{boot.requested} pages of {size_name(view.size_kib)} requested at boot"
    evidence = f"{requested}, {boot.allocated} allocated{current}{scope}"
    return Finding("mem.hugepages.short", Severity.DEGRADED, evidence)


def surplus_in_use(view: PoolView) -> RuleResult:
    """More pages are in use than the pool has: the kernel allocated surplus pages, which it frees after use.

    Source: ``surplus_hugepages`` [pages].
    """
    surplus = view.pool.surplus if view.pool else 0
    if isinstance(surplus, Missing):
        return RuleNotApplicable("no surplus hugepages") if is_absent(surplus) else POOL_UNREADABLE
    if not surplus:
        return OK
    size = size_name(view.size_kib)
    evidence = f"{at_least(surplus)} surplus {'page' if surplus == 1 else 'pages'} of {size} in use"
    return Finding("mem.hugepages.surplus", Severity.INFO, evidence)


def surplus_failed(view: PoolView) -> RuleResult:
    """The kernel could not allocate a surplus hugepage, in a pool that may overcommit.

    The counter is the machine's: it names neither the page's size nor the node.

    Source: ``htlb_buddy_alloc_fail`` of ``/proc/vmstat`` [pages], ``nr_overcommit_hugepages`` [pages].
    """
    overcommit = view.machine_pool.overcommit if view.machine_pool else 0
    if not isinstance(overcommit, int) or not overcommit:
        return OK
    if isinstance(view.alloc_failures, Missing):
        missing = RuleNotApplicable("no htlb_buddy_alloc_fail in /proc/vmstat")
        return (
            missing
            if is_absent(view.alloc_failures)
            else RuleNotEvaluated("htlb_buddy_alloc_fail cannot be read")
        )
    if not view.alloc_failed_recently:
        return OK
    evidence = f"a hugepage could not be allocated in the last {duration(ALLOC_FAILED_NS // NS)}"
    return Finding("mem.hugepages.surplus_failed", Severity.INFO, evidence)


def exhausted(view: PoolView) -> RuleResult:
    """No page is free: all are in use, or reserved by processes that have mapped but not yet touched them.

    A reservation belongs to the machine, not to a node: its page is not chosen yet.

    Source: ``free_hugepages`` of the node, ``free_hugepages`` minus ``resv_hugepages`` of the machine
    [pages].
    """
    if view.pool is None:
        return OK
    pages, free = view.pool.nr, view.pool.free
    if isinstance(pages, Missing):
        return POOL_UNREADABLE
    if isinstance(free, Missing):
        return missing_result("free_hugepages", free, "no free_hugepages")
    if not pages:
        return OK
    size = size_name(view.size_kib)
    if not free:
        return Finding("mem.hugepages.exhausted", Severity.INFO, f"all {pages} pages of {size} are in use")
    total = view.machine_pool or view.pool
    if isinstance(total.free, int) and isinstance(total.reserved, int) and total.free <= total.reserved:
        evidence = f"all free pages of {size} are reserved"
        return Finding("mem.hugepages.exhausted", Severity.INFO, evidence)
    return OK


_SHRUNK_RULE: Final = Rule(
    code=SHRUNK,
    severity=Severity.UNHEALTHY,
    blame=Blame.CONFIGURATION,
    source="hugepages",
    reads=(SamplerField.POOL_NR, SamplerField.POOL_SURPLUS),
    threshold="fewer persistent pages than at start, than configured, or than declared in total",
    why="claims expect pages that do not exist",
    advice="write the number to nr_hugepages and read it back; if it stays lower, free memory or reboot",
    evaluate=pool_shrunk,
    try_it="echo 0 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
)

POOL_RULES: Final = (
    _SHRUNK_RULE,
    Rule(
        code="mem.hugepages.short",
        severity=Severity.DEGRADED,
        blame=Blame.CONFIGURATION,
        source="hugepages",
        reads=(SamplerField.POOL_NR, SamplerField.POOL_SURPLUS),
        threshold="fewer pages than the kernel's command line requests, and a line about it at boot",
        why="the node has fewer pages than its operator configured",
        advice="write the number to nr_hugepages and read it back; if it stays lower, request fewer on the "
        "kernel's command line, or configure the expected number in [expect]",
        evaluate=short_at_boot,
        try_it="boot with hugepagesz=1G hugepages=1000",
    ),
    Rule(
        code="mem.hugepages.surplus",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="hugepages",
        reads=(SamplerField.POOL_SURPLUS,),
        threshold="1 page for 60 s",
        why="surplus pages are not guaranteed: the next allocation may fail",
        advice="make the pool as large as its use, or set nr_overcommit_hugepages to 0",
        evaluate=surplus_in_use,
        raise_ns=HELD_NS,
        try_it="set nr_overcommit_hugepages to 8, and map more hugepages than the pool has",
    ),
    Rule(
        code="mem.hugepages.surplus_failed",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="hugepages",
        reads=(SamplerField.POOL_OVERCOMMIT,),
        threshold=f"1 page in {duration(ALLOC_FAILED_NS // NS)}, of a pool that may overcommit",
        why="memory is full or fragmented: programs that use surplus pages fail with ENOMEM or SIGBUS",
        advice="make the pool as large as its use",
        evaluate=surplus_failed,
        try_it="set nr_overcommit_hugepages to more than the memory holds, and map as many",
    ),
    Rule(
        code="mem.hugepages.exhausted",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="hugepages",
        reads=(SamplerField.POOL_NR,),
        threshold="no page that is neither in use nor reserved, for 60 s",
        why="mapping hugepages now fails with ENOMEM",
        advice="none if the intended processes hold the pages: see HugetlbPages in /proc/<pid>/status",
        evaluate=exhausted,
        raise_ns=HELD_NS,
        try_it="map all hugepages of a pool",
    ),
)

DECLARED_POOL_RULES: Final = (
    _SHRUNK_RULE,
    Rule(
        code="mem.hugepages.missing",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="hugepages",
        reads=(SamplerField.POOL_NR,),
        threshold="there is no pool of the size on the NUMA node",
        why="the driver offers pages that do not exist",
        advice="correct the driver's declaration, or add hugepagesz= to the kernel's command line",
        evaluate=pool_missing,
        try_it="declare pages of 4ki",
    ),
)
