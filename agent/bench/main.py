"""Benchmarks of the agent on this machine.

Exit status of ``python -m agent.bench``: 0 if all suites ran (with --check: if all budgets are met); 1 if a
budget was missed or a suite failed, in which case the other results are printed; 2 for invalid options; 74
if the output could not be written, 141 if its reader closed it, 130 after Ctrl-C.
"""

import argparse
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import agent
from agent.bench import report, revisions
from agent.bench.guards import KINDS, measure_compiler_baselines, run_check, select_guards
from agent.bench.report import read_host
from agent.bench.result import (
    BUDGETS_FILE,
    FULL,
    NS_PER_S,
    QUICK,
    MeasurementError,
    RunSize,
    SuiteOutcome,
    find_checkout,
    load_budgets,
    replace_table,
)
from agent.bench.suites import detect, idle, poll, report_path, scale, soak
from agent.config.values import parse_duration
from agent.errors import OutputError, OutputPipeClosed, unwrap_error
from agent.system.output import print_last_error

SUITES: Final[Mapping[str, Callable[[RunSize], SuiteOutcome]]] = {
    "poll": poll.run,
    "decide": report_path.run_decide,
    "encode": report_path.run_encode,
    "publish": report_path.run_publish,
    "detect": detect.run,
    "trace": detect.run_trace,
    "idle": idle.run,
    "startup": idle.run_startup,
    "scale": scale.run,
    "soak": soak.run,
}
LONG_SUITES: Final = frozenset({"soak"})
"""Suites that run only if --suite names them."""
PACKAGE: Final = Path(agent.__file__).parent
MISSED: Final = 1
UNREAD: Final = 128 + signal.SIGPIPE
TERMINATED: Final = 128 + signal.SIGTERM


def main() -> int:
    """Parse the command line, measure, and print the report; return the exit status."""
    # SystemExit unwinds context managers, which remove trees and stop processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        args = _parse_arguments()
        try:
            return _run(args)
        except MeasurementError as error:
            _print_failure(str(error), error, args)
            return MISSED
    except OutputPipeClosed:
        return UNREAD
    except OutputError as error:
        print_last_error(f"python -m agent.bench: {error}")
        return os.EX_IOERR


def _run(args: argparse.Namespace) -> int:
    if args.check is not None:
        return 0 if run_check(_require_checkout("--check"), args.check) else MISSED
    if args.plot:
        _check_matplotlib()
    if args.peers:
        _require_checkout("--peers")
    if args.record:
        return _write_baselines(_require_checkout("--record"))
    return _print_comparison(args) if args.against else _run_suites(args)


def _run_suites(args: argparse.Namespace) -> int:
    host, limits = read_host(), load_budgets()
    run_size = replace(QUICK if args.quick else FULL, peers=args.peers)
    if args.soak_ns is not None:
        run_size = replace(run_size, soak_s=args.soak_ns / NS_PER_S)
    plots = args.plot and (args.plot, args.plot.with_stem(f"{args.plot.stem}-distributions"))
    outcomes = {}
    failed = False
    for name in args.suite or _default_suites():
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        try:
            outcomes[name] = SUITES[name](run_size)
        except OutputError:
            raise
        except Exception as error:  # the results of the other suites remain valid
            _print_failure(f"{name}: {describe_error(error)}", error, args)
            outcomes[name] = SuiteOutcome(skipped=[f"{name}: entire suite, which failed"])
            failed = True
    if args.json:
        print(report.pyperf_document(host, outcomes))
    elif args.md:
        print(report.markdown_report(host, outcomes, limits, plots), end="")
    else:
        print(report.text_report(host, outcomes, limits), end="")
    if plots:
        from agent.bench.plot import plot_overview, plot_suites

        _write_file(plots[0], plot_overview(report.header_lines(host, outcomes.values()), outcomes, limits))
        _write_file(plots[1], plot_suites(outcomes, limits))
    return MISSED if failed else 0


def describe_error(error: BaseException) -> str:
    """Return an exception as one line: its text if it states a cause, else also its type and its place."""
    cause = unwrap_error(error)
    text = " ".join(str(cause).split())
    if isinstance(cause, MeasurementError):
        return text
    frames = [*traceback.extract_tb(error.__traceback__), *traceback.extract_tb(cause.__traceback__)]
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in own[-1:])
    return f"{type(cause).__name__}{': ' if text else ''}{text}{place}"


