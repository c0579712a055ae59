"""Facts of a Kubernetes node that its expected cgroup values depend on."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.cpuset import CpuSet

PAGE_BYTES: Final = 4096
PERIOD_US: Final = 100_000
"""The kubelet's default CFS period; cpuCFSQuotaPeriod and its gate change it."""


class CgroupDriver(StrEnum):
    """cgroup driver of kubelet and runtime."""

    CGROUPFS = "cgroupfs"
    SYSTEMD = "systemd"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of a Kubernetes node and its kubelet."""

    version: int = 2
    """cgroup version: 1 or 2."""
    driver: CgroupDriver = CgroupDriver.SYSTEMD
    page_bytes: int = PAGE_BYTES
    hugepages_kib: tuple[int, ...] = ()
    """Hugepage sizes that the kernel supports.
    Source: ``/sys/kernel/mm/hugepages``."""
    period_us: int = PERIOD_US
    """CFS period [us]: the kubelet's ``cpuCFSQuotaPeriod``."""
    enforces_quota: bool = True
    """Whether the kubelet sets CFS quotas for CPU limits: its ``cpuCFSQuota``."""
    counts_claims: bool = True
    """Whether the kubelet adds the resources of claims: from 1.37 on, with the gate
    DRANodeAllocatableResources, which is off by default. If it does not, expected values exclude claims."""


class ExclusiveCpus(NamedTuple):
    """Exclusive CPUs of one container."""

    container: str
    cpus: CpuSet
    by_kubelet: bool
    """True: the kubelet's CPU manager assigned the CPUs and lifts the quota. False: a driver assigned them,
    which the kubelet does not see."""
