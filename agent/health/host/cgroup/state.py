"""State that the cgroup rules carry between evaluations, and CgroupRuleInput, the input of these rules.

Single events of a cgroup (OOM kills, refused hugepages) are reported for ten minutes. Other events are
evaluated by their rate (throttling, memory at its limit). For these, a window of readings is kept while the
counter grows and for some time after.

There may be thousands of cgroups. For most of them only the last sample is kept, and an unchanged sample
costs one pointer comparison per evaluation. Counts from before the agent's first evaluation are ignored, and
those from before a cgroup that had no room in the table of cgroups was watched.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import chain, pairwise
from operator import is_
from typing import Final, NamedTuple

from agent.health.rate_window import RateWindow, append_reading, grown_since, repeat_last_value
from agent.model.cpuset import CpuSet
from agent.model.declared_devices import DeclaredCpuDevice
from agent.model.reading import Absence, Missing, Reading, is_absent
from agent.model.settings import EngineSettings, HostLimits
from agent.model.snapshot import CgroupKind, CgroupSample, HugetlbSample, Snapshot
from agent.model.time import NS, Instant

LINGER_NS: Final = 30 * NS
"""Time for which a cgroup is still evaluated after its last event, so that its findings can clear [ns]."""


class RateCounters(NamedTuple):
    """Counters of one cgroup whose growth per time the rules evaluate: throttling, hits of memory limits."""

    periods: Reading
    """Number of CPU periods in which the cgroup had runnable tasks."""
    throttled: Reading
    """Number of CPU periods in which the cgroup used up its quota."""
    at_max: Reading
    """Number of times that the cgroup hit its memory limit."""
    at_high: Reading
    """Number of times that the cgroup was throttled for exceeding ``memory.high``."""


NO_RATE_COUNTS: Final = RateCounters(0, 0, 0, 0)
"""Rate counters of a cgroup that has no earlier sample: all 0."""


class RateWindows(NamedTuple):
    """Sliding windows over the readings of a cgroup's counters, one for each field of RateCounters."""

    periods: RateWindow = ()
    throttled: RateWindow = ()
    at_max: RateWindow = ()
    at_high: RateWindow = ()
    grew_ns: int = 0
    """CLOCK_MONOTONIC at which a counter other than ``periods`` last grew [ns]."""


NO_RATE_WINDOWS: Final = RateWindows()
"""Empty windows, for a cgroup whose counters have not grown recently."""


def rate_counters(group: CgroupSample) -> RateCounters:
    """Return the counters of a cgroup whose growth per time the rules evaluate. In cgroup v1,
    ``memory.failcnt`` counts hits of the memory limit."""
    at_max = group.mem_failcnt if is_absent(group.mem_max) else group.mem_max
    return RateCounters(group.cpu_periods, group.cpu_throttled, at_max, group.mem_high)


def next_rate_windows(
    before: RateWindows, old: RateCounters, new: RateCounters, evaluated_ns: int, now_ns: int, window_ns: int
) -> RateWindows:
    """Return the windows of a cgroup's rate counters, extended by the change from ``old`` to ``new``.

    Args:
        before: Windows after the last evaluation.
        old: Counters at the last evaluation.
        new: Counters now.
        evaluated_ns: CLOCK_MONOTONIC of the last evaluation [ns].
        window_ns: Longest window over which a growth will be computed [ns].
    """
    throttled = _has_grown(old.throttled, new.throttled)
    at_max = _has_grown(old.at_max, new.at_max)
    at_high = _has_grown(old.at_high, new.at_high)
    grew = throttled or at_max or at_high
    if before is NO_RATE_WINDOWS and not grew:
        return NO_RATE_WINDOWS

    def extend(window: RateWindow, old_value: Reading, now: Reading, *, starts: bool) -> RateWindow:
        if not window and not starts:
            return ()
        window = repeat_last_value(window, evaluated_ns, window_ns) or append_reading(
            (), old_value, evaluated_ns, window_ns
        )
        return append_reading(window, now, now_ns, window_ns)

    return RateWindows(
        extend(before.periods, old.periods, new.periods, starts=throttled),
        extend(before.throttled, old.throttled, new.throttled, starts=throttled),
        extend(before.at_max, old.at_max, new.at_max, starts=at_max),
        extend(before.at_high, old.at_high, new.at_high, starts=at_high),
        now_ns if grew else before.grew_ns,
    )


