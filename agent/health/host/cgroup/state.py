"""What is remembered of the cgroups of pods: what they counted lately, how fast, and who is frozen.

Of most groups that is their last sample and nothing else, and one whose sample is the same object as at the
last look costs the comparison of two pointers: there may be thousands, and they are looked at each time.
A group compares with its own last sample. One that came since the last look began at zero; what the groups
of the first look have counted is old news.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import is_
from typing import Final, NamedTuple

from agent.health.host.cgroup.rates import (
    LINGER_NS,
    NO_COUNTS,
    QUIET,
    Rates,
    counts_of,
    drop_stale_rates,
    rates_after,
)
from agent.model.reading import Absence, Missing, Reading
from agent.model.settings import Settings
from agent.model.snapshot import GroupKind, GroupSample, Snapshot
from agent.model.time import NS, Instant

NEWS_NS: Final = 600 * NS  # what happened once is told of for ten minutes after the last time
GONE_KEPT: Final = 1024  # groups that are gone: one that dies in a loop must not fill the memory
MEMORY_WINDOW_S: Final = 60
"""Over which failures to get memory are counted."""


class Count(StrEnum):
    """What counts singly: each time is one too many."""

    KILLS = "kills"
    OOMS = "ooms"
    HITS = "hits"
    REFUSALS = "refusals"


Key = tuple[Count, int]
"""A counter of a group; with the index of a hugepage size, else 0."""


class CounterDelta(NamedTuple):
    """One counter that has grown."""

    total: int
    """As it was last read."""
    news: int
    """What of it is not yet old enough to be forgotten; 0: it can just now not be read."""
    grew_ns: int


class ActiveGroup(NamedTuple):
    """A group that has something to tell, or had a moment ago."""

    group: GroupSample
    """As it was last seen: what happens to a container often ends it, and its cgroup with it."""
    pod: GroupSample | None
    """Of a container."""
    tallies: Mapping[Key, CounterDelta]
    rates: Rates
    """Of what does not count singly."""
    frozen_ns: int | None
    """When it was last known to be frozen."""


@dataclass(frozen=True, slots=True)
class GroupPast:
    """What the rules of cgroups compare with."""

    groups: tuple[GroupSample, ...] = ()
    """Of the last look."""
    by_id: Mapping[int, GroupSample] = field(default_factory=dict)
    pods: Mapping[str, GroupSample] = field(default_factory=dict)
    """By uid."""
    looked_ns: int = 0
    loud: Mapping[int, ActiveGroup] = field(default_factory=dict)
    """By id."""


def remember_groups(
    past: GroupPast, snapshot: Snapshot, settings: Settings, now: Instant, *, started: bool
) -> GroupPast:
    """The past after a snapshot. ``started``: somebody had looked at the node before."""
    groups, by_id, pods = snapshot.groups, past.by_id, past.pods
    changed: list[GroupSample] = []
    if len(groups) != len(past.groups) or not all(map(is_, groups, past.groups)):
        by_id = {group.id: group for group in groups}
        pods = {group.pod_uid: group for group in groups if group.kind is GroupKind.POD}
        changed = [group for group in groups if past.by_id.get(group.id) is not group]
    window_ns = max(MEMORY_WINDOW_S, settings.host.throttled_window_s) * NS
    loud = dict(past.loud)
    for group in changed:
        before = past.by_id.get(group.id) if started else group
        record = _changed(loud.get(group.id), before, group, past.looked_ns, now.mono_ns, window_ns)
        if record is not None:
            loud[group.id] = record
    return GroupPast(groups, by_id, pods, now.mono_ns, _aged(loud, by_id, pods, now.mono_ns, window_ns))


def _counts(group: GroupSample) -> dict[Key, Reading]:
    counts: dict[Key, Reading] = {
        (Count.KILLS, 0): group.mem_oom_kill,
        (Count.OOMS, 0): group.mem_oom,
    }
    for index, size in enumerate(group.hugetlb):
        counts[Count.HITS, index] = size.events_max
        counts[Count.REFUSALS, index] = size.rsvd_failed
    return counts


def _changed(
    known: ActiveGroup | None,
    before: GroupSample | None,
    group: GroupSample,
    looked_ns: int,
    now_ns: int,
    window_ns: int,
) -> ActiveGroup | None:
    """What is to be remembered of a group whose sample is another than before; None: nothing."""
    tallies = _tallies(known, before, group, now_ns)
    old = counts_of(before) if before else NO_COUNTS
    rates = rates_after(known.rates if known else QUIET, old, counts_of(group), looked_ns, now_ns, window_ns)
    if known:
        return ActiveGroup(group, known.pod, tallies, rates, known.frozen_ns)
    if not tallies and rates is QUIET and group.frozen != 1:
        return None
    return ActiveGroup(group, None, tallies, rates, None)


def _tallies(
    known: ActiveGroup | None, before: GroupSample | None, group: GroupSample, now_ns: int
) -> Mapping[Key, CounterDelta]:
    tallies = dict(known.tallies) if known else {}
    if before and before.mem_oom_kill == group.mem_oom_kill and before.hugetlb == group.hugetlb:
        return tallies
    olds = _counts(before) if before else {}
    for key, count in _counts(group).items():
        tally = tallies.get(key)
        old = tally.total if tally else olds.get(key, 0)
        if isinstance(count, Missing):
            if isinstance(old, int) and count.absence is Absence.UNREADABLE:
                tallies.setdefault(
                    key, CounterDelta(old, 0, now_ns)
                )  # to go on from when it can be read again
            continue
        if isinstance(old, Missing):
            old = 0 if old.absence is Absence.ABSENT else count  # nobody knows what it was
        if count > old:
            tallies[key] = CounterDelta(count, count - old + (tally.news if tally else 0), now_ns)
        elif tally is not None:  # one that fell was reset
            tallies[key] = tally._replace(total=count)
    return tallies


def _aged(
    loud: Mapping[int, ActiveGroup],
    by_id: Mapping[int, GroupSample],
    pods: Mapping[str, GroupSample],
    now_ns: int,
    window_ns: int,
) -> Mapping[int, ActiveGroup]:
    """Those that still have something to tell. Of the ones that are gone, the newest."""
    kept: dict[int, ActiveGroup] = {}
    gone: list[tuple[int, ActiveGroup]] = []
    for ident, known in loud.items():
        there = ident in by_id
        tallies = _fresh(known, now_ns, there=there) if known.tallies else {}
        if not there:
            if tallies:
                gone.append((ident, known._replace(tallies=tallies, rates=QUIET, frozen_ns=None)))
            continue
        rates = drop_stale_rates(known.rates, now_ns, window_ns)
        frozen_ns = _frozen_ns(known, now_ns)
        if not tallies and rates is QUIET and frozen_ns is None:
            continue
        pod = pods.get(known.group.pod_uid, known.pod) if known.group.kind is GroupKind.CONTAINER else None
        kept[ident] = ActiveGroup(known.group, pod, tallies, rates, frozen_ns)
    gone.sort(key=lambda item: max(tally.grew_ns for tally in item[1].tallies.values()))
    return {**dict(gone[-GONE_KEPT:]), **kept}


def _fresh(known: ActiveGroup, now_ns: int, *, there: bool) -> dict[Key, CounterDelta]:
    """The tallies that have news, and those of what can just now not be read."""
    counts = _counts(known.group) if there else {}
    tallies = {}
    for key, tally in known.tallies.items():
        if tally.news and now_ns - tally.grew_ns < NEWS_NS:
            tallies[key] = tally
        elif isinstance(counts.get(key), Missing):
            tallies[key] = tally._replace(news=0)
    return tallies


def _frozen_ns(known: ActiveGroup, now_ns: int) -> int | None:
    """When a group that is there was last known to be frozen; None: long ago, or never."""
    state, since_ns = known.group.frozen, known.frozen_ns
    if state == 1:
        return now_ns
    if since_ns is not None and isinstance(state, Missing) and state.absence is Absence.UNREADABLE:
        return now_ns  # unreadable is not thawed
    return since_ns if since_ns is not None and now_ns - since_ns < LINGER_NS else None
