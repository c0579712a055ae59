"""``drahealth conform``: plays the kubelet to any DRA driver, and says what a kubelet would make of it."""

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

    from agent.conform.kubelet.session import Wishes

HELP: Final = "try 'drahealth conform --help'"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        type=Path,
        help="the driver's service socket (default: as it is registered)",
    )
    parser.add_argument(
        "--plugin-dir",
        metavar="DIR",
        type=Path,
        help="look at registration, too: the kubelet's plugins_registry, or any directory of such sockets",
    )
    parser.add_argument("--driver", metavar="NAME", help="which one, if several are registered there")
    parser.add_argument(
        "--kubelet-dir",
        metavar="DIR",
        type=Path,
        default=KUBELET_DIR,
        help=f"where endpoints must be (default: {KUBELET_DIR})",
    )
    parser.add_argument(
        "--for",
        dest="window",
        metavar="TIME",
        default="40s",
        help=f"how long to listen, {LEAST_S}s to {MOST_S // 60}m (default: 40s, more than the usual lease)",
    )
    parser.add_argument(
        "--refuse",
        action="store_true",
        help="tell the driver once that it was not registered; some end then: not for one in use",
    )
    parser.add_argument("--checks", action="store_true", help="list all checks instead; needs no driver")
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "markdown"),
        default="table",
        help="markdown: of --checks only (default: table)",
    )
    add_colour(parser)


def main(args: Namespace) -> int:
    style = style_of(sys.stdout, args.color, os.environ)
    if args.checks:
        from agent.cli.conform.checks import checks_document, markdown, render_checks
        from agent.conform.table import CHECKS

        match args.output:
            case "json":
                print(json.dumps(checks_document(CHECKS), indent=2))
            case "markdown":
                print(markdown(CHECKS), end="")
            case _:
                print(render_checks(CHECKS, style), end="")
        return 0
    wishes = _wishes(args)
    import asyncio

    from agent.cli.conform.text import document, exit_of, render
    from agent.conform.kubelet import session as kubelet_part
    from agent.conform.results import judge

    seen = asyncio.run(kubelet_part.observe(wishes, lambda socket: _say(socket, wishes)))
    results = judge(seen)
    if args.output == "json":
        print(json.dumps(document(seen, results), indent=2))
    else:
        print(render(seen, results, style), end="")
    return exit_of(results)


def _say(socket: str, wishes: Wishes) -> None:
    if sys.stderr.isatty():
        how_long = format_duration(wishes.window_s * S)
        print(f"listening to {clean(socket)} for {how_long}, Ctrl-C ends", file=sys.stderr)


def _wishes(args: Namespace) -> Wishes:
    """Raises UsageError: what was asked for means nothing."""
    from agent.conform.kubelet.session import Wishes

    if args.output == "markdown":
        raise UsageError(f"-o markdown is for --checks\n{HELP}")
    if args.socket is None and args.plugin_dir is None:
        raise UsageError(f"which driver? give --socket, --plugin-dir, or both\n{HELP}")
    if args.plugin_dir is None and (args.driver is not None or args.refuse):
        flag = "--refuse" if args.refuse else "--driver"
        raise UsageError(f"{flag} is about registration: give --plugin-dir, too\n{HELP}")
    try:
        window_s = parse_duration(args.window) / S
    except ValueError as error:
        raise UsageError(f"--for: {error}") from None
    if not LEAST_S <= window_s <= MOST_S:
        raise UsageError(f"--for: {args.window} is not between {LEAST_S}s and {MOST_S // 60}m")
    return Wishes(
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
    summary="what a kubelet would make of a DRA driver's health and registration",
    description=(
        "Plays the kubelet, 1.34 to 1.37, to any DRA driver: opens health streams, asks who it is, "
        "says that it is registered, has it prepare no claims. That is harmless to a driver in use, but for"
        " --refuse; while a kubelet is attached, there are two. Exits with 0 if all passed that could be "
        "run, 1 with a warning, 2 with a failure, 3 if nothing could be judged, 69 if nobody serves the "
        "socket."
    ),
    examples=(
        ("drahealth conform --socket /var/lib/kubelet/plugins/gpu.example.com/dra.sock", "health alone"),
        (
            "drahealth conform --plugin-dir /var/lib/kubelet/plugins_registry --driver gpu.example.com",
            "registration and health",
        ),
    ),
    add_arguments=add_arguments,
    main=main,
)
