"""Devices that drivers declare, each a part of the machine, and results of drivers' health checks."""

from typing import NamedTuple

from agent.model.cpuset import CpuSet
from agent.model.health import Finding


class DeclaredCpus(NamedTuple):
    """Set of CPUs that a driver declares as a device."""

    cpus: CpuSet
    numa: int | None
    """NUMA node of the CPUs; None: not declared."""
    exclusive: bool
    """Whether only the claim's containers run on the CPUs; these must not be throttled."""
    isolated: bool
    """Whether the CPUs are declared to be in the kernel's isolated set."""


class DeclaredHugepages(NamedTuple):
    """Pages of one hugepage pool that a driver declares as a device."""

    size_kib: int
    pages: int
    numa: int


class DeclaredMemory(NamedTuple):
    """Memory of one NUMA node that a driver declares as a device."""

    size: int
    """Size [bytes]; 0: not declared."""
    numa: int


class DeclaredGpu(NamedTuple):
    """GPU or MIG instance that a driver declares as a device."""

    pci: str
    """PCI address, ``0000:3b:00.0``. Either this or ``uuid`` is set."""
    uuid: str
    """UUID of the GPU, ``GPU-...``, or of the instance, ``MIG-...``."""
    gi: int
    """GPU instance; -1: the whole GPU."""
    ci: int
    """Compute instance; -1: the whole GPU."""


class DeclaredPci(NamedTuple):
    """PCI function other than a GPU that a driver declares as a device."""

    address: str
    driver: str
    """Kernel driver that must be bound; empty: any or none."""


class DeclaredOther(NamedTuple):
    """Declared device that only its driver knows: the driver's checks and prepares give its health."""


DeclaredPart = DeclaredCpus | DeclaredHugepages | DeclaredMemory | DeclaredGpu | DeclaredPci | DeclaredOther


class Declared(NamedTuple):
    """One declared device of a driver."""

    driver: str
    pool: str
    """Pool of the device; the Kubernetes node's name unless the driver sets another."""
    name: str
    part: DeclaredPart
    lease_s: int
    """Lease: how long the kubelet may use a verdict [s]; 0: the configured default."""

    @property
    def subject(self) -> str:
        """Key of the device in the engine's state. Names of host devices have no slash, so keys are
        unique."""
        return f"{self.driver}/{self.pool}/{self.name}"


class DeclaredFile(NamedTuple):
    """Declarations of one driver's file, or why the file is invalid."""

    driver: str
    devices: tuple[Declared, ...]
    """Declared devices; of an invalid file, those of its last valid version. A valid file without devices
    means that the driver has none, and host devices are not reported on its socket either."""
    error: str = ""
    """Error in the file, its path first; empty: the file is valid."""


Declarations = tuple[DeclaredFile, ...]
"""Declarations of all drivers, each driver once."""


class CheckSample(NamedTuple):
    """Last result of a driver's health check of one device."""

    check: str
    """Name of the check: a DNS label."""
    subject: str
    """The device, ``<driver>/<pool>/<name>``."""
    finding: Finding | None
    """Fault that the check found; None: no fault, or the check could not run (``unread``)."""
    unread: str
    """Reason why the check has no result: it timed out or raised. Empty: it has one."""
    passes: int
    """Finished runs of the check; 0: the first one still runs."""
    beat_ns: int
    """CLOCK_MONOTONIC when the last run finished, or when the first one started [ns]."""
    period_ns: int
    raise_after: int
    """Consecutive failing runs before the fault is raised."""
    clear_after: int
    """Consecutive passing runs before the fault is cleared."""
