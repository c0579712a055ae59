"""How many uses of devices are followed and kept.

Apart from what a use is: an agent whose node knows no claims is told this, and never has one.
"""

from typing import Final, NamedTuple

RUNNING_MAX: Final = 20_000
"""Uses that are followed at the same time: many times what a node can run."""


class Limits(NamedTuple):
    """How much of what has ended is kept."""

    rows: int = 10_000
    """Uses; 0: nothing is kept, nor written."""
    age_s: int = 30 * 86_400
    """Since they ended [s]."""
    size: int = 64 << 20
    """Of the file, whatever the rows: the most that they can be take half of it [bytes]."""
