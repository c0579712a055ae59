"""Formatting of tables, two-column lists and wrapped text for all commands. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.cli.output.text import clean

if TYPE_CHECKING:
    from agent.cli.output.terminal import TextStyle

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
    """Return `text`, which advises the operator, as a row's text with an arrow."""
    return RowText(style.arrow + clean(text), ("cyan",), 2)


def advice_of_device(advices: Iterable[str], style: TextStyle) -> Iterator[RowText]:
    """Yield the advice for one device: the first with an arrow, then all others in one dim text."""
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
            cells: One for each column.
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
            yield style.paint(line.rstrip(), *item.paint)
            yield from text


def _join(cells: Sequence[TableCell], widths: Sequence[int], style: TextStyle) -> str:
    # Escape sequences have no width: the padding is computed from the text.
    return GAP.join(
        style.paint(cell.text, *cell.paint) + " " * (width - len(cell.text))
        for cell, width in zip(cells, widths, strict=True)
    )


def _wrap_all(texts: Iterable[RowText], style: TextStyle, indent: str) -> Iterator[str]:
    for one in texts:
        yield from wrap(one.text, style, first=indent, rest=indent + " " * one.hanging, paint=one.paint)


class ListEntry(NamedTuple):
    """Entry of a list in two columns: title and text."""

    title: str
    text: str
    paint: tuple[str, ...] = ()


def format_entries(entries: Iterable[ListEntry], style: TextStyle) -> Iterator[str]:
    """Yield the lines of a list in two columns, titles and texts; a repeated title is printed once."""
    table, before = TextTable(), ""
    for entry in entries:
        title = "" if entry.title == before else entry.title
        before = entry.title
        table.add(TableCell(title, ("dim",)), text=[RowText(entry.text, entry.paint, 2)])
    return table.lines(style)


def wrap(text: str, style: TextStyle, *, first: str, rest: str, paint: tuple[str, ...] = ()) -> list[str]:
    """Return `text` wrapped to the terminal's width, behind `first` on the first line and `rest` on others.

    Each line is painted on its own, so that a table that is cut off leaves no colour behind.
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


def _paint_after_indent(line: str, style: TextStyle, paint: tuple[str, ...]) -> str:
    body = line.lstrip(" ")
    return line[: len(line) - len(body)] + style.paint(body, *paint)
