"""``drahealth what-if``: shows which health another configuration would have reported for recorded nodes.

Each directory is the record of one node. The records are compared in parallel by processes of this machine,
or by the workers of a dask.distributed cluster.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.json import API_VERSION
from agent.cli.output.text import TextTable, clean, format_count
from agent.cli.replay import settings_change
from agent.cli.subcommand import Subcommand, add_output, print_result
from agent.config.files import parse_toml
from agent.errors import ConfigError, ProbeError, UsageError
from agent.model.health import Severity
from agent.model.time import rfc3339
from agent.system.files import ReadError, read_bounded
from agent.system.threads.thread_start import end_with_parent

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.record.replay import ChangeSettings
    from agent.record.segment_file import RecordPath
    from agent.record.what_if import (
        FaultInterval,
        Incident,
        RecordComparison,
        RuleScore,
        SuccessRate,
    )

CHANGES_SHOWN: Final = 40
"""Largest number of changed verdicts that the table lists; ``-o json`` has all."""
HOUR_S: Final = 3600
DAY_S: Final = 86_400
WORDS: Final = {int(severity): severity.name.lower() for severity in Severity}
LABELS_BYTES: Final = 16 << 20  # largest file of ``--labels``
LABEL_KEYS: Final = {"node", "device", "begin", "end", "codes"}
"""Keys that an incident in the file of ``--labels`` may have."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "records",
        metavar="RECORD",
        nargs="+",
        help="the directory of one node's record, or a URL such as s3://BUCKET/NODE; segments of one "
        "directory are one record, too",
    )
    parser.add_argument(
        "--config", metavar="FILE", required=True, help="limits and rules that might have applied"
    )
    parser.add_argument(
        "--labels", metavar="FILE", type=Path, help="incidents that really happened, for precision and recall"
    )
    parser.add_argument(
        "--jobs", metavar="N", type=int, help="number of processes (default: one for each CPU)"
    )
    parser.add_argument(
        "--scheduler",
        metavar="URL",
        help="compare on the workers of this dask scheduler, such as tcp://HOST:8786 (default: processes of "
        "this machine)",
    )
    add_output(parser)


def main(args: Namespace) -> int:
    from agent.record.what_if import score_rules

    if args.jobs is not None and not 1 <= args.jobs <= 1024:
        raise UsageError(f"--jobs: {args.jobs} is not from 1 to 1024")
    if args.jobs is not None and args.scheduler is not None:
        raise UsageError("--jobs and --scheduler exclude each other; --jobs is for processes of this machine")
    change = settings_change(args.config)
    assert change is not None
    incidents = _read_labels(args.labels) if args.labels else None
    began_s = time.monotonic()
    problems: list[str] = []
    groups = _group_by_path(args.records, problems)
    if args.scheduler is not None:
        from agent.record.what_if_cluster import compare_on_cluster

        found = compare_on_cluster(args.scheduler, groups, change, _show_progress)
    else:
        found = list(_compare_all(groups, change, args.jobs or len(os.sched_getaffinity(0))))
    elapsed_s = time.monotonic() - began_s
    for problem in chain(problems, *(comparison.problems for comparison in found)):
        print(f"drahealth: {clean(problem)}", file=sys.stderr)
    if not any(comparison.steps for comparison in found):
        raise ProbeError(
            f"no evaluation of {format_count(len(args.records), 'record')} can be read; nothing is compared"
        )
    scores: tuple[list[RuleScore], ...] = ()
    if incidents is not None:
        scores = (
            score_rules([(comparison.node, comparison.recorded) for comparison in found], incidents),
            score_rules([(comparison.node, comparison.other) for comparison in found], incidents),
        )
    print_result(
        args,
        lambda: _document(found, scores, elapsed_s),
        lambda style: _text(found, scores, elapsed_s, style),
    )
    return 0


def _group_by_path(records: list[str], problems: list[str]) -> list[list[RecordPath]]:
    """Return the segments (files) of each directory; ``problems`` receives texts about unreadable records."""
    from agent.record.replay import find_segments
    from agent.record.segment_file import UrlPath, parse_record_path, url_segments

    segments: list[RecordPath] = []
    for record in map(parse_record_path, records):
        try:
            if isinstance(record, UrlPath):
                segments += url_segments([record], problems)
            else:
                segments += find_segments([record])
        except ProbeError as error:
            problems.append(str(error))
    groups: dict[RecordPath, dict[str, RecordPath]] = {}
    for path in segments:  # a directory may be named in several ways
        place = path.parent if isinstance(path, UrlPath) else Path(os.path.realpath(path.parent))
        groups.setdefault(place, {}).setdefault(path.name, path)
    return [
        [path for _, path in sorted(group.items())]
        for _, group in sorted(groups.items(), key=lambda item: item[0].parts)
    ]


