"""What the output is: its width, whether it takes colour, and the few escape sequences that are used.

Colour is for a terminal only, unless it was asked for; NO_COLOR, FORCE_COLOR and TERM=dumb are heard.
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


@dataclass(frozen=True, slots=True)
class Style:
    """How to write for one output."""

    width: int | None = None
    """Columns; None is no terminal: nothing is wrapped, so that a line can be searched."""
    height: int | None = None
    colour: bool = False
    unicode: bool = True

    def paint(self, text: str, *names: str) -> str:
        """The text in the colours and weights named, or as it is."""
        if not (self.colour and text and names):
            return text
        return f"\x1b[{';'.join(SGR[name] for name in names)}m{text}\x1b[0m"


def takes_colour(choice: str, environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Whether to write colours. ``--color`` wins, then NO_COLOR, FORCE_COLOR, and what the output is."""
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return is_terminal and environ.get("TERM") != "dumb"


def can_redraw(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether a picture can be drawn over the one before."""
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"


def style_of(stream: TextIO, choice: str, environ: Mapping[str, str]) -> Style:
    """How to write to a stream, as it is at this moment: a window may have been resized."""
    is_terminal = stream.isatty()
    size = None
    if is_terminal:
        try:
            size = os.get_terminal_size(stream.fileno())
        except OSError:  # a terminal that went away, or has no size
            size = None
    return Style(
        width=size.columns or None if size else None,
        height=size.lines or None if size else None,
        colour=takes_colour(choice, environ, is_terminal=is_terminal),
        unicode="utf" in (stream.encoding or "").lower(),
    )


def program() -> str:
    """How this program was called, for text that tells people what to type."""
    called = sys.argv[0] if sys.argv else ""
    name = os.path.basename(called)
    if name in {"__main__.py", "-m", "-c", ""}:
        return "python -m agent"
    on_path = any(os.path.join(d, name) == called for d in os.get_exec_path())
    return name if on_path else called
