"""Settings of the decision core: limits, expectations, names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.model.cpuset import CpuSet
from agent.model.health import XidOverride


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits of the GPU rules."""

    deadline_s: float = 5
    """Deadline of an NVML call [s]; after it the GPU is Unknown."""
    dead_s: float = 60
    """Age of an unanswered NVML call that makes the GPU Unhealthy [s]."""
    probation_s: float = 60
    """Time for which a recovered GPU stays Unhealthy without a new fault [s]."""
    correctable_errors: int = 1000
    """Correctable memory errors within ``correctable_window_s`` that make a GPU degraded."""
    correctable_window_s: int = 3600
    expect: int | None = None
    """Expected number of GPUs; None: the number at start."""
    xids: tuple[tuple[int, XidOverride], ...] = ()
    """Severities that the operator sets for single XIDs."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Limits of the rules for memory, CPUs, PCI devices and cgroups."""

    correctable_errors: int = 24
    """Correctable errors of a memory module or CPU within the window that make it degraded."""
    correctable_window_s: int = 86_400
    throttled_percent: int = 25
    """Share of throttled CPU periods above which a container is reported [%]."""
    throttled_window_s: int = 60
    pressure_percent: int = 10
    """Share of time with all tasks waiting above which the Kubernetes node is reported [%]."""
    pressure_window_s: int = 60


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of the decision core."""

    node: str
    """Node name; also the pool of its devices."""
    drivers: tuple[str, ...] = ()
    """Drivers whose sockets report the host devices until the driver declares devices of its own."""
    lease_s: int = 30
    """Default lease: how long the kubelet may use a verdict [s]."""
    throttle_events: int = 10
    throttle_window_s: int = 60
    expect_cpus: CpuSet | None = None
    """CPUs that must be online; None: those online at start."""
    expect_pools: Mapping[str, int] = field(default_factory=dict)
    """Expected pages by device name; other pools are compared with their size at start."""
    host: HostLimits = field(default_factory=HostLimits)
    gpu: GpuLimits = field(default_factory=GpuLimits)
