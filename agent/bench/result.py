"""Results of a benchmark suite: rows with units, tables of rows, and the formatting of figures.

The module also has the numbers of rounds, sizes and durations of a full benchmark run and of a quick one
(``--quick``).

The module also has the budgets of ``benchmarks/budgets.toml``: ratios and exact counts that ``--check``
enforces, and goals.

Goals, such as absolute times, depend on the machine: reports print them, and they fail no check. The file is
in the checkout only; an installed package has no budgets.
"""

import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import agent
from agent.bench.timing import (
    ContenderSamples,
    InterleavedTimings,
    MedianInterval,
    median_interval,
    paired_ratio,
    percentile,
)

Unit = Literal["s", "B", "1", "%", "x"]
"""Second, byte, count, percent of a core, and ratio of two figures."""
NS_PER_S: Final = 1e9
_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES: Final = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


class MeasurementError(Exception):
    """A measurement failed and its figures are invalid; the text states the cause in one line.

    Args:
        text: What failed.
        output: Output of the program that failed. Its line with the reason follows the text; all of it is a
            note of the exception.
    """

    def __init__(self, text: str, output: str = "") -> None:
        reason = find_reason(output)
        super().__init__(f"{text}: {reason}" if reason else text)
        if reason:
            self.add_note(output.strip())


def find_reason(output: str) -> str:
    """Return the line of a program's output that most likely has the reason of its failure.

    This is the first error of a compiler or, of another program, the last line that is no advice.
    """
    lines = [line for line in map(str.strip, output.splitlines()) if line and not line.startswith("try '")]
    reason = next((line for line in lines if " error: " in line), lines[-1] if lines else "")
    return textwrap.shorten(reason, REASON_MAX)


REASON_MAX: Final = 300
"""Largest length of a reason that a program printed."""


class ResultMismatch(MeasurementError):
    """Error: contenders (implementations of one workload) return different results, so none is timed."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """Samples of one contender (measured implementation) in one workload, with their statistics."""

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
    """Result rows of all contenders (measured implementations) of one workload."""

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


class PublishedTable(NamedTuple):
    """Table of figures that other projects published, as texts with their sources."""

    title: str
    grid: list[tuple[str, ...]]
    """Heading and rows."""
    sources: list[str]


@dataclass(slots=True)
class SuiteOutcome:
    """Result tables of one benchmark suite."""

    tables: list[ResultTable] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Measurements skipped on this machine, with reasons."""
    reference_ns: list[float] = field(default_factory=list)
    """Times of a fixed computation during the run, which show how stable the machine was [ns]."""
    published: list[PublishedTable] = field(default_factory=list)

    def merge(self, other: "SuiteOutcome") -> None:
        """Add the tables of another part of the same suite."""
        self.tables += other.tables
        self.published += other.published
        self.skipped += other.skipped
        self.reference_ns += other.reference_ns


def short_labels(labels: Sequence[str]) -> list[str]:
    """Return the labels without their descriptions, which begin at the first colon.

    If two labels became equal, return all labels unchanged.
    """
    names = [label.partition(": ")[0] for label in labels]
    return names if len(set(names)) == len(set(labels)) else list(labels)


def row_from_samples(key: str, label: str, values: Sequence[float], unit: Unit) -> ResultRow:
    """Return a result row with the statistics of independent samples, ``values`` in ``unit``."""
    return ResultRow(
        key, label, unit, tuple(values), median_interval(values), percentile(values, 0.99), max(values)
    )


def row_from_ratio(key: str, label: str, timed: ContenderSamples, reference: ContenderSamples) -> ResultRow:
    """Return a result row with the ratios of two contenders' times, ``timed`` / ``reference``, by round."""
    pairs = zip(timed.medians(), reference.medians(), strict=True)
    return row_from_samples(key, label, [time / bound for time, bound in pairs], "x")


def rows_from_race(prefix: str, race_result: InterleavedTimings, reference: str) -> tuple[ResultRow, ...]:
    """Return a result row for each contender, with its ratio to the contender ``reference``.

    Contenders are implementations of one workload that were timed in turns.
    """
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
    """Return a result row for the latencies of each contender (measured implementation).

    All contenders detect the same changes. Ratios are those to the lower bound (key ``floor``), change by
    change.
    """
    timed = {
        name: ContenderSamples(tuple((float(value),) for value in values), 1)
        for name, values in latencies_ns.items()
    }
    return rows_from_race(key, InterleavedTimings(labels, timed, ()), "floor")


