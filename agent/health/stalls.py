"""Detection of stalled sources: they have not read lately, and their last readings are no longer trusted."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from agent.health.rules import CLEAN_PASSES, STALLED, STALLED_ADVICE
from agent.model.health import Blame, Cause, Severity
from agent.model.source_state import SourceSample, SourceState
from agent.model.time import NS, Instant

STALL_PERIODS: Final = 3
"""Number of periods without a pass after which a source is stalled."""
STALL_MIN_NS: Final = 2 * NS
"""Smallest age of a source's last pass at which it counts as stalled [ns].

On a busy machine a source that is read every 10 ms can be late by more than three periods.
"""


class SourceStall(NamedTuple):
    """Source that has stopped reading, or has read fewer than ``CLEAN_PASSES`` times since it resumed."""

    since: Instant
    passes: int
    """Number of passes that the source had finished when it was last seen stalled."""


def stall_limit_ns(source: SourceSample) -> int:
    """Return the age of a source's last pass above which the source is stalled [ns]."""
    return source.limit_ns or max(STALL_PERIODS * source.period_ns, STALL_MIN_NS)


def is_stalled(source: SourceSample, now: Instant) -> bool:
    """Return True if the source's last pass is older than :func:`stall_limit_ns` allows."""
    return now.mono_ns - source.beat_ns > stall_limit_ns(source)


def find_stalls(
    previous: Mapping[str, SourceStall], sources: Sequence[SourceSample], now: Instant
) -> dict[str, SourceStall]:
    """Return the sources that are stalled, by name; an absent source is never stalled.

    A source that resumes stays in the result until it has finished ``CLEAN_PASSES`` passes.

    Args:
        previous: Result of the last evaluation.
    """
    found: dict[str, SourceStall] = {}
    for source in sources:
        stall = previous.get(source.name)
        if source.state is SourceState.ABSENT:
            continue
        if is_stalled(source, now):
            found[source.name] = SourceStall(stall.since if stall else now, source.passes)
        elif stall and source.passes < stall.passes + CLEAN_PASSES:
            found[source.name] = stall
    return found


def with_stall(source: SourceSample, stalled: Mapping[str, SourceStall]) -> SourceSample:
    """Return a source, with the state STALLED if ``stalled`` has its name."""
    if source.name not in stalled:
        return source
    detail = f"no pass for more than {stall_limit_ns(source) / NS:g} s"
    return source._replace(state=SourceState.STALLED, detail=detail)


def stall_cause(source: SourceSample, stalled: Mapping[str, SourceStall], now: Instant) -> Cause:
    """Return the cause with which a stalled source makes a device Unknown."""
    evidence = f"{source.name}: {with_stall(source, stalled).detail}"
    since = stalled[source.name].since if source.name in stalled else now
    return Cause(STALLED, Severity.UNKNOWN, Blame.AGENT, evidence, STALLED_ADVICE, since)
