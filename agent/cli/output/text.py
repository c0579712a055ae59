"""Formatting of names, words, numbers and tables for the output of all commands and for log lines. Pure.

The module removes escape sequences from texts of other programs, because they could move the cursor.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.errors import ERROR_CHARS, without_middle
from agent.model.health import Severity

if TYPE_CHECKING:
    from agent.cli.output.terminal import TextStyle
    from agent.model.health import DeviceHealth
    from agent.model.reading import SourceSample
    from agent.model.report import Report

CONTAINER_ID: Final = re.compile(r"\b([0-9a-f]{13})[0-9a-f]{51}\b")

_LONG_WORD: Final = re.compile(rf"\S{{{ERROR_CHARS + 1},}}")

MIG_INSTANCE: Final = re.compile(r"(?P<gpu>.+)-mig-\d+-\d+")
"""Pattern of a MIG instance's name, which contains the name of its GPU."""

NUMBERED: Final = re.compile(r"(?P<stem>.*\D)(?P<number>0|[1-9]\d{0,8})")

MIN_RANGE: Final = 3
"""Least number of consecutive numbered names that are written as a range."""


class Badge(NamedTuple):
    """Sign, word and colour that show a severity or a verdict.

    The attribute ``ascii`` is the sign for an output without Unicode.
    """

    sign: str
    ascii: str
    word: str
    colour: str

    def coloured_sign(self, style: TextStyle) -> str:
        return style.paint(self.sign if style.unicode else self.ascii, self.colour)

    def coloured_word(self, style: TextStyle) -> str:
        return style.paint(self.word, self.colour)


BADGES: Final = {
    Severity.OK: Badge("●", "+", "Healthy", "green"),
    Severity.INFO: Badge("●", "+", "Healthy", "green"),
    Severity.DEGRADED: Badge("▲", "!", "Degraded", "yellow"),
    Severity.UNHEALTHY: Badge("✖", "x", "Unhealthy", "red"),
    Severity.UNKNOWN: Badge("◌", "?", "Unknown", "magenta"),
}


def clean(text: str) -> str:
    """Return `text` with unprintable characters, which a terminal might obey, replaced by U+FFFD.

    A word over ERROR_CHARS, such as a name in a damaged file, has no middle: it would widen a whole table.
    """
    if len(text) > ERROR_CHARS:
        text = _LONG_WORD.sub(lambda found: without_middle(found[0]), text)
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def shorten_ids(text: str) -> str:
    """Return `text` without escape sequences, with container IDs cut to the 13 digits that crictl shows."""
    return CONTAINER_ID.sub(r"\1", clean(text))


def escape_markdown(text: str) -> str:
    """Return `text` with angle brackets and bars escaped, which Markdown would read as markup."""
    return re.sub(r"[<>|]", r"\\\g<0>", text)


