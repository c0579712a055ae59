"""Report of a benchmark run: facts of the machine, then tables as text of 100 columns or as Markdown.

The report also rates how stable the timings of the run are.

The module also has the conversion of benchmark figures to and from a pyperf benchmark suite.

The converted figures serve ``pyperf compare_to`` and similar tools.

Format: https://pyperf.readthedocs.io/en/latest/api.html, version 1.0. pyperf has the units second, byte and
integer; a percentage of a core becomes seconds of CPU per second, and a ratio becomes seconds. pyperf refuses
zero, so counts of zero are left out.
"""

import datetime
import importlib.util
import itertools
import json
import os
import platform
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.bench.result import (
    BudgetVerdict,
    ResultRow,
    ResultTable,
    SuiteOutcome,
    Unit,
    evaluate_budgets,
    find_checkout,
    format_digits,
    format_interval,
    format_value,
    short_labels,
)
from agent.bench.timing import outlier_share, relative_deviation
from agent.version import VERSION


class HostFacts(NamedTuple):
    """Description of machine and build in the header of a report."""

    date: str
    """Start of the benchmark run, UTC."""
    version: str
    cpu: str
    cpus: int
    governor: str
    kernel: str
    python: str
    compiler: str
    flags: str
    load: str
    """Load average over 1 minute at the start of the run."""


