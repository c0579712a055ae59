"""What ``--against`` found, for people: a line for each figure, and how many would differ by chance."""

from collections.abc import Iterator
from typing import Final

from agent.bench.against import P_MAX, SHOWS_FROM, Compared, Comparison
from agent.bench.host import Host
from agent.bench.report import aligned, facts, markdown_table, wrapped
from agent.bench.result import quantity

HEADINGS: Final = ("", "before", "this tree", "change", "95 % interval", "more in", "p", "")


def text(host: Host, found: Comparison) -> str:
    """As aligned text."""
    lines = [line for fact in (*facts(host), title(found)) for line in wrapped(fact, "")]
    lines += ["", *aligned([HEADINGS, *map(_cells, found.figures)]), ""]
    lines += [line for remark in _remarks(found) for line in wrapped(remark, "")]
    return "\n".join(lines) + "\n"


def markdown(host: Host, found: Comparison) -> str:
    """The same as Markdown."""
    lines = [f"- {line}" for line in (*facts(host), title(found))]
    lines += ["", *markdown_table([HEADINGS, *map(_cells, found.figures)])]
    lines += ["", *(f"- {remark}" for remark in _remarks(found))]
    return "\n".join(lines) + "\n"


def title(found: Comparison) -> str:
    """What was compared, and how."""
    return f"before: {found.before}; {2 * found.turns} pairs of quick runs, in the order A B B A"


def _cells(one: Compared) -> tuple[str, ...]:
    before, after = one.medians
    low, middle, high = one.ratio
    return (
        one.key,
        quantity(before, one.unit),
        quantity(after, one.unit),
        f"{middle - 1:+.1%}",
        f"[{low - 1:+.1%}, {high - 1:+.1%}]",
        f"{sum(pair > 1 for pair in one.pairs)} of {len(one.pairs)}",
        f"{one.p:.3f}",
        one.verdict,
    )


def _remarks(found: Comparison) -> Iterator[str]:
    differ = [one for one in found.figures if one.verdict]
    yield (
        f"{len(differ)} of {len(found.figures)} figures differ, by {SHOWS_FROM:.0%} at least and by the sign "
        f"test (p <= {P_MAX:g}); if nothing had changed, about {P_MAX * len(found.figures):.1f} might seem to"
    )
    yield from found.skipped
