"""What was read: the samples of one pass over the node, as the sources saw them."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.check import CheckSample
from agent.model.cpuset import CpuSet
from agent.model.declared import Declarations
from agent.model.gpu import GpuHost, GpuSet
from agent.model.log import LogSample
from agent.model.machine import MachineSample
from agent.model.pci import PciSample
from agent.model.pods import PodsSample
from agent.model.prepare import DriverFault
from agent.model.reading import Missing, Reading
from agent.model.source import SourceSample


class GroupKind(StrEnum):
    """What a cgroup below kubepods stands for."""

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
    """CPUs that belong to the node, the ones now offline included."""
    throttle_core: Reading
    """Core thermal-throttle events of the node's CPUs since the agent started, summed. A count
    that resets while a CPU is offline does not make this fall."""
    throttle_package: Reading
    """The same for the package; the largest of the node's CPUs, since all of them see it."""


class ThrottleSample(NamedTuple):
    """Thermal-throttle events of one CPU since the agent started. Source: ``cpu<N>/thermal_throttle``."""

    cpu: int
    core: Reading
    package: Reading


class PoolSample(NamedTuple):
    """One hugepage pool [pages]. Source: ``/sys/kernel/mm/hugepages``, ``node<N>/hugepages``."""

    size_kib: int
    node: int | None
    """NUMA node; None for the pool of the whole machine."""
    nr: Reading
    free: Reading
    reserved: Reading
    """Machine-wide pools only."""
    surplus: Reading
    overcommit: Reading
    """Machine-wide pools only."""


class HugetlbSample(NamedTuple):
    """One hugepage size in one cgroup [bytes; events: count]."""

    size_kib: int
    max: Reading
    """``cgroup.NO_LIMIT``: there is none."""
    rsvd_max: Reading
    events_max: Reading
    """How often an allocation hit the limit, since the cgroup was made."""
    rsvd_failed: Reading
    """cgroup v1: how often a reservation hit its limit. v2 counts those among ``events_max``."""


class GroupSample(NamedTuple):
    """One cgroup of a pod or of a container. Counters count since the cgroup was made."""

    id: int
    """Unique while the agent runs; never reused."""
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
    """``cgroup.NO_LIMIT``: there is none [bytes]."""
    cpus: CpuSet | Missing
    """CPUs it may use: ``cpuset.cpus.effective``."""
    hugetlb: tuple[HugetlbSample, ...]


@dataclass(frozen=True, slots=True)
class CoreStats:
    """What the native core says of its own cost."""

    passes: int = 0
    wakes: int = 0
    """How often it woke Python."""
    reads: int = 0
    opens: int = 0
    descriptors: int = 0
    watches: int = 0
    kernel_bytes: int = 0
    """Estimated kernel memory held by descriptors and watches."""
    groups_dropped: int = 0
    """Cgroups that find no room in the table now."""
    overflows: int = 0
    """Times the kernel's inotify queue overflowed and everything was read again."""
    unwatched: int = 0
    """Watches that the kernel refused; what they would have told is found by the sweep."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The samples of one pass: everything that a rule may look at."""

    seq: int
    """Number of the publication; grows with every visible change."""
    cpus: CpuSample
    nodes: tuple[NodeSample, ...] = ()
    throttle: tuple[ThrottleSample, ...] = ()
    """By CPU; those that have such counters."""
    pools: tuple[PoolSample, ...] = ()
    groups: tuple[GroupSample, ...] = ()
    sources: tuple[SourceSample, ...] = ()
    core: CoreStats = field(default_factory=CoreStats)
    gpus: GpuSet | None = None
    """None: nobody looks for GPUs."""
    host: GpuHost = field(default_factory=GpuHost)
    log: LogSample | None = None
    """The kernel log; None: nobody reads it."""
    machine: MachineSample | None = None
    """None: nobody reads it."""
    pci: tuple[PciSample, ...] | Missing | None = None
    """GPUs and declared functions that are on the bus, by address; None: nobody has looked yet."""
    declared: Declarations = ()
    checks: tuple[CheckSample, ...] = ()
    """A driver's own checks of its devices, when we are part of it; one per check and device."""
    told: tuple[DriverFault, ...] = ()
    """Devices that a driver found broken while it prepared claims."""
    pods: PodsSample | None = None
    """Who uses the devices; None: nobody looks."""
