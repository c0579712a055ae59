"""Facts about single CPUs, stored as CPU sets: from core samples, and from the kernel log.

The facts are recomputed only when a sample or the kernel log changes, so that rules have little to do on
hosts with hundreds of CPUs.
"""

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.health.kernel_log.latch import next_line_counts
from agent.health.kernel_log.values import LogCode, LogFact, LogState
from agent.health.rate_window import RateWindow, extended, grown_since
from agent.model.cpuset import CpuSet
from agent.model.machine import CoreSample
from agent.model.reading import NEVER_READ, Absence, Missing, Reading
from agent.model.time import NS, Instant

UNSCALED: Final = frozenset({errno.ENOENT, errno.ENODEV})
"""Errors when cpufreq files are read after the cpufreq driver was unloaded: no cap applies to the CPU any
more."""


class FrequencyCap(NamedTuple):
    """CPUs whose maximum frequency is capped."""

    cpus: CpuSet
    khz: int
    """Maximum frequency now [kHz]."""
    possible_khz: int
    """Maximum frequency at the agent's start; for CPUs that were capped before the start, the hardware's
    maximum [kHz]."""


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """Facts about all CPUs that were ever online."""

    samples: tuple[CoreSample, ...] = ()
    """Samples from which the facts were derived."""
    start_khz: Mapping[int, int] = field(default_factory=dict)
    """Maximum frequency at the first reading, by CPU [kHz]."""
    cap_known: CpuSet = 0
    """CPUs whose maximum frequency is known."""
    capped_since_start: tuple[FrequencyCap, ...] = ()
    """CPUs whose maximum frequency is lower than at the agent's start."""
    capped_before_start: tuple[FrequencyCap, ...] = ()
    """CPUs whose maximum frequency is, as at the agent's start, below the hardware's maximum."""
    cap_lost: Mapping[int, Missing] = field(default_factory=dict)
    """Reason why the maximum frequency can no longer be read, by CPU."""
    core_known: CpuSet = 0
    """CPUs for which the CPUs of the same core are known."""
    sharing: Mapping[int, CpuSet] = field(default_factory=dict)
    """CPUs on the same core, by CPU; a CPU that is alone on its core is left out."""
    core_lost: Mapping[int, Missing] = field(default_factory=dict)
    """Reason why the CPUs of the same core can no longer be read, by CPU."""
    machine_checked: CpuSet = 0
    """CPUs with machine-check exceptions since boot. No CPU leaves the set: going offline does not undo the
    exception.
    """
    machine_check_counts: Reading = NEVER_READ
    """Number of CPUs with a readable count of machine checks, or the reason why there is none."""


def core_facts(before: CoreFacts, samples: tuple[CoreSample, ...]) -> CoreFacts:
    """Return the facts that the core samples show; costs one comparison if no sample changed."""
    if samples == before.samples:
        return before
    caps = {sample.cpu: sample.cap_khz for sample in samples if isinstance(sample.cap_khz, int)}
    start = {**caps, **before.start_khz}
    core_of = {sample.cpu: sample.core for sample in samples if isinstance(sample.core, int)}
    by_core: dict[int, CpuSet] = {}
    for cpu, core in core_of.items():
        by_core[core] = by_core.get(core, 0) | 1 << cpu
    return CoreFacts(
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
            for cpu, why in _unreadable({sample.cpu: sample.cap_khz for sample in samples}).items()
            if why.errno not in UNSCALED
        },
        core_known=_cpu_set(core_of),
        sharing={cpu: by_core[core] for cpu, core in core_of.items() if by_core[core] != 1 << cpu},
        core_lost=_unreadable({sample.cpu: sample.core for sample in samples}),
        machine_checked=before.machine_checked
        | _cpu_set(
            {
                sample.cpu
                for sample in samples
                if isinstance(sample.machine_checks, int) and sample.machine_checks
            }
        ),
        machine_check_counts=_machine_check_counts([sample.machine_checks for sample in samples]),
    )


def _cpu_set(cpus: Mapping[int, int] | set[int]) -> CpuSet:
    found = 0
    for cpu in cpus:
        found |= 1 << cpu
    return found


def _unreadable(readings: Mapping[int, Reading]) -> Mapping[int, Missing]:
    return {
        cpu: reading
        for cpu, reading in readings.items()
        if isinstance(reading, Missing) and reading.absence is Absence.UNREADABLE
    }


