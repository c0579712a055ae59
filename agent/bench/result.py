"""Results of a benchmark suite: rows with units, tables of rows, and the formatting of figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from agent.bench.timing import (
    ContenderSamples,
    InterleavedTimings,
    MedianInterval,
    median_interval,
    paired_ratio,
    percentile,
)

Unit = Literal["s", "B", "1", "%"]
NS_PER_S: Final = 1e9
_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES: Final = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


class MeasurementError(Exception):
    """A measurement failed and its figures are invalid; the text states the cause."""


class ResultMismatch(MeasurementError):
    """Contenders of one workload returned different results; nothing is timed."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """Samples of one contender in one workload, with their statistics."""

    key: str
    """Stable key of suite, workload and contender: ``poll.pass.warm.core``."""
    label: str
    """Name of the contender and, after a colon, a description: ``psutil 7.2.2: CPU count and times``."""
    unit: Unit
    values: tuple[float, ...]
    """All samples of the contender, in ``unit``."""
    median: MedianInterval
    p99: float | None
    max: float
    loops: int = 1
    """Number of calls whose mean duration is one sample."""
    ratio: MedianInterval | None = None
    """Ratio to the reference contender of the table, paired by round; None: it has no reference."""
    x: float | None = None
    """Independent variable, such as the number of devices; rows with ``x`` form a curve."""
    memory: int | None = None
    """Peak of the bytes that Python's allocator held for one call."""


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Result rows of all contenders of one workload."""

    title: str
    rows: tuple[ResultRow, ...]
    reference: str = ""
    """Label of the row to which the ratios of the table refer; empty without ratios."""
    notes: tuple[str, ...] = ()
    """Remarks: what the figures include or exclude, their limits, and which equality was checked."""
    section: str = ""
    """Heading shared with the neighbouring tables; empty without one."""
    grows_with: str = ""
    """Meaning of the rows' ``x``, such as ``devices``; empty: the table has no curves."""

    @property
    def full_title(self) -> str:
        """Title of the table with its section."""
        return f"{self.section}; {self.title}" if self.section else self.title


@dataclass(slots=True)
class SuiteOutcome:
    """Result tables of one benchmark suite."""

    tables: list[ResultTable] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Measurements skipped on this machine, with reasons."""
    reference_ns: list[float] = field(default_factory=list)
    """Times of a fixed computation during the run, which show how stable the machine was [ns]."""

    def merge(self, other: "SuiteOutcome") -> None:
        """Add the tables of another part of the same suite."""
        self.tables += other.tables
        self.skipped += other.skipped
        self.reference_ns += other.reference_ns


def short_labels(labels: Sequence[str]) -> list[str]:
    """Cut descriptions, from the first colon, off the labels; keep them if the names are ambiguous."""
    names = [label.partition(": ")[0] for label in labels]
    return names if len(set(names)) == len(set(labels)) else list(labels)


def row_from_samples(key: str, label: str, values: Sequence[float], unit: Unit) -> ResultRow:
    """Return a result row with the statistics of independent samples, ``values`` in ``unit``."""
    return ResultRow(
        key, label, unit, tuple(values), median_interval(values), percentile(values, 0.99), max(values)
    )


def rows_from_race(prefix: str, race_result: InterleavedTimings, reference: str) -> tuple[ResultRow, ...]:
    """Return a result row for each contender timed in turns, with its ratio to contender ``reference``."""
    rows = []
    for key, timed in race_result.timed.items():
        samples = [sample / NS_PER_S for sample in timed.samples]
        ratio = None if key == reference else paired_ratio(timed, race_result.timed[reference])
        row = row_from_samples(f"{prefix}.{key}", race_result.labels[key], samples, "s")
        median = median_interval([median / NS_PER_S for median in timed.medians()])
        rows.append(replace(row, median=median, loops=timed.loops, ratio=ratio, memory=timed.memory))
    return tuple(rows)


def seconds_from_ns(latencies_ns: Sequence[int]) -> list[float]:
    """Convert latencies from nanoseconds to seconds."""
    return [latency / NS_PER_S for latency in latencies_ns]


def rows_from_latencies(
    key: str, labels: dict[str, str], latencies_ns: dict[str, Sequence[int]]
) -> tuple[ResultRow, ...]:
    """Return a result row for each contender's latencies of the same causes.

    Ratios are those to the lower bound (key ``floor``), cause by cause.
    """
    timed = {
        name: ContenderSamples(tuple((float(value),) for value in values), 1)
        for name, values in latencies_ns.items()
    }
    return rows_from_race(key, InterleavedTimings(labels, timed, ()), "floor")


def unit_scale(value: float, unit: Unit) -> tuple[float, str]:
    """Return divisor and name of the unit in which a figure of this size is printed: ``(1e-6, "us")``."""
    if unit in {"%", "1"}:
        return 1.0, unit.replace("1", "")
    steps = _SECONDS if unit == "s" else _BYTES
    return next((step for step in steps if value >= step[0]), steps[-1])


def format_digits(value: float, unit: Unit) -> str:
    """Format a figure, divided by :func:`unit_scale`, with three digits; a count in full."""
    if unit == "%":
        return f"{value:.2f}"
    if unit == "1":
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    if unit == "B" and float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def format_value(value: float, unit: Unit) -> str:
    """Format a figure with its unit: ``14.7 us``, ``38.2 MiB``, ``0.12 %``."""
    size, name = unit_scale(value, unit)
    return f"{format_digits(value / size, unit)} {name}".rstrip()


def format_interval(value: MedianInterval, unit: Unit) -> str:
    """Format an interval in the unit of its median: ``[14.6, 14.9]``."""
    size, _ = unit_scale(value.median, unit)
    return f"[{format_digits(value.low / size, unit)}, {format_digits(value.high / size, unit)}]"