def _compare_all(
    groups: list[list[RecordPath]], change: ChangeSettings, jobs: int
) -> Iterator[RecordComparison]:
    """Yield, for each record, a comparison of the recorded health with that of another configuration.

    Args:
        groups: Segments of each record; results have this order.
        change: Returns the settings of the other configuration.
        jobs: Number of processes.
    """
    from agent.record.what_if import compare_record

    jobs = min(jobs, len(groups))
    if jobs <= 1:
        for at, paths in enumerate(groups):
            _show_progress(at, len(groups))
            yield compare_record(paths, change)
    else:
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        pool = ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent)
        try:
            futures = [pool.submit(compare_record, paths, change) for paths in groups]
            for at, future in enumerate(futures):
                _show_progress(at, len(groups))
                try:
                    yield future.result()
                except BrokenProcessPool:
                    raise ProbeError(
                        "a worker process of what-if was killed, so the comparison is incomplete; lower "
                        "--jobs if memory is short"
                    ) from None
        finally:
            pool.shutdown(cancel_futures=True)
    _show_progress(len(groups), len(groups))


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty() and total > 1:
        filled = 30 * done // total
        end = "\n" if done == total else ""
        print(f"\r[{'#' * filled:30}] {done}/{total} records", end=end, file=sys.stderr, flush=True)


# --- labels -------------------------------------------------------------------------------------------------


