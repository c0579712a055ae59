"""Devices that DRA drivers declare to the agent as parts of the machine, and results of the drivers' own
health checks."""

from typing import NamedTuple

from agent.model.cpuset import CpuSet
from agent.model.health import Finding


class DeclaredCpuDevice(NamedTuple):
    """CPUs that a driver declares as one device."""

    cpus: CpuSet
    numa: int | None
    """NUMA node of the CPUs; None: the driver does not say."""
    exclusive: bool
    """True: only the claim's containers run on the CPUs, and these containers must not be throttled."""
    isolated: bool
    """True: the CPUs must be in the kernel's isolated set (``isolcpus``)."""


class DeclaredHugepageDevice(NamedTuple):
    """Hugepages of one size on one NUMA node that a driver declares as one device."""

    size_kib: int
    pages: int
    numa: int


class DeclaredMemoryDevice(NamedTuple):
    """Memory of one NUMA node that a driver declares as one device."""

    size: int
    """Size of the memory [bytes]; 0: the driver does not say."""
    numa: int


class DeclaredGpuDevice(NamedTuple):
    """GPU or MIG instance that a driver declares as one device."""

    pci: str
    """PCI address of the GPU, ``0000:3b:00.0``; empty: ``uuid`` is set."""
    uuid: str
    """UUID of the GPU, ``GPU-...``, or of the MIG instance, ``MIG-...``; empty: ``pci`` is set."""
    gi: int
    """Number of the GPU instance (MIG); -1: the whole GPU."""
    ci: int
    """Number of the compute instance (MIG); -1: the whole GPU."""


class DeclaredPciDevice(NamedTuple):
    """PCI function other than a GPU that a driver declares as one device."""

    address: str
    driver: str
    """Kernel driver that must be bound to the PCI function; empty: any or none."""


class DeclaredNicDevice(NamedTuple):
    """RDMA network adapter (NIC) that a driver declares as one device."""

    pci: str
    """PCI address of the NIC; empty: ``rdma`` is set."""
    rdma: str
    """RDMA name of the NIC, ``mlx5_0``; empty: ``pci`` is set."""


class DeclaredOtherDevice(NamedTuple):
    """Device that a driver declares and whose state the agent cannot read.

    The health of the device comes from the driver's checks and prepare results.
    """


DeclaredPart = (
    DeclaredCpuDevice
    | DeclaredHugepageDevice
    | DeclaredMemoryDevice
    | DeclaredGpuDevice
    | DeclaredPciDevice
    | DeclaredNicDevice
    | DeclaredOtherDevice
)


class DriverDevice(NamedTuple):
    """One device that a DRA driver declares to the agent."""

    driver: str
    pool: str
    """Pool of the device; the Kubernetes node's name unless the driver sets another."""
    name: str
    part: DeclaredPart
    lease_s: int
    """Lease: how long the kubelet may use a health report [s]; 0: the configured default."""
    checks: tuple[str, ...] = ()
    """Names of the checks whose results the driver reports over its socket; without a result the device is
    Unknown."""

    @property
    def subject(self) -> str:
        """Key of the device in the health engine and in reports: ``<driver>/<pool>/<name>``."""
        return f"{self.driver}/{self.pool}/{self.name}"


class DeclaredFile(NamedTuple):
    """Content of one driver's declaration file, or the reason why the file is invalid."""

    driver: str
    devices: tuple[DriverDevice, ...]
    """Declared devices; of an invalid file, the devices of its last valid version. Empty, from a valid file:
    the driver's socket reports no devices at all, not even host devices."""
    error: str = ""
    """Error in the file, beginning with its path; empty: the file is valid."""


Declarations = tuple[DeclaredFile, ...]
"""Content of the declaration files of all drivers, one for each driver."""


def declared_nics(declarations: Declarations) -> frozenset[DeclaredNicDevice]:
    """Return the NICs that drivers declare."""
    parts = (device.part for file in declarations for device in file.devices)
    return frozenset(part for part in parts if isinstance(part, DeclaredNicDevice))


class DriverCheckSample(NamedTuple):
    """Last result of a health check that a DRA driver defines, for one device."""

    check: str
    """Name of the check: a DNS label."""
    subject: str
    """Checked device, ``<driver>/<pool>/<name>``."""
    finding: Finding | None
    """Fault that the check found; None: no fault, or no result (see ``no_result_reason``)."""
    no_result_reason: str
    """Reason why the check gave no result, such as a timeout or an exception; empty: the check gave a
    result."""
    passes: int
    """Number of finished runs of the check; 0: the first run has not finished."""
    beat_ns: int
    """CLOCK_MONOTONIC when the last run finished, or when the first one started [ns]."""
    period_ns: int
    """Time between two runs of the check [ns]."""
    raise_after: int
    """Number of consecutive failing runs before the check's fault is raised."""
    clear_after: int
    """Number of consecutive passing runs before the check's fault is cleared."""
    lease_ns: int = 0
    """Age above which the result no longer counts [ns]; 0: never, because the check runs in this process."""
    equal_passes: int = 0
    """Number of consecutive runs, up to the last one, with its code, without a fault, or without a result.

    Runs without a result are left out of the other counts. 0: not counted.
    """


class EqualRuns(NamedTuple):
    """Numbers of consecutive runs of one health check with equal results, up to the last run."""

    code: str = ""
    """Code of the finding of the last run with a result; empty: it found no fault."""
    code_runs: int = 0
    """Number of consecutive runs with this code. Runs without a result are left out."""
    unread_runs: int = 0
    """Number of consecutive runs without a result; 0: the last run had one."""

    @property
    def equal_passes(self) -> int:
        """Number of consecutive runs, up to the last one, with the same result."""
        return self.unread_runs or self.code_runs

    def next(self, finding: Finding | None, no_result_reason: str) -> "EqualRuns":
        """Return the numbers after another run with this result."""
        if no_result_reason:
            return self._replace(unread_runs=self.unread_runs + 1)
        code = finding.code if finding else ""
        return EqualRuns(code, self.code_runs + 1 if code == self.code else 1)
