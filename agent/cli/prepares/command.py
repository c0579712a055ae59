"""``drahealth prepares``: lists how each claim's last prepare ended, even after its events expired."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli.output.text import clean
from agent.cli.subcommand import (
    INTERNAL,
    NOT_ALLOWED,
    Subcommand,
    UnreadablePath,
    add_output,
    add_settings,
    load_config,
    print_result,
)
from agent.config.config import DRIVERS
from agent.errors import UsageError, suggestion

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.store.driver_files import LedgerFileContent


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
        help="also read this prepares.json of a driver; may be given again",
    )
    add_output(parser, markdown_with="--codes")
    add_settings(parser, "--state-dir", "--kubelet-dir")


def main(args: Namespace) -> int:
    if args.codes:
        return _show_codes(args)
    if args.output == "markdown":
        raise UsageError("-o markdown is only possible with --codes\ntry 'drahealth prepares --help'")
    from agent.cli.prepares.text import document, exit_of, prepare_records, render, render_none
    from agent.store.driver_files import LEDGER_FILE

    config = load_config(args)
    patterns = list(_state_dir_patterns(config.kubelet_dir, config.state_dir, args.driver))
    found, problems, absent = _read_prepares_files(patterns, args.file, args.driver)
    searched = [*(top / below / LEDGER_FILE for top, below in patterns), *args.file]
    records = prepare_records(found)
    if args.claim is not None:
        names = {name for record in records for name in record.names}
        records = tuple(record for record in records if args.claim in record.names)
        if not records and not problems:
            raise UsageError(f"no prepare of claim {args.claim!r} is known{suggestion(args.claim, names)}")

    def text(style: TextStyle) -> str:
        listed = render(records, found, style, now_s=time.time(), whole=args.claim is not None)
        return listed or render_none(found, searched, absent, style, unread=len(problems))

    print_result(args, lambda: document(records, found, problems, searched), text)
    for problem in problems:
        print(f"drahealth: {clean(f'{problem.path}: {problem.reason}')}", file=sys.stderr)
    return max((problem.exit_code for problem in problems), default=exit_of(records))


def _state_dir_patterns(kubelet_dir: Path, state_dir: Path, driver: str | None) -> Iterator[tuple[Path, str]]:
    """Yield the directories where drivers store their state: a parent directory and a path relative to it.

    If `driver` is None, the path contains ``*`` instead of the driver's name.
    """
    name = driver or "*"
    yield kubelet_dir / "plugins", f"{name}/drahealth"
    yield state_dir / DRIVERS, name


def _read_prepares_files(
    patterns: Iterable[tuple[Path, str]], files: Sequence[Path], driver: str | None
) -> tuple[list[LedgerFileContent], list[UnreadablePath], list[Path]]:
    """Return the contents of the drivers' prepares.json files, unreadable paths, and absent directories."""
    from agent.model.reading import Absence
    from agent.store import driver_files
    from agent.store.state_files import UnusableFile
    from agent.system.files import ReadError, read_bounded

    found: list[LedgerFileContent] = []
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
            exit_code = NOT_ALLOWED if isinstance(error, PermissionError) else INTERNAL
            problems.append(UnreadablePath(top, error.strerror or str(error), exit_code))
            continue
        listed += [top / directory / rest / driver_files.LEDGER_FILE for directory in names]
    for path in [*listed, *files]:
        try:
            file = read_bounded(path, driver_files.SIZE_MAX, is_input=path in files)
            content = driver_files.decode_ledger(file.data)
        except ReadError as error:
            if path in files or error.absence is not Absence.ABSENT:
                problems.append(
                    UnreadablePath(path, error.reason, NOT_ALLOWED if error.is_forbidden else INTERNAL)
                )
        except UnusableFile as error:
            problems.append(UnreadablePath(path, str(error), INTERNAL))
        else:
            if driver in (None, content.driver):
                found.append(content)
    return found, problems, absent


def _show_codes(args: Namespace) -> int:
    from agent.cli.prepares.text import codes_document, render_codes, render_codes_markdown
    from agent.prepare.failure_kinds import FAILURE_KINDS, FAMILY

    wanted = args.claim or ""
    rows = [
        row for row in FAILURE_KINDS if f"{row.code}.".startswith(f"{wanted.rstrip('.')}." if wanted else "")
    ]
    rows = rows or [
        row for row in FAILURE_KINDS if row.code.endswith(FAMILY) and wanted.startswith(row.code[:-1])
    ]
    if not rows:
        known = [row.code for row in FAILURE_KINDS]
        raise UsageError(
            f"no prepare error code begins with {wanted!r}{suggestion(wanted, known)}\n"
            "it may be the code of a check (see 'drahealth checks'), or the driver's own"
        )
    print_result(
        args,
        lambda: codes_document(rows),
        lambda style: render_codes(rows, style),
        lambda: render_codes_markdown(rows),
    )
    return 0


VERB = Subcommand(
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