def unit_scale(value: float, unit: Unit) -> tuple[float, str]:
    """Return divisor and name of the unit in which a figure of this size is printed: ``(1e-6, "us")``."""
    if unit in {"%", "1", "x"}:
        return 1.0, unit.replace("1", "")
    steps = _SECONDS if unit == "s" else _BYTES
    return next((step for step in steps if value >= step[0]), steps[-1])


def format_digits(value: float, unit: Unit) -> str:
    """Format a figure, divided by :func:`unit_scale`, with three digits; format a count with all digits."""
    if unit in {"%", "x"}:
        return f"{value:.2f}"
    if unit == "1":
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    if unit == "B" and float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def format_value(value: float, unit: Unit) -> str:
    """Format a figure with its unit: ``14.7 us``, ``38.2 MiB``, ``0.12 %``, ``1.20x``."""
    size, name = unit_scale(value, unit)
    space = "" if unit == "x" else " "
    return f"{format_digits(value / size, unit)}{space}{name}".rstrip()


def format_interval(value: MedianInterval, unit: Unit) -> str:
    """Format an interval in the unit of its median: ``[14.6, 14.9]``."""
    size, _ = unit_scale(value.median, unit)
    return f"[{format_digits(value.low / size, unit)}, {format_digits(value.high / size, unit)}]"


# --- sizes of a run ----------------------------------------------------------------------------------------


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
    nvml_inside: bool
    """Whether the detection of GPU faults is also timed with NVML in the agent's own process."""
    causes: int
    """Number of changes made to time each other kind of detection."""
    events: int
    """Number of cgroup events and traced changes that are timed; a p99 needs 100."""
    oom_kills: int
    """Number of OOM kills that are timed; 0 skips them."""
    hotplugs: int
    """Number of CPU hotplug events; each briefly stops the machine. 0 skips hotplug and kernel log."""
    detect_periods_ms: tuple[int, ...]
    publications: int
    """Number of published reports for each number of subscribers."""
    published_devices: tuple[int, ...]
    """Numbers of devices of the published reports."""
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
    soak_s: float
    """Duration of the churn in suite soak [s]."""
    peers: bool = False
    """Whether other installed node agents are measured after the idle agent, as long as it."""


FULL: Final = RunSize(
    warm_rounds=60,
    warm_limit_s=8.0,
    cold_rounds=30,
    cold_baselines=True,
    groups=(10, 100, 500, 1000),
    gpus=(1, 8, 16),
    betterproto_devices=1000,
    nvml_inside=True,
    causes=40,
    events=100,
    oom_kills=100,
    hotplugs=12,
    detect_periods_ms=(10, 100),
    publications=200,
    published_devices=(128, 1000),
    starts=10,
    imports=True,
    idle_s=60.0,
    settle_s=130.0,  # the sampler reads new cgroups more often for two minutes
    strace_s=5.0,
    sizes=(1, 8, 64, 128, 256, 512, 1000),
    pods=5000,
    audited=250,
    soak_s=3600.0,
)
QUICK: Final = RunSize(
    warm_rounds=20,
    warm_limit_s=0.1,
    cold_rounds=2,
    cold_baselines=False,
    groups=(10, 100),
    gpus=(8,),
    betterproto_devices=128,
    nvml_inside=False,
    causes=1,
    events=1,
    oom_kills=0,
    hotplugs=0,
    detect_periods_ms=(10,),
    publications=10,
    published_devices=(128,),
    starts=1,
    imports=False,
    idle_s=1.0,
    settle_s=0.3,
    strace_s=0.0,
    sizes=(8, 1000),
    pods=0,
    audited=0,
    soak_s=12.0,
)
PAUSE_S: Final = 0.1
"""Pause between two passes of the C core at 10 Hz [s]."""

# --- budgets -----------------------------------------------------------------------------------------------

BUDGETS_FILE: Final = "benchmarks/budgets.toml"
RATIO_REASON: Final = "ratio to the bare system calls that the work needs"


