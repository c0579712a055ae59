"""``drahealth watch``: follows a running agent, or any DRA driver's health socket.

The command prints a live table on a terminal, otherwise one line per change, or with ``-o json`` one document
per report. If the agent ends, the command ends, too, and does not reconnect.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.output.json import report_document
from agent.cli.output.live_table import live_table
from agent.cli.output.report_changes import changes_between_reports
from agent.cli.output.report_text import render_report
from agent.cli.output.terminal import can_redraw
from agent.cli.output.text import clean
from agent.cli.subcommand import (
    Subcommand,
    add_output,
    add_settings,
    agent_socket_of,
    exit_of_severities,
    print_result,
    refuse_settings,
)
from agent.errors import AgentUnreachable

ONCE_S: Final = 10.0
"""Longest time that ``--once`` waits for the first report [s]."""

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.model.report import Report


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "socket",
        metavar="SOCKET",
        nargs="?",
        help="a driver's health socket (default: the agent's agent.sock)",
    )
    parser.add_argument("--once", action="store_true", help="print the first report, and exit as scan does")
    add_output(parser)
    add_settings(parser, "--runtime-dir")


def main(args: Namespace) -> int:
    if args.socket:
        refuse_settings(args, f"SOCKET {args.socket!r}")
    socket = Path(args.socket) if args.socket else agent_socket_of(args)
    import asyncio

    if args.once:
        return asyncio.run(_print_first_report(socket, args))
    if args.output == "table" and can_redraw(sys.stdout, os.environ):
        asyncio.run(_show_live_table(socket, args.color))
    else:
        asyncio.run(_print_updates(socket, args.output))
    raise AgentUnreachable(
        f"socket {socket}: the server ended the stream of health reports; it may be shutting down"
    )


async def _print_first_report(socket: Path, args: Namespace) -> int:
    import asyncio

    from agent.serve.agent_api import client

    try:
        async with asyncio.timeout(ONCE_S):
            report = await anext(client.watch_reports(socket), None)
    except TimeoutError:
        raise AgentUnreachable(f"socket {socket}: no health report within {ONCE_S:g} s") from None
    if report is None:
        raise AgentUnreachable(f"socket {socket}: the server ended the stream before its first health report")
    print_result(
        args,
        lambda: report_document(report),
        lambda style: render_report(report, style, now_s=time.time(), has_since=bool(report.sources)),
    )
    return exit_of_severities((device.severity for device in report.devices), sources=report.sources)


async def _show_live_table(socket: Path, colour: str) -> None:
    from agent.serve.agent_api import client

    def head(style: TextStyle) -> str:
        return style.paint(f"{clean(str(socket))}, press q or Ctrl-C to stop", "dim") + "\n"

    table = live_table(colour, head=head)
    try:
        async for report in client.watch_reports(socket):
            table.show(report)
            if table.output_error:
                raise table.output_error
    finally:
        table.close()


async def _print_updates(socket: Path, output: str) -> None:
    from agent.serve.agent_api import client

    before: Report | None = None
    async for report in client.watch_reports(socket):
        if output == "json":
            print(json.dumps(report_document(report)), flush=True)
        else:
            for change in changes_between_reports(before, report):
                print(change, flush=True)
        before = report


VERB = Subcommand(
    name="watch",
    summary="follow the running agent, or any DRA driver's health socket",
    description=(
        "Follows a socket until the agent or driver closes it. Prints a live table on a terminal, otherwise "
        "one line per change. Exits with 69 when the stream ends."
    ),
    examples=(
        ("drahealth watch", "the agent of this node"),
        ("drahealth watch /run/drahealth/drivers/gpu.example.com.sock", "what the kubelet receives"),
    ),
    add_arguments=add_arguments,
    main=main,
)
