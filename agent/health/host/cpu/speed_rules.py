"""CPUs that run slower than they could: slowed down for heat, or capped by somebody."""

from typing import Final

from agent.health.catalog import Rule
from agent.health.host.cpu.cores import Cap
from agent.health.host.cpu.state import CpuView, named
from agent.health.rules import (
    OK,
    Growth,
    RuleNotApplicable,
    RuleNotEvaluated,
    RuleResult,
    Unreadable,
    lacking,
)
from agent.model.cpuset import CpuSet, cpus_of
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing
from agent.model.time import NS
from agent.model.wake import Field

CAPS_TOLD: Final = 3
CAP_HELD_NS: Final = 60 * NS
"""Whoever cools by capping does it again and again: that is one cause, not many."""


def _throttled(code: str, growth: Growth, view: CpuView, what: str) -> RuleResult:
    if isinstance(growth.events, Missing):
        return lacking(f"{what}_throttle_count", growth.events, "no thermal_throttle counters")
    if growth.events >= view.throttle_events:
        evidence = (
            f"at least {view.throttle_events} {what} thermal-throttle events in {view.throttle_window_s} s"
        )
        return Finding(code, Severity.DEGRADED, evidence)
    if growth.span_s < view.throttle_window_s:
        return RuleNotEvaluated(f"needs {view.throttle_window_s} s of history")
    return OK


def cpu_throttled_core(view: CpuView) -> RuleResult:
    """Cores were slowed down for heat more often than the limit allows, within the window.

    Source: ``cpu*/thermal_throttle/core_throttle_count`` [events], summed over the CPUs.
    """
    return _throttled("cpu.throttled.core", view.throttled_core, view, "core")


def cpu_throttled_package(view: CpuView) -> RuleResult:
    """The whole package was slowed down for heat more often than the limit allows, within the window.

    Source: ``cpu*/thermal_throttle/package_throttle_count`` [events], the largest of the CPUs.
    """
    return _throttled("cpu.throttled.package", view.throttled_package, view, "package")


def cpu_capped(view: CpuView) -> RuleResult:
    """CPUs may not run as fast as they might when the agent started, or, since before, as they could.

    Source: ``cpu*/cpufreq/scaling_max_freq`` against itself at start, and against ``cpuinfo_max_freq`` [kHz].
    """
    cores = view.cores
    online = view.cpus if isinstance(view.online, Missing) else view.cpus & view.online
    if fallen := _caps(cores.fallen, online, "at start"):
        return Finding("cpu.capped", Severity.DEGRADED, fallen)
    for cpu, why in cores.cap_lost.items():
        if online >> cpu & 1:
            return Unreadable(f"cpu{cpu}/cpufreq/scaling_max_freq", why)
    if held := _caps(cores.held, online, "possible"):
        return Finding("cpu.capped", Severity.INFO, held)
    return OK if cores.scaled & view.cpus else RuleNotApplicable("no frequency scaling")


def _caps(caps: tuple[Cap, ...], online: CpuSet, when: str) -> str:
    """Which CPUs, and how far: the first few, if there are many kinds. Empty if none is online."""
    mine = sorted((next(cpus_of(cap.cpus & online)), cap) for cap in caps if cap.cpus & online)
    texts = [
        f"{named(cap.cpus & online)} capped at {_ghz(cap.khz)}, {_ghz(cap.could_khz)} {when}"
        for _, cap in mine[:CAPS_TOLD]
    ]
    if rest := sum((cap.cpus & online).bit_count() for _, cap in mine[CAPS_TOLD:]):
        texts.append(f"and {rest} more")
    return "; ".join(texts)


def _ghz(khz: int) -> str:
    return f"{khz / 1e6:.7g} GHz"


SPEED_RULES: Final = (
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
    Rule(
        code="cpu.capped",
        severity=Severity.DEGRADED,
        blame=Blame.CONFIGURATION,
        source="cores",
        threshold="below what was allowed at start; info if it was already below what is possible then",
        why="the CPUs run slower than others that are offered as the same",
        advice="look for who caps them: power profile, thermal daemon, BMC; then write the value of "
        "cpufreq/cpuinfo_max_freq to cpufreq/scaling_max_freq",
        judge=cpu_capped,
        probation_ns=CAP_HELD_NS,
        try_it="echo 1000000 > /sys/devices/system/cpu/cpu1/cpufreq/scaling_max_freq",
    ),
)
