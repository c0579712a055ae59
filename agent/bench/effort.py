"""How long to measure."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Effort:
    """Numbers of rounds and seconds; ``--quick`` is the smaller of two."""

    warm_rounds: int
    warm_limit_s: float
    """Of one workload, whatever the rounds; slow contenders then have fewer of them."""
    cold_rounds: int
    """Each costs a pause per contender."""
    cold_baselines: bool
    """Time the Python baselines after pauses too."""
    groups: tuple[int, ...]
    """Cgroups that are polled; the largest number is that of the curves."""
    gpus: tuple[int, ...]
    """GPUs of the fake NVML that are polled."""
    betterproto_devices: int
    """The longest list that it encodes: the longest of all takes it 150 ms."""
    causes: int
    """Changes made to time each kind of detection..."""
    events: int
    """...but those of cgroups: of 100 there is a p99."""
    hotplugs: int
    """The same of CPUs: each stops the machine for a moment. 0: that, and the kernel log, is left out."""
    detect_periods_ms: tuple[int, ...]
    publications: int
    """To each number of subscribers."""
    starts: int
    """Of each process whose start is timed."""
    imports: bool
    """Look at each module that a start imports; that takes twice as long as the start."""
    idle_s: float
    settle_s: float
    """From the first message to the begin of the idle measurement."""
    strace_s: float
    """For how long system calls are counted after it; 0: not at all."""
    sizes: tuple[int, ...]
    """Numbers of devices at which growth is measured."""
    pods: int
    """Of the node whose consumers are resolved; 0: none are, and nothing is audited."""
    audited: int
    """Pods of the node that is audited."""


FULL: Final = Effort(
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
    settle_s=130.0,  # what is new is read often, for two minutes
    strace_s=5.0,
    sizes=(1, 8, 64, 128, 256, 512, 1000),
    pods=5000,
    audited=250,
)
QUICK: Final = Effort(
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
"""Between two passes at 10 Hz."""
