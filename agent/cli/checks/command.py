"""``drahealth checks``: lists the health checks of the agent, with the finding and the advice of each.

The output is a list, one check in full, a page of Markdown, or JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.json import API_VERSION, ObjectKeys
from agent.cli.output.text import (
    BADGES,
    GAP,
    ListEntry,
    RowText,
    TableCell,
    TextTable,
    clean,
    escape_markdown,
    format_entries,
    markdown_table,
    wrap,
)
from agent.cli.subcommand import Subcommand, add_output, print_result
from agent.errors import UsageError, suggestion
from agent.model.health import Severity

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.checks.catalog import CheckDescription, CheckSection
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
    from agent.cli.checks.catalog import checks_by_section
    from agent.model.settings import GpuLimits

    found = checks_by_section(GpuLimits())
    if args.code is not None:
        found = find_checks(found, args.code)

    def text(style: TextStyle) -> str:
        if len(found) == len(found[0].checks) == 1:
            return render_check(found[0].checks[0], found[0], style)
        return render_list(found, style, whole=args.code is not None)

    print_result(args, lambda: document(found), text, lambda: markdown(found))
    return 0


def find_checks(sections: Sequence[CheckSection], code: str) -> tuple[CheckSection, ...]:
    """Return the checks whose code is `code`, such as ``custom.fabric`` of ``custom.<name>``.

    If there is none, return the checks whose code begins with `code`. If there is none either, return the
    checks whose code contains `code` after a dot.

    Raises:
        UsageError: No check matches; the text suggests a similar code.
    """
    from agent.cli.checks.catalog import unlisted_check, unreadable_check

    by_code = {check.code: (group, check) for group in sections for check in group.checks}
    patterns = {known: re.escape(known).replace("<name>", "[^.*]+") for known in by_code}
    code = next((known for known, pattern in patterns.items() if re.fullmatch(pattern, code)), code)
    base = by_code.get(code.removesuffix(UNREADABLE))
    if base and code.endswith(UNREADABLE) and (derived := unreadable_check(base[1])):
        return (base[0]._replace(checks=(derived,)),)
    word = re.escape(code.lower().removesuffix(".*"))
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


# --- output ------------------------------------------------------------------------------------------------

COMMAND: Final = re.compile(r"(gpu \d|init|reload|profile|storm|wait|echo|for) .*")
"""Pattern of the texts of :attr:`CheckDescription.try_command` that are commands, not explanations."""

PREFACE: Final = """\
# Checks

All findings that drahealth can report about a device: meaning, condition, blame, advice, and how to provoke
each. This page is the output of `drahealth checks -o markdown`; `drahealth checks gpu.xid.79` prints one
check, and takes any code from a message. Thresholds are the defaults; [configuration.md](configuration.md)
lists those that can be changed.

| severity | meaning | the kubelet gets |
| --- | --- | --- |
| **unhealthy** | the device must not be used | Unhealthy |
| **unknown** | the state of the device cannot be read | Unknown |
| **degraded** | the device works, but not as it should | Healthy, with a message |
| info | worth knowing | Healthy |

Blame names the part that needs a fix: hardware, driver, workload, configuration, or the agent. A code that
ends in `.unreadable` reports that the data of the check could be read before and cannot be read any more: the
device is unknown, and the message has the file or the call and its error.

The repair is the mildest of these actions that is expected to end the fault, for programs that act on
reports. Each cause has one, and a device has the worst of its causes, in the order of this list. A GPU's
repair follows the recovery action that the driver requests, if any. A finding of severity info needs no
repair of the device, at most a restart of its workload.

| repair | meaning |
| --- | --- |
| `none` | no repair of this list is needed or known: see the advice, for example to change a configuration |
| `restart-workload` | restart the workloads that use the device |
| `reset-device` | stop the workloads that use the device, then reset it |
| `reload-driver` | drain the node, then load or bind the device's driver again, or start its services again |
| `reboot-node` | drain and reboot the node |
| `inspect-hardware` | run a diagnostic, and check seat, cables, power and cooling |
| `contact-vendor` | ask the vendor's support: its documents decide what to do |
| `replace-hardware` | replace the device or its part |

