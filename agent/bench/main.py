"""Measures this machine, and says what it found: ``python -m agent.bench``.

Exit status: 0 if everything was measured, whatever the figures are, and with --check if every guard holds;
1 if a guard was missed, or something went wrong, and what could be measured is printed; 2 for options that
make no sense; 74 if the output could not be written, 141 if whoever read it closed it, 130 after Ctrl-C.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from agent.bench import against, budgets, counts, plot, pyperf, report, versus
from agent.bench.check import check
from agent.bench.effort import FULL, QUICK, Effort
from agent.bench.guards import KINDS, guards
from agent.bench.host import host
from agent.bench.result import Outcome, Unmeasured
from agent.bench.suites import decide, detect, encode, idle, poll, publish, scale, startup, trace
from agent.errors import OutputError, ReaderGone
from agent.system.output import say_last

SUITES: Final[Mapping[str, Callable[[Effort], Outcome]]] = {
    "poll": poll.run,
    "decide": decide.run,
    "encode": encode.run,
    "publish": publish.run,
    "detect": detect.run,
    "trace": trace.run,
    "idle": idle.run,
    "startup": startup.run,
    "scale": scale.run,
}
MISSED: Final = 1
INTERRUPTED: Final = 128 + signal.SIGINT
UNREAD: Final = 128 + signal.SIGPIPE
TERMINATED: Final = 128 + signal.SIGTERM


def main() -> int:
    """Parse, measure, print."""
    # as Ctrl-C does: what was made is removed, and what was started ends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        args = _arguments()
        if args.check is not None:
            return 0 if check(_checkout("--check"), args.check) else MISSED
        if args.record:
            return _record(_checkout("--record"))
        return _compare(args) if args.against else _measure(args)
    except Unmeasured as error:
        say_last(f"python -m agent.bench: {error}")
        return 1
    except ReaderGone:
        return UNREAD
    except OutputError as error:
        say_last(f"python -m agent.bench: {error}")
        return os.EX_IOERR
    except KeyboardInterrupt:
        return INTERRUPTED


def _measure(args: argparse.Namespace) -> int:
    machine, held_to = host(), budgets.load()
    outcomes = {}
    failed = False
    for name in args.suite or SUITES:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        try:
            outcomes[name] = SUITES[name](QUICK if args.quick else FULL)
        except Unmeasured as error:  # what the others found is not worth less for it
            print(f"python -m agent.bench: {name}: {error}", file=sys.stderr)
            outcomes[name] = Outcome(skipped=[f"{name}: all of it: {error}"])
            failed = True
    if args.json:
        print(pyperf.suite(machine, outcomes))
    elif args.md:
        print(report.markdown(machine, outcomes, held_to, args.plot), end="")
    else:
        print(report.text(machine, outcomes, held_to), end="")
    if args.plot:
        _write(args.plot, plot.plot(outcomes, held_to))
    return MISSED if failed else 0


def _compare(args: argparse.Namespace) -> int:
    turns = against.QUICK_TURNS if args.quick else against.FULL_TURNS
    machine = host()
    found = against.against(_checkout("--against"), args.against, args.suite or tuple(SUITES), turns)
    show = versus.markdown if args.md else versus.text
    print(show(machine, found), end="")
    if args.plot:
        _write(args.plot, plot.plot_comparison(found))
    return 0


def _record(root: Path) -> int:
    table, values = counts.record(root)
    path = root / budgets.FILE
    _write(path, budgets.with_table(path.read_text(), table, values))
    print(f"{path}: [{table}] {values}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise Unmeasured(f"{path}: {error.strerror}") from None


def _checkout(option: str) -> Path:
    root = budgets.checkout()
    if root is None:
        raise Unmeasured(f"{option}: not in a checkout; there is no {budgets.FILE}")
    return root


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m agent.bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: under 20 s in all; with --against, fewer turns"
    )
    parser.add_argument(
        "--suite", action="append", choices=SUITES, help="only this one; may be given again (default: all)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw what was measured")
    parser.add_argument(
        "--against",
        metavar="REF",
        help="measure a revision of git, too, in turns with this tree (quick runs), and compare",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="pyperf's JSON on standard output, nothing else")
    form.add_argument("--md", action="store_true", help="Markdown")
    form.add_argument(
        "--check",
        nargs="*",
        metavar="GUARD",
        help=f"hold this checkout to {budgets.FILE}; exit 1 on a miss. All of it, or only what is named: a "
        f"table ({', '.join(KINDS)}) or one of its figures (system_calls.pass)",
    )
    form.add_argument(
        "--record",
        action="store_true",
        help="write this compiler's instruction counts of the C core into benchmarks/budgets.toml",
    )
    args = parser.parse_args()
    if args.check is not None:
        try:
            args.check = guards(args.check)
        except LookupError as error:
            parser.error(str(error))
    alone = "--check" if args.check is not None else "--record" if args.record else ""
    if alone and (args.quick or args.suite or args.plot or args.against):
        parser.error(f"{alone} measures no suite: it goes with no --quick, --suite, --plot or --against")
    if args.json and args.against:
        parser.error("--json has no form for --against")
    return args


if __name__ == "__main__":
    sys.exit(main())
