"""Which devices a node has: per NUMA node its CPUs, its memory, and its hugepages by size; GPUs and their MIG
instances; and what drivers declare.

Names are DNS labels and stable over restarts. A device that was once seen stays: what has vanished is for
the rules to judge, not for the inventory to forget.
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


class Kind(StrEnum):
    """What a device is; the ``kind`` of its verdict."""

    CPU = "cpu"
    GPU = "gpu"
    MIG = "mig"
    """An instance of a GPU."""
    MEMORY = "memory"
    HUGEPAGES = "hugepages"
    PCI = "pci"
    """Any other PCI function: of a driver that declares it."""
    OTHER = "other"
    """What only its driver knows."""


_ORDER: Final = {
    Kind.CPU: 0,
    Kind.GPU: 1,
    Kind.MIG: 1,
    Kind.MEMORY: 2,
    Kind.HUGEPAGES: 3,
    Kind.PCI: 4,
    Kind.OTHER: 5,
}


class Device(NamedTuple):
    """One device of the host, or of a driver that declared it."""

    name: str
    kind: Kind
    node: int
    """NUMA node; 0 on a machine without."""
    size_kib: int = 0
    """Page size of hugepages, else 0."""
    gpu: int = 0
    """Number of the GPU, of a MIG instance's too."""
    gi: int = -1
    """GPU instance of a MIG instance, else -1; so the compute instance."""
    ci: int = -1
    driver: str = ""
    """Empty: the host's own."""
    pool: str = ""
    """Of a declared one; the host's own are in the node's."""

    @property
    def subject(self) -> str:
        """What it is tracked by; no name of the host's own has a slash."""
        return f"{self.driver}/{self.pool}/{self.name}" if self.driver else self.name

    def sort_key(self) -> tuple[object, ...]:
        """CPUs, GPUs each with its instances, memory, pools by size; ``node10`` after ``node9``."""
        whose = (self.driver, self.pool)
        if self.driver:
            return (*whose, _ORDER[self.kind], natural_key(self.name))
        return (*whose, _ORDER[self.kind], self.size_kib, self.node, self.gpu, self.gi, self.ci)


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """For sorting names with numbers in them: ``gpu-10`` after ``gpu-9``."""
    parts = re.split(r"([0-9]{1,18})", name)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def size_name(size_kib: int) -> str:
    """A page size as Kubernetes writes it, in lower case: ``2mi``, ``64ki``, ``1gi``."""
    size, unit = size_kib, 0
    while size and size % 1024 == 0 and unit + 1 < len(_UNITS):
        size, unit = size // 1024, unit + 1
    return f"{size}{_UNITS[unit]}"


def cpu_device(node: int) -> Device:
    """The CPUs of one NUMA node."""
    return Device(f"cpu-node{node}", Kind.CPU, node)


def memory_device(node: int) -> Device:
    """The memory of one NUMA node."""
    return Device(f"memory-node{node}", Kind.MEMORY, node)


def pool_device(size_kib: int, node: int) -> Device:
    """The hugepages of one size on one NUMA node."""
    return Device(f"hugepages-{size_name(size_kib)}-node{node}", Kind.HUGEPAGES, node, size_kib)


def gpu_device(number: int) -> Device:
    """A whole GPU."""
    return Device(f"gpu-{number}", Kind.GPU, 0, gpu=number)


def mig_device(number: int, gi: int, ci: int) -> Device:
    """One MIG instance of a GPU."""
    return Device(f"gpu-{number}-mig-{gi}-{ci}", Kind.MIG, 0, gpu=number, gi=gi, ci=ci)


_KINDS: Final[Mapping[type, Kind]] = {
    DeclaredCpus: Kind.CPU,
    DeclaredGpu: Kind.GPU,
    DeclaredMemory: Kind.MEMORY,
    DeclaredHugepages: Kind.HUGEPAGES,
    DeclaredPci: Kind.PCI,
    DeclaredOther: Kind.OTHER,
}


def declared_device(declared: Declared) -> Device:
    """The device that a driver declares."""
    what = declared.what
    size_kib = what.size_kib if isinstance(what, DeclaredHugepages) else 0
    return Device(declared.name, _KINDS[type(what)], 0, size_kib, driver=declared.driver, pool=declared.pool)


def parse_pool_name(name: str) -> Device | None:
    """The device of a hugepage pool's name, or None if it is no such name."""
    device = _pool_meant(name)
    return device if device and device.name == name else None


def spell_pool_name(name: str) -> str | None:
    """Our name for a hugepage pool that is named otherwise: ``2mi`` for ``2048ki``; None if it is no pool."""
    device = _pool_meant(name)
    return device.name if device else None


def _pool_meant(name: str) -> Device | None:
    match = _POOL_NAME.fullmatch(name)
    if match is None or not int(match[1]):
        return None
    return pool_device(int(match[1]) * 1024 ** _UNITS.index(match[2].lower()), int(match[3]))


def device_pools(snapshot: Snapshot) -> Mapping[Device, PoolSample]:
    """The pool behind each hugepage device.

    A kernel without NUMA has only machine-wide pools; they are node 0's then.
    """
    return _by_device(snapshot.pools)


@lru_cache(maxsize=2)  # every part of a look asks, and seldom is the next look's answer another
def _by_device(pools: tuple[PoolSample, ...]) -> Mapping[Device, PoolSample]:
    per_node = [pool for pool in pools if pool.node is not None]
    return {pool_device(pool.size_kib, pool.node or 0): pool for pool in per_node or pools}


def devices_expected(cpus: CpuSet | None, pools: Mapping[str, int]) -> tuple[Device, ...]:
    """The devices that the configuration expects, whatever the machine has.

    Which NUMA nodes have the CPUs only the machine can tell, so they are the first one's.
    """
    found = [device for name in pools if (device := parse_pool_name(name)) is not None]
    return tuple(sorted([cpu_device(0), *found] if cpus else found, key=Device.sort_key))


def devices_of(
    snapshot: Snapshot, known: Iterable[Device], expected: Mapping[str, int]
) -> tuple[Device, ...]:
    """The known devices, those of the snapshot, and the pools that the configuration expects."""
    before = tuple(known)
    found = set(before)
    # a NUMA node of memory alone has no CPUs to judge; one whose CPUs nobody can read has
    found.update(cpu_device(node.node) for node in snapshot.nodes if node.cpus != 0)
    if snapshot.machine is not None:
        numa = snapshot.machine.numa
        # nor has one of CPUs alone memory
        found.update(
            memory_device(one.node) for one in numa if one.total_kib and not is_absent(one.total_kib)
        )
    found.update(device_pools(snapshot))
    if expected:
        found.update(devices_expected(None, expected))
    return tuple(sorted(found, key=Device.sort_key)) if len(found) > len(before) else before
