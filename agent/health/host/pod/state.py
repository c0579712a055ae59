"""State of the findings of pod audits: since when they hold, and for how long they are trusted.

Audits are minutes apart and read a deviation twice. So no passes are counted here: a finding begins with the
audit that has it and ends with the one that has not. Findings expire when pods can no longer be read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.health.host.pod.rules import ALLOCATION_ROWS, MAX_GROUPS
from agent.health.stalls import stall_limit_ns
from agent.health.verdict import truncated
from agent.model.pods import PodFinding, PodsSample
from agent.model.source import SourceSample, SourceState
from agent.model.time import Instant

TEXT_LIMIT: Final = 512
"""Size limit of the evidence of one finding among several [bytes]."""
_FAILED: Final = frozenset({SourceState.FAILING, SourceState.STALLED})


class PodFindingGroup(NamedTuple):
    """Findings of one pod or container under one code."""

    pod_uid: str
    container: str
    """Name of the container; empty for the pod itself."""
    code: str
    findings: tuple[PodFinding, ...]
    """One finding for each cgroup file."""
    since: Instant
    """Time of the first audit that had it without interruption."""


@dataclass(frozen=True, slots=True)
class PodAuditState:
    """Newest sample of pods and whether it is still trusted."""

    sample: PodsSample | None = None
    """Newest sample; None: pods are not watched."""
    groups: tuple[PodFindingGroup, ...] = ()
    """Findings, worst first, then by pod, container and code."""
    dropped: int = 0
    """Number of groups beyond MAX_GROUPS."""
    was_read: bool = False
    """Whether the source could ever be read."""
    unread_since: Instant | None = None
    """Time since which the source cannot be read; None: it can."""
    trusted_until_ns: int | None = None
    """Time until which the sample is trusted although the source cannot be read; None: it can, or trust has
    expired.
    """
    lost_since: Instant | None = None
    """Time since which the sample is no longer trusted."""

    @property
    def trusted(self) -> PodsSample | None:
        """Sample, unless it is no longer trusted."""
        return None if self.lost_since else self.sample


def next_pods_state(
    previous: PodAuditState, sample: PodsSample | None, sources: Mapping[str, SourceSample], now: Instant
) -> PodAuditState:
    """Return the state after a snapshot; ``sources`` have their stalls marked."""
    if sample is None:
        return previous if previous.sample is None else PodAuditState()
    source = sources.get(sample.source.name, sample.source)
    unread_since = (previous.unread_since or now) if source.state in _FAILED else None
    # a stalled source has been without a pass for that long already
    limit_ns = 0 if source.state is SourceState.STALLED else stall_limit_ns(source)
    trusted_until_ns = unread_since.mono_ns + limit_ns if unread_since else None
    is_lost = trusted_until_ns is not None and now.mono_ns >= trusted_until_ns
    groups, dropped = previous.groups, previous.dropped
    if previous.sample is None or previous.sample.findings != sample.findings:
        all_groups = _group_findings(sample.findings, previous.groups, now)
        groups, dropped = all_groups[:MAX_GROUPS], max(0, len(all_groups) - MAX_GROUPS)
    return PodAuditState(
        sample=sample,
        groups=groups,
        dropped=dropped,
        was_read=previous.was_read or source.state is SourceState.OK,
        unread_since=unread_since,
        trusted_until_ns=None if is_lost else trusted_until_ns,
        lost_since=(previous.lost_since or now) if is_lost else None,
    )


def _group_findings(
    findings: Iterable[PodFinding], before: Sequence[PodFindingGroup], now: Instant
) -> tuple[PodFindingGroup, ...]:
    """Group the findings by pod, container and code."""
    since = {group[:3]: group.since for group in before}
    parts: dict[tuple[str, str, str], list[PodFinding]] = {}
    for finding in findings:
        key = (
            finding.pod_uid,
            finding.container,
            finding.code.replace("-", "_"),
        )  # codes are spelled with underscores
        parts.setdefault(key, []).append(finding._replace(evidence=brief(finding.evidence)))
    groups = [
        PodFindingGroup(*key, tuple(members), since.get(key, now)) for key, members in sorted(parts.items())
    ]
    return tuple(sorted(groups, key=lambda group: -ALLOCATION_ROWS[group.code].severity))


def brief(text: str) -> str:
    """Truncate the evidence of one finding among several."""
    return truncated(text, TEXT_LIMIT)
