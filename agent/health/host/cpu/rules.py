"""Health rules for CPUs: presence, speed, machine checks, lockups, isolation and SMT."""

from functools import partial
from typing import Final

from agent.health.host.cpu.facts import LOCKUP_HELD_S, FrequencyCap
from agent.health.host.cpu.state import CpuRuleInput, format_cpu_set
from agent.health.kernel_log.facts import KernelLogCode, no_log_lines_result
from agent.health.rules import (
    OK,
    CounterGrowth,
    Rule,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
    counter_limit_result,
    format_duration,
    missing_reading_result,
)
from agent.model.cpuset import CpuSet, cpu_numbers, format_cpus
from agent.model.gpu import SamplerField
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.reading import NEVER_READ, Absence, Missing
from agent.model.time import NS

MAX_CAPS_LISTED: Final = 3
"""Largest number of different frequency caps that a message lists."""
CAP_HELD_NS: Final = 60 * NS
"""Time for which a frequency cap is still reported after it was lifted [ns]: a thermal daemon caps
repeatedly.
"""


def _throttling_result(code: str, growth: CounterGrowth, view: CpuRuleInput, scope: str) -> RuleResult:
    events, window_s = view.throttle_events, view.throttle_window_s
    evidence = f"at least {events} {scope} thermal-throttle events in {window_s} s"
    found = Finding(code, Severity.DEGRADED, evidence)
    counter, reason = f"{scope}_throttle_count", "the CPUs have no thermal_throttle counters"
    return counter_limit_result(growth, events, window_s, found, counter=counter, reason=reason)


def detect_core_throttling(view: CpuRuleInput) -> RuleResult:
    """Physical cores were throttled for heat more often than the limit allows, within the window.

    Source: ``cpu*/thermal_throttle/core_throttle_count`` [events], summed over the CPUs.
    """
    return _throttling_result("cpu.throttled.core", view.throttled_core, view, "core")


def detect_package_throttling(view: CpuRuleInput) -> RuleResult:
    """A whole CPU package was throttled for heat more often than the limit allows, within the window.

    Source: ``cpu*/thermal_throttle/package_throttle_count`` [events], the largest of the CPUs.
    """
    return _throttling_result("cpu.throttled.package", view.throttled_package, view, "package")


def detect_frequency_cap(view: CpuRuleInput) -> RuleResult:
    """The maximum frequency of CPUs is lower than at the agent's start, or was below the hardware's maximum
    then already.

    Source: ``cpu*/cpufreq/scaling_max_freq`` against itself at start, and against ``cpuinfo_max_freq`` [kHz].
    """
    cores = view.cpu_facts
    online = view.cpus if isinstance(view.online, Missing) else view.cpus & view.online
    if fallen := _format_caps(cores.capped_since_start, online, "at start"):
        return Finding("cpu.capped", Severity.DEGRADED, fallen)
    for cpu, why in cores.cap_lost.items():
        if online >> cpu & 1:
            return RuleInputUnreadable(f"cpu{cpu}/cpufreq/scaling_max_freq", why)
    if held := _format_caps(cores.capped_before_start, online, "possible"):
        return Finding("cpu.capped", Severity.INFO, held)
    return OK if cores.cap_known & view.cpus else RuleNotApplicable("the CPUs have no frequency scaling")


def _format_caps(caps: tuple[FrequencyCap, ...], online: CpuSet, when: str) -> str:
    """Describe the MAX_CAPS_LISTED lowest frequency caps of online CPUs, in the order of the CPUs.

    The text is empty if no online CPU has a cap.

    Args:
        when: Words for the frequency that the cap is compared with: ``at start`` or ``possible``.
    """
    affected = sorted((next(cpu_numbers(cap.cpus & online)), cap) for cap in caps if cap.cpus & online)
    lowest = sorted((cap for _, cap in affected), key=lambda cap: cap.khz / max(cap.possible_khz, 1))
    lowest = lowest[:MAX_CAPS_LISTED]
    texts = [
        f"{format_cpu_set(cap.cpus & online)} capped at {_ghz(cap.khz)}, {_ghz(cap.possible_khz)} {when}"
        for _, cap in affected
        if cap in lowest
    ]
    if rest := sum((cap.cpus & online).bit_count() for _, cap in affected if cap not in lowest):
        texts.append(f"and {rest} more")
    return "; ".join(texts)


