"""``drahealth fleet``: shows the sick devices of all nodes, from a Prometheus server that scrapes agents."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.subcommand import Subcommand, add_output, print_result

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--prometheus",
        metavar="URL",
        required=True,
        help="Prometheus server, or one with its query API; may have user and password",
    )
    parser.add_argument(
        "--by", choices=("rule", "node", "driver"), default="", help="group the sick devices instead"
    )
    parser.add_argument("--all", action="store_true", help="all rows of each table, not only the first 20")
    parser.add_argument(
        "--select",
        metavar="MATCHERS",
        default="",
        help="only series with these labels: 'cluster=\"a\"'",
    )
    parser.add_argument(
        "--node-label",
        metavar="LABEL",
        default="instance",
        help="label that names the node (default: instance)",
    )
    parser.add_argument("--token-file", metavar="FILE", type=Path, help="file with a bearer token")
    parser.add_argument("--ca-file", metavar="FILE", type=Path, help="CA certificates of the server")
    add_output(parser)


def main(args: Namespace) -> int:
    from agent.cli.fleet.fleet_state import check_label, check_select, group_sick_devices, read_fleet
    from agent.cli.fleet.prometheus_api import PrometheusServer
    from agent.cli.fleet.text import fleet_document, render_fleet
    from agent.cli.output.text import clean

    label, select = check_label(args.node_label), check_select(args.select)
    server = PrometheusServer(args.prometheus, token_file=args.token_file, ca_file=args.ca_file)
    fleet = read_fleet(server.query, label, select)
    now_s = time.time()
    groups = []
    if args.by in ("node", "driver"):
        groups = group_sick_devices(fleet.sick, lambda device: str(getattr(device, args.by)))

    def document() -> dict[str, Any]:
        return fleet_document(fleet, server.url, args.by, groups, now_s)

    def text(style: TextStyle) -> str:
        return render_fleet(fleet, style, by=args.by, groups=groups, now_s=now_s, every_row=args.all)

    for warning in server.warnings:
        print(f"drahealth: Prometheus {server.url}: {clean(warning)}; rows may be missing", file=sys.stderr)
    print_result(args, document, text)
    return 0


VERB = Subcommand(
    name="fleet",
    summary="show the sick devices of all nodes, from Prometheus",
    description=(
        "Queries a Prometheus server that scrapes the agents of all nodes (drahealth run --listen): devices "
        "that are not healthy, the worst and newest first, with the rules that fire, devices that flap, and "
        "versions of agents and drivers. Exits with 0 if the server answered, whatever the devices' health, "
        "and 69 if it did not."
    ),
    examples=(
        ("drahealth fleet --prometheus http://prometheus:9090", "sick devices, rules and versions"),
        ("drahealth fleet --prometheus http://prometheus:9090 --by node", "nodes with most sick devices"),
    ),
    add_arguments=add_arguments,
    main=main,
)
