"""State of the hugepage rules, and views, which are the inputs of these rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.devices.inventory import Device, device_pools, pool_device
from agent.health.kernel_log.values import LogCode, LogState
from agent.model.declared import Declarations, Declared, DeclaredHugepages
from agent.model.reading import NEVER_READ, Missing, Reading, is_absent
from agent.model.settings import Settings
from agent.model.snapshot import PoolSample, Snapshot
from agent.model.time import NS, Instant

ALLOC_FAILED_NS: Final = 600 * NS
"""Time for which a failed allocation is reported."""


class BootAllocation(NamedTuple):
    """Incomplete allocation of a hugepage pool at boot, as the kernel log reports it."""

    requested: int
    """Number of pages that the kernel's command line requests."""
    allocated: int
    machine_wide: bool
    """True if the numbers are for all NUMA nodes together and the machine has several."""


class DeclaredPages(NamedTuple):
    """Pages of one hugepage pool that drivers declare, summed over devices."""

    pages: int
    devices: int


class PoolView(NamedTuple):
    """Input of the hugepage rules for one pool."""

    pool: PoolSample | None
    size_kib: int
    node: int
    expected: Reading
    """Number of persistent pages that the pool should have: as at start, configured or declared."""
    configured: bool = False
    declared: DeclaredPages | None = None
    """Declared pages; None for a pool that the agent publishes itself."""
    max_seen: Reading = NEVER_READ
    """Largest number of persistent pages since the start."""
    machine_pool: PoolSample | None = None
    """Pool of the whole machine for the same page size."""
    boot: BootAllocation | None = None
    """Failed allocation at boot; None: the kernel log reports none."""
    alloc_failures: Reading = NEVER_READ
    """Hugepages of any size that the kernel could not allocate since boot."""
    alloc_failed_recently: bool = False
    """True if an allocation failed within the last ``ALLOC_FAILED_NS``."""


def persistent_pages(pool: PoolSample) -> Reading:
    """Return the pages of the pool without surplus pages, which ``nr_hugepages`` includes."""
    if isinstance(pool.nr, Missing):
        return pool.nr
    if isinstance(pool.surplus, Missing):
        return pool.nr if is_absent(pool.surplus) else pool.surplus
    return pool.nr - pool.surplus


@dataclass(frozen=True, slots=True)
class PoolState:
    """State of the hugepage rules, which the next evaluation compares with."""

    expected: Mapping[str, Reading] = field(default_factory=dict)
    """Expected persistent pages, by device name."""
    max_seen: Mapping[str, int] = field(default_factory=dict)
    """Largest number of persistent pages since the start, by device name."""
    declared: Declarations = ()
    declared_pages: Mapping[tuple[int, int], DeclaredPages] = field(default_factory=dict)
    """Pages that drivers declare, by page size and NUMA node."""
    log: LogState = field(default_factory=LogState)
    alloc_failures: Reading = NEVER_READ
    """Number of hugepages that could not be allocated since boot, at the last reading."""
    alloc_failed_ns: int | None = None
    """Time at which ``alloc_failures`` last grew; None: not since the start."""


def next_pool_state(
    previous: PoolState, log: LogState, snapshot: Snapshot, settings: Settings, now: Instant
) -> PoolState:
    """Return the state of the hugepage rules after a snapshot."""
    pages = {device.name: persistent_pages(pool) for device, pool in device_pools(snapshot).items()}
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
    return PoolState(
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


def _declared_pages(declared: Declarations) -> Mapping[tuple[int, int], DeclaredPages]:
    found: dict[tuple[int, int], DeclaredPages] = {}
    for file in declared:
        for device in file.devices:
            if isinstance(device.part, DeclaredHugepages):
                pool = (device.part.size_kib, device.part.numa)
                pages, devices = found.get(pool, DeclaredPages(0, 0))
                found[pool] = DeclaredPages(pages + device.part.pages, devices + 1)
    return found


def view_pool(
    state: PoolState,
    pools: Mapping[Device, PoolSample],
    snapshot: Snapshot,
    settings: Settings,
    device: Device,
    now: Instant,
) -> PoolView:
    """Return the rules' input for a hugepage pool of the host; ``pools`` is ``device_pools(snapshot)``."""
    size_kib = device.size_kib
    machine_wide = (pool for pool in snapshot.pools if pool.node is None and pool.size_kib == size_kib)
    return PoolView(
        pool=pools.get(device),
        size_kib=size_kib,
        node=device.node,
        expected=state.expected.get(device.name, NEVER_READ),
        configured=device.name in settings.expect_pools,
        max_seen=state.max_seen.get(device.name, NEVER_READ),
        machine_pool=next(machine_wide, None),
        boot=_boot_allocation(state.log, pools, device),
        alloc_failures=snapshot.machine.surplus_failed if snapshot.machine else NEVER_READ,
        alloc_failed_recently=state.alloc_failed_ns is not None
        and now.mono_ns - state.alloc_failed_ns < ALLOC_FAILED_NS,
    )


def _boot_allocation(
    log: LogState, pools: Mapping[Device, PoolSample], device: Device
) -> BootAllocation | None:
    size_kib, node = device.size_kib, device.node
    own = log.facts.get((LogCode.HUGEPAGES_SHORT, f"{size_kib} node{node}"))
    fact = own or log.facts.get((LogCode.HUGEPAGES_SHORT, f"{size_kib}"))
    if fact is None:
        return None
    requested, allocated = fact.values
    others = any(pool.size_kib == size_kib and pool.node != node for pool in pools)
    return BootAllocation(int(requested), int(allocated), own is None and others)


def view_declared_pages(state: PoolState, pools: Mapping[Device, PoolSample], declared: Declared) -> PoolView:
    """Return the rules' input for the pool of the pages that a driver declares; ``pools`` is
    ``device_pools(snapshot)``."""
    assert isinstance(declared.part, DeclaredHugepages), "the device is not hugepages"
    device = pool_device(declared.part.size_kib, declared.part.numa)
    pages = state.declared_pages.get((device.size_kib, device.node), DeclaredPages(declared.part.pages, 1))
    return PoolView(
        pool=pools.get(device),
        size_kib=device.size_kib,
        node=device.node,
        expected=pages.pages,
        declared=pages,
        max_seen=state.max_seen.get(device.name, NEVER_READ),
    )