def _ghz(khz: int) -> str:
    return f"{khz / 1e6:.7g} GHz"


_cpu_rule = partial(
    Rule, severity=Severity.DEGRADED, blame=Blame.CONFIGURATION, source="cpus", repair=Repair.NONE
)
"""Constructor of a ``Rule`` for CPUs; defaults: ``degraded``, blame on the configuration, no repair."""
SPEED_RULES: Final = (
    _cpu_rule(
        code="cpu.throttled.core",
        blame=Blame.HARDWARE,
        source="throttle",
        sampler_reads=(SamplerField.NODE_THROTTLE_CORE,),
        threshold="10 events in 60 s (throttle.events, throttle.window)",
        why="the CPUs run slower than specified",
        advice="check fans, heat sinks and inlet temperature",
        repair=Repair.INSPECT_HARDWARE,
        evaluate=detect_core_throttling,
        counts_growth=True,
        limit_in_view="throttle_events",
        try_it="in a copy of sysfs (--sysfs-root), add 10 to cpu0/thermal_throttle/core_throttle_count",
    ),
    _cpu_rule(
        code="cpu.throttled.package",
        blame=Blame.HARDWARE,
        source="throttle",
        sampler_reads=(SamplerField.NODE_THROTTLE_PACKAGE,),
        threshold="10 events in 60 s (throttle.events, throttle.window)",
        why="the whole socket runs slower than specified",
        advice="check fans, heat sinks and inlet temperature",
        repair=Repair.INSPECT_HARDWARE,
        evaluate=detect_package_throttling,
        counts_growth=True,
        limit_in_view="throttle_events",
        try_it="in a copy of sysfs (--sysfs-root), add 10 to cpu0/thermal_throttle/package_throttle_count",
    ),
    _cpu_rule(
        code="cpu.capped",
        source="cores",
        threshold="lower than at start; info if it was below the hardware's maximum at start already",
        why="the CPUs run slower than others that are offered as equal",
        advice="find out what caps them (power profile, thermal daemon, BMC), then write the value of "
        "cpufreq/cpuinfo_max_freq to cpufreq/scaling_max_freq",
        evaluate=detect_frequency_cap,
        probation_ns=CAP_HELD_NS,
        try_it="echo 1000000 > /sys/devices/system/cpu/cpu1/cpufreq/scaling_max_freq",
    ),
)


def detect_machine_check(view: CpuRuleInput) -> RuleResult:
    """A CPU has reported a hardware error that it could not correct, since boot.

    The finding stays until the next boot. Errors that firmware reports without a location are
    node.machine_check.

    Source: row ``MCE`` of ``/proc/interrupts`` [exceptions]; lines of the kernel log.
    """
    if affected := view.machine_checks & view.cpus:
        evidence = f"uncorrected machine check on {format_cpu_set(affected)} since boot"
        since = view.fault_since(KernelLogCode.MACHINE_CHECK, affected)
        return Finding("cpu.machine_check", Severity.UNHEALTHY, evidence, since=since)
    counting = view.cpu_facts.machine_check_readers
    if isinstance(counting, int):
        return OK
    if counting.absence is Absence.UNREADABLE:
        return RuleInputUnreadable("MCE of /proc/interrupts", counting)
    return no_log_lines_result(view.log_state)


def detect_corrected_machine_checks(view: CpuRuleInput) -> RuleResult:
    """A CPU had more corrected machine checks than the limit allows, within the window.

    Source: lines of the kernel log that name the CPU.
    """
    limits = view.limits
    if affected := view.corrected & view.cpus:
        count, window = limits.correctable_errors, format_duration(limits.correctable_window_s)
        evidence = f"at least {count} corrected machine checks on {format_cpu_set(affected)} in {window}"
        return Finding("cpu.machine_check.corrected", Severity.DEGRADED, evidence)
    return no_log_lines_result(view.log_state)


