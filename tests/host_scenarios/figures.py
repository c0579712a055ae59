"""Table of messages and their latency, for information: no test depends on it."""

from typing import Final, NamedTuple

from agents import print_figure

REAL: Final = "real"
EMULATED: Final = "emulated"
HEAD: Final = "| signal | how | cause to message | what the subscriber received |\n|---|---|---|---|"


class Figure(NamedTuple):
    """Cause with its message and latency."""

    signal: str
    how: str
    """Part of the cause that was real."""
    took_s: float
    """Time from the cause to the message at the subscriber [s]."""
    published: str

    def __str__(self) -> str:
        took = f"{self.took_s * 1000:.0f} ms" if self.took_s < 1 else f"{self.took_s:.1f} s"
        return f"| {self.signal} | {self.how} | {took} | {self.published} |"


class Figures(list[Figure]):
    """Figures in the order of measurement."""

    def print_table(self) -> None:
        """Print the table."""
        print_figure("\n".join(["", HEAD, *map(str, self)]))
