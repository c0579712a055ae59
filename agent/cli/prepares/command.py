"""``drahealth prepares``: lists the last prepare of each claim, even when the kubelet's events are gone."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli.exits import INTERNAL, NOT_ALLOWED, UnreadablePath
from agent.cli.output.terminal import style_of
from agent.cli.verb import Verb, add_colour, add_settings, config_file_of, flags_of
from agent.config.config import DRIVERS, load
from agent.errors import UsageError, suggestion

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.store.prepares import PreparesFileContent


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "claim",
        metavar="CLAIM",
        nargs="?",
        help="show one claim in full: name, namespace/name or UID; with --codes: a code or its first parts",
    )
    parser.add_argument("--codes", action="store_true", help="list the error codes instead")
    parser.add_argument("--driver", metavar="NAME", help="only this driver")
    parser.add_argument(
        "--file",
        metavar="FILE",
        action="append",
        type=Path,
        default=[],
        help="a driver's prepares.json in another place; may be given again",
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "markdown"),
        default="table",
        help="output format; markdown only with --codes (default: table)",
    )
    add_colour(parser)
    add_settings(parser, "--state-dir", "--kubelet-dir")


def main(args: Namespace) -> int:
    if args.codes:
        return _codes(args)
    if args.output == "markdown":
        raise UsageError("-o markdown: only with --codes\ntry 'drahealth prepares --help'")
    from agent.cli.prepares.text import document, exit_of, prepare_records, render, render_none
    from agent.store.prepares import FILE

    config = load(flags_of(args), os.environ, file=config_file_of(args), serves=False)
    patterns = list(_patterns(config.kubelet_dir, config.state_dir, args.driver))
    found, problems, absent = _read(patterns, args.file, args.driver)
    searched = [*(top / below / FILE for top, below in patterns), *args.file]
    records = prepare_records(found)
    if args.claim is not None:
        names = {name for record in records for name in record.names}
        records = tuple(record for record in records if args.claim in record.names)
        if not records and not problems:
            raise UsageError(f"no prepare of claim {args.claim!r} is known{suggestion(args.claim, names)}")
    if args.output == "json":
        print(json.dumps(document(records, found, problems, searched), indent=2))
    else:
        style = style_of(sys.stdout, args.color, os.environ)
        shown = render(records, found, style, now_s=time.time(), whole=args.claim is not None)
        print(shown or render_none(found, searched, absent, style, unread=len(problems)), end="")
    for problem in problems:
        print(f"drahealth: {problem.path}: {problem.reason}", file=sys.stderr)
    return max((problem.exit_code for problem in problems), default=exit_of(records))


def _patterns(kubelet_dir: Path, state_dir: Path, driver: str | None) -> Iterator[tuple[Path, str]]:
    """Yield each parent directory of drivers, and the pattern of a driver's state directory in it."""
    name = driver or "*"
    yield kubelet_dir / "plugins", f"{name}/drahealth"
    yield state_dir / DRIVERS, name


def _read(
    patterns: Iterable[tuple[Path, str]], files: Sequence[Path], driver: str | None
) -> tuple[list[PreparesFileContent], list[UnreadablePath], list[Path]]:
    """Return the content of the drivers' files, the unreadable places, and the absent directories."""
    from agent.model.reading import Absence
    from agent.store import prepares
    from agent.store.files import CorruptFile
    from agent.system.files import ReadError, read_bounded

    found: list[PreparesFileContent] = []
    problems: list[UnreadablePath] = []
    absent: list[Path] = []
    listed: list[Path] = []
    for top, below in patterns:
        name, _, rest = below.partition("/")
        try:
            names = sorted(os.listdir(top)) if name == "*" else [name]
        except FileNotFoundError:
            absent.append(top)
            continue
        except OSError as error:
            problems.append(_problem(top, error))
            continue
        listed += [top / directory / rest / prepares.FILE for directory in names]
    for path in [*listed, *files]:
        try:
            content = prepares.decode(read_bounded(path, prepares.SIZE_MAX).data)
        except ReadError as error:
            if path in files or error.absence is not Absence.ABSENT:
                problems.append(
                    UnreadablePath(path, error.reason, NOT_ALLOWED if error.is_forbidden else INTERNAL)
                )
        except CorruptFile as error:
            problems.append(UnreadablePath(path, str(error), INTERNAL))
        else:
            if driver in (None, content.driver):
                found.append(content)
    return found, problems, absent


def _problem(path: Path, error: OSError) -> UnreadablePath:
    exit_code = NOT_ALLOWED if isinstance(error, PermissionError) else INTERNAL
    return UnreadablePath(path, error.strerror or str(error), exit_code)


def _codes(args: Namespace) -> int:
    from agent.cli.prepares.text import codes_document, render_codes, render_codes_markdown
    from agent.prepare.taxonomy import FAMILY, TAXONOMY

    wanted = args.claim or ""
    rows = [row for row in TAXONOMY if f"{row.code}.".startswith(f"{wanted.rstrip('.')}." if wanted else "")]
    rows = rows or [row for row in TAXONOMY if row.code.endswith(FAMILY) and wanted.startswith(row.code[:-1])]
    if not rows:
        known = [row.code for row in TAXONOMY]
        raise UsageError(
            f"no code begins with {wanted!r}{suggestion(wanted, known)}\n"
            "it may be the code of a check (see 'drahealth checks'), or the driver's own"
        )
    match args.output:
        case "json":
            print(json.dumps(codes_document(rows), indent=2))
        case "markdown":
            print(render_codes_markdown(rows), end="")
        case _:
            print(render_codes(rows, style_of(sys.stdout, args.color, os.environ)), end="")
    return 0


VERB = Verb(
    name="prepares",
    summary="list the last prepare of each claim, and whether a retry can help",
    description=(
        "Lists the last prepare of each claim, as the DRA drivers of this node recorded it; needs no running "
        "agent. Exits with 0 if all claims are prepared or there are none, 1 if every failure may pass by "
        "itself (transient, unknown), 2 if one will not (bad-config, failed-device, permanent), 70 or 77 if "
        "a file cannot be read."
    ),
    examples=(
        ("drahealth prepares", "every claim, failing ones first"),
        ("drahealth prepares --codes cdi.write", "the meaning of a code in a pod's event, and what to do"),
    ),
    add_arguments=add_arguments,
    main=main,
)
