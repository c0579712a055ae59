"""Command that prints the faults and their tests: ``python -m tests.faults --list``."""

import argparse
import sys
from pathlib import Path

from . import (
    markdown,
    read_faults,
    read_figures,
    read_observers,
    read_results,
    read_seconds,
    save_runs,
    unproven_faults,
)


def main() -> None:
    """Print one line per fault, the tests, or docs/reliability.md."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description="Print the faults of the tests."
    )
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--list", action="store_true", help="one line per fault")
    form.add_argument("--tests", action="store_true", help="the tests, as arguments for pytest")
    form.add_argument(
        "--markdown",
        nargs="+",
        type=Path,
        metavar="JUNIT",
        help="docs/reliability.md, if every test passed; stores times and observers",
    )
    args = parser.parse_args()
    faults = read_faults()
    if args.markdown:
        if problems := unproven_faults(faults, read_results(args.markdown)):
            raise SystemExit("\n".join([*problems, f"{len(problems)} of {len(faults)} faults are not shown"]))
        seconds, observers = read_seconds(args.markdown), read_observers(args.markdown)
        save_runs(
            {fault.test: round(seconds[fault.test], 1) for fault in faults},
            {fault.test: observers[fault.test] for fault in faults},
        )
        sys.stdout.write(markdown(faults, read_figures()))
    elif args.tests:
        sys.stdout.write("".join(f"tests/{test}\n" for test in dict.fromkeys(fault.test for fault in faults)))
    else:
        for fault in faults:
            sys.stdout.write(f"{fault.theme}: {fault.injected}: {fault.promise} ({fault.test})\n")


main()
