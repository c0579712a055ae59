"""Health rules for hugepage pools, and the state that the rules carry between evaluations.

A pool is unhealthy if it has fewer pages than at the agent's start, than configured, or than drivers declare.
The other findings are information for operators.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

from agent.devices.inventory import InventoryDevice, format_page_size, hugepage_device, pools_by_device
from agent.health.kernel_log.facts import KernelLogCode, KernelLogState
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
from agent.model.declared_devices import Declarations, DeclaredHugepageDevice, DriverDevice
from agent.model.gpu import SamplerField
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.persistent_faults import HugepagePoolBaseline
from agent.model.reading import NEVER_READ, Missing, Reading, is_absent
from agent.model.settings import EngineSettings
from agent.model.snapshot import HugepagePoolSample, Snapshot
from agent.model.time import NS, Instant

ALLOC_FAILED_NS: Final = 600 * NS
"""Time for which a failed allocation of a hugepage is reported [ns]."""


class IncompleteBootAllocation(NamedTuple):
    """Incomplete allocation of a hugepage pool at boot, as the kernel log reports it."""

    requested: int
    """Number of pages that the kernel's command line requests."""
    allocated: int
    """Number of pages that the kernel could allocate."""
    machine_wide: bool
    """True: the numbers are for all NUMA nodes together, and the machine has several."""
    since: Instant | None = None
    """Time of the kernel-log line that reports the incomplete allocation."""


class DeclaredPageTotal(NamedTuple):
    """Sum of the hugepages that drivers declare in one pool."""

    pages: int
    devices: int
    """Number of declared devices whose pages are in the sum."""


class PoolRuleInput(NamedTuple):
    """Input of the hugepage rules for one hugepage pool."""

    pool: HugepagePoolSample | None
    """Sample of the pool; None: the pool does not exist."""
    size_kib: int
    numa_node: int
    expected: Reading
    """Number of persistent pages that the pool should have: as at start, configured or declared."""
    is_configured: bool = False
    """True: the configuration sets ``expected``."""
    declared: DeclaredPageTotal | None = None
    """Declared pages; None for a pool that the agent publishes itself."""
    max_seen: Reading = NEVER_READ
    """Largest number of persistent pages since the agent's start."""
    machine_pool: HugepagePoolSample | None = None
    """Sample of the whole machine's pool for the same page size."""
    boot: IncompleteBootAllocation | None = None
    """Failed allocation at boot; None: the kernel log reports none."""
    alloc_failures: Reading = NEVER_READ
    """Number of hugepages of any size that the kernel could not allocate since boot."""
    alloc_failed_recently: bool = False
    """True: an allocation failed within the last ``ALLOC_FAILED_NS``."""


def persistent_pages(pool: HugepagePoolSample) -> Reading:
    """Return the number of persistent pages of a hugepage pool: ``nr_hugepages`` without surplus pages."""
    if isinstance(pool.nr, Missing):
        return pool.nr
    if isinstance(pool.surplus, Missing):
        return pool.nr if is_absent(pool.surplus) else pool.surplus
    return pool.nr - pool.surplus


class PoolRuleState(NamedTuple):
    """Values that the hugepage rules carry from one evaluation to the next."""

    expected: Mapping[str, Reading] = {}
    """Number of persistent pages that a pool should have, by device name of the pool."""
    max_seen: Mapping[str, int] = {}
    """Largest number of persistent pages since the start, by device name."""
    declared: Declarations = ()
    declared_pages: Mapping[tuple[int, int], DeclaredPageTotal] = {}
    """Pages that drivers declare, by page size [KiB] and NUMA node."""
    log: KernelLogState = KernelLogState()
    alloc_failures: Reading = NEVER_READ
    """Number of hugepages that could not be allocated since boot, at the last reading."""
    alloc_failed_ns: int | None = None
    """CLOCK_MONOTONIC at which ``alloc_failures`` last grew [ns]; None: not since the start."""


def next_pool_state(
    previous: PoolRuleState, log: KernelLogState, snapshot: Snapshot, settings: EngineSettings, now: Instant
) -> PoolRuleState:
    """Return the state of the hugepage rules after a snapshot (the newest readings)."""
    pages = {device.name: persistent_pages(pool) for device, pool in pools_by_device(snapshot).items()}
    at_start = {
        name: count
        for name, count in pages.items()
        if isinstance(previous.expected.get(name, NEVER_READ), Missing)
    }
    max_seen = {
        name: max(count, previous.max_seen.get(name, 0))
        for name, count in pages.items()
        if isinstance(count, int)
    }
    grew, failed = False, snapshot.machine.surplus_failed if snapshot.machine else NEVER_READ
    if isinstance(failed, Missing):
        failed = previous.alloc_failures
    elif isinstance(previous.alloc_failures, int):
        grew = failed > previous.alloc_failures
    return PoolRuleState(
        expected={**previous.expected, **at_start, **settings.expect_pools},
        max_seen={**previous.max_seen, **max_seen},
        declared=snapshot.declared,
        declared_pages=previous.declared_pages
        if snapshot.declared == previous.declared
        else _declared_pages(snapshot.declared),
        log=log,
        alloc_failures=failed,
        alloc_failed_ns=now.mono_ns if grew else previous.alloc_failed_ns,
    )


