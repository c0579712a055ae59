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
    causes: int
    """Changes made to time each kind of detection."""
    detect_periods_ms: tuple[int, ...]
    idle_s: float
    settle_s: float
    """From the first message to the begin of the idle measurement."""


FULL: Final = Effort(60, 15.0, 60, True, 60, (10, 100), 60.0, 5.0)
QUICK: Final = Effort(20, 0.2, 3, False, 4, (10,), 5.0, 1.2)
PAUSE_S: Final = 0.1
"""Between two passes at 10 Hz."""
