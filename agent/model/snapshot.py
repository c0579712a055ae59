"""Snapshot of the machine: the newest samples of all sources, which the rules evaluate."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.cleared_faults import ClearRequest
from agent.model.cpuset import CpuSet
from agent.model.declared_devices import Declarations, DriverCheckSample
from agent.model.gpu import GpuOsSample, NvmlSample
from agent.model.machine_samples import LogSample, MachineSample, NicSample, PciSample
from agent.model.pod_findings import PodsSample
from agent.model.prepare import DriverFault
from agent.model.reading import Missing, Reading, SourceSample
from agent.model.settings import CustomCheckResult


class CgroupKind(StrEnum):
    """Kind of owner of a cgroup below the cgroup ``kubepods``: a pod or a container."""

    POD = "pod"
    CONTAINER = "container"


class CpuSetsSample(NamedTuple):
    """Present, online and isolated CPUs of the machine. Source: ``/sys/devices/system/cpu``."""

    present: CpuSet | Missing
    online: CpuSet | Missing
    isolated: CpuSet | Missing


class NumaCpuSample(NamedTuple):
    """CPUs of one NUMA node, with their thermal-throttle events. Source: ``/sys/devices/system/node/node<N>``
    and ``cpu*/thermal_throttle``."""

    numa_node: int
    cpus: CpuSet | Missing
    """CPUs of the NUMA node, including offline CPUs."""
    throttle_core: Reading
    """Thermal-throttle events of physical cores since the agent started, summed over the NUMA node's CPUs.
    The sum never falls."""
    throttle_package: Reading
    """Thermal-throttle events of CPU packages since the agent started. Each CPU counts the same events, so
    this is the maximum over the NUMA node's CPUs."""


class CpuThrottleSample(NamedTuple):
    """Thermal-throttle events of one CPU since the agent started. Source: ``cpu<N>/thermal_throttle``."""

    cpu: int
    core: Reading
    """Number of thermal-throttle events of the CPU's physical core."""
    package: Reading
    """Number of thermal-throttle events of the CPU's package."""


class HugepagePoolSample(NamedTuple):
    """Page counts of one hugepage pool. Source: ``/sys/kernel/mm/hugepages``, ``node<N>/hugepages``."""

    size_kib: int
    numa_node: int | None
    """NUMA node of the pool; None: the machine-wide pool."""
    nr: Reading
    """Number of pages in the pool, free or in use: ``nr_hugepages``."""
    free: Reading
    reserved: Reading
    """Number of pages reserved by mmap() that no process has touched yet; machine-wide pools only."""
    surplus: Reading
    """Number of pages in the pool beyond the configured number: ``surplus_hugepages``."""
    overcommit: Reading
    """Largest number of surplus pages that the kernel may allocate; machine-wide pools only."""


class HugetlbSample(NamedTuple):
    """Limits of one cgroup on one hugepage size, with the number of allocations that hit them."""

    size_kib: int
    max: Reading
    """Limit on hugepage use [bytes]; ``cgroup.NO_LIMIT``: no limit."""
    rsvd_max: Reading
    """Limit on hugepage reservations [bytes]; ``cgroup.NO_LIMIT``: no limit."""
    events_max: Reading
    """Allocations that hit the limit since the cgroup was created."""
    rsvd_failed: Reading
    """Reservations that hit their limit (cgroup v1); v2 counts them in ``events_max``."""


class CgroupSample(NamedTuple):
    """State of one cgroup of a pod or container. Counters begin at 0 when the cgroup is created."""

    id: int
    """Number that the agent gives the cgroup; never reused while the agent runs."""
    kind: CgroupKind
    pod_uid: str
    container: str
    """Container id at the container runtime; empty: the cgroup of a pod."""
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
    """Memory limit of the cgroup [bytes]; ``cgroup.NO_LIMIT``: no limit."""
    cpus: CpuSet | Missing
    """CPUs that the cgroup's tasks can use, as a set: ``cpuset.cpus.effective``."""
    hugetlb: tuple[HugetlbSample, ...]


@dataclass(frozen=True, slots=True)
class NativeCoreStats:
    """Counters of the C core: its file reads, its wake-ups of the engine loop, and the
    resources that it uses."""

    passes: int = 0
    """Number of passes over all watched files that have finished."""
    wakes: int = 0
    """Number of times the C core woke the engine loop."""
    reads: int = 0
    """Number of file reads since the start of the C core."""
    opens: int = 0
    """Number of files opened since the start of the C core."""
    descriptors: int = 0
    """Number of file descriptors that the C core has open."""
    watches: int = 0
    """Number of inotify watches that the C core has."""
    kernel_bytes: int = 0
    """Estimated kernel memory that the descriptors and watches use."""
    groups_dropped: int = 0
    """Number of cgroups that are not watched now, because the table of cgroups is full."""
    overflows: int = 0
    """Number of overflows of the kernel's inotify queue; after each, all files are read again."""
    unwatched: int = 0
    """Number of watches that the kernel refused; these files are read periodically instead."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All samples of the machine at one moment, which the health rules evaluate."""

    seq: int
    """Sequence number of the snapshot; grows with every change that the rules can see."""
    cpus: CpuSetsSample
    nodes: tuple[NumaCpuSample, ...] = ()
    throttle: tuple[CpuThrottleSample, ...] = ()
    """Thermal-throttle events of each CPU that counts them, by CPU number."""
    pools: tuple[HugepagePoolSample, ...] = ()
    groups: tuple[CgroupSample, ...] = ()
    sources: tuple[SourceSample, ...] = ()
    core: NativeCoreStats = field(default_factory=NativeCoreStats)
    gpus: NvmlSample | None = None
    """State of NVML and the GPUs; None: GPU monitoring is off."""
    host: GpuOsSample = field(default_factory=GpuOsSample)
    log: LogSample | None = None
    """Lines and state of the kernel log; None: the agent does not read it."""
    machine: MachineSample | None = None
    """Samples of memory, CPUs and pressure; None: the agent does not read them."""
    pci: tuple[PciSample, ...] | Missing | None = None
    """GPUs and declared PCI functions, by address; None: not read yet."""
    nics: tuple[NicSample, ...] | Missing | None = None
    """Declared NICs, by RDMA name; None: not read yet."""
    declared: Declarations = ()
    checks: tuple[DriverCheckSample, ...] = ()
    """Results of the health checks that an embedding driver defines, one per check and device."""
    custom_checks: tuple[CustomCheckResult, ...] = ()
    """Newest results of the operator's checks (``[[check]]``)."""
    driver_faults: tuple[DriverFault, ...] = ()
    """Device faults that drivers reported while preparing claims."""
    clear_requests: tuple[ClearRequest, ...] = ()
    """Unanswered requests of operators to clear latched faults."""
    pods: PodsSample | None = None
    """Devices that pods use; None: the agent does not track them."""
