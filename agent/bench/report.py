"""The tables, for people: aligned text for a terminal of 100 columns, or Markdown.

Judges nothing but how stable the run was; what a figure is held to says ``budgets.py``.
"""

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.bench.budgets import Verdict, verdict
from agent.bench.host import Host
from agent.bench.result import Outcome, Row, Table, bounds, digits, quantity, short
from agent.bench.timing import spread, wild

WIDTH: Final = 100
HEADINGS: Final = ("95 % interval", "p99", "max", "ratio", "memory", "budget", "")
STABLE: Final = ((0.02, "good"), (0.05, "fair"))
WILD_MAX: Final = 0.01
"""So many samples gone wild make a 99th percentile."""
VERDICTS: Final[Mapping[bool | None, str]] = {True: "ok", False: "OVER", None: "unsure"}
OURS: Final = "core"
FLOOR: Final = "floor"
LEGEND: Final = (
    "ratio: the median of the ratios within each round, in which all took their turn",
    "memory: what Python's allocator had to find at once for one call",
    "budget: the most that the ratio, or the figure on this machine, should be",
)


class Section(NamedTuple):
    """Tables of one suite that stand together."""

    title: str
    """Empty: they have nothing in common."""
    tables: tuple[Table, ...]
    common: tuple[str, ...]
    """Remarks that are true of all of them, to be made once."""


def sections(tables: Sequence[Table]) -> Iterator[Section]:
    """The tables in their order."""
    for title, neighbours in itertools.groupby(tables, lambda table: table.section):
        found = tuple(neighbours)
        yield Section(title, found, _common(found) if title else ())


def _common(tables: Sequence[Table]) -> tuple[str, ...]:
    """What is said below each of them; of a contender, below each in which it takes part."""
    remarks = dict.fromkeys(remark for table in tables for remark in _remarks(table))
    labels = {row.label for table in tables for row in table.rows}

    def holds(remark: str, table: Table) -> bool:
        is_absent = remark in labels and _name(remark) not in map(_name, _labels(table))
        return is_absent or remark in _remarks(table)

    return tuple(remark for remark in remarks if all(holds(remark, table) for table in tables))


def facts(host: Host) -> tuple[str, str]:
    """What was measured, and on what."""
    return (
        f"drahealth bench {host.version}, {host.date}; core: {host.compiler} {host.flags}",
        f"{host.cpu}, {host.cpus} CPUs, governor {host.governor}, load {host.load}; kernel {host.kernel}, "
        f"Python {host.python}",
    )


def header(host: Host, outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """The facts, and how far the figures can be believed."""
    return (*facts(host), *stability([ns for outcome in outcomes for ns in outcome.reference_ns]))


def stability(reference_ns: Sequence[float]) -> tuple[str, ...]:
    """How much a fixed computation, timed between the blocks as they are, varied; and what that means."""
    if not reference_ns:
        return ("stability: not known; nothing was timed in a loop",)
    off, far = spread(reference_ns), wild(reference_ns)
    word = next((word for limit, word in STABLE if off <= limit), "POOR: believe the ratios, not the times")
    tails = "p99 and max are the machine's" if far > WILD_MAX else "p99 is ours, max may be the machine's"
    return (
        f"stability of medians: {word} (half of {len(reference_ns):,} samples of a fixed computation "
        f"were {off:.1%} off their median, or more)",
        f"stability of tails: {tails} ({far:.1%} of them took twice that, or more)",
    )


def text(host: Host, outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any]) -> str:
    """All suites as aligned text; what it comes to at the end, where a terminal stands then."""
    lines = [line for fact in header(host, outcomes.values()) for line in wrapped(fact, "")]
    for name, outcome in outcomes.items():
        for section in sections(outcome.tables):
            if section.title:
                lines += ["", *wrapped(f"{name}: {section.title}", "")]
                lines += [line for remark in section.common for line in wrapped(remark, "    ")]
            for table in section.tables:
                lines += [""] if section.title else ["", *wrapped(f"{name}: {table.title}", "")]
                lines += aligned(_grid(table, budgets))
                lines += [line for remark in _own(table, section) for line in wrapped(remark, "    ")]
        lines += [line for why in _skipped(outcome) for line in ("", *wrapped(f"not measured: {why}", ""))]
    lines += ["", *LEGEND, ""]
    if len(grid := summary_grid(outcomes, budgets)) > 1:
        lines += [*aligned([row[:-1] for row in grid]), ""]
    return "\n".join([*lines, *wrapped(summary(outcomes, budgets), "")]) + "\n"


def markdown(
    host: Host, outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any], plot: Path | None = None
) -> str:
    """The same as a page of Markdown. It begins with what it comes to, and ends with the plot beside it."""
    lines = ["# Performance", "", "`make bench-doc` measures again, and writes this page anew.", ""]
    lines += [*_list(header(host, outcomes.values())), "", "## What it comes to", ""]
    lines += [summary(outcomes, budgets), ""]
    if len(grid := summary_grid(outcomes, budgets)) > 1:
        lines += [*markdown_table(grid), ""]
    lines += _list(LEGEND)
    for name, outcome in outcomes.items():
        lines += ["", f"## {name}"]
        for section in sections(outcome.tables):
            lines += ["", f"### {section.title}"] if section.title else []
            lines += ["", *_list(section.common)] if section.common else []
            for table in section.tables:
                lines += [""] if section.title else ["", f"### {table.title}", ""]
                lines += markdown_table(_grid(table, budgets))
                own = [*_own(table, section)]
                lines += ["", *_list(own)] if own else []
        lines += [line for why in _skipped(outcome) for line in ("", f"Not measured: {why}")]
    if plot:
        lines += ["", "## Distributions and curves", "", f"![All that has a shape]({plot.name})"]
    return "\n".join(lines) + "\n"


