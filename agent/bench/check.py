"""``--check``: every guard with its figure, its budget and a verdict; what a merge waits for."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent.bench import budgets
from agent.bench.guards import Guard, GuardResult, bench

WIDTH: Final = 100
VERDICTS: Final = {True: "ok", False: "MISS", None: "--"}


def check(root: Path, guards: Sequence[Guard]) -> bool:
    """Hold a checkout to its budgets; print each guard as soon as it is known.

    Returns:
        Whether none was missed. One that cannot be measured here is named, and not missed.

    Raises:
        Unmeasured: A tool failed, or a budget is not there.
    """
    missed, unmeasured = [], 0
    with bench(root, budgets.load(root)) as on:
        for guard in guards:
            at = guard.hold(on)
            missed += [str(guard)] if at.met is False else []
            unmeasured += at.met is None
            print(line(guard, at), flush=True)
    said = f"{len(guards)} guards: {len(guards) - len(missed) - unmeasured} hold, {len(missed)} missed"
    said += f", {unmeasured} not measured" if unmeasured else ""
    print(f"\n{said}{': ' if missed else ''}{', '.join(missed)}")
    return not missed


def line(guard: Guard, found: GuardResult) -> str:
    """``ok    bytes.health_8_devices    376``; the budget where it is another than the figure."""
    budget = f"; budget {found.budget}" if found.budget and found.budget != found.value else ""
    text = f"{VERDICTS[found.met]:4}  {guard!s:36}  {found.value}{budget}"
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * 8)
