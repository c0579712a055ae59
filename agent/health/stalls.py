"""Sources that stand still: nobody has looked, whatever was known before."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from agent.health.catalog import CLEAN_PASSES, STALLED, STALLED_ADVICE
from agent.model.health import Blame, Cause, Severity
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

STALL_PERIODS: Final = 3
STALL_MIN_NS: Final = 2 * NS  # a busy machine delays a 10 ms sampler by more than three periods


class Stall(NamedTuple):
    """A source that stands still."""

    since: Instant
    passes: int
    """How many it had finished when it last stood still."""


def stall_limit_ns(source: SourceSample) -> int:
    """How old a source's last pass may be [ns]."""
    return source.limit_ns or max(STALL_PERIODS * source.period_ns, STALL_MIN_NS)


def stands_still(source: SourceSample, now: Instant) -> bool:
    """Whether the source's last pass is too long ago, whatever it said then."""
    return now.mono_ns - source.beat_ns > stall_limit_ns(source)


def find_stalls(
    before_them: Mapping[str, Stall], sources: Sequence[SourceSample], now: Instant
) -> dict[str, Stall]:
    """The sources that stand still. One that goes on must finish some passes before it is believed."""
    found: dict[str, Stall] = {}
    for source in sources:
        before = before_them.get(source.name)
        if source.state is SourceState.ABSENT:
            continue
        if stands_still(source, now):
            found[source.name] = Stall(before.since if before else now, source.passes)
        elif before and source.passes < before.passes + CLEAN_PASSES:
            found[source.name] = before
    return found


def with_stall(source: SourceSample, stalled: Mapping[str, Stall]) -> SourceSample:
    """The source as it is to be shown."""
    if source.name not in stalled:
        return source
    detail = f"no pass for more than {stall_limit_ns(source) / NS:g} s"
    return source._replace(state=SourceState.STALLED, detail=detail)


def stall_cause(source: SourceSample, stalled: Mapping[str, Stall], now: Instant) -> Cause:
    """Why a device is Unknown whose source stands still."""
    evidence = f"{source.name}: {source.detail}"
    since = stalled[source.name].since if source.name in stalled else now
    return Cause(STALLED, Severity.UNKNOWN, Blame.AGENT, evidence, STALLED_ADVICE, since)
