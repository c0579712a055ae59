"""From snapshots to views: what each rule is shown, and what must be remembered for that.

Memory is a value. :func:`remember` makes the next one from the last and a snapshot; nothing is changed in
place, so any day of a node can be replayed from its snapshots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.devices.inventory import Device, Kind, device_pools, devices_expected, devices_of
from agent.health.history import lengthened
from agent.health.rules import CpuView, GroupView, Growth, PoolView, persistent_pages
from agent.model.cpuset import CpuSet
from agent.model.reading import Absence, Missing, Reading
from agent.model.settings import Settings
from agent.model.snapshot import GroupKind, GroupSample, NodeSample, PoolSample, Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant

HITS_KEPT: Final = 1024  # of containers that are gone: one that dies in a loop must not fill the memory
HIT_MEMORY_NS: Final = 600 * NS  # a limit that was hit is told of for ten minutes


class Point(NamedTuple):
    """A node's throttle counters at the moment when they were read."""

    t_ns: int
    core: Reading
    package: Reading


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
class Memory:
    """What the rules compare with."""

    devices: tuple[Device, ...] = ()
    expected_cpus: Mapping[int, CpuSet] = field(default_factory=dict)
    """By NUMA node."""
    expected_pages: Mapping[str, Reading] = field(default_factory=dict)
    """By device name."""
    throttle: Mapping[int, tuple[Point, ...]] = field(default_factory=dict)
    """By NUMA node, oldest first; the first point is at or before the window's begin, if old enough."""
    hits: Mapping[tuple[int, int], Hits] = field(default_factory=dict)
    """By group id and index of the size."""
    started: bool = False
    """Somebody has looked at the node."""


def is_starting(snapshot: Snapshot) -> bool:
    """Whether it was published before the first pass was over: it says nothing of the node."""
    return any(source.state is SourceState.STARTING for source in snapshot.sources if source.vital)


def remember(memory: Memory, snapshot: Snapshot, settings: Settings, now: Instant) -> Memory:
    """The memory after a snapshot."""
    if is_starting(snapshot):
        return Memory(devices=devices_expected(settings.expect_cpus, settings.expect_pools))
    known = memory.devices if memory.started else ()
    read_ns = next((src.beat_ns for src in snapshot.sources if src.name == "throttle"), now.mono_ns)
    return Memory(
        devices=devices_of(snapshot, known, settings.expect_pools),
        expected_cpus=_expected_cpus(memory, snapshot, settings),
        expected_pages=_expected_pages(memory, snapshot, settings),
        throttle={
            node.node: _points(memory.throttle.get(node.node, ()), node, read_ns, settings)
            for node in snapshot.nodes
        },
        hits=_hits(memory, snapshot, now),
        started=True,
    )


def _expected_cpus(memory: Memory, snapshot: Snapshot, settings: Settings) -> Mapping[int, CpuSet]:
    """Each node's CPUs that should be online.

    A CPU that the configuration names and no NUMA node has is expected of the first node.
    """
    if settings.expect_cpus is None:
        online = snapshot.cpus.online
        if isinstance(online, Missing):
            return memory.expected_cpus
        new = {n.node: n.cpus & online for n in snapshot.nodes if isinstance(n.cpus, int)}
        return {**new, **memory.expected_cpus}
    nodes = {n.node: n.cpus for n in snapshot.nodes if isinstance(n.cpus, int)}
    owned = 0
    for cpus in nodes.values():
        owned |= cpus
    expected = {node: cpus & settings.expect_cpus for node, cpus in nodes.items()}
    if expected:
        expected[min(expected)] |= settings.expect_cpus & ~owned
    return expected


def _expected_pages(memory: Memory, snapshot: Snapshot, settings: Settings) -> Mapping[str, Reading]:
    at_start = {
        device.name: persistent_pages(pool)
        for device, pool in device_pools(snapshot).items()
        if isinstance(memory.expected_pages.get(device.name, Missing(Absence.ABSENT)), Missing)
    }
    return {**memory.expected_pages, **at_start, **settings.expect_pools}


