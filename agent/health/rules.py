"""The rules: each looks at one device or cgroup and says what it finds.

A rule is a function of a view. A view holds everything that its kind of subject may be judged by, and
nothing else: the samples of now, what was there at start, and how far counters have grown. Rules read no
clock and no file, and a reading that is missing is a value to them like any other.
"""

from typing import Final, NamedTuple

from agent.devices.inventory import size_name
from agent.model.cpuset import CpuSet, format_cpus
from agent.model.health import Finding, Severity
from agent.model.reading import Absence, Missing, Reading
from agent.model.snapshot import GroupSample, NodeSample, PoolSample

NO_LIMIT: Final = 2**64 - 1


class Inapplicable(NamedTuple):
    """The machine gives this rule nothing to judge."""

    reason: str


class Unevaluated(NamedTuple):
    """The rule needs more history than there is yet."""

    reason: str


class Unreadable(NamedTuple):
    """What the rule judges was readable and no longer is."""

    what: str
    why: Missing


FINE: Final = None
Answer = Finding | Inapplicable | Unevaluated | Unreadable | None
"""What a rule says. None: it looked, and all is well."""


class Growth(NamedTuple):
    """How far a counter has grown over a sliding window."""

    events: Reading
    """In the last ``window_s``, or since ``span_s`` if that is less."""
    span_s: float
    """How much of the window has been watched [s]."""


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


class PoolView(NamedTuple):
    """One hugepage pool."""

    pool: PoolSample | None
    size_kib: int
    expected: Reading
    """Persistent pages at start, or as configured."""
    configured: bool


class GroupView(NamedTuple):
    """One cgroup of a container, and its pod's."""

    group: GroupSample
    pod: GroupSample | None
    hits: tuple[int, ...]
    """For each size in ``group.hugetlb``: hits of the limit not yet old enough to be forgotten."""


def cpu_offline(view: CpuView) -> Answer:
    """CPUs that should be online are not.

    Source: ``/sys/devices/system/cpu/online`` against the set at start, or as configured.
    """
    if isinstance(view.online, Missing):
        return Unreadable("cpu/online", view.online)
    if view.node and isinstance(view.node.cpus, Missing):
        return Unreadable(f"node{view.node.node}/cpulist", view.node.cpus)
    gone = view.expected & ~view.online
    if not gone:
        return FINE
    cpus = "CPU" if gone.bit_count() == 1 else "CPUs"
    was = "configured" if view.configured else "online at start"
    evidence = f"{cpus} {format_cpus(gone)} offline, {was}: {format_cpus(view.expected)}"
    return Finding("cpu.offline", Severity.UNHEALTHY, evidence)


def _throttled(code: str, growth: Growth, view: CpuView, what: str) -> Answer:
    if isinstance(growth.events, Missing):
        if growth.events.absence is Absence.UNREADABLE:
            return Unreadable(f"{what}_throttle_count", growth.events)
        return Inapplicable("no thermal_throttle counters")
    if growth.events >= view.throttle_events:
        evidence = (
            f"at least {view.throttle_events} {what} thermal-throttle events in {view.throttle_window_s} s"
        )
        return Finding(code, Severity.DEGRADED, evidence)
    if growth.span_s < view.throttle_window_s:
        return Unevaluated(f"needs {view.throttle_window_s} s of history")
    return FINE


def cpu_throttled_core(view: CpuView) -> Answer:
    """Cores were slowed down for heat more often than the limit allows, within the window.

    Source: ``cpu*/thermal_throttle/core_throttle_count`` [events], summed over the node.
    """
    return _throttled("cpu.throttled.core", view.throttled_core, view, "core")


def cpu_throttled_package(view: CpuView) -> Answer:
    """The whole package was slowed down for heat more often than the limit allows, within the window.

    Source: ``cpu*/thermal_throttle/package_throttle_count`` [events], the largest of the node's CPUs.
    """
    return _throttled("cpu.throttled.package", view.throttled_package, view, "package")


def persistent_pages(pool: PoolSample) -> Reading:
    """Pages of the pool proper. ``nr_hugepages`` counts surplus pages too, which come and go with use."""
    if isinstance(pool.nr, Missing):
        return pool.nr
    if isinstance(pool.surplus, Missing):
        return pool.nr if pool.surplus.absence is Absence.ABSENT else pool.surplus
    return pool.nr - pool.surplus


def pool_shrunk(view: PoolView) -> Answer:
    """The pool has fewer pages than at start, or than configured.

    Source: ``nr_hugepages`` less ``surplus_hugepages`` [pages].
    """
    pages = persistent_pages(view.pool) if view.pool else 0
    if isinstance(pages, Missing):
        what = "surplus_hugepages" if view.pool and isinstance(view.pool.nr, int) else "nr_hugepages"
        return Unreadable(what, pages)
    if isinstance(view.expected, Missing):
        return Unreadable("pool size at start", view.expected)
    if pages >= view.expected:
        return FINE
    size = size_name(view.size_kib)
    found = f"{pages} pages of {size}" if view.pool else f"no pool of {size} pages"
    evidence = f"{found}, {view.expected} {'configured' if view.configured else 'at start'}"
    return Finding("mem.hugepages.pool_shrunk", Severity.UNHEALTHY, evidence)


def _bytes(value: int) -> str:
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= factor and value % factor == 0:
            return f"{value // factor} {unit}"
    return f"{value} B"


def _limit_text(group: GroupSample | None, index: int) -> str:
    if group is None or index >= len(group.hugetlb):
        return ""
    limits = (group.hugetlb[index].max, group.hugetlb[index].rsvd_max)
    finite = [limit for limit in limits if isinstance(limit, int) and limit != NO_LIMIT]
    return f"limit {_bytes(min(finite))}" if finite else ""


def hugetlb_limit_hit(view: GroupView) -> Answer:
    """A container asked for hugepages beyond its limit, and was refused (ENOMEM) or killed (SIGBUS).

    Source: ``hugetlb.<size>.events`` max [count]; cgroup v1: ``hugetlb.<size>.failcnt``. The kernel counts
    a pod's limit at the container that ran into it.
    """
    parts = []
    for index, hits in enumerate(view.hits):
        if hits <= 0:
            continue
        limit = _limit_text(view.group, index) or _limit_text(view.pod, index)
        size = size_name(view.group.hugetlb[index].size_kib)
        parts.append(f"{size} pages hit the limit" + (f" ({limit})" if limit else ""))
    if not parts:
        return FINE
    return Finding("cgroup.hugetlb.max_hit", Severity.INFO, ", ".join(parts))
