"""State of the rules for the cgroups of pods, and views, which are the inputs of these rules.

Two kinds of counters are kept. Events that matter singly (OOM kills, refused hugepages) count for ten
minutes. For events that matter by their rate (throttling, memory at its limit), a window is kept while the
counter grows and for some time after.

For most cgroups only the last sample is kept, and an unchanged sample object costs one pointer comparison per
evaluation: there may be thousands of cgroups. Each cgroup is compared with its own last sample. The counters
of a cgroup that is new since the last evaluation started at zero; counts from before the first evaluation are
ignored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, pairwise
from operator import is_
from typing import Final, NamedTuple

from agent.health.rate_window import RateWindow, appended, extended, grown_since
from agent.model.cpuset import CpuSet
from agent.model.declared import DeclaredCpus
from agent.model.reading import Absence, Missing, Reading, is_absent
from agent.model.settings import HostLimits, Settings
from agent.model.snapshot import GroupKind, GroupSample, Snapshot
from agent.model.time import NS, Instant

LINGER_NS: Final = 30 * NS
"""Time for which a cgroup stays active after its last event, so that its findings can clear."""


class RateCounters(NamedTuple):
    """Counters of a cgroup that are evaluated by their rate."""

    periods: Reading
    """CPU periods in which the cgroup had runnable tasks; ``throttled`` counts the periods in which it used
    up its quota.
    """
    throttled: Reading
    at_max: Reading
    at_high: Reading


NO_RATE_COUNTS: Final = RateCounters(0, 0, 0, 0)
"""Counters of a new cgroup: all 0."""


class Rates(NamedTuple):
    """Windows over the rate counters of a cgroup."""

    periods: RateWindow = ()
    throttled: RateWindow = ()
    at_max: RateWindow = ()
    at_high: RateWindow = ()
    grew_ns: int = 0
    """Time at which a counter other than ``periods`` last grew."""


NO_RATES: Final = Rates()


def rate_counters(group: GroupSample) -> RateCounters:
    """Return the rate counters of a cgroup. cgroup v1 has one counter for all failures to get memory."""
    at_max = group.mem_failcnt if is_absent(group.mem_max) else group.mem_max
    return RateCounters(group.cpu_periods, group.cpu_throttled, at_max, group.mem_high)


def next_rates(
    before: Rates, old: RateCounters, new: RateCounters, evaluated_ns: int, now_ns: int, window_ns: int
) -> Rates:
    """Return the windows of a cgroup whose sample has changed.

    Args:
        old: Counters at the last evaluation, which was at ``evaluated_ns``.
        new: Counters now.
        window_ns: Longest window over which a growth will be computed.
    """
    throttled = _has_grown(old.throttled, new.throttled)
    at_max = _has_grown(old.at_max, new.at_max)
    at_high = _has_grown(old.at_high, new.at_high)
    grew = throttled or at_max or at_high
    if before is NO_RATES and not grew:
        return NO_RATES

    def extend(window: RateWindow, old_value: Reading, now: Reading, *, starts: bool) -> RateWindow:
        if not window and not starts:
            return ()
        window = extended(window, evaluated_ns, window_ns) or appended((), old_value, evaluated_ns, window_ns)
        return appended(window, now, now_ns, window_ns)

    return Rates(
        extend(before.periods, old.periods, new.periods, starts=throttled),
        extend(before.throttled, old.throttled, new.throttled, starts=throttled),
        extend(before.at_max, old.at_max, new.at_max, starts=at_max),
        extend(before.at_high, old.at_high, new.at_high, starts=at_high),
        now_ns if grew else before.grew_ns,
    )


def _has_grown(old: Reading, new: Reading) -> bool:
    """Return True if a counter has grown. A new counter has grown from 0; False if the old value was
    unreadable.
    """
    if isinstance(new, Missing):
        return False
    return new > old if isinstance(old, int) else is_absent(old) and new > 0


def drop_stale_rates(rates: Rates, now_ns: int, window_ns: int) -> Rates:
    """Return the windows over the rate counters; empty windows if the last growth is older than the
    window."""
    return rates if now_ns - rates.grew_ns < window_ns + LINGER_NS else NO_RATES


RECENT_NS: Final = 600 * NS
"""Time for which events are reported after the last event."""
MAX_GONE_GROUPS: Final = 1024
"""Largest number of removed cgroups that are kept: a container that restarts in a loop must not fill the
memory."""
MEMORY_WINDOW_S: Final = 60
"""Window over failures to get memory [s]."""


class GroupCounter(StrEnum):
    """Kind of a counter whose single events matter, for example OOM kills."""

    KILLS = "kills"
    OOMS = "ooms"
    HITS = "hits"
    REFUSALS = "refusals"


CounterKey = tuple[GroupCounter, int]
"""Kind of a counter, with the index of a hugepage size; index 0 for counters without a size."""


class CounterDelta(NamedTuple):
    """Recent growth of one counter."""

    total: int
    """Value at the last reading."""
    recent: int
    """Number of recent events; 0 if the counter is unreadable at the moment."""
    grew_ns: int


class ActiveGroup(NamedTuple):
    """Cgroup with recent events."""

    group: GroupSample
    """Last sample of the cgroup; kept after the cgroup was removed, which is often the result of the
    event."""
    pod: GroupSample | None
    """Sample of the container's pod; None for a pod's own cgroup."""
    deltas: Mapping[CounterKey, CounterDelta]
    rates: Rates
    """Windows over the rate counters of a cgroup."""
    frozen_ns: int | None
    """Time at which the cgroup was last known to be frozen; None: never."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """State of the cgroup rules, which the next evaluation compares with."""

    groups: tuple[GroupSample, ...] = ()
    """Samples of all cgroups in the last evaluation."""
    by_id: Mapping[int, GroupSample] = field(default_factory=dict)
    pods: Mapping[str, GroupSample] = field(default_factory=dict)
    """Samples of the pods' own cgroups, by pod UID."""
    evaluated_ns: int = 0
    active: Mapping[int, ActiveGroup] = field(default_factory=dict)
    """Cgroups with recent events, by ID."""


