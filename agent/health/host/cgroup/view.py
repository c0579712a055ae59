"""Cgroups of pods as their rules see them. What is remembered for that stands in group_past."""

from collections.abc import Iterable
from itertools import chain, pairwise
from typing import NamedTuple

from agent.health.host.cgroup.rates import Rates
from agent.health.host.cgroup.state import MEMORY_WINDOW_S, ActiveGroup, Count, GroupPast
from agent.health.rate_window import grown_since
from agent.model.cpuset import CpuSet
from agent.model.declared import DeclaredCpus
from agent.model.reading import Missing
from agent.model.settings import HostLimits, Settings
from agent.model.snapshot import GroupKind, GroupSample, Snapshot
from agent.model.time import NS, Instant


class Throttling(NamedTuple):
    """How often a group ran out of its CPU time, over the configured window."""

    throttled: int = 0
    """Periods in which it did."""
    periods: int = 0
    """Periods in which it wanted to run."""
    looks: int = 0
    """Looks between which ``throttled`` grew."""


class GroupView(NamedTuple):
    """One cgroup that has something to tell of: a container's, or a pod's own."""

    group: GroupSample
    pod: GroupSample | None = None
    """Of a container."""
    containers: "tuple[GroupView, ...]" = ()
    """Of a pod: those that have something to tell of, too."""
    exclusive: tuple[str, ...] = ()
    """Declared devices that are the CPUs that it runs on, and nobody else."""
    limits: HostLimits = HostLimits()
    kills: int = 0
    """Of the last ten minutes, as the next three."""
    ooms: int = 0
    """How often there was no memory for it, whether or not something was killed for that."""
    hits: tuple[int, ...] = ()
    """For each size in ``group.hugetlb``."""
    refusals: tuple[int, ...] = ()
    """Likewise."""
    throttling: Throttling = Throttling()
    at_max: int = 0
    """How often it ran into its limit of memory within a minute."""
    at_high: int = 0
    """How often it was slowed down for what it has above ``memory.high``, likewise."""


def exclusive_cpus(snapshot: Snapshot) -> list[tuple[str, CpuSet]]:
    """The subjects of declared devices that are CPUs for one container alone, and which."""
    return [
        (device.subject, device.what.cpus)
        for file in snapshot.declared
        for device in file.devices
        if isinstance(device.what, DeclaredCpus) and device.what.exclusive
    ]


def devices_of_group(group: GroupSample, exclusive: Iterable[tuple[str, CpuSet]]) -> tuple[str, ...]:
    """Subjects of the declared devices that are a group's CPUs, if it has no others.

    Its own cpuset says so, of each container apart; claims say of a pod as a whole what it uses.
    """
    if isinstance(group.cpus, Missing):
        return ()
    found, left = [], group.cpus
    for subject, cpus in exclusive:
        if cpus & group.cpus:
            found.append(subject)
            left &= ~cpus
    return () if left else tuple(found)


def view_groups(past: GroupPast, snapshot: Snapshot, settings: Settings, now: Instant) -> list[GroupView]:
    """The groups that have something to tell of. A thousand silent ones cost nothing here."""
    exclusive = exclusive_cpus(snapshot) if past.loud else []
    containers: dict[str, list[GroupView]] = {}
    pods = []
    for _, known in sorted(past.loud.items()):
        view = _view(known, devices_of_group(known.group, exclusive), settings.host, now)
        if known.group.kind is GroupKind.POD:
            pods.append(view)
        else:
            containers.setdefault(known.group.pod_uid, []).append(view)
    found = [pod._replace(containers=tuple(containers.get(pod.group.pod_uid, ()))) for pod in pods]
    return [*found, *chain.from_iterable(containers.values())]


def _view(known: ActiveGroup, exclusive: tuple[str, ...], limits: HostLimits, now: Instant) -> GroupView:
    rates = known.rates
    minute_ns = now.mono_ns - MEMORY_WINDOW_S * NS
    return GroupView(
        group=known.group,
        pod=known.pod,
        exclusive=exclusive,
        limits=limits,
        kills=_news(known, Count.KILLS, 0),
        ooms=_news(known, Count.OOMS, 0),
        hits=_news_by_size(known, Count.HITS),
        refusals=_news_by_size(known, Count.REFUSALS),
        throttling=_throttling(rates, now.mono_ns - limits.throttled_window_s * NS),
        at_max=grown_since(rates.at_max, minute_ns),
        at_high=grown_since(rates.at_high, minute_ns),
    )


def _news(known: ActiveGroup, count: Count, index: int) -> int:
    tally = known.tallies.get((count, index))
    return tally.news if tally else 0


def _news_by_size(known: ActiveGroup, count: Count) -> tuple[int, ...]:
    sizes = len(known.group.hugetlb)
    return tuple(_news(known, count, index) for index in range(sizes)) if known.tallies else (0,) * sizes


def _throttling(rates: Rates, since_ns: int) -> Throttling:
    """Of the time in which both counts are known."""
    throttled, periods = rates.throttled, rates.periods
    if not throttled or not periods:
        return Throttling()
    since_ns = max(since_ns, throttled[0].t_ns, periods[0].t_ns)
    points = [point for point in throttled if point.t_ns >= since_ns]
    looks = sum(before.value < after.value for before, after in pairwise(points))
    return Throttling(grown_since(throttled, since_ns), grown_since(periods, since_ns), looks)