def read_host() -> HostFacts:
    """Read the description of this machine and of the installed C core."""
    return HostFacts(
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        version=VERSION,
        cpu=_cpu_model(),
        cpus=os.cpu_count() or 0,
        governor=_read_or_empty("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "unknown",
        kernel=platform.release(),
        python=platform.python_version(),
        compiler=core_compiler(),
        flags=_compiler_flags(),
        load=f"{os.getloadavg()[0]:.2f}",
    )


def core_compiler() -> str:
    """Return name and version of the compiler that built the C core, as recorded in the built module."""
    spec = importlib.util.find_spec("agent.native._core")
    data = Path(spec.origin).read_bytes() if spec and spec.origin else b""
    signature = re.search(rb"GCC: \([^)]*\) ([\d.]+)|clang version ([\d.]+)", data)
    if signature is None:
        return "unknown compiler"
    return f"gcc {signature[1].decode()}" if signature[1] else f"clang {signature[2].decode()}"


def _compiler_flags() -> str:
    root = find_checkout()
    if root is None:
        return "flags unknown outside a checkout"
    flags = re.search(r"^CFLAGS\b.*?\[(.*?)\]", (root / "setup_build.py").read_text(), re.M)
    return flags[1].replace('"', "").replace(",", "") if flags else "flags unknown"


def _cpu_model() -> str:
    model = re.search(r"^model name\s*: (.*)$", _read_or_empty("/proc/cpuinfo"), re.M)
    return model[1] if model else platform.machine()


def _read_or_empty(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


WIDTH: Final = 100
HEADINGS: Final = ("95 % interval", "p99", "max", "ratio", "memory", "budget", "")
STABLE: Final = ((0.02, "good"), (0.05, "fair"))
MAX_OUTLIER_SHARE: Final = 0.01
"""Share of outliers among the samples from which the outliers alone determine the 99th percentile."""
VERDICTS: Final[Mapping[bool | None, str]] = {True: "ok", False: "OVER", None: "unsure"}
CORE_KEY: Final = "core"
NO_ALTERNATIVES: Final = ("core", "lower bound", "bare system calls")
"""Beginnings of the labels of rows that the C core is not compared with."""
LEGEND: Final = (
    "ratio: median of the ratios within each round, in which all contenders take turns",
    "memory: peak memory of one call in Python's allocator",
    "budget: upper limit of the ratio, or of the figure on this machine",
)


class ReportSection(NamedTuple):
    """Neighbouring tables of one suite with a common heading."""

    title: str
    """Heading of all tables in the section; empty: the table has no section."""
    tables: tuple[ResultTable, ...]
    common: tuple[str, ...]
    """Remarks that apply to all tables of the section, printed once."""


def group_by_section(tables: Sequence[ResultTable]) -> Iterator[ReportSection]:
    """Group neighbouring tables of the same section, in their order."""
    for title, group in itertools.groupby(tables, lambda table: table.section):
        group_tables = tuple(group)
        yield ReportSection(title, group_tables, _common_remarks(group_tables) if title else ())


def _common_remarks(tables: Sequence[ResultTable]) -> tuple[str, ...]:
    """Return the remarks that all tables of a section have in common.

    A remark on a contender (measured implementation) is common if all tables with that contender have it.
    """
    remarks = dict.fromkeys(remark for table in tables for remark in _remarks(table))
    labels = {row.label for table in tables for row in table.rows}

    def applies(remark: str, table: ResultTable) -> bool:
        is_absent = remark in labels and _short_label(remark) not in map(_short_label, _row_labels(table))
        return is_absent or remark in _remarks(table)

    return tuple(remark for remark in remarks if all(applies(remark, table) for table in tables))


def host_facts(host: HostFacts) -> tuple[str, str]:
    """Return header lines: version and build, and machine."""
    return (
        f"drahealth bench {host.version}, {host.date}; core: {host.compiler} {host.flags}",
        f"{host.cpu}, {host.cpus} CPUs, governor {host.governor}, load {host.load}; kernel {host.kernel}, "
        f"Python {host.python}",
    )


def header_lines(host: HostFacts, outcomes: Iterable[SuiteOutcome]) -> tuple[str, ...]:
    """Return header lines: facts of the host, and the stability of the run."""
    return (*host_facts(host), *stability_lines([ns for outcome in outcomes for ns in outcome.reference_ns]))


def stability_lines(reference_ns: Sequence[float]) -> tuple[str, ...]:
    """Rate how stable the machine was, by the times of a fixed computation between the blocks of samples."""
    if not reference_ns:
        return ("stability: unknown; no suite timed a loop",)
    deviation, outliers = relative_deviation(reference_ns), outlier_share(reference_ns)
    rating = next(
        (rating for limit, rating in STABLE if deviation <= limit), "POOR: only ratios are reliable"
    )
    tails = (
        "p99 and max are noise of the machine"
        if outliers > MAX_OUTLIER_SHARE
        else "p99 is reliable, max may be noise of the machine"
    )
    return (
        f"stability of medians: {rating} (median absolute deviation of {len(reference_ns):,} samples of "
        f"a fixed computation: {deviation:.1%})",
        f"stability of tails: {tails} ({outliers:.1%} of these samples took at least twice the median)",
    )


def text_report(host: HostFacts, outcomes: Mapping[str, SuiteOutcome], budgets: Mapping[str, Any]) -> str:
    """Return the report of all suites as text, with the summary at the end."""
    lines = [line for fact in header_lines(host, outcomes.values()) for line in wrap_line(fact, "")]
    for name, outcome in outcomes.items():
        for section in group_by_section(outcome.tables):
            if section.title:
                lines += ["", *wrap_line(f"{name}: {section.title}", "")]
                lines += [line for remark in section.common for line in wrap_line(remark, "    ")]
            for table in section.tables:
                lines += [""] if section.title else ["", *wrap_line(f"{name}: {table.title}", "")]
                lines += align_columns(_table_grid(table, budgets))
                for remark in _table_remarks(table, section):
                    lines += wrap_line(remark, "    ")
        for published in outcome.published:
            lines += ["", *wrap_line(f"{name}: {published.title}", ""), *align_columns(published.grid)]
            lines += [line for source in published.sources for line in wrap_line(source, "    ")]
        for reason in dict.fromkeys(outcome.skipped):
            lines += ["", *wrap_line(f"not measured: {reason}", "")]
    lines += ["", *LEGEND, ""]
    if len(grid := summary_grid(outcomes, budgets)) > 1:
        lines += [*align_columns([row[:-1] for row in grid]), ""]
    return "\n".join([*lines, *wrap_line(summary_line(outcomes, budgets), "")]) + "\n"


def markdown_report(
    host: HostFacts,
    outcomes: Mapping[str, SuiteOutcome],
    budgets: Mapping[str, Any],
    plots: tuple[Path, Path] | None = None,
) -> str:
    """Return the report of all suites as Markdown; ``plots`` are the overview and the distributions."""
    lines = ["# Performance", "", "Generated by `make bench-doc`.", ""]
    lines += [*_bullet_points(header_lines(host, outcomes.values())), ""]
    lines += [f"![Overview]({plots[0].name})", ""] if plots else []
    lines += ["## Summary", ""]
    lines += [summary_line(outcomes, budgets), ""]
    if len(grid := summary_grid(outcomes, budgets)) > 1:
        lines += [*markdown_table(grid), ""]
    lines += _bullet_points(LEGEND)
    for name, outcome in outcomes.items():
        lines += ["", f"## {name}"]
        for section in group_by_section(outcome.tables):
            lines += ["", f"### {section.title}"] if section.title else []
            lines += ["", *_bullet_points(section.common)] if section.common else []
            for table in section.tables:
                lines += [""] if section.title else ["", f"### {table.title}", ""]
                lines += markdown_table(_table_grid(table, budgets))
                remarks = [*_table_remarks(table, section)]
                lines += ["", *_bullet_points(remarks)] if remarks else []
        for published in outcome.published:
            lines += ["", f"### {published.title}", "", *markdown_table(published.grid)]
            lines += ["", *_bullet_points(published.sources)]
        for reason in dict.fromkeys(outcome.skipped):
            lines += ["", f"Not measured: {reason}"]
    if plots:
        lines += ["", "## Distributions and curves", "", f"![Distributions and curves]({plots[1].name})"]
    return "\n".join(lines) + "\n"


def _bullet_points(points: Iterable[str]) -> Iterator[str]:
    return (f"- {point}" for point in points)


def markdown_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format rows as a Markdown table: the first row is the heading; all but the first column align right."""
    heading, *others = (f"| {' | '.join(row)} |" for row in rows)
    yield heading
    yield "|---" + "|---:" * (len(rows[0]) - 1) + "|"
    yield from others


def summary_line(outcomes: Mapping[str, SuiteOutcome], budgets: Mapping[str, Any]) -> str:
    """Return one line: the number of budgets met, and the figures of exceeded, undecided and unused budgets.

    A figure can have several budgets. A budget is unused if only other figures of its kind were measured.
    """
    verdicts = [(row.key, verdict.met) for row, verdict in _budget_verdicts(outcomes, budgets)]
    over = [key for key, met in verdicts if met is False]
    unsure = [key for key, met in verdicts if met is None]
    summary_text = f"budgets: {len(verdicts) - len(over) - len(unsure)} met, {len(over)} over"
    summary_text += _of_figures(over)
    keys = {row.key for outcome in outcomes.values() for table in outcome.tables for row in table.rows}
    kinds = {key.partition(".")[0] for key in keys}
    limited = dict.fromkeys(key for part in ("ratio", "goal") for key in budgets.get(part, ()))
    unused = [key for key in limited if key not in keys and key.partition(".")[0] in kinds]
    others = ((unsure, "unsure"), (unused, "unused"))
    return summary_text + "".join(
        f"; {len(figures)} {state}{_of_figures(figures)}" for figures, state in others if figures
    )


def _of_figures(keys: Sequence[str]) -> str:
    """Return the number and names of the figures of some budgets; empty: no budget."""
    names = dict.fromkeys(keys)
    return f" ({len(names)} figure{'s' * (len(names) != 1)}: {', '.join(names)})" if names else ""


def summary_grid(outcomes: Mapping[str, SuiteOutcome], budgets: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a table of all figures with budgets, as rows of cells with a heading.

    The last column is the reason for the budget.
    """
    rows = [
        (row.key, verdict.text, verdict.measured, VERDICTS[verdict.met], verdict.reason)
        for row, verdict in _budget_verdicts(outcomes, budgets)
    ]
    return [("", "budget", "measured", "", "reason"), *rows]


def _budget_verdicts(
    outcomes: Mapping[str, SuiteOutcome], budgets: Mapping[str, Any]
) -> Iterator[tuple[ResultRow, BudgetVerdict]]:
    rows = (row for outcome in outcomes.values() for table in outcome.tables for row in table.rows)
    return ((row, verdict) for row in rows for verdict in evaluate_budgets(row, budgets))


def _table_grid(table: ResultTable, budgets: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return headings and rows of a table, without empty columns."""
    names = short_labels(_row_labels(table))
    cells = ((name, *_row_cells(row, budgets)) for name, row in zip(names, table.rows, strict=True))
    first = "median" if any(len(row.values) > 1 for row in table.rows) else "figure"
    grid = [(table.title if table.section else "", first, *HEADINGS), *cells]
    used = [column == 0 or any(row[column] for row in grid[1:]) for column in range(len(grid[0]))]
    return [tuple(cell for cell, is_used in zip(row, used, strict=True) if is_used) for row in grid]


def _row_cells(row: ResultRow, budgets: Mapping[str, Any]) -> tuple[str, ...]:
    is_single = len(row.values) == 1
    verdicts = evaluate_budgets(row, budgets)
    return (
        format_value(row.median.median, row.unit),
        "" if is_single else format_interval(row.median, row.unit),
        "" if row.p99 is None else format_value(row.p99, row.unit),
        "" if is_single else format_value(row.max, row.unit),
        f"{format_digits(row.ratio.median, 's')}x" if row.ratio else "",
        "" if row.memory is None else format_value(row.memory, "B"),
        ", ".join(verdict.text for verdict in verdicts),
        ", ".join(VERDICTS[verdict.met] for verdict in verdicts),
    )


def _row_labels(table: ResultTable) -> list[str]:
    return [row.label for row in table.rows]


def _table_remarks(table: ResultTable, section: ReportSection) -> Iterator[str]:
    """Return the remarks below a table: how the C core compares, and what its section does not state."""
    if compared := compare_core_row(table):
        yield compared
    yield from (remark for remark in _remarks(table) if remark not in section.common)


def _remarks(table: ResultTable) -> list[str]:
    """Return the remarks on a table: what its ratios refer to, which contenders it has, and notes.

    A contender is a measured implementation of the workload.
    """
    labels = _row_labels(table)
    descriptions = [
        label
        for label, name in zip(labels, short_labels(labels), strict=True)
        if label not in {name, table.reference}
    ]
    return [*([f"ratio to {table.reference}"] if table.reference else []), *descriptions, *table.notes]


def compare_core_row(table: ResultTable) -> str:
    """Describe how the C core compares with alternatives: ``core: 4.1x less than good Python``.

    The text is empty if the table has no row of the C core.

    Lower bounds and other rows of the core are left out, because they are no alternatives.
    """
    core = next((row for row in table.rows if row.key.rpartition(".")[2] == CORE_KEY), None)
    alternatives = [row for row in table.rows if not row.label.startswith(NO_ALTERNATIVES)]
    if core is None or not table.reference or not alternatives:
        return ""
    core_ratio = _ratio_to_reference(core)
    factors = (
        f"{format_factor(_ratio_to_reference(row) / core_ratio)} than {_short_label(row.label)}"
        for row in alternatives
    )
    return f"{_short_label(core.label)}: {', '.join(factors)}"


def _short_label(label: str) -> str:
    return short_labels([label])[0]


def _ratio_to_reference(row: ResultRow) -> float:
    return row.ratio.median if row.ratio else 1.0


def format_factor(factor: float) -> str:
    """Format how the C core compares with code that needs ``factor`` times as much: ``13x less``."""
    big = max(factor, 1 / factor)
    return f"{big:.{0 if big >= 10 else 1}f}x {'less' if factor >= 1 else 'more'}"


def align_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Pad the cells of rows to equal widths: the first column to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *rest in rows:
        cells = "  ".join(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield f"  {first.ljust(widths[0])}  {cells}".rstrip()


def wrap_line(line: str, indent: str) -> list[str]:
    """Wrap a line at 100 columns; indent continuation lines by two more columns."""
    return textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


# --- pyperf ------------------------------------------------------------------------------------------------

UNITS: Final[Mapping[Unit, str]] = {
    "s": "second",
    "%": "second",
    "x": "second",
    "B": "byte",
    "1": "integer",
}
FORMAT: Final = "1.0"
_UNITS_BY_NAME: Final[Mapping[str, Unit]] = {"second": "s", "byte": "B", "integer": "1"}


class FigureMedian(NamedTuple):
    """Unit and median of one benchmark figure, which is a result row of a suite."""

    unit: Unit
    median: float


def pyperf_document(host: HostFacts, outcomes: Mapping[str, SuiteOutcome]) -> str:
    """Encode the result rows of all suites as one JSON document of pyperf."""
    rows = [row for outcome in outcomes.values() for table in outcome.tables for row in table.rows]
    metadata = {
        "cpu_model_name": host.cpu,
        "cpu_count": host.cpus,
        "hostname": os.uname().nodename,
        "platform": f"Linux-{host.kernel}",
        "python_version": host.python,
        "load_avg_1min": float(host.load),
        "drahealth_version": host.version,
        "drahealth_compiler": host.compiler,
        "drahealth_cflags": host.flags,
    }
    document = {"version": FORMAT, "metadata": metadata, "benchmarks": list(_benchmarks(rows))}
    return json.dumps(document, indent=1)


def decode_figures(document: str) -> dict[str, FigureMedian]:
    """Return unit and median of each benchmark in a JSON document of pyperf, by name."""
    return {
        benchmark["metadata"]["name"]: FigureMedian(
            _UNITS_BY_NAME[benchmark["metadata"]["unit"]],
            statistics.median(value for run in benchmark["runs"] for value in run["values"]),
        )
        for benchmark in json.loads(document)["benchmarks"]
    }


def _benchmarks(rows: list[ResultRow]) -> Iterator[dict[str, Any]]:
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    for row in rows:
        if row.max <= 0:
            continue
        scale = 0.01 if row.unit == "%" else 1
        values = [value * scale for value in row.values if value > 0]
        if row.unit in {"B", "1"}:
            values = [round(value) or 1 for value in values]
        yield {
            "metadata": {
                "name": row.key,
                "unit": UNITS[row.unit],
                "loops": row.loops,
                "description": row.label,
            },
            "runs": [{"metadata": {"date": date}, "values": values}],
        }
