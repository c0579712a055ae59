"""What the rules are shown of a GPU.

Like every view it holds what its subject may be judged by, and nothing else; how it is made stands in
agent.health.gpu.views.
"""

from collections.abc import Mapping
from typing import NamedTuple

from agent.health.rules import Growth
from agent.model.gpu import GpuField, GpuHost, GpuSample, GpuSet
from agent.model.pci import PciSample
from agent.model.settings import GpuLimits


class GpuStart(NamedTuple):
    """What a GPU had when it was first seen, and what has come up since."""

    links_up: int = 0
    """Bit set of NVLinks that have been active at some time: one that never was is no fault."""
    ecc: bool = False
    """ECC was on."""
    fabric_manager: bool = False
    """nv-fabricmanager has been seen running."""


class GpuView(NamedTuple):
    """One GPU."""

    gpu: GpuSample | None
    """None: it was known, or is expected, and has not been seen since the agent started."""
    name: str
    """Of the device, ``gpu-3``."""
    start: GpuStart
    gpus: GpuSet
    host: GpuHost
    growth: Mapping[GpuField, Growth]
    """Of the fields that :func:`agent.health.gpu.catalog.windows` names, over the window it says."""
    siblings_p50_ns: tuple[int, ...]
    """Median reading time of every other GPU that answers [ns]."""
    limits: GpuLimits
    now_ns: int
    log_read: bool = True
    """Whether the kernel log can be read."""
    pci: PciSample | None = None
    """Its function on the bus, if NVML ever counted it. None: it is not there, or nobody has looked."""
