"""Readings of an idle H100 without a fault, from which simulated GPUs begin."""

from collections.abc import Mapping
from typing import Final

from agent.model.gpu import GpuField
from agent.model.reading import Reading

LINKS: Final = 18
"""Number of NVLinks of an H100."""
ALL_UP: Final = (1 << LINKS) - 1
"""Reading of the links that are up: a bit per link."""
IDLE_H100: Final[Mapping[GpuField, Reading]] = {
    GpuField.MEM_TEMP: 45,
    GpuField.TEMP: 33,
    GpuField.MARGIN: 54,
    GpuField.CLOCK_REASONS: 1,  # idle
    GpuField.LINKS_UP: ALL_UP,
    GpuField.ECC_MODE: 1,
    GpuField.ECC_MODE_PENDING: 1,
    GpuField.FABRIC_STATE: 3,
    GpuField.FABRIC_HEALTH: 0x1AA,
    GpuField.FABRIC_SUMMARY: 1,
    GpuField.PCIE_WIDTH: 16,
    GpuField.PCIE_WIDTH_MAX: 16,
    GpuField.PCIE_GEN: 5,
    GpuField.PCIE_GEN_MAX: 5,
    GpuField.PERSISTENCE: 1,
    GpuField.TEMP_SHUTDOWN: 95,
    GpuField.TEMP_SLOWDOWN: 89,
    GpuField.TEMP_GPU_MAX: 87,
    GpuField.TEMP_MEM_MAX: 95,
    GpuField.ARCHITECTURE: 9,
}
"""Readings that are not zero. A GPU of this type has no retired pages."""
