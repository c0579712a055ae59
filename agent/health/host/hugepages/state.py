"""State that the hugepage rules carry between evaluations, and PoolRuleInput, the input of these rules."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.devices.inventory import InventoryDevice, hugepage_device, pools_by_device
from agent.health.kernel_log.facts import KernelLogCode, KernelLogState
from agent.model.boot_baseline import HugepagePoolBaseline
from agent.model.declared_devices import Declarations, DeclaredHugepageDevice, DriverDevice
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
    """Return the number of persistent pages of a pool: ``nr_hugepages`` without surplus pages."""
    if isinstance(pool.nr, Missing):
        return pool.nr
    if isinstance(pool.surplus, Missing):
        return pool.nr if is_absent(pool.surplus) else pool.surplus
    return pool.nr - pool.surplus


@dataclass(frozen=True, slots=True)
class PoolRuleState:
    """Values that the hugepage rules carry from one evaluation to the next."""

    expected: Mapping[str, Reading] = field(default_factory=dict)
    """Number of persistent pages that a pool should have, by device name of the pool."""
    max_seen: Mapping[str, int] = field(default_factory=dict)
    """Largest number of persistent pages since the start, by device name."""
    declared: Declarations = ()
    declared_pages: Mapping[tuple[int, int], DeclaredPageTotal] = field(default_factory=dict)
    """Pages that drivers declare, by page size [KiB] and NUMA node."""
    log: KernelLogState = field(default_factory=KernelLogState)
    alloc_failures: Reading = NEVER_READ
    """Number of hugepages that could not be allocated since boot, at the last reading."""
    alloc_failed_ns: int | None = None
    """CLOCK_MONOTONIC at which ``alloc_failures`` last grew [ns]; None: not since the start."""


def next_pool_state(
    previous: PoolRuleState, log: KernelLogState, snapshot: Snapshot, settings: EngineSettings, now: Instant
) -> PoolRuleState:
    """Return the state of the hugepage rules after a snapshot."""
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
    """Yield the number of pages that each hugepage pool had at the agent's start, to be stored as baseline.

    The number is -1 for a pool whose expected pages the configuration sets.
    """
    for device in sorted({*state.expected, *state.max_seen}):
        pages = state.expected.get(device, NEVER_READ)
        if isinstance(pages, Missing) or device in configured:
            pages = -1
        yield HugepagePoolBaseline(device, pages, state.max_seen.get(device, -1))


def restored_pool_state(pools: Iterable[HugepagePoolBaseline]) -> PoolRuleState:
    """Return the hugepage rules' state with the baseline that the agent before a restart stored."""
    return PoolRuleState(
        expected={pool.device: pool.pages for pool in pools if pool.pages >= 0},
        max_seen={pool.device: pool.max_seen for pool in pools if pool.max_seen >= 0},
    )


def with_gained_pages(state: PoolRuleState, snapshot: Snapshot) -> PoolRuleState:
    """Return the state at the first snapshot of an agent: pages that were added while no agent ran count as
    pages at start."""
    grown = {
        device.name: pages
        for device, pool in pools_by_device(snapshot).items()
        if isinstance(known := state.expected.get(device.name), int)
        if isinstance(pages := persistent_pages(pool), int) and pages > known
    }
    return replace(state, expected={**state.expected, **grown}) if grown else state


def restart_pool(state: PoolRuleState, snapshot: Snapshot, device: str) -> PoolRuleState:
    """Return the hugepage rules' state in which a pool's present size is its new baseline."""
    pool = next((pool for known, pool in pools_by_device(snapshot).items() if known.name == device), None)
    pages = persistent_pages(pool) if pool else 0
    if isinstance(pages, Missing):
        return state
    return replace(
        state, expected={**state.expected, device: pages}, max_seen={**state.max_seen, device: pages}
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
    """Return the rules' input for the hugepage pool to which a driver's declared pages belong."""
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
