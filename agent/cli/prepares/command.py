"""``drahealth prepares``: how the last prepare of each claim ended, when the kubelet's events are gone."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agent.cli.exits import INTERNAL, NOT_ALLOWED
from agent.cli.output.terminal import style_of
from agent.cli.verb import Verb, add_colour, add_settings, config_file_of, flags_of
from agent.config.config import DRIVERS, load
from agent.errors import UsageError, suggestion

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.store.prepares import Prepares


class Problem(NamedTuple):
    """A file or a directory that could not be used."""

    path: Path
    reason: str
    code: int
    """What to exit with."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "claim",
        metavar="CLAIM",
        nargs="?",
        help="one claim in full: its name, namespace/name or uid; with --codes, a code, or how codes begin",
    )
    parser.add_argument("--codes", action="store_true", help="list what can be said of a prepare instead")
    parser.add_argument("--driver", metavar="NAME", help="of this driver alone")
    parser.add_argument(
        "--file",
        metavar="FILE",
        action="append",
        type=Path,
        default=[],
        help="a driver's prepares.json that is elsewhere; may be given again",
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "markdown"),
        default="table",
        help="markdown: of --codes only (default: table)",
    )
    add_colour(parser)
    add_settings(parser, "--state-dir", "--kubelet-dir")


def main(args: Namespace) -> int:
    if args.codes:
        return _codes(args)
    if args.output == "markdown":
        raise UsageError("-o markdown is for --codes\ntry 'drahealth prepares --help'")
    from agent.cli.prepares.text import claims_of, document, exit_of, render, render_none
    from agent.store.prepares import FILE

    config = load(flags_of(args), os.environ, file=config_file_of(args), serves=False)
    places = list(_places(config.kubelet_dir, config.state_dir, args.driver))
    found, problems, absent = _read(places, args.file, args.driver)
    looked = [*(top / below / FILE for top, below in places), *args.file]
    claims = claims_of(found)
    if args.claim is not None:
        names = {name: one for one in claims for name in (str(one.ref), one.ref.name, one.ref.uid)}
        claims = tuple(one for one in claims if args.claim in (str(one.ref), one.ref.name, one.ref.uid))
        if not claims and not problems:
            raise UsageError(f"no prepare of claim {args.claim!r} is known{suggestion(args.claim, names)}")
    if args.output == "json":
        print(json.dumps(document(claims, found, problems, looked), indent=2))
    else:
        style = style_of(sys.stdout, args.color, os.environ)
        shown = render(claims, found, style, now_s=time.time(), whole=args.claim is not None)
        print(shown or render_none(found, looked, absent, style, unread=len(problems)), end="")
    for problem in problems:
        print(f"drahealth: {problem.path}: {problem.reason}", file=sys.stderr)
    return max((problem.code for problem in problems), default=exit_of(claims))


def _places(kubelet_dir: Path, state_dir: Path, driver: str | None) -> Iterator[tuple[Path, str]]:
    """Directories with one of each driver in them, and where its file lies there."""
    name = driver or "*"
    yield kubelet_dir / "plugins", f"{name}/drahealth"
    yield state_dir / DRIVERS, name


def _read(
    places: Iterable[tuple[Path, str]], files: Sequence[Path], driver: str | None
) -> tuple[list[Prepares], list[Problem], list[Path]]:
    """What the drivers remember, what of it cannot be read, and which directories of theirs are not there."""
    from agent.model.reading import Absence
    from agent.store import prepares
    from agent.store.files import CorruptFile
    from agent.system.read_file import ReadError, read_bounded

    found: list[Prepares] = []
    problems: list[Problem] = []
    absent: list[Path] = []
    listed: list[Path] = []
    for top, below in places:
        name, _, rest = below.partition("/")
        try:
            names = sorted(os.listdir(top)) if name == "*" else [name]
        except FileNotFoundError:
            absent.append(top)
            continue
        except OSError as error:
            problems.append(_problem(top, error))
            continue
        listed += [top / one / rest / prepares.FILE for one in names]
    for path in [*listed, *files]:
        try:
            one = prepares.decode(read_bounded(path, prepares.SIZE_MAX).data)
        except ReadError as error:
            if path in files or error.absence is not Absence.ABSENT:
                problems.append(Problem(path, error.reason, NOT_ALLOWED if error.is_forbidden else INTERNAL))
        except CorruptFile as error:
            problems.append(Problem(path, str(error), INTERNAL))
        else:
            if driver in (None, one.driver):
                found.append(one)
    return found, problems, absent


def _problem(path: Path, error: OSError) -> Problem:
    code = NOT_ALLOWED if isinstance(error, PermissionError) else INTERNAL
    return Problem(path, error.strerror or str(error), code)


def _codes(args: Namespace) -> int:
    from agent.cli.prepares.codes import codes_document, markdown, render_codes
    from agent.prepare.taxonomy import FAMILY, TAXONOMY

    wanted = args.claim or ""
    rows = [row for row in TAXONOMY if f"{row.code}.".startswith(f"{wanted.rstrip('.')}." if wanted else "")]
    rows = rows or [row for row in TAXONOMY if row.code.endswith(FAMILY) and wanted.startswith(row.code[:-1])]
    if not rows:
        known = [row.code for row in TAXONOMY]
        raise UsageError(
            f"{wanted!r} is the beginning of no code{suggestion(wanted, known)}\n"
            "it may be one of 'drahealth checks', or the driver's own"
        )
    match args.output:
        case "json":
            print(json.dumps(codes_document(rows), indent=2))
        case "markdown":
            print(markdown(rows), end="")
        case _:
            print(render_codes(rows, style_of(sys.stdout, args.color, os.environ)), end="")
    return 0


VERB = Verb(
    name="prepares",
    summary="how the last prepare of each claim ended, and whether waiting helps",
    description=(
        "Lists what the DRA drivers of this node remember of their prepares; needs no agent. Exits with 0 if "
        "all claims are prepared or there are none, 1 if what fails may pass by itself (transient, unknown), "
        "2 if it will not (bad-config, failed-device, permanent), 77 or 70 if a file cannot be used."
    ),
    examples=(
        ("drahealth prepares", "every claim, those that fail first"),
        ("drahealth prepares --codes cdi.write", "what a code in a pod's event means, and what to do"),
    ),
    add_arguments=add_arguments,
    main=main,
)
