"""PCI functions of the machine: GPUs, and PCI functions that DRA drivers declare as devices."""

from typing import Final, NamedTuple

from agent.model.reading import Reading

NVIDIA_DRIVER: Final = "nvidia"
"""Kernel driver through which NVML reaches a GPU."""
PASSTHROUGH_DRIVER: Final = "vfio-pci"
"""Kernel driver of PCI functions passed through to a virtual machine; NVML does not list such GPUs."""


class PciSample(NamedTuple):
    """State of one PCI function. Source: ``/sys/bus/pci/devices/<address>``."""

    address: str
    """PCI address, ``0000:3b:00.0``."""
    vendor: int
    """PCI vendor id of the function; -1 if it cannot be read."""
    device: int
    """PCI device id of the function; -1 if it cannot be read."""
    driver: str
    """Kernel driver that is bound to the PCI function; empty: none."""
    model: str
    """Model name of the device from the hardware database; empty: unknown."""
    width: Reading
    """Current number of lanes of the PCIe link."""
    width_max: Reading
    """Largest number of PCIe lanes that the PCI function supports."""
    aer_nonfatal: Reading
    """Non-fatal errors since boot, the total of ``aer_dev_nonfatal``. Absent without AER."""
    aer_fatal: Reading
    aer_correctable: Reading
    upstream_bridge: str = ""
    """PCI address of the upstream bridge, under which the kernel logs link events; empty: on a root bus."""
