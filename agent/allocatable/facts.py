"""What must be known of a node to say what its cgroups should hold."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.allocatable.arithmetic import PERIOD_US
from agent.model.cpuset import CpuSet

PAGE_BYTES: Final = 4096


class CgroupDriver(StrEnum):
    """Who makes the cgroups of pods; kubelet and runtime agree on it."""

    CGROUPFS = "cgroupfs"
    SYSTEMD = "systemd"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node and its kubelet."""

    version: int = 2
    """Of cgroups: 1 or 2."""
    driver: CgroupDriver = CgroupDriver.SYSTEMD
    page_bytes: int = PAGE_BYTES
    hugepages_kib: tuple[int, ...] = ()
    """Page sizes that the kernel has, whether or not it has pages of them.
    Source: ``/sys/kernel/mm/hugepages``."""
    period_us: int = PERIOD_US
    """Kubelet's ``cpuCFSQuotaPeriod``."""
    enforces_quota: bool = True
    """Kubelet's ``cpuCFSQuota``."""
    counts_claims: bool = True
    """The kubelet adds what claims give: from 1.37 on, behind the gate DRANodeAllocatableResources, which is
    off by default. If it does not, cgroups without it are right, and the claims' promises not kept."""


class Exclusive(NamedTuple):
    """CPUs that one container has for itself."""

    container: str
    cpus: CpuSet
    by_kubelet: bool
    """Its CPU manager gave them, so it lifts the quota. What a driver gives the kubelet does not see."""
