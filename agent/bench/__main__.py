"""``python -m agent.bench``: measures this machine, and says what it found.

Exit status: 0 if everything was measured, whatever the figures are; 1 if something went wrong.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Final

from agent.bench import budgets, counts, pyperf, report
from agent.bench.effort import FULL, QUICK, Effort
from agent.bench.host import host
from agent.bench.result import Outcome, Unmeasured
from agent.bench.suites import decide, detect, encode, idle, poll

SUITES: Final[Mapping[str, Callable[[Effort], Outcome]]] = {
    "poll": poll.run,
    "decide": decide.run,
    "encode": encode.run,
    "detect": detect.run,
    "idle": idle.run,
}


def main() -> int:
    """Parse, measure, print."""
    args = _parser().parse_args()
    try:
        return _record() if args.record else _measure(args)
    except Unmeasured as error:
        print(f"python -m agent.bench: {error}", file=sys.stderr)
        return 1


def _measure(args: argparse.Namespace) -> int:
    machine = host()
    outcomes = {}
    for name in args.suite or SUITES:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        outcomes[name] = SUITES[name](QUICK if args.quick else FULL)
    if args.json:
        print(pyperf.suite(machine, outcomes))
    else:
        show = report.markdown if args.md else report.text
        print(show(machine, outcomes, budgets.load()), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agent.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under 20 s in all")
    parser.add_argument(
        "--suite", action="append", choices=SUITES, help="only this one; may be given again (default: all)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="pyperf's JSON on standard output, nothing else")
    form.add_argument("--md", action="store_true", help="Markdown")
    form.add_argument(
        "--record",
        action="store_true",
        help="write this compiler's instruction counts of the C core into benchmarks/budgets.toml",
    )
    return parser


def _record() -> int:
    root = budgets.checkout()
    if root is None:
        print("--record: not in a checkout; there is no benchmarks/budgets.toml to write", file=sys.stderr)
        return 1
    table, values = counts.record(root)
    path = root / budgets.FILE
    path.write_text(budgets.with_table(path.read_text(), table, values))
    print(f"{path}: [{table}] {values}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