def markdown_table(rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table with escaped cells; the first row holds the titles."""
    titles, *cells = ([escape_markdown(cell) for cell in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ["---"] * len(titles), *cells))


# --- devices and sources -----------------------------------------------------------------------------------


def default_pool(report: Report) -> str:
    """Return the name of the DRA pool that is left out of device names in the output.

    This is the pool with the name of the node. If the name of the node is not known, it is the only pool, if
    any.
    """
    pools = {device.pool for device in report.devices}
    return report.node or (pools.pop() if len(pools) == 1 else "")


def device_name(device: DeviceHealth, default: str) -> str:
    """Return ``driver/pool/name`` of a device. An empty driver and the pool `default` are left out."""
    pool = "" if device.pool == default else device.pool
    return clean("/".join(filter(None, (device.driver, pool, device.device))))


def name_without_pool(subject: str, default: str) -> str:
    """Return a device name (``name`` or ``driver/pool/name``) without the pool `default`."""
    return clean(subject.replace(f"/{default}/", "/"))


def parent_gpu(name: str) -> str:
    """Return the name of the GPU that the MIG instance `name` belongs to; empty: not a MIG instance."""
    found = MIG_INSTANCE.fullmatch(name)
    return found["gpu"] if found else ""


def hardware_identity(device: DeviceHealth) -> str:
    """Return the product, UUID, PCI address and serial number of a device, if known; empty: none is known."""
    known = dict(device.attributes)
    serial = known.get("serial")
    parts = [known.get(name) for name in ("profile", "product", "uuid", "pciBusId")]
    return clean(", ".join(filter(None, [*parts, serial and f"serial {serial}"])))


def format_instances(folded: int, instances: int) -> str:
    """Return the text on the MIG instances that share their GPU's line, such as ``and its 7 instances``.

    If only `folded` of `instances` share the line: ``and 6 of its 7 instances``. Empty if `folded` is 0.
    """
    if not folded:
        return ""
    many = f"{instances} instances" if instances > 1 else "instance"
    return f"and its {many}" if folded == instances else f"and {folded} of its {many}"


def format_ranges(names: Iterable[str]) -> str:
    """Return `names` as a text in which consecutive numbers form a range: ``cpus, gpu-0 to gpu-7``."""
    parts: list[str] = []
    for _, group in groupby(enumerate(names), key=lambda pair: _range_key(pair[1], pair[0])):
        run = [name for _, name in group]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) >= MIN_RANGE else run
    return ", ".join(parts)


def _range_key(name: str, position: int) -> tuple[str, int]:
    found = NUMBERED.fullmatch(name)
    return (found["stem"], int(found["number"]) - position) if found else (name, -position)


def explains_absence(source: SourceSample) -> bool:
    """Return whether to show the operator why a source is absent.

    Most machines have no NVML library, so its absence is explained only if the library's path was
    configured.
    """
    is_path = "/" in source.detail.partition(":")[0]
    return bool(source.detail) and (is_path or not source.name.startswith("nvml"))


# --- numbers -----------------------------------------------------------------------------------------------


def format_bytes(size: int) -> str:
    """Return a size in bytes with a binary unit: ``512 B``, ``48.0 KiB``, ``33.1 MiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def format_count(number: int, singular: str, plural: str = "") -> str:
    """Return the number and its noun: ``1 device``, ``2 devices``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


# --- tables ------------------------------------------------------------------------------------------------

GAP: Final = "  "
"""Space between two columns of a table."""


class TableCell(NamedTuple):
    """Text of one table cell, with its colours."""

    text: str
    paint: tuple[str, ...] = ()


class RowText(NamedTuple):
    """Text of a table row; it is wrapped, and printed next to the row's cells or below them."""

    text: str
    paint: tuple[str, ...] = ()
    hanging: int = 0
    """Extra indent of all lines of the text but the first [columns]."""


def advice(text: str, style: TextStyle) -> RowText:
    """Return the advice `text` as the text of a table row, with an arrow before it."""
    return RowText(style.arrow + clean(text), ("cyan",), 2)


def advice_of_device(advices: Iterable[str], style: TextStyle) -> Iterator[RowText]:
    """Yield the advice for one device as texts of a table row.

    The first text has an arrow. All other advice is in a second text, which is dim.
    """
    first, *others = dict.fromkeys(filter(None, advices)) or ("",)
    if first:
        yield advice(first, style)
    if others:
        yield RowText(f"then, if still reported: {'; '.join(map(clean, others))}", ("dim",), 2)


class _TableRow(NamedTuple):
    cells: tuple[TableCell, ...]
    sign: str
    texts: tuple[RowText, ...]
    paint: tuple[str, ...]


class TextTable:
    """Table of text with columns as wide as their widest cell."""

    def __init__(
        self,
        *titles: str,
        indent: int = 2,
        text_title: str = "",
        text_below: bool = False,
        text_indent: int = 4,
        min_text_width: int = 0,
    ) -> None:
        """Create a table; without `titles` it has no title line.

        Args:
            titles: Titles of the columns.
            indent: Width of the margin before the first cell, in which a row's sign stands [columns].
            text_title: Title of the texts next to the cells.
            text_below: True: print texts below their row; False: next to its cells.
            text_indent: Margin before texts below a row [columns].
            min_text_width: If texts next to the cells get fewer columns, they are printed below.
        """
        self._titles = titles
        self._indent = indent
        self._text_title = text_title
        self._text_below = text_below
        self._text_indent = text_indent
        self._min_text_width = min_text_width
        self._items: list[_TableRow | str] = []

    def add(
        self,
        *cells: str | TableCell,
        sign: str = "",
        text: Iterable[RowText] = (),
        paint: tuple[str, ...] = (),
    ) -> None:
        """Add a row to the table.

        Args:
            cells: Texts of the cells, one for each column.
            sign: Status sign before the row, one column wide; empty: none.
            text: Texts of the row; empty ones are left out.
            paint: Colours of the whole line.
        """
        row = tuple(cell if isinstance(cell, TableCell) else TableCell(cell) for cell in cells)
        self._items.append(_TableRow(row, sign, tuple(text), paint))

    def add_lines(self, lines: Iterable[str]) -> None:
        """Add lines that are printed unchanged, such as headings."""
        self._items += lines

    def lines(self, style: TextStyle) -> Iterator[str]:
        """Yield the formatted lines of the table, without line breaks."""
        titles = tuple(map(TableCell, self._titles))
        rows = [item.cells for item in self._items if isinstance(item, _TableRow)]
        rows += [titles] if titles else []
        widths = [max(len(cell.text) for cell in column) for column in zip(*rows, strict=True)]
        column = self._indent + sum(width + len(GAP) for width in widths)
        is_narrow = style.width is not None and style.width - column < self._min_text_width
        is_below = self._text_below or is_narrow
        margin = " " * self._indent
        if titles:
            text_title = "" if is_below else GAP + self._text_title
            line = f"{margin}{_join(titles, widths, style)}{text_title}"
            yield style.paint(line.rstrip(), "dim")
        for item in self._items:
            if isinstance(item, str):
                yield item
                continue
            lead = f"{margin[2:]}{item.sign} " if item.sign else margin
            line = f"{lead}{_join(item.cells, widths, style)}"
            indent = " " * (self._text_indent if is_below else column)
            text = list(_wrap_all(item.texts, style, indent))
            if text and not is_below:
                line += GAP + text.pop(0)[column:]
            if line.strip() or not text:  # a repeated title is left out
                yield style.paint(line.rstrip(), *item.paint)
            yield from text


def _join(cells: Sequence[TableCell], widths: Sequence[int], style: TextStyle) -> str:
    # Escape sequences have no width: the padding is computed from the text.
    return GAP.join(
        style.paint(cell.text, *cell.paint) + " " * (width - len(cell.text))
        for cell, width in zip(cells, widths, strict=True)
    )


def _wrap_all(texts: Iterable[RowText], style: TextStyle, indent: str) -> Iterator[str]:
    for text in texts:
        yield from wrap(text.text, style, first=indent, rest=indent + " " * text.hanging, paint=text.paint)


class ListEntry(NamedTuple):
    """Entry of a list in two columns: title and text."""

    title: str
    text: str
    paint: tuple[str, ...] = ()


def format_entries(entries: Iterable[ListEntry], style: TextStyle, indent: int = 2) -> Iterator[str]:
    """Yield the lines of a list in two columns, titles and texts; a repeated title is printed once.

    On a narrow terminal, the texts are below the titles: they need room for a finding code of 30 letters.
    """
    table, before = TextTable(indent=indent, text_indent=indent + 2, min_text_width=34), ""
    for entry in entries:
        title = "" if entry.title == before else entry.title
        before = entry.title
        table.add(TableCell(title, ("dim",)), text=[RowText(entry.text, entry.paint, 2)])
    return table.lines(style)


def wrap(text: str, style: TextStyle, *, first: str, rest: str, paint: tuple[str, ...] = ()) -> list[str]:
    """Return `text` wrapped to the terminal's width, `first` before the first line and `rest` before others.

    Each line has its own colour codes, so that a table that is cut off does not colour later output.
    """
    if not text:
        return []
    if style.width is None or len(first) + len(text) < style.width:
        lines = [first + text]
    else:
        width = max(style.width - 1, len(rest) + 20)
        room = max(20, *map(len, text.split()))  # a UID has 36 characters
        is_below = len(first) > max(len(rest), width - room)
        lines = [""] if is_below else []  # after a long heading the text begins below it
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=rest if is_below else first,
            subsequent_indent=rest,
            break_on_hyphens=False,
        )
    return [_paint_after_indent(line, style, paint) for line in lines]


def _paint_after_indent(line: str, style: TextStyle, paint: tuple[str, ...]) -> str:
    body = line.lstrip(" ")
    return line[: len(line) - len(body)] + style.paint(body, *paint)


# --- CSV ---------------------------------------------------------------------------------------------------


def format_csv(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV, with a line of titles. None becomes an empty value."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows(rows)
    return text.getvalue()
