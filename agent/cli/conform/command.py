"""``drahealth conform``: acts as a kubelet towards a DRA driver, and checks the driver."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.output.terminal import style_of
from agent.cli.output.text import clean
from agent.cli.verb import Verb, add_colour
from agent.config.config import KUBELET_DIR
from agent.config.values import S, format_duration, parse_duration
from agent.conform.observed import LEAST_S, MOST_S
from agent.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.conform.kubelet.session import SessionOptions

HELP: Final = "try 'drahealth conform --help'"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        type=Path,
        help="service socket of the driver (default: the registered one)",
    )
    parser.add_argument(
        "--plugin-dir",
        metavar="DIR",
        type=Path,
        help="also check registration, in the kubelet's plugins_registry or a directory like it",
    )
    parser.add_argument("--driver", metavar="NAME", help="the driver to check, if several are registered")
    parser.add_argument(
        "--kubelet-dir",
        metavar="DIR",
        type=Path,
        default=KUBELET_DIR,
        help=f"directory that must contain the endpoints (default: {KUBELET_DIR})",
    )
    parser.add_argument(
        "--for",
        dest="window",
        metavar="TIME",
        default="40s",
        help=f"how long to record, {LEAST_S}s to {MOST_S // 60}m (default: 40s, more than the default lease)",
    )
    parser.add_argument(
        "--refuse",
        action="store_true",
        help="report a failed registration once; some drivers exit then, so do not use it in production",
    )
    parser.add_argument("--checks", action="store_true", help="list the checks instead; needs no driver")
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "markdown"),
        default="table",
        help="output format; markdown only with --checks (default: table)",
    )
    add_colour(parser)


def main(args: Namespace) -> int:
    style = style_of(sys.stdout, args.color, os.environ)
    if args.checks:
        from agent.cli.conform.text import checks_document, render_checks, render_checks_markdown
        from agent.conform.table import CHECKS

        match args.output:
            case "json":
                print(json.dumps(checks_document(CHECKS), indent=2))
            case "markdown":
                print(render_checks_markdown(CHECKS), end="")
            case _:
                print(render_checks(CHECKS, style), end="")
        return 0
    options = _session_options(args)
    import asyncio

    from agent.cli.conform.text import document, exit_of, render
    from agent.conform.kubelet.session import run_session
    from agent.conform.table import run_checks

    record = asyncio.run(run_session(options, lambda socket: _print_start(socket, options)))
    results = run_checks(record)
    if args.output == "json":
        print(json.dumps(document(record, results), indent=2))
    else:
        print(render(record, results, style), end="")
    return exit_of(results)


def _print_start(socket: str, options: SessionOptions) -> None:
    if sys.stderr.isatty():
        duration = format_duration(options.window_s * S)
        print(f"recording {clean(socket)} for {duration}, press Ctrl-C to stop", file=sys.stderr)


def _session_options(args: Namespace) -> SessionOptions:
    """Return the options of a session.

    Raises:
        UsageError: The flags contradict each other, or one is missing or out of range.
    """
    from agent.conform.kubelet.session import SessionOptions

    if args.output == "markdown":
        raise UsageError(f"-o markdown: only with --checks\n{HELP}")
    if args.socket is None and args.plugin_dir is None:
        raise UsageError(f"no driver is given: use --socket, --plugin-dir, or both\n{HELP}")
    if args.plugin_dir is None and (args.driver is not None or args.refuse):
        flag = "--refuse" if args.refuse else "--driver"
        raise UsageError(f"{flag} needs --plugin-dir\n{HELP}")
    try:
        window_s = parse_duration(args.window) / S
    except ValueError as error:
        raise UsageError(f"--for: {error}") from None
    if not LEAST_S <= window_s <= MOST_S:
        raise UsageError(f"--for: {args.window} is not between {LEAST_S}s and {MOST_S // 60}m")
    return SessionOptions(
        socket=_absolute(args.socket),
        plugin_dir=_absolute(args.plugin_dir),
        driver=args.driver or "",
        kubelet_dir=_absolute(args.kubelet_dir),
        window_s=window_s,
        refuse=args.refuse,
    )


def _absolute(path: Path | None) -> str:
    return os.path.abspath(path) if path is not None else ""


VERB = Verb(
    name="conform",
    summary="check the health service and registration of a DRA driver",
    description=(
        "Acts as a kubelet, 1.34 to 1.37, towards any DRA driver: opens health streams, calls "
        "GetInfo, reports that the driver is registered, prepares no claims. This is harmless to a driver in "
        "use, except with --refuse; a kubelet may be attached at the same time. Exits with 0 if all checks "
        "that could be run passed, 1 with a warning, 2 with a failure, 3 if no check could be run, 69 if the "
        "socket is not served."
    ),
    examples=(
        ("drahealth conform --socket /var/lib/kubelet/plugins/gpu.example.com/dra.sock", "health only"),
        (
            "drahealth conform --plugin-dir /var/lib/kubelet/plugins_registry --driver gpu.example.com",
            "registration and health",
        ),
    ),
    add_arguments=add_arguments,
    main=main,
)