The checks of GPUs can be tried without a GPU: `gpu 0 ...` and similar commands are for a fake NVML, see
[fake-nvml.md](fake-nvml.md). An agent accepts lines that are written to `/dev/kmsg` by hand if it runs with
`--kmsg-any-facility`.
"""


def render_list(sections: Iterable[CheckSection], style: TextStyle, *, whole: bool) -> str:
    """Return the list of checks as text, one line for each check.

    Unless `whole`, XIDs and SXids (NVIDIA error codes) take one line each, with their number.
    """
    lines: list[str] = []
    for group in sections:
        lines += ["", style.paint(group.title, "bold")]
        if group.prefix and not whole:
            number = len(group.checks)
            lines.append(f"  {group.prefix}<N>{GAP}{number} codes, see drahealth checks {group.prefix[:-1]}")
            continue
        table = TextTable()
        for check in group.checks:
            severity = TableCell(check.severity.name.lower(), (BADGES[check.severity].colour,))
            table.add(check.code, severity, text=[RowText(clean(check.meaning))])
        lines += table.lines(style)
    return "\n".join(lines[1:]) + "\n"


def render_check(check: CheckDescription, section: CheckSection, style: TextStyle) -> str:
    """Return one check in full: code, severity, meaning, threshold, reason, advice."""
    entries = [ListEntry(title, clean(text)) for title, text in _facts(check, section)]
    if "/dev/kmsg" in check.try_command:
        entries.append(ListEntry("", "(needs an agent that runs with --kmsg-any-facility)"))
    severity = style.paint(check.severity.name.lower(), BADGES[check.severity].colour)
    head = f"{style.paint(check.code, 'bold')}{GAP}{severity}, blame: {check.blame}"
    meaning = wrap(check.meaning, style, first="  ", rest="  ")
    return "\n".join([head, *meaning, "", *format_entries(entries, style)]) + "\n"


def _facts(check: CheckDescription, group: CheckSection) -> Iterator[tuple[str, str]]:
    yield group.threshold_title, check.threshold
    yield group.why_title, check.why
    yield "what to do", check.advice
    yield "repair", check.repair
    yield "source", check.source
    if check.try_command:
        yield "try it", check.try_command


# --- Markdown ----------------------------------------------------------------------------------------------


def markdown(sections: Iterable[CheckSection]) -> str:
    """Return the page docs/checks.md."""
    parts = [PREFACE]
    for group in sections:
        parts.append(f"## {group.title}\n")
        if group.intro:
            parts.append(f"{group.intro}\n")
        if group.prefix:
            parts.append(_table(group))
        else:
            parts += (_section(check, group) for check in group.checks)
    return "\n".join(parts)


def _section(check: CheckDescription, group: CheckSection) -> str:
    severity = f"**{check.severity.name.lower()}**, blame: {check.blame}."
    lines = [f"### `{check.code}`", "", f"{severity} {escape_markdown(check.meaning)}", ""]
    for title, text in _facts(check, group):
        is_command = title == "try it" and COMMAND.fullmatch(text)
        lines.append(f"- {title}: {f'`{text}`' if is_command else escape_markdown(text)}")
    return "\n".join(lines) + "\n"


def _table(group: CheckSection) -> str:
    rows = [
        [group.title[:-1], "meaning", group.threshold_title, "blame", group.why_title, "what to do", "repair"]
    ]
    for check in group.checks:
        is_finding = check.severity > Severity.INFO
        severity = re.sub(r"^\w+", r"**\g<0>**", check.threshold) if is_finding else check.threshold
        number = check.code.removeprefix(group.prefix)
        rows.append([number, check.meaning, severity, check.blame, check.why, check.advice, check.repair])
    return markdown_table(rows)


# --- JSON --------------------------------------------------------------------------------------------------

CHECK: Final = ObjectKeys("severity blame source what:meaning threshold why advice repair tryIt:try_command")


def document(sections: Iterable[CheckSection]) -> dict[str, Any]:
    """Return all checks as JSON. Later versions only add keys."""
    return {
        "apiVersion": API_VERSION,
        "checks": [
            {"code": check.code, "group": group.title, **CHECK(check)}
            for group in sections
            for check in group.checks
        ],
    }