def _read_labels(path: Path) -> list[Incident]:
    """Read the incidents in the file of ``--labels``.

    Raises:
        ConfigError: The file cannot be read, or an incident is not valid.
    """
    try:
        table = parse_toml(read_bounded(path, LABELS_BYTES, is_input=True).data.decode())
    except ReadError as error:
        raise ConfigError(f"incident file {path}: cannot be read: {error.reason}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"incident file {path}: {error}") from None
    incidents = table.get("incident")
    if set(table) != {"incident"} or not isinstance(incidents, list):
        raise ConfigError(f"incident file {path}: must have entries [[incident]] and nothing else")
    return [_incident(entry, f"{path}, incident {number}") for number, entry in enumerate(incidents, 1)]


def _incident(entry: Any, place: str) -> Incident:
    from agent.record.what_if import Incident

    if not isinstance(entry, dict) or not {"device", "begin", "end"} <= set(entry) <= LABEL_KEYS:
        raise ConfigError(
            f"incident file {place}: needs the keys device, begin and end, and may have node and codes"
        )
    codes = entry.get("codes", ["*"])
    if not all(isinstance(text, str) for text in (entry["device"], entry.get("node", "*"))):
        raise ConfigError(f"incident file {place}: device and node must be strings")
    if not isinstance(codes, list) or not codes or not all(isinstance(code, str) for code in codes):
        raise ConfigError(f"incident file {place}: codes must be a list of finding codes, such as gpu.ecc.*")
    begin_s, end_s = (_time_s(entry[key], f"{place}: {key}") for key in ("begin", "end"))
    if end_s < begin_s:
        raise ConfigError(f"incident file {place}: its end is before its begin; exchange them")
    return Incident(entry["device"], begin_s, end_s, entry.get("node", "*"), tuple(codes))


def _time_s(value: Any, place: str) -> float:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ConfigError(
            f"incident file {place}: {value!r} is not a time with a zone, such as 2026-11-23T05:00:00Z"
        )
    return value.timestamp()


# --- output -------------------------------------------------------------------------------------------------


def _text(
    found: list[RecordComparison], scores: tuple[list[RuleScore], ...], elapsed_s: float, style: TextStyle
) -> str:
    changes = [change for comparison in found for change in comparison.changes()]
    lines: list[str] = []
    if changes:
        table = TextTable("NODE", "DEVICE", "CODE", "CHANGE", "RECORDED", "WITH --config")
        for change in changes[:CHANGES_SHOWN]:
            table.add(
                clean(change.node),
                clean(change.device),
                change.code,
                str(change.kind),
                _format_interval(change.recorded),
                _format_interval(change.other),
            )
        lines += table.lines(style)
        if len(changes) > CHANGES_SHOWN:
            lines.append(f"and {len(changes) - CHANGES_SHOWN} more; -o json has all")
        lines.append("")
        table = TextTable("RULE", *(kind.upper() for kind in ("appears", "vanishes", "moves", "severity")))
        by_code: dict[str, Counter[str]] = {}
        for change in changes:
            by_code.setdefault(change.code, Counter())[change.kind] += 1
        for code, counts in sorted(by_code.items()):
            table.add(code, *(str(counts[kind]) for kind in ("appears", "vanishes", "moves", "severity")))
        lines += table.lines(style)
    else:
        lines.append("no verdict changes")
    recorded_h, other_h = (
        sum(side.unhealthy_s for side in sides) / HOUR_S
        for sides in ([pair.recorded for pair in found], [pair.other for pair in found])
    )
    spared, exposed = _pods(found)
    lines += [
        "",
        f"Unhealthy device-hours: {recorded_h:.2f} as recorded, {other_h:.2f} with --config",
        f"pods on an Unhealthy device: {len(spared)} only as recorded, {len(exposed)} only with --config",
        *(f"  only as recorded: {clean(pod)}" for pod in spared[:CHANGES_SHOWN]),
        *(f"  only with --config: {clean(pod)}" for pod in exposed[:CHANGES_SHOWN]),
    ]
    for title, rows in zip(("as recorded", "with --config"), scores, strict=False):
        table = TextTable(f"RULE, {title}", "PRECISION", "RECALL", "TIME TO DETECT")
        for score in rows:
            table.add(
                "all rules" if score.code == "*" else score.code,
                _format_share(score.precision),
                _format_share(score.recall),
                "{:.0f} s ({:.0f} to {:.0f})".format(*score.delay_s) if score.delay_s else "-",
            )
        lines += ["", *table.lines(style)]
    days = sum(comparison.observed_s for comparison in found) / DAY_S
    rate = days / elapsed_s * 60 if elapsed_s else 0.0
    lines += [
        "",
        f"{format_count(len(found), 'record')}, {days:.2f} node-days, "
        f"{format_count(sum(comparison.steps for comparison in found), 'evaluation')} "
        f"in {elapsed_s:.1f} s: {rate:.3g} node-days a minute",
    ]
    return "\n".join(lines) + "\n"


def _pods(found: list[RecordComparison]) -> tuple[list[str], list[str]]:
    """Return the pods with an Unhealthy device under only one of the two configurations.

    The first list has the pods of the recorded configuration only, the second those of the other
    configuration only.
    """
    spared = {pod for comparison in found for pod in comparison.recorded.pods - comparison.other.pods}
    exposed = {pod for comparison in found for pod in comparison.other.pods - comparison.recorded.pods}
    return sorted(spared), sorted(exposed)


def _format_interval(interval: FaultInterval | None) -> str:
    if interval is None:
        return "-"
    later = (f", {WORDS[step]} after {at_s - interval.begin_s:.0f} s" for at_s, step in interval.later[:3])
    return f"{rfc3339(interval.begin_s)} for {interval.end_s - interval.begin_s:.0f} s{''.join(later)}"


def _format_share(share: SuccessRate) -> str:
    if share.value is None:
        return "-"
    return f"{share.value:.2f} ({share.low:.2f} to {share.high:.2f}), {share.successes} of {share.trials}"


def _document(
    found: list[RecordComparison], scores: tuple[list[RuleScore], ...], elapsed_s: float
) -> dict[str, Any]:
    spared, exposed = _pods(found)
    document: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "records": [
            {
                "node": run.node,
                "observedSeconds": run.observed_s,
                "evaluations": run.steps,
                "unhealthySeconds": {"recorded": run.recorded.unhealthy_s, "other": run.other.unhealthy_s},
            }
            for run in found
        ],
        "changes": [
            {
                "kind": str(change.kind),
                "node": change.node,
                "device": change.device,
                "code": change.code,
                "recorded": _interval_document(change.recorded),
                "other": _interval_document(change.other),
            }
            for comparison in found
            for change in comparison.changes()
        ],
        "pods": {"onlyRecorded": spared, "onlyOther": exposed},
        "elapsedSeconds": elapsed_s,
    }
    if scores:
        document["scores"] = {
            name: [
                {
                    "code": score.code,
                    "precision": score.precision._asdict(),
                    "recall": score.recall._asdict(),
                    "secondsToDetect": score.delay_s,
                }
                for score in rows
            ]
            for name, rows in zip(("recorded", "other"), scores, strict=True)
        }
    return document


def _interval_document(interval: FaultInterval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {
        "begin": rfc3339(interval.begin_s),
        "end": rfc3339(interval.end_s),
        "severity": WORDS[interval.severity],
        "severityChanges": [{"at": rfc3339(at_s), "severity": WORDS[step]} for at_s, step in interval.later],
    }


VERB = Subcommand(
    name="what-if",
    summary="compare recorded verdicts with those of another configuration",
    description=(
        "Evaluates the snapshots of records with another configuration, and prints the verdicts that would "
        "have appeared, vanished or moved. With --labels also precision, recall and time to detection of "
        "each rule, with intervals of 95 %. Exits with 70 if no record can be read, 78 if a file is wrong."
    ),
    examples=(
        ("drahealth what-if DIR --config other.toml", "what another configuration would have reported"),
        ("drahealth what-if fleet/* --config other.toml --labels incidents.toml", "how well it detects"),
    ),
    add_arguments=add_arguments,
    main=main,
)
