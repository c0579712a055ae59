"""What the kernel log says of CPUs, and how often it said so of late.

A line that is written is no reading: it cannot be read again, and it is never taken back. What is told once
counts for as long as its rule says.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.health.kernel_log.counts import times_told
from agent.health.kernel_log.values import LogCode, LogFact, LogPast
from agent.health.rate_window import RateWindow, grown_since, is_flat
from agent.model.cpuset import CpuSet
from agent.model.time import NS, Instant

MOST_CPUS: Final = 8192
LOCKUP_HELD_S: Final = 600
"""The kernel says it again while it lasts, every 20 s or so; that it is over it does not say."""

_CPU: Final = re.compile(r"cpu([0-9]{1,4})")


class Lockup(NamedTuple):
    """A CPU that did not come back in time."""

    code: LogCode
    cpu: int
    last_ns: int


@dataclass(frozen=True, slots=True)
class CpuLogFacts:
    """What the log has said of CPUs since boot, as far as it was read."""

    facts: Mapping[tuple[LogCode, str], LogFact] = field(default_factory=dict)
    """What the rest was made of."""
    checks: CpuSet = 0
    """CPUs with an uncorrected machine check."""
    lockups: tuple[Lockup, ...] = ()
    corrected: Mapping[int, RateWindow] = field(default_factory=dict)
    """By CPU, its corrected machine checks. Lines that name no CPU are left out: they repeat what is told of
    CPUs, or of memory modules, which have counts of their own."""


def listen(before: CpuLogFacts, log: LogPast, window_s: int, looked_ns: int, now: Instant) -> CpuLogFacts:
    """What is told after a look.

    Args:
        window_s: How far back corrected machine checks count.
        looked_ns: When the last look was.
    """
    if log.facts is before.facts:
        return before
    window_ns = window_s * NS
    checks = 0
    lockups: list[Lockup] = []
    corrected: dict[int, RateWindow] = {}
    for fact in log.facts.values():
        if (cpu := _cpu_of(fact.place)) is None:
            continue
        match fact.code:
            case LogCode.MACHINE_CHECK:
                checks |= 1 << cpu
            case LogCode.SOFT_LOCKUP | LogCode.HARD_LOCKUP:
                lockups.append(Lockup(fact.code, cpu, fact.last.mono_ns))
            case LogCode.MACHINE_CHECK_CORRECTED:
                known = is_flat(before.corrected.get(cpu, ()), looked_ns, window_ns)
                corrected[cpu] = times_told(known, fact, now.mono_ns, window_ns)
            case _:
                pass
    return CpuLogFacts(log.facts, checks, tuple(lockups), corrected)


def locked(told: CpuLogFacts, code: LogCode, now: Instant) -> CpuSet:
    """The CPUs of whose lockup the log told a short while ago."""
    cpus = 0
    for one in told.lockups:
        if one.code is code and now.mono_ns - one.last_ns < LOCKUP_HELD_S * NS:
            cpus |= 1 << one.cpu
    return cpus


def often_corrected(told: CpuLogFacts, errors: int, window_s: int, now: Instant) -> CpuSet:
    """The CPUs with so many corrected machine checks in the window, or more."""
    since_ns = now.mono_ns - window_s * NS
    cpus = 0
    for cpu, history in told.corrected.items():
        if grown_since(history, since_ns) >= errors:
            cpus |= 1 << cpu
    return cpus


def _cpu_of(place: str) -> int | None:
    match = _CPU.fullmatch(place)
    return int(match[1]) if match and int(match[1]) < MOST_CPUS else None
