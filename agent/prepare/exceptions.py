"""From an exception to evidence: those that it came from, and those that came together.

Owns the way through groups, causes and contexts; what one exception shows is agent.prepare.extract.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from agent.model.prepare import Operation
from agent.prepare.doing import Doing, done_by
from agent.prepare.evidence import Evidence, Handled
from agent.prepare.extract import read

FAILURES_MAX: Final = 64
"""Of one exception: a group's members, and theirs."""
CHAIN_MAX: Final = 16

Chain = tuple[Evidence, ...]


def failures(error: BaseException, operation: Operation | None = None) -> tuple[Chain, ...]:
    """What an exception shows: for each thing that failed the evidence, the outermost exception's first.

    A group has as many failures as members. An exception that another was raised from is evidence of the same
    failure; one that was merely being handled is marked as such.

    Args:
        operation: What was being done where no mark and no path says so.
    """
    default = Doing(operation) if operation else None
    return tuple(islice(_split(error, default, (), frozenset()), FAILURES_MAX))


def _split(error: BaseException, doing: Doing | None, above: Chain, seen: frozenset[int]) -> Iterator[Chain]:
    doing = done_by(error) or doing
    seen |= {id(error)}
    if isinstance(error, BaseExceptionGroup):
        if len(seen) > CHAIN_MAX:
            yield (*above, read(error, doing))
            return
        for member in error.exceptions[:FAILURES_MAX]:
            yield from _split(member, doing, above, seen)
        return
    here = (*above, read(error, doing))
    cause = error.__cause__
    if cause is not None and id(cause) not in seen and len(seen) <= CHAIN_MAX:
        yield from _split(cause, doing, here, seen)
    else:
        yield (*here, *_handled(error, doing, seen))


def _handled(error: BaseException, doing: Doing | None, seen: frozenset[int]) -> Chain:
    found: list[Evidence] = []
    while not error.__suppress_context__ and (before := error.__context__) is not None:
        if id(before) in seen or len(seen) > CHAIN_MAX:
            break
        seen |= {id(before)}
        found.append(Handled(read(before, done_by(before) or doing)))
        error = before
    return tuple(found)
