"""Health rules for hugepage pools.

A pool with fewer pages than at the agent's start, than configured or than drivers declare is unhealthy. The
other findings are information for operators.
"""

from functools import partial
from typing import Final

from agent.devices.inventory import format_page_size
from agent.health.host.hugepages.state import ALLOC_FAILED_NS, PoolRuleInput, persistent_pages
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
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.reading import Missing, is_absent
from agent.model.time import NS
from agent.model.wake_conditions import SamplerField

SHRUNK_CODE: Final = "mem.hugepages.pool_shrunk"
HELD_NS: Final = 60 * NS
"""Shortest time for which a pool must be exhausted or overcommitted before that is reported [ns]: both occur
briefly in normal use.
"""
FRAGMENTED_ADVICE: Final = (
    "write the number to nr_hugepages and read it back; if it stays lower, memory is full or fragmented: "
    "reserve the pages at boot, with hugepages= on the kernel's command line"
)
POOL_UNREADABLE: Final = RuleInconclusive("nr_hugepages or surplus_hugepages cannot be read")


def detect_shrunk_pool(view: PoolRuleInput) -> RuleResult:
    """The pool has fewer persistent pages than at start, than configured, or than drivers declare together.

    Source: ``nr_hugepages`` minus ``surplus_hugepages`` [pages].
    """
    if view.declared and view.pool is None:
        return OK  # mem.hugepages.missing covers this
    pages = persistent_pages(view.pool) if view.pool else 0
    if isinstance(pages, Missing):
        name = "surplus_hugepages" if view.pool and isinstance(view.pool.nr, int) else "nr_hugepages"
        return RuleInputUnreadable(name, pages)
    if isinstance(view.expected, Missing):
        return RuleInputUnreadable("pool size at start", view.expected)
    if pages >= view.expected:
        return OK
    place = f" on NUMA node {view.numa_node}" if view.declared else ""
    size, max_seen = format_page_size(view.size_kib) + place, view.max_seen
    advice = ""
    if view.pool is None:
        found = f"no pool of {size} pages"
    elif isinstance(max_seen, Missing) or max_seen >= view.expected:
        found = f"{_format_pages(pages)} of {size}"
    else:  # the pool did not shrink: it never had the expected pages
        found = f"never {f'more than {_format_pages(max_seen)}' if max_seen else 'any pages'} of {size}"
        found += f", {pages} now" if pages < max_seen else ""
        advice = f"declare fewer pages, or {FRAGMENTED_ADVICE}" if view.declared else FRAGMENTED_ADVICE
    return Finding(
        SHRUNK_CODE, Severity.UNHEALTHY, f"{found}, {view.expected} {_expectation_origin(view)}", advice
    )


def _format_pages(count: int) -> str:
    return "1 page" if count == 1 else f"{count} pages"


def _expectation_origin(view: PoolRuleInput) -> str:
    if view.declared:
        return f"declared by {view.declared.devices} devices" if view.declared.devices > 1 else "declared"
    return "configured" if view.is_configured else "at start"


def detect_missing_pool(view: PoolRuleInput) -> RuleResult:
    """A driver declares hugepages, but the NUMA node has no pool of that page size.

    Source: ``/sys/kernel/mm/hugepages``, ``node<N>/hugepages``.
    """
    if view.pool is not None:
        return OK
    evidence = f"no pool of {format_page_size(view.size_kib)} pages on NUMA node {view.numa_node}"
    return Finding("mem.hugepages.missing", Severity.UNHEALTHY, evidence)


def detect_short_boot_allocation(view: PoolRuleInput) -> RuleResult:
    """The kernel allocated fewer pages at boot than its command line requests, and the pool still has fewer.

    Source: "HugeTLB: allocating ... failed" in the kernel log; ``nr_hugepages`` minus ``surplus_hugepages``.
    """
    boot = view.boot
    if boot is None or view.is_configured:
        return OK  # mem.hugepages.pool_shrunk compares with the configuration
    pool = view.machine_pool if boot.machine_wide else view.pool
    pages = persistent_pages(pool) if pool else 0
    if isinstance(pages, Missing):
        return POOL_UNREADABLE
    if pages >= boot.requested:
        return OK
    scope = ", on all NUMA nodes together" if boot.machine_wide else ""
    current = f", {pages} now" if pages != boot.allocated else ""
    requested = f"{boot.requested} pages of {format_page_size(view.size_kib)} requested at boot"
    evidence = f"{requested}, {boot.allocated} allocated{current}{scope}"
    return Finding("mem.hugepages.short", Severity.DEGRADED, evidence, since=boot.since)


def detect_surplus_pages(view: PoolRuleInput) -> RuleResult:
    """More hugepages are in use than the pool has: the kernel allocated surplus pages, which it frees after
    use.

    Source: ``surplus_hugepages`` [pages].
    """
    surplus = view.pool.surplus if view.pool else 0
    if isinstance(surplus, Missing):
        return (
            RuleNotApplicable("the kernel has no surplus_hugepages files")
            if is_absent(surplus)
            else POOL_UNREADABLE
        )
    if not surplus:
        return OK
    size = format_page_size(view.size_kib)
    evidence = f"{format_at_least(surplus)} surplus {'page' if surplus == 1 else 'pages'} of {size} in use"
    return Finding("mem.hugepages.surplus", Severity.INFO, evidence)