def next_group_state(
    previous: GroupState, snapshot: Snapshot, settings: Settings, now: Instant, *, started: bool
) -> GroupState:
    """Return the state of the cgroup rules after a snapshot. ``started``: True if there was an evaluation
    before."""
    groups, by_id, pods = snapshot.groups, previous.by_id, previous.pods
    changed: list[GroupSample] = []
    if len(groups) != len(previous.groups) or not all(map(is_, groups, previous.groups)):
        by_id = {group.id: group for group in groups}
        pods = {group.pod_uid: group for group in groups if group.kind is GroupKind.POD}
        changed = [group for group in groups if previous.by_id.get(group.id) is not group]
    window_ns = max(MEMORY_WINDOW_S, settings.host.throttled_window_s) * NS
    active = dict(previous.active)
    for group in changed:
        before = previous.by_id.get(group.id) if started else group
        record = _next_active(
            active.get(group.id), before, group, previous.evaluated_ns, now.mono_ns, window_ns
        )
        if record is not None:
            active[group.id] = record
    return GroupState(
        groups, by_id, pods, now.mono_ns, _without_expired(active, by_id, pods, now.mono_ns, window_ns)
    )


def _counters(group: GroupSample) -> dict[CounterKey, Reading]:
    counts: dict[CounterKey, Reading] = {
        (GroupCounter.KILLS, 0): group.mem_oom_kill,
        (GroupCounter.OOMS, 0): group.mem_oom,
    }
    for index, size in enumerate(group.hugetlb):
        counts[GroupCounter.HITS, index] = size.events_max
        counts[GroupCounter.REFUSALS, index] = size.rsvd_failed
    return counts


def _next_active(
    record: ActiveGroup | None,
    before: GroupSample | None,
    group: GroupSample,
    evaluated_ns: int,
    now_ns: int,
    window_ns: int,
) -> ActiveGroup | None:
    """Return the record of a cgroup whose sample has changed; None if the cgroup has no recent events."""
    deltas = _next_deltas(record, before, group, now_ns)
    old = rate_counters(before) if before else NO_RATE_COUNTS
    rates = next_rates(
        record.rates if record else NO_RATES, old, rate_counters(group), evaluated_ns, now_ns, window_ns
    )
    if record:
        return ActiveGroup(group, record.pod, deltas, rates, record.frozen_ns)
    if not deltas and rates is NO_RATES and group.frozen != 1:
        return None
    return ActiveGroup(group, None, deltas, rates, None)


