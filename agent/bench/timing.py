"""Timing of contenders (implementations of the same work) in turns, and statistics of the samples.

Contenders run in small blocks, in an order that changes with each round, so that other load, a change of the
clock frequency, and what the contender before leaves in the CPU's caches affect all of them alike. A ratio is
the median of the ratios within each round; pairing keeps it stable where absolute times vary.
"""

import math
import statistics
import time
import tracemalloc
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

SAMPLE_NS: Final = 20_000  # minimum length of a sample; reading the clock twice takes 0.1 us
BLOCK_SAMPLES: Final = 5
BLOCK_NS: Final = 5_000_000  # slower calls have blocks of one sample
WARM_UPS: Final = 3  # a sweep over 3,000 files needs two until the next is as fast, after other contenders
WARM_UP_NS: Final = 10_000_000  # slower calls have one
ROUNDS_MIN: Final = 3
REFERENCE_LOOPS: Final = 4
_REFERENCE: Final = bytes(range(256)) * 64


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation of a workload, which is timed in turns with the others."""

    key: str
    """Stable key for budgets and JSON: ``core``."""
    label: str
    """Printed name and description of the contender."""
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class ContenderSamples:
    """Timing samples of one contender [ns per call]."""

    blocks: tuple[tuple[float, ...], ...]
    """Samples by round; a sample is the mean of ``loops`` calls."""
    loops: int
    memory: int | None = None
    """Peak of the bytes that Python's allocator held for one call; C allocations are excluded."""

    @property
    def samples(self) -> tuple[float, ...]:
        """All samples of the contender in the order of measurement."""
        return tuple(sample for block in self.blocks for sample in block)

    def medians(self) -> list[float]:
        """Median of the contender's samples in each round."""
        return [statistics.median(block) for block in self.blocks]


@dataclass(frozen=True, slots=True)
class InterleavedTimings:
    """Samples of all contenders of one workload, timed in turns."""

    labels: Mapping[str, str]
    """Labels of the contenders by key."""
    timed: dict[str, ContenderSamples]
    reference: tuple[float, ...]
    """Samples of a fixed computation, a block in each round [ns].

    Their variation shows how stable the machine is.
    """


class MedianInterval(NamedTuple):
    """A median and its 95 % confidence interval."""

    low: float
    median: float
    high: float


def time_contenders(
    contenders: Sequence[Contender], *, rounds: int, limit_s: float, pause_s: float = 0.0
) -> InterleavedTimings:
    """Time the contenders (implementations of one workload) in turns; return the samples of all.

    Args:
        contenders: At least one; each call runs the workload once.
        rounds: Number of rounds, each with a block of calls of every contender.
        limit_s: No new round begins after this time, but at least three rounds are run.
        pause_s: 0 for calls back to back, where the first calls of each block are not timed. Otherwise each
            sample is a single call after a sleep of this length, like the agent's sleep between two readings.
    """
    pace = {
        contender.key: _BlockSize(1, 1, 0) if pause_s else _choose_block_size(contender.call)
        for contender in contenders
    }
    blocks: dict[str, list[tuple[float, ...]]] = {contender.key: [] for contender in contenders}
    reference: list[float] = []
    rounds_done = 0
    deadline = time.monotonic() + limit_s
    while rounds_done < ROUNDS_MIN or (rounds_done < rounds and time.monotonic() < deadline):
        for index in round_order(len(contenders), rounds_done):
            contender = contenders[index]
            loops, samples, warm_ups = pace[contender.key]
            if pause_s:
                time.sleep(pause_s)
            for _ in range(warm_ups):
                contender.call()
            blocks[contender.key].append(tuple(_time_calls(contender.call, loops) for _ in range(samples)))
        reference += (_time_calls(_reference_computation, REFERENCE_LOOPS) for _ in range(BLOCK_SAMPLES))
        rounds_done += 1
    timed = {
        contender.key: ContenderSamples(
            tuple(blocks[contender.key]), pace[contender.key].loops, _measure_peak_memory(contender.call)
        )
        for contender in contenders
    }
    labels = {contender.key: contender.label for contender in contenders}
    return InterleavedTimings(labels, timed, tuple(reference))


def round_order(count: int, round_index: int) -> list[int]:
    """Return the order of ``count`` contenders in a round, as their indices.

    In 2 * ``count`` rounds, each contender runs directly after each other one equally often (a Williams
    design). A contender that always ran after another that reads the same files would find them in the cache.
    """
    zigzag = [(step + 1) // 2 if step % 2 else -(step // 2) for step in range(count)]
    order = [(offset + round_index) % count for offset in zigzag]
    return order[::-1] if round_index // count % 2 else order


class _BlockSize(NamedTuple):
    loops: int
    samples: int
    warm_ups: int


def _choose_block_size(call: Callable[[], object]) -> _BlockSize:
    call()
    duration_ns = max(1.0, min(_time_calls(call, 1) for _ in range(2)))
    samples = max(1, min(BLOCK_SAMPLES, int(BLOCK_NS / duration_ns)))
    return _BlockSize(
        max(1, round(SAMPLE_NS / duration_ns)), samples, max(1, min(WARM_UPS, int(WARM_UP_NS / duration_ns)))
    )


def _time_calls(call: Callable[[], object], loops: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return (time.perf_counter_ns() - start) / loops


def _measure_peak_memory(call: Callable[[], object]) -> int:
    """Return the peak of Python's memory in one call [bytes].
    It runs after all timing, because tracing makes calls several times slower."""
    tracemalloc.start()
    try:
        call()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _reference_computation() -> None:
    zlib.crc32(_REFERENCE)


def median_interval(values: Sequence[float]) -> MedianInterval:
    """Return the median and its 95 % confidence interval by order statistics, for any distribution.

    With fewer than six values the interval is their range.
    """
    ordered = sorted(values)
    n = len(ordered)
    half_width = 0.98 * n**0.5  # 1.96 standard deviations of a binomial with p = 1/2
    low, high = max(0, int(n / 2 - half_width)), min(n - 1, int(n / 2 + half_width))
    return MedianInterval(ordered[low], statistics.median(ordered), ordered[high])


def paired_ratio(timed: ContenderSamples, reference: ContenderSamples) -> MedianInterval:
    """Return the median ratio ``timed`` / ``reference`` of two implementations, paired by round."""
    return median_interval([a / b for a, b in zip(timed.medians(), reference.medians(), strict=True)])


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that ``share`` (0 to 1) of ``values`` do not exceed; None: too few values."""
    if len(values) * (1 - share) < 1:
        return None
    return sorted(values)[math.ceil(len(values) * share) - 1]


def relative_deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation relative to the median."""
    median = statistics.median(values)
    return statistics.median(abs(value - median) for value in values) / median


def outlier_share(values: Sequence[float]) -> float:
    """Return the share of values that are at least twice the median."""
    median = statistics.median(values)
    return sum(value >= 2 * median for value in values) / len(values)
