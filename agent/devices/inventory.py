"""Inventory of the machine's devices: CPUs, memory and hugepages of each NUMA node, GPUs, declared devices.

Names are DNS labels, stable over restarts. A device that disappears stays in the inventory, so that rules can
report that it is missing.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from agent.model.cpuset import CpuSet
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredGpuDevice,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredNicDevice,
    DeclaredOtherDevice,
    DeclaredPciDevice,
    DriverDevice,
)
from agent.model.reading import is_absent
from agent.model.snapshot import HugepagePoolSample, Snapshot

_POOL_NAME: Final = re.compile(r"hugepages-(\d+)(ki|mi|gi|ti)-node(\d+)", re.IGNORECASE)
_UNITS: Final = ("ki", "mi", "gi", "ti")
_DEVICES_CACHED: Final = 1024
"""Number of devices of a kind that are not created again in each evaluation."""


class DeviceKind(StrEnum):
    """Kind of a device in the inventory."""

    CPU = "cpu"
    GPU = "gpu"
    MIG = "mig"
    """MIG instance of a GPU."""
    MEMORY = "memory"
    HUGEPAGES = "hugepages"
    PCI = "pci"
    """Declared PCI function other than a GPU."""
    NIC = "nic"
    """Declared RDMA network adapter."""
    OTHER = "other"
    """Declared device that the agent cannot read."""


_ORDER: Final = {
    DeviceKind.CPU: 0,
    DeviceKind.GPU: 1,
    DeviceKind.MIG: 1,
    DeviceKind.MEMORY: 2,
    DeviceKind.HUGEPAGES: 3,
    DeviceKind.PCI: 4,
    DeviceKind.NIC: 5,
    DeviceKind.OTHER: 6,
}


class InventoryDevice(NamedTuple):
    """One device: a host device, or a device that a DRA driver declares."""

    name: str
    kind: DeviceKind
    numa_node: int
    """NUMA node that the device belongs to; 0 on a machine without NUMA."""
    size_kib: int = 0
    """Size of the device's hugepages [KiB]; 0 for other kinds of devices."""
    gpu_number: int = 0
    """Stable number of the GPU, or of the GPU of a MIG instance; 0 for other kinds."""
    gi: int = -1
    """Number of the MIG instance's GPU instance; -1 for other kinds of devices."""
    ci: int = -1
    """Number of the MIG instance's compute instance; -1 for other kinds of devices."""
    driver: str = ""
    """Driver that declared the device; empty: a host device."""
    pool: str = ""
    """Pool of a declared device; empty: a host device, whose pool is the Kubernetes node's name."""

    @property
    def subject(self) -> str:
        """Unique key of the device: its name; for a declared device ``<driver>/<pool>/<name>``."""
        return f"{self.driver}/{self.pool}/{self.name}" if self.driver else self.name

    def sort_key(self) -> tuple[object, ...]:
        """Sort key of the device.

        The order is CPUs, GPUs with their MIG instances, memory, hugepages by size. ``node10`` follows
        ``node9``.
        """
        owner = (self.driver, self.pool)
        if self.driver:
            return (*owner, _ORDER[self.kind], natural_key(self.name))
        return (*owner, _ORDER[self.kind], self.size_kib, self.numa_node, self.gpu_number, self.gi, self.ci)


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that orders the numbers in names by value: ``gpu-10`` follows ``gpu-9``."""
    parts = re.split(r"([0-9]{1,18})", name)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def format_page_size(size_kib: int) -> str:
    """Format a hugepage size as a lower-case Kubernetes quantity: ``2mi``, ``64ki``, ``1gi``."""
    size, unit = size_kib, 0
    while size and size % 1024 == 0 and unit + 1 < len(_UNITS):
        size, unit = size // 1024, unit + 1
    return f"{size}{_UNITS[unit]}"


@lru_cache(_DEVICES_CACHED)
def cpu_device(numa_node: int) -> InventoryDevice:
    return InventoryDevice(f"cpu-node{numa_node}", DeviceKind.CPU, numa_node)


@lru_cache(_DEVICES_CACHED)
def memory_device(numa_node: int) -> InventoryDevice:
    return InventoryDevice(f"memory-node{numa_node}", DeviceKind.MEMORY, numa_node)


@lru_cache(_DEVICES_CACHED)
def hugepage_device(size_kib: int, numa_node: int) -> InventoryDevice:
    return InventoryDevice(
        f"hugepages-{format_page_size(size_kib)}-node{numa_node}", DeviceKind.HUGEPAGES, numa_node, size_kib
    )


@lru_cache(_DEVICES_CACHED)
def gpu_device(gpu_number: int) -> InventoryDevice:
    return InventoryDevice(f"gpu-{gpu_number}", DeviceKind.GPU, 0, gpu_number=gpu_number)


@lru_cache(_DEVICES_CACHED)
def mig_device(gpu_number: int, gi: int, ci: int) -> InventoryDevice:
    return InventoryDevice(
        f"gpu-{gpu_number}-mig-{gi}-{ci}", DeviceKind.MIG, 0, gpu_number=gpu_number, gi=gi, ci=ci
    )


_KINDS: Final[Mapping[type, DeviceKind]] = {
    DeclaredCpuDevice: DeviceKind.CPU,
    DeclaredGpuDevice: DeviceKind.GPU,
    DeclaredMemoryDevice: DeviceKind.MEMORY,
    DeclaredHugepageDevice: DeviceKind.HUGEPAGES,
    DeclaredPciDevice: DeviceKind.PCI,
    DeclaredNicDevice: DeviceKind.NIC,
    DeclaredOtherDevice: DeviceKind.OTHER,
}


def declared_device(declared: DriverDevice) -> InventoryDevice:
    part = declared.part
    size_kib = part.size_kib if isinstance(part, DeclaredHugepageDevice) else 0
    return InventoryDevice(
        declared.name, _KINDS[type(part)], 0, size_kib, driver=declared.driver, pool=declared.pool
    )


def parse_pool_name(name: str) -> InventoryDevice | None:
    """Return the hugepage device with a canonical name such as ``hugepages-2mi-node0``.

    None: the name has another form.
    """
    device = _parse_pool(name)
    return device if device and device.name == name else None


def canonical_pool_name(name: str) -> str | None:
    """Return the canonical name of a hugepage device: ``hugepages-2mi-node0`` for ``hugepages-2048ki-node0``.

    None: the name is not that of a hugepage device.
    """
    device = _parse_pool(name)
    return device.name if device else None


def _parse_pool(name: str) -> InventoryDevice | None:
    match = _POOL_NAME.fullmatch(name)
    if match is None or not int(match[1]):
        return None
    return hugepage_device(int(match[1]) * 1024 ** _UNITS.index(match[2].lower()), int(match[3]))


@lru_cache(maxsize=2)
def in_report_order(devices: tuple[InventoryDevice, ...]) -> Mapping[str, InventoryDevice]:
    """Return the devices in the order of the report, by subject."""
    return {device.subject: device for device in sorted(devices, key=InventoryDevice.sort_key)}


def pools_by_device(snapshot: Snapshot) -> Mapping[InventoryDevice, HugepagePoolSample]:
    """Return the page counts of each hugepage device.
    Without NUMA, machine-wide pools belong to NUMA node 0."""
    return _pools_by_device(snapshot.pools)


@lru_cache(maxsize=2)  # called several times per evaluation, mostly with an unchanged result
def _pools_by_device(pools: tuple[HugepagePoolSample, ...]) -> Mapping[InventoryDevice, HugepagePoolSample]:
    per_node = [pool for pool in pools if pool.numa_node is not None]
    return {hugepage_device(pool.size_kib, pool.numa_node or 0): pool for pool in per_node or pools}


def expected_devices(cpus: CpuSet | None, pools: Mapping[str, int]) -> tuple[InventoryDevice, ...]:
    """Return the CPU and hugepage devices that the configuration expects, whether or not they exist.

    Args:
        cpus: Expected CPUs, which count as NUMA node 0; None: no expectation.
        pools: Expected number of pages by hugepage device name.
    """
    found = [device for name in pools if (device := parse_pool_name(name)) is not None]
    return tuple(sorted([cpu_device(0), *found] if cpus else found, key=InventoryDevice.sort_key))


def update_inventory(
    snapshot: Snapshot, known: Iterable[InventoryDevice], expected: Mapping[str, int]
) -> tuple[InventoryDevice, ...]:
    """Return the known devices, those in the snapshot, and the hugepage devices in ``expected``."""
    before = tuple(known)
    found = set(before)
    # a NUMA node with memory only has no CPU device; one whose CPUs are unreadable has
    found.update(cpu_device(node.numa_node) for node in snapshot.nodes if node.cpus != 0)
    if snapshot.machine is not None:
        numa = snapshot.machine.numa
        # a NUMA node with CPUs only has no memory device
        found.update(
            memory_device(node.numa_node) for node in numa if node.total_kib and not is_absent(node.total_kib)
        )
    found.update(pools_by_device(snapshot))
    if expected:
        found.update(expected_devices(None, expected))
    return tuple(sorted(found, key=InventoryDevice.sort_key)) if len(found) > len(before) else before
