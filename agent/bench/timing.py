"""Interleaved timing, and the statistics of it. Knows nothing of what is timed.

Contenders take turns in small blocks, in an order that rotates, so that a busy neighbour or a clock that
changes its frequency meets all of them alike. A ratio is the median of the ratios within each round: paired,
it holds still where absolute times do not.
"""

import statistics
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

SAMPLE_NS: Final = 20_000  # a sample is at least this long: reading the clock twice costs 0.1 us
BLOCK_SAMPLES: Final = 5
BLOCK_NS: Final = 5_000_000  # a slower call has blocks of a single sample
ROUNDS_MIN: Final = 3
REFERENCE_LOOPS: Final = 4
_REFERENCE: Final = bytes(range(256)) * 64


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the work."""

    key: str
    """Stable, for budgets and JSON: ``core``."""
    label: str
    """For people; says what it is and what it leaves out."""
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """What was measured of one contender [ns per call]."""

    blocks: tuple[tuple[float, ...], ...]
    """By round; a sample is the mean of ``loops`` calls."""
    loops: int
    memory: int | None = None
    """Bytes that Python's allocator had to find at once for one call; C's own are not seen."""

    @property
    def samples(self) -> tuple[float, ...]:
        """All samples, in the order they were taken."""
        return tuple(sample for block in self.blocks for sample in block)

    def medians(self) -> list[float]:
        """The median of each round's block."""
        return [statistics.median(block) for block in self.blocks]


@dataclass(frozen=True, slots=True)
class Race:
    """All contenders of one workload."""

    timed: dict[str, Timed]
    reference: tuple[float, ...]
    """Samples of a fixed computation, a block in each round [ns]: what they vary by is the machine."""


class Interval(NamedTuple):
    """A median and its 95 % confidence interval."""

    low: float
    median: float
    high: float


def race(contenders: Sequence[Contender], *, rounds: int, limit_s: float, pause_s: float = 0.0) -> Race:
    """Let the contenders take turns.

    Args:
        contenders: At least one; each call does the whole work once.
        rounds: Blocks of each contender.
        limit_s: No new round after this time, but there are three at least.
        pause_s: 0: warm, calls back to back, and the first of each block does not count. Else each sample is
            one single call after a sleep of this length, as an agent between two ticks has it.
    """
    pace = {one.key: _Pace(1, 1) if pause_s else _pace(one.call) for one in contenders}
    blocks: dict[str, list[tuple[float, ...]]] = {one.key: [] for one in contenders}
    reference: list[float] = []
    made = 0
    deadline = time.monotonic() + limit_s
    while made < ROUNDS_MIN or (made < rounds and time.monotonic() < deadline):
        for place in range(len(contenders)):
            one = contenders[(place + made) % len(contenders)]
            loops, samples = pace[one.key]
            if pause_s:
                time.sleep(pause_s)
            elif samples > 1:
                one.call()
            blocks[one.key].append(tuple(_sample(one.call, loops) for _ in range(samples)))
        reference += (_sample(_reference, REFERENCE_LOOPS) for _ in range(BLOCK_SAMPLES))
        made += 1
    timed = {
        one.key: Timed(tuple(blocks[one.key]), pace[one.key].loops, _memory(one.call)) for one in contenders
    }
    return Race(timed, tuple(reference))


class _Pace(NamedTuple):
    loops: int
    samples: int


def _pace(call: Callable[[], object]) -> _Pace:
    call()
    once = max(1.0, min(_sample(call, 1) for _ in range(2)))
    return _Pace(max(1, round(SAMPLE_NS / once)), max(1, min(BLOCK_SAMPLES, int(BLOCK_NS / once))))


def _sample(call: Callable[[], object], loops: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return (time.perf_counter_ns() - start) / loops


def _memory(call: Callable[[], object]) -> int:
    """Of one call more, after all timing: being traced makes it several times slower."""
    tracemalloc.start()
    try:
        call()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _reference() -> None:
    zlib.crc32(_REFERENCE)


def interval(values: Sequence[float]) -> Interval:
    """The median and its 95 % confidence interval by order statistics: no assumption on the distribution.

    With fewer than six values there is no such interval, and the extremes stand for it.
    """
    ordered = sorted(values)
    n = len(ordered)
    reach = 0.98 * n**0.5  # 1.96 standard deviations of a binomial with p = 1/2
    low, high = max(0, int(n / 2 - reach)), min(n - 1, int(n / 2 + reach))
    return Interval(ordered[low], statistics.median(ordered), ordered[high])


def paired_ratio(of: Timed, to: Timed) -> Interval:
    """How many times as long ``of`` takes, from the ratios within each round."""
    return interval([a / b for a, b in zip(of.medians(), to.medians(), strict=True)])


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of the values does not exceed; None if there are too few to tell."""
    if len(values) * (1 - share) < 1:
        return None
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def spread(values: Sequence[float]) -> float:
    """Half of the values are off their median by this share of it, or more, however wild they are."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values) / middle


def wild(values: Sequence[float]) -> float:
    """The share of values that are twice the median at least."""
    middle = statistics.median(values)
    return sum(value >= 2 * middle for value in values) / len(values)
