"""``drahealth conform``: checks a DRA driver for conformance by acting as a kubelet towards it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.output.text import clean
from agent.cli.verb import Subcommand, add_output, print_result
from agent.config.config import KUBELET_DIR
from agent.config.values import S, format_duration, parse_duration
from agent.conform.session_record import SESSION_MAX_S, SESSION_MIN_S
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
        help=f"how long to record, {SESSION_MIN_S}s to {SESSION_MAX_S // 60}m "
        "(default: 40s, more than the default lease)",
    )
    parser.add_argument(
        "--refuse",
        action="store_true",
        help="report a failed registration to the driver once; some drivers exit then: not for production",
    )
    parser.add_argument(
        "--no-notify",
        dest="notify",
        action="store_false",
        help="do not report to the driver that it is registered: without a kubelet, some drivers then begin "
        "their work and publish ResourceSlices",
    )
    parser.add_argument("--checks", action="store_true", help="list the checks instead; needs no driver")
    add_output(parser, markdown_with="--checks")


def main(args: Namespace) -> int:
    if args.checks:
        from agent.cli.conform.text import checks_document, render_checks, render_checks_markdown
        from agent.conform.check_table import CHECKS

        print_result(
            args,
            lambda: checks_document(CHECKS),
            lambda style: render_checks(CHECKS, style),
            lambda: render_checks_markdown(CHECKS),
        )
        return 0
    options = _session_options(args)
    import asyncio

    from agent.cli.conform.text import document, exit_of, render
    from agent.conform.check_table import run_checks
    from agent.conform.kubelet.session import run_session

    record = asyncio.run(run_session(options, lambda socket: _print_start(socket, options)))
    results = run_checks(record)
    print_result(args, lambda: document(record, results), lambda style: render(record, results, style))
    return exit_of(results)


def _print_start(socket: str, options: SessionOptions) -> None:
    if sys.stderr.isatty():
        duration = format_duration(options.window_s * S)
        print(f"recording {clean(socket)} for {duration}, press Ctrl-C to stop", file=sys.stderr)


def _session_options(args: Namespace) -> SessionOptions:
    """Return the options of the session with the driver, from the command line.

    Raises:
        UsageError: The flags contradict each other, or one is missing or out of range.
    """
    from agent.conform.kubelet.session import SessionOptions

    if args.output == "markdown":
        raise UsageError(f"-o markdown is only possible with --checks\n{HELP}")
    if args.socket is None and args.plugin_dir is None:
        raise UsageError(f"no driver is given: use --socket, --plugin-dir, or both\n{HELP}")
    if args.plugin_dir is None and (args.driver is not None or args.refuse):
        flag = "--refuse" if args.refuse else "--driver"
        raise UsageError(f"{flag} needs --plugin-dir\n{HELP}")
    if args.refuse and not args.notify:
        raise UsageError(f"--refuse and --no-notify exclude each other\n{HELP}")
    if args.plugin_dir is None and not args.notify:
        raise UsageError(f"--no-notify needs --plugin-dir\n{HELP}")
    try:
        window_s = parse_duration(args.window) / S
    except ValueError as error:
        raise UsageError(f"--for: {error}") from None
    if not SESSION_MIN_S <= window_s <= SESSION_MAX_S:
        raise UsageError(f"--for: {args.window} is not between {SESSION_MIN_S}s and {SESSION_MAX_S // 60}m")
    return SessionOptions(
        socket=_absolute(args.socket),
        plugin_dir=_absolute(args.plugin_dir),
        driver=args.driver or "",
        kubelet_dir=_absolute(args.kubelet_dir),
        window_s=window_s,
        refuse=args.refuse,
        notify=args.notify,
    )


def _absolute(path: Path | None) -> str:
    return os.path.abspath(path) if path is not None else ""


VERB = Subcommand(
    name="conform",
    summary="check the health service and registration of a DRA driver",
    description=(
        "Acts as a kubelet, 1.34 to 1.38, towards any DRA driver: opens health streams, calls "
        "GetInfo, reports that the driver is registered, prepares no claims. This is harmless to a driver in "
        "use, except with --refuse; a kubelet may be attached at the same time. Exits with 0 if all checks "
        "that the options include passed, 1 with a warning, 2 with a failure, 3 if a check could not be run, "
        "69 if the socket is not served."
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