def _lockup_result(view: CpuRuleInput, found: Finding, locked: CpuSet, line: KernelLogCode) -> RuleResult:
    if affected := locked & view.cpus:
        evidence = f"{found.evidence} on {format_cpu_set(affected)}"
        return found._replace(evidence=evidence, since=view.fault_since(line, affected))
    return no_log_lines_result(view.log_state)


def detect_hard_lockup(view: CpuRuleInput) -> RuleResult:
    """A CPU has not handled interrupts for ten seconds or more.

    Source: lines of the kernel log, from the NMI watchdog.
    """
    found = Finding("cpu.lockup.hard", Severity.UNHEALTHY, "hard lockup")
    return _lockup_result(view, found, view.hard_lockups, KernelLogCode.HARD_LOCKUP)


def detect_soft_lockup(view: CpuRuleInput) -> RuleResult:
    """One task in the kernel has kept a CPU for twenty seconds or more.

    Source: lines of the kernel log, from the watchdog.
    """
    found = Finding("cpu.lockup.soft", Severity.DEGRADED, "soft lockup")
    return _lockup_result(view, found, view.soft_lockups, KernelLogCode.SOFT_LOCKUP)


FAULT_RULES: Final = (
    _cpu_rule(
        code="cpu.machine_check",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="cores",
        threshold="1 machine check since boot",
        why="data was lost or a program was killed, and the faulty part is still in use",
        advice="drain the node; read the mce and EDAC lines of the kernel log and the BMC's event log; "
        "replace the part, then boot",
        repair=Repair.REPLACE_HARDWARE,
        evaluate=detect_machine_check,
        try_it="echo '<0>mce: [Hardware Error]: CPU 1: Machine Check Exception: 5 Bank 4: b200000000070f0f' "
        "> /dev/kmsg",
    ),
    _cpu_rule(
        code="cpu.machine_check.corrected",
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold="24 machine checks of one CPU in 1 d (errors.correctable, errors.window)",
        why="frequent corrected errors often precede uncorrectable ones",
        advice="read the mce lines of the kernel log; plan a replacement before errors are uncorrectable",
        repair=Repair.INSPECT_HARDWARE,
        evaluate=detect_corrected_machine_checks,
        try_it="for i in $(seq 24); do echo '<6>mce: [Hardware Error]: CPU 1: Machine Check: 0 Bank 5: "
        "9c00000000010090' > /dev/kmsg; done",
    ),
    _cpu_rule(
        code="cpu.lockup.hard",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"1 lockup in the last {format_duration(LOCKUP_HELD_S)}",
        why="nothing runs on the CPU any more, and what waits for it hangs",
        advice="reboot the node; if it recurs, check for firmware updates and machine checks",
        repair=Repair.REBOOT_NODE,
        evaluate=detect_hard_lockup,
        try_it="echo '<0>watchdog: Watchdog detected hard LOCKUP on cpu 1' > /dev/kmsg",
    ),
    _cpu_rule(
        code="cpu.lockup.soft",
        blame=Blame.DRIVER,
        source="kmsg",
        threshold=f"1 lockup in the last {format_duration(LOCKUP_HELD_S)}",
        why="no other task gets the CPU: a driver or the kernel spins, or the hypervisor took the CPU away",
        advice="read the stack in the kernel log: the function at its top spins",
        evaluate=detect_soft_lockup,
        try_it="echo '<0>watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [cat:123]' > /dev/kmsg",
    ),
)


NUMA_CPU_LIST: Final = "node{}/cpulist"


def detect_offline_cpus(view: CpuRuleInput) -> RuleResult:
    """CPUs that should be online are offline.

    Source: ``/sys/devices/system/cpu/online`` against the CPUs at start, or as configured or declared.
    """
    if isinstance(view.online, Missing):
        return RuleInputUnreadable("cpu/online", view.online)
    if view.node and isinstance(view.node.cpus, Missing):
        return RuleInputUnreadable(NUMA_CPU_LIST.format(view.node.numa_node), view.node.cpus)
    gone = view.expected_online.cpus & ~view.online
    if not gone:
        return OK
    expected, origin = view.expected_online
    evidence = f"{format_cpu_set(gone)} offline, {origin}: {format_cpus(expected)}"
    return Finding("cpu.offline", Severity.UNHEALTHY, evidence, _online_advice(gone))