def _next_deltas(
    record: ActiveGroup | None, before: GroupSample | None, group: GroupSample, now_ns: int
) -> Mapping[CounterKey, CounterDelta]:
    deltas = dict(record.deltas) if record else {}
    if before and before.mem_oom_kill == group.mem_oom_kill and before.hugetlb == group.hugetlb:
        return deltas
    old_counts = _counters(before) if before else {}
    for key, count in _counters(group).items():
        delta = deltas.get(key)
        old = delta.total if delta else old_counts.get(key, 0)
        if isinstance(count, Missing):
            if isinstance(old, int) and count.absence is Absence.UNREADABLE:
                deltas.setdefault(key, CounterDelta(old, 0, now_ns))  # base for the next reading
            continue
        if isinstance(old, Missing):
            old = (
                0 if old.absence is Absence.ABSENT else count
            )  # after an unreadable value the growth is unknown
        if count > old:
            deltas[key] = CounterDelta(count, count - old + (delta.recent if delta else 0), now_ns)
        elif delta is not None:  # a counter that fell was reset
            deltas[key] = delta._replace(total=count)
    return deltas


def _without_expired(
    active: Mapping[int, ActiveGroup],
    by_id: Mapping[int, GroupSample],
    pods: Mapping[str, GroupSample],
    now_ns: int,
    window_ns: int,
) -> Mapping[int, ActiveGroup]:
    """Return the cgroups with recent events, at most MAX_GONE_GROUPS of them removed cgroups."""
    kept: dict[int, ActiveGroup] = {}
    gone: list[tuple[int, ActiveGroup]] = []
    for ident, record in active.items():
        exists = ident in by_id
        deltas = _recent_deltas(record, now_ns, exists=exists) if record.deltas else {}
        if not exists:
            if deltas:
                gone.append((ident, record._replace(deltas=deltas, rates=NO_RATES, frozen_ns=None)))
            continue
        rates = drop_stale_rates(record.rates, now_ns, window_ns)
        frozen_ns = _frozen_ns(record, now_ns)
        if not deltas and rates is NO_RATES and frozen_ns is None:
            continue
        pod = pods.get(record.group.pod_uid, record.pod) if record.group.kind is GroupKind.CONTAINER else None
        kept[ident] = ActiveGroup(record.group, pod, deltas, rates, frozen_ns)
    gone.sort(key=lambda item: max(delta.grew_ns for delta in item[1].deltas.values()))
    return {**dict(gone[-MAX_GONE_GROUPS:]), **kept}


def _recent_deltas(record: ActiveGroup, now_ns: int, *, exists: bool) -> dict[CounterKey, CounterDelta]:
    """Return the counter deltas with recent events, and the deltas of counters that are unreadable at the
    moment."""
    counts = _counters(record.group) if exists else {}
    deltas = {}
    for key, delta in record.deltas.items():
        if delta.recent and now_ns - delta.grew_ns < RECENT_NS:
            deltas[key] = delta
        elif isinstance(counts.get(key), Missing):
            deltas[key] = delta._replace(recent=0)
    return deltas


def _frozen_ns(record: ActiveGroup, now_ns: int) -> int | None:
    """Return when an existing cgroup was last known to be frozen; None: never, or more than LINGER_NS ago."""
    state, since_ns = record.group.frozen, record.frozen_ns
    if state == 1:
        return now_ns
    if since_ns is not None and isinstance(state, Missing) and state.absence is Absence.UNREADABLE:
        return now_ns  # an unreadable state does not mean thawed
    return since_ns if since_ns is not None and now_ns - since_ns < LINGER_NS else None


class Throttling(NamedTuple):
    """CPU throttling of a cgroup over the configured window."""

    throttled: int = 0
    """CPU periods in which the cgroup used up its quota."""
    periods: int = 0
    """CPU periods in which the cgroup had runnable tasks."""
    evaluations: int = 0
    """Number of evaluations in which ``throttled`` had grown."""


