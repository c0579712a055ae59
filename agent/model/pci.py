"""What was read of PCI devices: GPUs, and those that drivers declare."""

from typing import Final, NamedTuple

from agent.model.reading import Reading

GIVEN_AWAY: Final = "vfio-pci"
"""The driver of functions that belong to a virtual machine; NVML does not count such GPUs."""


class PciSample(NamedTuple):
    """One function on the bus. Source: ``/sys/bus/pci/devices/<address>``."""

    address: str
    """``0000:3b:00.0``."""
    vendor: int
    """PCI id; so ``device``; -1 if it cannot be read."""
    device: int
    driver: str
    """The driver that is bound; empty if none is."""
    model: str
    """What the hardware database calls it; empty if there is none."""
    width: Reading
    """Lanes of its link now, and at most."""
    width_max: Reading
    aer_nonfatal: Reading
    """Errors since boot; ``aer_dev_*``'s totals. Absent without AER."""
    aer_fatal: Reading
    aer_correctable: Reading
    port: str = ""
    """The bridge above it, by whose address the kernel tells of its link; empty on a root bus."""
