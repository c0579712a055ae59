"""``benchmarks/budgets.toml``: ratios and exact counts to hold the agent to, and goals that are only printed.

Absolute times are never gated: they are the machine's. Read from the checkout; an installed package has none.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import agent
from agent.bench.result import Row, quantity
from agent.bench.timing import Interval

FILE: Final = "benchmarks/budgets.toml"


class Verdict(NamedTuple):
    """How a row stands to its budget."""

    text: str
    """The budget in words, ``1.10x`` or ``p99 1.20 ms``, which is at most that; empty if there is none."""
    met: bool | None
    """None: there is no budget, or the figure is not sure enough to tell."""


def checkout() -> Path | None:
    """The source tree that this package is imported from, if it is one."""
    root = Path(agent.__file__).resolve().parents[1]
    return root if (root / FILE).exists() else None


def load(root: Path | None = None) -> Mapping[str, Any]:
    """The tables of a checkout, or of the one that this is; empty outside of any."""
    root = root or checkout()
    return tomllib.loads((root / FILE).read_text()) if root else {}


def verdict(row: Row, budgets: Mapping[str, Any]) -> Verdict:
    """Hold a row to its ratio, else to its goal; ``median``, ``p99`` or ``max`` in the row's unit.

    A ratio is met if it is not above, and missed if its whole confidence interval is.
    """
    ratio = budgets.get("ratio", {}).get(row.key)
    if ratio is not None and row.ratio:
        return Verdict(f"{ratio:.2f}x", _met(row.ratio, ratio))
    goal = budgets.get("goal", {}).get(row.key)
    if goal is None:
        return Verdict("", None)
    found = {"median": row.median.median, "p99": row.p99, "max": row.max}
    (name, limit), value = next(iter(goal.items())), found[next(iter(goal))]
    text = f"{'' if name == 'median' else name + ' '}{quantity(limit, row.unit)}"
    return Verdict(text, None if value is None else value <= limit)


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
