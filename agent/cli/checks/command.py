"""``drahealth checks``: lists the findings that the agent can report, and what to do about each."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent.cli.output.terminal import style_of
from agent.cli.verb import Verb, add_colour
from agent.errors import UsageError, suggestion

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.checks.rows import CheckGroup

UNREADABLE = ".unreadable"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "code",
        metavar="CODE",
        nargs="?",
        help="a code, the first parts of codes, a word in codes, or the number of an XID",
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "markdown"),
        default="table",
        help="output format (default: table)",
    )
    add_colour(parser)


def main(args: Namespace) -> int:
    from agent.cli.checks.rows import groups
    from agent.cli.checks.text import document, markdown, render_check, render_list
    from agent.model.settings import GpuLimits

    found = groups(GpuLimits())
    if args.code is not None:
        found = find(found, args.code)
    style = style_of(sys.stdout, args.color, os.environ)
    match args.output:
        case "json":
            print(json.dumps(document(found), indent=2))
        case "markdown":
            print(markdown(found), end="")
        case _ if len(found) == len(found[0].checks) == 1:
            print(render_check(found[0].checks[0], found[0], style), end="")
        case _:
            print(render_list(found, style, whole=args.code is not None), end="")
    return 0


def find(groups: Sequence[CheckGroup], wanted: str) -> tuple[CheckGroup, ...]:
    """Return the checks with the code `wanted`, else with codes that begin with it, else with it after a dot.

    Raises:
        UsageError: No check matches; the text suggests a similar code.
    """
    from agent.cli.checks.rows import unlisted, unreadable

    by_code = {check.code: (group, check) for group in groups for check in group.checks}
    base = by_code.get(wanted.removesuffix(UNREADABLE))
    if base and wanted.endswith(UNREADABLE) and (derived := unreadable(base[1])):
        return (base[0]._replace(checks=(derived,)),)
    word = re.escape(wanted.lower())
    for pattern in (word, rf"{word}.*", rf".*\.{word}(\..*)?"):
        found = [
            group._replace(checks=checks)
            for group in groups
            if (checks := tuple(check for check in group.checks if re.fullmatch(pattern, check.code)))
        ]
        if found:
            return tuple(found)
    for group in groups:
        number = wanted.lower().removeprefix(group.prefix)
        if group.prefix and wanted.lower() != number and re.fullmatch(r"[0-9]{1,9}", number):
            return (group._replace(checks=(unlisted(group.prefix, int(number)),)),)
    raise UsageError(
        f"no check {wanted!r}{suggestion(wanted, by_code)}\n"
        "see 'drahealth checks', and 'drahealth prepares --codes' for the errors of claims"
    )


VERB = Verb(
    name="checks",
    summary="list all checks, with meaning, threshold and advice",
    description=(
        "Lists all checks, or explains one check in full. Needs neither an agent nor the devices. Thresholds "
        "are the defaults."
    ),
    examples=(
        ("drahealth checks gpu.xid.79", "the meaning of a code in a message, and what to do"),
        ("drahealth checks nvlink", "all checks with this word in their codes"),
    ),
    add_arguments=add_arguments,
    main=main,
)
