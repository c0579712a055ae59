"""``drahealth record``: copies the recorded evaluations of an agent, and redacts the copy.

The agent may write the record at the same time.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli.output.text import clean, format_count
from agent.cli.subcommand import Subcommand, add_settings, load_config, refuse_settings
from agent.errors import ConfigError, ProbeError, UsageError
from agent.system.files import absolute_path

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.record.redaction import Redactor
    from agent.record.segment_file import RecordPath, SegmentReader


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "records",
        metavar="RECORD",
        nargs="*",
        type=Path,
        help="segments, or directories of records (default: the record of this node's agent)",
    )
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="directory of the copy")
    parser.add_argument(
        "--redact",
        action="store_true",
        help="replace names of pods, namespaces, claims and nodes, serial numbers and UUIDs by pseudonyms",
    )
    add_settings(parser, "--record-dir")


def main(args: Namespace) -> int:
    from agent.record.replay import find_segments, open_segments
    from agent.record.segment_file import segment_number, segment_path, segment_paths
    from agent.system.files import make_directory

    sources = args.records
    if sources:
        refuse_settings(args, f"RECORD {str(sources[0])!r}")
    else:
        directory = load_config(args).record_dir
        if directory is None:
            raise ConfigError(
                "the agent of this configuration records nothing; set the key and reload the agent, or name "
                "a record",
                key="record.dir",
            )
        sources = [directory]
    paths = find_segments(sources)
    if args.redact and (pipes := [p for p in paths if os.path.exists(p) and not os.path.isfile(p)]):
        raise UsageError(f"--redact: {pipes[0]} is read twice, and is no regular file; copy it to one first")
    if Path(absolute_path(args.to)).resolve() in {path.parent.resolve() for path in paths}:
        raise UsageError(f"--to: {args.to} is the directory of the record itself; name another one")
    problems: list[str] = []
    redactor: Redactor | None = None
    limits: dict[RecordPath, int | None] = {}
    copied = steps = 0
    try:
        if args.redact:
            redactor, limits = _redactor(paths, problems)
            paths = [path for path in paths if path in limits]
        make_directory(args.to)
        first = max((segment_number(path) or 0 for path in segment_paths(args.to)), default=0) + 1
        for reader in open_segments(paths, problems, needs_state=True):
            target = segment_path(args.to, first + copied)
            steps += _copy(reader, target, redactor, limits.get(reader.path))
            copied += 1
    except OSError as error:
        raise ProbeError(f"record copy {args.to}: cannot be written: {error.strerror}") from None
    finally:
        for problem in problems:
            print(f"drahealth: {clean(str(problem))}; it is not copied", file=sys.stderr)
    segments, evaluations = format_count(copied, "segment"), format_count(steps, "evaluation")
    print(f"{segments} with {evaluations} copied to {args.to}")
    return 0


def _redactor(paths: list[Path], problems: list[str]) -> tuple[Redactor, dict[RecordPath, int | None]]:
    """Return a redactor that replaces all sensitive texts of the segment files, the files of a record.

    Also return the number of recorded evaluations in each file that can be read.

    Args:
        paths: Segment files.
        problems: Receives a text about each file that cannot be read.
    """
    import secrets

    from agent.record.redaction import Redactor
    from agent.record.replay import open_segments

    redactor = Redactor(secrets.token_bytes(32))
    seen: dict[RecordPath, int | None] = {}
    for reader in open_segments(paths, problems, needs_state=True):
        redactor.add_head(reader.head)
        redactor.collect(reader.state()[0])
        count = 0
        for step in reader.steps():
            redactor.collect(step)
            count += 1
        seen[reader.path] = count
    return redactor, seen


def _copy(reader: SegmentReader, target: Path, redactor: Redactor | None, limit: int | None) -> int:
    """Copy one file of a record up to its last complete entry; return the number of copied evaluations.

    Args:
        reader: Reader of the file.
        target: File of the copy.
        redactor: Replacement of sensitive texts; None: the copy has all texts.
        limit: Largest number of evaluations to copy; None: copy all. The agent may append evaluations with
            names that the redactor has not seen.
    """
    from agent.record.segment_file import SegmentWriter

    head, state = reader.head, reader.state()[0]
    if redactor is not None:
        head, state = redactor.head(head), redactor.state(state)
    writer = SegmentWriter(target, head, state)
    count = 0
    try:
        for step in islice(reader.steps(), limit):
            writer.append([redactor.step(step) if redactor else step])
            count += 1
    finally:
        writer.close()
    if reader.problem:
        print(f"drahealth: {clean(str(reader.problem))}; the copy ends there", file=sys.stderr)
    return count


VERB = Subcommand(
    name="record",
    summary="copy a record of snapshots, also without names",
    description=(
        "Copies the record of this node's agent, also while the agent writes it. With --redact the copy has "
        "pseudonyms instead of names, serial numbers and UUIDs, and replays with the same verdicts. The "
        "agent records with record.dir. Exits with 70 if a read or write fails, 78 if nothing is recorded."
    ),
    examples=(
        ("drahealth record --to /tmp/record", "a copy of the agent's record"),
        ("drahealth record --to /tmp/record --redact", "a copy to give away"),
    ),
    add_arguments=add_arguments,
    main=main,
)
