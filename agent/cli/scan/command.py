"""``drahealth scan``: checks the node once, without a running agent."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from agent.cli.exits import EXIT_OF_SEVERITY, exit_of_severities
from agent.cli.output.json import API_VERSION, process_documents, report_document
from agent.cli.output.report import render_report
from agent.cli.output.terminal import style_of
from agent.cli.scan.crosscheck import (
    check_document,
    cross_check,
    gpu_documents,
    read_pynvml,
    render_check,
    render_gpus,
)
from agent.cli.verb import Verb, add_output, add_settings, config_file_of, flags_of
from agent.config.config import load
from agent.errors import ProbeError
from agent.model.health import Severity

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.config.config import Config


def add_arguments(parser: ArgumentParser) -> None:
    add_output(parser)
    parser.add_argument(
        "--backend",
        choices=("native", "pynvml", "both"),
        default="native",
        help="native: the report; both: the report, and a comparison with what pynvml reads from each GPU; "
        "pynvml: only what pynvml reads, without verdicts (default: native)",
    )
    add_settings(
        parser,
        "--node-name",
        "--sysfs-root",
        "--procfs-root",
        "--cgroupfs-root",
        "--kubelet-cgroup-root",
        "--nvml-library",
        "--kmsg",
        "--kmsg-any-facility",
    )


def main(args: Namespace) -> int:
    config = load(flags_of(args), os.environ, file=config_file_of(args), serves=False)
    try:
        return _show_pynvml(config, args) if args.backend == "pynvml" else _show_report(config, args)
    except ProbeError as error:
        print(f"drahealth: {error}", file=sys.stderr)
        return EXIT_OF_SEVERITY[Severity.UNKNOWN]


def _show_report(config: Config, args: Namespace) -> int:
    from agent.app.scan import scan_once
    from agent.sources.processes import read_processes

    report = scan_once(config)
    processes = read_processes(config.procfs_root)
    check = cross_check(config) if args.backend == "both" else None
    if args.output == "json":
        document = {**report_document(report), "processes": process_documents(processes)}
        if check:
            document["backends"] = check_document(check)
        print(json.dumps(document, indent=2))
    else:
        style = style_of(sys.stdout, args.color, os.environ)
        print(render_report(report, style, processes=processes), end="")
        if check:
            print("\n" + render_check(check, style), end="")
    severities = [device.severity for device in report.devices]
    if check and check.differs:
        severities.append(Severity.UNKNOWN)  # one of the two is wrong; which one is not known
    return exit_of_severities(severities)


def _show_pynvml(config: Config, args: Namespace) -> int:
    gpus = read_pynvml(config)
    if args.output == "json":
        document = {"apiVersion": API_VERSION, "node": config.node_name, "gpus": gpu_documents(gpus)}
        print(json.dumps(document, indent=2))
    else:
        print(render_gpus(gpus, style_of(sys.stdout, args.color, os.environ)), end="")
    return 0


VERB = Verb(
    name="scan",
    summary="check the node once, without an agent",
    description=(
        "Reads the node twice, 250 ms apart, and shows the health of every device. Exits with 0 if all are "
        "healthy, 1 if the worst is degraded, 2 if it is unhealthy, 3 if it is unknown. Rules that need a "
        "longer history are listed as not evaluated. With --backend both, also exits with 3 if pynvml and "
        "the native core read different values from a GPU."
    ),
    examples=(
        ("drahealth scan", "every device, and what to do about those that are not healthy"),
        ("drahealth scan -o json | jq '.devices[].health'", "the same as JSON, for programs"),
    ),
    add_arguments=add_arguments,
    main=main,
)