def _online_advice(cpus: int) -> str:
    """Return the advice for setting CPUs online. It names the path of a single CPU, or the numbers of
    several."""
    single = cpus.bit_count() == 1
    path = f"/sys/devices/system/cpu/cpu{format_cpus(cpus) if single else '<N>'}/online"
    cpus_text = "" if single else f" of {format_cpu_set(cpus)}"
    return f"write 1 to {path}{cpus_text}; if that fails, check for machine checks"


def detect_missing_cpus(view: CpuRuleInput) -> RuleResult:
    """A driver declares CPUs that the machine does not have.

    Source: ``/sys/devices/system/cpu/present``.
    """
    if isinstance(view.present, Missing):
        return RuleInputUnreadable("cpu/present", view.present)
    absent = view.cpus & ~view.present
    if not absent:
        return OK
    do = "does" if absent.bit_count() == 1 else "do"
    evidence = f"{format_cpu_set(absent)} {do} not exist, declared: {format_cpus(view.cpus)}"
    return Finding("cpu.missing", Severity.UNHEALTHY, evidence)


def detect_wrong_numa_node(view: CpuRuleInput) -> RuleResult:
    """Declared CPUs are on another NUMA node than their driver declares.

    CPUs that have never been online belong to no known NUMA node; cpu.offline covers them.

    Source: ``/sys/devices/system/node/node*/cpulist``.
    """
    if view.declared is None or view.declared.numa is None:
        return RuleNotApplicable("no NUMA node is declared")
    number = view.declared.numa
    declared = f"declared: NUMA node {number}"
    nodes = {node.numa_node: node.cpus for node in view.nodes}
    if nodes and number not in nodes:
        return Finding("cpu.numa", Severity.UNHEALTHY, f"NUMA node {number} does not exist, {declared}")
    elsewhere = [
        f"{format_cpu_set(view.cpus & cpus)} on NUMA node {node}"
        for node, cpus in nodes.items()
        if node != number and isinstance(cpus, int) and view.cpus & cpus
    ]
    if elsewhere:
        return Finding("cpu.numa", Severity.UNHEALTHY, f"{', '.join(elsewhere)}, {declared}")
    own = nodes.get(number, NEVER_READ)
    return RuleInputUnreadable(NUMA_CPU_LIST.format(number), own) if isinstance(own, Missing) else OK


def detect_lost_isolation(view: CpuRuleInput) -> RuleResult:
    """CPUs that should be isolated are not: the kernel schedules other tasks on them.

    Source: ``/sys/devices/system/cpu/isolated`` against the CPUs at start, or as declared.
    """
    if isinstance(view.isolated, Missing):
        return missing_reading_result(
            "cpu/isolated", view.isolated, "the kernel does not report which CPUs are isolated"
        )
    not_isolated = view.expected_isolated.cpus & ~view.isolated
    if not not_isolated:
        return OK
    expected, basis = view.expected_isolated
    evidence = f"{format_cpu_set(not_isolated)} not isolated, {basis}: {format_cpus(expected)}"
    return Finding("cpu.isolation", Severity.DEGRADED, evidence)


def detect_smt_change(view: CpuRuleInput) -> RuleResult:
    """Simultaneous multithreading was switched on or off since the agent started.

    Source: ``/sys/devices/system/cpu/smt/active`` against itself at start.
    """
    now, start = view.smt, view.smt_start
    if isinstance(now, Missing):
        return missing_reading_result("smt/active", now, "the kernel does not report the state of SMT")
    if now == start:
        return OK
    return Finding("cpu.smt", Severity.INFO, "SMT on, off at start" if now else "SMT off, on at start")