def _print_failure(text: str, error: BaseException, args: argparse.Namespace) -> None:
    """Print the reason of a failure in a line. With --verbose, also the traceback and programs' output."""
    has_more = not isinstance(error, MeasurementError) or hasattr(error, "__notes__")
    hint = "; --verbose prints more" if has_more and not args.verbose else ""
    print(f"python -m agent.bench: {text}{hint}", file=sys.stderr)
    if args.verbose:
        traceback.print_exception(error)


def _print_comparison(args: argparse.Namespace) -> int:
    turns = revisions.QUICK_TURNS if args.quick else revisions.FULL_TURNS
    host = read_host()
    comparison = revisions.compare_revisions(
        _require_checkout("--against"), args.against, args.suite or _default_suites(), turns
    )
    format_comparison = revisions.comparison_markdown if args.md else revisions.comparison_text
    print(format_comparison(host, comparison), end="")
    if args.plot:
        from agent.bench.plot import plot_comparison

        _write_file(args.plot, plot_comparison(comparison))
    return 0


def _default_suites() -> tuple[str, ...]:
    return tuple(name for name in SUITES if name not in LONG_SUITES)


def _write_baselines(root: Path) -> int:
    table, values = measure_compiler_baselines(root)
    path = root / BUDGETS_FILE
    _write_file(path, replace_table(path.read_text(), table, values))
    print(f"{path}: [{table}] {values}")
    return 0


def _check_matplotlib() -> None:
    """Raise MeasurementError before any suite runs if the plot could not be drawn afterwards."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MeasurementError("--plot: matplotlib is not installed; run: pip install 'drahealth[bench]'")


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise MeasurementError(f"file {path}: {error.strerror}") from None


def _require_checkout(option: str) -> Path:
    root = find_checkout()
    if root is None:
        raise MeasurementError(f"{option} needs a checkout; an installed package has no benchmarks/")
    return root


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m agent.bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: under 20 s in total; with --against, fewer runs"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print traceback, log of the agent and output of programs if a measurement fails",
    )
    parser.add_argument(
        "--suite",
        action="append",
        choices=SUITES,
        help="run this suite only; repeatable (default: all but soak)",
    )
    parser.add_argument(
        "--for",
        dest="soak_ns",
        type=_duration_ns,
        metavar="DURATION",
        help="duration of suite soak, such as 10m (default: 1h, with --quick 12s)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="plot an overview, and all distributions and curves in FILE-distributions.svg; "
        "needs matplotlib: pip install 'drahealth[bench]'",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also measure the other node agents of benchmarks/peers.toml that are in PATH, and print "
        "published figures of those that are not",
    )
    parser.add_argument(
        "--against",
        metavar="REF",
        help="compare with another git revision, measured in turns with this tree (quick runs)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print only JSON, for pyperf compare_to")
    form.add_argument("--md", action="store_true", help="print Markdown")
    form.add_argument(
        "--check",
        nargs="*",
        metavar="GUARD",
        help=f"compare this checkout with {BUDGETS_FILE}; exit 1 on a miss. Default: all guards; GUARD is a "
        f"table ({', '.join(KINDS)}) or one guard (system_calls.pass)",
    )
    form.add_argument(
        "--record",
        action="store_true",
        help="write this compiler's instruction counts of the C core into benchmarks/budgets.toml",
    )
    args = parser.parse_args()
    if args.check is not None:
        try:
            args.check = select_guards(args.check)
        except LookupError as error:
            parser.error(str(error))
    if args.soak_ns is not None and "soak" not in (args.suite or ()):
        parser.error("--for is the duration of suite soak: it needs --suite soak")
    exclusive = "--check" if args.check is not None else "--record" if args.record else ""
    if exclusive and (args.quick or args.suite or args.plot or args.against or args.peers):
        parser.error(
            f"{exclusive} measures no suite: give it without --quick, --suite, --plot, --peers and --against"
        )
    if args.peers and (args.against or (args.suite and "idle" not in args.suite)):
        parser.error("--peers belongs to the suite idle, and cannot be combined with --against")
    if args.json and args.against:
        parser.error("--json cannot be combined with --against")
    return args


def _duration_ns(text: str) -> int:
    try:
        duration_ns = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if duration_ns <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive duration; give one such as 10m")
    return duration_ns


if __name__ == "__main__":
    sys.exit(main())
