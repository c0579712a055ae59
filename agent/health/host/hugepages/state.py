"""Hugepage pools as their rules see them, and what is remembered for that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.devices.inventory import Device, device_pools, pool_device
from agent.health.kernel_log.values import LogCode, LogPast
from agent.model.declared import Declarations, Declared, DeclaredHugepages
from agent.model.reading import NEVER_READ, Missing, Reading, is_absent
from agent.model.settings import Settings
from agent.model.snapshot import PoolSample, Snapshot
from agent.model.time import NS, Instant

FAILED_NS: Final = 600 * NS
"""Hugepages that were not found are told of for ten minutes."""


class Boot(NamedTuple):
    """What the kernel said of a pool when it booted."""

    asked: int
    """Pages on its command line."""
    got: int
    whole: bool
    """Of all NUMA nodes together, and there are others."""


class Wanted(NamedTuple):
    """What drivers declare of one pool."""

    pages: int
    devices: int


class PoolView(NamedTuple):
    """One hugepage pool."""

    pool: PoolSample | None
    size_kib: int
    node: int
    expected: Reading
    """Persistent pages at start, or as configured or declared."""
    configured: bool = False
    wanted: Wanted | None = None
    """None: it is the host's own device."""
    most: Reading = NEVER_READ
    """Persistent pages, the most that it had since start."""
    whole: PoolSample | None = None
    """The pool of the whole machine."""
    boot: Boot | None = None
    """None: the kernel log tells of no pages that were not found."""
    failed: Reading = NEVER_READ
    """Hugepages of any size that the kernel looked for and did not find, since boot."""
    failed_lately: bool = False
    """Some of them within ``FAILED_NS``."""


def persistent_pages(pool: PoolSample) -> Reading:
    """Pages of the pool proper. ``nr_hugepages`` counts surplus pages too, which come and go with use."""
    if isinstance(pool.nr, Missing):
        return pool.nr
    if isinstance(pool.surplus, Missing):
        return pool.nr if is_absent(pool.surplus) else pool.surplus
    return pool.nr - pool.surplus


@dataclass(frozen=True, slots=True)
class PoolPast:
    """What the rules of hugepage pools compare with."""

    expected: Mapping[str, Reading] = field(default_factory=dict)
    """Persistent pages, by device name."""
    most: Mapping[str, int] = field(default_factory=dict)
    """Likewise."""
    declared: Declarations = ()
    wanted: Mapping[tuple[int, int], Wanted] = field(default_factory=dict)
    """What that comes to, by page size and NUMA node."""
    log: LogPast = field(default_factory=LogPast)
    failed: Reading = NEVER_READ
    """Hugepages that were not found since boot, as read last."""
    failed_ns: int | None = None
    """When there last were more of them."""


def remember_pools(
    past: PoolPast, log: LogPast, snapshot: Snapshot, settings: Settings, now: Instant
) -> PoolPast:
    """The past after a snapshot."""
    pages = {device.name: persistent_pages(pool) for device, pool in device_pools(snapshot).items()}
    at_start = {
        name: count
        for name, count in pages.items()
        if isinstance(past.expected.get(name, NEVER_READ), Missing)
    }
    most = {
        name: max(count, past.most.get(name, 0)) for name, count in pages.items() if isinstance(count, int)
    }
    grew, failed = False, snapshot.machine.surplus_failed if snapshot.machine else NEVER_READ
    if isinstance(failed, Missing):
        failed = past.failed
    elif isinstance(past.failed, int):
        grew = failed > past.failed
    return PoolPast(
        expected={**past.expected, **at_start, **settings.expect_pools},
        most={**past.most, **most},
        declared=snapshot.declared,
        wanted=past.wanted if snapshot.declared == past.declared else _wanted(snapshot.declared),
        log=log,
        failed=failed,
        failed_ns=now.mono_ns if grew else past.failed_ns,
    )


def _wanted(declared: Declarations) -> Mapping[tuple[int, int], Wanted]:
    found: dict[tuple[int, int], Wanted] = {}
    for file in declared:
        for device in file.devices:
            if isinstance(device.what, DeclaredHugepages):
                pool = (device.what.size_kib, device.what.numa)
                pages, devices = found.get(pool, Wanted(0, 0))
                found[pool] = Wanted(pages + device.what.pages, devices + 1)
    return found


def view_pool(
    past: PoolPast,
    pools: Mapping[Device, PoolSample],
    snapshot: Snapshot,
    settings: Settings,
    device: Device,
    now: Instant,
) -> PoolView:
    """One pool; ``pools`` are ``device_pools(snapshot)``."""
    size_kib = device.size_kib
    machine_wide = (pool for pool in snapshot.pools if pool.node is None and pool.size_kib == size_kib)
    return PoolView(
        pool=pools.get(device),
        size_kib=size_kib,
        node=device.node,
        expected=past.expected.get(device.name, NEVER_READ),
        configured=device.name in settings.expect_pools,
        most=past.most.get(device.name, NEVER_READ),
        whole=next(machine_wide, None),
        boot=_boot(past.log, pools, device),
        failed=snapshot.machine.surplus_failed if snapshot.machine else NEVER_READ,
        failed_lately=past.failed_ns is not None and now.mono_ns - past.failed_ns < FAILED_NS,
    )


def _boot(log: LogPast, pools: Mapping[Device, PoolSample], device: Device) -> Boot | None:
    size_kib, node = device.size_kib, device.node
    own = log.facts.get((LogCode.HUGEPAGES_SHORT, f"{size_kib} node{node}"))
    fact = own or log.facts.get((LogCode.HUGEPAGES_SHORT, f"{size_kib}"))
    if fact is None:
        return None
    asked, got = fact.values
    others = any(pool.size_kib == size_kib and pool.node != node for pool in pools)
    return Boot(int(asked), int(got), own is None and others)


def view_declared_pages(past: PoolPast, pools: Mapping[Device, PoolSample], declared: Declared) -> PoolView:
    """The pool of pages that a driver declares; ``pools`` as above."""
    assert isinstance(declared.what, DeclaredHugepages), "the device is no hugepages"
    device = pool_device(declared.what.size_kib, declared.what.numa)
    wanted = past.wanted.get((device.size_kib, device.node), Wanted(declared.what.pages, 1))
    return PoolView(
        pool=pools.get(device),
        size_kib=device.size_kib,
        node=device.node,
        expected=wanted.pages,
        wanted=wanted,
        most=past.most.get(device.name, NEVER_READ),
    )
