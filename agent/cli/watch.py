"""``drahealth watch``: follows a running agent, or any DRA driver's health socket.

Prints a live table on a terminal, otherwise one line per change, or with ``-o json`` one document per report.
Does not reconnect: the end of the agent is itself a result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.exits import exit_of_severities
from agent.cli.output.changes import changes
from agent.cli.output.json import report_document
from agent.cli.output.live import live_table
from agent.cli.output.report import render_report
from agent.cli.output.terminal import can_redraw, style_of
from agent.cli.output.text import clean
from agent.cli.verb import Verb, add_output, add_settings, agent_socket_of
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
    socket = Path(args.socket) if args.socket else agent_socket_of(args)
    import asyncio

    if args.once:
        return asyncio.run(_once(socket, args))
    if args.output == "table" and can_redraw(sys.stdout, os.environ):
        asyncio.run(_table(socket, args.color))
    else:
        asyncio.run(_lines(socket, args.output))
    raise AgentUnreachable(f"{socket}: the agent closed the stream")


async def _once(socket: Path, args: Namespace) -> int:
    import asyncio

    from agent.serve.agent_api import client

    try:
        async with asyncio.timeout(ONCE_S):
            report = await anext(client.watch_reports(socket), None)
    except TimeoutError:
        raise AgentUnreachable(f"{socket}: no report within {ONCE_S:g} s") from None
    if report is None:
        raise AgentUnreachable(f"{socket}: the agent closed the stream before the first report")
    if args.output == "json":
        print(json.dumps(report_document(report), indent=2))
    else:
        style = style_of(sys.stdout, args.color, os.environ)
        print(render_report(report, style, now_s=time.time()), end="")
    return exit_of_severities(device.severity for device in report.devices)


async def _table(socket: Path, colour: str) -> None:
    from agent.serve.agent_api import client

    def head(style: TextStyle) -> str:
        return style.paint(f"{clean(str(socket))}, press Ctrl-C to stop", "dim") + "\n"

    table = live_table(colour, head=head)
    try:
        async for report in client.watch_reports(socket):
            table.show(report)
            if table.lost:
                raise table.lost
    finally:
        table.close()


async def _lines(socket: Path, output: str) -> None:
    from agent.serve.agent_api import client

    before: Report | None = None
    async for report in client.watch_reports(socket):
        if output == "json":
            print(json.dumps(report_document(report)), flush=True)
        else:
            for change in changes(before, report):
                print(change, flush=True)
        before = report


VERB = Verb(
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