def _group_caps(khz_of_cpu: Mapping[int, tuple[int, int]]) -> tuple[FrequencyCap, ...]:
    """Return one cap for all CPUs with the same maximum frequency and the same possible frequency."""
    same: dict[tuple[int, int], CpuSet] = {}
    for cpu, khz in khz_of_cpu.items():
        same[khz] = same.get(khz, 0) | 1 << cpu
    return tuple(FrequencyCap(cpus, *khz) for khz, cpus in same.items())


def _machine_check_counts(counts: list[Reading]) -> Reading:
    """Return the number of CPUs with a readable count of machine checks, or why there is none; a CPU without
    a column is offline."""
    known = sum(isinstance(count, int) for count in counts)
    lost = (count for count in counts if isinstance(count, Missing) and count.absence is Absence.UNREADABLE)
    return known or next(lost, NEVER_READ)


MAX_CPUS: Final = 8192
LOCKUP_HELD_S: Final = 600
"""Time for which a lockup counts after its last line [s]. The kernel repeats the line about every 20 s, but
logs no end.
"""

_CPU: Final = re.compile(r"cpu([0-9]{1,4})")


class Lockup(NamedTuple):
    """CPU that the kernel log reported as locked up."""

    code: LogCode
    cpu: int
    last_ns: int


@dataclass(frozen=True, slots=True)
class CpuLogFacts:
    """Facts about CPUs from the kernel log since boot, as far as the log was read."""

    facts: Mapping[tuple[LogCode, str], LogFact] = field(default_factory=dict)
    """Kernel-log facts from which this record was derived."""
    machine_checks: CpuSet = 0
    """CPUs with an uncorrected machine check."""
    lockups: tuple[Lockup, ...] = ()
    corrected: Mapping[int, RateWindow] = field(default_factory=dict)
    """Window over corrected machine checks, by CPU. Lines that name no CPU are left out: they repeat lines
    about CPUs or memory modules, which are counted separately.
    """


def next_log_facts(
    before: CpuLogFacts, log: LogState, window_s: int, evaluated_ns: int, now: Instant
) -> CpuLogFacts:
    """Return the CPU facts of the kernel log after an evaluation.

    Args:
        window_s: Window over which corrected machine checks count.
        evaluated_ns: Time of the last evaluation.
    """
    if log.facts is before.facts:
        return before
    window_ns = window_s * NS
    checks = 0
    lockups: list[Lockup] = []
    corrected: dict[int, RateWindow] = {}
    for fact in log.facts.values():
        if (cpu := _cpu_of(fact.location)) is None:
            continue
        match fact.code:
            case LogCode.MACHINE_CHECK:
                checks |= 1 << cpu
            case LogCode.SOFT_LOCKUP | LogCode.HARD_LOCKUP:
                lockups.append(Lockup(fact.code, cpu, fact.last.mono_ns))
            case LogCode.MACHINE_CHECK_CORRECTED:
                known = extended(before.corrected.get(cpu, ()), evaluated_ns, window_ns)
                corrected[cpu] = next_line_counts(known, fact, now.mono_ns, window_ns)
            case _:
                pass
    return CpuLogFacts(log.facts, checks, tuple(lockups), corrected)


def locked_up(facts: CpuLogFacts, code: LogCode, now: Instant) -> CpuSet:
    """Return the CPUs with a lockup of the kind ``code`` (hard or soft) in the last ``LOCKUP_HELD_S``."""
    cpus = 0
    for lockup in facts.lockups:
        if lockup.code is code and now.mono_ns - lockup.last_ns < LOCKUP_HELD_S * NS:
            cpus |= 1 << lockup.cpu
    return cpus


def frequently_corrected(facts: CpuLogFacts, errors: int, window_s: int, now: Instant) -> CpuSet:
    """Return the CPUs with at least ``errors`` corrected machine checks in the window."""
    since_ns = now.mono_ns - window_s * NS
    cpus = 0
    for cpu, window in facts.corrected.items():
        if grown_since(window, since_ns) >= errors:
            cpus |= 1 << cpu
    return cpus


def _cpu_of(location: str) -> int | None:
    match = _CPU.fullmatch(location)
    return int(match[1]) if match and int(match[1]) < MAX_CPUS else None