def detect_shared_cores(view: CpuRuleInput) -> RuleResult:
    """Declared CPUs share physical cores with online CPUs outside the device.

    Source: ``cpu*/topology/core_cpus_list``.
    """
    cores = view.cpu_facts
    online = ~0 if isinstance(view.online, Missing) else view.online
    inside = outside = 0
    if cores.core_siblings:
        for cpu in cpu_numbers(view.cpus & online):
            if others := cores.core_siblings.get(cpu, 0) & online & ~view.cpus:
                inside |= 1 << cpu
                outside |= others
    if outside:
        share = "shares a core" if outside.bit_count() == 1 else "share cores"
        evidence = f"{format_cpu_set(outside)} {share} with {format_cpus(inside)}"
        return Finding("cpu.shared_core", Severity.INFO, evidence)
    for cpu, why in cores.core_siblings_lost.items():
        if view.cpus >> cpu & 1:
            return RuleInputUnreadable(f"cpu{cpu}/topology/core_cpus_list", why)
    return (
        OK
        if cores.core_siblings_known & view.cpus
        else RuleNotApplicable("the kernel does not report which CPUs share cores")
    )


_OFFLINE: Final = _cpu_rule(
    code="cpu.offline",
    severity=Severity.UNHEALTHY,
    sampler_reads=(SamplerField.CPU_ONLINE, SamplerField.NODE_CPUS),
    threshold="any CPU that was online at start, or that the configuration or a driver names",
    why="a claim may hold the CPU; its threads now run on CPUs of other claims",
    advice="write 1 to /sys/devices/system/cpu/cpu<N>/online; if that fails, check for machine checks",
    evaluate=detect_offline_cpus,
    try_it="echo 0 > /sys/devices/system/cpu/cpu1/online",
)
_ISOLATION: Final = _cpu_rule(
    code="cpu.isolation",
    sampler_reads=(SamplerField.CPU_ISOLATED,),
    threshold="any CPU that was isolated at start, or that a driver declares to be",
    why="other tasks run on CPUs that a workload expects to have alone",
    advice="name the CPUs in isolcpus= on the kernel's command line and boot, or make their cpuset partition "
    "isolated again",
    evaluate=detect_lost_isolation,
    try_it="in devices.d, declare CPUs with isolated = true that are not in /sys/devices/system/cpu/isolated",
)
_SMT: Final = _cpu_rule(
    code="cpu.smt",
    severity=Severity.INFO,
    source="cores",
    threshold="another state than at start",
    why="half of the CPUs are gone, or every CPU shares its core",
    advice="write on, or off, to /sys/devices/system/cpu/smt/control",
    evaluate=detect_smt_change,
    try_it="echo off > /sys/devices/system/cpu/smt/control",
)
_DECLARED_ONLY: Final = (
    _cpu_rule(
        code="cpu.missing",
        severity=Severity.UNHEALTHY,
        sampler_reads=(SamplerField.CPU_ONLINE,),
        threshold="any declared CPU that the machine does not have",
        why="the driver offers CPUs that do not exist",
        advice="compare the declaration with /sys/devices/system/cpu/present and have the driver correct it",
        evaluate=detect_missing_cpus,
        try_it="in devices.d, declare CPUs that the machine does not have",
    ),
    _cpu_rule(
        code="cpu.numa",
        severity=Severity.UNHEALTHY,
        sampler_reads=(SamplerField.NODE_CPUS,),
        threshold="any declared CPU on another NUMA node, or a NUMA node that does not exist",
        why="claims are placed by NUMA node: their memory and devices would be on another NUMA node",
        advice="compare the declaration with lscpu and have the driver correct it",
        evaluate=detect_wrong_numa_node,
        try_it="in devices.d, declare CPUs with the number of a NUMA node that they are not on",
    ),
    _cpu_rule(
        code="cpu.shared_core",
        severity=Severity.INFO,
        source="cores",
        threshold="any online CPU outside the device on one of its cores",
        why="a task on the other thread of a core slows the device down",
        advice="declare whole cores: lscpu -e lists the CPUs of each core",
        evaluate=detect_shared_cores,
        try_it="in devices.d, declare one of two CPUs that share a core",
    ),
)

CPU_RULES: Final = (_OFFLINE, *FAULT_RULES, *SPEED_RULES, _ISOLATION, _SMT)
"""Rules for the CPUs of a NUMA node."""
DECLARED_CPU_RULES: Final = (_OFFLINE, *_DECLARED_ONLY, *FAULT_RULES, *SPEED_RULES, _ISOLATION)
"""Rules for CPUs that drivers declare. cpu.smt is left out: cpu.shared_core and cpu.offline cover its
effect."""
