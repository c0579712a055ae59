"""``drahealth fleet``: shows the devices of all nodes that are not healthy, from a Prometheus server.

The output is tables or a JSON document.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.json import API_VERSION
from agent.cli.output.text import BADGES, RowText, TextTable, clean, format_count, format_ranges
from agent.cli.subcommand import Subcommand, add_output, print_result
from agent.model.health import Severity
from agent.model.time import format_age, rfc3339

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.fleet.fleet_state import Fleet, FleetDeviceId, FleetGroup, SickDevice
    from agent.cli.output.terminal import TextStyle


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--prometheus",
        metavar="URL",
        required=True,
        help="Prometheus server, or one with its query API; may have user and password",
    )
    parser.add_argument(
        "--by", choices=("rule", "node", "driver"), default="", help="list groups of devices instead"
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
    from agent.cli.fleet.fleet_state import (
        PrometheusClient,
        check_label,
        check_select,
        group_sick_devices,
        read_fleet,
    )

    label, select = check_label(args.node_label), check_select(args.select)
    server = PrometheusClient(args.prometheus, token_file=args.token_file, ca_file=args.ca_file)
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
    summary="show the devices of all nodes that are not healthy, from Prometheus",
    description=(
        "Queries a Prometheus server that scrapes the agents of all nodes (drahealth run --listen): devices "
        "that are not healthy, the worst and newest first, with the rules that fire, devices that flap, and "
        "versions of agents and drivers. Exits with 0 if the server answered, whatever the devices' health, "
        "69 if it did not, 78 if its URL or a file cannot be used."
    ),
    examples=(
        ("drahealth fleet --prometheus http://prometheus:9090", "devices with faults, rules, versions"),
        ("drahealth fleet --prometheus http://prometheus:9090 --by node", "nodes with most faulty devices"),
    ),
    add_arguments=add_arguments,
    main=main,
)


# --- output ------------------------------------------------------------------------------------------------

ROWS: Final = 20
"""Number of rows that each table has without ``--all``."""
CODES: Final = 4
"""Largest number of finding codes in one row of the table of ``fleet --by``."""
NODES: Final = 8
"""Largest number of nodes that the row of a health rule names without ``--all``."""
STATES: Final = (Severity.UNHEALTHY, Severity.UNKNOWN, Severity.DEGRADED, Severity.OK)
HOST: Final = "host devices"
"""Text in place of the driver for devices that no driver declares, in a table by driver."""


def render_fleet(
    fleet: Fleet,
    style: TextStyle,
    *,
    by: str,
    groups: Sequence[FleetGroup],
    now_s: float,
    every_row: bool,
) -> str:
    """Return the state of all nodes as text: headline, devices or groups, flapping devices, versions.

    A flapping device changes its health often.
    """
    rows = None if every_row else ROWS
    lines = [_headline(fleet)]
    if by == "rule":
        lines += _rules(fleet, style, rows)
    elif by:
        lines += _groups(groups, by, style, now_s, rows)
    else:
        lines += _sick(fleet.sick, style, now_s, rows)
        lines += _rules(fleet, style, rows)
    lines += _flapping_lines(fleet, style, rows)
    lines += _versions(fleet, style)
    if not fleet.nodes and not fleet.silent:
        lines += ["", "  the server has no metrics of agents: see its targets, and --select"]
    if fleet.silent:
        names = list(map(clean, fleet.silent))
        text = f"  without a report now: {_some_names(names, rows)}"
        lines += ["", style.paint(text, "magenta")]
    return "\n".join(lines) + "\n"


def _headline(fleet: Fleet) -> str:
    sick_nodes = {sick.device.node for sick in fleet.sick}
    states = [
        f"{fleet.devices[state]:,} {BADGES[state].word.lower()}"
        for state in STATES
        if fleet.devices.get(state)
    ]
    silent = f", {len(fleet.silent):,} without a report" if fleet.silent else ""
    total = format_count(sum(fleet.devices.values()), "device")
    return (
        f"{format_count(len(fleet.nodes), 'node')}, {len(sick_nodes):,} not healthy{silent}; "
        f"{total}: {', '.join(states) or 'none'}"
    )


def _some_names(names: Sequence[str], rows: int | None) -> str:
    if rows is None or len(names) <= NODES:
        return format_ranges(names)
    return f"{', '.join(names[:NODES])} and {len(names) - NODES:,} more"


def _more_line(hidden: int, style: TextStyle) -> list[str]:
    return [style.paint(f"  {hidden:,} more: shown with --all", "dim")] if hidden > 0 else []


def _age_since(at_s: float, now_s: float) -> str:
    return format_age(now_s - at_s) if at_s else ""


def _sick(sick: Sequence[SickDevice], style: TextStyle, now_s: float, rows: int | None) -> Iterator[str]:
    if not sick:
        return
    table = TextTable("NODE", "DEVICE", "HEALTH", "SINCE", text_title="CAUSES", min_text_width=30)
    for device in sick[:rows]:
        badge = BADGES[device.severity]
        causes = ", ".join(clean(cause.code) for cause in device.causes)
        table.add(
            clean(device.device.node),
            clean(device.device.name),
            badge.word,
            _age_since(device.since_s, now_s),
            sign=badge.coloured_sign(style),
            text=[RowText(causes)],
        )
    yield ""
    yield from table.lines(style)
    yield from _more_line(len(sick) - len(sick[:rows]), style)


def _rules(fleet: Fleet, style: TextStyle, rows: int | None) -> Iterator[str]:
    if not fleet.rules:
        return
    table = TextTable("RULE", "NODES", "DEVICES", text_title="WHERE", min_text_width=30)
    for rule in fleet.rules[:rows]:
        table.add(
            clean(rule.code),
            f"{len(rule.nodes):,}",
            f"{rule.devices:,}" if rule.devices else "",
            sign=BADGES[rule.severity].coloured_sign(style),
            text=[RowText(_some_names(list(map(clean, rule.nodes)), rows))],
        )
    yield ""
    yield from table.lines(style)
    yield from _more_line(len(fleet.rules) - len(fleet.rules[:rows]), style)


def _groups(
    groups: Sequence[FleetGroup], by: str, style: TextStyle, now_s: float, rows: int | None
) -> Iterator[str]:
    if not groups:
        return
    titles = [by.upper(), *(BADGES[state].word.upper() for state in STATES[:3]), "NEWEST"]
    table = TextTable(*titles, text_title="CAUSES", min_text_width=30)
    for group in groups[:rows]:
        more = f" and {len(group.codes) - CODES} more" if len(group.codes) > CODES else ""
        counts = [group.by_severity.get(state, 0) for state in STATES[:3]]
        table.add(
            clean(group.name) or HOST,
            *(f"{count:,}" if count else "" for count in counts),
            _age_since(group.newest_s, now_s),
            sign=BADGES[max(group.by_severity)].coloured_sign(style),
            text=[RowText(", ".join(map(clean, group.codes[:CODES])) + more)],
        )
    yield ""
    yield from table.lines(style)
    yield from _more_line(len(groups) - len(groups[:rows]), style)


def _flapping_lines(fleet: Fleet, style: TextStyle, rows: int | None) -> Iterator[str]:
    if not fleet.flapping:
        return
    table = TextTable("FLAPPING", "DEVICE", "LOST IN 1h")
    for device, times in fleet.flapping[:rows]:
        table.add(clean(device.node), clean(device.name), f"{times:,} times")
    yield ""
    yield from table.lines(style)
    yield from _more_line(len(fleet.flapping) - len(fleet.flapping[:rows]), style)


def _versions(fleet: Fleet, style: TextStyle) -> Iterator[str]:
    if not fleet.versions:
        return
    table = TextTable("VERSIONS", "", "NODES")
    for name, version, nodes in fleet.versions:
        table.add(clean(name), clean(version), f"{nodes:,}")
    yield ""
    yield from table.lines(style)


def fleet_document(
    fleet: Fleet, url: str, by: str, groups: Iterable[FleetGroup], at_s: float
) -> dict[str, Any]:
    """Return the state of all nodes as JSON, with groups of devices if ``--by`` selects node or driver."""
    document: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "prometheus": url,
        "at": rfc3339(at_s),
        "nodes": len(fleet.nodes),
        "notScraped": list(fleet.silent),
        "devices": {_state(state): fleet.devices.get(state, 0) for state in STATES},
        "sick": [
            {
                **_device(sick.device),
                "state": _state(sick.severity),
                "since": rfc3339(sick.since_s) if sick.since_s else None,
                "causes": [
                    {"code": cause.code, "severity": cause.severity.name.lower(), "repair": cause.repair}
                    for cause in sick.causes
                ],
            }
            for sick in fleet.sick
        ],
        "flapping": [{**_device(device), "timesLost": times} for device, times in fleet.flapping],
        "rules": [
            {
                "code": rule.code,
                "severity": rule.severity.name.lower(),
                "devices": rule.devices,
                "nodes": list(rule.nodes),
            }
            for rule in fleet.rules
        ],
        "versions": [
            {"name": name, "version": version, "nodes": nodes} for name, version, nodes in fleet.versions
        ],
    }
    if by in ("node", "driver"):
        document["groups"] = [
            {
                by: group.name,
                **{_state(state): group.by_severity.get(state, 0) for state in STATES[:3]},
                "newest": rfc3339(group.newest_s) if group.newest_s else None,
                "codes": list(group.codes),
            }
            for group in groups
        ]
    return document


def _state(severity: Severity) -> str:
    return BADGES[severity].word.lower()


def _device(device: FleetDeviceId) -> dict[str, str]:
    return {"node": device.node, "driver": device.driver, "pool": device.pool, "device": device.device}
