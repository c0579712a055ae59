"""Cgroups of pods as their rules see them, and what is remembered for that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.model.reading import Missing
from agent.model.snapshot import GroupKind, GroupSample, Snapshot
from agent.model.time import NS, Instant

HITS_KEPT: Final = 1024  # of containers that are gone: one that dies in a loop must not fill the memory
HIT_MEMORY_NS: Final = 600 * NS  # a limit that was hit is told of for ten minutes


class GroupView(NamedTuple):
    """One cgroup of a container, and its pod's."""

    group: GroupSample
    pod: GroupSample | None
    hits: tuple[int, ...]
    """For each size in ``group.hugetlb``: hits of the limit not yet old enough to be forgotten."""


class Hits(NamedTuple):
    """One hugepage size of one container: hits of its limit."""

    group: GroupSample
    """The container, as it was last seen: a hit often ends it, and its cgroup with it."""
    pod: GroupSample | None
    told: int
    """The count up to which hits are too old to be told of."""
    total: int
    grew_ns: int


@dataclass(frozen=True, slots=True)
class GroupPast:
    """What the rules of cgroups compare with."""

    hits: Mapping[tuple[int, int], Hits] = field(default_factory=dict)
    """By group id and index of the size."""


def remember_groups(past: GroupPast, snapshot: Snapshot, now: Instant, *, started: bool) -> GroupPast:
    """The past after a snapshot. ``started``: somebody had looked at the node before."""
    return GroupPast(_hits(past, snapshot, now, started=started))


def _hits(
    past: GroupPast, snapshot: Snapshot, now: Instant, *, started: bool
) -> Mapping[tuple[int, int], Hits]:
    """Counts of a container that was there at start are old news; of one that came later, none is."""
    found: dict[tuple[int, int], Hits] = {}
    pods = {group.pod_uid: group for group in snapshot.groups if group.kind is GroupKind.POD}
    for group in snapshot.groups:
        if group.kind is not GroupKind.CONTAINER:
            continue
        for index, sample in enumerate(group.hugetlb):
            count = sample.events_max
            known = past.hits.get((group.id, index))
            if isinstance(count, Missing):
                if known is not None:
                    found[group.id, index] = known
            elif known is None:
                if count:
                    told = 0 if started else count
                    found[group.id, index] = Hits(group, pods.get(group.pod_uid), told, count, now.mono_ns)
            elif count > known.total:
                pod = pods.get(group.pod_uid)
                found[group.id, index] = Hits(group, pod, known.told, count, now.mono_ns)
            elif now.mono_ns - known.grew_ns >= HIT_MEMORY_NS:
                found[group.id, index] = known._replace(told=count)
            else:
                found[group.id, index] = known
    there = {group.id for group in snapshot.groups}
    gone = [
        (key, hits)
        for key, hits in past.hits.items()
        if key[0] not in there and hits.total > hits.told and now.mono_ns - hits.grew_ns < HIT_MEMORY_NS
    ]
    gone.sort(key=lambda item: item[1].grew_ns)
    return {**dict(gone[-HITS_KEPT:]), **found}


def view_groups(past: GroupPast) -> list[GroupView]:
    """The containers that have something to tell of. A thousand silent ones cost nothing here."""
    loud: dict[int, Hits] = {}
    for (group_id, _), hits in past.hits.items():
        if hits.total > hits.told and (group_id not in loud or hits.grew_ns >= loud[group_id].grew_ns):
            loud[group_id] = hits
    views = []
    for group_id, newest in sorted(loud.items()):
        sizes = (past.hits.get((group_id, index)) for index in range(len(newest.group.hugetlb)))
        counts = tuple(hits.total - hits.told if hits else 0 for hits in sizes)
        views.append(GroupView(newest.group, newest.pod, counts))
    return views