class GroupView(NamedTuple):
    """Input of the cgroup rules for one cgroup with recent events: a container's, or a pod's own."""

    group: GroupSample
    pod: GroupSample | None = None
    """Sample of the container's pod; None for a pod's own cgroup."""
    containers: "tuple[GroupView, ...]" = ()
    """Inputs of the rules for the pod's containers with recent events; empty for a container."""
    exclusive: tuple[str, ...] = ()
    """Names of the declared devices that provide the cgroup's exclusive CPUs; empty if its CPUs are
    shared."""
    limits: HostLimits = HostLimits()
    kills: int = 0
    """OOM kills in the last ten minutes."""
    ooms: int = 0
    """Failures to get memory in the last ten minutes, with or without a kill."""
    hits: tuple[int, ...] = ()
    """Hits of the hugepage limit in the last ten minutes, by the index of the page size in
    ``group.hugetlb``."""
    refusals: tuple[int, ...] = ()
    """Refused hugepage reservations in the last ten minutes, by the index of the page size in
    ``group.hugetlb``."""
    throttling: Throttling = Throttling()
    at_max: int = 0
    """Hits of the memory limit within a minute."""
    at_high: int = 0
    """Times that the cgroup was throttled for exceeding ``memory.high``, within a minute."""


def exclusive_cpus(snapshot: Snapshot) -> list[tuple[str, CpuSet]]:
    """Return the name and CPUs of each declared device whose CPUs are exclusive to one container."""
    return [
        (device.subject, device.part.cpus)
        for file in snapshot.declared
        for device in file.devices
        if isinstance(device.part, DeclaredCpus) and device.part.exclusive
    ]


def group_devices(group: GroupSample, exclusive: Iterable[tuple[str, CpuSet]]) -> tuple[str, ...]:
    """Return the names of the exclusive devices that provide a cgroup's CPUs; empty if the cgroup has other
    CPUs too.

    The cpuset shows the CPUs of each container; claims only show the devices that the whole pod uses.
    """
    if isinstance(group.cpus, Missing):
        return ()
    found, left = [], group.cpus
    for subject, cpus in exclusive:
        if cpus & group.cpus:
            found.append(subject)
            left &= ~cpus
    return () if left else tuple(found)


def view_groups(state: GroupState, snapshot: Snapshot, settings: Settings, now: Instant) -> list[GroupView]:
    """Return the rules' inputs for the cgroups with recent events; other cgroups cost no work."""
    exclusive = exclusive_cpus(snapshot) if state.active else []
    containers: dict[str, list[GroupView]] = {}
    pods = []
    for _, record in sorted(state.active.items()):
        view = _view(record, group_devices(record.group, exclusive), settings.host, now)
        if record.group.kind is GroupKind.POD:
            pods.append(view)
        else:
            containers.setdefault(record.group.pod_uid, []).append(view)
    found = [pod._replace(containers=tuple(containers.get(pod.group.pod_uid, ()))) for pod in pods]
    return [*found, *chain.from_iterable(containers.values())]


def _view(record: ActiveGroup, exclusive: tuple[str, ...], limits: HostLimits, now: Instant) -> GroupView:
    rates = record.rates
    minute_ns = now.mono_ns - MEMORY_WINDOW_S * NS
    return GroupView(
        group=record.group,
        pod=record.pod,
        exclusive=exclusive,
        limits=limits,
        kills=_recent(record, GroupCounter.KILLS, 0),
        ooms=_recent(record, GroupCounter.OOMS, 0),
        hits=_recent_by_size(record, GroupCounter.HITS),
        refusals=_recent_by_size(record, GroupCounter.REFUSALS),
        throttling=_throttling(rates, now.mono_ns - limits.throttled_window_s * NS),
        at_max=grown_since(rates.at_max, minute_ns),
        at_high=grown_since(rates.at_high, minute_ns),
    )


def _recent(record: ActiveGroup, count: GroupCounter, index: int) -> int:
    delta = record.deltas.get((count, index))
    return delta.recent if delta else 0


def _recent_by_size(record: ActiveGroup, count: GroupCounter) -> tuple[int, ...]:
    sizes = len(record.group.hugetlb)
    return tuple(_recent(record, count, index) for index in range(sizes)) if record.deltas else (0,) * sizes


def _throttling(rates: Rates, since_ns: int) -> Throttling:
    """Return the CPU throttling since ``since_ns``, over the time in which both counters are known."""
    throttled, periods = rates.throttled, rates.periods
    if not throttled or not periods:
        return Throttling()
    since_ns = max(since_ns, throttled[0].t_ns, periods[0].t_ns)
    points = [point for point in throttled if point.t_ns >= since_ns]
    evaluations = sum(before.value < extend.value for before, extend in pairwise(points))
    return Throttling(grown_since(throttled, since_ns), grown_since(periods, since_ns), evaluations)