def detect_failed_surplus_page(view: PoolRuleInput) -> RuleResult:
    """The kernel could not allocate a surplus hugepage, and the pool may overcommit.

    The counter is for the whole machine: it shows neither the page size nor the NUMA node.

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
            else RuleInconclusive("htlb_buddy_alloc_fail cannot be read")
        )
    if not view.alloc_failed_recently:
        return OK
    evidence = f"a hugepage could not be allocated in the last {format_duration(ALLOC_FAILED_NS // NS)}"
    return Finding("mem.hugepages.surplus_failed", Severity.INFO, evidence)


def detect_exhausted_pool(view: PoolRuleInput) -> RuleResult:
    """No hugepage is free: all are in use, or reserved by processes that have mapped but not yet touched
    them.

    The kernel counts reservations for the machine, not for a NUMA node.

    Source: ``free_hugepages`` of the NUMA node; of the machine, minus ``resv_hugepages`` [pages].
    """
    if view.pool is None:
        return OK
    pages, free = view.pool.nr, view.pool.free
    if isinstance(pages, Missing):
        return POOL_UNREADABLE
    if isinstance(free, Missing):
        return missing_reading_result("free_hugepages", free, "the kernel has no free_hugepages files")
    if not pages:
        return OK
    size = format_page_size(view.size_kib)
    if not free:
        return Finding("mem.hugepages.exhausted", Severity.INFO, f"all {pages} pages of {size} are in use")
    total = view.machine_pool or view.pool
    if isinstance(total.free, int) and isinstance(total.reserved, int) and total.free <= total.reserved:
        evidence = f"all free pages of {size} are reserved"
        return Finding("mem.hugepages.exhausted", Severity.INFO, evidence)
    return OK


_pool_rule = partial(
    Rule, severity=Severity.INFO, blame=Blame.WORKLOAD, source="hugepages", repair=Repair.NONE
)
"""Constructor of a ``Rule`` for hugepage pools; defaults: severity ``info``, blame on the workload, no
repair.
"""
_SHRUNK_RULE: Final = _pool_rule(
    code=SHRUNK_CODE,
    severity=Severity.UNHEALTHY,
    blame=Blame.CONFIGURATION,
    sampler_reads=(SamplerField.POOL_NR, SamplerField.POOL_SURPLUS),
    threshold="fewer persistent pages than at start, than configured, or than declared in total",
    why="claims expect pages that do not exist",
    advice="write the number to nr_hugepages and read it back; if it stays lower, free memory or reboot",
    evaluate=detect_shrunk_pool,
    try_it="echo 0 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
)

POOL_RULES: Final = (
    _SHRUNK_RULE,
    _pool_rule(
        code="mem.hugepages.short",
        severity=Severity.DEGRADED,
        blame=Blame.CONFIGURATION,
        sampler_reads=(SamplerField.POOL_NR, SamplerField.POOL_SURPLUS),
        threshold="fewer pages than the kernel's command line requests, and a line about it at boot",
        why="the node has fewer pages than its operator configured",
        advice="write the number to nr_hugepages and read it back; if it stays lower, request fewer on the "
        "kernel's command line, or configure the expected number in [expect]",
        evaluate=detect_short_boot_allocation,
        try_it="boot with hugepagesz=1G hugepages=1000",
    ),
    _pool_rule(
        code="mem.hugepages.surplus",
        sampler_reads=(SamplerField.POOL_SURPLUS,),
        threshold="1 page for 60 s",
        why="surplus pages are not guaranteed: the next allocation may fail",
        advice="make the pool as large as its use, or set nr_overcommit_hugepages to 0",
        evaluate=detect_surplus_pages,
        raise_ns=HELD_NS,
        try_it="set nr_overcommit_hugepages to 8, and map more hugepages than the pool has",
    ),
    _pool_rule(
        code="mem.hugepages.surplus_failed",
        sampler_reads=(SamplerField.POOL_OVERCOMMIT,),
        threshold=f"1 page in {format_duration(ALLOC_FAILED_NS // NS)}, of a pool that may overcommit",
        why="memory is full or fragmented: programs that use surplus pages fail with ENOMEM or SIGBUS",
        advice="make the pool as large as its use",
        evaluate=detect_failed_surplus_page,
        try_it="set nr_overcommit_hugepages to more than the memory holds, and map as many",
    ),
    _pool_rule(
        code="mem.hugepages.exhausted",
        sampler_reads=(SamplerField.POOL_NR,),
        threshold="no page that is neither in use nor reserved, for 60 s",
        why="mapping hugepages now fails with ENOMEM",
        advice="none if the intended processes hold the pages: see HugetlbPages in /proc/<pid>/status",
        evaluate=detect_exhausted_pool,
        raise_ns=HELD_NS,
        try_it="map all hugepages of a pool",
    ),
)

DECLARED_POOL_RULES: Final = (
    _SHRUNK_RULE,
    _pool_rule(
        code="mem.hugepages.missing",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        sampler_reads=(SamplerField.POOL_NR,),
        threshold="there is no pool of the size on the NUMA node",
        why="the driver offers pages that do not exist",
        advice="correct the driver's declaration, or add hugepagesz= to the kernel's command line",
        evaluate=detect_missing_pool,
        try_it="declare pages of 4ki",
    ),
)
