"""Command that prints the faults: ``python -m tests.faults --list`` or ``--markdown``."""

import argparse
import sys

from . import markdown, read_faults


def main() -> None:
    """Print one line per fault, or docs/reliability.md."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description="Print the faults of the tests."
    )
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--list", action="store_true", help="one line per fault")
    form.add_argument("--markdown", action="store_true", help="the text of docs/reliability.md")
    args = parser.parse_args()
    if args.markdown:
        sys.stdout.write(markdown(read_faults()))
        return
    for fault in read_faults():
        sys.stdout.write(f"{fault.theme}: {fault.injected}: {fault.promise} ({fault.test})\n")


main()
