"""``benchmarks/budgets.toml``: ratios and exact counts to hold the agent to, and goals that are only printed.

Absolute times are never gated: they are the machine's. Read from the checkout; an installed package has none.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import agent
from agent.bench.result import Row, Unit, quantity
from agent.bench.timing import Interval

FILE: Final = "benchmarks/budgets.toml"
RATIO_WHY: Final = "to the bare system calls that it cannot do without"


_FIGURES: Final[Mapping[str, Callable[[Row], float | None]]] = {
    "median": lambda row: row.median.median,
    "p99": lambda row: row.p99,
    "max": lambda row: row.max,
}


class Goal(NamedTuple):
    """The most that one figure of a row should be."""

    of: str
    """``median``, ``p99`` or ``max``."""
    limit: float
    """In the row's unit."""
    why: str
    """Why it is so much."""

    def words(self, value: float, unit: Unit) -> str:
        """A value of its kind: ``p99 1.20 ms``, and of a median ``1.20 ms``."""
        return f"{'' if self.of == 'median' else self.of + ' '}{quantity(value, unit)}"


class Verdict(NamedTuple):
    """How a row stands to its budget."""

    text: str
    """The budget in words, ``1.10x`` or ``p99 1.20 ms``, which is at most that; empty if there is none."""
    met: bool | None
    """None: there is no budget, or the figure is not sure enough to tell."""
    found: str = ""
    """What is held to it, in the same words."""
    why: str = ""
    """Why it is so much."""


def checkout() -> Path | None:
    """The source tree that this package is imported from, if it is one."""
    root = Path(agent.__file__).resolve().parents[1]
    return root if (root / FILE).exists() else None


def load(root: Path | None = None) -> Mapping[str, Any]:
    """The tables of a checkout, or of the one that this is; empty outside of any."""
    root = root or checkout()
    return tomllib.loads((root / FILE).read_text()) if root else {}


def verdict(row: Row, budgets: Mapping[str, Any]) -> Verdict:
    """Hold a row to its ratio, else to its goal.

    A ratio is met if it is not above, and missed if its whole confidence interval is.
    """
    ratio = budgets.get("ratio", {}).get(row.key)
    if ratio is not None and row.ratio:
        return Verdict(f"{ratio:.2f}x", _met(row.ratio, ratio), f"{row.ratio.median:.2f}x", RATIO_WHY)
    goal = goal_of(row, budgets)
    if goal is None:
        return Verdict("", None)
    value = _FIGURES[goal.of](row)
    found = "too few to tell" if value is None else goal.words(value, row.unit)
    return Verdict(
        goal.words(goal.limit, row.unit), None if value is None else value <= goal.limit, found, goal.why
    )


def goal_of(row: Row, budgets: Mapping[str, Any]) -> Goal | None:
    """The goal of a row, if it has one."""
    found = budgets.get("goal", {}).get(row.key)
    return (
        next((Goal(of, found[of], found["why"]) for of in _FIGURES if of in found), None) if found else None
    )


def _met(found: Interval, limit: float) -> bool | None:
    if found.median <= limit:
        return True
    return False if found.low > limit else None


def with_table(text: str, name: str, values: Mapping[str, float]) -> str:
    """The file's text with the table ``name`` replaced, or added at its end."""
    body = "".join(f"{key} = {value}\n" for key, value in values.items())
    table = f"[{name}]\n{body}"
    found = re.search(rf"^\[{re.escape(name)}\]\n(?:(?!\[|\n).*\n)*", text, re.M)
    if found:
        return text[: found.start()] + table + text[found.end() :]
    return text.rstrip("\n") + "\n\n" + table
