"""Numbers of rounds, sizes and durations of a full benchmark run and of a quick one (``--quick``)."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RunSize:
    """Amount of work of one run of the benchmark suites."""

    warm_rounds: int
    """Number of timed rounds with calls back to back."""
    warm_limit_s: float
    """Time limit of one workload [s]; slow contenders complete fewer rounds."""
    cold_rounds: int
    """Number of rounds with a pause before each call, per contender."""
    cold_baselines: bool
    """Whether the readers in Python are also timed after pauses."""
    groups: tuple[int, ...]
    """Numbers of cgroups at which polling is timed."""
    gpus: tuple[int, ...]
    """Numbers of GPUs of the fake NVML at which polling is timed."""
    betterproto_devices: int
    """Number of devices in the longest list that betterproto encodes; 1,000 devices take 150 ms."""
    causes: int
    """Number of changes made to time each kind of detection, except cgroup events."""
    events: int
    """Number of cgroup events caused to time their detection; a p99 needs 100."""
    hotplugs: int
    """Number of CPU hotplug events; each briefly stops the machine. 0 skips hotplug and kernel log."""
    detect_periods_ms: tuple[int, ...]
    publications: int
    """Number of published reports for each number of subscribers."""
    starts: int
    """Number of times that each program is started and timed."""
    imports: bool
    """Whether the imports of a start are timed by module; that takes twice as long as the start."""
    idle_s: float
    """Duration of the idle measurement [s]."""
    settle_s: float
    """Time from the first message to the start of the idle measurement [s]."""
    strace_s: float
    """Duration of the system call count after the idle measurement [s]; 0 skips the count."""
    sizes: tuple[int, ...]
    """Numbers of devices at which the growth of costs is measured."""
    pods: int
    """Number of pods on the Kubernetes node whose consumers are resolved; 0 skips consumers and audits."""
    audited: int
    """Number of pods on the Kubernetes node that is audited."""


FULL: Final = RunSize(
    warm_rounds=60,
    warm_limit_s=8.0,
    cold_rounds=30,
    cold_baselines=True,
    groups=(10, 100, 500, 1000),
    gpus=(1, 8, 16),
    betterproto_devices=1000,
    causes=40,
    events=100,
    hotplugs=12,
    detect_periods_ms=(10, 100),
    publications=200,
    starts=10,
    imports=True,
    idle_s=60.0,
    settle_s=130.0,  # the sampler reads new cgroups more often for two minutes
    strace_s=5.0,
    sizes=(1, 8, 64, 128, 256, 512, 1000),
    pods=5000,
    audited=250,
)
QUICK: Final = RunSize(
    warm_rounds=20,
    warm_limit_s=0.1,
    cold_rounds=3,
    cold_baselines=False,
    groups=(10, 100),
    gpus=(8,),
    betterproto_devices=128,
    causes=2,
    events=2,
    hotplugs=0,
    detect_periods_ms=(10,),
    publications=10,
    starts=1,
    imports=False,
    idle_s=1.2,
    settle_s=0.4,
    strace_s=0.0,
    sizes=(8, 1000),
    pods=0,
    audited=0,
)
PAUSE_S: Final = 0.1
"""Pause between two passes of the C core at 10 Hz [s]."""
