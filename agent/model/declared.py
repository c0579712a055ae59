"""Devices as their drivers declare them: a driver's own name for a part of the machine."""

from typing import NamedTuple

from agent.model.cpuset import CpuSet


class DeclaredCpus(NamedTuple):
    """Some CPUs."""

    cpus: CpuSet
    numa: int | None
    """The NUMA node they are said to be on; None: not said."""
    exclusive: bool
    """Nobody but the claim's holder runs on them: its containers must not be throttled."""
    isolated: bool
    """They are said to be in the kernel's isolated set."""


class DeclaredHugepages(NamedTuple):
    """Some pages of one pool."""

    size_kib: int
    pages: int
    numa: int


class DeclaredMemory(NamedTuple):
    """Memory of one NUMA node."""

    size: int
    """Bytes; 0: not said."""
    numa: int


class DeclaredGpu(NamedTuple):
    """A GPU, or an instance of one."""

    pci: str
    """``0000:3b:00.0``; empty: not said. One of this and the next is said."""
    uuid: str
    """Of the GPU, ``GPU-...``, or of the instance, ``MIG-...``."""
    gi: int
    """GPU instance, else -1; so the compute instance."""
    ci: int


class DeclaredPci(NamedTuple):
    """Any other PCI function."""

    address: str
    driver: str
    """That must be bound to it; empty: any, or none."""


class DeclaredOther(NamedTuple):
    """What only its driver knows: judged by the driver's own checks, and by how its prepares end."""


What = DeclaredCpus | DeclaredHugepages | DeclaredMemory | DeclaredGpu | DeclaredPci | DeclaredOther


class Declared(NamedTuple):
    """One device of a driver."""

    driver: str
    pool: str
    """The node's name, unless the driver says another."""
    name: str
    what: What
    lease_s: int
    """How long the kubelet may believe a verdict [s]; 0: as of all."""

    @property
    def subject(self) -> str:
        """What it is tracked by; no name of a device of the host's own has a slash."""
        return f"{self.driver}/{self.pool}/{self.name}"


class DeclaredFile(NamedTuple):
    """What one driver's file says, or why it cannot be believed."""

    driver: str
    devices: tuple[Declared, ...]
    """Of a file that is wrong: those that it declared when it was last right. None, and nothing is wrong: the
    driver has none, and nothing of the host's own is told in its name."""
    error: str = ""
    """What is wrong with the file, its path first; empty if nothing is."""


Declarations = tuple[DeclaredFile, ...]
"""By driver, each once."""