def _has_grown(old: Reading, new: Reading) -> bool:
    """Return True if a counter of a cgroup has grown between two samples. A counter that was absent counts as
    0. The result is False if one of the two values is unreadable."""
    if isinstance(new, Missing):
        return False
    return new > old if isinstance(old, int) else is_absent(old) and new > 0


RECENT_NS: Final = 600 * NS
"""Time for which single events of a cgroup are reported after the last of them [ns]."""
MAX_REMOVED_CGROUPS: Final = 1024
"""Largest number of removed cgroups whose events are still reported; bounds the agent's memory."""
MEMORY_WINDOW_S: Final = 60
"""Window in which hits of ``memory.max`` and ``memory.high`` are counted [s]."""


class CgroupEventCounter(StrEnum):
    """Counter of a cgroup whose events are reported one by one: OOM kills, refused hugepages."""

    KILLS = "kills"
    """Counter of processes that the kernel killed because memory ran out."""
    OOMS = "ooms"
    """Counter of times that the cgroup ran out of memory, with or without a kill."""
    HITS = "hits"
    """Counter of hugepage allocations that hit the limit."""
    REFUSALS = "refusals"
    """Counter of hugepage reservations that were refused."""


EventCounterKey = tuple[CgroupEventCounter, int]
"""Key of a counter of single events in one cgroup: the counter, and the page size for hugepages.

The page size is an index in ``CgroupSample.hugetlb``; it is 0 for KILLS and OOMS, which have no page size.
"""


class RecentEvents(NamedTuple):
    """Recent growth of one counter of single events (OOM kills, refused hugepages) of a cgroup."""

    total: int
    """Value of the counter at the last reading."""
    recent: int
    """Number of events in the last RECENT_NS; 0 if the counter is unreadable at the moment."""
    grew_ns: int
    """CLOCK_MONOTONIC at which the counter last grew [ns]."""


class CgroupWithRecentEvents(NamedTuple):
    """Cgroup with recent events (OOM kills, throttling, freezing, ...), which the rules evaluate."""

    group: CgroupSample
    """Last sample of the cgroup, kept after the cgroup was removed, often because of the event."""
    pod: CgroupSample | None
    """Sample of the container's pod; None for a pod's own cgroup."""
    deltas: Mapping[EventCounterKey, RecentEvents]
    """Recent growth of each counter of single events that has grown."""
    rates: RateWindows
    frozen_ns: int | None
    """CLOCK_MONOTONIC at which the cgroup was last known to be frozen [ns]; None: not recently."""


class CgroupRuleState(NamedTuple):
    """Values that the cgroup rules carry from one evaluation to the next."""

    groups: tuple[CgroupSample, ...] = ()
    """Samples of all cgroups in the last evaluation."""
    by_id: Mapping[int, CgroupSample] = {}
    pods: Mapping[str, CgroupSample] = {}
    """Samples of the pods' own cgroups, by pod UID."""
    evaluated_ns: int = 0
    active: Mapping[int, CgroupWithRecentEvents] = {}
    """Cgroups with recent events, by the cgroup's ID."""
    dropped: bool = False
    """True: in the last evaluation, some cgroups were not watched, because the table of cgroups was full."""


def next_cgroup_state(
    previous: CgroupRuleState, snapshot: Snapshot, settings: EngineSettings, now: Instant, *, started: bool
) -> CgroupRuleState:
    """Return the state of the cgroup rules after a snapshot (the newest readings).

    Args:
        started: False for the first snapshot.
    """
    groups, by_id, pods = snapshot.groups, previous.by_id, previous.pods
    changed: list[CgroupSample] = []
    if len(groups) != len(previous.groups) or not all(map(is_, groups, previous.groups)):
        by_id = {group.id: group for group in groups}
        pods = {group.pod_uid: group for group in groups if group.kind is CgroupKind.POD}
        changed = [group for group in groups if previous.by_id.get(group.id) is not group]
    window_ns = max(MEMORY_WINDOW_S, settings.host.throttled_window_s) * NS
    active = dict(previous.active)
    for group in changed:
        # a new cgroup counts from 0; one that had no room in the table counts from its first sample
        unknown = None if started and not previous.dropped else group
        before = previous.by_id.get(group.id, unknown)
        record = _next_active(
            active.get(group.id), before, group, previous.evaluated_ns, now.mono_ns, window_ns
        )
        if record is not None:
            active[group.id] = record
    recent = _without_expired(active, by_id, pods, now.mono_ns, window_ns)
    return CgroupRuleState(groups, by_id, pods, now.mono_ns, recent, snapshot.core.groups_dropped > 0)


