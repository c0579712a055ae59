"""A driver's devices as its author writes them: a name, and which part of the machine it is.

The format is that of a file in devices.d, read by the very same table; only the spelling is Python's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from agent.errors import ConfigError
from agent.model.declared import Declared
from agent.sources.declared_file import parse_device


@dataclass(frozen=True, slots=True)
class Cpus:
    """Some CPUs."""

    cpus: str
    """In the kernel's list format, ``0-3,8``."""
    numa: int | None = None
    """The NUMA node that they must be on."""
    exclusive: bool = False
    """Nobody but the claim's holder runs on them: its containers must not be throttled."""
    isolated: bool = False
    """They must be in the kernel's isolated set."""


@dataclass(frozen=True, slots=True)
class Hugepages:
    """Some pages of one NUMA node's pool."""

    size: str
    """Of a page, as Kubernetes writes it: ``2Mi``."""
    pages: int
    numa: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one NUMA node."""

    size: str = ""
    """As Kubernetes writes it, ``64Gi``; empty: not said."""
    numa: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or an instance of one; named by one of address and UUID at least."""

    pci: str = ""
    """``0000:3b:00.0``."""
    uuid: str = ""
    """``GPU-...`` of a GPU, ``MIG-...`` of an instance."""
    gi: int | None = None
    """GPU instance; and the compute instance, both or none."""
    ci: int | None = None


@dataclass(frozen=True, slots=True)
class Pci:
    """Any other PCI function."""

    address: str
    driver: str = ""
    """The kernel's driver that must be bound to it; empty: any, or none."""


Part = Cpus | Hugepages | Memory | Gpu | Pci
_KINDS: Final[Mapping[type, str]] = {
    Cpus: "cpu",
    Hugepages: "hugepages",
    Memory: "memory",
    Gpu: "gpu",
    Pci: "pci",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the driver. Checked when it is made; whether there is such a part, its health says.

    Raises:
        ConfigError: names the device, the key, and the value with its limit.
    """

    name: str
    """As in the driver's ResourceSlice: a DNS label."""
    part: Part | None = None
    """None: what only the driver knows; its health is what the driver's own checks find."""
    pool: str = ""
    """As in the ResourceSlice; empty: the node's name."""
    lease_s: int = 0
    """How long the kubelet may believe a verdict [s]; 0: as of all."""

    def __post_init__(self) -> None:
        self.declare("any", "any")

    def declare(self, driver: str, node: str) -> Declared:
        """The device as the decision core knows it; ``node`` is its pool if it names none."""
        row: dict[str, object] = {"name": self.name}
        if self.lease_s:
            row["lease"] = f"{self.lease_s}s"
        if self.part is not None:
            if type(self.part) not in _KINDS:
                kinds = ", ".join(kind.__name__ for kind in _KINDS)
                raise ConfigError(f"device {self.name!r}: part: {self.part!r} is none of {kinds}")
            row |= _row_of(self.part)
        return parse_device(row, driver, self.pool or node)


def _row_of(part: Part) -> Mapping[str, object]:
    said = {field.name: getattr(part, field.name) for field in fields(part)}
    return {"kind": _KINDS[type(part)]} | {key: one for key, one in said.items() if one not in (None, "")}
