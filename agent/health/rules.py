"""What a rule may answer, and what it is shown of counters.

A rule is a function of a view. A view holds everything that its kind of subject may be judged by, and
nothing else: the samples of now, what was there at start, and how far counters have grown. Rules read no
clock and no file, and a reading that is missing is a value to them like any other.
"""

from typing import Final, NamedTuple

from agent.model.health import Finding
from agent.model.reading import Missing, Reading


class Inapplicable(NamedTuple):
    """The machine gives this rule nothing to judge."""

    reason: str


class Unevaluated(NamedTuple):
    """The rule needs more history than there is yet."""

    reason: str


class Unreadable(NamedTuple):
    """What the rule judges was readable and no longer is."""

    what: str
    why: Missing


FINE: Final = None
Answer = Finding | Inapplicable | Unevaluated | Unreadable | None
"""What a rule says. None: it looked, and all is well."""


class Growth(NamedTuple):
    """How far a counter has grown over a sliding window."""

    events: Reading
    """In the last ``window_s``, or since ``span_s`` if that is less."""
    span_s: float
    """How much of the window has been watched [s]."""
