"""Words and lines: how severities, ages, sizes and entries are written for people. Pure.

Text that came from outside is cleaned here: a device's message cannot move the cursor.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.model.health import Severity

if TYPE_CHECKING:
    from agent.cli.output.terminal import Style
    from agent.model.health import DeviceHealth
    from agent.model.report import Report
    from agent.model.source import SourceSample

GAP: Final = "  "
"""Between two columns."""

CONTAINER_ID: Final = re.compile(r"\b([0-9a-f]{13})[0-9a-f]{51}\b")


class Look(NamedTuple):
    """How a severity looks. The sign and the word alone tell it too: not everybody sees colours."""

    sign: str
    ascii: str
    word: str
    colour: str


LOOKS: Final = {
    Severity.OK: Look("●", "+", "Healthy", "green"),
    Severity.INFO: Look("●", "+", "Healthy", "green"),
    Severity.DEGRADED: Look("▲", "!", "Degraded", "yellow"),
    Severity.UNHEALTHY: Look("✖", "x", "Unhealthy", "red"),
    Severity.UNKNOWN: Look("◌", "?", "Unknown", "magenta"),
}


def clean(text: str) -> str:
    """The text without what a terminal would obey: every unprintable character becomes U+FFFD."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def brief(text: str) -> str:
    """Clean, and with the ids of containers as crictl shows and takes them: 13 of their 64 digits."""
    return CONTAINER_ID.sub(r"\1", clean(text))


def word_of(severity: Severity) -> str:
    """``Healthy``, ``Degraded``, ``Unhealthy`` or ``Unknown``."""
    return LOOKS[severity].word


def home_of(report: Report) -> str:
    """The pool that needs no mention: the node's own or, on a driver's socket, the only one there is."""
    pools = {device.pool for device in report.devices}
    return report.node or (pools.pop() if len(pools) == 1 else "")


def name_of(device: DeviceHealth, home: str) -> str:
    """A device's name, behind its driver if it has one, and its pool if that does not go without saying."""
    pool = "" if device.pool == home else device.pool
    return clean("/".join(filter(None, (device.driver, pool, device.device))))


def name_of_subject(subject: str, home: str) -> str:
    """The same of what rules name: a device's name, or ``<driver>/<pool>/<name>``."""
    return clean(subject.replace(f"/{home}/", "/"))


def is_missed(source: SourceSample) -> bool:
    """Whether it takes explaining that a source is absent.

    That there is no GPU to read does not, and where there is one, a cause says it. But a library that was
    named by its path is missed.
    """
    is_named = "/" in source.detail.partition(":")[0]
    return bool(source.detail) and (is_named or not source.name.startswith("nvml"))


def format_age(seconds: float) -> str:
    """A duration as short as it is useful: ``0s``, ``95s``, ``12m``, ``31h``, ``9d``. Never negative."""
    s = max(0, int(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if s >= 2 * size:
            return f"{s // size}{unit}"
    return f"{s}s"


def format_bytes(size: int) -> str:
    """A size with a binary unit: ``512 B``, ``48.0 KiB``, ``33.1 MiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def format_count(number: int, one: str, many: str = "") -> str:
    """``1 device``, ``2 devices``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class Entry(NamedTuple):
    """One line of a list with titles."""

    title: str
    text: str
    paint: tuple[str, ...] = ()


def format_entries(entries: Sequence[Entry], style: Style) -> Iterator[str]:
    """Titles and texts in two columns; a title that repeats is left out."""
    width = max((len(entry.title) for entry in entries), default=0)
    indent = " " * (2 + width + len(GAP))
    before = ""
    for entry in entries:
        title = "" if entry.title == before else entry.title
        before = entry.title
        first, *others = wrap(entry.text, style, first=indent, rest=indent + "  ", paint=entry.paint)
        yield f"  {style.paint(title, 'dim')}{' ' * (width - len(title))}{GAP}{first[len(indent) :]}"
        yield from others


def wrap(text: str, style: Style, *, first: str, rest: str, paint: tuple[str, ...] = ()) -> list[str]:
    """Lines that fit the width, the first behind ``first``, the others behind ``rest``.

    Each is painted by itself, so that a picture cut off below leaks no colour.
    """
    if not text:
        return []
    if style.width is None or len(first) + len(text) < style.width:
        lines = [first + text]
    else:
        lines = textwrap.wrap(
            text,
            max(style.width - 1, len(rest) + 20),
            initial_indent=first,
            subsequent_indent=rest,
            break_on_hyphens=False,
        )
    return [_paint_after_indent(line, style, paint) for line in lines]


def _paint_after_indent(line: str, style: Style, paint: tuple[str, ...]) -> str:
    body = line.lstrip(" ")
    return line[: len(line) - len(body)] + style.paint(body, *paint)
