"""What can be wrong with hugepage pools.

How many pages there must be is said by the drivers that declare some, by the configuration, or by what was
there at start. A pool that is short of that is unhealthy; the rest is what people should know.
"""

from typing import Final

from agent.devices.inventory import size_name
from agent.health.catalog import Rule
from agent.health.host.hugepages.state import FAILED_NS, PoolView, persistent_pages
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, Unreadable, lacking
from agent.health.words import at_least, duration
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing, is_absent
from agent.model.time import NS
from agent.model.wake import Field

SHRUNK: Final = "mem.hugepages.pool_shrunk"
HELD_NS: Final = 60 * NS
"""Pools are full, and go beyond, for moments."""
FRAGMENTED: Final = (
    "write the number to nr_hugepages and read it; if it stays short, memory is full or in pieces: "
    "ask for the pages at boot, with hugepages= on the kernel's command line"
)
UNREAD: Final = RuleNotEvaluated("nr_hugepages or surplus_hugepages cannot be read")


def pool_shrunk(view: PoolView) -> RuleResult:
    """The pool has fewer pages than at start, than configured, or than drivers declare together.

    Source: ``nr_hugepages`` less ``surplus_hugepages`` [pages].
    """
    if view.wanted and view.pool is None:
        return OK  # mem.hugepages.missing says so
    pages = persistent_pages(view.pool) if view.pool else 0
    if isinstance(pages, Missing):
        what = "surplus_hugepages" if view.pool and isinstance(view.pool.nr, int) else "nr_hugepages"
        return Unreadable(what, pages)
    if isinstance(view.expected, Missing):
        return Unreadable("pool size at start", view.expected)
    if pages >= view.expected:
        return OK
    where = f" on node {view.node}" if view.wanted else ""
    size, most = size_name(view.size_kib) + where, view.most
    advice = ""
    if view.pool is None:
        found = f"no pool of {size} pages"
    elif isinstance(most, Missing) or most >= view.expected:
        found = f"{_pages(pages)} of {size}"
    else:  # it did not shrink: whoever asked for them did not get them
        found = f"never {f'more than {_pages(most)}' if most else 'any pages'} of {size}"
        found += f", {pages} now" if pages < most else ""
        advice = f"let fewer be declared, or {FRAGMENTED}" if view.wanted else FRAGMENTED
    return Finding(SHRUNK, Severity.UNHEALTHY, f"{found}, {view.expected} {_said(view)}", advice)


def _pages(count: int) -> str:
    return "1 page" if count == 1 else f"{count} pages"


def _said(view: PoolView) -> str:
    if view.wanted:
        return f"declared by {view.wanted.devices} devices" if view.wanted.devices > 1 else "declared"
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
    """The kernel did not find all pages that its command line asked for, and the pool still has not as many.

    Source: "HugeTLB: allocating ... failed" in the kernel log; ``nr_hugepages`` less ``surplus_hugepages``.
    """
    boot = view.boot
    if boot is None or view.configured:
        return OK  # what the configuration says, mem.hugepages.pool_shrunk judges
    pool = view.whole if boot.whole else view.pool
    pages = persistent_pages(pool) if pool else 0
    if isinstance(pages, Missing):
        return UNREAD
    if pages >= boot.asked:
        return OK
    together = ", all NUMA nodes together" if boot.whole else ""
    since = f", {pages} now" if pages != boot.got else ""
    asked = f"asked for {boot.asked} pages of {size_name(view.size_kib)} at boot"
    evidence = f"{asked}, got {boot.got}{since}{together}"
    return Finding("mem.hugepages.short", Severity.DEGRADED, evidence)


def surplus_in_use(view: PoolView) -> RuleResult:
    """More pages are in use than the pool has: the kernel has lent some, and takes them back.

    Source: ``surplus_hugepages`` [pages].
    """
    surplus = view.pool.surplus if view.pool else 0
    if isinstance(surplus, Missing):
        return RuleNotApplicable("no surplus hugepages") if is_absent(surplus) else UNREAD
    if not surplus:
        return OK
    size = size_name(view.size_kib)
    evidence = f"{at_least(surplus)} surplus {'page' if surplus == 1 else 'pages'} of {size} in use"
    return Finding("mem.hugepages.surplus", Severity.INFO, evidence)


