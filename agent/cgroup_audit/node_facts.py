"""Properties of a Kubernetes node and its kubelet that decide which cgroup values are correct."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.cgroup_audit.kubelet_config import KubeletConfig, MemoryQosMode, possible_memory_qos
from agent.cgroup_audit.pod_model import MEMORY
from agent.cgroup_audit.quantity import ZERO, Quantity
from agent.model.cpuset import CpuSet

PAGE_BYTES: Final = 4096
PERIOD_US: Final = 100_000
"""The kubelet's default CFS period [us]; its cpuCFSQuotaPeriod changes it."""


class CgroupDriver(StrEnum):
    """The way in which kubelet and container runtime create cgroups: directly, or through systemd."""

    CGROUPFS = "cgroupfs"
    SYSTEMD = "systemd"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Properties of a Kubernetes node and its kubelet that decide which cgroup values are correct."""

    cgroup_version: int = 2
    """Version of the cgroups on this machine: 1 or 2."""
    cgroup_driver: CgroupDriver = CgroupDriver.SYSTEMD
    page_bytes: int = PAGE_BYTES
    hugepages_kib: tuple[int, ...] = ()
    """Sizes of hugepages that the machine supports, from ``/sys/kernel/mm/hugepages`` [KiB]."""
    period_us: int = PERIOD_US
    """Period of CPU quotas [us]: the kubelet's ``cpuCFSQuotaPeriod``."""
    enforces_quota: bool = True
    """True: the kubelet sets a CPU quota for each CPU limit, by its ``cpuCFSQuota``."""
    counts_claims: bool = True
    """True: the kubelet adds the resources of claims to those of pods. False: expected values exclude claims.

    Kubelets do so from 1.37 on, with the feature gate DRANodeAllocatableResources, off by default.
    """
    counts_earlier_sidecars: bool | None = None
    """Whether an init container without a limit counts as limited if an earlier sidecar has a limit.

    True: as up to Kubernetes 1.36. False: as from 1.37 on. None: unknown; both values are correct.
    """
    kubelet: KubeletConfig | None = None
    """Configuration of the kubelet; None: unknown, so values that depend on it are not compared."""
    kubelet_minor: int | None = None
    """Minor version of the kubelet, such as 37; None: unknown."""
    memory_bytes: int | None = None
    """Memory of the machine, ``MemTotal``; None: unknown."""
    swap_bytes: int | None = None
    """Swap space of the machine, ``SwapTotal``; None: unknown."""
    cpu_counts: tuple[int, ...] = ()
    """Numbers of CPUs that the kubelet may have found at its start: online, present. Empty: unknown."""

    @property
    def memory_qos(self) -> tuple[MemoryQosMode, ...]:
        """Ways in which the kubelet may set memory QoS; empty: unknown, or cgroup v1, which has none."""
        if self.kubelet is None or self.cgroup_version == 1:
            return ()
        return possible_memory_qos(self.kubelet, self.kubelet_minor)

    @property
    def kubelet_source(self) -> str:
        """Where the kubelet's configuration was read; empty: it is unknown."""
        return self.kubelet.source if self.kubelet else ""

    def reserved(self, resource: str) -> Quantity:
        """Return the amount of CPU or memory that the configuration reserves for kubelet and system."""
        if self.kubelet is None:
            return ZERO
        return self.kubelet.kube_reserved.get(resource, ZERO) + self.kubelet.system_reserved.get(
            resource, ZERO
        )

    @property
    def allocatable_memory(self) -> int | None:
        """Memory of all pods together, without the eviction threshold [bytes].
        None: unknown configuration."""
        if self.kubelet is None or self.memory_bytes is None:
            return None
        return max(0, self.memory_bytes - self.reserved(MEMORY).value)


class ExclusiveCpus(NamedTuple):
    """CPUs that only one container may use."""

    container: str
    cpus: CpuSet
    by_kubelet: bool
    """True: the kubelet's CPU manager assigned the CPUs and lifts the quota.
    False: a driver assigned them, and the kubelet keeps the quota."""
