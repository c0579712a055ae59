"""The tables, for people: aligned text, or Markdown. Judges nothing but how stable the run was."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from agent.bench.budgets import verdict
from agent.bench.host import Host
from agent.bench.result import Outcome, Row, quantity
from agent.bench.timing import variation

HEADINGS: Final = ("median", "95 % CI", "p99", "max", "ratio", "budget", "")
STABLE: Final = ((0.02, "good"), (0.05, "fair"))
VERDICTS: Final[Mapping[bool | None, str]] = {True: "ok", False: "OVER", None: ""}


def header(host: Host, outcomes: Iterable[Outcome]) -> Iterator[str]:
    """What was measured on, and how far it can be believed."""
    yield f"drahealth bench {host.version}   core: {host.compiler} {host.flags}   Python {host.python}"
    yield (
        f"host: {host.cpu}, {host.cpus} CPUs, governor {host.governor}, "
        f"kernel {host.kernel}, load {host.load}"
    )
    yield stability([ns for outcome in outcomes for ns in outcome.reference_ns])


def stability(reference_ns: Sequence[float]) -> str:
    """How much a fixed computation, timed between the blocks, varied."""
    if not reference_ns:
        return "stability: not known; nothing was timed in a loop"
    cv = variation(reference_ns)
    word = next((word for limit, word in STABLE if cv <= limit), "POOR: believe the ratios, not the times")
    return f"stability: {word} (a fixed computation varied by {cv:.1%} CV over {len(reference_ns)} rounds)"


def text(host: Host, outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any]) -> str:
    """All suites as aligned text."""
    lines = list(header(host, outcomes.values()))
    for name, outcome in outcomes.items():
        for table in outcome.tables:
            lines += ["", f"{name}: {table.title}"]
            lines += _aligned([("", *HEADINGS), *(_cells(row, budgets) for row in table.rows)])
            lines += [f"    ratio to: {table.reference}"] if table.reference else []
            lines += [f"    {note}" for note in table.notes]
        lines += [f"\nnot measured: {why}" for why in dict.fromkeys(outcome.skipped)]
    return "\n".join(lines) + "\n"


def markdown(host: Host, outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any]) -> str:
    """The same as Markdown."""
    lines = [f"{line}  " for line in header(host, outcomes.values())]
    for name, outcome in outcomes.items():
        for table in outcome.tables:
            lines += ["", f"### {name}: {table.title}", "", f"| | {' | '.join(HEADINGS)} |", "|---" * 8 + "|"]
            lines += [f"| {' | '.join(_cells(row, budgets))} |" for row in table.rows]
            notes = [f"ratio to: {table.reference}"] if table.reference else []
            lines += ["", "; ".join([*notes, *table.notes])] if notes or table.notes else []
        lines += [f"\nNot measured: {why}" for why in dict.fromkeys(outcome.skipped)]
    return "\n".join(lines) + "\n"


def _cells(row: Row, budgets: Mapping[str, Any]) -> tuple[str, ...]:
    single = len(row.values) == 1
    low, median, high = row.median
    budget = verdict(row, budgets)
    return (
        row.label,
        quantity(median, row.unit),
        "" if single else f"[{quantity(low, row.unit)}, {quantity(high, row.unit)}]",
        "" if row.p99 is None else quantity(row.p99, row.unit),
        "" if single else quantity(row.max, row.unit),
        f"{row.ratio.median:.2f}x" if row.ratio else "",
        budget.text,
        VERDICTS[budget.met],
    )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *rest in rows:
        cells = "  ".join(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield f"  {first.ljust(widths[0])}  {cells}".rstrip()
