"""Known facts about single CPUs: frequency caps, shared physical cores, machine checks, lockups.

The facts are stored as sets of CPUs. They are computed again only when a sample or the kernel log changes.
"""

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, KernelLogState
from agent.health.kernel_log.latch import next_line_window
from agent.health.rate_window import RateWindow, grown_since, repeat_last_value
from agent.model.cpuset import CpuSet
from agent.model.machine_samples import PerCpuSample
from agent.model.reading import NEVER_READ, Absence, Missing, Reading
from agent.model.time import NS, Instant

NO_CPUFREQ_ERRNOS: Final = frozenset({errno.ENOENT, errno.ENODEV})
"""Error numbers with which cpufreq files fail after the cpufreq driver was unloaded: no cap applies any
more."""


class FrequencyCap(NamedTuple):
    """CPUs whose maximum frequency is capped at the same value."""

    cpus: CpuSet
    khz: int
    """Maximum frequency of the CPUs now [kHz]."""
    possible_khz: int
    """Maximum frequency at the agent's start, or of the hardware if the CPUs were capped before [kHz]."""


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """Known facts about single CPUs from sysfs and procfs: frequency caps, shared physical cores, machine
    checks."""

    samples: tuple[PerCpuSample, ...] = ()
    """Samples of all CPUs from which the facts were derived, to detect a change."""
    start_khz: Mapping[int, int] = field(default_factory=dict)
    """Maximum frequency at the agent's first reading, by CPU [kHz]."""
    cap_known: CpuSet = 0
    """CPUs whose maximum frequency can be read."""
    capped_since_start: tuple[FrequencyCap, ...] = ()
    """CPUs whose maximum frequency is lower than at the agent's start."""
    capped_before_start: tuple[FrequencyCap, ...] = ()
    """CPUs whose maximum frequency was below the hardware's maximum at the agent's start already."""
    cap_lost: Mapping[int, Missing] = field(default_factory=dict)
    """Reason why the maximum frequency can no longer be read, by CPU."""
    core_siblings_known: CpuSet = 0
    """CPUs whose siblings on the same physical core are known."""
    core_siblings: Mapping[int, CpuSet] = field(default_factory=dict)
    """CPUs of the same physical core, by CPU; a CPU that is alone on its core is left out."""
    core_siblings_lost: Mapping[int, Missing] = field(default_factory=dict)
    machine_checked: CpuSet = 0
    """CPUs with machine-check exceptions since boot, including CPUs that went offline since; without those
    of a broadcast."""
    machine_check_readers: Reading = NEVER_READ
    """Number of CPUs whose count of machine checks can be read; Missing if there is none."""


def next_cpu_facts(before: CpuFacts, samples: tuple[PerCpuSample, ...]) -> CpuFacts:
    """Return the known facts about CPUs after new samples; the same object if no sample changed."""
    if samples == before.samples:
        return before
    caps = {sample.cpu: sample.cap_khz for sample in samples if isinstance(sample.cap_khz, int)}
    start = {**caps, **before.start_khz}
    core_of = {sample.cpu: sample.core for sample in samples if isinstance(sample.core, int)}
    by_core: dict[int, CpuSet] = {}
    for cpu, core in core_of.items():
        by_core[core] = by_core.get(core, 0) | 1 << cpu
    return CpuFacts(
        samples=samples,
        start_khz=start,
        cap_known=_cpu_set(caps),
        capped_since_start=_group_caps(
            {cpu: (khz, start[cpu]) for cpu, khz in caps.items() if khz < start[cpu]}
        ),
        capped_before_start=_group_caps(
            {
                sample.cpu: (caps[sample.cpu], sample.max_khz)
                for sample in samples
                if isinstance(sample.max_khz, int)
                if sample.cpu in caps and start[sample.cpu] <= caps[sample.cpu] < sample.max_khz
            }
        ),
        cap_lost={
            cpu: why
            for cpu, why in _unreadable_values({sample.cpu: sample.cap_khz for sample in samples}).items()
            if why.errno not in NO_CPUFREQ_ERRNOS
        },
        core_siblings_known=_cpu_set(core_of),
        core_siblings={cpu: by_core[core] for cpu, core in core_of.items() if by_core[core] != 1 << cpu},
        core_siblings_lost=_unreadable_values({sample.cpu: sample.core for sample in samples}),
        machine_checked=before.machine_checked
        | (0 if has_broadcast_check(samples) else _cpu_set(_cpus_with_checks(samples))),
        machine_check_readers=_machine_check_counts([sample.machine_checks for sample in samples]),
    )


def _cpus_with_checks(samples: tuple[PerCpuSample, ...]) -> set[int]:
    return {cpu.cpu for cpu in samples if isinstance(cpu.machine_checks, int) and cpu.machine_checks}


def has_broadcast_check(samples: tuple[PerCpuSample, ...]) -> bool:
    """Return whether all CPUs counted a machine check: x86 without LMCE interrupts all CPUs for the error of
    one part, so that the counts do not name it. Up to half of them (SMT) were set online after that."""
    checked = len(_cpus_with_checks(samples))
    if checked < 2:
        return False
    unchecked = sum(cpu.machine_checks == 0 for cpu in samples)
    return unchecked == 0 or (checked > 2 and unchecked <= checked)


