"""Budgets of ``benchmarks/budgets.toml``: ratios and exact counts that ``--check`` enforces, and goals.

Goals, such as absolute times, depend on the machine: reports print them, and they fail no check. The file is
in the checkout only; an installed package has no budgets.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import agent
from agent.bench.result import ResultRow, Unit, format_value
from agent.bench.timing import MedianInterval

FILE: Final = "benchmarks/budgets.toml"
RATIO_REASON: Final = "ratio to the bare system calls that the work needs"


_FIGURES: Final[Mapping[str, Callable[[ResultRow], float | None]]] = {
    "median": lambda row: row.median.median,
    "p99": lambda row: row.p99,
    "max": lambda row: row.max,
}


class BudgetGoal(NamedTuple):
    """Upper limit of one statistic of a benchmark's result row, which a report prints."""

    statistic: str
    """Statistic that the goal limits: ``median``, ``p99`` or ``max``."""
    limit: float
    """Largest good value of the statistic, in the unit of the result row."""
    reason: str
    """Reason why the goal has this limit."""

    def describe(self, value: float, unit: Unit) -> str:
        """Format ``value`` after the statistic's name: ``p99 1.20 ms``; a median without: ``1.20 ms``."""
        return f"{'' if self.statistic == 'median' else self.statistic + ' '}{format_value(value, unit)}"


class BudgetVerdict(NamedTuple):
    """Result of comparing a result row of a benchmark with its budget."""

    text: str
    """Upper limit of the budget as text, ``1.10x`` or ``p99 1.20 ms``; empty without a budget."""
    met: bool | None
    """True: the row is within its budget. False: over budget.
    None: no budget, or undecided by the samples."""
    measured: str = ""
    """Figure that was measured, in the same form as the limit in ``text``."""
    reason: str = ""
    """Reason why the budget has this limit."""


def find_checkout() -> Path | None:
    """Return the root of the checkout that this package was imported from; None: it was installed."""
    root = Path(agent.__file__).resolve().parents[1]
    return root if (root / FILE).exists() else None


def load_budgets(root: Path | None = None) -> Mapping[str, Any]:
    """Load the budgets of ``root`` or of the current checkout; empty outside a checkout."""
    root = root or find_checkout()
    return tomllib.loads((root / FILE).read_text()) if root else {}


def evaluate_budget(row: ResultRow, budgets: Mapping[str, Any]) -> BudgetVerdict:
    """Compare a result row with the budget of its ratio or, if it has none, with the goal of its statistic.

    A ratio is met if its median is within the limit, and missed if its whole confidence interval is above.
    """
    ratio = budgets.get("ratio", {}).get(row.key)
    if ratio is not None and row.ratio:
        return BudgetVerdict(
            f"{ratio:.2f}x", _is_ratio_met(row.ratio, ratio), f"{row.ratio.median:.2f}x", RATIO_REASON
        )
    goal = find_goal(row, budgets)
    if goal is None:
        return BudgetVerdict("", None)
    value = _FIGURES[goal.statistic](row)
    measured = "too few samples" if value is None else goal.describe(value, row.unit)
    return BudgetVerdict(
        goal.describe(goal.limit, row.unit),
        None if value is None else value <= goal.limit,
        measured,
        goal.reason,
    )


def find_goal(row: ResultRow, budgets: Mapping[str, Any]) -> BudgetGoal | None:
    """Return the goal of a benchmark's result row; None: the row has no goal."""
    goal = budgets.get("goal", {}).get(row.key)
    if not goal:
        return None
    return next((BudgetGoal(name, goal[name], goal["why"]) for name in _FIGURES if name in goal), None)


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
