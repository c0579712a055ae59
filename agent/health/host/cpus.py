"""What can be wrong with CPUs."""

from typing import Final

from agent.health.catalogue import Rule
from agent.health.host.cpu_view import CpuView
from agent.health.rules import FINE, Answer, Growth, Inapplicable, Unevaluated, Unreadable
from agent.model.cpuset import format_cpus
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Absence, Missing
from agent.model.wake import Field


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


CPU_RULES: Final = (
    Rule(
        code="cpu.offline",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="cpus",
        reads=(Field.CPU_ONLINE, Field.NODE_CPUS),
        threshold="any CPU that was online at start, or that the configuration names",
        why="a claim may hold the CPU; its threads now run elsewhere, on somebody else's",
        advice="write 1 to /sys/devices/system/cpu/cpu<N>/online; if that fails, look for machine checks",
        judge=cpu_offline,
        try_it="echo 0 > /sys/devices/system/cpu/cpu1/online",
    ),
    Rule(
        code="cpu.throttled.core",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="throttle",
        reads=(Field.NODE_THROTTLE_CORE,),
        threshold="10 events in 60 s (throttle.events, throttle.window)",
        why="the cores run slower than what was paid for",
        advice="check fans, heat sinks and inlet temperature",
        judge=cpu_throttled_core,
        counter=True,
        try_it="in a copy of sysfs (--sysfs-root), add 10 to cpu0/thermal_throttle/core_throttle_count",
    ),
    Rule(
        code="cpu.throttled.package",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="throttle",
        reads=(Field.NODE_THROTTLE_PACKAGE,),
        threshold="10 events in 60 s (throttle.events, throttle.window)",
        why="the whole socket runs slower than what was paid for",
        advice="check fans, heat sinks and inlet temperature",
        judge=cpu_throttled_package,
        counter=True,
        try_it="in a copy of sysfs (--sysfs-root), add 10 to cpu0/thermal_throttle/package_throttle_count",
    ),
)
