"""Devices of a driver as Python objects: a name and the hardware that the device stands for.

The fields are the keys of a file in devices.d, and the same code parses them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from agent.errors import ConfigError
from agent.model.declared import Declared
from agent.sources.declared_file import parse_device


@dataclass(frozen=True, slots=True)
class Cpus:
    """CPUs that a device consists of."""

    cpus: str
    """CPUs in the kernel's list format, ``0-3,8``."""
    numa: int | None = None
    """NUMA node that all CPUs must belong to; None: any."""
    exclusive: bool = False
    """Whether only the claim's containers run on these CPUs; they must not be throttled."""
    isolated: bool = False
    """Whether the CPUs must be in the kernel's isolated set."""


@dataclass(frozen=True, slots=True)
class Hugepages:
    """Hugepages of one size from one NUMA node that a device consists of."""

    size: str
    """Page size as a Kubernetes quantity, ``2Mi``."""
    pages: int
    numa: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one NUMA node that a device consists of."""

    size: str = ""
    """Size as a Kubernetes quantity, ``64Gi``; empty: unspecified."""
    numa: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG instance, identified by its PCI address, its UUID or both."""

    pci: str = ""
    """PCI address, ``0000:3b:00.0``."""
    uuid: str = ""
    """UUID, ``GPU-...`` for a GPU, ``MIG-...`` for a MIG instance."""
    gi: int | None = None
    """MIG GPU instance ID; given together with the compute instance ID ``ci``."""
    ci: int | None = None


@dataclass(frozen=True, slots=True)
class Pci:
    """A PCI function that is not a GPU, such as a network adapter."""

    address: str
    driver: str = ""
    """Kernel driver that must be bound to the PCI function; empty: any driver or none."""


DevicePart = Cpus | Hugepages | Memory | Gpu | Pci
_KINDS: Final[Mapping[type, str]] = {
    Cpus: "cpu",
    Hugepages: "hugepages",
    Memory: "memory",
    Gpu: "gpu",
    Pci: "pci",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the driver. Validated when it is created; missing hardware shows in its health.

    Raises:
        ConfigError: A value is invalid; names the device, the key, the value and its limit.
    """

    name: str
    """Name in the driver's ResourceSlice: a DNS label."""
    part: DevicePart | None = None
    """Hardware of the device; None: only the driver's own checks determine its health."""
    pool: str = ""
    """Pool in the ResourceSlice; empty: the node's name."""
    lease_s: int = 0
    """Time that a verdict is valid for the kubelet [s]; 0: the configured lease."""

    def __post_init__(self) -> None:
        self.declare("any", "any")

    def declare(self, driver: str, node: str) -> Declared:
        """Return the device in the health engine's format; ``node`` (Kubernetes node) is the default pool."""
        row: dict[str, object] = {"name": self.name}
        if self.lease_s:
            row["lease"] = f"{self.lease_s}s"
        if self.part is not None:
            if type(self.part) not in _KINDS:
                kinds = ", ".join(kind.__name__ for kind in _KINDS)
                raise ConfigError(f"device {self.name!r}: part: {self.part!r} is not one of {kinds}")
            row |= _row_of(self.part)
        return parse_device(row, driver, self.pool or node)


def _row_of(part: DevicePart) -> Mapping[str, object]:
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    given = {key: value for key, value in values.items() if value not in (None, "")}
    return {"kind": _KINDS[type(part)]} | given
