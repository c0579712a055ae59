"""The checks as text: a list, one in full, a page of Markdown, a document. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.document import API_VERSION
from agent.cli.output.text import GAP, LOOKS, Entry, clean, format_entries, wrap
from agent.model.health import Severity

if TYPE_CHECKING:
    from agent.cli.checks.check import Check, Group
    from agent.cli.output.terminal import Style

COMMAND: Final = re.compile(r"(gpu \d|init|reload|profile|storm|wait|echo|for) .*")
"""What of "try it" is typed, not read."""

PREFACE: Final = """\
# Checks

Everything that drahealth can say of a device: what it means, when it is said, whose it is, what to do, and
how to see it happen. This page is what `drahealth checks -o markdown` prints; `drahealth checks gpu.xid.79`
prints one check, and takes any code out of a message. Numbers are the defaults;
[configuration.md](configuration.md) says how to change those that can be.

| word | meaning | the kubelet is told |
| --- | --- | --- |
| **unhealthy** | not to be used | Unhealthy |
| **unknown** | nobody can look | Unknown |
| **degraded** | it works, but not as it should | Healthy, with a message |
| info | worth knowing | Healthy |

Blame is who can mend it: hardware, driver, workload, configuration, or the agent. A code with `.unreadable`
behind it says that what the check reads was readable and no longer is: the device is unknown, and the message
has the file or the call and its error.

No GPU is needed to try the checks of GPUs: `gpu 0 ...` and the like are commands for a fake NVML, see
[fake-nvml.md](fake-nvml.md). What is written to `/dev/kmsg` by hand is heard by an agent that runs with
`--kmsg-any-facility`.
"""


def render_list(groups: Iterable[Group], style: Style, *, whole: bool) -> str:
    """One line per check.

    Args:
        whole: Lists of codes too; else only how many they are.
    """
    lines: list[str] = []
    for group in groups:
        lines += ["", style.paint(group.title, "bold")]
        if group.prefix and not whole:
            number = len(group.checks)
            lines.append(f"  {group.prefix}<N>{GAP}{number} codes, see drahealth checks {group.prefix[:-1]}")
            continue
        codes = max(len(check.code) for check in group.checks)
        words = max(len(check.severity.name) for check in group.checks)
        for check in group.checks:
            word = check.severity.name.lower()
            lead = f"  {check.code:{codes}}{GAP}"
            indent = " " * (len(lead) + words + len(GAP))
            first, *rest = wrap(clean(check.what), style, first=indent, rest=indent)
            painted = style.paint(word, LOOKS[check.severity].colour) + " " * (words - len(word))
            lines += [f"{lead}{painted}{GAP}{first[len(indent) :]}", *rest]
    return "\n".join(lines[1:]) + "\n"


def render_check(check: Check, group: Group, style: Style) -> str:
    """One check in full."""
    entries = [Entry(title, clean(text)) for title, text in _facts(check, group)]
    if "/dev/kmsg" in check.try_it:
        entries.append(Entry("", "(an agent hears it that runs with --kmsg-any-facility)"))
    verdict = style.paint(check.severity.name.lower(), LOOKS[check.severity].colour)
    head = f"{style.paint(check.code, 'bold')}{GAP}{verdict}, blame: {check.blame}"
    what = wrap(check.what, style, first="  ", rest="  ")
    return "\n".join([head, *what, "", *format_entries(entries, style)]) + "\n"


def _facts(check: Check, group: Group) -> Iterator[tuple[str, str]]:
    yield group.when, check.threshold
    yield group.why, check.why
    yield "what to do", check.advice
    yield "source", check.source
    if check.try_it:
        yield "try it", check.try_it


def document(groups: Iterable[Group]) -> dict[str, Any]:
    """All checks for programs."""
    return {
        "apiVersion": API_VERSION,
        "checks": [
            {
                "code": check.code,
                "group": group.title,
                "severity": check.severity.name.lower(),
                "blame": check.blame,
                "source": check.source,
                "what": check.what,
                "threshold": check.threshold,
                "why": check.why,
                "advice": check.advice,
                "tryIt": check.try_it,
            }
            for group in groups
            for check in group.checks
        ],
    }


def markdown(groups: Iterable[Group]) -> str:
    """The page."""
    parts = [PREFACE]
    for group in groups:
        parts.append(f"## {group.title}\n")
        if group.text:
            parts.append(f"{group.text}\n")
        if group.prefix:
            parts.append(_table(group))
        else:
            parts += (_section(check, group) for check in group.checks)
    return "\n".join(parts)


def _section(check: Check, group: Group) -> str:
    verdict = f"**{check.severity.name.lower()}**, blame: {check.blame}."
    lines = [f"### `{check.code}`", "", f"{verdict} {_escape(check.what)}", ""]
    for title, text in _facts(check, group):
        lines.append(f"- {title}: {_typed(text) if title == 'try it' else _escape(text)}")
    return "\n".join(lines) + "\n"


def _table(group: Group) -> str:
    rows = [[group.title[:-1], "what it means", group.when, "blame", group.why, "what to do"], ["---"] * 6]
    for check in group.checks:
        is_told = check.severity > Severity.INFO
        verdict = re.sub(r"^\w+", r"**\g<0>**", check.threshold) if is_told else check.threshold
        number = check.code.removeprefix(group.prefix)
        cells = (number, check.what, verdict, check.blame, check.why, check.advice)
        rows.append([_escape(cell) for cell in cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _typed(text: str) -> str:
    return f"`{text}`" if COMMAND.fullmatch(text) else _escape(text)


def _escape(text: str) -> str:
    """Text that Markdown would take for something else: a placeholder for a tag, a bar for a column."""
    return re.sub(r"[<>|]", r"\\\g<0>", text)