def _event_readings(group: CgroupSample) -> tuple[Reading, Reading, tuple[HugetlbSample, ...]]:
    """Return the readings of a cgroup that :func:`_counters` uses: OOM kills, OOMs, hugepages by size."""
    return group.mem_oom_kill, group.mem_oom, group.hugetlb


def _counters(group: CgroupSample) -> dict[EventCounterKey, Reading]:
    kills, ooms, hugetlb = _event_readings(group)
    counts: dict[EventCounterKey, Reading] = {
        (CgroupEventCounter.KILLS, 0): kills,
        (CgroupEventCounter.OOMS, 0): ooms,
    }
    for index, size in enumerate(hugetlb):
        counts[CgroupEventCounter.HITS, index] = size.events_max
        counts[CgroupEventCounter.REFUSALS, index] = size.rsvd_failed
    return counts


def _next_active(
    record: CgroupWithRecentEvents | None,
    before: CgroupSample | None,
    group: CgroupSample,
    evaluated_ns: int,
    now_ns: int,
    window_ns: int,
) -> CgroupWithRecentEvents | None:
    """Return the recent events of a cgroup whose sample has changed; None if the cgroup has no recent events.

    Args:
        record: Recent events of the cgroup up to the last evaluation; None: it had none.
        before: Sample of the cgroup in the last evaluation; None: the cgroup is new.
        group: Present sample of the cgroup.
        evaluated_ns: CLOCK_MONOTONIC of the last evaluation [ns].
        window_ns: Longest window over which a growth will be computed [ns].
    """
    deltas = _next_deltas(record, before, group, now_ns)
    old = rate_counters(before) if before else NO_RATE_COUNTS
    rates = next_rate_windows(
        record.rates if record else NO_RATE_WINDOWS,
        old,
        rate_counters(group),
        evaluated_ns,
        now_ns,
        window_ns,
    )
    if record:
        return CgroupWithRecentEvents(group, record.pod, deltas, rates, record.frozen_ns)
    if not deltas and rates is NO_RATE_WINDOWS and group.frozen != 1:
        return None
    return CgroupWithRecentEvents(group, None, deltas, rates, None)


def _next_deltas(
    record: CgroupWithRecentEvents | None, before: CgroupSample | None, group: CgroupSample, now_ns: int
) -> Mapping[EventCounterKey, RecentEvents]:
    deltas = dict(record.deltas) if record else {}
    if before and _event_readings(before) == _event_readings(group):
        return deltas
    old_counts = _counters(before) if before else {}
    for key, count in _counters(group).items():
        delta = deltas.get(key)
        old = delta.total if delta else old_counts.get(key, 0)
        if isinstance(count, Missing):
            if isinstance(old, int) and count.absence is Absence.UNREADABLE:
                deltas.setdefault(key, RecentEvents(old, 0, now_ns))  # base for the next reading
            continue
        if isinstance(old, Missing):
            # after an unreadable value the growth is unknown
            old = 0 if old.absence is Absence.ABSENT else count
        if count > old:
            deltas[key] = RecentEvents(count, count - old + (delta.recent if delta else 0), now_ns)
        elif delta is not None:  # a counter that fell was reset
            deltas[key] = delta._replace(total=count)
    return deltas


