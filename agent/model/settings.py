"""What the decision core is told once: limits, expectations, names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.model.cpuset import CpuSet
from agent.model.health import XidOverride


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """How GPUs are judged."""

    deadline_s: float = 5
    """A call of NVML that takes longer is not answered: the GPU is Unknown."""
    dead_s: float = 60
    """One that has not been answered for so long makes the GPU Unhealthy."""
    probation_s: float = 60
    """A GPU that has recovered is held Unhealthy for so long without a new fault."""
    correctable_errors: int = 1000
    """Correctable memory errors within ``correctable_window_s`` that make a GPU degraded."""
    correctable_window_s: int = 3600
    expect: int | None = None
    """How many GPUs there must be; None: as many as there were at start."""
    xids: tuple[tuple[int, XidOverride], ...] = ()
    """XIDs that the operator judges otherwise."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """How memory, CPUs, PCI devices and cgroups are judged."""

    correctable_errors: int = 24
    """Correctable errors of a memory module, or of a CPU, within the window that are too many."""
    correctable_window_s: int = 86_400
    throttled_percent: int = 25
    """A container that was throttled in more of its CPU periods than this is slow [%]."""
    throttled_window_s: int = 60
    pressure_percent: int = 10
    """The node stalls when all its tasks waited for so much of the time [%]."""
    pressure_window_s: int = 60


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of the decision core."""

    node: str
    """Node name; also the pool of its devices."""
    drivers: tuple[str, ...] = ()
    """Those that are told of the host's own devices until they declare some: by their name and pool they
    mean these."""
    lease_s: int = 30
    """How long the kubelet may believe a verdict [s]."""
    throttle_events: int = 10
    throttle_window_s: int = 60
    expect_cpus: CpuSet | None = None
    """CPUs that must be online; None: those that were at start."""
    expect_pools: Mapping[str, int] = field(default_factory=dict)
    """Device name to pages; a pool not named here is held to its size at start."""
    host: HostLimits = field(default_factory=HostLimits)
    gpu: GpuLimits = field(default_factory=GpuLimits)
