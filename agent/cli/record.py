"""``drahealth record``: copies the recorded evaluations of an agent, and redacts the copy.

The agent may write the record at the same time.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli.output.text import format_count
from agent.cli.subcommand import Subcommand, add_settings, load_config
from agent.errors import ConfigError, ProbeError, UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.record.redaction import Redactor


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
    from agent.record.replay import readable_segments, record_segments
    from agent.record.segment_file import segment_number, segment_path, segment_paths
    from agent.system.files import make_directory

    sources = args.records
    if not sources:
        directory = load_config(args).record_dir
        if directory is None:
            raise ConfigError(
                "the agent of this configuration records nothing; set the key and restart the agent, or name "
                "a record",
                key="record.dir",
            )
        sources = [directory]
    paths = record_segments(sources)
    if args.to.resolve() in {path.parent.resolve() for path in paths}:
        raise UsageError(f"--to: {args.to} is the directory of the record itself; name another one")
    problems: list[str] = []
    paths = readable_segments(paths, problems)
    for problem in problems:
        print(f"drahealth: {problem}; it is not copied", file=sys.stderr)
    redactor, seen = _redactor(paths) if args.redact else (None, {})
    steps = 0
    try:
        make_directory(args.to)
        first = max((segment_number(path) or 0 for path in segment_paths(args.to)), default=0) + 1
        for number, path in enumerate(paths, first):
            steps += _copy(path, segment_path(args.to, number), redactor, seen.get(path))
    except OSError as error:
        raise ProbeError(f"record copy {args.to}: cannot be written: {error.strerror}") from None
    segments, evaluations = format_count(len(paths), "segment"), format_count(steps, "evaluation")
    print(f"{segments} with {evaluations} copied to {args.to}")
    return 0


def _redactor(paths: list[Path]) -> tuple[Redactor, dict[Path, int]]:
    """Return a redactor that replaces all sensitive texts of the segment files, the files of a record.

    Also return the number of recorded evaluations in each file.
    """
    import secrets

    from agent.record.redaction import Redactor
    from agent.record.segment_file import SegmentReader

    redactor, seen = Redactor(secrets.token_bytes(32)), dict.fromkeys(paths, 0)
    for path in paths:
        reader = SegmentReader(path)
        redactor.add_head(reader.head)
        redactor.collect(reader.state()[0])
        for step in reader.steps():
            redactor.collect(step)
            seen[path] += 1
    return redactor, seen


def _copy(source: Path, target: Path, redactor: Redactor | None, limit: int | None) -> int:
    """Copy one file of a record up to its last complete entry; return the number of copied evaluations.

    Args:
        limit: Largest number of evaluations to copy; None: copy all. The agent may append evaluations with
            names that the redactor has not seen.
    """
    from agent.record.segment_file import SegmentReader, SegmentWriter

    reader = SegmentReader(source)
    state, reason = reader.state()
    if reason:
        raise ProbeError(f"record file {source}: not copied: its first state is unreadable: {reason}")
    head = reader.head
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
        print(f"drahealth: {reader.problem}; the copy ends there", file=sys.stderr)
    return count


VERB = Subcommand(
    name="record",
    summary="copy a record of snapshots, also without names",
    description=(
        "Copies the record of this node's agent, also while the agent writes it. With --redact the copy has "
        "pseudonyms instead of names, serial numbers and UUIDs, equal ones for equal originals, so that it "
        "can be given away and replays with the same verdicts. The agent records with record.dir."
    ),
    examples=(
        ("drahealth record --to /tmp/record", "a copy of the agent's record"),
        ("drahealth record --to /tmp/record --redact", "a copy to give away"),
    ),
    add_arguments=add_arguments,
    main=main,
)
