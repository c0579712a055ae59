"""``drahealth checks``: lists the health checks of the agent, with the finding and the advice of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent.cli.subcommand import Subcommand, add_output, print_result
from agent.errors import UsageError, suggestion

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.checks.catalog import CheckSection
    from agent.cli.output.terminal import TextStyle

UNREADABLE = ".unreadable"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "code",
        metavar="CODE",
        nargs="?",
        help="a code, the first parts of codes, a word in codes, or the number of an XID",
    )
    add_output(parser, markdown_with="")


def main(args: Namespace) -> int:
    from agent.cli.checks.catalog import check_sections
    from agent.cli.checks.text import document, markdown, render_check, render_list
    from agent.model.settings import GpuLimits

    found = check_sections(GpuLimits())
    if args.code is not None:
        found = find_checks(found, args.code)

    def text(style: TextStyle) -> str:
        if len(found) == len(found[0].checks) == 1:
            return render_check(found[0].checks[0], found[0], style)
        return render_list(found, style, whole=args.code is not None)

    print_result(args, lambda: document(found), text, lambda: markdown(found))
    return 0


def find_checks(sections: Sequence[CheckSection], code: str) -> tuple[CheckSection, ...]:
    """Return the checks whose code is `code`; if none, begins with `code`; if none, has `code` after a dot.

    Raises:
        UsageError: No check matches; the text suggests a similar code.
    """
    from agent.cli.checks.catalog import unlisted_check, unreadable_check

    by_code = {check.code: (group, check) for group in sections for check in group.checks}
    base = by_code.get(code.removesuffix(UNREADABLE))
    if base and code.endswith(UNREADABLE) and (derived := unreadable_check(base[1])):
        return (base[0]._replace(checks=(derived,)),)
    word = re.escape(code.lower())
    for pattern in (word, rf"{word}.*", rf".*\.{word}(\..*)?"):
        found = [
            group._replace(checks=checks)
            for group in sections
            if (checks := tuple(check for check in group.checks if re.fullmatch(pattern, check.code)))
        ]
        if found:
            return tuple(found)
    for group in sections:
        number = code.lower().removeprefix(group.prefix)
        if group.prefix and code.lower() != number and re.fullmatch(r"[0-9]{1,9}", number):
            return (group._replace(checks=(unlisted_check(group.prefix, int(number)),)),)
    raise UsageError(
        f"no check has the code {code!r}{suggestion(code, by_code)}\n"
        "list checks with 'drahealth checks', and errors of claims with 'drahealth prepares --codes'"
    )


VERB = Subcommand(
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
