"""``drahealth run``: runs the agent, with a live table on a terminal, else with a log."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.cli.main import report_error
from agent.cli.output.log import ReportLogThread, install_log_handler, is_journal, log_formatter
from agent.cli.output.terminal import can_redraw, program_command
from agent.cli.output.text import clean
from agent.cli.subcommand import Subcommand, add_colour, add_settings, load_with_origins_of
from agent.config.config import Config
from agent.version import VERSION

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.model.report import Report


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--table",
        choices=("auto", "always", "never"),
        default="auto",
        help="show a live table instead of a log (default: auto, on a terminal)",
    )
    add_colour(parser)
    add_settings(parser)


def main(args: Namespace) -> int:
    load = partial(load_with_origins_of, args, needs_runtime_dir=True)
    config = load().config
    gc.disable()  # a collection finds nothing among the modules
    from agent.app import daemon
    from agent.native.process import use_one_heap_arena

    gc.enable()
    use_one_heap_arena()  # before the first thread, that of the log

    if args.table == "always" or (args.table == "auto" and can_redraw(sys.stdout, os.environ)):
        from agent.cli.output.live_table import TableLogHandler, live_table

        table = live_table(args.color, head=lambda style: socket_help(config, program_command(), style))
        install_log_handler(TableLogHandler(table))
        try:
            daemon.run(config, on_report=table.show, load=load, encode_report=encode_report)
        finally:
            table.close()
        return 0
    lines = log_formatter(config.log_format, journal=is_journal(sys.stderr, os.environ))
    report_log = ReportLogThread(sys.stderr, lines)
    install_log_handler(report_log.queue)
    has_failed = False
    try:
        daemon.run(config, on_report=report_log.show, load=load, encode_report=encode_report)
    except BaseException as error:  # through the queue: its reader may be stalled
        has_failed = isinstance(error, Exception)
        return report_error(error, write=lambda text: report_log.queue.write(lines.format_failure(text)))
    finally:
        report_log.close(has_failed=has_failed)
    return 0


def encode_report(report: Report) -> dict[str, Any]:
    """Return a report as JSON for the HTTP server; a run without it does not import the encoder."""
    from agent.cli.output.json import report_document

    return report_document(report)


def socket_help(config: Config, command: str, style: TextStyle) -> str:
    """Return the text above the live table: a command for each agent socket that shows its reports."""
    from agent.serve.grpc_servers import socket_names

    sockets = [config.runtime_dir / name for name in socket_names(config.drivers)]
    lines = [
        style.paint(f"drahealth {VERSION}, pid {os.getpid()}; press Ctrl-C to stop. To follow it:", "dim")
    ]
    lines += [f"  {command} watch {shlex.quote(clean(str(socket)))}" for socket in sockets]
    if config.drivers:
        # run in drahealth's source directory, which has the proto file
        lines += [
            "  grpcurl -plaintext -unix -proto proto/dra_health/v1/dra_health_v1.proto \\",
            f"    {shlex.quote(clean(str(sockets[0])))} v1.DRAResourceHealth/NodeWatchResources",
        ]
    return "\n".join(lines) + "\n\n"


VERB = Subcommand(
    name="run",
    summary="run the agent",
    description=(
        "Monitors the node's devices and serves their health: on agent.sock for this command line, and for "
        "each --driver on a socket with the kubelet's DRA health API, which that driver forwards to the "
        "kubelet. Runs until SIGTERM or Ctrl-C."
    ),
    examples=(
        ("drahealth run", "serve agent.sock only, for operators and scripts"),
        ("drahealth run --driver gpu.example.com", "also serve a health socket for that DRA driver"),
    ),
    add_arguments=add_arguments,
    main=main,
)
