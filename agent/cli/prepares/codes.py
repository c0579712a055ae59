"""What can be said of a prepare, as a list, a page of Markdown, a document. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.document import API_VERSION
from agent.cli.output.text import GAP, wrap
from agent.model.health import Health
from agent.model.prepare import ErrorClass

if TYPE_CHECKING:
    from agent.cli.output.terminal import Style
    from agent.prepare.taxonomy import Row

CLASSES: Final = {
    ErrorClass.BAD_CONFIG: "What was asked for can never be had: the claim must change.",
    ErrorClass.FAILED_DEVICE: "A device of the claim is broken: it is Unhealthy, and offered to be tainted.",
    ErrorClass.PERMANENT: "Neither the claim nor a device: the node or the driver must change.",
    ErrorClass.TRANSIENT: "Trying again can help: the driver does within the call, then the kubelet does.",
    ErrorClass.UNKNOWN: "Nothing shows what it is. The kubelet tries again.",
}
"""What each class means, the ones that last first."""

COLOURS: Final = {
    ErrorClass.BAD_CONFIG: "red",
    ErrorClass.FAILED_DEVICE: "red",
    ErrorClass.PERMANENT: "red",
    ErrorClass.TRANSIENT: "yellow",
    ErrorClass.UNKNOWN: "yellow",
}

PREFACE: Final = """\
# Prepare errors

Everything that drahealth says of a claim that a driver could not prepare: of what kind it is, what follows
from it, and what to do. This page is what `drahealth prepares --codes -o markdown` prints;
`drahealth prepares` lists how the last prepare of each claim of a node ended.

A pod's event has it as one line, `[class=... code=... device=... request=... retry=...]`, then what is wrong
and what follows. `drahealth prepares --codes CODE` explains its code, and `drahealth checks CODE` one that is
a check's. What `retry` says has to happen before trying again can help:

* `later`: time alone;
* `after-release`: somebody lets go of what the claim needs;
* `after-reset`, `after-repair`: the device is reset, or mended;
* `after-fix`: the node or the driver is mended;
* `never`: the claim is another one.

The kubelet tries again all the same, until the pod is deleted.

A code may stand in two classes: the same thing when it may pass, and when it is shown to stay. A code that
ends in `.*` stands for a family. Drivers can say codes of their own; these are handled as their class's last
row.

To see what would be made of an error, describe it: `drahealth classify --errno ENOSPC --doing cdi`,
`drahealth classify --nvml 15`, `drahealth classify 'bank 3 is locked'`. It has the patterns of the
configuration, too: [configuration.md](configuration.md) says how to add some.
"""


def _by_class(rows: Iterable[Row]) -> Iterator[tuple[ErrorClass, list[Row]]]:
    rows = list(rows)
    for kind in CLASSES:
        if some := [row for row in rows if row.error_class is kind]:
            yield kind, some


def follows(row: Row) -> str:
    """What follows from it, in words: ``retry after-repair, Unhealthy, taint NoSchedule``."""
    parts = [f"retry {row.retry}"]
    if row.health is not None:
        parts.append(Health(row.health).name.capitalize())
    if row.taint is not None:
        parts.append(f"taint {row.taint.effect}")
    return ", ".join(parts)


def render_codes(rows: Sequence[Row], style: Style) -> str:
    """By class, a line per code and what to do about it below."""
    width = max(len(row.code) for row in rows)
    arrow = "→ " if style.unicode else "> "
    lines: list[str] = []
    for kind, some in _by_class(rows):
        head = f"{style.paint(kind, 'bold', COLOURS[kind])}{GAP}{CLASSES[kind]}"
        lines += ["", head]
        for row in some:
            indent = " " * (2 + width + len(GAP))
            first, *rest = wrap(f"{row.why} ({follows(row)})", style, first=indent, rest=indent)
            lines += [f"  {row.code:{width}}{GAP}{first[len(indent) :]}", *rest]
            lines += wrap(arrow + row.advice, style, first=indent, rest=indent + "  ", paint=("cyan",))
    return "\n".join(lines[1:]) + "\n"


def codes_document(rows: Iterable[Row]) -> dict[str, Any]:
    """All codes for programs."""
    return {
        "apiVersion": API_VERSION,
        "codes": [
            {
                "code": row.code,
                "class": row.error_class,
                "scope": row.scope,
                "retry": row.retry,
                "stickySeconds": row.sticky_s,
                "health": None if row.health is None else Health(row.health).name.capitalize(),
                "taint": row.taint._asdict() if row.taint else None,
                "why": row.why,
                "advice": row.advice,
            }
            for row in rows
        ],
    }


def markdown(rows: Iterable[Row]) -> str:
    """The page."""
    parts = [PREFACE]
    for kind, some in _by_class(rows):
        parts.append(f"## {kind}\n\n{CLASSES[kind]}\n")
        table = [["code", "what it means", "reach", "what follows", "what to do"], ["---"] * 5]
        table += [
            [f"`{row.code}`", _escape(row.why), row.scope, follows(row), _escape(row.advice)] for row in some
        ]
        parts.append("".join(f"| {' | '.join(cells)} |\n" for cells in table))
    return "\n".join(parts)


def _escape(text: str) -> str:
    """Text that Markdown would take for something else: a placeholder for a tag, a bar for a column."""
    return re.sub(r"[<>|]", r"\\\g<0>", text)