def _points(
    before: tuple[Point, ...], node: NodeSample, read_ns: int, settings: Settings
) -> tuple[Point, ...]:
    """The history with the newest reading in it."""
    if before and before[-1].t_ns == read_ns:
        return before
    point = Point(read_ns, node.throttle_core, node.throttle_package)
    return lengthened(before, point, settings.throttle_window_s * NS)


def _growth(points: tuple[Point, ...], which: int, window_s: int) -> Growth:
    newest = points[-1][which] if points else Missing(Absence.ABSENT)
    if isinstance(newest, Missing):
        return Growth(newest, 0.0)
    oldest = newest
    since_ns = now_ns = points[-1].t_ns
    for point in reversed(points):
        value = point[which]
        if isinstance(value, Missing) or since_ns - point.t_ns > window_s * NS:
            break  # a gap: what was counted before it, and in it, says nothing of a rate
        since_ns = point.t_ns
        if now_ns - since_ns <= window_s * NS:  # never more than the window: a slow drip is no rate
            oldest = value
    return Growth(max(0, newest - oldest), min((now_ns - since_ns) / NS, float(window_s)))


def _hits(memory: Memory, snapshot: Snapshot, now: Instant) -> Mapping[tuple[int, int], Hits]:
    """Counts of a container that was there at start are old news; of one that came later, none is."""
    found: dict[tuple[int, int], Hits] = {}
    pods = {group.pod_uid: group for group in snapshot.groups if group.kind is GroupKind.POD}
    for group in snapshot.groups:
        if group.kind is not GroupKind.CONTAINER:
            continue
        for index, sample in enumerate(group.hugetlb):
            count = sample.events_max
            known = memory.hits.get((group.id, index))
            if isinstance(count, Missing):
                if known is not None:
                    found[group.id, index] = known
            elif known is None:
                if count:
                    told = 0 if memory.started else count
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
        for key, hits in memory.hits.items()
        if key[0] not in there and hits.total > hits.told and now.mono_ns - hits.grew_ns < HIT_MEMORY_NS
    ]
    gone.sort(key=lambda item: item[1].grew_ns)
    return {**dict(gone[-HITS_KEPT:]), **found}


def view_device(
    memory: Memory, snapshot: Snapshot, pools: Mapping[Device, PoolSample], settings: Settings, device: Device
) -> CpuView | PoolView:
    """What the rules of this device's kind are shown; ``pools`` are ``device_pools(snapshot)``."""
    if device.kind is Kind.CPU:
        node = next((node for node in snapshot.nodes if node.node == device.node), None)
        points = memory.throttle.get(device.node, ())
        return CpuView(
            node=node,
            online=snapshot.cpus.online,
            expected=memory.expected_cpus.get(device.node, 0),
            configured=settings.expect_cpus is not None,
            throttled_core=_growth(points, 1, settings.throttle_window_s),
            throttled_package=_growth(points, 2, settings.throttle_window_s),
            throttle_events=settings.throttle_events,
            throttle_window_s=settings.throttle_window_s,
        )
    return PoolView(
        pool=pools.get(device),
        size_kib=device.size_kib,
        expected=memory.expected_pages.get(device.name, Missing(Absence.ABSENT)),
        configured=device.name in settings.expect_pools,
    )


def view_groups(memory: Memory) -> list[GroupView]:
    """The containers that have something to tell of. A thousand silent ones cost nothing here."""
    loud: dict[int, Hits] = {}
    for (group_id, _), hits in memory.hits.items():
        if hits.total > hits.told and (group_id not in loud or hits.grew_ns >= loud[group_id].grew_ns):
            loud[group_id] = hits
    views = []
    for group_id, newest in sorted(loud.items()):
        sizes = (memory.hits.get((group_id, index)) for index in range(len(newest.group.hugetlb)))
        counts = tuple(hits.total - hits.told if hits else 0 for hits in sizes)
        views.append(GroupView(newest.group, newest.pod, counts))
    return views
