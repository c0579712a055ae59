"""``drahealth scan``: looks at the node once, without a daemon."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from agent.cli.document import process_documents, report_document
from agent.cli.exits import EXIT_OF_SEVERITY, exit_of_severities
from agent.cli.render import render_report
from agent.cli.terminal import style_of
from agent.cli.verb import Verb, add_output, add_settings, config_file_of, flags_of
from agent.config import load
from agent.errors import ProbeError
from agent.model.health import Severity

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    add_output(parser)
    add_settings(
        parser, "--node-name", "--sysfs-root", "--procfs-root", "--cgroupfs-root", "--kubelet-cgroup-root"
    )


def main(args: Namespace) -> int:
    config = load(flags_of(args), os.environ, file=config_file_of(args), serves=False)
    from agent.daemon import look_once
    from agent.sources.processes import read_processes

    try:
        report = look_once(config)
    except ProbeError as error:  # what could not be read is not known
        print(f"drahealth: {error}", file=sys.stderr)
        return EXIT_OF_SEVERITY[Severity.UNKNOWN]
    processes = read_processes(config.procfs_root)
    if args.output == "json":
        print(json.dumps({**report_document(report), "processes": process_documents(processes)}, indent=2))
    else:
        style = style_of(sys.stdout, args.color, os.environ)
        print(render_report(report, style, processes=processes), end="")
    return exit_of_severities(device.severity for device in report.devices)


VERB = Verb(
    name="scan",
    summary="look at the node once, no agent needed",
    description=(
        "Looks at the node twice, 250 ms apart, and says how each is. Exits with 0 if all are healthy, "
        "1 if the worst is degraded, 2 if it is unhealthy, 3 if it is unknown. Rules that need more "
        "history than that are listed as not evaluated."
    ),
    examples=(
        ("drahealth scan", "every device, and what to do about those that are not well"),
        ("drahealth scan -o json | jq '.devices[].health'", "the same for programs"),
    ),
    add_arguments=add_arguments,
    main=main,
)
