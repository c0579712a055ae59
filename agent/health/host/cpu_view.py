"""CPUs as their rules see them, and what is remembered for that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.health.history import lengthened
from agent.health.rules import Growth
from agent.model.cpuset import CpuSet
from agent.model.reading import Absence, Missing, Reading
from agent.model.settings import Settings
from agent.model.snapshot import NodeSample, Snapshot
from agent.model.time import NS, Instant


class CpuView(NamedTuple):
    """The CPUs of one NUMA node."""

    node: NodeSample | None
    online: CpuSet | Missing
    expected: CpuSet
    """The node's CPUs that were online at start, or that the configuration names."""
    configured: bool
    throttled_core: Growth
    throttled_package: Growth
    throttle_events: int
    """Throttle events within the window that make a device degraded."""
    throttle_window_s: int


class Point(NamedTuple):
    """A node's throttle counters at the moment when they were read."""

    t_ns: int
    core: Reading
    package: Reading


@dataclass(frozen=True, slots=True)
class CpuPast:
    """What the rules of CPUs compare with."""

    expected: Mapping[int, CpuSet] = field(default_factory=dict)
    """By NUMA node."""
    throttle: Mapping[int, tuple[Point, ...]] = field(default_factory=dict)
    """By NUMA node, oldest first; the first point is at or before the window's begin, if old enough."""


def remember_cpus(past: CpuPast, snapshot: Snapshot, settings: Settings, now: Instant) -> CpuPast:
    """The past after a snapshot."""
    read_ns = next((src.beat_ns for src in snapshot.sources if src.name == "throttle"), now.mono_ns)
    return CpuPast(
        expected=_expected(past, snapshot, settings),
        throttle={
            node.node: _points(past.throttle.get(node.node, ()), node, read_ns, settings)
            for node in snapshot.nodes
        },
    )


def _expected(past: CpuPast, snapshot: Snapshot, settings: Settings) -> Mapping[int, CpuSet]:
    """Each node's CPUs that should be online.

    A CPU that the configuration names and no NUMA node has is expected of the first node.
    """
    if settings.expect_cpus is None:
        online = snapshot.cpus.online
        if isinstance(online, Missing):
            return past.expected
        new = {n.node: n.cpus & online for n in snapshot.nodes if isinstance(n.cpus, int)}
        return {**new, **past.expected}
    nodes = {n.node: n.cpus for n in snapshot.nodes if isinstance(n.cpus, int)}
    owned = 0
    for cpus in nodes.values():
        owned |= cpus
    expected = {node: cpus & settings.expect_cpus for node, cpus in nodes.items()}
    if expected:
        expected[min(expected)] |= settings.expect_cpus & ~owned
    return expected


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


def view_cpus(past: CpuPast, snapshot: Snapshot, settings: Settings, number: int) -> CpuView:
    """The CPUs of a NUMA node."""
    points = past.throttle.get(number, ())
    return CpuView(
        node=next((node for node in snapshot.nodes if node.node == number), None),
        online=snapshot.cpus.online,
        expected=past.expected.get(number, 0),
        configured=settings.expect_cpus is not None,
        throttled_core=_growth(points, 1, settings.throttle_window_s),
        throttled_package=_growth(points, 2, settings.throttle_window_s),
        throttle_events=settings.throttle_events,
        throttle_window_s=settings.throttle_window_s,
    )