def _list(points: Iterable[str]) -> Iterator[str]:
    return (f"- {point}" for point in points)


def markdown_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first row as headings; all columns but the first to the right."""
    heading, *others = (f"| {' | '.join(row)} |" for row in rows)
    yield heading
    yield "|---" + "|---:" * (len(rows[0]) - 1) + "|"
    yield from others


def summary(outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any]) -> str:
    """How many budgets were met, and which were not."""
    stands = {row.key: held.met for row, held in _held(outcomes, budgets)}
    over = [key for key, met in stands.items() if met is False]
    unsure = [key for key, met in stands.items() if met is None]
    said = f"budgets: {len(stands) - len(over) - len(unsure)} met, {len(over)} over"
    said += f": {', '.join(over)}" if over else ""
    return said + (f"; {len(unsure)} unsure: {', '.join(unsure)}" if unsure else "")


def summary_grid(outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line for each figure that has a budget; why it is so much stands last."""
    rows = [
        (row.key, held.text, held.found, VERDICTS[held.met], held.why)
        for row, held in _held(outcomes, budgets)
    ]
    return [("", "budget", "measured", "", "because"), *rows]


def _held(outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any]) -> Iterator[tuple[Row, Verdict]]:
    rows = (row for outcome in outcomes.values() for table in outcome.tables for row in table.rows)
    return ((row, held) for row in rows if (held := verdict(row, budgets)).text)


def _skipped(outcome: Outcome) -> Iterable[str]:
    return dict.fromkeys(outcome.skipped)


def _grid(table: Table, budgets: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Headings and rows; a column in which nothing stands is left out."""
    names = short(_labels(table))
    cells = ((name, *_cells(row, budgets)) for name, row in zip(names, table.rows, strict=True))
    first = "median" if any(len(row.values) > 1 for row in table.rows) else "figure"
    grid = [(table.title if table.section else "", first, *HEADINGS), *cells]
    used = [column == 0 or any(row[column] for row in grid[1:]) for column in range(len(grid[0]))]
    return [tuple(cell for cell, is_used in zip(row, used, strict=True) if is_used) for row in grid]


def _cells(row: Row, budgets: Mapping[str, Any]) -> tuple[str, ...]:
    single = len(row.values) == 1
    budget = verdict(row, budgets)
    return (
        quantity(row.median.median, row.unit),
        "" if single else bounds(row.median, row.unit),
        "" if row.p99 is None else quantity(row.p99, row.unit),
        "" if single else quantity(row.max, row.unit),
        f"{digits(row.ratio.median, 's')}x" if row.ratio else "",
        "" if row.memory is None else quantity(row.memory, "B"),
        budget.text,
        VERDICTS[budget.met] if budget.text else "",
    )


def _labels(table: Table) -> list[str]:
    return [row.label for row in table.rows]


def _own(table: Table, section: Section) -> Iterator[str]:
    """Below a table: how much less ours takes than the others, and what was not said above."""
    if compared := comparison(table):
        yield compared
    yield from (remark for remark in _remarks(table) if remark not in section.common)


def _remarks(table: Table) -> list[str]:
    """What the ratios are to, what each contender is, and the notes."""
    labels = _labels(table)
    kinds = [
        label
        for label, name in zip(labels, short(labels), strict=True)
        if label not in {name, table.reference}
    ]
    return [*([f"ratio to {table.reference}"] if table.reference else []), *kinds, *table.notes]


def comparison(table: Table) -> str:
    """``core: 4.1x less than good Python, 5.2x less than psutil 7.2.2``; empty if there is no race of ours.

    The floor is left out: nobody can use it instead.
    """
    kinds = {row.key.rpartition(".")[2]: row for row in table.rows}
    ours = kinds.pop(OURS, None)
    kinds.pop(FLOOR, None)
    if ours is None or not table.reference or not kinds:
        return ""
    stated = (
        f"{times(_to_reference(row) / _to_reference(ours))} than {_name(row.label)}" for row in kinds.values()
    )
    return f"{_name(ours.label)}: {', '.join(stated)}"


def _name(label: str) -> str:
    return short([label])[0]


def _to_reference(row: Row) -> float:
    return row.ratio.median if row.ratio else 1.0


def times(factor: float) -> str:
    """``13x less``, ``1.4x more``: how ours stands to something that takes ``factor`` times as much."""
    big = max(factor, 1 / factor)
    return f"{big:.{0 if big >= 10 else 1}f}x {'less' if factor >= 1 else 'more'}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *rest in rows:
        cells = "  ".join(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield f"  {first.ljust(widths[0])}  {cells}".rstrip()


def wrapped(line: str, indent: str) -> list[str]:
    """In so many lines as it takes; all but the first are indented by two more."""
    return textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
