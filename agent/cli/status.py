"""``drahealth status``: how the agent itself is, and in one line how its devices are."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from agent.cli.exits import exit_of_severities
from agent.cli.output.document import status_document
from agent.cli.output.table import render_status
from agent.cli.output.terminal import style_of
from agent.cli.verb import Verb, add_output, add_settings, agent_socket_of

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    add_output(parser)
    add_settings(parser, "--runtime-dir")


def main(args: Namespace) -> int:
    socket = agent_socket_of(args)
    import asyncio

    from agent.serve.agent_api import client

    status = asyncio.run(client.status(socket))
    if args.output == "json":
        print(json.dumps(status_document(status), indent=2))
    else:
        print(render_status(status, style_of(sys.stdout, args.color, os.environ), now_s=time.time()), end="")
    return exit_of_severities(tally.severity for tally in status.tallies)


VERB = Verb(
    name="status",
    summary="what the running agent costs, whom it serves, how its devices are",
    description=(
        "Asks the running agent. Exits with 0 if all its devices are healthy, 1 if the worst is degraded, 2 "
        "if it is unhealthy, 3 if it is unknown or there is no report yet, and 69 if no agent answers."
    ),
    examples=(
        ("drahealth status", "the agent of this node"),
        ("drahealth status -o json | jq .rssBytes", "one number of it"),
    ),
    add_arguments=add_arguments,
    main=main,
)
