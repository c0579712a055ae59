"""Hugepage pools as their rules see them, and what is remembered for that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.devices.inventory import Device, device_pools
from agent.model.reading import Absence, Missing, Reading
from agent.model.settings import Settings
from agent.model.snapshot import PoolSample, Snapshot


class PoolView(NamedTuple):
    """One hugepage pool."""

    pool: PoolSample | None
    size_kib: int
    expected: Reading
    """Persistent pages at start, or as configured."""
    configured: bool


def persistent_pages(pool: PoolSample) -> Reading:
    """Pages of the pool proper. ``nr_hugepages`` counts surplus pages too, which come and go with use."""
    if isinstance(pool.nr, Missing):
        return pool.nr
    if isinstance(pool.surplus, Missing):
        return pool.nr if pool.surplus.absence is Absence.ABSENT else pool.surplus
    return pool.nr - pool.surplus


@dataclass(frozen=True, slots=True)
class PoolPast:
    """What the rules of hugepage pools compare with."""

    expected: Mapping[str, Reading] = field(default_factory=dict)
    """Persistent pages, by device name."""


def remember_pools(past: PoolPast, snapshot: Snapshot, settings: Settings) -> PoolPast:
    """The past after a snapshot."""
    at_start = {
        device.name: persistent_pages(pool)
        for device, pool in device_pools(snapshot).items()
        if isinstance(past.expected.get(device.name, Missing(Absence.ABSENT)), Missing)
    }
    return PoolPast({**past.expected, **at_start, **settings.expect_pools})


def view_pool(
    past: PoolPast, pools: Mapping[Device, PoolSample], settings: Settings, device: Device
) -> PoolView:
    """One pool; ``pools`` are ``device_pools(snapshot)``."""
    return PoolView(
        pool=pools.get(device),
        size_kib=device.size_kib,
        expected=past.expected.get(device.name, Missing(Absence.ABSENT)),
        configured=device.name in settings.expect_pools,
    )
