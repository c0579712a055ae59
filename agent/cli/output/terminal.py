"""Properties of an output stream (width, colour, character set), and escape sequences for colours.

Colour is for terminals only, unless requested; NO_COLOR, FORCE_COLOR and TERM=dumb are respected.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TextIO

SGR: Final = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "magenta": "35",
    "cyan": "36",
}
COLOURS: Final = ("auto", "always", "never")
HELP_COLUMNS: Final = 80
"""Width of help texts without a terminal."""


@dataclass(frozen=True, slots=True)
class TextStyle:
    """Properties of an output stream that the format of text depends on."""

    width: int | None = None
    """Width [columns]; None: no terminal, lines are not wrapped, so that grep finds them whole."""
    height: int | None = None
    """Height of the terminal [lines]; None: no terminal, or not known."""
    colour: bool = False
    unicode: bool = True

    @property
    def arrow(self) -> str:
        """Sign before a paragraph of advice."""
        return "→ " if self.unicode else "> "

    @property
    def bullet(self) -> str:
        """Sign before an item that needs no action."""
        return "· " if self.unicode else "- "

    def paint(self, text: str, *names: str) -> str:
        """Return the text in the named colours and weights, or unchanged if the output has no colours."""
        if not (self.colour and text and names):
            return text
        return f"\x1b[{';'.join(SGR[name] for name in names)}m{text}\x1b[0m"


def uses_colour(choice: str, environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Return whether the output has colours.

    The first of these that gives a choice decides: the value `choice` of ``--color``, NO_COLOR, FORCE_COLOR,
    and whether the output is a terminal.
    """
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return is_terminal and environ.get("TERM") != "dumb"


def can_redraw(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether `stream` is a terminal that can move its cursor, as a live table needs."""
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"


def style_of(stream: TextIO, choice: str, environ: Mapping[str, str]) -> TextStyle:
    """Return the present style of `stream`, which changes if the terminal window is resized.

    `choice` is the value of ``--color``.
    """
    is_terminal = stream.isatty()
    size = None
    if is_terminal:
        try:
            size = os.get_terminal_size(stream.fileno())
        except OSError:  # a terminal that is gone, or has no size
            size = None
    return TextStyle(
        width=size.columns or None if size else None,
        height=size.lines or None if size else None,
        colour=uses_colour(choice, environ, is_terminal=is_terminal),
        unicode="utf" in (stream.encoding or "").lower(),
    )


def terminal_width() -> int:
    """Return the number of columns for help texts: ``COLUMNS``, else those of the terminal, else 80."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        size = os.get_terminal_size(sys.__stdout__.fileno()) if sys.__stdout__ else None
    except (ValueError, OSError):  # a closed standard output, or no terminal
        size = None
    return size.columns if size and size.columns else HELP_COLUMNS


def program_command() -> str:
    """Return the command that started this process, for texts with commands to type."""
    called = sys.argv[0] if sys.argv else ""
    name = os.path.basename(called)
    if name in {"__main__.py", "-m", "-c", ""}:
        return "python -m agent"
    on_path = any(os.path.join(d, name) == called for d in os.get_exec_path())
    return name if on_path else called
