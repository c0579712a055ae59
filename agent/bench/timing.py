"""Interleaved timing of contenders, and its statistics.

Contenders run in small blocks, in a rotating order, so that a busy neighbour or a change of the clock
frequency affects all of them alike. A ratio is the median of the ratios within each round; pairing keeps it
stable where absolute times vary.
"""

import statistics
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

SAMPLE_NS: Final = 20_000  # minimum length of a sample; reading the clock twice takes 0.1 us
BLOCK_SAMPLES: Final = 5
BLOCK_NS: Final = 5_000_000  # slower calls have blocks of one sample
ROUNDS_MIN: Final = 3
REFERENCE_LOOPS: Final = 4
_REFERENCE: Final = bytes(range(256)) * 64


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation of a workload."""

    key: str
    """Stable key for budgets and JSON: ``core``."""
    label: str
    """Printed name and description of the contender."""
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class ContenderSamples:
    """Samples of one contender [ns per call]."""

    blocks: tuple[tuple[float, ...], ...]
    """Samples by round; a sample is the mean of ``loops`` calls."""
    loops: int
    memory: int | None = None
    """Peak of the bytes that Python's allocator held for one call; C allocations are excluded."""

    @property
    def samples(self) -> tuple[float, ...]:
        """All samples in the order of measurement."""
        return tuple(sample for block in self.blocks for sample in block)

    def medians(self) -> list[float]:
        """Median of each round's block."""
        return [statistics.median(block) for block in self.blocks]


@dataclass(frozen=True, slots=True)
class TimingRace:
    """Samples of all contenders of one workload."""

    timed: dict[str, ContenderSamples]
    reference: tuple[float, ...]
    """Samples of a fixed computation, a block in each round [ns]; their variation is that of the machine."""


class Interval(NamedTuple):
    """A median and its 95 % confidence interval."""

    low: float
    median: float
    high: float


def race(contenders: Sequence[Contender], *, rounds: int, limit_s: float, pause_s: float = 0.0) -> TimingRace:
    """Time the contenders in turns.

    Args:
        contenders: At least one; each call runs the workload once.
        rounds: Blocks of each contender.
        limit_s: No new round begins after this time, but at least three rounds are run.
        pause_s: 0 for warm calls back to back, where the first call of each block is not timed. Otherwise
        each
            sample is a single call after a sleep of this length, as in an agent between two ticks.
    """
    pace = {contender.key: _Pace(1, 1) if pause_s else _pace(contender.call) for contender in contenders}
    blocks: dict[str, list[tuple[float, ...]]] = {contender.key: [] for contender in contenders}
    reference: list[float] = []
    rounds_done = 0
    deadline = time.monotonic() + limit_s
    while rounds_done < ROUNDS_MIN or (rounds_done < rounds and time.monotonic() < deadline):
        for offset in range(len(contenders)):
            contender = contenders[(offset + rounds_done) % len(contenders)]
            loops, samples = pace[contender.key]
            if pause_s:
                time.sleep(pause_s)
            elif samples > 1:
                contender.call()
            blocks[contender.key].append(tuple(_sample(contender.call, loops) for _ in range(samples)))
        reference += (_sample(_reference, REFERENCE_LOOPS) for _ in range(BLOCK_SAMPLES))
        rounds_done += 1
    timed = {
        contender.key: ContenderSamples(
            tuple(blocks[contender.key]), pace[contender.key].loops, _memory(contender.call)
        )
        for contender in contenders
    }
    return TimingRace(timed, tuple(reference))


class _Pace(NamedTuple):
    loops: int
    samples: int


def _pace(call: Callable[[], object]) -> _Pace:
    call()
    duration_ns = max(1.0, min(_sample(call, 1) for _ in range(2)))
    return _Pace(
        max(1, round(SAMPLE_NS / duration_ns)), max(1, min(BLOCK_SAMPLES, int(BLOCK_NS / duration_ns)))
    )


def _sample(call: Callable[[], object], loops: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return (time.perf_counter_ns() - start) / loops


def _memory(call: Callable[[], object]) -> int:
    """Measure the memory peak of one call, after all timing: tracing makes the call several times slower."""
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
    """Return the median and its 95 % confidence interval by order statistics, for any distribution.

    With fewer than six values the interval is their range.
    """
    ordered = sorted(values)
    n = len(ordered)
    half_width = 0.98 * n**0.5  # 1.96 standard deviations of a binomial with p = 1/2
    low, high = max(0, int(n / 2 - half_width)), min(n - 1, int(n / 2 + half_width))
    return Interval(ordered[low], statistics.median(ordered), ordered[high])


def paired_ratio(timed: ContenderSamples, reference: ContenderSamples) -> Interval:
    """Return the ratio of two contenders from the ratios within each round."""
    return interval([a / b for a, b in zip(timed.medians(), reference.medians(), strict=True)])


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value that ``share`` of the values do not exceed; None with too few values."""
    if len(values) * (1 - share) < 1:
        return None
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def relative_deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation relative to the median."""
    median = statistics.median(values)
    return statistics.median(abs(value - median) for value in values) / median


def outlier_share(values: Sequence[float]) -> float:
    """Return the share of values that are at least twice the median."""
    median = statistics.median(values)
    return sum(value >= 2 * median for value in values) / len(values)
