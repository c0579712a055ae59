"""Inventory of devices: CPUs, memory and hugepages by NUMA node, GPUs, MIG instances, declared devices.

Names are DNS labels and stable over restarts. A device that was seen stays in the inventory: rules report
that it is missing.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from agent.model.cpuset import CpuSet
from agent.model.declared import (
    Declared,
    DeclaredCpus,
    DeclaredGpu,
    DeclaredHugepages,
    DeclaredMemory,
    DeclaredOther,
    DeclaredPci,
)
from agent.model.reading import is_absent
from agent.model.snapshot import PoolSample, Snapshot

_POOL_NAME: Final = re.compile(r"hugepages-(\d+)(ki|mi|gi|ti)-node(\d+)", re.IGNORECASE)
_UNITS: Final = ("ki", "mi", "gi", "ti")


class DeviceKind(StrEnum):
    """Kind of a device, as in its verdict."""

    CPU = "cpu"
    GPU = "gpu"
    MIG = "mig"
    """MIG instance of a GPU."""
    MEMORY = "memory"
    HUGEPAGES = "hugepages"
    PCI = "pci"
    """Declared PCI function other than a GPU."""
    OTHER = "other"
    """Declared device that only its driver knows."""


_ORDER: Final = {
    DeviceKind.CPU: 0,
    DeviceKind.GPU: 1,
    DeviceKind.MIG: 1,
    DeviceKind.MEMORY: 2,
    DeviceKind.HUGEPAGES: 3,
    DeviceKind.PCI: 4,
    DeviceKind.OTHER: 5,
}


class Device(NamedTuple):
    """One host device or declared device."""

    name: str
    kind: DeviceKind
    node: int
    """NUMA node of the device; 0 on a machine without NUMA."""
    size_kib: int = 0
    """Hugepage size [KiB]; 0 for other kinds."""
    gpu: int = 0
    """Number of the GPU or of the MIG instance's GPU."""
    gi: int = -1
    """GPU instance of a MIG instance; else -1."""
    ci: int = -1
    """Compute instance of a MIG instance; else -1."""
    driver: str = ""
    """Driver that declared the device; empty: a host device."""
    pool: str = ""
    """Pool of a declared device; host devices are in the Kubernetes node's pool."""

    @property
    def subject(self) -> str:
        """Key of the device in the engine's state: its name, or for a declared device driver, pool and
        name."""
        return f"{self.driver}/{self.pool}/{self.name}" if self.driver else self.name

    def sort_key(self) -> tuple[object, ...]:
        """Sort key of the device: CPUs, GPUs with their MIG instances, memory, hugepage pools by size;
        ``node10`` after ``node9``."""
        owner = (self.driver, self.pool)
        if self.driver:
            return (*owner, _ORDER[self.kind], natural_key(self.name))
        return (*owner, _ORDER[self.kind], self.size_kib, self.node, self.gpu, self.gi, self.ci)


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key for names with numbers: ``gpu-10`` after ``gpu-9``."""
    parts = re.split(r"([0-9]{1,18})", name)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def size_name(size_kib: int) -> str:
    """Format a page size as a lower-case Kubernetes quantity: ``2mi``, ``64ki``, ``1gi``."""
    size, unit = size_kib, 0
    while size and size % 1024 == 0 and unit + 1 < len(_UNITS):
        size, unit = size // 1024, unit + 1
    return f"{size}{_UNITS[unit]}"


def cpu_device(node: int) -> Device:
    """Return the CPU device of one NUMA node."""
    return Device(f"cpu-node{node}", DeviceKind.CPU, node)


def memory_device(node: int) -> Device:
    """Return the memory device of one NUMA node."""
    return Device(f"memory-node{node}", DeviceKind.MEMORY, node)


def pool_device(size_kib: int, node: int) -> Device:
    """Return the hugepage device of one size and NUMA node."""
    return Device(f"hugepages-{size_name(size_kib)}-node{node}", DeviceKind.HUGEPAGES, node, size_kib)


def gpu_device(number: int) -> Device:
    """Return the device of a GPU."""
    return Device(f"gpu-{number}", DeviceKind.GPU, 0, gpu=number)


def mig_device(number: int, gi: int, ci: int) -> Device:
    """Return the device of a MIG instance."""
    return Device(f"gpu-{number}-mig-{gi}-{ci}", DeviceKind.MIG, 0, gpu=number, gi=gi, ci=ci)


_KINDS: Final[Mapping[type, DeviceKind]] = {
    DeclaredCpus: DeviceKind.CPU,
    DeclaredGpu: DeviceKind.GPU,
    DeclaredMemory: DeviceKind.MEMORY,
    DeclaredHugepages: DeviceKind.HUGEPAGES,
    DeclaredPci: DeviceKind.PCI,
    DeclaredOther: DeviceKind.OTHER,
}


def declared_device(declared: Declared) -> Device:
    """Return the device that a driver has declared."""
    what = declared.part
    size_kib = what.size_kib if isinstance(what, DeclaredHugepages) else 0
    return Device(declared.name, _KINDS[type(what)], 0, size_kib, driver=declared.driver, pool=declared.pool)


def parse_pool_name(name: str) -> Device | None:
    """Return the device with the name of a hugepage pool; None: the name is of another form."""
    device = _parse_pool(name)
    return device if device and device.name == name else None


def canonical_pool_name(name: str) -> str | None:
    """Return the canonical name of a hugepage pool, ``2mi`` for ``2048ki``; None: not the name of a pool."""
    device = _parse_pool(name)
    return device.name if device else None


def _parse_pool(name: str) -> Device | None:
    match = _POOL_NAME.fullmatch(name)
    if match is None or not int(match[1]):
        return None
    return pool_device(int(match[1]) * 1024 ** _UNITS.index(match[2].lower()), int(match[3]))


def device_pools(snapshot: Snapshot) -> Mapping[Device, PoolSample]:
    """Return the pool of each hugepage device. Without NUMA the machine-wide pools belong to NUMA node 0."""
    return _by_device(snapshot.pools)


@lru_cache(maxsize=2)  # called several times per evaluation, mostly with an unchanged result
def _by_device(pools: tuple[PoolSample, ...]) -> Mapping[Device, PoolSample]:
    per_node = [pool for pool in pools if pool.node is not None]
    return {pool_device(pool.size_kib, pool.node or 0): pool for pool in per_node or pools}


def devices_expected(cpus: CpuSet | None, pools: Mapping[str, int]) -> tuple[Device, ...]:
    """Return the devices that the configuration expects, independent of the machine.

    Expected CPUs belong to NUMA node 0, since the configuration names no NUMA nodes.
    """
    found = [device for name in pools if (device := parse_pool_name(name)) is not None]
    return tuple(sorted([cpu_device(0), *found] if cpus else found, key=Device.sort_key))


def devices_of(
    snapshot: Snapshot, known: Iterable[Device], expected: Mapping[str, int]
) -> tuple[Device, ...]:
    """Return the known devices, the devices of the snapshot, and the pools that the configuration expects."""
    before = tuple(known)
    found = set(before)
    # a NUMA node with memory only has no CPU device; one whose CPUs are unreadable has
    found.update(cpu_device(node.node) for node in snapshot.nodes if node.cpus != 0)
    if snapshot.machine is not None:
        numa = snapshot.machine.numa
        # a NUMA node with CPUs only has no memory device
        found.update(
            memory_device(one.node) for one in numa if one.total_kib and not is_absent(one.total_kib)
        )
    found.update(device_pools(snapshot))
    if expected:
        found.update(devices_expected(None, expected))
    return tuple(sorted(found, key=Device.sort_key)) if len(found) > len(before) else before
