"""The checks of ``drahealth conform`` as a list, a page of Markdown, a document. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.document import API_VERSION
from agent.cli.output.text import GAP, wrap

if TYPE_CHECKING:
    from agent.cli.output.terminal import Style
    from agent.conform.table import Check

GROUPS: Final = {
    "socket": "The service socket",
    "health": "The health stream",
    "registration": "Registration",
}
"""By the first word of a code."""

PREFACE: Final = """\
# What a kubelet makes of a driver

Everything that `drahealth conform` looks at when it plays the kubelet to a DRA driver, whoever wrote it. This
page is what `drahealth conform --checks -o markdown` prints.

```
drahealth conform --socket /var/lib/kubelet/plugins/gpu.example.com/dra.sock
drahealth conform --plugin-dir /var/lib/kubelet/plugins_registry --driver gpu.example.com
```

The first looks at health alone, on any socket that serves it: a driver's, or an agent's
`drivers/<driver>.sock`. The second finds the driver by its registration, and looks at that, too. Without
`--for` it listens for 40 s, longer than the lease that the kubelet gives a device by default; where leases
are longer, it says for how long to listen.

It is harmless to a driver in use: it opens health streams, asks who it is, says that it is registered, and
has it prepare no claims. While a kubelet is attached, there are two. The exception is `--refuse`, which tells
the driver once that it was not registered; some drivers end then.

A check passes, warns, fails, or is not run, for a reason that is told; what was not run never counts as
passed. The exit code is 0 if all passed that were run, 1 with a warning, 2 with a failure, 3 if nothing could
be judged; 64 for a command line that means nothing, 69 if nobody serves the socket, 77 if it may not be
opened. `-o json` has everything for programs.

Meant are kubelets 1.34 to 1.37, unless a text names a release.
"""


def _by_group(checks: Iterable[Check]) -> Iterable[tuple[str, list[Check]]]:
    for head, some in groupby(checks, key=lambda check: check.code.partition(".")[0]):
        yield GROUPS[head], list(some)


def render_checks(checks: Sequence[Check], style: Style) -> str:
    """By group: what holds of a good driver, how it is looked at, why it matters."""
    width = max(len(check.code) for check in checks)
    indent = " " * (2 + width + len(GAP))
    lines: list[str] = []
    for title, some in _by_group(checks):
        lines += ["", style.paint(title, "bold")]
        for check in some:
            first, *rest = wrap(check.title, style, first=indent, rest=indent)
            lines += [f"  {check.code:{width}}{GAP}{first[len(indent) :]}", *rest]
            lines += wrap(check.looks, style, first=indent, rest=indent, paint=("dim",))
            lines += wrap(check.why, style, first=indent, rest=indent, paint=("dim",))
    return "\n".join(lines[1:]) + "\n"


def checks_document(checks: Iterable[Check]) -> dict[str, Any]:
    """All checks for programs."""
    return {
        "apiVersion": API_VERSION,
        "checks": [
            {
                "code": check.code,
                "title": check.title,
                "looksAt": check.looks,
                "why": check.why,
                "advice": check.advice,
            }
            for check in checks
        ],
    }


def markdown(checks: Iterable[Check]) -> str:
    """The page."""
    parts = [PREFACE]
    for title, some in _by_group(checks):
        parts.append(f"## {title}\n")
        table = [
            ["code", "what holds of a good driver", "how it is seen", "what a kubelet does", "what to do"]
        ]
        table += [["---"] * 5]
        table += [
            [f"`{one.code}`", *map(_escape, (one.title, one.looks, one.why, one.advice))] for one in some
        ]
        parts.append("".join(f"| {' | '.join(cells)} |\n" for cells in table))
    return "\n".join(parts)


def _escape(text: str) -> str:
    """Text that Markdown would take for something else: a placeholder for a tag, a bar for a column."""
    return re.sub(r"[<>|]", r"\\\g<0>", text)
