"""The tables, for people: aligned text for a terminal of 100 columns, or Markdown.

Judges nothing but how stable the run was; what a figure is held to says ``budgets.py``.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent.bench.budgets import verdict
from agent.bench.host import Host
from agent.bench.result import Outcome, Row, Table, bounds, digits, quantity, short
from agent.bench.timing import variation

WIDTH: Final = 100
HEADINGS: Final = ("median", "95 % interval", "p99", "max", "ratio", "memory", "budget", "")
STABLE: Final = ((0.02, "good"), (0.05, "fair"))
VERDICTS: Final[Mapping[bool | None, str]] = {True: "ok", False: "OVER", None: "unsure"}
OURS: Final = "core"
FLOOR: Final = "floor"
LEGEND: Final = (
    "ratio: the median of the ratios within each round, in which all took their turn",
    "memory: what Python's allocator had to find at once for one call",
    "budget: the most that the ratio, or the figure on this machine, should be",
)


def facts(host: Host) -> tuple[str, str]:
    """What was measured, and on what."""
    return (
        f"drahealth bench {host.version}, {host.date}; core: {host.compiler} {host.flags}",
        f"{host.cpu}, {host.cpus} CPUs, governor {host.governor}, load {host.load}; kernel {host.kernel}, "
        f"Python {host.python}",
    )


def header(host: Host, outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """The facts, and how far the figures can be believed."""
    return (*facts(host), stability([ns for outcome in outcomes for ns in outcome.reference_ns]))


def stability(reference_ns: Sequence[float]) -> str:
    """How much a fixed computation, timed between the blocks, varied."""
    if not reference_ns:
        return "stability: not known; nothing was timed in a loop"
    cv = variation(reference_ns)
    word = next((word for limit, word in STABLE if cv <= limit), "POOR: believe the ratios, not the times")
    return f"stability: {word} (a fixed computation varied by {cv:.1%} CV over {len(reference_ns)} rounds)"


def text(host: Host, outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any]) -> str:
    """All suites as aligned text."""
    lines = [line for fact in header(host, outcomes.values()) for line in wrapped(fact, "")]
    for name, outcome in outcomes.items():
        for table in outcome.tables:
            lines += ["", *wrapped(f"{name}: {table.title}", "")]
            lines += aligned(_grid(table, budgets))
            lines += [line for remark in _remarks(table) for line in wrapped(remark, "    ")]
        lines += [line for why in _skipped(outcome) for line in ("", *wrapped(f"not measured: {why}", ""))]
    lines += ["", *LEGEND, "", *wrapped(summary(outcomes, budgets), "")]
    return "\n".join(lines) + "\n"


def markdown(
    host: Host, outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any], plot: Path | None = None
) -> str:
    """The same as Markdown: a page, with a plot that lies beside it."""
    lines = ["# Performance", "", "`make bench-doc` measures again, and writes this page anew.", ""]
    lines += [*_list(header(host, outcomes.values())), "", summary(outcomes, budgets), "", *_list(LEGEND)]
    lines += ["", f"![Distributions and curves of the figures below]({plot.name})"] if plot else []
    for name, outcome in outcomes.items():
        lines += ["", f"## {name}"]
        for table in outcome.tables:
            lines += ["", f"### {table.title}", "", *markdown_table(_grid(table, budgets))]
            lines += ["", *_list(_remarks(table))]
        lines += [line for why in _skipped(outcome) for line in ("", f"Not measured: {why}")]
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
    rows = [row for outcome in outcomes.values() for table in outcome.tables for row in table.rows]
    stands = {row.key: held for row in rows if (held := verdict(row, budgets)).text}
    over = [key for key, held in stands.items() if held.met is False]
    unsure = [key for key, held in stands.items() if held.met is None]
    said = f"budgets: {len(stands) - len(over) - len(unsure)} met, {len(over)} over"
    said += f": {', '.join(over)}" if over else ""
    return said + (f"; {len(unsure)} unsure: {', '.join(unsure)}" if unsure else "")


def _skipped(outcome: Outcome) -> Iterable[str]:
    return dict.fromkeys(outcome.skipped)


def _grid(table: Table, budgets: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Headings and rows; a column in which nothing stands is left out."""
    names = short([row.label for row in table.rows])
    cells = ((name, *_cells(row, budgets)) for name, row in zip(names, table.rows, strict=True))
    grid = [("", *HEADINGS), *cells]
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


def _remarks(table: Table) -> Iterator[str]:
    """Below a table: how much less ours takes than the others, what each of them is, and the notes."""
    if compared := comparison(table):
        yield compared
    if table.reference:
        yield f"ratio to {table.reference}"
    labels = [row.label for row in table.rows]
    for label, name in zip(labels, short(labels), strict=True):
        if label not in {name, table.reference}:
            yield label
    yield from table.notes


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
        f"{times(_to_reference(row) / _to_reference(ours))} than {_name(row)}" for row in kinds.values()
    )
    return f"{_name(ours)}: {', '.join(stated)}"


def _name(row: Row) -> str:
    return short([row.label])[0]


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
