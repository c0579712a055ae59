"""``drahealth replay``: evaluates recorded snapshots, with the recorded or with another configuration.

Without ``--config`` the verdicts are compared with the recorded verdicts. A difference shows that this
release decides differently from the release that wrote the record.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.output.json import report_document
from agent.cli.output.live_table import live_table
from agent.cli.output.report_changes import changes_between_reports
from agent.cli.output.report_text import render_report
from agent.cli.output.terminal import can_redraw, style_of
from agent.cli.output.text import clean, format_count
from agent.cli.subcommand import Subcommand, add_colour
from agent.errors import ProbeError, UsageError
from agent.model.health import Health
from agent.model.time import NS, Instant, rfc3339

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.model.report import Report
    from agent.model.settings import EngineSettings
    from agent.record.events import DeviceVerdict
    from agent.record.replay import ChangeSettings, ReplayedStep, VerdictDifference

DIFFERENCES_SHOWN: Final = 20
"""Largest number of differing verdicts that are listed; the others are counted."""
REBOOT_S: Final = 60.0
"""Longest time between two reports over a reboot with ``--speed`` [s]; the machine may have been off."""
DIFFERENT: Final = 1
"""Exit code of ``drahealth replay`` if verdicts differ from the recorded ones."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "records", metavar="RECORD", nargs="+", type=Path, help="a segment, or the directory of a record"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="use the limits and rules of this file instead of the recorded ones"
    )
    parser.add_argument("--until", metavar="TIME", help="end at this time, such as 2026-11-23T05:00:00Z")
    parser.add_argument(
        "--speed", metavar="N", type=float, help="N times as fast as recorded (default: no pause)"
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "report"),
        default="table",
        help="changes, with --speed on a terminal a live table; a JSON document per report; the last report "
        "(default: table)",
    )
    add_colour(parser)


def main(args: Namespace) -> int:
    from agent.record.replay import compared_steps, published_steps

    until_s = _parse_until(args.until)
    if args.speed is not None and not 0 < args.speed < 1e9:
        raise UsageError(f"--speed: {args.speed:g} is not above 0 and below 1e9")
    change = settings_change(args.config)
    problems: list[str] = []
    differences: list[VerdictDifference] = []
    steps = published_steps(args.records, change, until_s, problems)
    if change is None:
        steps = compared_steps(steps, differences)
    try:
        _show(_pace_reports(steps, args.speed), args)
    finally:
        for problem in problems:
            print(f"drahealth: {clean(str(problem))}", file=sys.stderr)
    return _report_differences(differences)


def settings_change(file: str | None) -> ChangeSettings | None:
    """Return the function that replaces recorded settings by the settings in the configuration file `file`.

    The names of the node and of its drivers are not replaced. The function can be pickled. None: `file` is
    None.
    """
    if file is None:
        return None
    from agent.config.config import load
    from agent.node.node_source import engine_settings

    return partial(
        _with_recorded_names, engine_settings(load({}, {}, file=Path(file), needs_runtime_dir=False))
    )


def _with_recorded_names(wanted: EngineSettings, recorded: EngineSettings) -> EngineSettings:
    return replace(wanted, node=recorded.node, drivers=recorded.drivers)


def _parse_until(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise UsageError(f"--until: {text!r} is not a time such as 2026-11-23T05:00:00Z") from None


def _pace_reports(steps: Iterator[ReplayedStep], speed: float | None) -> Iterator[Report]:
    """Yield recorded reports at `speed` times the pace at which they were recorded; None: without pauses."""
    due_s = time.monotonic()
    before: ReplayedStep | None = None
    for step in steps:
        if speed is not None:
            before = before or step
            is_same_boot = step.boot_id == before.boot_id
            due_s += _pause_s(before.report.at, step.report.at, is_same_boot=is_same_boot) / speed
            time.sleep(min(max(0.0, due_s - time.monotonic()), 1e9))  # sleep() refuses 1e10 s
            before = step
        yield step.report


def _pause_s(before: Instant, now: Instant, *, is_same_boot: bool) -> float:
    """Return the time between two reports [s]: after a reboot, the wall time up to REBOOT_S."""
    if is_same_boot and now.mono_ns >= before.mono_ns:
        return (now.mono_ns - before.mono_ns) / NS
    return min(max(0.0, now.wall_s - before.wall_s), REBOOT_S)


def _show(reports: Iterator[Report], args: Namespace) -> None:
    if args.output == "report":
        newest = deque(reports, maxlen=1)
        if not newest:
            raise ProbeError(
                f"the record has no published report{f' up to {args.until}' if args.until else ''}"
            )
        (last,) = newest
        style = style_of(sys.stdout, args.color, os.environ)
        print(render_report(last, style, now_s=last.at.wall_s, has_since=True), end="")
    elif args.output == "table" and args.speed and can_redraw(sys.stdout, os.environ):
        _show_live_table(reports, args)
    else:
        before: Report | None = None
        for report in reports:
            if args.output == "json":
                print(json.dumps(report_document(report)), flush=bool(args.speed))
            else:
                for change in changes_between_reports(before, report):
                    print(change, flush=bool(args.speed))
            before = report


def _show_live_table(reports: Iterator[Report], args: Namespace) -> None:
    title = ", ".join(clean(str(record)) for record in args.records)
    table = live_table(
        args.color, head=lambda style: style.paint(f"{title}, {args.speed:g} times as fast", "dim") + "\n"
    )
    try:
        for report in reports:
            table.show(report)
            if table.output_error:
                raise table.output_error
    finally:
        table.close()


def _report_differences(differences: list[VerdictDifference]) -> int:
    for difference in differences[:DIFFERENCES_SHOWN]:
        print(f"drahealth: {clean(format_difference(difference))}", file=sys.stderr)
    if not differences:
        return 0
    by_subject = Counter(difference.subject for difference in differences)
    print(
        f"drahealth: this release decides differently in {format_count(len(differences), 'case')} on "
        f"{format_count(len(by_subject), 'device')}",
        file=sys.stderr,
    )
    return DIFFERENT


def format_difference(difference: VerdictDifference) -> str:
    """Return the recorded verdict and the different verdict of the replay as one line of text."""
    texts = [_format_verdict(verdict) for verdict in (difference.recorded, difference.replayed)]
    return f"{rfc3339(difference.at.wall_s)} {difference.subject}: recorded {texts[0]}, replayed {texts[1]}"


def _format_verdict(verdict: DeviceVerdict | None) -> str:
    if verdict is None:
        return "no such device"
    codes = ", ".join(code for code, _ in verdict.causes)
    return f"{Health(verdict.health).name.capitalize()}{f' ({codes})' if codes else ''}"


VERB = Subcommand(
    name="replay",
    summary="evaluate recorded snapshots again",
    description=(
        "Evaluates the snapshots of a record again and prints the verdicts as they were. With --config: as "
        "they would have been. Exits with 1 if this release decides otherwise, 70 if a record is unreadable."
    ),
    examples=(
        ("drahealth replay /var/lib/drahealth/record", "all changes of verdicts in the record"),
        ("drahealth replay DIR --config other.toml -o json", "reports with another configuration"),
    ),
    add_arguments=add_arguments,
    main=main,
)