def _without_expired(
    active: Mapping[int, CgroupWithRecentEvents],
    by_id: Mapping[int, CgroupSample],
    pods: Mapping[str, CgroupSample],
    now_ns: int,
    window_ns: int,
) -> Mapping[int, CgroupWithRecentEvents]:
    """Return the cgroups that still have recent events, by ID. Of the removed cgroups, only the newest
    MAX_REMOVED_CGROUPS are kept."""
    kept: dict[int, CgroupWithRecentEvents] = {}
    gone: list[tuple[int, CgroupWithRecentEvents]] = []
    for ident, record in active.items():
        exists = ident in by_id
        deltas = _recent_deltas(record, now_ns, exists=exists) if record.deltas else {}
        if not exists:
            if deltas:
                gone.append((ident, record._replace(deltas=deltas, rates=NO_RATE_WINDOWS, frozen_ns=None)))
            continue
        is_recent = now_ns - record.rates.grew_ns < window_ns + LINGER_NS
        rates = record.rates if is_recent else NO_RATE_WINDOWS
        frozen_ns = _frozen_ns(record, now_ns)
        if not deltas and rates is NO_RATE_WINDOWS and frozen_ns is None:
            continue
        pod = (
            pods.get(record.group.pod_uid, record.pod) if record.group.kind is CgroupKind.CONTAINER else None
        )
        kept[ident] = CgroupWithRecentEvents(record.group, pod, deltas, rates, frozen_ns)
    gone.sort(key=lambda item: max(delta.grew_ns for delta in item[1].deltas.values()))
    return {**dict(gone[-MAX_REMOVED_CGROUPS:]), **kept}


def _recent_deltas(
    record: CgroupWithRecentEvents, now_ns: int, *, exists: bool
) -> dict[EventCounterKey, RecentEvents]:
    """Return the recent events of a cgroup, for each counter that grew in the last RECENT_NS.

    A counter that cannot be read at present is listed with 0 recent events.

    Args:
        exists: False: the cgroup was removed.
    """
    counts = _counters(record.group) if exists else {}
    deltas = {}
    for key, delta in record.deltas.items():
        if delta.recent and now_ns - delta.grew_ns < RECENT_NS:
            deltas[key] = delta
        elif isinstance(counts.get(key), Missing):
            deltas[key] = delta._replace(recent=0)
    return deltas


def _frozen_ns(record: CgroupWithRecentEvents, now_ns: int) -> int | None:
    """Return the last time at which a cgroup was known to be frozen, on CLOCK_MONOTONIC [ns]. None: the
    cgroup was never frozen, or was last frozen more than LINGER_NS ago."""
    state, since_ns = record.group.frozen, record.frozen_ns
    if state == 1:
        return now_ns
    if since_ns is not None and isinstance(state, Missing) and state.absence is Absence.UNREADABLE:
        return now_ns  # an unreadable state does not mean thawed
    return since_ns if since_ns is not None and now_ns - since_ns < LINGER_NS else None


class CpuThrottling(NamedTuple):
    """CPU throttling of a cgroup over the configured window."""

    throttled: int = 0
    """Number of CPU periods in which the cgroup used up its quota."""
    periods: int = 0
    """Number of CPU periods in which the cgroup had runnable tasks."""
    evaluations: int = 0
    """Number of evaluations in the window at which ``throttled`` had grown."""


class CgroupRuleInput(NamedTuple):
    """Input of the cgroup rules for one cgroup with recent events: the cgroup of a container or of a pod."""

    group: CgroupSample
    pod: CgroupSample | None = None
    """Sample of the container's pod; None for a pod's own cgroup."""
    containers: "tuple[CgroupRuleInput, ...]" = ()
    """Inputs of the rules for the pod's containers with recent events; empty for a container."""
    exclusive: tuple[str, ...] = ()
    """Names of the declared devices that provide the cgroup's exclusive CPUs; empty: it also has other CPUs.
    The rules need devices that are prepared for the pod."""
    limits: HostLimits = HostLimits()
    kills: int = 0
    """OOM kills in the last ten minutes."""
    ooms: int = 0
    """Times that memory ran out in the last ten minutes, with or without a kill."""
    hits: tuple[int, ...] = ()
    """Hits of the hugepage limit in the last ten minutes, one number for each page size in
    ``group.hugetlb``."""
    refusals: tuple[int, ...] = ()
    """Refused hugepage reservations in the last ten minutes, one number for each page size."""
    throttling: CpuThrottling = CpuThrottling()
    at_max: int = 0
    """Hits of the memory limit within MEMORY_WINDOW_S."""
    at_high: int = 0
    """Times that the cgroup was throttled for exceeding ``memory.high`` within MEMORY_WINDOW_S."""