def pool_baselines(state: PoolRuleState, configured: Collection[str]) -> Iterator[HugepagePoolBaseline]:
    """Yield the number of pages that each hugepage pool had at the agent's start, to be stored for a restart.
    The number is -1 for a pool whose expected pages the configuration sets."""
    for device in sorted({*state.expected, *state.max_seen}):
        pages = state.expected.get(device, NEVER_READ)
        if isinstance(pages, Missing) or device in configured:
            pages = -1
        yield HugepagePoolBaseline(device, pages, state.max_seen.get(device, -1))


def restored_pool_state(pools: Iterable[HugepagePoolBaseline]) -> PoolRuleState:
    """Return the hugepage rules' state with the pool sizes that the agent stored before a restart."""
    return PoolRuleState(
        expected={pool.device: pool.pages for pool in pools if pool.pages >= 0},
        max_seen={pool.device: pool.max_seen for pool in pools if pool.max_seen >= 0},
    )


def with_gained_pages(state: PoolRuleState, snapshot: Snapshot) -> PoolRuleState:
    """Return the state at the agent's first snapshot, in which a pool that grew is expected to keep its
    pages. A pool that grew while no agent ran has more pages than the restored state expects."""
    grown = {
        device.name: pages
        for device, pool in pools_by_device(snapshot).items()
        if isinstance(known := state.expected.get(device.name), int)
        if isinstance(pages := persistent_pages(pool), int) and pages > known
    }
    return state._replace(expected={**state.expected, **grown}) if grown else state


def rebaseline_pool(state: PoolRuleState, snapshot: Snapshot, device: str) -> PoolRuleState:
    """Return the hugepage rules' state in which a pool's present size replaces its size at start."""
    pool = next((pool for known, pool in pools_by_device(snapshot).items() if known.name == device), None)
    pages = persistent_pages(pool) if pool else 0
    if isinstance(pages, Missing):
        return state
    return state._replace(
        expected={**state.expected, device: pages}, max_seen={**state.max_seen, device: pages}
    )


def _declared_pages(declared: Declarations) -> Mapping[tuple[int, int], DeclaredPageTotal]:
    found: dict[tuple[int, int], DeclaredPageTotal] = {}
    for file in declared:
        for device in file.devices:
            if isinstance(device.part, DeclaredHugepageDevice):
                pool = (device.part.size_kib, device.part.numa)
                pages, devices = found.get(pool, DeclaredPageTotal(0, 0))
                found[pool] = DeclaredPageTotal(pages + device.part.pages, devices + 1)
    return found


def pool_rule_input(
    state: PoolRuleState,
    pools: Mapping[InventoryDevice, HugepagePoolSample],
    snapshot: Snapshot,
    settings: EngineSettings,
    device: InventoryDevice,
    now: Instant,
) -> PoolRuleInput:
    """Return the rules' input for a hugepage pool that the agent publishes as ``device``."""
    size_kib = device.size_kib
    machine_wide = (pool for pool in snapshot.pools if pool.numa_node is None and pool.size_kib == size_kib)
    return PoolRuleInput(
        pool=pools.get(device),
        size_kib=size_kib,
        numa_node=device.numa_node,
        expected=state.expected.get(device.name, NEVER_READ),
        is_configured=device.name in settings.expect_pools,
        max_seen=state.max_seen.get(device.name, NEVER_READ),
        machine_pool=next(machine_wide, None),
        boot=_boot_allocation(state.log, pools, device),
        alloc_failures=snapshot.machine.surplus_failed if snapshot.machine else NEVER_READ,
        alloc_failed_recently=state.alloc_failed_ns is not None
        and now.mono_ns - state.alloc_failed_ns < ALLOC_FAILED_NS,
    )


def _boot_allocation(
    log: KernelLogState, pools: Mapping[InventoryDevice, HugepagePoolSample], device: InventoryDevice
) -> IncompleteBootAllocation | None:
    size_kib, node = device.size_kib, device.numa_node
    own = log.facts.get((KernelLogCode.HUGEPAGES_SHORT, f"{size_kib} node{node}"))
    fact = own or log.facts.get((KernelLogCode.HUGEPAGES_SHORT, f"{size_kib}"))
    if fact is None:
        return None
    requested, allocated = fact.values
    others = any(pool.size_kib == size_kib and pool.numa_node != node for pool in pools)
    return IncompleteBootAllocation(int(requested), int(allocated), own is None and others, fact.since)


def declared_pages_rule_input(
    state: PoolRuleState, pools: Mapping[InventoryDevice, HugepagePoolSample], declared: DriverDevice
) -> PoolRuleInput:
    """Return the rules' input for the hugepage pool with the pages that a driver declares as a device."""
    assert isinstance(declared.part, DeclaredHugepageDevice), "the device is not hugepages"
    device = hugepage_device(declared.part.size_kib, declared.part.numa)
    pages = state.declared_pages.get(
        (device.size_kib, device.numa_node), DeclaredPageTotal(declared.part.pages, 1)
    )
    return PoolRuleInput(
        pool=pools.get(device),
        size_kib=device.size_kib,
        numa_node=device.numa_node,
        expected=pages.pages,
        declared=pages,
        max_seen=state.max_seen.get(device.name, NEVER_READ),
    )


# --- rules -------------------------------------------------------------------------------------------------

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
