"""Properties of a Kubernetes node and its kubelet that decide which cgroup values are correct."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

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
    """1 or 2."""
    cgroup_driver: CgroupDriver = CgroupDriver.SYSTEMD
    page_bytes: int = PAGE_BYTES
    hugepages_kib: tuple[int, ...] = ()
    """Hugepage sizes in ``/sys/kernel/mm/hugepages``."""
    period_us: int = PERIOD_US
    """CFS period [us]: the kubelet's ``cpuCFSQuotaPeriod``."""
    enforces_quota: bool = True
    """True: the kubelet sets a CFS quota for each CPU limit. Its ``cpuCFSQuota``."""
    counts_claims: bool = True
    """True: the kubelet adds the resources of claims to those of pods (from 1.37 on, with the feature gate
    DRANodeAllocatableResources, off by default). False: expected values exclude claims."""
    counts_earlier_sidecars: bool | None = None
    """True: an init container without a limit counts as limited if an earlier sidecar has one, as up to
    Kubernetes 1.36. False: it does not, as from 1.37 on. None: unknown; both values are correct."""


class ExclusiveCpus(NamedTuple):
    """CPUs that only one container may use."""

    container: str
    cpus: CpuSet
    by_kubelet: bool
    """True: the kubelet's CPU manager assigned the CPUs and lifts the quota. False: a driver assigned them,
    and the kubelet keeps the quota."""
