"""State of pod audits, carried between evaluations: when each finding began, and how long it is trusted.

A finding begins with the first audit that reports it and ends with the first audit that does not. Findings
expire when pods can no longer be read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.health.host.pod.rules import MAX_GROUPS, POD_AUDIT_ROWS
from agent.health.stalls import stall_limit_ns
from agent.health.verdict import truncate_utf8
from agent.model.pod_findings import PodFinding, PodsSample
from agent.model.source_state import SourceSample, SourceState
from agent.model.time import Instant

TEXT_LIMIT: Final = 512
"""Maximum size of the evidence of one finding in a message that may list several [bytes]."""
_FAILED: Final = frozenset({SourceState.FAILING, SourceState.STALLED})


class PodFindingGroup(NamedTuple):
    """Findings of a pod audit about one pod or container with the same finding code."""

    pod_uid: str
    container: str
    """Name of the container; empty for the pod itself."""
    code: str
    findings: tuple[PodFinding, ...]
    """Findings, one for each cgroup file that deviates."""
    since: Instant
    """Time of the first of the consecutive audits that reported the findings."""


@dataclass(frozen=True, slots=True)
class PodsSampleState:
    """Newest sample of pods with its audit findings, and whether it is still trusted."""

    sample: PodsSample | None = None
    """Newest sample of the node's pods; None: the agent does not watch pods."""
    groups: tuple[PodFindingGroup, ...] = ()
    """Findings of the newest audit, grouped by pod, container and code, worst first."""
    unlisted_groups: int = 0
    """Number of finding groups beyond MAX_GROUPS; only their number is reported."""
    was_read: bool = False
    """True: the source of pods could be read at least once."""
    unread_since: Instant | None = None
    """Time since which the source of pods cannot be read; None: it can be read."""
    trusted_until_ns: int | None = None
    """CLOCK_MONOTONIC until which the sample is trusted although the source cannot be read [ns]; None: the
    source can be read, or the sample is no longer trusted."""
    untrusted_since: Instant | None = None
    """Time since which the sample is no longer trusted; None: it is trusted."""

    @property
    def trusted(self) -> PodsSample | None:
        """Newest sample of pods; None if there is none or it is no longer trusted."""
        return None if self.untrusted_since else self.sample


def next_pods_sample_state(
    previous: PodsSampleState, sample: PodsSample | None, sources: Mapping[str, SourceSample], now: Instant
) -> PodsSampleState:
    """Return the state of pod audits after a snapshot.

    Args:
        sample: Sample of pods in the snapshot, with the findings of the newest audit.
        sources: Sources of the snapshot by name; stalled sources have the state STALLED.
    """
    if sample is None:
        return previous if previous.sample is None else PodsSampleState()
    source = sources.get(sample.source.name, sample.source)
    unread_since = (previous.unread_since or now) if source.state in _FAILED else None
    # a stalled source has been without a pass for that long already
    limit_ns = 0 if source.state is SourceState.STALLED else stall_limit_ns(source)
    trusted_until_ns = unread_since.mono_ns + limit_ns if unread_since else None
    is_lost = trusted_until_ns is not None and now.mono_ns >= trusted_until_ns
    groups, dropped = previous.groups, previous.unlisted_groups
    if previous.sample is None or previous.sample.findings != sample.findings:
        all_groups = _group_findings(sample.findings, previous.groups, now)
        groups, dropped = all_groups[:MAX_GROUPS], max(0, len(all_groups) - MAX_GROUPS)
    return PodsSampleState(
        sample=sample,
        groups=groups,
        unlisted_groups=dropped,
        was_read=previous.was_read or source.state is SourceState.OK,
        unread_since=unread_since,
        trusted_until_ns=None if is_lost else trusted_until_ns,
        untrusted_since=(previous.untrusted_since or now) if is_lost else None,
    )


def _group_findings(
    findings: Iterable[PodFinding], before: Sequence[PodFindingGroup], now: Instant
) -> tuple[PodFindingGroup, ...]:
    """Group audit findings by pod, container and code, worst first.

    Args:
        before: Groups of the last evaluation; a group that was in them keeps its begin.
    """
    since = {group[:3]: group.since for group in before}
    parts: dict[tuple[str, str, str], list[PodFinding]] = {}
    for finding in findings:
        key = (finding.pod_uid, finding.container, finding.code.replace("-", "_"))
        parts.setdefault(key, []).append(finding._replace(evidence=truncate_evidence(finding.evidence)))
    groups = [
        PodFindingGroup(*key, tuple(members), since.get(key, now)) for key, members in sorted(parts.items())
    ]
    return tuple(sorted(groups, key=lambda group: -POD_AUDIT_ROWS[group.code].severity))


def truncate_evidence(text: str) -> str:
    """Truncate the evidence of a finding to TEXT_LIMIT bytes."""
    return truncate_utf8(text, TEXT_LIMIT)
