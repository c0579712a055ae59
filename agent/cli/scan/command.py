"""``drahealth scan``: checks all devices of this machine once, without a running agent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.json import API_VERSION, process_documents, report_document
from agent.cli.output.report_text import render_report
from agent.cli.output.text import clean
from agent.cli.scan.crosscheck import (
    cross_check,
    crosscheck_document,
    gpu_documents,
    read_in_child,
    read_pynvml,
    render_check,
    render_gpus,
)
from agent.cli.subcommand import (
    EXIT_OF_SEVERITY,
    EXIT_OF_SEVERITY_NPD,
    Subcommand,
    add_output,
    add_settings,
    exit_of_severities,
    load_config,
    print_result,
)
from agent.errors import ProbeError
from agent.model.health import Severity
from agent.model.reading import unlisted_sources

NAMES_MAX: Final = 8
"""Largest number of devices that the line for node-problem-detector names; it counts the others."""

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping, Sequence

    from agent.cli.output.terminal import TextStyle
    from agent.config.config import Config
    from agent.model.health import DeviceHealth


def add_arguments(parser: ArgumentParser) -> None:
    add_output(parser)
    parser.add_argument(
        "--backend",
        choices=("native", "pynvml", "both"),
        default="native",
        help="native: the report; both: the report, and a comparison with what pynvml reads from each GPU; "
        "pynvml: only what pynvml reads, without verdicts (default: native)",
    )
    parser.add_argument(
        "--exit-style",
        choices=("nagios", "npd"),
        default="nagios",
        help="nagios: exit codes 0 to 3; npd: those of a custom plugin of node-problem-detector, and one "
        "line: 0 if no device is unhealthy, 1 if one is, 2 if one is unknown (default: nagios)",
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
    config = load_config(args)
    try:
        return _show_pynvml(config, args) if args.backend == "pynvml" else _show_report(config, args)
    except ProbeError as error:
        if args.exit_style == "npd":
            print(clean(str(error)))
        else:
            print(f"drahealth: {clean(str(error))}", file=sys.stderr)
        return _exit_codes(args)[Severity.UNKNOWN]


def _exit_codes(args: Namespace) -> Mapping[Severity, int]:
    return EXIT_OF_SEVERITY_NPD if args.exit_style == "npd" else EXIT_OF_SEVERITY


def _show_report(config: Config, args: Namespace) -> int:
    from agent.app.scan import scan_once
    from agent.sources.gpu_os_facts import read_node_processes

    check = read_in_child(lambda: cross_check(config)) if args.backend == "both" else None
    report = scan_once(config)
    unlisted = unlisted_sources(report.sources)
    processes = read_node_processes(config.procfs_root)

    def document() -> dict[str, Any]:
        backends = {"backends": crosscheck_document(check)} if check else {}
        return {**report_document(report), "processes": process_documents(processes), **backends}

    def text(style: TextStyle) -> str:
        if args.exit_style == "npd":
            line = npd_line(report.devices, unlisted, readers_differ=check is not None and check.differs)
            return f"{line}\n"
        comparison = "\n" + render_check(check, style) if check else ""
        return render_report(report, style, processes=processes) + comparison

    print_result(args, document, text)
    if unlisted and args.exit_style != "npd":
        print(f"drahealth: scan: {_missing(unlisted)}", file=sys.stderr)
    severities = [device.severity for device in report.devices]
    if check and check.differs:
        severities.append(Severity.UNKNOWN)  # one of the two is wrong; which one is not known
    return exit_of_severities(severities, _exit_codes(args), sources=report.sources)


def _missing(unlisted: Sequence[str]) -> str:
    """Return the text about sources that did not list their devices in time."""
    return f"no list of devices from {', '.join(unlisted)} in time; its devices may be missing"


def npd_line(
    devices: Sequence[DeviceHealth], unlisted: Sequence[str] = (), *, readers_differ: bool = False
) -> str:
    """Return one line about the devices, for the message of a condition of node-problem-detector.

    The line has no times and no readings, because node-problem-detector reports each change of the message.

    Args:
        devices: Devices of the report.
        unlisted: Names of the sources whose devices are missing.
        readers_differ: Whether pynvml and the native core read different values from a GPU.
    """
    if all(device.severity < Severity.UNKNOWN for device in devices):
        if unlisted:
            return f"unknown: {_missing(unlisted)}"
        if readers_differ:
            return "unknown: pynvml and the native core read different values from a GPU"
    if not devices:
        return "no device was found"
    for severity in (Severity.UNHEALTHY, Severity.UNKNOWN):
        in_state = [device for device in devices if device.severity is severity]
        if in_state:
            names = [clean(f"{device.device} ({device.causes[0].code})") for device in in_state[:NAMES_MAX]]
            more = f" and {len(in_state) - NAMES_MAX} more" if len(in_state) > NAMES_MAX else ""
            state = severity.name.lower()
            return f"{state}, {len(in_state)} of {len(devices)} devices: {', '.join(names)}{more}"
    return f"no device of {len(devices)} is unhealthy"


def _show_pynvml(config: Config, args: Namespace) -> int:
    gpus = read_in_child(lambda: read_pynvml(config))
    document = {"apiVersion": API_VERSION, "node": config.node_name, "gpus": gpu_documents(gpus)}
    print_result(args, lambda: document, lambda style: render_gpus(gpus, style))
    return 0


VERB = Subcommand(
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
