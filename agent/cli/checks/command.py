"""``drahealth checks``: what the agent can say of a device, and what to do about each."""

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

    from agent.cli.checks.check import Group

UNREADABLE = ".unreadable"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "code",
        metavar="CODE",
        nargs="?",
        help="one check in full, or all that begin with this or have this word; an XID's number will do",
    )
    parser.add_argument(
        "-o", "--output", choices=("table", "json", "markdown"), default="table", help="(default: table)"
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


def find(groups: Sequence[Group], wanted: str) -> tuple[Group, ...]:
    """The checks that are meant, in their groups: this code, else what begins so, else what has the word.

    Raises:
        UsageError: there is none; says which may have been meant.
    """
    from agent.cli.checks.rows import unlisted, unreadable

    by_code = {check.code: (group, check) for group in groups for check in group.checks}
    whole = by_code.get(wanted.removesuffix(UNREADABLE))
    if whole and wanted.endswith(UNREADABLE) and (derived := unreadable(whole[1])):
        return (whole[0]._replace(checks=(derived,)),)
    word = re.escape(wanted.lower())
    for pattern in (word, rf"{word}.*", rf".*\.{word}(\..*)?"):
        some = [
            group._replace(checks=checks)
            for group in groups
            if (checks := tuple(check for check in group.checks if re.fullmatch(pattern, check.code)))
        ]
        if some:
            return tuple(some)
    for group in groups:
        number = wanted.lower().removeprefix(group.prefix)
        if group.prefix and wanted.lower() != number and re.fullmatch(r"[0-9]{1,9}", number):
            return (group._replace(checks=(unlisted(group.prefix, int(number)),)),)
    raise UsageError(
        f"{wanted!r} is no check{suggestion(wanted, by_code)}\n"
        "'drahealth checks' lists them, 'drahealth prepares --codes' what is said of claims"
    )


VERB = Verb(
    name="checks",
    summary="what can be said of a device, what it means, what to do",
    description=(
        "Prints the catalogue of checks: with a code one in full, with the beginning of codes those. Needs "
        "neither an agent nor the devices. Numbers are the defaults."
    ),
    examples=(
        ("drahealth checks gpu.xid.79", "what a message means, and what to do"),
        ("drahealth checks nvlink", "all checks with this word in their codes"),
    ),
    add_arguments=add_arguments,
    main=main,
)
