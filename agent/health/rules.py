"""What a rule may answer, what it is shown of counters, and the answers that many rules give alike.

A rule is a function of a view. A view holds everything that its kind of subject may be judged by, and
nothing else: the samples of now, what was there at start, and how far counters have grown. Rules read no
clock and no file, and a reading that is missing is a value to them like any other.
"""

from typing import Final, NamedTuple

from agent.health.words import duration
from agent.model.health import Finding
from agent.model.reading import Missing, Reading, is_absent


class RuleNotApplicable(NamedTuple):
    """The machine gives this rule nothing to judge."""

    reason: str


class RuleNotEvaluated(NamedTuple):
    """The rule needs more history than there is yet."""

    reason: str


class Unreadable(NamedTuple):
    """What the rule judges was readable and no longer is."""

    what: str
    why: Missing


OK: Final = None
RuleResult = Finding | RuleNotApplicable | RuleNotEvaluated | Unreadable | None
"""What a rule says. None: it looked, and all is well."""


class Growth(NamedTuple):
    """How far a counter has grown over a sliding window."""

    events: Reading
    """In the last ``window_s``, or since ``span_s`` if that is less."""
    span_s: float
    """How much of the window has been watched [s]."""


def lacking(what: str, reading: Missing, reason: str) -> RuleResult:
    """What a rule says without its reading. Never there: ``reason``. There once: ``what`` cannot be read."""
    return RuleNotApplicable(reason) if is_absent(reading) else Unreadable(what, reading)


def over_limit(
    grown: Growth, limit: int, window_s: int, found: Finding, *, counter: str, reason: str
) -> RuleResult:
    """What a rule says that has one counter and nothing else.

    Args:
        limit: Events within the window that are too many: then it is ``found``.
        counter: What it is read from.
        reason: Why there may be none.
    """
    if isinstance(grown.events, Missing):
        return lacking(counter, grown.events, reason)
    if grown.events >= limit:
        return found
    return RuleNotEvaluated(f"needs {duration(window_s)} of history") if grown.span_s < window_s else OK
