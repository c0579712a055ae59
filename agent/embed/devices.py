"""Devices that a Python driver declares: a name and the hardware that the device consists of.

The fields are the keys of a declaration file, and the same code validates them.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Final

from agent.errors import ConfigError
from agent.model.declared_devices import DriverDevice
from agent.sources.declaration_file import parse_declared_device


@dataclass(frozen=True, slots=True)
class Cpus:
    """CPUs that a declared device consists of."""

    cpus: str
    """CPUs of the device in the kernel's list format, ``0-3,8``."""
    _: KW_ONLY
    numa: int | None = None
    """NUMA node that all CPUs of the device must belong to; None: any."""
    exclusive: bool = False
    """Whether only the claim's containers run on these CPUs; they must not be throttled."""
    isolated: bool = False
    """Whether the CPUs of the device must be in the kernel's isolated set."""


@dataclass(frozen=True, slots=True)
class Hugepages:
    """Hugepages of one size and one NUMA node that a declared device consists of."""

    size: str
    """Page size as a Kubernetes quantity, ``2Mi``."""
    _: KW_ONLY
    pages: int
    """Number of hugepages that the device consists of."""
    numa: int = 0
    """NUMA node that the hugepages belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one NUMA node that a declared device consists of."""

    size: str = ""
    """Size of the memory as a Kubernetes quantity, ``64Gi``; empty: unspecified."""
    numa: int = 0
    """NUMA node that the memory belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """GPU or MIG instance of a declared device, identified by PCI address, UUID or both."""

    pci: str = ""
    """PCI address of the GPU, ``0000:3b:00.0``."""
    uuid: str = ""
    """UUID of the GPU (``GPU-...``) or of the MIG instance (``MIG-...``)."""
    gi: int | None = None
    """ID of the MIG GPU instance; set only together with ``ci``."""
    ci: int | None = None
    """ID of the MIG compute instance; set only together with ``gi``."""


@dataclass(frozen=True, slots=True)
class Pci:
    """PCI function of a declared device that is neither a GPU nor an RDMA network adapter."""

    address: str
    """Address of the PCI function, ``0000:3b:00.0``."""
    _: KW_ONLY
    driver: str = ""
    """Kernel driver that must be bound to the PCI function; empty: any driver or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """RDMA network adapter of a declared device, identified by PCI address or RDMA name."""

    pci: str = ""
    """PCI address of the network adapter, ``0000:41:00.0``; set only without ``rdma``."""
    rdma: str = ""
    """RDMA name of the network adapter, ``mlx5_0``; set only without ``pci``."""


DevicePart = Cpus | Hugepages | Memory | Gpu | Pci | Nic
_KINDS: Final[Mapping[type, str]] = {
    Cpus: "cpu",
    Hugepages: "hugepages",
    Memory: "memory",
    Gpu: "gpu",
    Pci: "pci",
    Nic: "nic",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the driver. Validated when it is created; missing hardware shows in its health.

    Raises:
        ConfigError: A value is invalid.
    """

    name: str
    """Name in the driver's ResourceSlice: a DNS label."""
    part: DevicePart | None = None
    """Hardware of the device; None: only the driver's health checks determine its health."""
    _: KW_ONLY
    pool: str = ""
    """Pool in the ResourceSlice; empty: the name of the Kubernetes node."""
    lease_s: int = 0
    """Time that the kubelet considers a reported health valid [s]; 0: the configured lease."""

    def __post_init__(self) -> None:
        self.declare("any", "any")

    def declare(self, driver: str, node: str) -> DriverDevice:
        """Convert to the health engine's format; the name of the Kubernetes `node` is the default pool."""
        row: dict[str, object] = {"name": self.name}
        if self.lease_s:
            row["lease"] = f"{self.lease_s}s"
        if self.part is not None:
            if type(self.part) not in _KINDS:
                kinds = ", ".join(kind.__name__ for kind in _KINDS)
                raise ConfigError(f"device {self.name!r}: part: {self.part!r} is not one of {kinds}")
            row["kind"] = _KINDS[type(self.part)]
            values = {field.name: getattr(self.part, field.name) for field in fields(self.part)}
            row |= {key: value for key, value in values.items() if value not in (None, "")}
        return parse_declared_device(row, driver, self.pool or node)