def exclusive_cpu_devices(snapshot: Snapshot) -> list[tuple[str, CpuSet]]:
    """Return the name and CPUs of each declared device whose CPUs are exclusive to one container."""
    return [
        (device.subject, device.part.cpus)
        for file in snapshot.declared
        for device in file.devices
        if isinstance(device.part, DeclaredCpuDevice) and device.part.exclusive
    ]


def exclusive_devices_of_cgroup(
    group: CgroupSample, exclusive: Iterable[tuple[str, CpuSet]]
) -> tuple[str, ...]:
    """Return the names of the devices in ``exclusive`` whose CPUs are in a cgroup's cpuset.

    The result is empty if the cpuset has other CPUs too. The cpuset is used because a ResourceClaim shows
    only which devices the whole pod uses, not which container uses them.

    Args:
        exclusive: Name and CPUs of each device.
    """
    if isinstance(group.cpus, Missing):
        return ()
    found, left = [], group.cpus
    for subject, cpus in exclusive:
        if cpus & group.cpus:
            found.append(subject)
            left &= ~cpus
    return () if left else tuple(found)


def cgroup_rule_inputs(
    state: CgroupRuleState, snapshot: Snapshot, settings: EngineSettings, now: Instant
) -> list[CgroupRuleInput]:
    """Return the rules' input for each cgroup that has recent events: pods first, then containers."""
    exclusive = exclusive_cpu_devices(snapshot) if state.active else []
    containers: dict[str, list[CgroupRuleInput]] = {}
    pods = []
    for _, record in sorted(state.active.items()):
        view = _cgroup_rule_input(
            record, exclusive_devices_of_cgroup(record.group, exclusive), settings.host, now
        )
        if record.group.kind is CgroupKind.POD:
            pods.append(view)
        else:
            containers.setdefault(record.group.pod_uid, []).append(view)
    found = [pod._replace(containers=tuple(containers.get(pod.group.pod_uid, ()))) for pod in pods]
    return [*found, *chain.from_iterable(containers.values())]


def _cgroup_rule_input(
    record: CgroupWithRecentEvents, exclusive: tuple[str, ...], limits: HostLimits, now: Instant
) -> CgroupRuleInput:
    rates = record.rates
    minute_ns = now.mono_ns - MEMORY_WINDOW_S * NS
    return CgroupRuleInput(
        group=record.group,
        pod=record.pod,
        exclusive=exclusive,
        limits=limits,
        kills=_recent(record, CgroupEventCounter.KILLS, 0),
        ooms=_recent(record, CgroupEventCounter.OOMS, 0),
        hits=_recent_by_size(record, CgroupEventCounter.HITS),
        refusals=_recent_by_size(record, CgroupEventCounter.REFUSALS),
        throttling=_throttling(rates, now.mono_ns - limits.throttled_window_s * NS),
        at_max=grown_since(rates.at_max, minute_ns),
        at_high=grown_since(rates.at_high, minute_ns),
    )


def _recent(record: CgroupWithRecentEvents, count: CgroupEventCounter, index: int) -> int:
    delta = record.deltas.get((count, index))
    return delta.recent if delta else 0


def _recent_by_size(record: CgroupWithRecentEvents, count: CgroupEventCounter) -> tuple[int, ...]:
    sizes = len(record.group.hugetlb)
    return tuple(_recent(record, count, index) for index in range(sizes)) if record.deltas else (0,) * sizes


def _throttling(rates: RateWindows, since_ns: int) -> CpuThrottling:
    """Return the CPU throttling of a cgroup since ``since_ns``. If one of the two counters was first read
    after ``since_ns``, the time begins with that reading."""
    throttled, periods = rates.throttled, rates.periods
    if not throttled or not periods:
        return CpuThrottling()
    since_ns = max(since_ns, throttled[0].t_ns, periods[0].t_ns)
    points = [point for point in throttled if point.t_ns >= since_ns]
    evaluations = sum(before.value < after.value for before, after in pairwise(points))
    return CpuThrottling(grown_since(throttled, since_ns), grown_since(periods, since_ns), evaluations)
