"""Samples of PCI functions: GPUs, and PCI functions that drivers declare as devices."""

from typing import Final, NamedTuple

from agent.model.reading import Reading

GIVEN_AWAY: Final = "vfio-pci"
"""Kernel driver of PCI functions passed through to a virtual machine; NVML does not list such GPUs."""


class PciSample(NamedTuple):
    """One PCI function. Source: ``/sys/bus/pci/devices/<address>``."""

    address: str
    """PCI address, ``0000:3b:00.0``."""
    vendor: int
    """PCI vendor id; -1 if it cannot be read."""
    device: int
    """PCI device id; -1 if it cannot be read."""
    driver: str
    """Bound kernel driver; empty: none."""
    model: str
    """Model name from the hardware database; empty: unknown."""
    width: Reading
    """Current number of lanes of the PCIe link."""
    width_max: Reading
    aer_nonfatal: Reading
    """Non-fatal errors since boot, the total of ``aer_dev_nonfatal``. Absent without AER."""
    aer_fatal: Reading
    aer_correctable: Reading
    port: str = ""
    """PCI address of the upstream bridge, under which the kernel logs link events; empty: on a root bus."""