def surplus_failed(view: PoolView) -> RuleResult:
    """The kernel looked for memory for a hugepage and found none, where it may go beyond the pool.

    The count is the machine's: of which size the page was, and for which node, it does not say.

    Source: ``htlb_buddy_alloc_fail`` of ``/proc/vmstat`` [pages], ``nr_overcommit_hugepages`` [pages].
    """
    overcommit = view.whole.overcommit if view.whole else 0
    if not isinstance(overcommit, int) or not overcommit:
        return OK
    if isinstance(view.failed, Missing):
        missing = RuleNotApplicable("no count of hugepages that were not found")
        return missing if is_absent(view.failed) else RuleNotEvaluated("htlb_buddy_alloc_fail cannot be read")
    if not view.failed_lately:
        return OK
    evidence = f"a hugepage was looked for and not found in the last {duration(FAILED_NS // NS)}"
    return Finding("mem.hugepages.surplus_failed", Severity.INFO, evidence)


def exhausted(view: PoolView) -> RuleResult:
    """No page is left: all are in use, or reserved by who has mapped them and not touched them yet.

    A reservation is the machine's, not a node's: which page it will be is not decided.

    Source: ``free_hugepages`` of the node, ``free_hugepages`` less ``resv_hugepages`` of the machine [pages].
    """
    if view.pool is None:
        return OK
    pages, free = view.pool.nr, view.pool.free
    if isinstance(pages, Missing):
        return UNREAD
    if isinstance(free, Missing):
        return lacking("free_hugepages", free, "no free_hugepages")
    if not pages:
        return OK
    size = size_name(view.size_kib)
    if not free:
        return Finding("mem.hugepages.exhausted", Severity.INFO, f"all {pages} pages of {size} are in use")
    whole = view.whole or view.pool
    if isinstance(whole.free, int) and isinstance(whole.reserved, int) and whole.free <= whole.reserved:
        evidence = f"all free pages of {size} are reserved"
        return Finding("mem.hugepages.exhausted", Severity.INFO, evidence)
    return OK


_SHRUNK_RULE: Final = Rule(
    code=SHRUNK,
    severity=Severity.UNHEALTHY,
    blame=Blame.CONFIGURATION,
    source="hugepages",
    reads=(Field.POOL_NR, Field.POOL_SURPLUS),
    threshold="fewer persistent pages than at start, than configured, or than all that is declared",
    why="claims were promised pages that are not there",
    advice="write the number back to nr_hugepages and read it; if it stays short, free memory or reboot",
    judge=pool_shrunk,
    try_it="echo 0 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
)

POOL_RULES: Final = (
    _SHRUNK_RULE,
    Rule(
        code="mem.hugepages.short",
        severity=Severity.DEGRADED,
        blame=Blame.CONFIGURATION,
        source="hugepages",
        reads=(Field.POOL_NR, Field.POOL_SURPLUS),
        threshold="fewer pages than the kernel's command line asks for, and so it said at boot",
        why="the node has fewer pages than whoever set it up believes",
        advice="write the number to nr_hugepages and read it; if it stays short, ask for fewer on the "
        "kernel's command line, or say in [expect] how many there should be",
        judge=short_at_boot,
        try_it="boot with hugepagesz=1G hugepages=1000",
    ),
    Rule(
        code="mem.hugepages.surplus",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="hugepages",
        reads=(Field.POOL_SURPLUS,),
        threshold="1 page for 60 s",
        why="nobody is promised these pages: the next time there may be none",
        advice="make the pool as large as what uses it, or set nr_overcommit_hugepages to 0",
        judge=surplus_in_use,
        raise_ns=HELD_NS,
        try_it="set nr_overcommit_hugepages to 8, and map more hugepages than the pool has",
    ),
    Rule(
        code="mem.hugepages.surplus_failed",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="hugepages",
        reads=(Field.POOL_OVERCOMMIT,),
        threshold=f"1 page in {duration(FAILED_NS // NS)}, of a pool that may overcommit",
        why="memory is short or in pieces: what relies on surplus pages fails with ENOMEM or SIGBUS",
        advice="make the pool as large as what uses it",
        judge=surplus_failed,
        try_it="set nr_overcommit_hugepages to more than the memory holds, and map as many",
    ),
    Rule(
        code="mem.hugepages.exhausted",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="hugepages",
        reads=(Field.POOL_NR,),
        threshold="no page that is neither in use nor reserved, for 60 s",
        why="who maps hugepages now fails with ENOMEM",
        advice="none, if the right ones have the pages; who has them says HugetlbPages in /proc/<pid>/status",
        judge=exhausted,
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
        reads=(Field.POOL_NR,),
        threshold="there is no pool of the size on the NUMA node",
        why="the driver hands out pages that do not exist",
        advice="correct the driver's declaration, or add hugepagesz= to the kernel's command line",
        judge=pool_missing,
        try_it="declare pages of 4ki",
    ),
)
