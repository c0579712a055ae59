"""Snapshot: the samples of all sources at one moment."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.cpuset import CpuSet
from agent.model.declared import CheckSample, Declarations
from agent.model.gpu import GpuHost, GpuSet
from agent.model.kernel_messages import LogSample
from agent.model.machine import MachineSample
from agent.model.pci import PciSample
from agent.model.pods import PodsSample
from agent.model.prepare import DriverFault
from agent.model.reading import Missing, Reading
from agent.model.source import SourceSample


class GroupKind(StrEnum):
    """Kind of a cgroup below kubepods: pod or container."""

    POD = "pod"
    CONTAINER = "container"


class CpuSample(NamedTuple):
    """The CPU sets of the machine. Source: ``/sys/devices/system/cpu``."""

    present: CpuSet | Missing
    online: CpuSet | Missing
    isolated: CpuSet | Missing


class NodeSample(NamedTuple):
    """One NUMA node. Source: ``/sys/devices/system/node/node<N>`` and ``cpu*/thermal_throttle``."""

    node: int
    cpus: CpuSet | Missing
    """CPUs of the NUMA node, including offline CPUs."""
    throttle_core: Reading
    """Core thermal-throttle events since the agent started, summed over the NUMA node's CPUs. The sum does
    not fall when the kernel resets a count while a CPU is offline."""
    throttle_package: Reading
    """Package thermal-throttle events since the agent started: the maximum over the NUMA node's CPUs, since
    each CPU counts the same events."""


class ThrottleSample(NamedTuple):
    """Thermal-throttle events of one CPU since the agent started. Source: ``cpu<N>/thermal_throttle``."""

    cpu: int
    core: Reading
    package: Reading


class PoolSample(NamedTuple):
    """One hugepage pool [pages]. Source: ``/sys/kernel/mm/hugepages``, ``node<N>/hugepages``."""

    size_kib: int
    node: int | None
    """NUMA node of the pool; None: the machine-wide pool."""
    nr: Reading
    free: Reading
    reserved: Reading
    """Reserved pages; machine-wide pools only."""
    surplus: Reading
    overcommit: Reading
    """Limit of surplus pages; machine-wide pools only."""


class HugetlbSample(NamedTuple):
    """Limits on one hugepage size in one cgroup [bytes], with counts of the allocations that hit them."""

    size_kib: int
    max: Reading
    """Limit on hugepage use [bytes]; ``cgroup.NO_LIMIT``: no limit."""
    rsvd_max: Reading
    events_max: Reading
    """Allocations that hit the limit since the cgroup was created."""
    rsvd_failed: Reading
    """Reservations that hit their limit (cgroup v1); v2 counts them in ``events_max``."""


class GroupSample(NamedTuple):
    """One cgroup of a pod or container. Counters count from the cgroup's creation."""

    id: int
    """Id, unique while the agent runs and never reused."""
    kind: GroupKind
    pod_uid: str
    container: str
    """Container id; empty for a pod."""
    populated: Reading
    frozen: Reading
    mem_high: Reading
    mem_max: Reading
    mem_oom: Reading
    mem_oom_kill: Reading
    mem_failcnt: Reading
    cpu_periods: Reading
    cpu_throttled: Reading
    mem_limit: Reading
    """Memory limit [bytes]; ``cgroup.NO_LIMIT``: no limit."""
    cpus: CpuSet | Missing
    """Effective CPUs: ``cpuset.cpus.effective``."""
    hugetlb: tuple[HugetlbSample, ...]


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Cost counters of the native core."""

    passes: int = 0
    wakes: int = 0
    """Number of times the core woke Python."""
    reads: int = 0
    opens: int = 0
    descriptors: int = 0
    watches: int = 0
    kernel_bytes: int = 0
    """Estimated kernel memory held by descriptors and watches."""
    groups_dropped: int = 0
    """Cgroups that currently do not fit into the table."""
    overflows: int = 0
    """Overflows of the kernel's inotify queue; after each, all files are read again."""
    unwatched: int = 0
    """Watches that the kernel refused; the sweep reads these files instead."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All samples that the rules read."""

    seq: int
    """Number of the publication; it grows with every visible change."""
    cpus: CpuSample
    nodes: tuple[NodeSample, ...] = ()
    throttle: tuple[ThrottleSample, ...] = ()
    """CPUs with thermal-throttle counters, by number."""
    pools: tuple[PoolSample, ...] = ()
    groups: tuple[GroupSample, ...] = ()
    sources: tuple[SourceSample, ...] = ()
    core: CoreStats = field(default_factory=CoreStats)
    gpus: GpuSet | None = None
    """GPUs; None: GPU monitoring is off."""
    host: GpuHost = field(default_factory=GpuHost)
    log: LogSample | None = None
    """Kernel log; None: the agent does not read it."""
    machine: MachineSample | None = None
    """Slow readings of the machine; None: the agent does not read them."""
    pci: tuple[PciSample, ...] | Missing | None = None
    """GPUs and declared PCI functions, by address; None: not read yet."""
    declared: Declarations = ()
    checks: tuple[CheckSample, ...] = ()
    """Results of the health checks that an embedding driver defines, one per check and device."""
    driver_faults: tuple[DriverFault, ...] = ()
    """Device faults that drivers reported while preparing claims."""
    pods: PodsSample | None = None
    """Uses of devices by pods; None: the agent does not track them."""