def _cpu_set(cpus: Mapping[int, int] | set[int]) -> CpuSet:
    found = 0
    for cpu in cpus:
        found |= 1 << cpu
    return found


def _unreadable_values(readings: Mapping[int, Reading]) -> Mapping[int, Missing]:
    return {
        cpu: reading
        for cpu, reading in readings.items()
        if isinstance(reading, Missing) and reading.absence is Absence.UNREADABLE
    }


def _group_caps(khz_of_cpu: Mapping[int, tuple[int, int]]) -> tuple[FrequencyCap, ...]:
    """Return one frequency cap for each group of CPUs with equal frequencies.

    Args:
        khz_of_cpu: Present maximum frequency, and the maximum frequency that is possible, by CPU [kHz].
    """
    same: dict[tuple[int, int], CpuSet] = {}
    for cpu, khz in khz_of_cpu.items():
        same[khz] = same.get(khz, 0) | 1 << cpu
    return tuple(FrequencyCap(cpus, *khz) for khz, cpus in same.items())


def _machine_check_counts(counts: list[Reading]) -> Reading:
    known = sum(isinstance(count, int) for count in counts)
    lost = (count for count in counts if isinstance(count, Missing) and count.absence is Absence.UNREADABLE)
    return known or next(lost, NEVER_READ)


MAX_CPUS: Final = 8192
LOCKUP_HELD_S: Final = 600
"""Time for which a lockup is reported after its last line [s]: the kernel repeats the line about every 20 s,
but does not log the end."""

_CPU: Final = re.compile(r"cpu([0-9]{1,4})")


class CpuLockup(NamedTuple):
    """Lockup of one CPU that the kernel log reported."""

    code: KernelLogCode
    cpu: int
    last_ns: int
    """CLOCK_MONOTONIC of the last kernel-log line about the lockup [ns]."""


@dataclass(frozen=True, slots=True)
class CpuLogFacts:
    """Faults of single CPUs that the kernel log has reported since boot. Lines that were not read are
    missing."""

    facts: Mapping[tuple[KernelLogCode, str], KernelLogFact] = field(default_factory=dict)
    """Kernel-log facts from which the CPUs' faults were derived, to detect a change."""
    machine_checks: CpuSet = 0
    began: Mapping[tuple[KernelLogCode, int], Instant] = field(default_factory=dict)
    """Time at which a CPU's fault of one code began, by code and CPU."""
    lockups: tuple[CpuLockup, ...] = ()
    corrected: Mapping[int, RateWindow] = field(default_factory=dict)
    """Window over corrected machine checks, by CPU. Lines that name no CPU are left out: they repeat other
    lines, which are counted."""


def next_cpu_log_facts(
    before: CpuLogFacts, log: KernelLogState, window_s: int, evaluated_ns: int, now: Instant
) -> CpuLogFacts:
    """Return the faults of CPUs that the kernel log reports; the same object if the log is unchanged.

    Args:
        window_s: Window in which corrected machine checks are counted [s].
        evaluated_ns: CLOCK_MONOTONIC of the last evaluation [ns].
    """
    if log.facts is before.facts:
        return before
    window_ns = window_s * NS
    checks = 0
    lockups: list[CpuLockup] = []
    began: dict[tuple[KernelLogCode, int], Instant] = {}
    corrected: dict[int, RateWindow] = {}
    for fact in log.facts.values():
        if (cpu := _parse_cpu(fact.location)) is None:
            continue
        began[fact.code, cpu] = fact.since
        match fact.code:
            case KernelLogCode.MACHINE_CHECK:
                checks |= 1 << cpu
            case KernelLogCode.SOFT_LOCKUP | KernelLogCode.HARD_LOCKUP:
                lockups.append(CpuLockup(fact.code, cpu, fact.last.mono_ns))
            case KernelLogCode.MACHINE_CHECK_CORRECTED:
                known = repeat_last_value(before.corrected.get(cpu, ()), evaluated_ns, window_ns)
                corrected[cpu] = next_line_window(known, fact, now.mono_ns, window_ns)
            case _:
                pass
    return CpuLogFacts(log.facts, checks, began, tuple(lockups), corrected)


def recently_locked_cpus(facts: CpuLogFacts, code: KernelLogCode, now: Instant) -> CpuSet:
    """Return the CPUs that had a lockup in the last ``LOCKUP_HELD_S`` seconds.

    Args:
        code: Kind of the lockup: hard or soft.
    """
    cpus = 0
    for lockup in facts.lockups:
        if lockup.code is code and now.mono_ns - lockup.last_ns < LOCKUP_HELD_S * NS:
            cpus |= 1 << lockup.cpu
    return cpus


def often_corrected_cpus(facts: CpuLogFacts, errors: int, window_s: int, now: Instant) -> CpuSet:
    """Return the CPUs with at least ``errors`` corrected machine checks in the last ``window_s`` seconds."""
    since_ns = now.mono_ns - window_s * NS
    cpus = 0
    for cpu, window in facts.corrected.items():
        if grown_since(window, since_ns) >= errors:
            cpus |= 1 << cpu
    return cpus


def _parse_cpu(location: str) -> int | None:
    match = _CPU.fullmatch(location)
    return int(match[1]) if match and int(match[1]) < MAX_CPUS else None
