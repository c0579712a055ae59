"""Faults that tests inject into the agent and drivers: what is injected, the promise, and the test."""

from pathlib import Path
from typing import Final, NamedTuple

TABLE: Final = Path(__file__).with_name("faults.txt")


class Fault(NamedTuple):
    """One injected fault."""

    theme: str
    injected: str
    promise: str
    test: str
    """File below tests/ and function: ``test_daemon.py::test_...``."""


def read_faults() -> list[Fault]:
    """Return all faults of the table, in its order."""
    lines = TABLE.read_text("utf-8").splitlines()
    return [Fault(*(cell.strip() for cell in line.split("|"))) for line in lines if not line.startswith("#")]


def markdown(faults: list[Fault]) -> str:
    """Return docs/reliability.md."""
    lines = [
        "# Reliability",
        "",
        f"Each of these {len(faults)} faults is injected by a test, which shows the promise. Generated from",
        "`tests/faults/faults.txt` with `python -m tests.faults --markdown`.",
    ]
    for theme in dict.fromkeys(fault.theme for fault in faults):
        title = theme[0].upper() + theme[1:]
        lines += ["", f"## {title}", "", "| fault | promise | test |", "|---|---|---|"]
        lines += [
            f"| {one.injected} | {one.promise} | `{one.test}` |" for one in faults if one.theme == theme
        ]
    return "\n".join(lines) + "\n"