_FIGURES: Final[Mapping[str, Callable[[ResultRow], float | None]]] = {
    "median": lambda row: row.median.median,
    "p99": lambda row: row.p99,
    "max": lambda row: row.max,
}
"""Statistics that a goal can limit, in the order in which a report prints them."""


class BudgetGoal(NamedTuple):
    """Upper limit of one statistic of a benchmark's result row, which a report prints."""

    statistic: str
    """Statistic that the goal limits: ``median``, ``p99`` or ``max``."""
    limit: float
    """Largest good value of the statistic, in the unit of the result row."""
    reason: str
    """Reason why the goal has this limit."""

    def describe(self, value: float, unit: Unit) -> str:
        """Format ``value`` after the statistic's name: ``p99 1.20 ms``.

        For a median, the name is left out: ``1.20 ms``.
        """
        return f"{'' if self.statistic == 'median' else self.statistic + ' '}{format_value(value, unit)}"


class BudgetVerdict(NamedTuple):
    """Result of comparing a result row of a benchmark with one of its budgets."""

    text: str
    """Upper limit of the budget as text, ``1.10x`` or ``p99 1.20 ms``."""
    met: bool | None
    """True: the row is within its budget. False: over budget. None: undecided by the samples."""
    measured: str
    """Figure that was measured, in the same form as the limit in ``text``."""
    reason: str
    """Reason why the budget has this limit."""


def find_checkout() -> Path | None:
    """Return the root of the checkout that this package was imported from.

    None: the package is installed, not imported from a checkout.
    """
    root = Path(agent.__file__).resolve().parents[1]
    return root if (root / BUDGETS_FILE).exists() else None


def load_budgets(root: Path | None = None) -> Mapping[str, Any]:
    """Load the budgets of the checkout ``root``, by default the current one; empty outside a checkout."""
    root = root or find_checkout()
    return tomllib.loads((root / BUDGETS_FILE).read_text()) if root else {}


def evaluate_budgets(row: ResultRow, budgets: Mapping[str, Any]) -> list[BudgetVerdict]:
    """Compare a result row with the limit of its ratio, and with each goal of its statistics.

    A ratio is met if its median is within the limit, and missed if its whole confidence interval is above
    the limit. The median of a row in unit ``x`` is a ratio, too.
    """
    verdicts: list[BudgetVerdict] = []
    limit = budgets.get("ratio", {}).get(row.key)
    if limit is not None and row.ratio:
        texts = (
            format_value(limit, "x"),
            _is_ratio_met(row.ratio, limit),
            format_value(row.ratio.median, "x"),
        )
        verdicts.append(BudgetVerdict(*texts, RATIO_REASON))
    for goal in find_goals(row, budgets):
        value, limit = _FIGURES[goal.statistic](row), goal.describe(goal.limit, row.unit)
        if value is None:
            verdicts.append(BudgetVerdict(limit, None, "too few samples", goal.reason))
            continue
        is_ratio = row.unit == "x" and goal.statistic == "median"
        met = _is_ratio_met(row.median, goal.limit) if is_ratio else value <= goal.limit
        verdicts.append(BudgetVerdict(limit, met, goal.describe(value, row.unit), goal.reason))
    return verdicts


def find_goals(row: ResultRow, budgets: Mapping[str, Any]) -> list[BudgetGoal]:
    """Return the goals of a benchmark's result row, one for each limited statistic; empty: no goal."""
    goal = budgets.get("goal", {}).get(row.key, {})
    return [BudgetGoal(name, goal[name], goal["why"]) for name in _FIGURES if name in goal]


def _is_ratio_met(measured: MedianInterval, limit: float) -> bool | None:
    if measured.median <= limit:
        return True
    return False if measured.low > limit else None


def replace_table(text: str, name: str, values: Mapping[str, float]) -> str:
    """Return the TOML document ``text`` with the table ``name`` replaced by ``values``, or appended."""
    body = "".join(f"{key} = {value}\n" for key, value in values.items())
    table = f"[{name}]\n{body}"
    match = re.search(rf"^\[{re.escape(name)}\]\n(?:(?!\[|\n).*\n)*", text, re.M)
    if match:
        return text[: match.start()] + table + text[match.end() :]
    return text.rstrip("\n") + "\n\n" + table
