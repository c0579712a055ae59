"""What is remembered of what an audit found in pods: since when, and for how long it is still believed.

Audits are minutes apart, and read twice what is wrong. So no passes are counted here: a finding begins with
the audit that has it, and is over with the one that has not. What nobody can see any more nobody should tell.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.health.host.pod.pod_findings import brief
from agent.health.host.pod.rule_rows import MOST, PROMISES
from agent.health.stalls import stall_limit_ns
from agent.model.pods import PodFinding, PodsSample
from agent.model.source import SourceSample, SourceState
from agent.model.time import Instant

_FAILED: Final = frozenset({SourceState.FAILING, SourceState.STALLED})


class Found(NamedTuple):
    """What was found of one pod, or of one container, under one code."""

    pod_uid: str
    container: str
    """Name; empty: it is the pod's."""
    code: str
    parts: tuple[PodFinding, ...]
    """One for each knob."""
    since: Instant
    """When it was first heard of in this spell."""


@dataclass(frozen=True, slots=True)
class PodsPast:
    """What is known of pods, and whether it still is."""

    sample: PodsSample | None = None
    """The newest; None: nobody looks."""
    found: tuple[Found, ...] = ()
    """Worst first, then by pod, container and code."""
    more: int = 0
    """How many there are besides."""
    was_read: bool = False
    """Its source could be read once."""
    unread: Instant | None = None
    """Since when it cannot; None: it can."""
    until_ns: int | None = None
    """Until when it is believed for all that; None: it can be read, or it is lost."""
    lost: Instant | None = None
    """Since when it is believed no more."""

    @property
    def known(self) -> PodsSample | None:
        """What is still believed."""
        return None if self.lost else self.sample


def remember_pods(
    past: PodsPast, sample: PodsSample | None, sources: Mapping[str, SourceSample], now: Instant
) -> PodsPast:
    """The past after a snapshot; ``sources`` as they are to be shown."""
    if sample is None:
        return past if past.sample is None else PodsPast()
    source = sources.get(sample.source.name, sample.source)
    unread = (past.unread or now) if source.state in _FAILED else None
    # one that stands still has done so for that long already
    limit_ns = 0 if source.state is SourceState.STALLED else stall_limit_ns(source)
    until_ns = unread.mono_ns + limit_ns if unread else None
    is_lost = until_ns is not None and now.mono_ns >= until_ns
    found, more = past.found, past.more
    if past.sample is None or past.sample.findings != sample.findings:
        every = _found(sample.findings, past.found, now)
        found, more = every[:MOST], max(0, len(every) - MOST)
    return PodsPast(
        sample=sample,
        found=found,
        more=more,
        was_read=past.was_read or source.state is SourceState.OK,
        unread=unread,
        until_ns=None if is_lost else until_ns,
        lost=(past.lost or now) if is_lost else None,
    )


def _found(findings: Iterable[PodFinding], before: Sequence[Found], now: Instant) -> tuple[Found, ...]:
    """The findings, those of a pod or a container with the same code as one."""
    since = {one[:3]: one.since for one in before}
    parts: dict[tuple[str, str, str], list[PodFinding]] = {}
    for one in findings:
        key = (one.pod_uid, one.container, one.code.replace("-", "_"))  # as codes are spelled
        parts.setdefault(key, []).append(one._replace(evidence=brief(one.evidence)))
    found = [Found(*key, tuple(of), since.get(key, now)) for key, of in sorted(parts.items())]
    return tuple(sorted(found, key=lambda one: -PROMISES[one.code].severity))
