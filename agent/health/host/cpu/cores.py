"""What the samples of single CPUs come to: their caps, their cores, their machine checks, as sets of CPUs.

Made anew only when a sample changes, so that rules, which run in every look, have little to do on a host
with hundreds of CPUs.
"""

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.model.cpuset import CpuSet
from agent.model.machine import CoreSample
from agent.model.reading import NEVER_READ, Absence, Missing, Reading

UNSCALED: Final = frozenset({errno.ENOENT, errno.ENODEV})
"""The driver of cpufreq was unloaded: nobody caps the CPU any more."""


class Cap(NamedTuple):
    """CPUs that may not run as fast as they could."""

    cpus: CpuSet
    khz: int
    """What they may."""
    could_khz: int
    """What they might at start; of those that have been capped since before that, what they are made for."""


@dataclass(frozen=True, slots=True)
class Cores:
    """All CPUs that were ever online."""

    samples: tuple[CoreSample, ...] = ()
    """What the rest was made of."""
    start_khz: Mapping[int, int] = field(default_factory=dict)
    """By CPU, what it might when it was first seen."""
    scaled: CpuSet = 0
    """CPUs whose cap is known."""
    fallen: tuple[Cap, ...] = ()
    """Capped since then."""
    held: tuple[Cap, ...] = ()
    """Capped before."""
    cap_lost: Mapping[int, Missing] = field(default_factory=dict)
    """By CPU, why its cap can no longer be read."""
    placed: CpuSet = 0
    """CPUs whose core is known."""
    sharing: Mapping[int, CpuSet] = field(default_factory=dict)
    """By CPU, all that share its core; CPUs alone on a core are left out."""
    core_lost: Mapping[int, Missing] = field(default_factory=dict)
    """By CPU, why its core can no longer be read."""
    checked: CpuSet = 0
    """CPUs that have taken a machine-check exception since boot. None ever leaves it: what a CPU that goes
    offline has counted still happened."""
    checks: Reading = NEVER_READ
    """How many CPUs count them, or why none does."""


def digest(before: Cores, samples: tuple[CoreSample, ...]) -> Cores:
    """What the samples come to. Costs a comparison when nothing changed."""
    if samples == before.samples:
        return before
    caps = {one.cpu: one.cap_khz for one in samples if isinstance(one.cap_khz, int)}
    start = {**caps, **before.start_khz}
    core_of = {one.cpu: one.core for one in samples if isinstance(one.core, int)}
    by_core: dict[int, CpuSet] = {}
    for cpu, core in core_of.items():
        by_core[core] = by_core.get(core, 0) | 1 << cpu
    return Cores(
        samples=samples,
        start_khz=start,
        scaled=_set(caps),
        fallen=_caps({cpu: (khz, start[cpu]) for cpu, khz in caps.items() if khz < start[cpu]}),
        held=_caps(
            {
                one.cpu: (caps[one.cpu], one.max_khz)
                for one in samples
                if isinstance(one.max_khz, int)
                if one.cpu in caps and start[one.cpu] <= caps[one.cpu] < one.max_khz
            }
        ),
        cap_lost={
            cpu: why
            for cpu, why in _lost({one.cpu: one.cap_khz for one in samples}).items()
            if why.errno not in UNSCALED
        },
        placed=_set(core_of),
        sharing={cpu: by_core[core] for cpu, core in core_of.items() if by_core[core] != 1 << cpu},
        core_lost=_lost({one.cpu: one.core for one in samples}),
        checked=before.checked
        | _set({one.cpu for one in samples if isinstance(one.machine_checks, int) and one.machine_checks}),
        checks=_counting([one.machine_checks for one in samples]),
    )


def _set(cpus: Mapping[int, int] | set[int]) -> CpuSet:
    found = 0
    for cpu in cpus:
        found |= 1 << cpu
    return found


def _lost(readings: Mapping[int, Reading]) -> Mapping[int, Missing]:
    return {
        cpu: reading
        for cpu, reading in readings.items()
        if isinstance(reading, Missing) and reading.absence is Absence.UNREADABLE
    }


def _caps(of: Mapping[int, tuple[int, int]]) -> tuple[Cap, ...]:
    """CPUs of which the same is to be said, together."""
    same: dict[tuple[int, int], CpuSet] = {}
    for cpu, khz in of.items():
        same[khz] = same.get(khz, 0) | 1 << cpu
    return tuple(Cap(cpus, *khz) for khz, cpus in same.items())


def _counting(counts: list[Reading]) -> Reading:
    """One file counts for all: that a CPU has no column is only that it is offline."""
    known = sum(isinstance(count, int) for count in counts)
    lost = (one for one in counts if isinstance(one, Missing) and one.absence is Absence.UNREADABLE)
    return known or next(lost, NEVER_READ)
