"""What the decision core is told once: limits, expectations, names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.model.cpuset import CpuSet


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of the decision core."""

    node: str
    """Node name; also the pool of its devices."""
    lease_s: int = 30
    """How long the kubelet may believe a verdict [s]."""
    throttle_events: int = 10
    throttle_window_s: int = 60
    expect_cpus: CpuSet | None = None
    """CPUs that must be online; None: those that were at start."""
    expect_pools: Mapping[str, int] = field(default_factory=dict)
    """Device name to pages; a pool not named here is held to its size at start."""
