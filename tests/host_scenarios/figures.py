"""The table of what was heard, and how soon. Figures are for people: nothing is judged by them."""

from typing import Final, NamedTuple

from agents import say

REAL: Final = "real"
EMULATED: Final = "emulated"
HEAD: Final = "| signal | how | cause to message | what the subscriber heard |\n|---|---|---|---|"


class Figure(NamedTuple):
    """One cause, and what it came to."""

    signal: str
    how: str
    """What of it was real."""
    took_s: float
    """From the cause to the message at the subscriber [s]."""
    heard: str

    def __str__(self) -> str:
        took = f"{self.took_s * 1000:.0f} ms" if self.took_s < 1 else f"{self.took_s:.1f} s"
        return f"| {self.signal} | {self.how} | {took} | {self.heard} |"


class Figures(list[Figure]):
    """All of them, in the order in which they were measured."""

    def tell(self) -> None:
        """Prints the table."""
        say("\n".join(["", HEAD, *map(str, self)]))
