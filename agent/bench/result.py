"""What a suite hands over: figures with their unit, ready to be printed, stored and held to budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from agent.bench.timing import Interval, Race, Timed, interval, paired_ratio, percentile

Unit = Literal["s", "B", "1", "%"]
NS_PER_S: Final = 1e9
_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES: Final = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


class Unmeasured(Exception):
    """Something went wrong that makes every figure worthless; the text says what."""


class Unequal(Unmeasured):
    """Two ways to do the same did not do the same; nothing is timed then."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one contender."""

    key: str
    """Stable: suite, workload and contender, ``poll.pass.warm.core``."""
    label: str
    """``psutil 7.2.2: CPU count and times, not these files``: a name, and what it does and leaves out."""
    unit: Unit
    values: tuple[float, ...]
    """Every sample, in ``unit``."""
    median: Interval
    p99: float | None
    max: float
    loops: int = 1
    """Calls behind each sample, which is their mean."""
    ratio: Interval | None = None
    """To the table's reference, paired."""
    x: float | None = None
    """What the figure is a function of, such as the number of devices: rows that have it are a curve."""
    memory: int | None = None
    """Python's allocator had to find so many bytes at once for one call."""


@dataclass(frozen=True, slots=True)
class Table:
    """One workload."""

    title: str
    rows: tuple[Row, ...]
    reference: str = ""
    """Label of what the ratios are to; empty if there are none."""
    notes: tuple[str, ...] = ()
    """What the figures include, leave out, or are bounded by; and what equality was checked."""
    section: str = ""
    """What it has in common with its neighbours, which stand under this heading with it."""
    grows_with: str = ""
    """What the ``x`` of its rows counts: ``devices``; empty if there are no curves."""

    @property
    def full_title(self) -> str:
        """With its section."""
        return f"{self.section}; {self.title}" if self.section else self.title


@dataclass(slots=True)
class Outcome:
    """What one suite found."""

    tables: list[Table] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """What was not measured on this machine, and why."""
    reference_ns: list[float] = field(default_factory=list)
    """Samples of the reference computation, for the stability of the run."""

    def take(self, other: "Outcome") -> None:
        """Adds what a part of the suite found."""
        self.tables += other.tables
        self.skipped += other.skipped
        self.reference_ns += other.reference_ns


def short(labels: Sequence[str]) -> list[str]:
    """Labels without what each does and leaves out, unless they could not be told apart then."""
    names = [label.partition(": ")[0] for label in labels]
    return names if len(set(names)) == len(set(labels)) else list(labels)


def row_of(key: str, label: str, values: Sequence[float], unit: Unit) -> Row:
    """A row of plain values, each a sample of its own."""
    return Row(key, label, unit, tuple(values), interval(values), percentile(values, 0.99), max(values))


def _timed_row(key: str, label: str, timed: Timed, to: Timed | None) -> Row:
    samples = tuple(sample / NS_PER_S for sample in timed.samples)
    middle = interval([median / NS_PER_S for median in timed.medians()])
    return Row(
        key,
        label,
        "s",
        samples,
        middle,
        percentile(samples, 0.99),
        max(samples),
        timed.loops,
        ratio=paired_ratio(timed, to) if to else None,
        memory=timed.memory,
    )


def rows_of(prefix: str, labels: dict[str, str], run: Race, reference: str) -> tuple[Row, ...]:
    """The rows of a race; ratios are to the contender ``reference``."""
    to = run.timed[reference]
    return tuple(
        _timed_row(f"{prefix}.{key}", labels[key], timed, None if key == reference else to)
        for key, timed in run.timed.items()
    )


def scale(value: float, unit: Unit) -> tuple[float, str]:
    """What to divide a figure of this size by for people, and the name of what it is then counted in."""
    if unit in {"%", "1"}:
        return 1.0, unit.replace("1", "")
    steps = _SECONDS if unit == "s" else _BYTES
    return next((step for step in steps if value >= step[0]), steps[-1])


def digits(value: float, unit: Unit) -> str:
    """A scaled figure: three digits, a count in full."""
    if unit == "%":
        return f"{value:.2f}"
    if unit == "1":
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    if unit == "B" and float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def quantity(value: float, unit: Unit) -> str:
    """A figure for people: ``14.7 us``, ``38.2 MiB``, ``0.12 %``."""
    size, name = scale(value, unit)
    return f"{digits(value / size, unit)} {name}".rstrip()


def bounds(of: Interval, unit: Unit) -> str:
    """An interval, ``[14.6, 14.9]``, in what its median is counted in."""
    size, _ = scale(of.median, unit)
    return f"[{digits(of.low / size, unit)}, {digits(of.high / size, unit)}]"
