"""What the rules of the node have in common: how facts are worded, and how long they are told."""

from collections.abc import Sequence
from typing import Final

from agent.health.kernel_log.values import LogFact
from agent.health.words import at_least

HELD_S: Final = 600
"""That it is over no line says: what was told is told for so long after the last."""
LASTING_HELD_S: Final = 86_400
"""What stays so until somebody mends it is told for a day."""
NAMED: Final = 3


def named(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    names = list(dict.fromkeys(names))
    more = [f"{at_least(len(names) - NAMED)} more"] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])


def lines_of(facts: Sequence[LogFact]) -> str:
    """How often the kernel log says so."""
    times = sum(fact.times for fact in facts)
    return f"{at_least(times)} line{'s' if times > 1 else ''} of the kernel log"
